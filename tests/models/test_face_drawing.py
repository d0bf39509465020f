"""The portrait: the same motion is the same picture, and every channel can be seen."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from duplexd.errors import ConfigError, ModelError
from duplexd.models.face.drawing.character import Character, character_names, load_character
from duplexd.models.face.drawing.picture import Studio
from duplexd.models.face.drawing.portrait import Portrait, _Lips
from duplexd.models.face.motion import CHANNELS, Channel, Motion

SIZE = 192


@pytest.fixture(scope="module")
def mira() -> Portrait:
    return Portrait(load_character("mira"), size=SIZE)


def rest(character: Character, **changes: float) -> Motion:
    motion = character.identity.neutral().copy()
    for name, change in changes.items():
        motion[Channel[name.upper()]] += change
    return motion


def drawn(portrait: Portrait, **changes: float) -> npt.NDArray[np.int16]:
    return portrait.draw(rest(portrait.character, **changes))[:, :, :3].astype(np.int16)


def test_there_are_three_characters_at_least() -> None:
    assert len(character_names()) >= 3
    looks = [
        Portrait(load_character(name), size=64).draw(rest(load_character(name))).mean((0, 1))
        for name in character_names()
    ]
    assert min(np.abs(a - b).max() for i, a in enumerate(looks) for b in looks[:i]) > 5


def test_the_same_motion_is_the_same_picture(mira: Portrait) -> None:
    """Whatever was drawn before: no part remembers."""
    first = drawn(mira, opening=0.4)
    drawn(mira, yaw=0.3, lid_left=-1.0, smile=0.8)

    assert np.array_equal(first, drawn(mira, opening=0.4))


@pytest.mark.parametrize("channel", [channel.name.lower() for channel in Channel])
def test_every_channel_can_be_seen(mira: Portrait, channel: str) -> None:
    """Tongue and teeth are only seen in a mouth that is a little open, pressed lips only in one that is shut."""
    amount = -0.6 if channel.startswith("lid") else 0.25 if channel in ("yaw", "pitch", "roll") else 0.6
    base = {} if channel in ("press", "opening") else {"opening": 0.3}
    still, moved = drawn(mira, **base), drawn(mira, **base, **{channel: amount})

    assert (np.abs(still - moved).max(2) > 12).sum() > 12, f"{channel} changes nothing one could see"


@pytest.mark.parametrize("name", character_names())
def test_a_wide_mouth_shows_a_tongue_at_rest(name: str) -> None:
    """Below the dark of an open mouth lies something red and not dark, above the lower teeth."""
    portrait = Portrait(load_character(name))

    def red(**changes: float) -> int:
        """Pixels of a tongue's colour on the middle line of the opening."""
        line = drawn(portrait, yaw=0, sway=0, **changes)[330:420, 246:266]
        blue, green, red_ = line[:, :, 0], line[:, :, 1], line[:, :, 2]
        dark = red_ < 90
        below = np.cumsum(dark, 0) >= 3
        white = (green > 190).cumsum(0) > 0
        return int((below & ~dark & (red_ - green > 60) & (red_ < 200) & (blue < 130) & ~white).sum())

    assert red(opening=0.75, jaw=0.7, lift=0.2) > 30


def test_rounded_lips_are_round() -> None:
    """Two thirds of the way to a corner the lower lip hangs nearly as low as in its middle: it has no point."""
    motion = dict.fromkeys(Channel, 0.0) | {Channel.OPENING: 0.24, Channel.PUCKER: 0.9, Channel.WIDTH: -0.5}
    lips = _Lips(motion, 1.0, 1.0)
    corner, side, middle = (float(lips.outer_bottom[index, 1]) for index in (0, 1, 3))

    assert (side - corner) / (middle - corner) > 0.72


def test_a_shut_mouth_hides_teeth_and_tongue(mira: Portrait) -> None:
    assert np.array_equal(drawn(mira, teeth=0.0), drawn(mira, teeth=0.9, tongue=0.9))


def test_shut_lids_hide_the_iris(mira: Portrait) -> None:
    """With both eyes shut it cannot be seen where they look."""
    shut = {"lid_left": -1.0, "lid_right": -1.0}

    assert np.array_equal(drawn(mira, **shut), drawn(mira, gaze_x=0.9, **shut))


@pytest.mark.parametrize("name", character_names())
def test_every_picture_is_opaque(name: str) -> None:
    """Whoever's face, at rest, looking aside, and in a motion that no face makes: a hole shows as white in a PNG."""
    portrait = Portrait(load_character(name))
    aside = rest(portrait.character, gaze_x=0.8, gaze_y=-0.5)
    for motion in (rest(portrait.character), aside, np.full(CHANNELS, 50.0, np.float32)):
        picture = portrait.draw(motion)

        assert picture.shape == (512, 512, 4)
        assert int(picture[:, :, 3].min()) == 255


def test_eyes_that_look_to_the_right_stand_further_right_in_the_picture(mira: Portrait) -> None:
    """The dark of both irises and pupils, left eye and right, moves towards the right edge."""
    rows = slice(round(0.40 * SIZE), round(0.55 * SIZE))

    def dark_at(gaze: float) -> float:
        dark = 255 - drawn(mira, gaze_x=gaze)[rows].mean(2)
        weight = np.clip(dark - 120, 0, None)
        return float((weight * np.arange(SIZE)).sum() / weight.sum())

    assert dark_at(0.6) > dark_at(0.0) + 0.5 > dark_at(-0.6) + 1.0


def test_pictures_are_i420_of_limited_range() -> None:
    studio = Studio(size=128, portraits_max=1)
    white = studio.i420(np.full((128, 128, 4), 255, np.uint8))
    red = studio.i420(np.broadcast_to(np.array([0, 0, 255, 255], np.uint8), (128, 128, 4)).copy())

    assert white.shape == (192, 128)
    assert abs(int(white[:128].mean()) - 235) <= 1
    assert abs(int(red[:128].mean()) - 82) <= 2  # BT.601
    assert abs(int(red[160:].mean()) - 240) <= 2  # V


def test_portraits_are_kept_up_to_a_bound() -> None:
    studio = Studio(size=64, portraits_max=2)
    kept = [studio.portrait(name) for name in ("mira", "theo", "mira", "suna", "mira")]

    assert kept[0] is kept[2] is kept[4]
    assert studio.portrait("theo") is not kept[1]


def test_a_character_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="no character 'nobody'; there are mira, suna, theo"):
        load_character("nobody")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("[features]", "[features]\nwings = 2", "wings"),
        ("rest = {", "rest = { jaw = 0.1,", "'jaw' is no channel of identity"),
        ('layer = "back"', 'layer = "top"', "layer"),
    ],
    ids=["unknown feature", "wrong channel", "unknown layer"],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    from duplexd.models.face.drawing import character

    text = (Path(character.__file__).parent / "characters" / "mira.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=complaint):
        load_character(str(path))


def test_a_machine_that_cannot_draw_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """libEGL is missing on a fresh server: a sentence with the packages, not a traceback of a loader."""
    name = "duplexd.models.face.drawing.library"
    monkeypatch.setitem(sys.modules, "skia", None)
    monkeypatch.delitem(sys.modules, name)

    with pytest.raises(ModelError, match="libegl1 libgl1"):
        importlib.import_module(name)
