"""Twin histories: the noisy window of a generator and the clean window of a refiner, one pair per session (LPM Fig. 6).

1. Both histories hold the same chunks, each with its own sink. A chunk takes its slot in both at once, or in neither.
2. A window reads anchors, what was compressed, the last W chunks its own stage has finished, and the chunk in work. A
   stage takes chunks one by one, in order: the refiner at n-1 reads n-3, n-2 while the generator at n reads n-2, n-1.
3. Heard chunks are RECENT, and the last W of them stay: the first chunk of a new epoch follows what was seen last.
4. An interruption discards, in both histories, all that was not seen. No dead slot is ever read.
5. Every launch that touches a history runs on one lane, in the order of the calls that gave it out. A slot remembers
   the newest launch that reads or writes it and is free once that one has passed: earlier ones have passed by then.
6. Nothing is copied. Committing relabels; sliding folds first (where the model compresses) and frees afterwards.
7. At its bound `begin` says no and why, and changes nothing; the caller waits until a chunk is heard or a fence passes.
   A call that raises changes nothing either.

    chunk in one history         begin           finish          hear            slide
                          EMPTY -------> RUNNING ------> WRITTEN ------> RECENT ------> (folded) retiring, free
                                 refine     |               |  interrupt: not seen
                                            +---------------+-----------------------------> retiring, free
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec

from duplexd.errors import ArenaFull, ConfigError, LedgerError, StaleLease
from duplexd.ids import ChunkId, Epoch, FenceId, SessionId
from duplexd.memory.classes import CacheClass
from duplexd.memory.layout import FieldSpec, PartitionKind, PartitionSpec
from duplexd.memory.ledger import FIRST_EPOCH, NO_CHUNK, Held, Lease, Refusal, SlotLedger
from duplexd.memory.window import Window, place_window, select_window
from duplexd.units import Ticks

HistoryStage = Literal["generate", "refine"]
GENERATE: HistoryStage = "generate"  #: reads and writes the noisy history
REFINE: HistoryStage = "refine"  #: reads and writes the clean history


class HistoryShape(msgspec.Struct, frozen=True, kw_only=True):
    """What one session keeps in each of its two histories. Both models see the same grid of tokens."""

    chunk_tokens: int  #: of a whole chunk; every slot has room for as many
    anchor_tokens: tuple[int, ...]  #: written in each anchor slot
    recent: int  #: W: finished chunks a window reads, and heard chunks that stay for an interruption
    lookahead: int  #: L: chunks begun and not yet heard (`lookahead_chunks`)
    long_term_tokens: int = 0  #: of the slot that slid chunks are folded into; 0: the model forgets them

    @property
    def retiring(self) -> int:
        """F: slots that one running launch may hold back.

        It reads W chunks and writes one, and an interruption discards the unheard among these while it runs. A second
        interruption before it has ended may find `begin` refused until it has.
        """
        return self.recent + 1

    @property
    def slots(self) -> int:
        """Slots of one session in one history: anchors, long-term, W heard, L unheard, F retiring.

        The W heard are there for an interruption even while the window reads unheard chunks only, so rolling back takes
        no slots beyond these.
        """
        return len(self.anchor_tokens) + bool(self.long_term_tokens) + self.recent + self.lookahead + self.retiring

    def partition(self, name: str, fields: tuple[FieldSpec, ...], *, sessions: int) -> PartitionSpec:
        """The partition of one history of so many sessions.

        Raises:  ConfigError when a number is too small, or a slot is too small for what it shall hold.
        """
        largest = max(*self.anchor_tokens, self.long_term_tokens, 0)
        if min(self.chunk_tokens, self.recent, self.lookahead, sessions) < 1 or largest > self.chunk_tokens:
            raise ConfigError(
                f"histories {name!r} of {sessions} sessions with {self}: chunk_tokens, recent, lookahead and sessions "
                "are at least 1, and no slot holds more than chunk_tokens"
            )
        slots = self.slots
        anchors = len(self.anchor_tokens)
        return PartitionSpec(
            name, PartitionKind.RING, sessions * slots, fields, session_slots=slots, anchor_slots=anchors
        )


def lookahead_chunks(budget: Ticks, chunk: Ticks, *, error: Ticks = Ticks(0)) -> int:
    """The most chunks begun and not yet heard under `generation - playback <= budget` (DESIGN §5 rule 1).

    Args:    error: how far behind the playback cursor a chunk is taken as heard (the published error bound).
    """
    return -(-(budget + error) // chunk)


class Fold(msgspec.Struct, frozen=True):
    """An order to a model: fold chunks that leave a history into its long-term slot, as launch `fence`.

    The sources are stale already and stay readable until `fence` has passed; nobody else may read them. A launch of it
    that fails ends its session: what it should have folded is gone, and the target may hold a part of it.
    """

    stage: HistoryStage
    fence: FenceId
    sources: tuple[Lease, ...]  #: oldest first
    tokens: tuple[int, ...]  #: visible in each source
    target: Lease
    first: bool  #: the target holds nothing yet


class _State(Enum):
    EMPTY = "empty"
    RUNNING = "running"
    WRITTEN = "written"


class _Entry(msgspec.Struct):
    """One slot of a history."""

    lease: Lease
    tokens: int  #: that a window sees
    state: _State
    fence: FenceId | None = None  #: the newest launch that reads or writes the slot


class _History:
    """One stage's half: its sink, its long-term slot and its chunks, oldest first."""

    def __init__(self, ledger: SlotLedger, session: SessionId, stage: HistoryStage, shape: HistoryShape) -> None:
        self.ledger = ledger
        self.stage = stage
        self.chunks: dict[ChunkId, _Entry] = {}
        self.fence: FenceId | None = None  #: the newest launch that touches any slot
        self._session = session
        self._shape = shape
        self.anchors = [self._open(CacheClass.ANCHOR, tokens, _State.WRITTEN) for tokens in shape.anchor_tokens]
        self.long_term = (
            self._open(CacheClass.LONG_TERM, shape.long_term_tokens, _State.EMPTY) if shape.long_term_tokens else None
        )

    def _open(self, label: CacheClass, tokens: int, state: _State) -> _Entry:
        lease = self.ledger.lease(self._session, label, stage=self.stage)
        if lease is None:
            full = self.ledger.full(self._session, self._shape.slots)
            self.ledger.close(self._session, after=None)
            raise full
        return _Entry(lease, tokens, state)

    def lease(self, chunk: ChunkId, epoch: Epoch) -> bool:
        lease = self.ledger.lease(self._session, CacheClass.CURRENT, chunk=chunk, epoch=epoch, stage=self.stage)
        if lease is not None:
            self.chunks[chunk] = _Entry(lease, self._shape.chunk_tokens, _State.EMPTY)
        return lease is not None

    def find(self, chunk: ChunkId, epoch: Epoch) -> _Entry:
        """Raises StaleLease when this epoch has no such chunk here: it was discarded, or it slid out."""
        entry = self.chunks.get(chunk)
        if entry is None or self._held(entry).epoch != epoch:
            raise StaleLease(
                f"session {self._session} holds no chunk {chunk} of epoch {epoch} in its {self.stage} history"
            )
        return entry

    def check_fence(self, fence: FenceId) -> None:
        """Raises LedgerError for a launch named before another one of this history: rule 5 would free too early."""
        if self.fence is not None and fence <= self.fence:
            raise LedgerError(f"session {self._session}: {self.stage} launches {fence} after {self.fence}; fences grow")

    def check_written(self, *, before: ChunkId) -> None:
        """Raises LedgerError when an earlier chunk is still missing: its successor would read a hole."""
        for chunk, entry in self.chunks.items():
            if chunk < before and entry.state is not _State.WRITTEN:
                raise LedgerError(
                    f"session {self._session}: {self.stage} has not finished chunk {chunk} ({entry.state.value}), "
                    "and what comes after it must wait"
                )

    def run(self, chunk: ChunkId, epoch: Epoch, fence: FenceId) -> Window:
        """The window of one chunk, last in it, and from now on launch `fence` may touch every slot of the window."""
        current = self.chunks[chunk]
        readable = [*self.anchors, *([self.long_term] if self.long_term else []), *self.chunks.values()]
        finished = {entry.lease: entry for entry in readable if entry.state is _State.WRITTEN}
        held = select_window(
            [self._held(entry) for entry in finished.values()], epoch=epoch, recent_max=self._shape.recent
        )
        entries = [*(finished[slot.lease] for slot in held), current]
        self._touch(entries, fence)
        current.state = _State.RUNNING
        return place_window([*held, self._held(current)], [entry.tokens for entry in entries])

    def commit(self, chunk: ChunkId) -> None:
        if self._label(chunk) is CacheClass.CURRENT:
            self.ledger.commit(self.chunks[chunk].lease)

    def discard(self, chunk: ChunkId) -> None:
        entry = self.chunks.pop(chunk)
        self.ledger.discard(entry.lease, after=entry.fence)

    def heard(self) -> list[ChunkId]:
        """Oldest first; they come before all unheard ones."""
        return [chunk for chunk in self.chunks if self._label(chunk) is CacheClass.RECENT]

    def slide(self, leaving: list[ChunkId], fold: FenceId | None) -> Fold | None:
        """Let go of heard chunks: behind the launches that read them, `fold` included."""
        order = self._fold([self.chunks[chunk] for chunk in leaving], fold) if fold is not None else None
        for chunk in leaving:
            self.discard(chunk)
        return order

    def _fold(self, sources: list[_Entry], fence: FenceId) -> Fold | None:
        target = self.long_term
        if target is None:
            return None
        first = target.state is _State.EMPTY
        # Fold first, free afterwards: the sources are let go of next, and wait for this fence.
        self._touch([*sources, target], fence)
        target.state = _State.WRITTEN
        leases, tokens = tuple(source.lease for source in sources), tuple(source.tokens for source in sources)
        return Fold(self.stage, fence, leases, tokens, target.lease, first)

    def _touch(self, entries: list[_Entry], fence: FenceId) -> None:
        self.fence = fence
        for entry in entries:
            entry.fence = fence

    def _held(self, entry: _Entry) -> Held:
        return self.ledger.check_lease(entry.lease)

    def _label(self, chunk: ChunkId) -> CacheClass:
        return self._held(self.chunks[chunk]).label


