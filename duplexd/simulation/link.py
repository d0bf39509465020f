"""One person, their page and the front end between them and the engine, event by event.

What a person does; code only looks the table up:

    QUIET      -> SPEAKING (by voice), WAITING (by text), GONE
    SPEAKING   -> WAITING (the last word is said), QUIET (given up), GONE
    WAITING    -> LISTENING (first sound), QUIET (failed, given up), GONE
    LISTENING  -> QUIET (the reply is over, or stopped by text), SPEAKING (interrupts by voice), GONE

A planned moment (first sound, interruption, end of reply or words) is void once what it belongs to is over.
"""

from __future__ import annotations

from enum import Enum
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from duplexd.ids import ResponseId, SessionId
from duplexd.media.line import (
    ASSUMED_BOUND,
    ASSUMED_LAG,
    BOUND,
    HOLD_MAX,
    REPORTS_MISSED_AFTER,
)
from duplexd.messages import (
    AdmitSession,
    AdvanceEpoch,
    Cursor,
    CursorReported,
    EndSession,
    HistorySet,
    HoldExpired,
    InputRefusal,
    LatencyMeasured,
    MediaArrived,
    PastTurn,
    PublishChunk,
    RefuseSession,
    ResponseChanged,
    ResponseState,
    ResumePlayback,
    SessionClosed,
    SessionOpened,
    TextArrived,
    VoiceStarted,
)
from duplexd.simulation.ear import Ear, Place, Stretch
from duplexd.simulation.people import Turn, Visit
from duplexd.simulation.records import Guess, Outcome, TurnRecord
from duplexd.streams.stage import RenderJob, TalkJob, ThinkJob
from duplexd.units import (
    INPUT_RATE,
    NANOS_PER_MS,
    NANOS_PER_SECOND,
    TICKS_PER_SECOND,
    Nanos,
    Span,
    Ticks,
    nanos_from_ticks,
    ticks_from_ms,
    ticks_from_nanos,
)

if TYPE_CHECKING:
    from duplexd.simulation.world import LoadWorld

BLOCK = ticks_from_ms(96)  #: of the person's audio, as the engine gets it here: three of the front end's own
ONSET = Nanos(80 * NANOS_PER_MS)  #: from the first sound of a voice until the page knows it
GONE_AFTER = Nanos(5 * NANOS_PER_SECOND)  #: until the front end gives a vanished listener up
TRAILING_MAX = Nanos(3 * NANOS_PER_SECOND)  #: silence sent behind a voice at most
TRY_AGAIN_AFTER = Nanos(NANOS_PER_SECOND)  #: a visit that was refused, or ended by the engine
GAP_MIN = Nanos(NANOS_PER_MS)  #: a shorter silence is rounding


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every listener's path, one way. A delay is `delay_ms` plus an exponential of mean `jitter_ms`."""

    delay_ms: float = 20.0
    jitter_ms: float = 5.0
    buffer_ms: float = 60.0  #: jitter buffer and output device
    report_every_ms: float = 100.0
    report_loss: float = 0.0
    report_late: float = 0.0  #: share of reports that need `report_late_ms` more, so that they overtake each other
    report_late_ms: float = 250.0
    #: Of so many reports in a row that tell nothing new the engine gets the newest: its timeline carries the cursor on
    #: by itself for half a second. 1: it gets them all.
    report_batch: int = 1

    def faults(self) -> str:
        rules = [
            (min(self.delay_ms, self.jitter_ms, self.buffer_ms, self.report_late_ms) >= 0, "a time is negative"),
            (self.report_every_ms >= 10, "report_every_ms is at least 10"),
            (0 <= self.report_loss < 1 and 0 <= self.report_late < 1, "report_loss and report_late lie in 0..1"),
            (1 <= self.report_batch <= 4, "report_batch lies in 1..4: playback is carried on for 500 ms at most"),
        ]
        return next((sentence for holds, sentence in rules if not holds), "")


class State(Enum):
    QUIET = "quiet"
    SPEAKING = "speaking"
    WAITING = "waiting"
    LISTENING = "listening"
    GONE = "gone"


_LEGAL: dict[State, frozenset[State]] = {
    State.QUIET: frozenset({State.QUIET, State.SPEAKING, State.WAITING, State.GONE}),
    State.SPEAKING: frozenset({State.WAITING, State.QUIET, State.GONE}),
    State.WAITING: frozenset({State.LISTENING, State.QUIET, State.GONE}),
    State.LISTENING: frozenset({State.QUIET, State.SPEAKING, State.GONE}),
    State.GONE: frozenset({State.GONE}),
}


