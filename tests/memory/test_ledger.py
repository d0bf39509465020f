"""The slot ledger against a plain model, and its rules one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duplexd.errors import LedgerError, StaleLease
from duplexd.ids import ChunkId, Epoch, FenceId, SessionId, SlotId
from duplexd.memory.classes import CacheClass
from duplexd.memory.layout import FieldSpec, PartitionKind, PartitionSpec
from duplexd.memory.ledger import Lease, Refusal, SlotLedger

ONE = SessionId(1)
TWO = SessionId(2)
SESSIONS = st.sampled_from([ONE, TWO, SessionId(3)])


def window(count: int = 6, *, session_slots: int = 0, shared_slots: int = 0) -> PartitionSpec:
    fields = (FieldSpec("k", (2,)),)
    return PartitionSpec(
        "window", PartitionKind.RING, count, fields, session_slots=session_slots, shared_slots=shared_slots
    )


def take(ledger: SlotLedger, label: CacheClass = CacheClass.CURRENT, owner: SessionId = ONE, chunk: int = 0) -> Lease:
    lease = ledger.lease(owner, label, chunk=ChunkId(chunk))
    assert lease is not None
    return lease


class SlotMachine(RuleBasedStateMachine):
    """Many sessions lease, commit, slide, discard and close while fences are pending."""

    COUNT, BOUND = 7, 4

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[Lease, tuple[SessionId, CacheClass]] = {}  # oldest first
        self.stale: list[Lease] = []
        self.waiting: dict[int, set[FenceId]] = {}  # retiring slot -> fences
        self.owner_of: dict[int, SessionId] = {}
        self.clean = set(range(self.COUNT))
        self.passed: set[FenceId] = set()
        self.issued: list[FenceId] = []
        spec = window(self.COUNT, session_slots=self.BOUND)
        self.ledger = SlotLedger(spec, passed=self.passed.__contains__, freed=self.on_freed)

    def on_freed(self, partition: str, slots: Sequence[int]) -> None:
        assert partition == "window"
        for slot in slots:
            assert not self.waiting.get(slot), "freed while a fence guards it"
            assert slot not in {lease.slot for lease in self.live}, "freed while it is held"
            assert slot not in self.clean, "freed twice"
            self.clean.add(slot)
            self.waiting.pop(slot, None)

    def draw_after(self, data: st.DataObject) -> tuple[FenceId, ...]:
        """No fence, an old one, a new one or two: of any lane, passed or not."""
        fresh = [FenceId(len(self.issued) + 1), FenceId(len(self.issued) + 2)]
        chosen = data.draw(st.lists(st.sampled_from(self.issued + fresh), max_size=2, unique=True))
        self.issued += [fence for fence in fresh if fence not in self.issued and fence in chosen]
        self.issued.sort()
        return tuple(chosen)

    def let_go(self, lease: Lease, after: tuple[FenceId, ...]) -> None:
        self.owner_of[lease.slot] = self.live.pop(lease)[0]
        self.stale.append(lease)
        self.waiting[lease.slot] = set(after) - self.passed

    @rule(owner=SESSIONS, label=st.sampled_from(CacheClass))
    def lease(self, owner: SessionId, label: CacheClass) -> None:
        owned = sum(one == owner for one, _ in self.live.values())
        owned += sum(self.owner_of[slot] == owner for slot in self.waiting)
        free = self.COUNT - len(self.live) - len(self.waiting)
        lease = self.ledger.lease(owner, label, chunk=ChunkId(1), epoch=Epoch(2), stage="talk")
        if lease is None:
            expected = Refusal.SESSION_BOUND if owned >= self.BOUND else Refusal.PARTITION_FULL
            assert self.ledger.refusal is expected
            assert owned >= self.BOUND or not free
            return
        assert owned < self.BOUND
        assert free
        assert lease not in self.stale
        assert lease.slot in self.clean
        assert lease.slot not in self.waiting
        assert lease.slot not in {other.slot for other in self.live}
        self.clean.remove(lease.slot)
        self.live[lease] = (owner, label)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.live)))
        after = self.draw_after(data)
        if self.live[lease][1] is CacheClass.ANCHOR:
            with pytest.raises(LedgerError):
                self.ledger.discard(lease, after=after)
            return
        self.let_go(lease, after)
        self.ledger.discard(lease, after=after)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), pin=st.booleans())
    def relabel(self, data: st.DataObject, pin: bool) -> None:
        lease = data.draw(st.sampled_from(list(self.live)))
        owner, label = self.live[lease]
        allowed = {CacheClass.CURRENT, CacheClass.RECENT, CacheClass.INGEST} if pin else {CacheClass.CURRENT}
        act = self.ledger.pin if pin else self.ledger.commit
        if label not in allowed:
            with pytest.raises(LedgerError):
                act(lease)
            return
        act(lease)
        self.live[lease] = (owner, CacheClass.ANCHOR if pin else CacheClass.RECENT)

    @rule(owner=SESSIONS, keep=st.integers(0, 3), data=st.data())
    def slide(self, owner: SessionId, keep: int, data: st.DataObject) -> None:
        after = self.draw_after(data)
        recent = [lease for lease, held in self.live.items() if held == (owner, CacheClass.RECENT)]
        expected = recent[: max(0, len(recent) - keep)]
        for lease in expected:
            self.let_go(lease, after)

        assert self.ledger.slide(owner, keep, after=after) == expected

    @rule(owner=SESSIONS, data=st.data())
    def close(self, owner: SessionId, data: st.DataObject) -> None:
        after = self.draw_after(data)
        expected = [lease for lease, held in self.live.items() if held[0] == owner]
        for lease in expected:
            self.let_go(lease, after)

        assert self.ledger.close(owner, after=after) == expected

    @precondition(lambda self: set(self.issued) - self.passed)
    @rule(data=st.data())
    def fence_passes(self, data: st.DataObject) -> None:
        fence = data.draw(st.sampled_from(sorted(set(self.issued) - self.passed)))
        self.passed.add(fence)
        expected = sum(fences == {fence} for fences in self.waiting.values())
        for fences in self.waiting.values():
            fences.discard(fence)

        assert self.ledger.fence_passed(fence) == expected

    @invariant()
    def the_ledger_agrees_with_the_model(self) -> None:
        self.ledger.check()
        assert not any(not fences for fences in self.waiting.values())
        assert self.ledger.free_count == self.COUNT - len(self.live) - len(self.waiting)
        assert self.ledger.retiring_count == len(self.waiting)
        for owner in (ONE, TWO, SessionId(3)):
            expected = [(lease, held[1]) for lease, held in self.live.items() if held[0] == owner]
            assert expected == [(held.lease, held.label) for held in self.ledger.held(owner)]
        for lease in self.live:
            self.ledger.check_lease(lease)

    @invariant()
    def a_stale_lease_always_raises(self) -> None:
        for lease in self.stale:
            with pytest.raises(StaleLease):
                self.ledger.check_lease(lease)

    def teardown(self) -> None:
        for owner in (ONE, TWO, SessionId(3)):
            for lease in [lease for lease, held in self.live.items() if held[0] == owner]:
                self.let_go(lease, ())
            self.ledger.close(owner, after=None)
        for fence in set(self.issued) - self.passed:
            self.passed.add(fence)
            for fences in self.waiting.values():
                fences.discard(fence)
            self.ledger.fence_passed(fence)
        assert self.ledger.free_count == self.COUNT


SlotMachine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40, derandomize=True)
TestSlotMachine = SlotMachine.TestCase


def test_a_discarded_slot_waits_for_every_lane_that_may_write_it() -> None:
    ledger = SlotLedger(window(1))
    ledger.discard(take(ledger), after=(FenceId(4), FenceId(9)))
    assert ledger.lease(TWO, CacheClass.CURRENT) is None
    ledger.fence_passed(FenceId(9))
    assert ledger.lease(TWO, CacheClass.CURRENT) is None
    ledger.fence_passed(FenceId(4))

    assert ledger.lease(TWO, CacheClass.CURRENT) is not None


def test_a_fence_that_has_passed_holds_nothing_back() -> None:
    """The stage finished before the interruption was decided; its fence will not be reported again."""
    ledger = SlotLedger(window(1), passed=lambda fence: fence == 4)
    ledger.discard(take(ledger), after=FenceId(4))

    assert ledger.free_count == 1


@pytest.mark.parametrize("leave", ["slide", "close"])
def test_fences_given_as_an_iterator_guard_every_slot_that_leaves(leave: str) -> None:
    ledger = SlotLedger(window())
    for _ in range(3):
        ledger.commit(take(ledger))
    after = iter([FenceId(4)])
    gone = ledger.slide(ONE, 0, after=after) if leave == "slide" else ledger.close(ONE, after=after)

    assert (len(gone), ledger.retiring_count) == (3, 3)


def test_committing_moves_nothing() -> None:
    ledger = SlotLedger(window())
    lease = take(ledger)
    ledger.commit(lease)

    held = ledger.check_lease(lease)
    assert (held.lease, held.label) == (lease, CacheClass.RECENT)


def test_slots_are_found_by_session_chunk_epoch_and_stage() -> None:
    ledger = SlotLedger(window())
    leases = [
        ledger.lease(ONE, CacheClass.CURRENT, chunk=ChunkId(chunk), epoch=Epoch(epoch), stage=stage)
        for chunk, epoch, stage in [(1, 0, "talk"), (2, 0, "talk"), (2, 1, "refine")]
    ]
    ledger.lease(TWO, CacheClass.CURRENT, chunk=ChunkId(2))

    assert [leases[1], leases[2]] == [held.lease for held in ledger.find(ONE, chunk=ChunkId(2))]
    assert [leases[2]] == [held.lease for held in ledger.find(ONE, chunk=ChunkId(2), stage="refine")]
    assert leases[:2] == [held.lease for held in ledger.find(ONE, epoch=Epoch(0))]


def test_the_engine_is_bounded_by_what_it_shares() -> None:
    ledger = SlotLedger(window(6, session_slots=4, shared_slots=1))

    assert ledger.lease(None, CacheClass.ANCHOR) is not None
    assert ledger.lease(None, CacheClass.ANCHOR) is None
    assert ledger.refusal is Refusal.SESSION_BOUND


def test_a_full_partition_says_what_to_lower() -> None:
    ledger = SlotLedger(window(2))
    ledger.discard(take(ledger), after=FenceId(1))

    assert "session 2 needs 9 slots of window: 1 of 2 are free, 1 retiring" in str(ledger.full(TWO, 9))


def test_current_slots_do_not_slide() -> None:
    with pytest.raises(LedgerError, match="current slots do not slide"):
        SlotLedger(window()).slide(ONE, 0, label=CacheClass.CURRENT)


@pytest.mark.parametrize("slot", [-1, 6])
def test_a_lease_from_nowhere_is_stale(slot: int) -> None:
    with pytest.raises(StaleLease):
        SlotLedger(window()).check_lease(Lease("window", SlotId(slot), 1))


def test_check_finds_a_lost_slot() -> None:
    ledger = SlotLedger(window())
    ledger._free.pop()

    with pytest.raises(LedgerError, match="lost"):
        ledger.check()