class Histories:
    """Both histories of one session, and the leases in them, addressed by (chunk, epoch, stage).

    Args:    generator, refiner: the ledgers of the partitions that `shape.partition` describes; they must know which
             fences have passed (`passed`), as finished launches are named here.
    Raises:  ArenaFull when the anchors find no room: admission reserves `shape.slots` in both.
    """

    def __init__(
        self,
        generator: SlotLedger,
        refiner: SlotLedger,
        session: SessionId,
        shape: HistoryShape,
        *,
        epoch: Epoch = FIRST_EPOCH,
    ) -> None:
        self.session = session
        self.shape = shape
        self.epoch = epoch
        self.refusal: Refusal | None = None  #: why the last `begin` said no; None after a yes
        self._newest = NO_CHUNK
        self._generator = _History(generator, session, GENERATE, shape)
        try:
            self._refiner = _History(refiner, session, REFINE, shape)
        except ArenaFull:
            generator.close(session, after=None)
            raise
        self._both = (self._generator, self._refiner)

    # A chunk's way through the stages --------------------------------------------------------------------------------

    def begin(self, chunk: ChunkId, epoch: Epoch, *, fence: FenceId) -> Window | None:
        """Take a chunk's slots; returns what the generator reads and writes, as launch `fence`.

        Returns: None when there is no room; `refusal` says which.
        Raises:  LedgerError for a dead epoch, a chunk id that is not new, or before the predecessor is finished.
        """
        if epoch != self.epoch or chunk <= self._newest:
            raise LedgerError(
                f"session {self.session} is in epoch {self.epoch} and began chunk {self._newest}; "
                f"chunk {chunk} of epoch {epoch} cannot begin"
            )
        self._generator.check_fence(fence)
        self._generator.check_written(before=chunk)
        self.refusal = self._lease(chunk)
        if self.refusal is not None:
            return None
        self._newest = chunk
        return self._generator.run(chunk, epoch, fence)

    def _lease(self, chunk: ChunkId) -> Refusal | None:
        for history in self._both:
            if not history.lease(chunk, self.epoch):
                refusal = history.ledger.refusal
                if chunk in self._generator.chunks:
                    self._generator.discard(chunk)  # nothing was launched for it
                return refusal
        return None

    def refine(self, chunk: ChunkId, epoch: Epoch, *, fence: FenceId) -> Window:
        """Hand a chunk on; returns what the refiner reads and writes, as launch `fence`.

        Raises:  StaleLease for a chunk of a dead epoch; LedgerError before the generator is done with it, before the
                 refiner is done with its predecessor, or a second time.
        """
        entry = self._refiner.find(chunk, epoch)
        self._refiner.check_fence(fence)
        self._generator.check_written(before=ChunkId(chunk + 1))
        self._refiner.check_written(before=chunk)
        if entry.state is not _State.EMPTY:
            raise LedgerError(f"session {self.session}: chunk {chunk} was handed to the refiner before")
        return self._refiner.run(chunk, epoch, fence)

    def finish(self, chunk: ChunkId, epoch: Epoch, stage: HistoryStage) -> None:
        """A stage's launch came back, and the chunk may be read there.

        Raises:  StaleLease for a chunk of a dead epoch; LedgerError when the stage is not running it.
        """
        entry = self._history(stage).find(chunk, epoch)
        if entry.state is not _State.RUNNING:
            raise LedgerError(f"session {self.session}: {stage} finished chunk {chunk}, which was {entry.state.value}")
        entry.state = _State.WRITTEN

    # What was heard, and what was not --------------------------------------------------------------------------------

    def hear(self, chunk: ChunkId, epoch: Epoch) -> None:
        """Commit a chunk and all before it, in both histories. Hearing one again is nothing; `slide` comes after it.

        Raises:  StaleLease for a chunk that is not here; LedgerError for one the refiner has not finished.
        """
        self._refiner.find(chunk, epoch)
        self._refiner.check_written(before=ChunkId(chunk + 1))
        self._commit(chunk)

    def slide(self, *, folds: tuple[FenceId, FenceId] | None = None) -> tuple[Fold, ...]:
        """Let go of the heard chunks before the last W, in both histories.

        Args:    folds: the launches that would fold, generator's and refiner's; needed where the model compresses.
        Returns: the folds to launch, at most one per history; the chunks are free once these and their readers passed.
        """
        heard = self._generator.heard()
        leaving = heard[: max(0, len(heard) - self.shape.recent)]
        if not leaving:
            return ()
        if folds is None and self.shape.long_term_tokens:
            raise LedgerError(
                f"session {self.session}: chunks {leaving} slide out, and no launch is named to fold them"
            )
        launches = list(zip(self._both, folds or (None, None), strict=True))
        for history, fold in launches:
            if fold is not None:
                history.check_fence(fold)
        orders = [history.slide(leaving, fold) for history, fold in launches]
        return tuple(order for order in orders if order is not None)

    def interrupt(self, epoch: Epoch, *, keep: ChunkId | None = None, tokens: int | None = None) -> None:
        """Begin a new epoch behind the last chunk that was seen; all after it is discarded, behind its fences.

        Args:    keep: the last chunk any of which is seen, resident and finished; None: the last heard one.
                 tokens: how many of its tokens stay; the rest is masked for ever. None: all.
                 A chunk that straddles the cursor is kept whole when the model's `Cut` is the end of the chunk, as it
                 plays on. A model cut at the cursor keeps the tokens seen, or drops it: `keep` is the chunk before.
                 What was taken as heard by mistake may be dropped too; what slid out is not brought back.
        Raises:  LedgerError for an epoch that is not newer, a chunk that is not finished or tokens it has not;
                 StaleLease for a chunk that is not here. Nothing is changed then.
        """
        last = keep if keep is not None else max(self._generator.heard(), default=NO_CHUNK)
        self._check_interrupt(epoch, keep, tokens)
        for history in self._both:
            for chunk in [chunk for chunk in history.chunks if chunk > last]:
                history.discard(chunk)
            if tokens is not None:
                history.chunks[last].tokens = tokens
        self._commit(last)
        self.epoch = epoch

    def close(self, *, after: tuple[FenceId, ...] = ()) -> None:
        """Let go of everything, behind all launches named here and `after` (the anchors' own). Twice is nothing."""
        fences = (*after, *(history.fence for history in self._both if history.fence is not None))
        for history in self._both:
            history.chunks.clear()
            history.ledger.close(self.session, after=fences)

    # Questions -------------------------------------------------------------------------------------------------------

    def anchors(self, stage: HistoryStage) -> tuple[Lease, ...]:
        """The sink of one history; the model writes it on the history's lane before chunks are begun."""
        return tuple(entry.lease for entry in self._history(stage).anchors)

    def chunks(self) -> tuple[ChunkId, ...]:
        """Resident chunks, oldest first, the same in both histories."""
        return tuple(self._generator.chunks)

    def heard(self) -> tuple[ChunkId, ...]:
        """Resident chunks that were heard, oldest first."""
        return tuple(self._generator.heard())

    def _history(self, stage: HistoryStage) -> _History:
        return self._generator if stage == GENERATE else self._refiner

    def _commit(self, upto: ChunkId) -> None:
        for history in self._both:
            for chunk in history.chunks:
                if chunk <= upto:
                    history.commit(chunk)

    def _check_interrupt(self, epoch: Epoch, keep: ChunkId | None, tokens: int | None) -> None:
        if epoch <= self.epoch:
            raise LedgerError(f"session {self.session} is in epoch {self.epoch}; epoch {epoch} is not newer")
        if keep is None:
            if tokens is not None:
                raise LedgerError(f"session {self.session}: {tokens} tokens of no chunk were kept")
            return
        entry = self._refiner.chunks.get(keep)
        if entry is None:
            raise StaleLease(f"session {self.session} holds no chunk {keep} to continue from; it has {self.chunks()}")
        self._refiner.check_written(before=ChunkId(keep + 1))
        if tokens is not None and not 0 < tokens <= entry.tokens:
            raise LedgerError(
                f"session {self.session}: {tokens} tokens of chunk {keep} were seen, it has {entry.tokens}; "
                "keep the chunk before it when none was"
            )
