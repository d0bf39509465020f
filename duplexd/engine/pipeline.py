"""Chunks on their way through several stages: n in the generator while n-1 is in the refiner and n-2 in the decoder.

1. A chunk has its condition and its fidelity from the moment it is planned, at its boundary, and keeps both through
   every stage.
2. The gate stands before the first stage: what was begun is carried through, unless its epoch dies.
3. Between two stages at most one chunk waits; a stage that is ahead waits for the one after it.
4. An epoch check stands at every hand-off. What waits is dropped at once, what runs is retired when it comes back.
5. The last stage may hand over a chunk in parts, each as soon as it is wanted. Of a chunk that straddles an
   interruption the parts before it are still made.

       GENERATE        REFINE          DECODE
    t  [ n   ]         [ n-1 ]         [ n-2 ]     -> published, in order, part by part
                  1 waits         1 waits

It has cursors of its own (`Timeline`), a table of its own, and offers ordinary work to the one scheduler. What a job
holds beside the names of its chunk is its owner's business (`Face`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from duplexd.channel import PICTURES_PER_SLOT
from duplexd.engine.chunk import Chunk, ChunkState, ChunkTable
from duplexd.engine.governor import Fidelity
from duplexd.engine.monitor import StageTimes
from duplexd.engine.policy import Gate
from duplexd.engine.timeline import Timeline
from duplexd.engine.work import Need, Work
from duplexd.ids import ConditionVersion, SessionId, WorkId
from duplexd.streams.stage import Role, StageSpec
from duplexd.units import Nanos, Span, Ticks, ticks_from_nanos


class Passing(msgspec.Struct):
    """One chunk on its way."""

    chunk: Chunk
    condition: ConditionVersion
    fidelity: Fidelity
    stage: int  #: the one it waits for or runs in
    ready_at: Nanos
    part: Span  #: what the last stage makes of it now, or made last
    work: WorkId | None = None  #: while a lane has it


class Made(msgspec.Struct, frozen=True):
    """The last stage has come back with a part of a chunk."""

    chunk: Chunk
    fidelity: Fidelity
    span: Span  #: empty when an interruption has taken all of it
    last: bool  #: nothing more of this chunk is made
    condition: ConditionVersion  #: the chunk was planned with it


class Pipeline:
    """The chunks of one session's face.

    Args:    stages: in the order in which a chunk passes them. times: of all stages, as measured.
             length: of the next chunk. lookahead: how far a stage may run ahead, as policies answer it.
             fidelity: of the next chunk. timeline: the output's cursors.
             part: what the last stage makes at once, by fidelity; None: whole chunks.
    """

    def __init__(
        self,
        *,
        session: SessionId,
        stages: Sequence[StageSpec],
        length: Ticks | None,
        lookahead: Callable[[Gate], Ticks | None],
        times: StageTimes,
        fidelity: Fidelity,
        timeline: Timeline | None = None,
        part: Callable[[Fidelity], Ticks] | None = None,
        now: Nanos,
    ) -> None:
        self.session = session
        self.timeline = Timeline() if timeline is None else timeline
        self.chunks = ChunkTable(chunks_max=64)
        self.condition = ConditionVersion(0)  #: what the next chunk that is planned will take
        self.fidelity = fidelity
        self.length = length  #: None: no chunk may begin
        self.parts_ahead: Ticks | None = None  #: how far the last stage's parts may reach ahead of playback
        self._stages = tuple(stages)
        self._last = len(stages) - 1
        self._index = {spec.name: index for index, spec in enumerate(stages)}
        self._lookahead = lookahead
        self._part = part
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
            if self._taken(passing.stage) or self._full(passing.stage):
                continue
            start = passing.chunk.span.start
            if passing.stage == self._last:
                if self._part_at(passing, now) > now:
                    continue
                start = passing.part.end
            yield self._work(passing.stage, start, passing.ready_at, now)

    def begins_at(self, now: Nanos) -> Nanos | None:
        """When the next chunk may be begun if playback goes on; None while none may, or no clock would change it."""
        if self.length is None or self._taken(0) or self._full(0) or self.chunks.full or self.timeline.held:
            return None
        end = Ticks(self.timeline.generation + self.length)
        limit = self._lookahead(Gate(self._stages[0].role, self.length, self._budget(self.length)))
        return now if limit is None else self.timeline.reenters_budget_at(end, limit, now)

    def part_at(self, now: Nanos) -> Nanos | None:
        """When the next part may be made; None while no chunk waits for that."""
        waiting = (passing for passing in self._waiting() if passing.stage == self._last)
        return min((self._part_at(passing, now) for passing in waiting), default=None)

    def _part_at(self, passing: Passing, now: Nanos) -> Nanos:
        if self.parts_ahead is None:
            return now
        # A part that waits for playback which stands still waits for whatever sets it going.
        at = self.timeline.reenters_budget_at(self._next_part(passing).end, self.parts_ahead, now)
        return Nanos(2**62) if at is None else at

    def _may_begin(self, now: Nanos) -> bool:
        at = self.begins_at(now)
        return at is not None and at <= now

    def _budget(self, length: Ticks) -> Ticks:
        """The terminal stage's budget, and the way to it: a chunk that is begun later than that comes too late."""
        return Ticks(self.timeline.budget(length) + ticks_from_nanos(self.way()))

    def way(self) -> Nanos:
        """From the beginning of a chunk to its first part, on average. A stage that never ran takes what its plan says:
        were it nothing, whoever skips frames by the plan would skip ahead of this for ever, and nothing ever ran.
        """
        return Nanos(sum(self._took(stage) for stage in self._stages))

    def _took(self, stage: StageSpec) -> int:
        units = PICTURES_PER_SLOT if stage.role is Role.DECODE else 1
        return self._times.mean(stage.name) or stage.cost.predict_us(rows=1, units=units) * 1000

    def _waiting(self) -> Iterator[Passing]:
        return (passing for passing in self._passing if passing.work is None)

    def _taken(self, stage: int) -> bool:
        """A lane has a chunk of this session in this stage; one of a dead epoch counts, its windows are in use."""
        running = (*self._retiring.values(), *self._passing)
        return any(passing.work is not None and passing.stage == stage for passing in running)

    def _full(self, stage: int) -> bool:
        """A chunk waits already where this stage would put its next."""
        return any(passing.stage == stage + 1 for passing in self._waiting())

    def _next_part(self, passing: Passing) -> Span:
        start, end = passing.part.end, passing.chunk.span.end
        if self._part is None:
            return Span(start, end)
        return Span(start, Ticks(min(end, start + self._part(passing.fidelity))))

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

    @property
    def newest(self) -> Passing | None:
        """The chunk that was planned last, while it is on its way."""
        return self._passing[-1] if self._passing else None

    # What becomes of it ----------------------------------------------------------------------------------------------

    def launch(self, work: Work, work_id: WorkId, now: Nanos) -> Passing:
        """The order for an offer of this moment: which chunk, and for the last stage which part of it."""
        stage = self._index[work.stage]
        if stage == 0:
            passing = self._plan(now)
        else:
            passing = next(passing for passing in self._waiting() if passing.stage == stage)
        if stage == self._last:
            passing.part = self._next_part(passing)
        passing.work = work_id
        return passing

    def _plan(self, now: Nanos) -> Passing:
        assert self.length is not None, "offered while no chunk may begin"
        start = self.timeline.generation
        span = Span(start, Ticks(start + self.length))
        chunk = self.chunks.plan(epoch=self.timeline.epoch, offset=Ticks(0), span=span, condition=self.condition)
        self.chunks.move(chunk, ChunkState.RUNNING)
        self.timeline.generation = span.end
        passing = Passing(chunk, self.condition, self.fidelity, 0, now, Span(start, start))
        self._passing.append(passing)
        return passing

    def finish(self, work: WorkId, now: Nanos) -> Made | None:
        """A stage has come back. Returns what has passed the last one: it is published from here on."""
        if self._retire(work):
            self._free_since = now
            return None
        passing = next(passing for passing in self._passing if passing.work == work)
        if passing.stage == 0:
            self._free_since = now
        passing.work, passing.ready_at = None, now
        if passing.stage < self._last:
            passing.stage += 1
            return None
        return self._hand_over(passing, now)

    def _hand_over(self, passing: Passing, now: Nanos) -> Made:
        chunk, part = passing.chunk, passing.part
        span = Span(Ticks(min(part.start, chunk.span.end)), Ticks(min(part.end, chunk.span.end)))
        last = part.end >= chunk.span.end
        if last:
            self._passing.remove(passing)
            self._publish(chunk)
        timeline = self.timeline
        if timeline.reported >= timeline.published and timeline.reported_at < now:
            timeline.reported_at = now  # Nothing of it can be playing before it exists.
        timeline.published = Ticks(max(timeline.published, span.end))
        return Made(chunk, passing.fidelity, span, last, passing.condition)

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

    def _publish(self, chunk: Chunk) -> None:
        self.chunks.move(chunk, ChunkState.READY)
        self.chunks.move(chunk, ChunkState.PUBLISHED)

    # Interruption ----------------------------------------------------------------------------------------------------

    def advance(self, at: Ticks, now: Nanos, *, parts: bool = True) -> list[Passing]:
        """A new epoch begins at `at`: what waits is dropped, what runs is retired, what was not heard is taken back.

        Args:    parts: parts of a chunk that lie before `at` are still made.
        Returns: those that nothing more becomes of; what a lane still has of them names its work.
        """
        gone = []
        for passing in list(self._passing):
            if parts and passing.stage == self._last and passing.chunk.span.start < at:
                if not self._clip(passing, at):
                    continue
            else:
                self._drop(passing)
            gone.append(passing)
        self.chunks.interrupt(at, keep=[passing.chunk.chunk_id for passing in self._passing])
        self.timeline.advance(at)
        self._epoch_start = at
        self._free_since = now
        return gone

    def _clip(self, passing: Passing, at: Ticks) -> bool:
        """A chunk ends at `at` now; True when all that is left of it has been handed over."""
        chunk = passing.chunk
        chunk.span = Span(chunk.span.start, Ticks(min(chunk.span.end, at)))
        if passing.work is not None or passing.part.end < chunk.span.end:
            return False
        self._passing.remove(passing)
        self._publish(chunk)
        return True

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
