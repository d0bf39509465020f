"""Who the character is: a name, a line of instruction and a few example turns that stand before every conversation.

A small model takes its manner from turns it seems to have said: without them it lectures, claims to be a novelist and
forgets its name, whatever the instruction says (scripts/persona/persona-evaluation.md has the figures).
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec

from duplexd.errors import ConfigError


class Exchange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One example: what the person said and what the character answered."""

    person: str
    character: str


class Persona(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str  #: what the character calls itself
    turns: tuple[Exchange, ...] = ()  #: oldest first
    came: Exchange | None = None  #: stands for: the person has come into view; None: the thinker is not told
    left: Exchange | None = None  #: stands for: they cannot be seen any more
    system: str = ""  #: instruction before the turns; may be empty


def load_persona(path: Path | None = None) -> Persona:
    """A persona file (TOML), or the one that comes with the package.

    Raises:  ConfigError when the file is missing or is no persona.
    """
    try:
        data = path.read_bytes() if path else resources.files(__package__).joinpath("persona.toml").read_bytes()
        return msgspec.toml.decode(data, type=Persona)
    except OSError as error:
        raise ConfigError(f"cannot read the persona {path}: {error}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{path or 'persona.toml'} is no persona: {error}") from error
