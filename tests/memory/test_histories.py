"""Twin histories: the window roll of seed 000, what survives an interruption, and their bound."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from twins import COMPRESSING, FIELDS, ONE, PLAIN, STAGES, TWO, Rig

from duplexd.errors import ArenaFull, ConfigError, LedgerError, StaleLease
from duplexd.ids import ChunkId, Epoch, FenceId, SessionId
from duplexd.memory.classes import CacheClass
from duplexd.memory.histories import GENERATE, REFINE, Fold, Histories, HistoryShape, HistoryStage, lookahead_chunks
from duplexd.memory.ledger import Lease, Refusal
from duplexd.memory.window import Window
from duplexd.units import Ticks

SHAPES = pytest.mark.parametrize("shape", [PLAIN, COMPRESSING], ids=["forgets", "compresses"])


def generate(rig: Rig, histories: Histories, chunk: int) -> list[int]:
    """Begin and finish a chunk in the generator; returns the chunks it read and itself."""
    window = histories.begin(ChunkId(chunk), histories.epoch, fence=rig.launch())
    assert window is not None
    read = rig.chunks_of(GENERATE, window)
    rig.passes(rig.fence)
    histories.finish(ChunkId(chunk), histories.epoch, GENERATE)
    return read


def refine(rig: Rig, histories: Histories, chunk: int) -> list[int]:
    read = rig.chunks_of(REFINE, histories.refine(ChunkId(chunk), histories.epoch, fence=rig.launch()))
    rig.passes(rig.fence)
    histories.finish(ChunkId(chunk), histories.epoch, REFINE)
    return read


def hear(rig: Rig, histories: Histories, chunk: int) -> tuple[Fold, ...]:
    histories.hear(ChunkId(chunk), histories.epoch)
    folds = rig.slide(histories)
    rig.passes(*(fold.fence for fold in folds))
    return folds


def play(rig: Rig, histories: Histories, *chunks: int) -> None:
    for chunk in chunks:
        generate(rig, histories, chunk)
        refine(rig, histories, chunk)
        hear(rig, histories, chunk)


# The window -------------------------------------------------------------------------------------------------------


def test_the_window_rolls_as_in_the_seed() -> None:
    """Chunk N reads the sink and N-2, N-1; chunk N+1 reads the same sink and N-1, N, at the same positions."""
    rig = Rig(PLAIN)
    histories = rig.open()
    reads = []
    for chunk in range(1, 7):
        reads.append((generate(rig, histories, chunk), refine(rig, histories, chunk)))
        hear(rig, histories, chunk)

    expected = [[0, 0, 1], [0, 0, 1, 2], *([0, 0, n - 2, n - 1, n] for n in range(3, 7))]
    assert [(read, read) for read in expected] == reads


def test_each_stage_has_its_own_window_while_they_overlap() -> None:
    """The generator is at n, the refiner at n-1 and the decoder at n-2, as LPM runs them."""
    rig = Rig(PLAIN)
    histories = rig.open()
    epoch = histories.epoch
    generate(rig, histories, 1)
    for n in range(2, 9):
        noisy = histories.begin(ChunkId(n), epoch, fence=rig.launch())
        clean = histories.refine(ChunkId(n - 1), epoch, fence=rig.launch())
        assert noisy is not None
        assert rig.chunks_of(GENERATE, noisy)[2:] == [chunk for chunk in (n - 2, n - 1, n) if chunk > 0]
        assert rig.chunks_of(REFINE, clean)[2:] == [chunk for chunk in (n - 3, n - 2, n - 1) if chunk > 0]
        rig.passes(rig.fence, FenceId(rig.fence - 1))
        histories.finish(ChunkId(n), epoch, GENERATE)
        histories.finish(ChunkId(n - 1), epoch, REFINE)
        if n > 2:
            hear(rig, histories, n - 2)


def test_a_chunk_cannot_overtake_its_predecessor() -> None:
    rig = Rig(PLAIN)
    histories = rig.open()
    epoch = histories.epoch
    histories.begin(ChunkId(1), epoch, fence=rig.launch())

    with pytest.raises(LedgerError, match="has not finished chunk 1"):
        histories.begin(ChunkId(2), epoch, fence=rig.launch())
    with pytest.raises(LedgerError, match="has not finished chunk 1"):
        histories.refine(ChunkId(1), epoch, fence=rig.launch())
    histories.finish(ChunkId(1), epoch, GENERATE)
    generate(rig, histories, 2)
    with pytest.raises(LedgerError, match="refine has not finished chunk 1"):
        histories.refine(ChunkId(2), epoch, fence=rig.launch())
    assert histories.chunks() == (1, 2)


@pytest.mark.parametrize("epoch", [0, 2], ids=["dead", "not begun"])
def test_a_chunk_of_another_epoch_does_not_begin(epoch: int) -> None:
    rig = Rig(PLAIN)
    histories = rig.open()
    histories.interrupt(Epoch(1))
    with pytest.raises(LedgerError, match="is in epoch 1"):
        histories.begin(ChunkId(1), Epoch(epoch), fence=rig.launch())

    assert histories.chunks() == ()


def test_an_interruption_continues_from_what_was_seen_last() -> None:
    """Chunks 4 and 5 were ready and 6 was in work when the person spoke; the viewer had seen 3."""
    rig = Rig(PLAIN)
    histories = rig.open()
    play(rig, histories, 1, 2, 3)
    for chunk in (4, 5):
        generate(rig, histories, chunk)
        refine(rig, histories, chunk)
    histories.begin(ChunkId(6), histories.epoch, fence=rig.launch())
    running = rig.fence
    histories.interrupt(Epoch(1))

    assert generate(rig, histories, 7) == [0, 0, 2, 3, 7]
    with pytest.raises(StaleLease):
        histories.finish(ChunkId(6), Epoch(0), GENERATE)
    assert rig.ledgers[0].retiring_count == 3  # 4 and 5, which launch 6 reads, and the slot it writes
    rig.passes(running)
    assert rig.ledgers[0].retiring_count == 0


@pytest.mark.parametrize(("tokens", "seen"), [(None, 3), (1, 1)], ids=["plays to its end", "cut at the cursor"])
def test_a_chunk_that_straddles_the_cursor_is_kept_as_the_model_is_cut(tokens: int | None, seen: int) -> None:
    rig = Rig(PLAIN)
    histories = rig.open()
    play(rig, histories, 1)
    for chunk in (2, 3):
        generate(rig, histories, chunk)
        refine(rig, histories, chunk)
    histories.interrupt(Epoch(1), keep=ChunkId(2), tokens=tokens)
    window = histories.begin(ChunkId(4), Epoch(1), fence=rig.launch())

    assert window is not None
    assert rig.chunks_of(GENERATE, window) == [0, 0, 1, 2, 4]
    assert window.tokens == (3, 2, 3, seen, 3)
    assert window.starts == (0, 3, 5, 8, 8 + seen)


def test_an_interruption_that_cannot_be_changes_nothing() -> None:
    rig = Rig(PLAIN)
    histories = rig.open()
    play(rig, histories, 1)
    generate(rig, histories, 2)

    for error, epoch, keep, tokens in [
        (LedgerError, 0, None, None),
        (LedgerError, 1, 2, None),  # the refiner has not seen it, so nobody has
        (LedgerError, 1, 1, 4),
        (LedgerError, 1, None, 1),
        (StaleLease, 1, 9, None),
    ]:
        with pytest.raises(error):
            histories.interrupt(Epoch(epoch), keep=ChunkId(keep) if keep else None, tokens=tokens)
    assert (histories.epoch, histories.chunks(), histories.heard()) == (0, (1, 2), (1,))


# Room -------------------------------------------------------------------------------------------------------------


@SHAPES
def test_the_slots_suffice_for_the_lookahead_and_one_interruption(shape: HistoryShape) -> None:
    """Nobody is refused until L chunks are unheard, nor is their like begun anew while a dead launch still runs."""
    rig = Rig(shape, sessions=1)
    histories = rig.open()
    play(rig, histories, 1, 2, 3)
    for chunk in (4, 5):
        generate(rig, histories, chunk)
        refine(rig, histories, chunk)
    histories.begin(ChunkId(6), histories.epoch, fence=rig.launch())
    histories.interrupt(Epoch(1))

    for chunk in (7, 8, 9):
        generate(rig, histories, chunk)
    assert histories.begin(ChunkId(10), Epoch(1), fence=rig.launch()) is None
    assert histories.refusal is Refusal.SESSION_BOUND
    rig.passes(FenceId(rig.fence - 4))
    generate(rig, histories, 10)


def test_at_the_bound_begin_says_no_and_all_goes_on() -> None:
    rig = Rig(PLAIN, sessions=1)
    histories = rig.open()
    chunk = 1
    while histories.begin(ChunkId(chunk), histories.epoch, fence=rig.launch()) is not None:
        rig.passes(rig.fence)
        histories.finish(ChunkId(chunk), histories.epoch, GENERATE)
        refine(rig, histories, chunk)
        chunk += 1

    assert histories.refusal is Refusal.SESSION_BOUND
    assert chunk - 1 == PLAIN.slots - len(PLAIN.anchor_tokens)
    hear(rig, histories, 3)
    generate(rig, histories, chunk)


def test_a_refiner_without_room_takes_nothing_in_the_generator() -> None:
    rig = Rig(PLAIN, sessions=1)
    histories = rig.open()
    while rig.ledgers[1].lease(TWO, CacheClass.CURRENT) is not None:
        pass

    free = rig.ledgers[0].free_count
    assert histories.begin(ChunkId(1), histories.epoch, fence=rig.launch()) is None
    assert histories.refusal is Refusal.PARTITION_FULL
    assert (rig.ledgers[0].free_count, histories.chunks()) == (free, ())


def test_a_session_that_does_not_fit_leaves_nothing_behind() -> None:
    rig = Rig(PLAIN, sessions=1)
    while rig.ledgers[1].lease(TWO, CacheClass.CURRENT) is not None:
        pass

    with pytest.raises(ArenaFull, match="session 1 needs 10 slots of clean"):
        rig.open()
    assert [len(ledger.held(ONE)) for ledger in rig.ledgers] == [0, 0]


@pytest.mark.parametrize(
    ("budget", "error", "chunks"), [(1.5, 0.0, 2), (2.0, 0.0, 2), (1.0, 0.0, 1), (2.0, 0.1, 3)], ids=str
)
def test_the_lookahead_in_chunks(budget: float, error: float, chunks: int) -> None:
    """At playback 0.9 of a chunk, a budget of 1.5 chunks lets the second one begin, and no third."""
    chunk = 48_000
    assert lookahead_chunks(Ticks(int(budget * chunk)), Ticks(chunk), error=Ticks(int(error * chunk))) == chunks


def test_an_anchor_larger_than_a_slot_is_refused() -> None:
    with pytest.raises(ConfigError, match="no slot holds more than chunk_tokens"):
        HistoryShape(chunk_tokens=3, anchor_tokens=(4,), recent=2, lookahead=1).partition("noisy", FIELDS, sessions=1)


def test_sliding_without_naming_the_folds_loses_nothing() -> None:
    rig = Rig(COMPRESSING)
    histories = rig.open()
    for chunk in (1, 2, 3):
        generate(rig, histories, chunk)
        refine(rig, histories, chunk)
    histories.hear(ChunkId(3), histories.epoch)

    with pytest.raises(LedgerError, match="no launch is named to fold them"):
        histories.slide()
    assert histories.chunks() == (1, 2, 3)


def test_a_launch_named_before_another_is_refused() -> None:
    rig = Rig(PLAIN)
    histories = rig.open()
    generate(rig, histories, 1)

    with pytest.raises(LedgerError, match="fences grow"):
        histories.begin(ChunkId(2), histories.epoch, fence=rig.fence)
    assert histories.chunks() == (1,)


# Many sessions against plain lists ---------------------------------------------------------------------------------


class Plain:
    """One session as the rules say it, without slots: chunks in order and what happened to each of them."""

    def __init__(self) -> None:
        self.epoch = 0
        self.chunks: list[int] = []
        self.tokens: dict[int, int] = {}
        self.done: dict[HistoryStage, set[int]] = {GENERATE: set(), REFINE: set()}
        self.running: dict[HistoryStage, tuple[int, FenceId] | None] = {GENERATE: None, REFINE: None}
        self.heard = 0  #: chunks of the front that were heard
        self.folded = False

    def next_for(self, stage: HistoryStage) -> int | None:
        """The chunk a stage may take."""
        if self.running[stage] is not None:
            return None
        waiting = [chunk for chunk in self.chunks if chunk not in self.done[stage]]
        ready = waiting and (stage is GENERATE or waiting[0] in self.done[GENERATE])
        return waiting[0] if ready else None

    def window(self, stage: HistoryStage, chunk: int, shape: HistoryShape) -> tuple[list[int], list[int]]:
        before = [one for one in self.chunks if one < chunk and one in self.done[stage]][-shape.recent :]
        chunks = [0] * (len(shape.anchor_tokens) + self.folded) + [*before, chunk]
        long_term = [shape.long_term_tokens] if self.folded else []
        return chunks, [*shape.anchor_tokens, *long_term, *(self.tokens[one] for one in before), shape.chunk_tokens]


MOVES = ["step", "seen", "step", "seen", "step", "hear", "slide", "begin", "refine", "finish", "interrupt"]


class TwinMachine(RuleBasedStateMachine):
    """Two sessions at a time begin, refine, finish, hear, slide, are interrupted and close while dead launches run."""

    SHAPE = PLAIN

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(self.SHAPE)
        self.histories: dict[SessionId, Histories] = {}
        self.plain: dict[SessionId, Plain] = {}
        self.anchors: dict[SessionId, list[tuple[Lease, ...]]] = {}
        self.stale: list[tuple[int, Lease]] = []
        self.chunk = 0
        self.opened = 0
        self.lanes: dict[HistoryStage, list[FenceId]] = {GENERATE: [], REFINE: []}

    def pick(self, data: st.DataObject) -> tuple[Histories, Plain]:
        session = data.draw(st.sampled_from(sorted(self.histories)))
        return self.histories[session], self.plain[session]

    def launch(self, stage: HistoryStage) -> FenceId:
        self.lanes[stage].append(self.rig.launch())
        return self.rig.fence

    def lane_reaches(self, stage: HistoryStage, fence: FenceId) -> None:
        while self.lanes[stage] and self.lanes[stage][0] <= fence:
            self.rig.passes(self.lanes[stage].pop(0))

    def check_window(self, histories: Histories, plain: Plain, stage: HistoryStage, chunk: int, window: Window) -> None:
        assert plain.window(stage, chunk, self.SHAPE) == (self.rig.chunks_of(stage, window), list(window.tokens))
        assert window.leases[: len(self.SHAPE.anchor_tokens)] == histories.anchors(stage)
        assert window.starts == tuple(sum(window.tokens[:index]) for index in range(len(window.tokens)))
        assert window.length == sum(window.tokens)

    def remember(self, histories: Histories) -> list[tuple[int, Lease]]:
        ledgers = enumerate(self.rig.ledgers)
        return [(index, held.lease) for index, ledger in ledgers for held in ledger.held(histories.session)]

    def expect_stale(self, before: list[tuple[int, Lease]], histories: Histories) -> None:
        after = self.remember(histories)
        self.stale += [lease for lease in before if lease not in after]

    @precondition(lambda self: len(self.histories) < 2)
    @rule()
    def open(self) -> None:
        self.opened += 1
        session = SessionId(self.opened)
        try:
            histories = self.rig.open(session)
        except ArenaFull:
            assert self.lanes[GENERATE] + self.lanes[REFINE], "full though nothing retires"
            return
        self.histories[session], self.plain[session] = histories, Plain()
        self.anchors[session] = [histories.anchors(stage) for stage in STAGES]

    @precondition(lambda self: self.histories)
    @rule(data=st.data(), moves=st.lists(st.sampled_from(MOVES), min_size=4, max_size=12))
    def play(self, data: st.DataObject, moves: list[str]) -> None:
        """A stretch of one session; nothing happens where a move is not possible."""
        histories, plain = self.pick(data)
        for move in moves:
            match move:
                case "step":  # the overlap: both stages end, and each takes the next chunk
                    self.finish(histories, plain, REFINE)
                    self.finish(histories, plain, GENERATE)
                    self.refine(histories, plain)
                    self.begin(histories, plain)
                case "finish":
                    self.finish(histories, plain, data.draw(st.sampled_from(STAGES)))
                case "hear":
                    self.hear(histories, plain, data)
                case "seen":
                    self.hear(histories, plain, data)
                    self.slide(histories, plain)
                case "begin":
                    self.begin(histories, plain)
                case "refine":
                    self.refine(histories, plain)
                case "slide":
                    self.slide(histories, plain)
                case _:
                    self.interrupt(histories, plain, data)

    def begin(self, histories: Histories, plain: Plain) -> None:
        self.chunk += 1
        chunk = ChunkId(self.chunk)
        if plain.running[GENERATE] is not None:
            with pytest.raises(LedgerError):
                histories.begin(chunk, histories.epoch, fence=self.rig.launch())
            return
        fence = self.launch(GENERATE)
        window = histories.begin(chunk, Epoch(plain.epoch), fence=fence)
        if window is None:
            assert histories.refusal is not None
            assert len(plain.chunks) >= self.SHAPE.recent or self.lanes[GENERATE] or self.lanes[REFINE]
            return
        plain.chunks.append(chunk)
        plain.tokens[chunk] = self.SHAPE.chunk_tokens
        plain.running[GENERATE] = (chunk, fence)
        self.check_window(histories, plain, GENERATE, chunk, window)

    def refine(self, histories: Histories, plain: Plain) -> None:
        chunk = plain.next_for(REFINE)
        if chunk is None:
            return
        fence = self.launch(REFINE)
        window = histories.refine(ChunkId(chunk), histories.epoch, fence=fence)
        plain.running[REFINE] = (chunk, fence)
        self.check_window(histories, plain, REFINE, chunk, window)

    def finish(self, histories: Histories, plain: Plain, stage: HistoryStage) -> None:
        running = plain.running[stage]
        if running is None:
            return
        self.lane_reaches(stage, running[1])
        histories.finish(ChunkId(running[0]), histories.epoch, stage)
        plain.done[stage].add(running[0])
        plain.running[stage] = None

    def hear(self, histories: Histories, plain: Plain, data: st.DataObject) -> None:
        ready = [chunk for chunk in plain.chunks[plain.heard :] if chunk in plain.done[REFINE]]
        if not ready:
            return
        chunk = data.draw(st.sampled_from(ready))
        histories.hear(ChunkId(chunk), histories.epoch)
        plain.heard = plain.chunks.index(chunk) + 1

    def slide(self, histories: Histories, plain: Plain) -> None:
        before = self.remember(histories)
        folds = histories.slide(folds=(self.launch(GENERATE), self.launch(REFINE)))
        leaving = max(0, plain.heard - self.SHAPE.recent)
        compresses = bool(leaving and self.SHAPE.long_term_tokens)

        assert [fold.stage for fold in folds] == (list(STAGES) if compresses else [])
        for fold in folds:
            assert fold.tokens == tuple(plain.tokens[chunk] for chunk in plain.chunks[:leaving])
            assert fold.first is not plain.folded
        plain.folded = plain.folded or compresses
        del plain.chunks[:leaving]
        plain.heard -= leaving
        self.expect_stale(before, histories)

    def interrupt(self, histories: Histories, plain: Plain, data: st.DataObject) -> None:
        """At the last heard chunk, or at any finished one, whole or cut; also at one that was taken as heard."""
        before = self.remember(histories)
        keep = data.draw(st.sampled_from([None, *(chunk for chunk in plain.chunks if chunk in plain.done[REFINE])]))
        tokens = data.draw(st.none() | st.integers(1, plain.tokens[keep])) if keep is not None else None
        histories.interrupt(Epoch(plain.epoch + 1), keep=None if keep is None else ChunkId(keep), tokens=tokens)
        plain.epoch += 1
        plain.heard = plain.heard if keep is None else plain.chunks.index(keep) + 1
        del plain.chunks[plain.heard :]
        plain.running = {GENERATE: None, REFINE: None}
        if keep is not None and tokens is not None:
            plain.tokens[keep] = tokens
        self.expect_stale(before, histories)

    @precondition(lambda self: any(len(plain.chunks) > 3 for plain in self.plain.values()))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        histories, _ = self.pick(data)
        self.stale += self.remember(histories)
        histories.close()
        histories.close()
        del self.histories[histories.session], self.plain[histories.session]

    @precondition(lambda self: self.lanes[GENERATE] or self.lanes[REFINE])
    @rule(data=st.data())
    def a_launch_comes_back(self, data: st.DataObject) -> None:
        stage = data.draw(st.sampled_from([stage for stage in STAGES if self.lanes[stage]]))
        self.lane_reaches(stage, self.lanes[stage][0])

    @invariant()
    def every_slot_is_owned_once_or_free(self) -> None:
        for ledger in self.rig.ledgers:
            ledger.check()

    @invariant()
    def both_histories_hold_the_same_chunks_and_nothing_dead(self) -> None:
        for session, plain in self.plain.items():
            for ledger, stage in zip(self.rig.ledgers, STAGES, strict=True):
                held = [slot for slot in ledger.held(session) if slot.chunk]
                assert plain.chunks == [slot.chunk for slot in held]
                labels = [CacheClass.RECENT] * plain.heard + [CacheClass.CURRENT] * (len(held) - plain.heard)
                assert labels == [slot.label for slot in held]
                assert all(slot.epoch == plain.epoch for slot in held if slot.label is CacheClass.CURRENT)
                assert all(slot.stage == stage for slot in held)

    @invariant()
    def anchors_never_move(self) -> None:
        for session, histories in self.histories.items():
            assert self.anchors[session] == [histories.anchors(stage) for stage in STAGES]
            for ledger, leases in zip(self.rig.ledgers, self.anchors[session], strict=True):
                assert {ledger.check_lease(lease).label for lease in leases} == {CacheClass.ANCHOR}

    @invariant()
    def a_stale_lease_always_raises(self) -> None:
        for index, lease in self.stale:
            with pytest.raises(StaleLease):
                self.rig.ledgers[index].check_lease(lease)

    def teardown(self) -> None:
        for histories in self.histories.values():
            histories.close()
        for stage in STAGES:
            self.lane_reaches(stage, self.rig.fence)
        for ledger in self.rig.ledgers:
            assert ledger.free_count == ledger.spec.count


class CompressingMachine(TwinMachine):
    SHAPE = COMPRESSING


TwinMachine.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=30, derandomize=True)
CompressingMachine.TestCase.settings = TwinMachine.TestCase.settings
TestTwinMachine = TwinMachine.TestCase
TestCompressingMachine = CompressingMachine.TestCase
