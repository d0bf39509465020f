"""Chunks on their way through several stages: n in the generator while n-1 is in the refiner and n-2 in the decoder.

1. A chunk has its condition from the moment it is planned, at its boundary, and keeps it through every stage.
2. The gate stands before the first stage: what was begun is carried through, unless its epoch dies.
3. Between two stages at most one chunk waits; a stage that is ahead waits for the one after it.
4. An epoch check stands at every hand-off. What waits is dropped at once, what runs is retired when it comes back.

       GENERATE        REFINE          DECODE
    t  [ n   ]         [ n-1 ]         [ n-2 ]     -> published, in order
                  1 waits         1 waits

It has cursors of its own (`Timeline`), a table of its own, and offers ordinary work to the one scheduler. Nothing but
tests drives one yet: a `Session` gets its face with the first family that has these stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from duplexd.engine.admission import Fidelity
from duplexd.engine.chunk import Chunk, ChunkState, ChunkTable
from duplexd.engine.monitor import StageTimes
from duplexd.engine.policy import Gate, SchedulingPolicy
from duplexd.engine.timeline import Timeline
from duplexd.engine.work import Need, Work
from duplexd.ids import ConditionVersion, SessionId, WorkId
from duplexd.streams.stage import FaceJob, StageSpec
from duplexd.units import Nanos, Span, Ticks, ticks_from_nanos


class Passing(msgspec.Struct):
    """One chunk on its way."""

    chunk: Chunk
    condition: ConditionVersion
    stage: int  #: the one it waits for or runs in
    ready_at: Nanos
    work: WorkId | None = None  #: while a lane has it


class Pipeline:
    """The face of one session.

    Args:    stages: in the order in which a chunk passes them. times: of all stages, as measured.
             length: of one chunk. fidelity: what generators work at now (`Ladder`).
    """

    def __init__(
        self,
        *,
        session: SessionId,
        stages: Sequence[StageSpec],
        length: Ticks,
        policy: SchedulingPolicy,
        times: StageTimes,
        fidelity: Fidelity,
        now: Nanos,
    ) -> None:
        self.session = session
        self.timeline = Timeline()
        self.chunks = ChunkTable(chunks_max=64)
        self.condition = ConditionVersion(0)  #: what the next chunk that is planned will take
        self.fidelity = fidelity
        self._stages = tuple(stages)
        self._index = {spec.name: index for index, spec in enumerate(stages)}
        self._length = length
        self._policy = policy
        self._times = times
        self._passing: deque[Passing] = deque()  # oldest first
        self._retiring: dict[WorkId, Passing] = {}  # of a dead epoch, still on a lane
        self._epoch_start = Ticks(0)
        self._free_since = now  # since when the first stage could take a chunk

    # What it wants ---------------------------------------------------------------------------------------------------

    def offers(self, now: Nanos) -> Iterator[Work]:
        """Work that could start now: at most one piece for each stage."""
        if self._may_begin(now):
            yield self._work(0, self.timeline.generation, self._free_since, now)
        for passing in self._waiting():
            if not self._taken(passing.stage) and not self._full(passing.stage):
                yield self._work(passing.stage, passing.chunk.span.start, passing.ready_at, now)

    def begins_at(self, now: Nanos) -> Nanos | None:
        """When the next chunk may be begun if playback goes on; None while none may, or no clock would change it."""
        if self._taken(0) or self._full(0) or self.chunks.full or self.timeline.held:
            return None
        end = Ticks(self.timeline.generation + self._length)
        limit = self._policy.lookahead(Gate(self._stages[0].role, self._length, self._budget))
        return now if limit is None else self.timeline.reenters_budget_at(end, limit, now)

    def _may_begin(self, now: Nanos) -> bool:
        at = self.begins_at(now)
        return at is not None and at <= now

    @property
    def _budget(self) -> Ticks:
        """The terminal stage's budget, and the way to it: a chunk that is begun later than that comes too late."""
        own = self._times.mean(self._stages[0].name) or 0
        after = self._times.after(self._stages[0].name) or 0
        return Ticks(self.timeline.budget(self._length) + ticks_from_nanos(own + after))

    def _waiting(self) -> Iterator[Passing]:
        return (passing for passing in self._passing if passing.work is None)

    def _taken(self, stage: int) -> bool:
        """A lane has a chunk of this session in this stage; one of a dead epoch counts, its windows are in use."""
        running = (*self._retiring.values(), *self._passing)
        return any(passing.work is not None and passing.stage == stage for passing in running)

    def _full(self, stage: int) -> bool:
        """A chunk waits already where this stage would put its next."""
        return any(passing.stage == stage + 1 for passing in self._waiting())

    def _work(self, stage: int, start: Ticks, ready_at: Nanos, now: Nanos) -> Work:
        spec, timeline = self._stages[stage], self.timeline
        return Work(
            session=self.session,
            stage=spec.name,
            role=spec.role,
            need=Need.CHUNK,
            ready_at=ready_at,
            started=timeline.published > self._epoch_start,
            silence_at=None if timeline.assumed else timeline.silence_at(start, now),
            after=self._times.after(spec.name),
        )

    # What becomes of it ----------------------------------------------------------------------------------------------

    def launch(self, work: Work, work_id: WorkId, now: Nanos) -> FaceJob:
        """The order for an offer of this moment."""
        stage = self._index[work.stage]
        if stage == 0:
            passing = self._plan(now)
        else:
            passing = next(passing for passing in self._waiting() if passing.stage == stage)
        passing.work = work_id
        chunk = passing.chunk
        return FaceJob(
            session=self.session,
            epoch=chunk.epoch,
            chunk=chunk.chunk_id,
            condition=passing.condition,
            span=chunk.span,
            steps=self.fidelity.steps,
            window=self.fidelity.window,
        )

    def _plan(self, now: Nanos) -> Passing:
        start = self.timeline.generation
        span = Span(start, Ticks(start + self._length))
        chunk = self.chunks.plan(epoch=self.timeline.epoch, offset=Ticks(0), span=span)
        self.chunks.move(chunk, ChunkState.RUNNING)
        self.timeline.generation = span.end
        passing = Passing(chunk, self.condition, 0, now)
        self._passing.append(passing)
        return passing

    def finish(self, work: WorkId, now: Nanos) -> Chunk | None:
        """A stage has come back. Returns a chunk that has passed the last one: it is published from here on."""
        if self._retire(work):
            self._free_since = now
            return None
        passing = next(passing for passing in self._passing if passing.work == work)
        if passing.stage == 0:
            self._free_since = now
        passing.work, passing.stage, passing.ready_at = None, passing.stage + 1, now
        if passing.stage < len(self._stages):
            return None
        self._passing.remove(passing)
        return self._publish(passing.chunk, now)

    def fail(self, work: WorkId, now: Nanos) -> None:
        """A stage failed: its chunk goes, and with it those behind, which were made on its history."""
        if self._retire(work):
            self._free_since = now
            return
        failed = next(passing for passing in self._passing if passing.work == work)
        failed.work = None
        for passing in [p for p in self._passing if p.chunk.span.start >= failed.chunk.span.start]:
            self._drop(passing)
        self.timeline.generation = failed.chunk.span.start
        self._free_since = now

    def _publish(self, chunk: Chunk, now: Nanos) -> Chunk:
        self.chunks.move(chunk, ChunkState.READY)
        self.chunks.move(chunk, ChunkState.PUBLISHED)
        timeline = self.timeline
        if timeline.reported >= timeline.published and timeline.reported_at < now:
            timeline.reported_at = now  # Nothing of it can be playing before it exists.
        timeline.published = chunk.span.end
        return chunk

    # Interruption ----------------------------------------------------------------------------------------------------

    def advance(self, at: Ticks, now: Nanos) -> None:
        """A new epoch begins at `at`: what waits is dropped, what runs is retired, what was not heard is taken back."""
        for passing in list(self._passing):
            self._drop(passing)
        self.chunks.interrupt(at)
        self.timeline.advance(at)
        self._epoch_start = at
        self._free_since = now

    def _drop(self, passing: Passing) -> None:
        self._passing.remove(passing)
        if passing.work is None:
            self.chunks.move(passing.chunk, ChunkState.DISCARDED)
        else:
            self.chunks.move(passing.chunk, ChunkState.RETIRING)
            self._retiring[passing.work] = passing

    def _retire(self, work: WorkId) -> bool:
        """The end of work for a dead epoch: it feeds nobody."""
        passing = self._retiring.pop(work, None)
        if passing is None:
            return False
        self.chunks.move(passing.chunk, ChunkState.DISCARDED)
        return True
