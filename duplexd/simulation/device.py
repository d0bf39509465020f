"""Devices whose capacity the launches of several lanes share (DESIGN §4: overlap is not free).

1. A launch claims a share of its device. While all claims together stay within the capacity, each runs at full speed.
2. Beyond it all of them are stretched alike: processor sharing. Whoever ends gives its share back at that moment.
"""

from __future__ import annotations

from math import ceil

import msgspec

from duplexd.ids import WorkId
from duplexd.units import Nanos


class Running(msgspec.Struct):
    """One launch on a device."""

    share: float
    left: float  #: nanoseconds it would still take alone


class Device:
    """One device. `begin` launches, ask `next_end`, take what has ended with `ended`."""

    def __init__(self, name: str, *, capacity: float = 1.0) -> None:
        self.name = name
        self.capacity = capacity
        self.busy_ns = 0  #: during which at least one launch ran
        self._running: dict[WorkId, Running] = {}
        self._at = Nanos(0)

    def begin(self, work: WorkId, *, share: float, alone: Nanos, now: Nanos) -> None:
        """Args:    alone: how long it takes when nobody else is there."""
        self._advance(now)
        self._running[work] = Running(share, float(alone))

    def next_end(self) -> Nanos | None:
        """When the next launch ends if none begins before; None when nothing runs."""
        if not self._running:
            return None
        return Nanos(self._at + max(0, ceil(min(running.left for running in self._running.values()) * self._stretch)))

    def ended(self, now: Nanos) -> list[WorkId]:
        """Launches that have ended by `now`, in the order they began; they are forgotten."""
        self._advance(now)
        done = [work for work, running in self._running.items() if running.left < 1.0]
        for work in done:
            del self._running[work]
        return done

    @property
    def _stretch(self) -> float:
        return max(1.0, sum(running.share for running in self._running.values()) / self.capacity)

    def _advance(self, now: Nanos) -> None:
        if self._running:
            elapsed = (now - self._at) / self._stretch
            self.busy_ns += now - self._at
            for running in self._running.values():
                running.left -= elapsed
        self._at = now
