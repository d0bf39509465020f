"""`duplexd bench scheduler`: what deciding costs, at a thousand sessions and for one launched step.

1. Time is processor time of the thread that decides. Stages, lanes and the front end run on threads of their own.
2. A round is what the scheduler does: it takes over the offers that changed and finds the most urgent of a lane. What a
   session does to find out what it wants is in the figure of one event.
3. `overhead_us_per_step` is everything the engine's thread does, over the launches it made: facts and news through the
   channel, sessions, scheduler, launching and taking ends. Stages do nothing and listeners hear at once, so it is busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from statistics import median, quantiles
from typing import Any

from duplexd.bench import audience
from duplexd.channel import Channel, MediaShape
from duplexd.clock import thread_time
from duplexd.engine.core import EngineCore
from duplexd.engine.live import LiveWorld
from duplexd.engine.loop import drive
from duplexd.engine.policy import SchedulingPolicy, policy_of
from duplexd.engine.process import EngineConfig, core_of, layout_of, load_plan
from duplexd.engine.scheduler import Scheduler
from duplexd.engine.work import Launch, Need, StageFinished, Work
from duplexd.ids import SessionId, WorkId
from duplexd.messages import (
    Cursor,
    CursorReported,
    PublishChunk,
    SessionOpened,
    SlotsFreed,
    TextArrived,
)
from duplexd.streams.executor import Executor
from duplexd.streams.graph import ModelPlan, TextStream
from duplexd.streams.lane import Fences, HostLane
from duplexd.streams.stage import (
    CopyResult,
    CostModel,
    ListenResult,
    PayloadKind,
    RenderJob,
    RenderResult,
    Role,
    StageSpec,
    TalkJob,
    TalkResult,
    ThinkJob,
    ThinkResult,
    WordSpan,
)
from duplexd.units import NANOS_PER_MS, Nanos, Ticks, ticks_from_ms

SESSIONS = 1000
CHANGED = 100
ROUNDS = 400
LIVE_SESSIONS = 8
REPLIES = 200
RUNS = 5
WORD = ticks_from_ms(400)
WORDS_PER_REPLY = 12
WORDS_PER_CLAUSE = 4


def bench() -> dict[str, Any]:
    """Returns what `--json` writes."""
    return {**round_figures(), **event_figures(), **median_of(RUNS, overhead_figures)}


def median_of(runs: int, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure over several runs, and all of `overhead_us_per_step`: the machine has other work."""
    reports = [measure() for _ in range(runs)]
    figures = {name: median(report[name] for report in reports) for name in reports[0]}
    return {**figures, "overhead_us_runs": [report["overhead_us_per_step"] for report in reports]}


# The round -----------------------------------------------------------------------------------------------------------


def round_figures(*, sessions: int = SESSIONS, changed: int = CHANGED, rounds: int = ROUNDS) -> dict[str, Any]:
    """All play and have one chunk ready; a tenth has changed since the last round; the most urgent is launched."""
    names = {"interaction": "", "fcfs": "_fcfs", "edf": "_edf"}
    report: dict[str, Any] = {}
    for name, suffix in names.items():
        times = list(rounds_of(policy_of(name), sessions, changed, rounds))
        report[f"round_us_{sessions}_sessions{suffix}"] = _us(median(times))
        if not suffix:
            report[f"round_us_p99_{sessions}_sessions"] = _us(quantiles(times, n=100)[98])
    return report


def rounds_of(policy: SchedulingPolicy, sessions: int, changed: int, rounds: int) -> Iterator[Nanos]:
    """Thread time of each round."""
    spec = StageSpec("render", Role.RENDER, "voice", PayloadKind.LATENT, PayloadKind.AUDIO, CostModel())
    scheduler = Scheduler({"render": spec}, policy)
    rng = Random(1)
    now = Nanos(1000 * NANOS_PER_MS)
    for session in range(1, sessions + 1):
        scheduler.offer(SessionId(session), [_chunk(session, now, rng)], now)
    for number in range(1, rounds + 1):
        now = Nanos(now + 5 * NANOS_PER_MS)
        offers = [_chunk(session, now, rng) for session in rng.sample(range(1, sessions + 1), changed)]
        begun = thread_time()
        for offer in offers:
            scheduler.offer(offer.session, [offer], now)
        scheduler.note_pool(0.5)
        for lane in scheduler.idle_lanes():
            urgent = scheduler.urgent(lane, now)
            work = next(urgent)
            urgent.close()
            scheduler.offer(work.session, (), now)
            scheduler.begin(WorkId(number), work.stage, [(work.session, 1)])
        yield Nanos(thread_time() - begun)
        scheduler.end(WorkId(number), Nanos(2 * NANOS_PER_MS))
        scheduler.offer(work.session, [_chunk(work.session, now, rng)], now)


