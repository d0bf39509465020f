"""A table of token slots against a plain list, and snapshots that stay as they were whatever happens to the table."""

from __future__ import annotations

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from duplexd.memory.table import SlotTable

PIECE = 4
SLOTS = st.lists(st.integers(0, 99), max_size=11)


def written(pieces: tuple[bytes, ...]) -> list[int]:
    return array("q", b"".join(pieces)).tolist()


class TableMachine(RuleBasedStateMachine):
    """Two tables, one a branch of the other now and then; every snapshot ever taken is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.slots = SlotTable(PIECE), list[int]()
        self.other, self.other_slots = SlotTable(PIECE), list[int]()
        self.taken: list[tuple[tuple[bytes, ...], list[int]]] = []

    @rule(slots=SLOTS)
    def extend(self, slots: list[int]) -> None:
        self.table.extend(slots)
        self.slots += slots

    @rule(at=st.integers(0, 40))
    def cut(self, at: int) -> None:
        at = min(at, len(self.slots))
        self.table.cut(at)
        del self.slots[at:]

    @rule(at=st.integers(0, 40), tokens=st.integers(0, 6))
    def take_out(self, at: int, tokens: int) -> None:
        at = min(at, len(self.slots))

        assert self.table.take_out(at, tokens).tolist() == self.slots[at : at + tokens]
        del self.slots[at : at + tokens]

    @rule(at=st.integers(0, 40), slots=SLOTS)
    def put_in(self, at: int, slots: list[int]) -> None:
        at = min(at, len(self.slots))
        self.table.put_in(at, array("q", slots))
        self.slots[at:at] = slots

    @rule(at=st.integers(0, 40))
    def branch(self, at: int) -> None:
        at = min(at, len(self.slots))
        self.other, self.other_slots = self.table.branch(at), self.slots[:at]

    @rule()
    def swap(self) -> None:
        self.table, self.other = self.other, self.table
        self.slots, self.other_slots = self.other_slots, self.slots

    @rule()
    def snapshot(self) -> None:
        self.taken.append((self.table.snapshot(), list(self.slots)))

    @invariant()
    def they_agree(self) -> None:
        for table, slots in ((self.table, self.slots), (self.other, self.other_slots)):
            assert list(table) == slots
            assert table.between(1, 6).tolist() == slots[1:6]

    @invariant()
    def snapshots_stay(self) -> None:
        assert all(written(pieces) == slots for pieces, slots in self.taken)


TableMachine.TestCase.settings = settings(deadline=None, max_examples=80, stateful_step_count=30, derandomize=True)
TestTableMachine = TableMachine.TestCase


def test_snapshots_share_every_whole_piece_before_the_first_change() -> None:
    table = SlotTable(PIECE)
    table.extend(range(14))
    first = table.snapshot()
    table.extend([14])
    branch = table.branch(9)
    table.cut(10)
    table.extend([99, 99])
    later, branched = table.snapshot(), branch.snapshot()

    assert [len(piece) // 8 for piece in first] == [4, 4, 4, 2]
    assert [one is other for one, other in zip(first, later, strict=False)] == [True, True, False]
    assert [one is other for one, other in zip(first, branched, strict=False)] == [True, True, False]
    assert written(later) == [*range(10), 99, 99]
    assert written(branched) == list(range(9))
