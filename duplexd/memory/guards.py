"""Guards: which slots or pages may still be written by work that has not finished.

1. A guarded index is not handed out, whoever let go of it and in whatever order.
2. Fences of two lanes have no order: an index guarded by two is unguarded once both have passed.
3. A fence that has passed guards nothing: its passing is not told again, so a guard on it would last for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from duplexd.errors import LedgerError
from duplexd.ids import FenceId

#: What must pass before something is reusable: one fence, several (of different lanes), or nothing.
After = FenceId | Iterable[FenceId] | None

#: Called with a partition and its slots (token slots for pages) at the moment they may be handed out again.
Freed = Callable[[str, Sequence[int]], None]

Passed = Callable[[FenceId], bool]


def none_passed(fence: FenceId) -> bool:
    """The default `passed`: right for an owner who never names a fence whose passing it has already reported."""
    return False


class Guards:
    """Fences per index. Its size is bounded by the indexes of the partition times the lanes that write it."""

    def __init__(self, passed: Passed) -> None:
        self._passed = passed
        self._fences: dict[int, set[FenceId]] = {}
        self._indexes: dict[FenceId, dict[int, None]] = {}
        self.fences = self._indexes.keys()  #: that guard something: few do, and every launch has one that passes

    def __contains__(self, index: int) -> bool:
        return index in self._fences

    def pending(self, after: After) -> tuple[FenceId, ...]:
        """The fences of `after` that have not passed."""
        if after is None:
            return ()
        fences = (FenceId(after),) if isinstance(after, int) else after
        return tuple(fence for fence in fences if not self._passed(fence))

    def guard(self, index: int, fences: Iterable[FenceId]) -> None:
        """Guard an index until every fence has passed; no fences, no guard."""
        for fence in fences:
            self._fences.setdefault(index, set()).add(fence)
            self._indexes.setdefault(fence, {})[index] = None

    def fence_passed(self, fence: FenceId) -> list[int]:
        """Take a passed fence away; returns the indexes nothing guards any more, in the order they were guarded."""
        unguarded = []
        for index in self._indexes.pop(fence, ()):
            self._fences[index].discard(fence)
            if not self._fences[index]:
                del self._fences[index]
                unguarded.append(index)
        return unguarded

    def rename(self, old: FenceId, new: FenceId) -> None:
        """What `old` guards, `new` guards from now on: a fence that stood for a launch nobody had named yet."""
        for index in self._indexes.pop(old, ()):
            self._fences[index].discard(old)
            self.guard(index, [new])

    def check(self) -> None:
        """Raises LedgerError unless both directions say the same."""
        forward = {(index, fence) for index, fences in self._fences.items() for fence in fences}
        backward = {(index, fence) for fence, indexes in self._indexes.items() for index in indexes}
        if forward != backward or not all(self._fences.values()):
            raise LedgerError(f"guards disagree: {sorted(forward ^ backward)}")