def _chunk(session: int, now: Nanos, rng: Random) -> Work:
    """The next chunk of a reply that plays; half of them are within P_safe of silence."""
    left = Nanos(rng.randrange(800) * NANOS_PER_MS)
    return Work(
        session=SessionId(session),
        stage="render",
        role=Role.RENDER,
        need=Need.CHUNK,
        ready_at=now,
        started=True,
        silence_at=Nanos(now + left),
        sent_silence_at=Nanos(now + left),
        after=Nanos(0),
        pool_share=rng.random() / 100,
    )


# A model that does nothing -------------------------------------------------------------------------------------------


class _Words(TextStream):
    """Token k is word k; a clause ends after every fourth, a reply after the twelfth."""

    def push(self, token: int) -> str:
        count = token - 9
        mark = "." if count == WORDS_PER_REPLY else "," if count % WORDS_PER_CLAUSE == 0 else ""
        return f"{' ' if count > 1 else ''}word{mark}"


class _Dialect:
    """What the person says is one token, what the character says is `WORDS_PER_REPLY`."""

    stop: tuple[int, ...] = (0,)

    def anchor(self) -> list[int]:
        return [1]

    def instruct(self, text: str) -> list[int]:
        return self.words(text, first=True)

    def sight(self, *, present: bool) -> list[int]:
        return []

    def open_user(self) -> list[int]:
        return [2]

    def words(self, text: str, *, first: bool) -> list[int]:
        return [3 for _ in text.split()]

    def close_user_open_reply(self) -> list[int]:
        return [4]

    def close_reply(self) -> list[int]:
        return [5]

    def stream(self) -> TextStream:
        return _Words()


class IdleStage:
    """Answers at once with what the core expects, and computes nothing."""

    def __init__(self, spec: StageSpec) -> None:
        self.spec = spec

    def load(self, arena: Any) -> None:
        """It has no weights."""

    def run(self, jobs: Sequence[Any], media: Any) -> list[Any]:
        return [_answer(job) for job in jobs]


