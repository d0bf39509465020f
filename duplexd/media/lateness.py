"""Lateness: how much later media arrives than the fastest lately. Jitter, and what was waited for it.

The clocks of sender and receiver share no origin, so the delay itself is unknown; its excess over the least one is not.
"""

from __future__ import annotations

from collections import deque

from duplexd.units import NANOS_PER_MS, Nanos, nanos_from_ticks, rtp_distance, ticks_from_ms

JUMP = ticks_from_ms(10_000)  #: a stream whose timestamps jump further has begun anew


class Lateness:
    """Of one stream with a 48 kHz clock. Bound: the last `kept` arrivals (500: ten seconds of 20 ms packets)."""

    def __init__(self, *, kept: int = 500) -> None:
        self._delays: deque[int] = deque(maxlen=kept)  #: ns, with an unknown constant in it
        self._newest: int | None = None
        self._media = 0  #: unwrapped timestamp of the newest arrival

    def note(self, rtp: int, now: Nanos) -> Nanos:
        """Media with RTP timestamp `rtp` was handed on at `now`: returns its excess over the least delay."""
        step = 0 if self._newest is None else rtp_distance(rtp, self._newest)
        if abs(step) > JUMP:
            self._delays.clear()
        self._newest = rtp
        self._media += step
        self._delays.append(now - nanos_from_ticks(self._media))
        return Nanos(self._delays[-1] - min(self._delays))

    def excess_ms(self) -> list[float]:
        """Milliseconds over the least delay, one an arrival."""
        least = min(self._delays, default=0)
        return [(delay - least) / NANOS_PER_MS for delay in self._delays]
