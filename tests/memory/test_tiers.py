"""Contexts of many sessions leave for host memory and come back: every token keeps its value, every page its owner."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duplexd.errors import LedgerError
from duplexd.ids import ContextId, FenceId, SessionId
from duplexd.memory.arena import Arena
from duplexd.memory.classes import CacheClass
from duplexd.memory.layout import ArenaLayout, FieldSpec, PartitionKind, PartitionSpec, host_partition
from duplexd.memory.ledger import Refusal, SlotLedger
from duplexd.memory.pages import Move, PageLedger
from duplexd.memory.tiers import Tiers

CURRENT, RECENT, INGEST, LONG_TERM = CacheClass.CURRENT, CacheClass.RECENT, CacheClass.INGEST, CacheClass.LONG_TERM
SESSIONS = [SessionId(number) for number in range(1, 6)]


def pages_of(count: int, *, session_slots: int = 0) -> PartitionSpec:
    fields = (FieldSpec("k", (2,), "float64", outer=(3,)), FieldSpec("v", (), "int64"))
    return PartitionSpec("pages", PartitionKind.PAGES, count, fields, 4, session_slots, 2)


class Memory:
    """Ledgers, an arena whose free slots are poison, and host memory; copies happen when they must, not before."""

    def __init__(self, *, pages: int, host: int, session_slots: int = 0) -> None:
        spec = pages_of(pages, session_slots=session_slots)
        images = host_partition(spec, host)
        self.arena = Arena(ArenaLayout([spec]))
        self.arena.fill_nan("pages", range(spec.rows))
        self.tiers = Tiers(self.arena, spec, images)
        self.host = SlotLedger(images)
        self.ledger = PageLedger(spec, freed=self.arena.fill_nan, host=self.host)
        self.copies: list[tuple[FenceId, bool, list[Move]]] = []
        self._fence = 0

    def fence(self) -> FenceId:
        self._fence += 1
        return FenceId(self._fence)

    def write(self, context: ContextId, values: Sequence[int]) -> None:
        """Write the newest tokens of a context."""
        where = self.slots(context)[-len(values) :]
        self.arena.field("pages", "k")[:, where] = torch.tensor(values, dtype=torch.float64)[None, :, None]
        self.arena.field("pages", "v")[where] = torch.tensor(values)

    def read(self, context: ContextId) -> list[int]:
        where = self.slots(context)
        keys, values = self.arena.field("pages", "k")[:, where], self.arena.field("pages", "v")[where]
        assert bool((keys == values[None, :, None]).all())
        return list(values.tolist())

    def slots(self, context: ContextId) -> list[int]:
        return array("q", self.ledger.slots(context)).tolist()

    def offload(self, context: ContextId, pages_max: int = 99) -> int:
        fence = self.fence()
        moves = self.ledger.offload(context, pages_max=pages_max, fence=fence)
        self.copies.append((fence, True, moves))
        return len(moves)

    def restore(self, context: ContextId) -> bool:
        fence = self.fence()
        moves = self.ledger.restore(context, fence=fence)
        if moves is not None:
            self.copies.append((fence, False, moves))
        return moves is not None

    def copy(self) -> None:
        """The copy lane runs its oldest order; its fence passes."""
        fence, out, moves = self.copies.pop(0)
        (self.tiers.offload if out else self.tiers.restore)(moves)
        self.ledger.fence_passed(fence)
        self.host.fence_passed(fence)

    def copy_all(self) -> None:
        while self.copies:
            self.copy()


class TierMachine(RuleBasedStateMachine):
    """Five sessions on memory for two: they grow, fork, advance, resume, cut, slide, leave and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(pages=14, host=9, session_slots=8)
        self.ledger = self.memory.ledger
        self.told: dict[ContextId, list[int]] = {}
        self.branches: dict[ContextId, ContextId] = {}
        self.serial = 0
        self.prompt = self.ledger.open(None)
        assert self.ledger.append(self.prompt, 5, INGEST)
        self.grow(self.prompt, 0, written=5)
        self.ledger.pin(self.prompt)

    def grow(self, context: ContextId, tokens: int, *, written: int = 0) -> None:
        values = [self.serial + index for index in range(tokens + written)]
        self.serial += len(values)
        self.memory.write(context, values)
        self.told.setdefault(context, []).extend(values)

    def some(self, data: st.DataObject) -> ContextId:
        return data.draw(st.sampled_from([context for context in self.told if context != self.prompt]))

    def idle(self, context: ContextId) -> bool:
        """No copy under way concerns it as far as its owner knows: all that was ordered has ended."""
        return not self.memory.copies

    @rule(session=st.sampled_from(SESSIONS))
    def open(self, session: SessionId) -> None:
        if any(self.ledger.owner(c) == session for c in self.told):
            return
        context = self.ledger.open(session, prefix=self.prompt)
        self.told[context] = list(self.told[self.prompt])

    @precondition(lambda self: len(self.told) > 1)
    @rule(data=st.data(), tokens=st.integers(1, 9), label=st.sampled_from([RECENT, INGEST, CURRENT]))
    def append(self, data: st.DataObject, tokens: int, label: CacheClass) -> None:
        context = self.some(data)
        if self.ledger.away_length(context):
            with pytest.raises(LedgerError, match="restore them first"):
                self.ledger.append(context, tokens, label)
            return
        if self.idle(context) and self.ledger.append(context, tokens, label):
            self.grow(context, tokens)

    @precondition(lambda self: len(self.told) > 1)
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        context = self.some(data)
        self.ledger.commit(context, len(self.told[context]))

    @precondition(lambda self: len(self.told) > 1)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        context = self.some(data)
        at = data.draw(st.integers(5, len(self.told[context])))
        self.ledger.cut(context, at, after=None)
        del self.told[context][at:]

    @precondition(lambda self: len(self.told) > 1)
    @rule(data=st.data())
    def slide(self, data: st.DataObject) -> None:
        context = self.some(data)
        drop = data.draw(st.integers(0, len(self.told[context]) - 5))
        self.ledger.commit(context, len(self.told[context]))
        self.ledger.slide(context, drop)
        del self.told[context][5 : 5 + drop]

    @precondition(lambda self: len(self.told) > 1)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        context = self.some(data)
        if context in self.branches.values() or context in self.branches or self.ledger.away_length(context):
            return
        at = data.draw(st.integers(5, len(self.told[context])))
        branch = self.ledger.fork(context, at)
        self.told[branch], self.branches[branch] = self.told[context][:at], context

    @precondition(lambda self: self.branches)
    @rule(data=st.data(), advance=st.booleans())
    def decide(self, data: st.DataObject, advance: bool) -> None:
        branch = data.draw(st.sampled_from(list(self.branches)))
        trunk = self.branches[branch]
        if advance and (self.ledger.away_length(branch) or self.ledger.away_length(trunk)):
            return
        del self.branches[branch]
        values = self.told.pop(branch)
        if advance:
            self.ledger.promote(branch, trunk, after=None)
            self.told[trunk] = values
        else:
            self.ledger.close(branch, after=None)

    @precondition(lambda self: len(self.told) > 1)
    @rule(data=st.data(), pages=st.integers(1, 4))
    def offload(self, data: st.DataObject, pages: int) -> None:
        context = self.some(data)
        wanted = min(pages, self.ledger.offloadable(context), self.memory.host.free_count)
        before = self.ledger.away_length(context)
        gone = self.memory.offload(context, pages)
        away = self.ledger.away_length(context)

        assert gone == wanted
        assert gone <= away - before <= 4 * gone
        assert [run.tokens for run in self.ledger.labels(context) if run.label is LONG_TERM] == [away] * bool(away)

    @precondition(lambda self: len(self.told) > 1)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        self.memory.restore(self.some(data))

    @precondition(lambda self: self.memory.copies)
    @rule()
    def copy(self) -> None:
        self.memory.copy()

    @precondition(lambda self: len(self.told) > 1)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        context = self.some(data)
        if context in self.branches.values():
            return
        self.branches.pop(context, None)
        self.ledger.close(context, after=None)
        del self.told[context]

    @invariant()
    def every_token_of_a_resident_context_is_what_was_written(self) -> None:
        if self.memory.copies:
            return  # Nobody reads before the fence of the copy has passed.
        for context, values in self.told.items():
            assert self.ledger.length(context) == len(values)
            if not self.ledger.away_length(context):
                assert self.memory.read(context) == values

    @invariant()
    def every_page_and_every_host_slot_has_one_owner_or_is_free(self) -> None:
        self.ledger.check()
        self.memory.host.check()
        held = sum(len(self.memory.host.held(session)) for session in SESSIONS)

        assert held + self.memory.host.free_count + self.memory.host.retiring_count == 9

    def teardown(self) -> None:
        for context in sorted(self.told, reverse=True):
            self.ledger.close(context, after=None)
        self.memory.copy_all()

        assert self.ledger.free_count == 14
        assert self.memory.host.free_count == 9


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.fixture
def memory() -> Memory:
    return Memory(pages=6, host=6)


