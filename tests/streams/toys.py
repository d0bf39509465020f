"""Two toy engines that hold arena memory as real ones do, and can forget any one of the fences they owe.

`play_ring`: writers on two lanes fill ring slots, a reader on a third reads a window of them.
`play_pages`: one lane per session appends to a growing context and reads all of it.

Both return what was read wrongly by a live epoch: (work, expected, read).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from random import Random
from typing import Any

import msgspec

from duplexd import clock
from duplexd.ids import ChunkId, ContextId, Epoch, FenceId, SessionId, WorkId
from duplexd.memory.arena import Arena
from duplexd.memory.classes import CacheClass
from duplexd.memory.guards import After, Freed
from duplexd.memory.layout import ArenaLayout, FieldSpec, PartitionKind, PartitionSpec
from duplexd.memory.ledger import Lease, SlotLedger
from duplexd.memory.pages import PageLedger
from duplexd.streams.executor import Completion, Executor
from duplexd.streams.lane import Adversary, AdversaryLane, Fences, HostLane, InlineLane, Lane
from duplexd.streams.stage import CostModel, PayloadKind, Role, StageSpec
from duplexd.units import NANOS_PER_SECOND, Nanos

RING = PartitionSpec("ring", PartitionKind.RING, 8, (FieldSpec("kv", (4,)),))
PAGES = PartitionSpec("pages", PartitionKind.PAGES, 14, (FieldSpec("k", (2,), outer=(2,)),), page_tokens=4)
LAYOUT = ArenaLayout([RING, PAGES])


class Owes(Enum):
    """Each fence a toy owes; a toy that forgets one must be found out."""

    READ = "a read waits for its write"
    DISCARD = "a discarded slot waits for the work of its dead epoch"
    SLIDE = "a slid slot waits for its readers"
    CLOSE = "what a closed session held waits for its running work"
    CUT = "cut pages wait for the work that writes them"
    PROMOTE = "the pages of a replaced trunk wait for its running work"


class Setup(msgspec.Struct):
    executor: Executor
    arena: Arena
    freed: Freed


# Lanes of the three kinds ---------------------------------------------------------------------------------------------


def inline(names: Sequence[str], arena: Arena, seed: int) -> tuple[dict[str, Lane], Freed]:
    fences = Fences()
    return {name: InlineLane(name, fences) for name in names}, arena.fill_nan


def host(names: Sequence[str], arena: Arena, seed: int) -> tuple[dict[str, Lane], Freed]:
    fences = Fences()
    return {name: HostLane(name, fences) for name in names}, arena.fill_nan


def adversary(names: Sequence[str], arena: Arena, seed: int) -> tuple[dict[str, Lane], Freed]:
    fences, enemy = Fences(), Adversary(Random(seed), fill=arena.fill_nan)
    return {name: AdversaryLane(name, fences, adversary=enemy) for name in names}, enemy.freed


Lanes = Callable[[Sequence[str], Arena, int], tuple[dict[str, Lane], Freed]]


def stage_spec(name: str, lane: str, batch_max: int = 1) -> StageSpec:
    return StageSpec(name, Role.THINK, lane, PayloadKind.TOKEN, PayloadKind.TOKEN, CostModel(), batch_max=batch_max)


def set_up(stages: Mapping[str, Any], lanes: Lanes, seed: int) -> Setup:
    arena = Arena(LAYOUT)
    for spec in (RING, PAGES):
        arena.fill_nan(spec.name, range(spec.rows))  # what was never written is not to be read either
    built, freed = lanes(sorted({stage.spec.lane for stage in stages.values()}), arena, seed)
    executor = Executor(stages, built, None)
    executor.open()
    executor.load(arena, within=Nanos(10 * NANOS_PER_SECOND))
    return Setup(executor, arena, freed)


# Stages ---------------------------------------------------------------------------------------------------------------


class RingJob(msgspec.Struct):
    slot: int
    value: float


class WriteStage:
    """Fills ring slots with a value."""

    def __init__(self, name: str, lane: str) -> None:
        self.spec = stage_spec(name, lane)

    def load(self, arena: Arena) -> None:
        self.kv = arena.field("ring", "kv")

    def run(self, jobs: Sequence[RingJob], media: object) -> list[None]:
        for job in jobs:
            self.kv[job.slot].fill_(job.value)
        return [None] * len(jobs)


class ReadStage:
    """Reads ring slots, one number each; a slot half written by another reads as NaN."""

    def __init__(self, name: str, lane: str) -> None:
        self.spec = stage_spec(name, lane)

    def load(self, arena: Arena) -> None:
        self.kv = arena.field("ring", "kv")

    def run(self, jobs: Sequence[Sequence[int]], media: object) -> list[list[float]]:
        return [[float(self.kv[slot].mean()) for slot in job] for job in jobs]


class PageJob(msgspec.Struct):
    slots: bytes
    past: int
    values: tuple[float, ...]


class AppendStage:
    """Writes new tokens of a context and reads all of it, as a decoder does."""

    def __init__(self, name: str, lane: str) -> None:
        self.spec = stage_spec(name, lane)

    def load(self, arena: Arena) -> None:
        self.arena = arena
        self.keys = arena.field("pages", "k")

    def run(self, jobs: Sequence[PageJob], media: object) -> list[list[float]]:
        return [self._append(job) for job in jobs]

    def _append(self, job: PageJob) -> list[float]:
        index = self.arena.tensor_of(job.slots)
        for slot, value in zip(index[job.past :].tolist(), job.values, strict=True):
            self.keys[:, slot] = value
        return self.keys.index_select(1, index).mean(dim=(0, 2)).tolist()


# Engines --------------------------------------------------------------------------------------------------------------

Wrong = list[tuple[int, list[float], list[float]]]


class _Engine:
    """What both toys share: naming work, taking completions, telling the ledger of fences."""

    def __init__(self, setup: Setup, ledger: Any, forgets: Owes | None) -> None:
        self.executor, self.ledger, self.forgets = setup.executor, ledger, forgets
        self.work = 0
        self.running: dict[FenceId, SessionId] = {}
        self.expected: dict[int, tuple[SessionId, Epoch, list[float]]] = {}
        self.epochs: dict[SessionId, Epoch] = {}
        self.wrong: Wrong = []

    def launch(self, session: SessionId, stage: str, job: Any, waits: Sequence[FenceId] = ()) -> FenceId:
        self.work += 1
        fence = self.executor.launch(WorkId(self.work), stage, [job], waits=waits)
        self.running[fence] = session
        return fence

    def expect(self, fence: FenceId, session: SessionId, values: list[float]) -> None:
        self.expected[fence] = (session, self.epochs.setdefault(session, Epoch(0)), values)

    def owed(self, owes: Owes, session: SessionId) -> After:
        """The fences of all that runs for a session, unless this toy forgets them here."""
        return None if self.forgets is owes else [fence for fence, owner in self.running.items() if owner == session]

    def advance(self, session: SessionId) -> None:
        self.epochs[session] = Epoch(self.epochs.get(session, Epoch(0)) + 1)

    def take(self) -> None:
        for completion in self.executor.completions():
            self.complete(completion)

    def complete(self, completion: Completion) -> None:
        assert completion.failure is None
        del self.running[completion.fence]
        self.ledger.fence_passed(completion.fence)
        session, epoch, values = self.expected.pop(completion.work, (None, None, None))
        if session is not None and epoch == self.epochs[session]:
            read = completion.results[0]
            if read != values:
                self.wrong.append((completion.work, values, read))

    def drain(self) -> None:
        while self.running:
            self.take()
            if self.running:
                self.executor.wait(until=Nanos(clock.now() + NANOS_PER_SECOND))


def play_ring(lanes: Lanes, seed: int, forgets: Owes | None = None, steps: int = 120) -> Wrong:
    """Three sessions on one ring: generate, read a window, slide, be interrupted, leave."""
    stages = {
        "generate": WriteStage("generate", "generate"),
        "refine": WriteStage("refine", "refine"),
        "decode": ReadStage("decode", "decode"),
    }
    setup = set_up(stages, lanes, seed)
    ledger = SlotLedger(RING, freed=setup.freed)
    engine, rng = _Engine(setup, ledger, forgets), Random(seed)
    values: dict[Lease, float] = {}
    for step in range(steps):
        session = SessionId(rng.randrange(3))
        roll = rng.random()
        if roll < 0.65:
            _ring_chunk(engine, session, values, float(step))
        elif roll < 0.78:
            engine.advance(session)
            for held in ledger.find(session, label=CacheClass.CURRENT):
                ledger.discard(held.lease, after=engine.owed(Owes.DISCARD, session))
        elif roll < 0.83:
            engine.advance(session)
            ledger.close(session, after=engine.owed(Owes.CLOSE, session))
        else:
            engine.take()
        ledger.check()
    engine.drain()
    assert setup.executor.close(within=Nanos(5 * NANOS_PER_SECOND)) == ()
    return engine.wrong


def _ring_chunk(engine: _Engine, session: SessionId, values: dict[Lease, float], value: float) -> None:
    ledger = engine.ledger
    epoch = engine.epochs.setdefault(session, Epoch(0))
    lease = ledger.lease(session, CacheClass.CURRENT, chunk=ChunkId(int(value)), epoch=epoch)
    if lease is None:
        engine.take()
        return
    values[lease] = value
    writer = "generate" if value % 2 else "refine"
    write = engine.launch(session, writer, RingJob(lease.slot, value))
    window = [held.lease for held in ledger.held(session)]
    # All writes of the session that still run: the window has slots of earlier chunks too.
    waits = (
        [] if engine.forgets is Owes.READ else [fence for fence, owner in engine.running.items() if owner == session]
    )
    read = engine.launch(session, "decode", [one.slot for one in window], waits=waits)
    engine.expect(read, session, [values[one] for one in window])
    assert write < read
    for held in ledger.find(session, label=CacheClass.CURRENT)[:-1]:
        ledger.commit(held.lease)
    ledger.slide(session, 1, after=engine.owed(Owes.SLIDE, session))


class _Trunk(msgspec.Struct):
    context: ContextId
    values: list[float]


def play_pages(lanes: Lanes, seed: int, forgets: Owes | None = None, steps: int = 120) -> Wrong:
    """Three sessions on one pool of pages: append, be cut, go on from a branch, slide, leave."""
    setup = set_up({f"think{lane}": AppendStage(f"think{lane}", f"think{lane}") for lane in range(3)}, lanes, seed)
    ledger = PageLedger(PAGES, freed=setup.freed)
    engine, rng = _Engine(setup, ledger, forgets), Random(seed)
    trunks: dict[SessionId, _Trunk] = {}
    for step in range(steps):
        session = SessionId(rng.randrange(3))
        trunk = trunks.setdefault(session, _Trunk(ContextId(0), []))
        if not trunk.context:
            trunk.context = ledger.open(session)
        roll, at = rng.random(), rng.randint(0, len(trunk.values))
        if roll < 0.5:
            _append(engine, session, trunk, [step + 0.25 * part for part in range(rng.randint(1, 5))])
        elif roll < 0.6:
            engine.advance(session)
            ledger.cut(trunk.context, at, after=engine.owed(Owes.CUT, session))
            del trunk.values[at:]
        elif roll < 0.7:
            _advance_on_branch(engine, session, trunk, at, float(step))
        elif roll < 0.78:
            ledger.commit(trunk.context, at)
            ledger.slide(trunk.context, at, after=engine.owed(Owes.SLIDE, session))
            del trunk.values[:at]
        elif roll < 0.82:
            engine.advance(session)
            ledger.close(trunk.context, after=engine.owed(Owes.CLOSE, session))
            del trunks[session]
        else:
            engine.take()
        ledger.check()
    engine.drain()
    assert setup.executor.close(within=Nanos(5 * NANOS_PER_SECOND)) == ()
    return engine.wrong


def _append(engine: _Engine, session: SessionId, trunk: _Trunk, values: list[float]) -> None:
    ledger = engine.ledger
    if not ledger.append(trunk.context, len(values), CacheClass.CURRENT):
        engine.take()
        return
    past = len(trunk.values)
    trunk.values += values
    slots = ledger.slots(trunk.context)
    assert len(array("q", slots)) == len(trunk.values)
    fence = engine.launch(session, f"think{session}", PageJob(slots, past, tuple(values)))
    engine.expect(fence, session, list(trunk.values))


def _advance_on_branch(engine: _Engine, session: SessionId, trunk: _Trunk, at: int, value: float) -> None:
    """The person's words go to a branch forked at the last heard token; then the branch becomes the trunk."""
    branch = _Trunk(engine.ledger.fork(trunk.context, at), trunk.values[:at])
    engine.advance(session)
    _append(engine, session, branch, [value])
    engine.ledger.promote(branch.context, trunk.context, after=engine.owed(Owes.PROMOTE, session))
    trunk.values = branch.values
