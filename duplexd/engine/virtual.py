"""Virtual time: a clock that jumps from one happening to the next, for worlds that are simulated."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

from duplexd.units import Nanos


class VirtualTime:
    """What happens when. Happenings of one moment come in the order in which they were put."""

    def __init__(self, now: Nanos = Nanos(1)) -> None:
        self.now = now
        self._heap: list[tuple[int, int, Callable[[], Any]]] = []
        self._serial = itertools.count()

    def at(self, when: int, happen: Callable[[], Any]) -> None:
        """`happen` is called at `when`, or now when that has passed."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._serial), happen))

    def next_at(self) -> int | None:
        """When the next thing happens; None when nothing does any more."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> Any:
        """Jump to the next happening and let it happen; returns what it returns."""
        at, _, happen = heapq.heappop(self._heap)
        self.pass_to(at)
        return happen()

    def pass_to(self, when: int) -> None:
        """Nothing happens until `when`. Time never goes back."""
        self.now = Nanos(max(self.now, when))