def opened(memory: Memory, tokens: int, session: SessionId = SESSIONS[0], label: CacheClass = RECENT) -> ContextId:
    context = memory.ledger.open(session)
    assert memory.ledger.append(context, tokens, label)
    memory.write(context, range(tokens))
    return context


def test_the_suffix_leaves_before_the_prefix(memory: Memory) -> None:
    context = opened(memory, 12)
    memory.offload(context, 1)

    assert memory.ledger.away_length(context) == 4
    assert memory.ledger.labels(context)[-1] == (LONG_TERM, 4)


def test_a_page_is_free_only_when_its_copy_has_ended(memory: Memory) -> None:
    context = opened(memory, 12)
    memory.offload(context)

    assert memory.ledger.free_count == 3
    memory.copy_all()
    assert memory.ledger.free_count == 6


def test_another_session_takes_the_room_and_the_first_finds_its_tokens_again() -> None:
    """Memory for one context of 24 tokens, two sessions of 16 and 20."""
    memory = Memory(pages=6, host=9)
    first = opened(memory, 16)
    memory.offload(first)
    memory.copy_all()
    second = opened(memory, 20, SESSIONS[1])

    assert not memory.restore(first)
    assert memory.ledger.refusal is Refusal.PARTITION_FULL
    memory.offload(second)
    memory.copy_all()
    assert memory.restore(first)
    memory.copy_all()
    assert memory.read(first) == list(range(16))


def test_what_nobody_has_heard_yet_does_not_leave(memory: Memory) -> None:
    context = opened(memory, 8, label=CURRENT)

    assert memory.offload(context) == 0


def test_what_others_share_does_not_leave(memory: Memory) -> None:
    context = opened(memory, 8)
    memory.ledger.fork(context, 8)

    assert memory.offload(context) == 0


def test_a_full_host_lets_leave_what_it_can_hold() -> None:
    memory = Memory(pages=6, host=2)
    context = opened(memory, 16)

    assert memory.offload(context) == 2
    assert memory.ledger.away_length(context) == 8


def test_an_offloaded_context_is_cut_without_coming_back(memory: Memory) -> None:
    context = opened(memory, 16)
    memory.offload(context, 2)
    memory.copy_all()
    memory.ledger.cut(context, 10, after=None)
    memory.restore(context)
    memory.copy_all()

    assert memory.read(context) == list(range(10))
    assert memory.host.free_count == 6
