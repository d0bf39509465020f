"""The story a trace tells: launches, chunks, cursors, holds, turns and where their time went. Pure; no model needed.

1. Everything is derived from facts and commands alone, so a trace can be drawn where its model is not installed.
2. Times are milliseconds since the trace began; positions are milliseconds of a session's output timeline.
3. The plan of a chunk names no span: chunks follow each other without a gap, so a chunk begins where generation stood.
   When a reply is begun anew, what an earlier attempt made and nobody was given (a guess that came to nothing) is gone.
4. What the transport was given (*delivery*) is what was heard plus what the listener's buffer held by its own report.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

from duplexd.engine.trace import Header, Kind, Record, decode_command
from duplexd.engine.work import Launch, StageFailed, StageFinished
from duplexd.messages import (
    AdvanceEpoch,
    Cursor,
    CursorReported,
    HistoryChanged,
    HoldAnswered,
    HoldExpired,
    InputRefusal,
    LatencyMeasured,
    MediaArrived,
    Progress,
    PublishChunk,
    ReplyWords,
    ResponseChanged,
    ResponseState,
    ResumePlayback,
    SessionClosed,
    SessionOpened,
    StateChanged,
    TextArrived,
    UserWords,
    VoiceStarted,
)
from duplexd.streams.stage import (
    CopyJob,
    Failed,
    JudgeJob,
    JudgeResult,
    ListenJob,
    ListenResult,
    MoveJob,
    RenderJob,
    TalkJob,
    TalkResult,
    ThinkJob,
    ThinkResult,
)
from duplexd.units import INPUT_RATE, NANOS_PER_MS, Nanos, ms_from_ticks

LAUNCHES_MAX = 200_000  #: of one story; later ones are counted and left out
VOICE = 0.5  #: probability from which a block holds a voice, and share from which it is the character's own
LOOK_BACK_MS = 10_000.0  #: a launch ordered longer before a turn is not listed there, even if it still runs
BEFORE_MS = 1500.0  #: so far back the work for a turn itself is listed: much of it is done while the person speaks
VOICE_JOIN_MS = 70.0  #: voiced blocks closer than this are one stretch


class Launched(msgspec.Struct):
    """One launch on its lane. `noticed` is when the engine's thread was told of its end."""

    work: int
    stage: str
    role: str
    lane: str
    sessions: tuple[int, ...]
    detail: str
    ordered: float
    started: float = 0.0
    ended: float = 0.0  #: 0: it never came back
    noticed: float = 0.0
    failed: str = ""


class ChunkLife(msgspec.Struct):
    """One chunk, and when it changed its state; 0 where it never came to that."""

    chunk: int
    epoch: int
    response: int
    start: float  #: on the output timeline
    end: float
    planned: float
    ready: float = 0.0
    published: float = 0.0
    over: float = 0.0
    fate: str = ""  #: "heard", "split", "discarded"; '' while it lives
    cut: float = 0.0  #: where it was split


class Stretch(msgspec.Struct):
    """Something that lasts: a voice, a hold, a state, a response."""

    begin: float
    end: float
    kind: str
    text: str = ""
    number: int = 0  #: of the response


class Moment(msgspec.Struct, frozen=True):
    at: float
    kind: str
    text: str


class Step(msgspec.Struct, frozen=True):
    """One event of a turn, counted from the person's last voiced sample."""

    event: str
    ms: float
    session: int = 0
    work: int = 0
    lane: str = ""
    took_ms: float = 0.0  #: lane time, for an end
    detail: str = ""


class TurnStory(msgspec.Struct):
    """One turn, from the last voiced sample of the person to the first sound of the reply."""

    session: int
    turn: int
    response: int
    text: str
    voiced_end: float  #: when the last voiced sample was captured (typed words: when they came)
    parts: dict[str, float]  #: milliseconds each part took; they sum to `total_ms`
    total_ms: float
    outcome: str  #: how the response ended; '' while it lives
    steps: tuple[Step, ...] = ()


