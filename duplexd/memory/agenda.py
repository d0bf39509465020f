"""A heap with lazy invalidation: what is due first, of things that change their minds.

Taking out only forgets; a stale entry is skipped when it surfaces. The heap is rebuilt when stale entries outnumber the
live ones and it is worth it: its size is bounded by twice the live entries or `slack`, and every change costs O(log n)
amortised.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

#: Below this the heap is not worth rebuilding.
SMALL = 32


class Agenda(Generic[Name]):
    """Names with keys, least key first; equal keys in the order in which they were put.

    Args:    slack: entries that are no reason to rebuild the heap, live or stale.
    """

    def __init__(self, *, slack: int = SMALL) -> None:
        self._slack = slack
        self._live: dict[Name, tuple[Any, int, Name]] = {}
        self._heap: list[tuple[Any, int, Name]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def entries_count(self) -> int:
        """Live and stale."""
        return len(self._heap)

    def put(self, name: Name, key: Any) -> None:
        """Give a name a key, in place of the one it had."""
        self._serial += 1
        entry = self._live[name] = (key, self._serial, name)
        heappush(self._heap, entry)
        if len(self._heap) > self._slack:
            self._bound()

    def remove(self, name: Name) -> None:
        """Removing what is not there is nothing."""
        if self._live.pop(name, None) is not None and len(self._heap) > self._slack:
            self._bound()

    def first(self) -> tuple[Any, int, Name] | None:
        """(key, serial, name) of the least, or None."""
        heap, live = self._heap, self._live
        # Identity, not equality: a name that was put again leaves an older entry behind.
        while heap and live.get(heap[0][2]) is not heap[0]:
            heappop(heap)
        return heap[0] if heap else None

    def lift(self) -> tuple[Any, int, Name]:
        """Take the first entry off the heap although it stays live, to see what is behind it; `lower` must follow."""
        return heappop(self._heap)

    def lower(self, entry: tuple[Any, int, Name]) -> None:
        """Put a lifted entry back, unless its name has another key by now, or none."""
        if self._live.get(entry[2]) is entry:
            heappush(self._heap, entry)

    def due(self, key: Any) -> Name | None:
        """Take out and return a name whose key is at most `key`; None when there is none."""
        entry = self.first()
        if entry is None or entry[0] > key:
            return None
        heappop(self._heap)
        del self._live[entry[2]]
        return entry[2]

    def _bound(self) -> None:
        """There are more entries than `slack`."""
        if len(self._heap) > 2 * len(self._live):
            self._heap = list(self._live.values())
            heapify(self._heap)