def _answer(job: Any) -> Any:
    if isinstance(job, ThinkJob):
        spoken = len(job.reply)
        tokens = [10 + k if k < WORDS_PER_REPLY else 0 for k in range(spoken, spoken + job.steps)]
        return ThinkResult(job.session, tuple(tokens[: tokens.index(0) + 1] if 0 in tokens else tokens))
    if isinstance(job, TalkJob):
        return _talk(job)
    if isinstance(job, RenderJob):
        return RenderResult(job.session, job.length // 2)
    return CopyResult(job.session, 0) if hasattr(job, "slot") else ListenResult(job.session, "")


def _talk(job: TalkJob) -> TalkResult:
    words = job.text.split()
    spans, at = [], 0
    for index, word in enumerate(words):
        spans.append(WordSpan(at, at + len(word), Ticks(index * WORD), Ticks((index + 1) * WORD)))
        at += len(word) + 1
    return TalkResult(job.session, Ticks(len(words) * WORD), tuple(spans))


def idle_plan() -> ModelPlan:
    """The word clock's stages and sizes, with a language of one word."""
    plan = load_plan("clock", {})
    plan.dialect = _Dialect()
    return plan


def idle_core(plan: ModelPlan, sessions: int, policy: str) -> EngineCore:
    media = MediaShape(in_slots=64, in_samples=512, out_slots=8 * sessions, out_samples=24_000)
    # Listeners who hear at once are always late; places that follow that would end the measurement early.
    config = EngineConfig(model="clock", media=media, sessions_max=sessions, policy=policy, lanes_target=0.0)
    return core_of(config, plan, layout_of(plan, sessions))


# One event at a thousand sessions ------------------------------------------------------------------------------------


def event_figures(*, sessions: int = SESSIONS, events: int = 2000) -> dict[str, Any]:
    """The core at work on one cursor report: with many sessions playing, and with few; their ratio says how it grows.

    A small core is measured in turns with the large one, so that whatever slows the machine slows both.
    """
    large, small = PlayingCrowd(sessions), PlayingCrowd(10)
    times: dict[PlayingCrowd, list[Nanos]] = {large: [], small: []}
    for _ in range(events):
        for crowd, took in times.items():
            took.append(crowd.report())
    figures = {crowd: median(took) for crowd, took in times.items()}
    return {
        f"event_us_{sessions}_sessions": _us(figures[large]),
        f"event_ratio_{sessions}_over_10_sessions": round(figures[large] / figures[small], 2),
    }


class PlayingCrowd:
    """Sessions whose replies play; reports of their listeners come one by one."""

    def __init__(self, sessions: int) -> None:
        self._core = idle_core(idle_plan(), sessions, "interaction")
        self._now = Nanos(NANOS_PER_MS)
        self._published: dict[SessionId, PublishChunk] = {}
        self._rng = Random(1)
        self._core.start(self._now)
        self._settle()
        for session in range(1, sessions + 1):
            self._handle(SessionOpened(SessionId(session)))
            self._handle(TextArrived(SessionId(session), "go", "1"))
        if len(self._published) < sessions:
            raise RuntimeError(f"{len(self._published)} of {sessions} sessions play; a report would measure idle ones")
        self._names = list(self._published)

    def _handle(self, fact: Any) -> None:
        self._core.handle(fact, self._now)
        self._settle()

    def _settle(self) -> None:
        """Run what is launched until nothing is; stages answer at once."""
        while commands := self._core.commands():
            for command in commands:
                if isinstance(command, Launch):
                    results = tuple(map(_answer, command.jobs))
                    self._core.handle(StageFinished(command.work, results, self._now, self._now), self._now)
                elif isinstance(command, PublishChunk):
                    self._published[command.session] = command
                    self._core.handle(SlotsFreed((command.slot,)), self._now)

    def report(self) -> Nanos:
        """One listener says what it has heard; returns the thread time until the core has decided what follows."""
        self._now = Nanos(self._now + NANOS_PER_MS // 10)
        session = self._rng.choice(self._names)
        position = Ticks(self._core.sessions[session].timeline.playback(self._now))
        cursor = Cursor(self._published[session].epoch, position, self._now)
        fact = CursorReported(session, cursor, ticks_from_ms(60), Nanos(20 * NANOS_PER_MS), ticks_from_ms(20), False)
        begun = thread_time()
        self._core.handle(fact, self._now)
        took = Nanos(thread_time() - begun)
        self._settle()
        return took


# One launched step, live ---------------------------------------------------------------------------------------------


def overhead_figures(
    *, sessions: int = LIVE_SESSIONS, replies: int = REPLIES, policy: str = "interaction"
) -> dict[str, Any]:
    """A live engine on worker lanes: thread time of its one thread, over the steps it launched."""
    plan = idle_plan()
    core = idle_core(plan, sessions, policy)
    fences = Fences()
    stages = {name: IdleStage(spec) for name, spec in plan.stages.items()}
    lanes = {stage.spec.lane: HostLane(stage.spec.lane, fences) for stage in stages.values()}
    executor = Executor(stages, lanes, None)
    executor.open()
    ours, theirs = Channel.pair()
    listening = audience.start(theirs, sessions=sessions, replies=replies)
    theirs.close()
    channel = Channel(ours)
    begun = thread_time()
    try:
        drive(core, LiveWorld(channel, executor))
        took = thread_time() - begun
    finally:
        executor.close(within=Nanos(2000 * NANOS_PER_MS))
        channel.close()
        listening.wait(timeout=20)
    completed, launches = core.monitor["responses_completed"], executor.figures.count
    if completed < replies:
        raise RuntimeError(f"{completed} of {replies} replies were completed; the figure would be of something else")
    return {
        "overhead_us_per_step": _us(took / launches),
        "overhead_launch_us": _us(executor.figures.total_ns / launches),
        "overhead_steps": launches,
        "overhead_sessions": sessions,
    }


def _us(nanos: float) -> float:
    return round(nanos / 1000, 1)