class SessionStory(msgspec.Struct):
    session: int
    opened: float
    closed: float = 0.0
    chunks: list[ChunkLife] = []
    generation: list[tuple[float, float]] = []
    published: list[tuple[float, float]] = []
    delivery: list[tuple[float, float]] = []
    playback: list[tuple[float, float]] = []
    budget: list[tuple[float, float]] = []
    voice: list[Stretch] = []
    holds: list[Stretch] = []
    states: list[Stretch] = []
    responses: list[Stretch] = []
    epochs: list[tuple[float, int, float]] = []  #: (when, epoch, where the timeline was cut)
    moments: list[Moment] = []
    words: list[tuple[float, float, str, int, int]] = []  #: (start, end on the timeline, text, epoch, response)
    turns: list[TurnStory] = []


class Story(msgspec.Struct):
    title: str
    written_at: float
    length: float
    lanes: list[str]
    launches: list[Launched]
    launches_left_out: int
    sessions: list[SessionStory]
    ending: str = ""


def tell(header: Header, records: Iterable[Record], *, session: int | None = None) -> Story:
    """The story of a trace, of one session if it is named (its lanes show everybody's work all the same)."""
    teller = _Teller(header)
    for record in records:
        teller.take(record)
    return teller.story(session)


class _Person:
    """What has to be remembered of a session while its story is told."""

    def __init__(self, story: SessionStory) -> None:
        self.story = story
        self.epoch = 0
        self.generation = 0.0
        self.published = 0.0
        self.heard = 0.0
        self.alive: dict[int, ChunkLife] = {}
        self.hold: Stretch | None = None
        self.state: Stretch | None = None
        self.response: Stretch | None = None
        self.last_block: tuple[float, float] = (0.0, 0.0)  #: newest voiced block: (captured, arrived)
        self.text: dict[int, str] = {}  #: newest words of each turn
        self.accepted: dict[int, float] = {}
        self.outcome: dict[int, str] = {}

    def place(self, at: float, *, playback: float, delivery: float) -> None:
        """Where the listener's cursors stood. Observations may overtake each other on their way; lines go forward."""
        for line, position in ((self.story.playback, playback), (self.story.delivery, delivery)):
            line.append((max(at, line[-1][0]) if line else at, round(position, 3)))


