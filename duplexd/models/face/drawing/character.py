"""Characters: how somebody looks and moves at rest, read from a TOML file. Drawing code knows no names."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Literal

import msgspec

from duplexd.errors import ConfigError, ModelError
from duplexd.models.face.identity import Identity

Point = tuple[float, float, float]  #: head space: x right, y down, z towards the viewer; half a face's width is 1
Colour = str  #: "#rrggbb"


class Colours(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    skin: Colour
    light: Colour  #: skin where the light falls
    shade: Colour  #: skin where it does not
    blush: Colour
    lips: Colour
    iris: Colour
    iris_light: Colour
    brows: Colour
    lashes: Colour
    hair: Colour
    hair_light: Colour
    hair_shade: Colour
    cloth: Colour
    cloth_shade: Colour
    background: tuple[Colour, Colour]  #: middle, edge


class Features(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Proportions; 1 is the usual."""

    cheeks: float = 1.0  #: width of the face at the cheekbones
    jaw: float = 1.0  #: width at the jaw
    chin: float = 1.0  #: length of the chin
    eyes: float = 1.0
    eye_gap: float = 1.0
    eye_tilt: float = 0.0  #: outer corners raised (+)
    lashes: float = 1.0
    brows: float = 1.0  #: thickness
    brow_height: float = 0.0  #: raised (+), in head space
    nose: float = 1.0
    lips: float = 1.0  #: fullness
    mouth: float = 1.0  #: width
    neck: float = 1.0
    shoulders: float = 1.0
    freckles: float = 0.0


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One piece of hair: a closed smooth outline and strands on it."""

    layer: Literal["back", "front"]
    points: tuple[Point, ...]
    colours: tuple[Literal["hair", "light", "shade"], Literal["hair", "light", "shade"]] = (
        "light",
        "hair",
    )  #: top, bottom
    strands: tuple[tuple[Point, ...], ...] = ()  #: guides of equal length, two at least; strands lie between them
    shine: float = 0.6  #: how much strands stand out
    curls: float = 0.0  #: bumps along the outline, in head space


class Extras(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    glasses: Colour = ""  #: of the frame; "": none
    earrings: Colour = ""
    stubble: float = 0.0
    collar: Literal["round", "shirt", "turtle", "v"] = "round"


class Character(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    title: str  #: a few words for whoever chooses
    colours: Colours
    identity: Identity = Identity()
    features: Features = Features()
    extras: Extras = Extras()
    hair: tuple[Lock, ...] = ()


_FOLDER = files("duplexd.models.face.drawing") / "characters"


def character_names() -> list[str]:
    """The characters that come with duplexd."""
    return sorted(entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir() if entry.name.endswith(".toml"))


def load_character(name: str) -> Character:
    """One that comes with duplexd, by name, or any other by the path of its TOML file.

    Raises:  ConfigError for a name that does not exist, or a file that does not describe a character.
    """
    if name in character_names():
        return _parse((_FOLDER / f"{name}.toml").read_bytes(), name)
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"no character {name!r}; there are {', '.join(character_names())}, or a TOML file")
    return _parse(path.read_bytes(), name)


def _parse(text: bytes, name: str) -> Character:
    try:
        character = msgspec.toml.decode(text, type=Character)
        character.identity.neutral()
    except (msgspec.ValidationError, msgspec.DecodeError, ModelError) as error:
        raise ConfigError(f"character {name}: {error}") from error
    for lock in character.hair:
        _check(lock, name)
    return character


def _check(lock: Lock, name: str) -> None:
    if len(lock.points) < 3:
        raise ConfigError(
            f"character {name}: a lock of hair has {len(lock.points)} points; an outline needs at least 3"
        )
    lengths = {len(guide) for guide in lock.strands}
    if lock.strands and (len(lock.strands) < 2 or len(lengths) != 1 or min(lengths) < 2):
        raise ConfigError(
            f"character {name}: a lock has guides of {sorted(lengths)} points; strands need two guides at least, "
            "of one length of two or more"
        )