class Said(msgspec.Struct, frozen=True):
    """A word of the person and the input sample it ends at."""

    text: str
    end: int


class Link:
    """One visit. All times are the world's."""

    def __init__(self, world: LoadWorld, session: SessionId, visit: Visit, *, left: Any) -> None:
        self.session = session
        self.visit = visit
        self.state = State.QUIET
        self.answering: TurnRecord | None = None  #: the turn whose reply is being made
        self._guess: Guess | None = None  #: made for the turn that is still open
        network = world.network
        self.ear = Ear(way=_ns(network.delay_ms + network.buffer_ms))
        self._world = world
        self._left = left
        self._network = network
        self._rng = Random(f"{world.seed}/{visit.name}/network")
        self._opened = Nanos(0)
        self._index = -1
        self._asked: TurnRecord | None = None  #: the turn the person waits for an answer to
        self._of: dict[ResponseId, TurnRecord] = {}  #: the last two
        self._start: Ticks | None = None  #: where the reply that is heard begins
        self._moment = 0  #: counts what makes planned moments void: stops, ends, interruptions
        self._holds = 0
        self._held: int = 0
        self._speaks_until = Nanos(0)
        self._said: list[Said] = []
        self._reporting = False
        self._reports = 0
        self._reports_from: Nanos | None = None

    def made_for(self, job: Any) -> TurnRecord | Guess | None:
        """Where to count what this job makes; None: it makes nothing of a reply. Asked as it is launched.

        What is made while no reply was announced is a guess. It has become the reply when the work of an announced one
        goes on with it, and was in vain when that begins anew.
        """
        if not isinstance(job, TalkJob | RenderJob) and not (isinstance(job, ThinkJob) and job.steps):
            return None
        begins = isinstance(job, ThinkJob) and not job.reply
        if self.answering is None:
            if begins or self._guess is None:
                self._guess = Guess()
                self._world.guesses.append(self._guess)
            return self._guess
        if begins:
            self._guess = None
        self._confirm_guess(self.answering)
        return self.answering

    def _confirm_guess(self, turn: TurnRecord) -> None:
        if self._guess is not None:
            self._guess.confirm(turn)
            self._guess = None

    def _move(self, state: State) -> None:
        if state not in _LEGAL[self.state]:
            raise ValueError(f"visit {self.visit.name} is {self.state.value} and cannot become {state.value}")
        self.state = state

    # Coming and going -----------------------------------------------------------------------------------------------

    def come(self) -> SessionOpened:
        self._opened = self._world.now()
        return SessionOpened(self.session, barge_in=self.visit.barge_in)

    def _leave(self) -> None:
        """Nothing more to say: the page is closed in a moment; until then it goes on reporting what is heard."""
        self._move(State.QUIET)
        self._world.at(self._world.now() + NANOS_PER_SECOND, lambda: self._close("left"))

    def _vanish(self) -> None:
        """The listener is gone in the middle of a reply, and nobody says so until the front end notices."""
        self._end_answer(Outcome.VANISHED, "vanished")
        self._move(State.GONE)
        self._world.at(self._world.now() + GONE_AFTER, lambda: self._close("vanished"))

    def _close(self, reason: str) -> SessionClosed:
        self._move(State.GONE)
        self._moment += 1
        self._world.forget(self.session)
        self._left()
        return SessionClosed(self.session, reason)

    # News -----------------------------------------------------------------------------------------------------------

    def take(self, news: Any, now: Nanos) -> None:
        if isinstance(news, ResponseChanged):
            self._on_response(news, now)
        elif isinstance(news, LatencyMeasured):
            self._on_latency(news)
        elif isinstance(news, AdvanceEpoch):
            self._on_advance(news, now)
        elif isinstance(news, ResumePlayback):
            self._on_resume(news, now)
        elif isinstance(news, AdmitSession):
            if self.visit.past_words:
                past = PastTurn(" ".join(["1"] * self.visit.past_words), "1")
                self._world.tell(now, HistorySet(self.session, (past,), ""))
            self._plan_turn(now)
        elif isinstance(news, InputRefusal):
            self._give_up(Outcome.FAILED, f"refused: {news.code}")
        elif isinstance(news, RefuseSession | EndSession):
            self._end_answer(Outcome.FAILED, news.reason)
            self._move(State.GONE)
            self._moment += 1
            self._world.forget(self.session)
            self._world.at(now + TRY_AGAIN_AFTER, self._left)

    def _on_response(self, news: ResponseChanged, now: Nanos) -> None:
        if news.state is ResponseState.ACCEPTED:
            turn = self._asked
            if turn is None:
                return
            turn.decided_at = turn.decided_at or now
            self.answering, self._of[news.response] = turn, turn
            for old in list(self._of)[:-2]:
                del self._of[old]
        elif news.state in (ResponseState.FAILED, ResponseState.CANCELLED):
            turn = self._of.get(news.response)
            if turn is None:
                return
            if news.state is ResponseState.FAILED and turn is self._asked:
                self._give_up(Outcome.FAILED, news.reason)
            if turn is self.answering:
                self.answering = None
            self._reporting = False
        elif news.state is ResponseState.COMPLETED:
            self.answering = None
            self._reporting = False

    def _on_latency(self, news: LatencyMeasured) -> None:
        turn = self._of.get(news.response)
        if turn is not None:
            turn.prefilled_at = news.prefilled_at

    # What is heard --------------------------------------------------------------------------------------------------

    def publish(self, news: PublishChunk, now: Nanos) -> None:
        turn = self._of.get(news.response)
        if turn is None or self.state is State.GONE:
            return
        self._confirm_guess(turn)
        turn.published.append((now, news.span.length))
        turn.published_at = turn.published_at or now
        turn.made_at = now
        stretch = self.ear.publish(
            epoch=news.epoch, response=news.response, span=news.span, now=now, delay=self._delay()
        )
        if stretch is None or self.ear.frozen:
            return
        self._hear(stretch, turn)
        if not self._reporting:
            self._world.at(now, self._begin_reports)
            self._reporting = True

    def _hear(self, stretch: Stretch, turn: TurnRecord) -> None:
        """Plan what follows from hearing a stretch: the first sound, an interruption, the end."""
        if self._start is None and turn is self._asked:
            self._start = stretch.start
            turn.heard_at = stretch.at
            self._later(stretch.at, self._first_sound)
        if self._start is None or turn is not self._asked:
            return
        gap = self.ear.gap_before(stretch)
        if gap is not None and gap.length >= GAP_MIN:
            turn.gaps.append(gap)
        script = self.visit.turns[self._index]
        for share, act in ((script.barges_at, self._barge), (0.5 if script.slip else None, self._vanish)):
            if share is not None:
                self._plan_at(Ticks(self._start + round(share * turn.reply)), stretch, act)
        if self._start + turn.reply <= stretch.end:
            self._later(stretch.until, self._over)

    def _plan_at(self, position: Ticks, stretch: Stretch, act: Any) -> None:
        if stretch.start <= position < stretch.end:
            self._later(Nanos(stretch.at + nanos_from_ticks(position - stretch.start)), act)

    def _later(self, when: Nanos, act: Any) -> None:
        """Unless something stops the sound before."""
        moment = self._moment
        self._world.at(when, lambda: act() if self._moment == moment and self.state is not State.GONE else None)

    def _first_sound(self) -> None:
        if self.state is State.WAITING:
            self._move(State.LISTENING)

    def _over(self) -> None:
        """The reply was heard to its end."""
        turn = self._asked
        if turn is None:
            return
        self._end_turn(turn, Outcome.HEARD, heard=turn.reply)
        self._plan_turn(self._world.now())
        # The report that says so is not left to the end of a row of skipped ones.
        self._world.at(self._world.now() + _ns(self._network.report_every_ms), self._begin_reports_again)

    def _end_turn(self, turn: TurnRecord, outcome: Outcome, *, heard: int, reason: str = "") -> None:
        now = self._world.now()
        turn.outcome, turn.heard, turn.over_at, turn.reason = outcome, Ticks(max(0, heard)), now, reason
        turn.gaps = [gap for gap in turn.gaps if gap.at <= now]
        if turn.heard_at > now:
            turn.heard_at = Nanos(0)
        self._asked, self._start = None, None
        self._moment += 1

    def _end_answer(self, outcome: Outcome, reason: str) -> None:
        """Whatever is open ends now."""
        turn = self._asked
        if turn is not None:
            self._end_turn(turn, outcome, heard=self._heard_of(self.ear.where(self._world.now())), reason=reason)

    def _heard_of(self, place: Place) -> int:
        return 0 if self._start is None else place.position - self._start

    def _give_up(self, outcome: Outcome, reason: str) -> None:
        if self._asked is None or self.state is State.GONE:
            return
        self._end_answer(outcome, reason)
        self._plan_turn(self._world.now())

    # Turns ----------------------------------------------------------------------------------------------------------

    def _plan_turn(self, now: Nanos) -> None:
        """The next turn after its gap; after the last, leave."""
        self._move(State.QUIET)
        self._index += 1
        if self._index >= len(self.visit.turns) or now >= self._world.turns_until:
            self._leave()
            return
        turn = self.visit.turns[self._index]
        self._later(Nanos(max(now + turn.gap, self._opened + turn.not_before)), self._begin_turn)

    def _begin_turn(self) -> None:
        turn = self.visit.turns[self._index]
        if self._world.now() >= self._world.turns_until:
            self._leave()
        elif self._world.voice:
            self._speak(turn)
        else:
            self._write(turn)

    def _record(self, turn: Turn, ended_at: Nanos) -> TurnRecord:
        reply = Ticks(turn.reply_words * self._world.word)
        record = TurnRecord(self.visit.name, self._index, reply, turn.reply_words, ended_at=ended_at)
        record.away = self._world.away(self.session)
        self._world.turns.append(record)
        self._asked, self._start = record, None
        self._moment += 1
        self._later(Nanos(ended_at + self._world.patience), self._lose_patience)
        return record

    def _lose_patience(self) -> None:
        if self._asked is not None and self._asked.heard_at == 0:
            self._give_up(Outcome.UNANSWERED, "no sound within the person's patience")

    def _write(self, turn: Turn) -> None:
        """A typed turn: all its words at once."""
        now = self._world.now()
        self._record(turn, now)
        self._move(State.WAITING)
        text = " ".join([str(turn.reply_words)] * turn.words_in)
        self._world.tell(now + self._delay(), TextArrived(self.session, text, f"turn {self._index}"))

    def _speak(self, turn: Turn) -> None:
        """A spoken turn; nothing plays, so nothing is held."""
        now = self._world.now()
        fact = VoiceStarted(self.session, self._input(now), self._cursor(now), False, onset_at=Nanos(now + ONSET))
        self._world.tell(now + ONSET + self._delay(), fact)
        self._begin_voice(turn, since=now)

    def _begin_voice(self, turn: Turn, *, since: Nanos) -> None:
        """Words one after the other, audio in blocks, then silence until the turn is taken."""
        now = self._world.now()
        self._move(State.SPEAKING)
        self._speaks_until = Nanos(since + turn.words_in * nanos_from_ticks(self._world.spoken_word))
        start = self._sample(since)
        samples = self._world.spoken_word * INPUT_RATE // TICKS_PER_SECOND
        # Who hears a comma knows that more is to come; a full stop sounds like the end of the turn.
        marks = ["." if index in turn.false_ends else "," for index in range(turn.words_in - 1)] + ["."]
        self._said = [Said(f"{turn.reply_words}{mark}", start + (i + 1) * samples) for i, mark in enumerate(marks)]
        ended_at = Nanos(max(now, self._speaks_until))
        self._record(turn, ended_at)
        self._later(ended_at, self._spoken)
        self._send_block(self._input(now))

    def _spoken(self) -> None:
        if self.state is State.SPEAKING:
            self._move(State.WAITING)

    def _send_block(self, start: Ticks) -> None:
        """One block of microphone; the next one follows while the engine has not taken the turn."""
        end = Ticks(start + BLOCK)
        captured = Nanos(self._opened + nanos_from_ticks(end))
        self._world.at(captured, lambda: self._captured(Span(start, end), captured))

    def _captured(self, span: Span, captured: Nanos) -> None:
        if self.state is State.GONE:
            return
        began = self._opened + nanos_from_ticks(span.start)
        loud = 1.0 if began < self._speaks_until else 0.0
        fact = MediaArrived(self.session, self._world.input_slot(), span, captured, loud)
        # Blocks share one path and keep their order: they travel at the path's own delay.
        self._world.tell(captured + _ns(self._network.delay_ms), fact)
        taken = self._asked is None or self._asked.decided_at > 0
        if captured < self._speaks_until or (not taken and captured < self._speaks_until + TRAILING_MAX):
            self._send_block(span.end)

    def words(self, start: int, end: int) -> str:
        """Words that end in `start..end`, 16 kHz samples since the session opened."""
        return " ".join(word.text for word in self._said if start < word.end <= end)

    # Interruptions --------------------------------------------------------------------------------------------------

    def _barge(self) -> None:
        """The person begins to speak (or presses stop) over the reply; the page mutes itself as soon as it knows."""
        self._later(Nanos(self._world.now() + (ONSET if self._world.voice else 0)), self._mute)

    def _mute(self) -> None:
        now = self._world.now()
        turn = self._asked
        if turn is None:
            return
        place = self.ear.freeze(now)
        self._end_turn(turn, Outcome.INTERRUPTED, heard=self._heard_of(place))
        self._holds += 1
        self._held = self._holds
        onset = Nanos(now - ONSET)
        speaks = self._world.voice and self._index + 1 < len(self.visit.turns) and now < self._world.turns_until
        fact = VoiceStarted(
            self.session,
            self._input(onset),
            Cursor(place.epoch, place.position, now),
            True,
            self._held,
            "page" if speaks else "stop",
            now,
            bound=BOUND,
        )
        hold = self._held
        self._world.at(now + HOLD_MAX, lambda: self._expire(hold))
        self._world.tell(now + self._delay(), fact)
        if fact.source == "stop":
            self._plan_turn(now)
            return
        # The words of the next turn are the interruption.
        self._index += 1
        self._begin_voice(self.visit.turns[self._index], since=onset)

    def _expire(self, hold: int) -> HoldExpired | None:
        """Nobody decided in time: the front end resumes when the voice is over, else it flushes."""
        if self._held != hold or self.state is State.GONE:
            return None
        now = self._world.now()
        resumed = now >= self._speaks_until
        self._held = 0
        if resumed:
            self.ear.resume(now)
        return HoldExpired(self.session, hold, resumed)

    def _on_advance(self, news: AdvanceEpoch, now: Nanos) -> None:
        self.ear.flush(epoch=news.epoch, at=news.at, now=now)
        self._held = 0
        self._reporting = False

    def _on_resume(self, news: ResumePlayback, now: Nanos) -> None:
        """A false alarm: what the person says over the reply is not taken, and they do not say it again."""
        if self._held != news.hold:
            return
        self._held = 0
        self.ear.resume(now)
        self._world.overheard += 1
        self._give_up(Outcome.UNANSWERED, "taken for a false alarm")

    # Reports --------------------------------------------------------------------------------------------------------

    def _begin_reports(self) -> None:
        """What the page hears, ten times a second, as long as a reply is open."""
        self._reports += 1
        self._reporting = True
        self._report(self._reports)

    def _begin_reports_again(self) -> None:
        if self._reporting:
            self._begin_reports()

    def _report(self, reports: int) -> None:
        """One report, and the plan for the next; `reports` tells an old row of them from the one that runs."""
        if not self._reporting or reports != self._reports or self.state is State.GONE:
            return
        now = self._world.now()
        place = self.ear.where(now)
        # While it plays on, the reports in between tell the engine nothing that its timeline does not know.
        skipped = self._network.report_batch if place.past == 0 else 1
        self._world.at(now + skipped * _ns(self._network.report_every_ms), lambda: self._report(reports))
        if self.ear.frozen:
            return
        if self.visit.silent:
            self._assume(now)
        elif not (self._network.report_loss and self._rng.random() < self._network.report_loss):
            self._send_report(place, now)

    def _send_report(self, place: Place, now: Nanos) -> None:
        late = self._network.report_late and self._rng.random() < self._network.report_late
        delay = self._delay() + (_ns(self._network.report_late_ms) if late else 0)
        bound = Ticks(0) if place.past > nanos_from_ticks(BOUND) else BOUND
        cursor = Cursor(place.epoch, place.position, now)
        buffer = ticks_from_nanos(self.ear.way)
        self._world.tell(now + delay, CursorReported(self.session, cursor, buffer, Nanos(delay), bound, False))

    def _assume(self, now: Nanos) -> None:
        """No page reports: the front end takes what it sent, some time ago, as heard."""
        self._reports_from = self._reports_from or now
        if now - self._reports_from < REPORTS_MISSED_AFTER:
            return
        lag = nanos_from_ticks(ASSUMED_LAG) - self.ear.way
        place = self.ear.where(Nanos(now - lag))
        fact = CursorReported(
            self.session, Cursor(place.epoch, place.position, now), ASSUMED_LAG, Nanos(0), ASSUMED_BOUND, True
        )
        self._world.tell(now, fact)

    def _cursor(self, now: Nanos) -> Cursor:
        place = self.ear.where(now)
        return Cursor(place.epoch, place.position, now)

    # Time -----------------------------------------------------------------------------------------------------------

    def _delay(self) -> Nanos:
        jitter = self._rng.expovariate(1.0 / self._network.jitter_ms) if self._network.jitter_ms else 0.0
        return _ns(self._network.delay_ms + jitter)

    def _input(self, now: Nanos) -> Ticks:
        """On the input timeline."""
        return ticks_from_nanos(now - self._opened)

    def _sample(self, now: Nanos) -> int:
        return self._input(now) * INPUT_RATE // TICKS_PER_SECOND


def _ns(ms: float) -> Nanos:
    return Nanos(round(ms * NANOS_PER_MS))