class _Teller:
    def __init__(self, header: Header) -> None:
        self._header = header
        self._origin: Nanos | None = None
        self._last = 0.0
        self._people: dict[int, _Person] = {}
        self._running: dict[int, tuple[Launched, Launch]] = {}
        self._launches: list[Launched] = []
        self._left_out = 0

    # One step ------------------------------------------------------------------------------------------------------

    def take(self, record: Record) -> None:
        if self._origin is None:
            self._origin = record.now
        at = self._last = self._ms(record.now)
        if record.event is not None:
            self._fact(record.event, at)
        for data in record.commands:
            self._command(decode_command(data), at)
        if record.kind is Kind.CRASH:
            for person in self._people.values():
                person.story.moments.append(Moment(at, "crash", record.error))

    def _ms(self, now: int) -> float:
        return round((now - (self._origin or 0)) / NANOS_PER_MS, 3)

    def _person(self, session: int, at: float) -> _Person:
        if session not in self._people:
            self._people[session] = _Person(SessionStory(session, at))
        return self._people[session]

    # Facts ---------------------------------------------------------------------------------------------------------

    def _fact(self, fact: Any, at: float) -> None:
        match fact:
            case StageFinished() | StageFailed():
                self._ended(fact, at)
            case SessionOpened():
                self._person(fact.session, at)
            case MediaArrived():
                self._media(self._person(fact.session, at), fact, at)
            case VoiceStarted():
                self._voice_started(self._person(fact.session, at), fact, at)
            case CursorReported():
                self._cursor(self._person(fact.session, at), fact)
            case HoldAnswered():
                self._frozen(self._person(fact.session, at), fact.cursor)
            case HoldExpired():
                self._end_hold(self._person(fact.session, at), at, "expired")
            case TextArrived():
                self._person(fact.session, at).story.moments.append(Moment(at, "typed", fact.text))
            case SessionClosed():
                self._close(self._person(fact.session, at), at, fact.reason)

    def _media(self, person: _Person, fact: MediaArrived, at: float) -> None:
        if fact.voice < VOICE:
            return
        kind = "echo" if fact.echo >= VOICE else "voice"
        captured = self._ms(fact.captured_at)
        length = ms_from_ticks(fact.span.length)
        if kind == "voice":
            person.last_block = (captured, at)
        stretches = person.story.voice
        if stretches and stretches[-1].kind == kind and captured - length - stretches[-1].end <= VOICE_JOIN_MS:
            stretches[-1].end = captured
        else:
            stretches.append(Stretch(captured - length, captured, kind))

    def _voice_started(self, person: _Person, fact: VoiceStarted, at: float) -> None:
        person.story.moments.append(Moment(at, "onset", f"noticed by {fact.source}"))
        if fact.held and person.hold is None:
            person.hold = Stretch(at, 0.0, "hold", f"hold {fact.hold} by {fact.source}")
            person.story.holds.append(person.hold)
            self._frozen(person, fact.cursor)

    def _end_hold(self, person: _Person, at: float, how: str) -> None:
        if person.hold is not None:
            person.hold.end, person.hold.kind, person.hold = at, how, None

    def _cursor(self, person: _Person, fact: CursorReported) -> None:
        position = min(ms_from_ticks(fact.cursor.position), person.published)
        if fact.cursor.epoch != person.epoch or position < person.heard:
            return  # Late or foreign: the core ignores it too.
        person.heard = position
        buffered = min(position + ms_from_ticks(fact.buffer), person.published)
        person.place(self._ms(fact.cursor.observed_at), playback=position, delivery=buffered)
        certain = position - ms_from_ticks(fact.bound)
        for chunk in list(person.alive.values()):
            if chunk.published and chunk.end <= certain + 0.001:
                self._end_chunk(person, chunk, self._last, "heard")

    def _frozen(self, person: _Person, cursor: Cursor) -> None:
        """Playout stands here until the hold is decided; the listener's own answer may be behind a report."""
        if cursor.epoch == person.epoch:
            position = min(ms_from_ticks(cursor.position), person.published)
            person.heard = position
            person.place(self._last, playback=position, delivery=position)

    def _close(self, person: _Person, at: float, reason: str) -> None:
        person.story.closed = at
        person.story.moments.append(Moment(at, "closed", reason))
        self._end_hold(person, at, "closed")
        for chunk in list(person.alive.values()):
            self._end_chunk(person, chunk, at, "discarded")
        for stretch in (person.state, person.response):
            if stretch is not None:
                stretch.end = at
        person.state = person.response = None

    # Work ----------------------------------------------------------------------------------------------------------

    def _launch(self, launch: Launch, at: float) -> None:
        jobs = launch.jobs
        default = (_role_of(jobs[0]), launch.stage)
        role, lane = self._header.stages.get(launch.stage, default)
        sessions = tuple(dict.fromkeys(job.session for job in jobs))
        found = Launched(
            launch.work, launch.stage, role, lane, sessions, "; ".join(map(_asked, jobs[:1])) or "", at, started=at
        )
        if len(jobs) > 1:
            found.detail += f" (and {len(jobs) - 1} more rows)"
        self._running[launch.work] = (found, launch)
        if len(self._launches) < LAUNCHES_MAX:
            self._launches.append(found)
        else:
            self._left_out += 1
        for job in jobs:
            if isinstance(job, TalkJob) and job.first:
                self._begin_anew(self._person(job.session, at), at)
            elif isinstance(job, RenderJob):
                self._plan_chunk(self._person(job.session, at), job, at)

    def _begin_anew(self, person: _Person, at: float) -> None:
        for chunk in [c for c in person.alive.values() if not c.published]:
            self._end_chunk(person, chunk, at, "discarded")
        self._generate(person, at, person.published)

    def _generate(self, person: _Person, at: float, position: float) -> None:
        """Generation stands at `position` from now on."""
        if position != person.generation:
            person.story.generation += [(at, round(person.generation, 3)), (at, round(position, 3))]
            person.generation = position

    def _plan_chunk(self, person: _Person, job: RenderJob, at: float) -> None:
        start = person.generation
        end = start + ms_from_ticks(job.length)
        chunk = ChunkLife(job.chunk, job.epoch, 0, round(start, 3), round(end, 3), at)
        person.alive[job.chunk] = chunk
        person.story.chunks.append(chunk)
        self._generate(person, at, end)

    def _ended(self, fact: StageFinished | StageFailed, at: float) -> None:
        if fact.work not in self._running:
            return
        launched, launch = self._running.pop(fact.work)
        launched.noticed = at
        launched.ended = at
        if isinstance(fact, StageFailed):
            launched.failed = fact.reason
        else:
            if fact.ended_at:
                launched.started, launched.ended = self._ms(fact.started_at), self._ms(fact.ended_at)
            launched.detail += "".join(map(_answered, fact.results[:1]))
            launched.failed = "; ".join(r.reason for r in fact.results if isinstance(r, Failed))
        for job in launch.jobs:
            if isinstance(job, RenderJob) and job.session in self._people:
                person = self._people[job.session]
                if (chunk := person.alive.get(job.chunk)) is not None:
                    chunk.ready = launched.ended
                    if launched.failed:
                        self._end_chunk(person, chunk, at, "discarded")

    def _end_chunk(self, person: _Person, chunk: ChunkLife, at: float, fate: str, cut: float = 0.0) -> None:
        chunk.over, chunk.fate, chunk.cut = at, fate, cut
        person.alive.pop(chunk.chunk, None)

    # Commands ------------------------------------------------------------------------------------------------------

    def _command(self, command: Any, at: float) -> None:
        if isinstance(command, Launch):
            self._launch(command, at)
            return
        session = getattr(command, "session", None)
        if session is None:
            return
        person = self._person(session, at)
        match command:
            case PublishChunk():
                self._published(person, command, at)
            case AdvanceEpoch():
                self._advanced(person, command, at)
            case ResumePlayback():
                self._end_hold(person, at, "resumed")
            case StateChanged():
                self._state(person, command, at)
            case ResponseChanged():
                self._response(person, command, at)
            case UserWords():
                person.text[command.turn] = command.text
                if command.final:
                    person.story.moments.append(Moment(at, "words", command.text))
            case ReplyWords():
                origin = (command.epoch, command.response)
                spans = [(ms_from_ticks(w.span.start), ms_from_ticks(w.span.end), w.text) for w in command.words]
                person.story.words += [(*span, *origin) for span in spans]
            case HistoryChanged():
                if command.final:
                    person.story.moments.append(Moment(at, "history", f"{command.words} words heard: {command.text}"))
            case Progress():
                person.story.budget.append((at, round(ms_from_ticks(command.budget), 1)))
            case InputRefusal():
                person.story.moments.append(Moment(at, "refused", command.reason))
            case LatencyMeasured():
                self._measured(person, command, at)

    def _published(self, person: _Person, news: PublishChunk, at: float) -> None:
        chunk = person.alive.get(news.chunk)
        if chunk is None:
            return
        for older in [c for c in person.alive.values() if not c.published and c.chunk < news.chunk]:
            self._end_chunk(person, older, at, "discarded")
        chunk.published, chunk.response = at, news.response
        chunk.start, chunk.end = ms_from_ticks(news.span.start), ms_from_ticks(news.span.end)
        if person.heard >= person.published:  # Until now there was nothing to hear: the cursors stood still.
            person.place(at, playback=person.heard, delivery=person.heard)
        person.published = chunk.end
        person.story.published += [(at, chunk.start), (at, chunk.end)]

    def _advanced(self, person: _Person, news: AdvanceEpoch, at: float) -> None:
        cut = ms_from_ticks(news.at)
        person.epoch = news.epoch
        person.story.epochs.append((at, news.epoch, round(cut, 3)))
        self._end_hold(person, at, "advanced")
        for chunk in list(person.alive.values()):
            if chunk.published and chunk.end <= cut:
                self._end_chunk(person, chunk, at, "heard")
            elif chunk.published and chunk.start < cut:
                self._end_chunk(person, chunk, at, "split", round(cut, 3))
            else:
                self._end_chunk(person, chunk, at, "discarded")
        story = person.story
        for line, before in ((story.generation, person.generation), (story.published, person.published)):
            line += [(at, round(before, 3)), (at, round(cut, 3))]
        person.generation = person.published = cut
        person.heard = cut
        person.place(at, playback=cut, delivery=cut)

    def _state(self, person: _Person, news: StateChanged, at: float) -> None:
        if person.state is not None:
            person.state.end = at
        person.state = Stretch(at, 0.0, news.state.value)
        person.story.states.append(person.state)

    def _response(self, person: _Person, news: ResponseChanged, at: float) -> None:
        if news.state is ResponseState.ACCEPTED:
            person.accepted[news.response] = at
            person.response = Stretch(at, 0.0, "open", f"response {news.response}", news.response)
            person.story.responses.append(person.response)
        if news.state in (ResponseState.COMPLETED, ResponseState.CANCELLED, ResponseState.FAILED):
            person.outcome[news.response] = f"{news.state.value}: {news.reason}" if news.reason else news.state.value
            for turn in person.story.turns:
                if turn.response == news.response:
                    turn.outcome = person.outcome[news.response]
            if person.response is not None:
                person.response.end, person.response.kind = at, news.state.value
                person.response.text = f"response {news.response} {person.outcome[news.response]}"
                person.response = None
        if news.state is ResponseState.COMPLETED:
            for chunk in [c for c in person.alive.values() if c.published]:
                self._end_chunk(person, chunk, at, "heard")

    def _measured(self, person: _Person, news: LatencyMeasured, at: float) -> None:
        times = [news.ended_at, news.decided_at, news.prefilled_at, news.worded_at, news.published_at]
        names = ("deciding that the turn is over", "prefill and first token", "first clause", "voice")
        parts = {n: round((b - a) / NANOS_PER_MS, 2) for n, a, b in zip(names, times[:-1], times[1:], strict=True)}
        person.story.turns.append(
            TurnStory(
                session=person.story.session,
                turn=news.turn,
                response=news.response,
                text=person.text.get(news.turn, ""),
                voiced_end=self._ms(news.ended_at),
                parts=parts,
                total_ms=round((news.published_at - news.ended_at) / NANOS_PER_MS, 2),
                outcome="",
                steps=self._marks(person, news, at),
            )
        )

    def _marks(self, person: _Person, news: LatencyMeasured, at: float) -> tuple[Step, ...]:
        """What is no launch: the last voiced block, the decisions and the first publish."""
        zero = self._ms(news.ended_at)
        marks = [
            ("end of turn decided", self._ms(news.decided_at)),
            ("first tokens", self._ms(news.prefilled_at)),
            ("first clause", self._ms(news.worded_at)),
            ("first chunk published", at),
        ]
        if person.last_block[0] == zero:
            marks.insert(0, ("last voiced block arrived", person.last_block[1]))
        return tuple(Step(name, round(when - zero, 2), person.story.session) for name, when in marks)

    # The end -------------------------------------------------------------------------------------------------------

    def story(self, session: int | None) -> Story:
        for person in self._people.values():
            for stretch in (person.hold, person.state, person.response):
                if stretch is not None:
                    stretch.end = self._last
        chosen = [p.story for s, p in sorted(self._people.items()) if s and session in (None, s)]
        for told in chosen:
            for turn in told.turns:
                turn.steps = self._steps(turn)
        lanes = list(dict.fromkeys(launch.lane for launch in sorted(self._launches, key=_lane_order)))
        engine = self._header.engine
        title = f"{engine.get('model', '?')}, policy {engine.get('policy', '?')}, duplexd {self._header.version}"
        return Story(title, self._header.written_at, self._last, lanes, self._launches, self._left_out, chosen)

    def _steps(self, turn: TurnStory) -> tuple[Step, ...]:
        """Every launch and every end on every lane between the last voiced sample and the first publish, and the work
        for this turn shortly before.
        """
        zero, until = turn.voiced_end, turn.voiced_end + turn.total_ms
        others = self._people[turn.session].story.responses
        earlier = [response.end for response in others if response.number < turn.response and response.end <= zero]
        earliest = max([zero - BEFORE_MS, *earlier])
        steps = list(turn.steps)
        # Launches stand in the order in which they were ordered: a turn costs its own, not the whole trace.
        first = bisect_left(self._launches, earliest - LOOK_BACK_MS, key=lambda launch: launch.ordered)
        for launch in islice(self._launches, first, None):
            if launch.ordered >= until:
                break
            own = turn.session in launch.sessions and launch.role != "copy"
            begin = earliest if own else zero
            if launch.ended and launch.ended < begin:
                continue
            who = {"session": launch.sessions[0], "work": launch.work, "lane": launch.lane}
            steps.append(Step(f"{launch.stage} launched", round(launch.ordered - zero, 2), detail=launch.detail, **who))  # type: ignore[arg-type]
            if launch.ended and launch.ended <= until:
                took = round(launch.ended - launch.started, 2)
                late = f"noticed {launch.noticed - launch.ended:.2f} ms later"
                said = launch.failed or late
                ended = "failed" if launch.failed else "finished"
                when = round(launch.ended - zero, 2)
                steps.append(Step(f"{launch.stage} {ended}", when, took_ms=took, detail=said, **who))  # type: ignore[arg-type]
        return tuple(sorted(steps, key=_step_order))


