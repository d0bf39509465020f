"""Everything at once: sessions, windows, contexts, branches, host memory, and lanes that run as late as they may.

Bytes are real. Work is queued when the ledgers allow it and runs whenever Hypothesis says so, if its fences have
passed; what is freed is filled with NaN at that moment. Work that finds anything but what was written for it has found
a bug.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isnan

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duplexd.errors import LedgerError, StaleLease
from duplexd.ids import ChunkId, ContextId, Epoch, FenceId, SessionId
from duplexd.memory.arena import Arena
from duplexd.memory.classes import CacheClass
from duplexd.memory.layout import ArenaLayout, FieldSpec, PartitionKind, PartitionSpec, host_partition
from duplexd.memory.ledger import Lease, SlotLedger
from duplexd.memory.pages import Move, PageLedger
from duplexd.memory.tiers import Tiers
from duplexd.memory.window import select_window
from duplexd.models.average import fold_tokens

CURRENT, RECENT, INGEST, ANCHOR = CacheClass.CURRENT, CacheClass.RECENT, CacheClass.INGEST, CacheClass.ANCHOR
SESSIONS = [SessionId(number) for number in range(1, 4)]
SLOTS, PAGES, IMAGES, PAGE_TOKENS, PROMPT, KEEP = 7, 14, 10, 4, 6, 3
WINDOW = PartitionSpec(
    "window", PartitionKind.RING, SLOTS, (FieldSpec("k", (1,), "float64"),), session_slots=4, shared_slots=0
)
CONTEXTS = PartitionSpec(
    "pages", PartitionKind.PAGES, PAGES, (FieldSpec("k", (1,), "float64", outer=(2,)),), PAGE_TOKENS, 9, 2
)
HOST = host_partition(CONTEXTS, IMAGES)


@dataclass(frozen=True)
class Work:
    fence: FenceId
    waits: tuple[FenceId, ...]
    slots: frozenset[int]  #: of the window, read or written
    tokens: frozenset[int]  #: of the pages
    run: Callable[[], None]


@dataclass
class Table:
    """A context as its owner knows it."""

    owner: SessionId
    values: list[float]
    anchors: list[int]  #: where its anchors lie
    works: set[FenceId] = field(default_factory=set)  #: launches that read or write it
    copies: set[FenceId] = field(default_factory=set)  #: that must pass before it is read
    folded: int = 0  #: long-term tokens behind the anchors


@dataclass
class Chunk:
    owner: SessionId
    epoch: Epoch
    value: float
    label: CacheClass
    works: set[FenceId] = field(default_factory=set)


class ArenaMachine(RuleBasedStateMachine):
    """Sessions lease, commit, pin, slide, discard; grow, fork, advance, resume, cut, leave, come back and close."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(ArenaLayout([WINDOW, CONTEXTS]))
        self.arena.fill_nan("window", range(SLOTS))
        self.arena.fill_nan("pages", range(CONTEXTS.rows))
        self.tiers = Tiers(self.arena, CONTEXTS, HOST)
        self.tiers.host.buffer.fill_(0xFF)
        self.passed: set[FenceId] = set()
        known = self.passed.__contains__
        self.host = SlotLedger(HOST, passed=known)
        self.window = SlotLedger(WINDOW, passed=known, freed=self.on_freed)
        self.pages = PageLedger(CONTEXTS, passed=known, freed=self.on_freed, host=self.host, contexts_max=9)
        self.lanes: dict[str, deque[Work]] = {"generate": deque(), "think": deque(), "move": deque()}
        self.epochs = dict.fromkeys(SESSIONS, Epoch(0))
        self.chunks: dict[Lease, Chunk] = {}
        self.stale: list[Lease] = []
        self.tables: dict[ContextId, Table] = {}
        self.branches: dict[ContextId, ContextId] = {}
        self.serial = 0
        self.open_prompt()

    def open_prompt(self) -> None:
        self.prompt = self.pages.open(None)
        assert self.pages.append(self.prompt, PROMPT, INGEST)
        self.pages.pin(self.prompt)
        self.prompt_values = [self.number() for _ in range(PROMPT)]
        self.write(self.slots(self.prompt), self.prompt_values)

    # What lanes do ----------------------------------------------------------------------------------------------------

    def number(self) -> float:
        self.serial += 1
        return float(self.serial)

    def slots(self, context: ContextId) -> list[int]:
        return array("q", self.pages.slots(context)).tolist()

    def write(self, where: Sequence[int], values: Sequence[float]) -> None:
        self.arena.field("pages", "k")[:, where, 0] = torch.tensor(values, dtype=torch.float64)

    def queue(
        self,
        lane: str,
        run: Callable[[], None],
        *,
        waits: set[FenceId] = frozenset(),  # type: ignore[assignment]
        slots: Sequence[int] = (),
        tokens: Sequence[int] = (),
    ) -> FenceId:
        fence = FenceId(self.number())  # type: ignore[arg-type]
        pending = tuple(one for one in waits if one not in self.passed)
        self.lanes[lane].append(Work(fence, pending, frozenset(slots), frozenset(tokens), run))
        return fence

    def on_freed(self, partition: str, freed: Sequence[int]) -> None:
        """No work that is still to run may touch what is handed out again, and nobody holds it."""
        for lane in self.lanes.values():
            for work in lane:
                touched = work.slots if partition == "window" else work.tokens
                assert touched.isdisjoint(freed), f"freed before fence {work.fence}"
        if partition == "window":
            assert {lease.slot for lease in self.chunks}.isdisjoint(freed)
        self.arena.fill_nan(partition, freed)

    @precondition(lambda self: any(self.lanes.values()))
    @rule(data=st.data())
    def run_some(self, data: st.DataObject) -> None:
        ready = [name for name, lane in self.lanes.items() if lane and self.passed.issuperset(lane[0].waits)]
        if ready:
            self.run_next(data.draw(st.sampled_from(ready)))

    def run_next(self, lane: str) -> None:
        work = self.lanes[lane].popleft()
        work.run()
        self.passed.add(work.fence)
        for ledger in (self.window, self.pages, self.host):
            ledger.fence_passed(work.fence)

    def run_all(self) -> None:
        while any(self.lanes.values()):
            before = len(self.passed)
            for name, lane in self.lanes.items():
                if lane and self.passed.issuperset(lane[0].waits):
                    self.run_next(name)
            assert len(self.passed) > before, "lanes wait for each other"

    # Windows ----------------------------------------------------------------------------------------------------------

    @rule(session=st.sampled_from(SESSIONS))
    def generate(self, session: SessionId) -> None:
        """Read the window of the live epoch and write the next chunk behind it."""
        epoch = self.epochs[session]
        lease = self.window.lease(session, CURRENT, chunk=ChunkId(self.serial + 1), epoch=epoch, stage="generate")
        if lease is None:
            return
        assert lease.slot not in {other.slot for other in self.chunks}
        assert isnan(float(self.arena.view(lease, "k")[0])), "handed out without being told"
        held = [one for one in self.window.held(session) if one.lease != lease]
        read = {one.lease: self.chunks[one.lease] for one in select_window(held, epoch=epoch, recent_max=SLOTS)}
        own = {one: chunk for one, chunk in self.chunks.items() if chunk.owner == session}
        assert read == {one: c for one, c in own.items() if c.label is not CURRENT or c.epoch == epoch}
        expected = {one.slot: chunk.value for one, chunk in read.items()}
        chunk = self.chunks[lease] = Chunk(session, epoch, self.number(), CURRENT)

        def run() -> None:
            field_k = self.arena.field("window", "k")
            assert {slot: float(field_k[slot, 0]) for slot in expected} == expected
            field_k[lease.slot, 0] = chunk.value

        fence = self.queue("generate", run, slots=[lease.slot, *expected])
        for other in (chunk, *read.values()):
            other.works.add(fence)

    def let_go(self, leases: Sequence[Lease]) -> set[FenceId]:
        fences: set[FenceId] = set()
        for lease in leases:
            fences |= self.chunks.pop(lease).works
        self.stale += leases
        return fences

    @precondition(lambda self: self.chunks)
    @rule(data=st.data(), what=st.sampled_from(["commit", "pin", "discard"]))
    def relabel(self, data: st.DataObject, what: str) -> None:
        lease = data.draw(st.sampled_from(list(self.chunks)))
        chunk = self.chunks[lease]
        allowed = {"commit": {CURRENT}, "pin": {CURRENT, RECENT}, "discard": {CURRENT, RECENT}}[what]
        if chunk.label is CURRENT and chunk.epoch != self.epochs[chunk.owner] and what != "discard":
            return  # Nobody hears what died with its epoch.
        if chunk.label not in allowed:
            with pytest.raises(LedgerError):
                self.window.discard(lease, after=None) if what == "discard" else getattr(self.window, what)(lease)
        elif what == "discard":
            self.window.discard(lease, after=self.let_go([lease]))
        else:
            getattr(self.window, what)(lease)
            chunk.label = RECENT if what == "commit" else ANCHOR

    @rule(session=st.sampled_from(SESSIONS), keep=st.integers(0, 2))
    def slide_window(self, session: SessionId, keep: int) -> None:
        recent = [one for one, chunk in self.chunks.items() if (chunk.owner, chunk.label) == (session, RECENT)]
        leaving = recent[: max(0, len(recent) - keep)]

        assert self.window.slide(session, keep, after=iter(self.let_go(leaving))) == leaving

    @rule(session=st.sampled_from(SESSIONS), linger=st.booleans())
    def interrupt(self, session: SessionId, linger: bool) -> None:
        """A new epoch: what nobody heard goes, in the window and at the end of every context of the session. In the
        window it may linger until the next one: it is read no more all the same.
        """
        self.epochs[session] = Epoch(self.epochs[session] + 1)
        self.cut_unheard(session)
        if linger:
            return
        dead = [one for one, chunk in self.chunks.items() if (chunk.owner, chunk.label) == (session, CURRENT)]
        for lease in dead:
            self.window.discard(lease, after=self.let_go([lease]))

    def cut_unheard(self, session: SessionId) -> None:
        for context, table in self.tables.items():
            if table.owner == session:
                runs = self.pages.labels(context)
                heard = 0
                for label, tokens in runs:
                    if label is CURRENT:
                        break
                    heard += tokens
                self.pages.cut(context, heard, after=table.works)
                del table.values[heard:]

    # Contexts ---------------------------------------------------------------------------------------------------------

    def some(self, data: st.DataObject) -> ContextId:
        return data.draw(st.sampled_from(list(self.tables)))

    @rule(session=st.sampled_from(SESSIONS))
    def open(self, session: SessionId) -> None:
        if all(table.owner != session for table in self.tables.values()):
            context = self.pages.open(session, prefix=self.prompt)
            self.tables[context] = Table(session, list(self.prompt_values), self.slots(context))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.integers(1, 6), label=st.sampled_from([CURRENT, INGEST]))
    def think(self, data: st.DataObject, tokens: int, label: CacheClass) -> None:
        """Read all of a context and write what follows, after the copies that bring it back."""
        context = self.some(data)
        table = self.tables[context]
        if self.pages.away_length(context):
            with pytest.raises(LedgerError, match="restore them first"):
                self.pages.append(context, tokens, label)
            return
        if not self.pages.append(context, tokens, label):
            return
        past, where = list(table.values), self.slots(context)
        new = [self.number() for _ in range(tokens)]
        table.values += new

        def run() -> None:
            assert self.arena.field("pages", "k")[:, where[: len(past)], 0].tolist() == [past, past]
            self.write(where[len(past) :], new)

        table.works.add(self.queue("think", run, waits=table.copies, tokens=where))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), back=st.sampled_from([1, 1, 2, 3, 5, 9]), hear=st.booleans())
    def cut_or_hear(self, data: st.DataObject, back: int, hear: bool) -> None:
        context = self.some(data)
        table = self.tables[context]
        at = max(PROMPT + table.folded, len(table.values) - back)
        if hear:
            self.pages.commit(context, at)
        else:
            self.pages.cut(context, at, after=iter(table.works))
            del table.values[at:]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), drop=st.sampled_from([1, 2, 3, 5, 9]), skip=st.sampled_from([0, 0, 1, 3, 4, 6]))
    def slide(self, data: st.DataObject, drop: int, skip: int) -> None:
        """The oldest leave, or those behind some that stay where they are."""
        context = self.some(data)
        table = self.tables[context]
        head = PROMPT + table.folded
        skip = min(skip, len(table.values) - head)
        start = head + skip
        drop = min(drop, len(table.values) - start)
        self.pages.commit(context, len(table.values))
        if self.pages.away_length(context) > len(table.values) - head:
            with pytest.raises(LedgerError, match="its long-term tokens are offloaded"):
                self.pages.slide(context, drop, skip=skip)
            return
        self.pages.slide(context, drop, skip=skip, after=iter(table.works))
        del table.values[start : start + drop]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), drop=st.sampled_from([KEEP, 5, 8, 12, 20]), skip=st.sampled_from([0, 0, 1, 3, 4, 6]))
    def compress(self, data: st.DataObject, drop: int, skip: int) -> None:
        """What slides out is folded into long-term tokens, in place, by work that runs as late as it may."""
        context = self.some(data)
        table = self.tables[context]
        skip = min(skip, len(table.values) - PROMPT - table.folded)
        drop = min(drop, len(table.values) - PROMPT - table.folded - skip)
        if drop < KEEP or self.pages.away_length(context):
            return
        self.pages.commit(context, len(table.values))
        fence = FenceId(self.serial + 1)
        shared = context in self.branches or context in self.branches.values()
        try:
            order = self.pages.compress(context, drop, keep=KEEP, skip=skip, after=iter({*table.works, fence}))
        except LedgerError as error:
            assert "a branch shares" in str(error)  # noqa: PT017
            assert shared
            return
        head = PROMPT + table.folded
        start = head + skip
        known, stays, leaving = table.values[PROMPT:head], table.values[head:start], table.values[start : start + drop]
        expected = torch.tensor([[*known, *leaving]], dtype=torch.float64)[..., None]
        where = torch.arange(len(expected[0]))
        target = where[:KEEP]
        fold_tokens([expected], where[len(known) :], target, first=order.first, keep=0.75)
        table.values[PROMPT : start + drop] = [*expected[0, :KEEP, 0].tolist(), *stays]
        table.folded = KEEP
        sources, written = (array("q", slots).tolist() for slots in (order.sources, order.target))

        def run() -> None:
            keys = self.arena.field("pages", "k")
            assert keys[:, sources, 0].tolist() == [leaving, leaving]
            fold_tokens([keys], torch.tensor(sources), torch.tensor(written), first=order.first, keep=0.75)

        assert self.queue("think", run, waits=table.copies, tokens=[*sources, *written]) == fence
        table.works.add(fence)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), back=st.integers(0, 5))
    def fork(self, data: st.DataObject, back: int) -> None:
        context = self.some(data)
        table = self.tables[context]
        if context in self.branches or context in self.branches.values() or self.pages.away_length(context):
            return
        at = max(PROMPT + table.folded, len(table.values) - back)
        branch = self.pages.fork(context, at)
        self.tables[branch] = Table(
            table.owner, table.values[:at], table.anchors, set(table.works), set(table.copies), table.folded
        )
        self.branches[branch] = context

    @precondition(lambda self: self.branches)
    @rule(data=st.data(), advance=st.booleans())
    def decide(self, data: st.DataObject, advance: bool) -> None:
        branch = data.draw(st.sampled_from(list(self.branches)))
        trunk = self.branches[branch]
        away = self.pages.away_length(branch) or self.pages.away_length(trunk)
        if advance and not away:
            self.pages.promote(branch, trunk, after=iter(self.tables[trunk].works))
            self.tables[trunk] = self.tables.pop(branch)
        else:
            self.pages.close(branch, after=iter(self.tables.pop(branch).works))
        del self.branches[branch]

    # Tiers ------------------------------------------------------------------------------------------------------------

    def copy(self, move: Callable[[Sequence[Move]], None], moves: list[Move], waits: set[FenceId]) -> FenceId:
        tokens = [move.page * PAGE_TOKENS + offset for move in moves for offset in range(PAGE_TOKENS)]
        return self.queue("move", lambda: move(moves), waits=waits, tokens=tokens)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), most=st.integers(1, 4))
    def offload(self, data: st.DataObject, most: int) -> None:
        context = self.some(data)
        table = self.tables[context]
        fence = FenceId(self.serial + 1)
        moves = self.pages.offload(context, pages_max=most, fence=fence)
        if moves:
            assert self.copy(self.tiers.offload, moves, table.works | table.copies) == fence

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        context = self.some(data)
        fence = FenceId(self.serial + 1)
        moves = self.pages.restore(context, fence=fence)
        if moves:
            assert self.copy(self.tiers.restore, moves, set()) == fence
            self.tables[context].copies.add(fence)

    @rule(session=st.sampled_from(SESSIONS))
    def close(self, session: SessionId) -> None:
        """The session leaves, in the middle of whatever it was at."""
        leases = [one for one, chunk in self.chunks.items() if chunk.owner == session]
        assert self.window.close(session, after=iter(self.let_go(leases))) == leases
        for context in [context for context, table in self.tables.items() if table.owner == session]:
            self.pages.close(context, after=iter(self.tables.pop(context).works))
            self.branches.pop(context, None)

    # Invariants -------------------------------------------------------------------------------------------------------

    @invariant()
    def everything_is_owned_once_or_free(self) -> None:
        for ledger in (self.window, self.pages, self.host):
            ledger.check()
        held = {lease.slot for lease in self.chunks}
        usage = self.pages.usage()

        assert len(held) + self.window.free_count + self.window.retiring_count == SLOTS
        assert usage.free + usage.retiring + sum(usage.pages.values()) == PAGES
        assert usage.tokens[CURRENT] == sum(
            tokens for context in self.tables for label, tokens in self.pages.labels(context) if label is CURRENT
        )

    @invariant()
    def anchors_never_move(self) -> None:
        for context, table in self.tables.items():
            assert self.pages.length(context) == len(table.values)
            if not self.pages.away_length(context):
                assert self.slots(context)[:PROMPT] == table.anchors
        assert self.arena.field("pages", "k")[:, self.slots(self.prompt), 0].tolist() == [self.prompt_values] * 2

    @invariant()
    def a_stale_lease_always_raises(self) -> None:
        for lease in self.stale:
            for use in (self.window.check_lease, self.window.commit, self.window.pin, self.give_back_again):
                with pytest.raises(StaleLease):
                    use(lease)
        for lease in self.chunks:
            self.window.check_lease(lease)

    def give_back_again(self, lease: Lease) -> None:
        self.window.discard(lease, after=None)

    def teardown(self) -> None:
        """Who is still there is brought back and read a last time; then everything is free."""
        for context, table in self.tables.items():
            if not self.pages.away_length(context):
                where = self.slots(context)
                read = partial(self.read_again, list(table.values), where)
                table.works.add(self.queue("think", read, waits=table.copies, tokens=where))
        self.run_all()
        for session in SESSIONS:
            self.close(session)
        self.pages.close(self.prompt, after=None)

        assert (self.window.free_count, self.pages.free_count, self.host.free_count) == (SLOTS, PAGES, IMAGES)

    def read_again(self, expected: list[float], where: list[int]) -> None:
        assert self.arena.field("pages", "k")[:, where, 0].tolist() == [expected, expected]


ArenaMachine.TestCase.settings = settings(deadline=None, max_examples=120, stateful_step_count=50, derandomize=True)
TestArenaMachine = ArenaMachine.TestCase
