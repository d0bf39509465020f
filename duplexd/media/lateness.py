"""Lateness: how much later media arrives than the fastest lately. Jitter, and what was waited for it.

The clocks of sender and receiver share no origin, so the delay itself is unknown; its excess over the least one is not.
Arrivals are kept one by one as well, for a bench that knows when a packet was lost or when a sound was made.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd.units import NANOS_PER_MS, RTP_WRAP, Nanos, nanos_from_ticks, rtp_distance, ticks_from_ms

JUMP = ticks_from_ms(10_000)  #: a stream whose timestamps jump further has begun anew
ARRIVALS_MAX = 1500  #: half a minute
LOUD = 650  #: int16; -34 dBFS, well above a silent microphone and soon reached by a sound that begins sharply


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """One piece of sound, as it was handed on."""

    rtp: int  #: u32, 1/48000 s
    at: Nanos
    loud: int  #: first sample at 16 kHz above LOUD; -1: none


class Lateness:
    """Of one stream with a 48 kHz clock. Bound: the last `kept` arrivals (500: ten seconds of 20 ms packets), and
    ARRIVALS_MAX one by one.
    """

    def __init__(self, *, kept: int = 500) -> None:
        self.arrivals: deque[Arrival] = deque(maxlen=ARRIVALS_MAX)
        self._kept = kept
        self._delays: deque[int] = deque(maxlen=kept)  #: ns, with an unknown constant in it
        #: Of them, those that are less than all after them, with their numbers: the first is the least of all. It is
        #: looked for once a packet, and each packet comes and goes here once.
        self._least: deque[tuple[int, int]] = deque()
        self._count = 0
        self._newest: int | None = None
        self._media = 0  #: unwrapped timestamp of the newest arrival

    def note(self, rtp: int, now: Nanos, pcm: NDArray[np.int16] | None = None) -> Nanos:
        """Media with RTP timestamp `rtp` was handed on at `now`: returns its excess over the least delay.

        Args:    pcm: its sound, int16 at 16 kHz.
        """
        step = 0 if self._newest is None else rtp_distance(rtp, self._newest)
        if abs(step) > JUMP:
            self._delays.clear()
            self._least.clear()
        self._newest = rtp
        self._media += step
        delay = now - nanos_from_ticks(self._media)
        self._delays.append(delay)
        self.arrivals.append(Arrival(rtp % RTP_WRAP, now, -1 if pcm is None else _first_loud(pcm)))
        return Nanos(delay - self._least_with(delay))

    def _least_with(self, delay: int) -> int:
        """The least delay of those kept, this newest one among them."""
        least, self._count = self._least, self._count + 1
        while least and least[-1][1] >= delay:
            least.pop()
        least.append((self._count, delay))
        if least[0][0] <= self._count - self._kept:
            least.popleft()
        return least[0][1]

    def excess_ms(self) -> list[float]:
        """Milliseconds over the least delay, one an arrival."""
        least = min(self._delays, default=0)
        return [(delay - least) / NANOS_PER_MS for delay in self._delays]


def _first_loud(pcm: NDArray[np.int16]) -> int:
    loud = (pcm > LOUD) | (pcm < -LOUD)
    return int(np.argmax(loud)) if loud.any() else -1
