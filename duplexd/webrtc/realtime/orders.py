"""What the protocol core orders of whoever carries it, besides facts for the engine."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd.units import Ticks
from duplexd.webrtc.realtime.formats import WireIn


class Feed(msgspec.Struct, frozen=True):
    """The person's sound as it came, int16 at the wire's rate: into the line, in its order."""

    pcm: NDArray[np.int16]
    wire: WireIn


class EndTurn(msgspec.Struct, frozen=True):
    """Behind everything that was fed so far the person's turn ends."""

    key: str


class ClearInput(msgspec.Struct, frozen=True):
    """What was fed and is not part of a turn yet is to be forgotten."""


class Cut(msgspec.Struct, frozen=True):
    """The reply that lives ends here: at `position` of the output timeline; None: where the ear is known to be."""

    position: Ticks | None


class Heard(msgspec.Struct, frozen=True):
    """The client says that its ear stands at `position` of the output timeline."""

    position: Ticks


class Listening(msgspec.Struct, frozen=True):
    """How the line takes a voice."""

    interrupts: bool
    threshold: float


class Goodbye(msgspec.Struct, frozen=True):
    """Everything is said; close, with this WebSocket code."""

    code: int
    reason: str


Order = Feed | EndTurn | ClearInput | Cut | Heard | Listening | Goodbye
