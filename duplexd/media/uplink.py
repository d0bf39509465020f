"""Uplink: what lies between the person's last audible sample and the moment from which the engine counts.

The engine counts a turn's end from the arrival of the last block with voice. Known about the time before:

     last audible sample      end of its block          its packet is full      least delay       arrival
    ────────┴───── tail ─────────────┴──── filling ───────────┴── the network's ────┴──── late ───────┴──▶

1. `tail`: a detector lets go late, so the last blocks that count as voice hold little or none (measured: 40 ms).
2. `filling`: a sample leaves with its packet, when the last one of that has been spoken.
3. `late`: over the fastest packet lately; the least delay itself is half a round trip and the browser's own time.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd.units import INPUT_RATE, Nanos, Span, Ticks, ticks_from_samples

PIECE = 128  #: samples that are loud or quiet together
AUDIBLE = 0.03  #: of the loudest piece lately: -30 dB; what is quieter is the room (within 8 ms of the ends measured)
FADE = 0.99  #: of the loudest piece, a block: forgotten by half in two seconds
KEPT = 64  #: blocks with voice that are remembered; the engine may count from any of the last two seconds of voice


class Behind(msgspec.Struct, frozen=True):
    """How far behind the person's last audible sample a block with voice was taken."""

    tail: Ticks  #: from that sample to the end of the block
    filling: Ticks  #: from there to the end of the packet it came with
    late: Nanos  #: that packet's delay over the least


class Uplink:
    """Of one person's audio, block by block. Bound: the last `KEPT` blocks with voice."""

    def __init__(self) -> None:
        self._loudest = 0.0
        self._audible_until = Ticks(0)
        self._voiced: deque[tuple[Nanos, Behind]] = deque(maxlen=KEPT)

    def note(
        self, pcm: NDArray[np.float32], span: Span, *, voiced: bool, newest: Ticks, late: Nanos, now: Nanos
    ) -> None:
        """One block has been taken.

        Args:    pcm: float32 (512,). newest: end of the newest sample that has come. late: of the packet it came with,
                 over the fastest one. now: when it was taken, as the engine is told.
        """
        level = np.sqrt(np.square(pcm.reshape(-1, PIECE)).mean(axis=1))
        self._loudest = max(self._loudest * FADE, float(level.max()))
        loud = np.flatnonzero(level >= AUDIBLE * self._loudest)
        if len(loud) and self._loudest > 0:
            self._audible_until = Ticks(span.start + ticks_from_samples((int(loud[-1]) + 1) * PIECE, INPUT_RATE))
        if voiced:
            tail = Ticks(max(0, span.end - self._audible_until))
            self._voiced.append((now, Behind(tail, Ticks(max(0, newest - span.end)), late)))

    def behind(self, taken_at: Nanos) -> Behind | None:
        """What lay before the last block with voice that was taken then; None: there was none, or it is long ago."""
        return next((found for at, found in reversed(self._voiced) if at == taken_at), None)
