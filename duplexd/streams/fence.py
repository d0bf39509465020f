"""The fence book: which points of which lane have passed.

1. Fences of one lane pass in the order they were issued. Fences of two lanes have no order unless one waits.
2. A fence that a caller names (the executor names it after the work it ends) is greater than every one named before, so
   that work can only wait for what was issued earlier: no circle of waits can be built.
3. A fence the book issues itself is negative and can never be taken for a named one.
4. The book remembers only what is outstanding. A name that was skipped counts as passed; a name not yet reached raises.
5. Issuing is one thread's business. `passed` is a single look-up and may be asked from any thread.
"""

from __future__ import annotations

from collections import deque

from duplexd.errors import LedgerError
from duplexd.ids import FenceId


class FenceBook:
    """Outstanding fences of all lanes; bounded by what the lanes accept."""

    def __init__(self) -> None:
        self._outstanding: dict[FenceId, str] = {}
        self._order: dict[str, deque[FenceId]] = {}
        self._highest = 0
        self._lowest = 0

    def issue(self, lane: str, fence: FenceId | None = None) -> FenceId:
        """The next fence of a lane, under the caller's name if it gives one.

        Raises:  LedgerError when the name is not greater than every name before it.
        """
        if fence is None:
            self._lowest -= 1
            fence = FenceId(self._lowest)
        elif fence > self._highest:
            self._highest = fence
        else:
            raise LedgerError(f"fence {fence} of lane {lane} was named after fence {self._highest}; names only grow")
        self._outstanding[fence] = lane
        self._order.setdefault(lane, deque()).append(fence)
        return fence

    def passed(self, fence: FenceId) -> bool:
        """Whether all its lane was given up to this fence has ended. Raises LedgerError if it was never issued."""
        if fence > self._highest or fence < self._lowest or fence == 0:
            raise LedgerError(f"fence {fence} was never issued")
        return fence not in self._outstanding

    def mark_passed(self, fence: FenceId) -> None:
        """The lane got there. Raises LedgerError unless it is the lane's oldest outstanding fence."""
        lane = self._outstanding.get(fence)
        if lane is None or self._order[lane][0] != fence:
            raise LedgerError(f"fence {fence} cannot pass: lane {lane} has not got there, or it has passed before")
        self._order[lane].popleft()
        del self._outstanding[fence]

    def lane_of(self, fence: FenceId) -> str | None:
        """The lane an outstanding fence lies on; None once it has passed."""
        return self._outstanding.get(fence)

    def outstanding(self, lane: str) -> tuple[FenceId, ...]:
        """Fences of a lane that have not passed, oldest first."""
        return tuple(self._order.get(lane, ()))
