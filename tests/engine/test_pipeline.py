"""A face's chunks in three stages: the essay's schedule (seed 000), LPM's figures, interruptions, the gate."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest

from duplexd.engine.chunk import Chunk, ChunkState
from duplexd.engine.governor import Fidelity
from duplexd.engine.monitor import StageTimes
from duplexd.engine.pipeline import Made, Pipeline
from duplexd.engine.policy import Gate, Interaction, SchedulingPolicy, policy_of
from duplexd.engine.scheduler import Scheduler
from duplexd.engine.virtual import VirtualTime
from duplexd.engine.work import Need, Work
from duplexd.ids import ChunkId, ConditionVersion, Epoch, SessionId, WorkId
from duplexd.messages import Cursor, CursorReported
from duplexd.streams.stage import CostModel, PayloadKind, Role, StageSpec
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos, Span, Ticks, nanos_from_ms, ticks_from_ms

SECOND = ticks_from_ms(1000)
NAMES = ("generator", "refiner", "decoder")
ROLES = (Role.GENERATE, Role.REFINE, Role.DECODE)
STAGES = [
    StageSpec(name, role, name, PayloadKind.LATENT, PayloadKind.LATENT, CostModel())
    for name, role in zip(NAMES, ROLES, strict=True)
]
EDGES = list(pairwise(NAMES))
LPM_MS = (700.0, 700.0, 180.0)
T0 = Nanos(100 * NANOS_PER_SECOND)


class Job(msgspec.Struct, frozen=True):
    """What a stage was asked for: a copy, since a chunk changes on its way."""

    session: SessionId
    epoch: Epoch
    chunk: ChunkId
    condition: ConditionVersion
    span: Span
    steps: int


def launched(face: Pipeline, work: Work, work_id: WorkId, now: Nanos) -> Job:
    passing = face.launch(work, work_id, now)
    chunk = passing.chunk
    return Job(face.session, chunk.epoch, chunk.chunk_id, passing.condition, chunk.span, passing.fidelity.steps)


class Engine:
    """One lane a stage, in virtual time: faces offer, the scheduler chooses, costs pass, listeners play and report."""

    def __init__(self, costs_ms: tuple[float, float, float], policy: SchedulingPolicy | None = None) -> None:
        self.policy = policy or Interaction()
        self.scheduler = Scheduler({spec.name: spec for spec in STAGES}, self.policy)
        self.times = StageTimes(EDGES)
        self.costs = dict(zip(NAMES, map(nanos_from_ms, costs_ms), strict=True))
        for name in self.costs:
            self._measure(name)
        self.faces: dict[SessionId, Pipeline] = {}
        self.time = VirtualTime(T0)
        self.ran: list[tuple[float, str, Job]] = []  #: (ms, stage, job) as launched
        self.published: list[tuple[float, SessionId, Chunk]] = []
        self.hears = True  #: listeners report what they play
        self._work = 0

    def _measure(self, stage: str) -> None:
        """As the core does when a launch has come back: how long it took, and how long one must expect to wait."""
        self.times.note(stage, self.costs[stage])
        mean, reach = self.times.mean(stage), self.times.reach(stage)
        assert mean is not None
        assert reach is not None
        self.scheduler.note_times(stage, took=mean, reach=reach)

    def face(self, session: int, *, length: Ticks = SECOND) -> Pipeline:
        self.faces[SessionId(session)] = Pipeline(
            session=SessionId(session),
            stages=STAGES,
            length=length,
            lookahead=self.policy.lookahead,
            times=self.times,
            fidelity=Fidelity(2, 2),
            now=self.now,
        )
        return self.faces[SessionId(session)]

    def at(self, ms: float, act: Any) -> None:
        self.time.at(T0 + nanos_from_ms(ms), act)

    @property
    def now(self) -> Nanos:
        return self.time.now

    @property
    def ms(self) -> float:
        return (self.now - T0) / NANOS_PER_MS

    def run(self, until_ms: float, *, step_ms: float = 10.0) -> None:
        """Every `step_ms` listeners report and gates are looked at; ends of work come in between."""
        ms = self.ms
        while ms < until_ms:
            ms += step_ms
            self.at(ms, self.report)
        self._round()
        while (at := self.time.next_at()) is not None and at <= T0 + nanos_from_ms(until_ms):
            self.time.step()
            self._round()

    def report(self) -> None:
        for face in self.faces.values() if self.hears else ():
            report(face, face.timeline.playback(self.now), self.now)

    def _round(self) -> None:
        for session, face in self.faces.items():
            self.scheduler.offer(session, list(face.offers(self.now)), self.now)
        for lane in self.scheduler.idle_lanes():
            offers = self.scheduler.urgent(lane, self.now)
            work = next(offers)
            offers.close()
            self._work += 1
            work_id = WorkId(self._work)
            self.ran.append((self.ms, work.stage, launched(self.faces[work.session], work, work_id, self.now)))
            self.scheduler.begin(work_id, work.stage, [(work.session, 1)])
            self.scheduler.offer(work.session, list(self.faces[work.session].offers(self.now)), self.now)
            self._end_later(work_id, work.session, work.stage)

    def _end_later(self, work: WorkId, session: SessionId, stage: str) -> None:
        self.at(self.ms + self.costs[stage] / NANOS_PER_MS, lambda: self._end(work, session, stage))

    def _end(self, work: WorkId, session: SessionId, stage: str) -> None:
        self.scheduler.end(work, self.costs[stage])
        self._measure(stage)
        made = self.faces[session].finish(work, self.now)
        if made is not None:
            self.published.append((self.ms, session, made.chunk))

    def lane(self, stage: str) -> list[tuple[int, int]]:
        """(session, start of the chunk in ms) in the order of launches."""
        return [(int(job.session), round(job.span.start / 48)) for _, name, job in self.ran if name == stage]


def report(face: Pipeline, position: Ticks, now: Nanos) -> None:
    cursor = Cursor(face.timeline.epoch, position, now)
    buffer, age = ticks_from_ms(100), nanos_from_ms(100)
    face.timeline.report(CursorReported(face.session, cursor, buffer, age, Ticks(0), False), now)


def play(face: Pipeline, *, playback_s: float, generation_s: float, now: Nanos) -> None:
    """Put a face in the middle of its life."""
    timeline = face.timeline
    timeline.generation = timeline.published = Ticks(round(generation_s * SECOND))
    timeline.reported_at = now
    report(face, Ticks(round(playback_s * SECOND)), now)


# The essay's example -------------------------------------------------------------------------------------------------

A, B, C = 1, 2, 3


@pytest.fixture(params=[100.0, 200.0], ids=lambda ms: f"p_safe {ms:g} ms")
def essay(request: pytest.FixtureRequest) -> Engine:
    """A plays 12.7 of 13.0 s, B 30.0 of 32.0. C plays 5.2 of 6.0; C6 waits for the refiner when its person interrupts.

    Stages take 80, 80 and 30 ms: A13 can be there before 13.0 has been heard, which is in 300 ms.
    """
    engine = Engine((80.0, 80.0, 30.0), Interaction(p_safe_ms=request.param))
    for session, playback, generation in ((A, 12.7, 13.0), (B, 30.0, 32.0), (C, 5.2, 6.0)):
        play(engine.face(session), playback_s=playback, generation_s=generation, now=T0)
    c = engine.faces[SessionId(C)]
    c.launch(Work(SessionId(C), "generator", Role.GENERATE, Need.CHUNK, T0), WorkId(10_000), T0)
    c.finish(WorkId(10_000), T0)  # C6 has left the generator.
    assert [work.stage for work in c.offers(T0) if work.stage == "refiner"] == ["refiner"]
    c.advance(Ticks(round(5.2 * SECOND)), T0)
    return engine


def test_the_schedule_of_the_essay_lane_by_lane(essay: Engine) -> None:
    """Seed 000: generator A13 then C7; refiner A13 then C7; A13 decoded before its deadline; B32 and C6 never."""
    engine = essay
    engine.run(290)
    a13, c7 = (A, 13_000), (C, 5200)

    assert engine.lane("generator")[:2] == [a13, c7]
    assert engine.lane("refiner")[:2] == [a13, c7]
    assert engine.lane("decoder")[0] == a13
    assert engine.published[0][0] < 300.0
    assert engine.published[0][1] == A
    assert all(session != B for _, session, _ in engine.published)
    for stage in NAMES:
        assert B not in {session for session, _ in engine.lane(stage)}
        assert (C, 6000) not in engine.lane(stage)


def test_the_order_of_all_lanes_together_is_the_essays(essay: Engine) -> None:
    """[A13 generator] [C7 generator] [A13 refiner] [C7 refiner] [A13 decoder], by the times of their launches."""
    engine = essay
    engine.run(290)
    starts = {
        (stage, session): ms for ms, stage, session in reversed([(m, s, int(j.session)) for m, s, j in engine.ran])
    }

    assert starts["generator", A] < starts["generator", C]
    assert starts["refiner", A] < starts["refiner", C]
    assert starts["generator", C] <= starts["refiner", A]
    assert starts["refiner", C] <= starts["decoder", A]
    assert starts["decoder", A] + 30 < 300


def test_b_is_scheduled_once_its_listener_has_caught_up(essay: Engine) -> None:
    """It was not forgotten: its budget was spent."""
    engine = essay
    engine.run(2500)

    assert (B, 32_000) in engine.lane("generator")


# LPM -----------------------------------------------------------------------------------------------------------------


def test_stages_overlap_on_three_chunks() -> None:
    """Some moment has chunk n in the generator, n-1 in the refiner and n-2 in the decoder."""
    engine = Engine(LPM_MS, policy_of("fcfs"))
    engine.face(1)
    engine.run(10_000)
    running = [
        {
            stage: job.span.start // SECOND
            for at, stage, job in engine.ran
            if at <= ms < at + engine.costs[stage] / NANOS_PER_MS
        }
        for ms in range(0, 10_000, 20)
    ]

    assert any(len(now) == 3 and now["generator"] == now["refiner"] + 1 == now["decoder"] + 2 for now in running)


def test_the_period_is_that_of_the_slowest_stage_and_the_first_chunk_takes_all_three() -> None:
    """700 ms +- 2 %, 1.58 s +- 2 % (notes/papers.md §1.3), with lanes that share nothing."""
    engine = Engine(LPM_MS, policy_of("fcfs"))
    engine.face(1)
    engine.run(20_000)
    times = [ms for ms, _, _ in engine.published]

    assert times[0] == pytest.approx(1580, rel=0.02)
    for earlier, later in pairwise(times):
        assert later - earlier == pytest.approx(700, rel=0.02)


def test_behind_the_gate_the_period_is_that_of_playback_and_nothing_is_late() -> None:
    """A second of face each second, and the next chunk is there before the last has been seen."""
    engine = Engine(LPM_MS)
    engine.face(1)
    engine.run(60_000)
    times = [ms for ms, _, _ in engine.published]
    first = times[0]

    assert (times[-1] - times[10]) / (len(times) - 11) == pytest.approx(1000, rel=0.02)
    assert all(ms <= first + 1000 * number for number, ms in enumerate(times))


def test_reaction_to_a_new_condition_is_the_wait_for_a_boundary_and_the_way_through() -> None:
    """The condition changes at 5.3 s; the first chunk that has it is out one launch and one fill later at most."""
    engine = Engine(LPM_MS, policy_of("fcfs"))
    face = engine.face(1)
    engine.at(5300, lambda: setattr(face, "condition", ConditionVersion(7)))
    engine.run(12_000)
    with_it = {job.chunk for _, _, job in engine.ran if job.condition == 7}
    begun = min(ms for ms, stage, job in engine.ran if stage == "generator" and job.chunk in with_it)
    seen = min(ms for ms, _, chunk in engine.published if chunk.chunk_id in with_it)

    assert 5300 <= begun <= 5300 + 700
    # A chunk may wait behind the one before it in the refiner, as long as that takes.
    assert seen - begun == pytest.approx(1580, rel=0.02)


# Conditions and epochs -----------------------------------------------------------------------------------------------


def test_a_condition_holds_for_a_whole_chunk_in_every_stage() -> None:
    """Chunk n ends with the old one in all stages, n+1 begins with the new one; every message names it."""
    engine = Engine(LPM_MS, policy_of("fcfs"))
    face = engine.face(1)
    for version in range(1, 9):
        engine.at(1000 * version + 333, lambda v=version: setattr(face, "condition", ConditionVersion(v)))
    engine.run(12_000)
    conditions: dict[int, set[int]] = {}
    for _, _, job in engine.ran:
        conditions.setdefault(job.chunk, set()).add(job.condition)
    in_order = [next(iter(versions)) for _, versions in sorted(conditions.items())]

    assert all(len(versions) == 1 for versions in conditions.values())
    assert in_order == sorted(in_order)
    assert len(set(in_order)) > 5


def test_an_interruption_takes_back_what_waits_and_what_runs_feeds_nobody() -> None:
    """At 3 s chunks are in all three stages. No job of epoch 0 is launched again, nothing of it is published again."""
    engine = Engine(LPM_MS, policy_of("fcfs"))
    face = engine.face(1)
    engine.at(3000, lambda: face.advance(face.timeline.playback(engine.now), engine.now))
    engine.run(9000)
    later = [job for ms, _, job in engine.ran if ms >= 3000]
    published = [(ms, chunk) for ms, _, chunk in engine.published if ms >= 3000]
    spans = [chunk.span for _, chunk in published]

    assert {job.epoch for job in later} == {Epoch(1)}
    assert {chunk.epoch for _, chunk in published} == {Epoch(1)}
    assert all(a.end == b.start for a, b in pairwise(spans))
    # The old work held the generator for one step at most, then the way through.
    assert published[0][0] <= 3000 + 700 + 1580
    ids = [job.chunk for _, stage, job in engine.ran if stage == "generator"]
    assert ids == sorted(set(ids))


def test_a_stage_that_fails_takes_its_chunk_and_those_made_on_it() -> None:
    """The refiner fails chunk 2 while chunk 3 is in the generator: both are made again, in order, under new ids."""
    engine = Engine(LPM_MS, policy_of("fcfs"))
    face = engine.face(1)
    finish, failed = face.finish, []

    def faulty(work: WorkId, now: Nanos) -> Made | None:
        stage = next((p.stage, p.chunk.span.start) for p in face._passing if p.work == work) if not failed else None
        if stage == (1, 2 * SECOND):
            failed.append(work)
            face.fail(work, now)
            return None
        return finish(work, now)

    face.finish = faulty  # type: ignore[method-assign]
    engine.run(9000)
    spans = [chunk.span for _, _, chunk in engine.published]

    assert failed
    assert spans[0].start == 0
    assert all(a.end == b.start for a, b in pairwise(spans))
    assert len(spans) > 5
    assert engine.lane("generator").count((1, 2000)) == 2


# The gate ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_generation_never_runs_further_ahead_than_the_gate_allows(seed: int) -> None:
    """DESIGN §5 rule 1, in 25 000 random steps each: launches, ends, reports that are late or lost, interruptions,
    silence of the network. Checked at every launch, the chunk's own length included.
    """
    rng, times, policy = Random(seed), StageTimes(EDGES), Interaction()
    for name in NAMES:
        times.note(name, nanos_from_ms(rng.uniform(10, 700)))
    face = Pipeline(
        session=SessionId(1),
        stages=STAGES,
        length=SECOND,
        lookahead=policy.lookahead,
        times=times,
        fidelity=Fidelity(2, 2),
        now=T0,
    )
    now, number, running = T0, 0, {}
    for _ in range(25_000):
        now = Nanos(now + nanos_from_ms(rng.expovariate(1 / 40)))
        act = rng.random()
        if act < 0.5:
            offers = list(face.offers(now))
            if offers:
                work = rng.choice(offers)
                number += 1
                before = face.timeline.generation
                running[launched(face, work, WorkId(number), now).chunk, work.stage] = WorkId(number)
                if work.role is Role.GENERATE:
                    limit = policy.lookahead(Gate(Role.GENERATE, SECOND, face._budget(SECOND)))
                    assert limit is not None
                    assert face.timeline.generation == before + SECOND
                    assert face.timeline.generation - face.timeline.playback(now) <= limit
        elif act < 0.8 and running:
            work_id = running.pop(rng.choice(list(running)))
            if rng.random() < 0.03:
                face.fail(work_id, now)
            else:
                face.finish(work_id, now)
        elif act < 0.99:
            late = nanos_from_ms(rng.expovariate(1 / 60))
            report(face, Ticks(max(0, face.timeline.playback(now) - rng.randrange(4000))), Nanos(now - late))
            face.chunks.hear(face.timeline.heard)
        else:
            face.advance(face.timeline.playback(now), now)
        assert face.timeline.published <= face.timeline.generation
        assert len(face.chunks.alive()) <= face.chunks.chunks_max
        waits = [p.stage for p in face._passing if p.work is None]
        assert len(waits) == len(set(waits)) or set(waits) <= {0}

    assert number > 2000


def test_a_chunk_keeps_the_fidelity_it_was_planned_with() -> None:
    engine = Engine(LPM_MS, policy_of("fcfs"))
    face = engine.face(1)
    engine.at(3000, lambda: setattr(face, "fidelity", Fidelity(1, 1)))
    engine.run(6000)

    begun = {job.chunk: ms for ms, stage, job in engine.ran if stage == "generator"}

    assert {job.steps for _, _, job in engine.ran if begun[job.chunk] < 3000} == {2}
    assert {job.steps for _, _, job in engine.ran if begun[job.chunk] >= 3000} == {1}


def test_states_of_a_chunk_on_its_way() -> None:
    engine = Engine(LPM_MS, policy_of("fcfs"))
    face = engine.face(1)
    engine.run(1500)
    states = {chunk.span.start // SECOND: chunk.state for chunk in face.chunks.alive()}

    assert states == {0: ChunkState.RUNNING, 1: ChunkState.RUNNING, 2: ChunkState.RUNNING}