def _step_order(step: Step) -> tuple[float, int]:
    """By time; at one time ends come first, then what follows from them, then what is begun because of it."""
    return step.ms, 2 if step.event.endswith(" launched") else 0 if step.work else 1


_ORDER = ("copy", "listen", "judge", "think", "talk", "render", "move")


def _lane_order(launch: Launched) -> tuple[int, str]:
    return (_ORDER.index(launch.role) if launch.role in _ORDER else len(_ORDER), launch.lane)


def _role_of(job: Any) -> str:
    return "move" if isinstance(job, MoveJob) else type(job).__name__.removesuffix("Job").lower()


def _asked(job: Any) -> str:
    match job:
        case CopyJob():
            return f"{job.samples * 1000 / INPUT_RATE:.0f} ms of sound"
        case ListenJob() | JudgeJob():
            return f"{job.samples / INPUT_RATE:.2f} s of sound"
        case ThinkJob():
            return f"{len(job.feed)} tokens in behind {job.past}, up to {job.steps} out"
        case TalkJob():
            return f"clause {job.text!r}"
        case RenderJob():
            return f"chunk {job.chunk}, {ms_from_ticks(job.length):.0f} ms"
        case MoveJob():
            return f"{len(job.moves)} pages {'to host memory' if job.leaving else 'back'}"
    return ""


def _answered(result: Any) -> str:
    match result:
        case ListenResult():
            return f" -> {result.text!r}"
        case JudgeResult():
            return f" -> {result.probability:.2f} that it is over"
        case ThinkResult():
            return f" -> {len(result.tokens)} tokens"
        case TalkResult():
            return f" -> {ms_from_ticks(result.length):.0f} ms"
    return ""
