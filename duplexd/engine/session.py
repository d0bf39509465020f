"""One session: a person and a character on one timeline. Facts come in, orders and news go out, work is offered.

1. The session never waits: what it wants next is computed from its state (`wanted`), what it needs to know is in its
   state.
2. An epoch check stands at every door: what comes back from a stage, what is handed to the next, what is published.
3. While a voice that froze the reply is being judged (a `Contest`), generation is gated and the person's words grow a
   branch.
4. Every list here has a bound: latents by the arena, chunks by the lookahead, exchanges by the context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import hypot
from types import MappingProxyType
from typing import Any

import msgspec

from duplexd.engine.bargein import BargeInRule, Decision, VoiceView, content_words
from duplexd.engine.chunk import Chunk, ChunkState, ChunkTable
from duplexd.engine.clause import halves
from duplexd.engine.dialogue import Context, Dialogue, Feed
from duplexd.engine.face import Face, PictureFact
from duplexd.engine.governor import Governor
from duplexd.engine.monitor import Monitor, SessionPressure
from duplexd.engine.policy import Gate, SchedulingPolicy
from duplexd.engine.reply import PlacedWord, Reply, SpokenClause, Wording, spoken_words
from duplexd.engine.speculation import Likelihood, Speculation, SpeculationTunables, likelihood_of_end
from duplexd.engine.stores import Stores
from duplexd.engine.timeline import Timeline
from duplexd.engine.utterance import (
    FROZEN_MAX,
    HELD_PREFIX,
    PARTIAL_EAGER,
    PARTIAL_EVERY,
    PREFIX,
    ListenKind,
    ListenWindow,
    Utterance,
    join,
    newest,
)
from duplexd.engine.work import CHUNK, INPUT, SPECULATION, TURN, Launch, Need, StageFailed, StageFinished, Work
from duplexd.errors import ArenaFull
from duplexd.ids import ChunkId, ConditionVersion, FenceId, ResponseId, SessionId, TurnId, WorkId
from duplexd.media.endpoint import Ask, End, EndpointRule, Verdict, patient_rule, silence_rule
from duplexd.memory.classes import CacheClass
from duplexd.memory.ledger import Refusal
from duplexd.messages import (
    VOICE_THRESHOLD,
    AdvanceEpoch,
    CallMade,
    ConditionSet,
    CursorReported,
    FreeSlots,
    HistoryChanged,
    HistoryCut,
    HistorySet,
    HoldAnswered,
    InputRefusal,
    LatencyMeasured,
    MediaArrived,
    PersonSeen,
    Progress,
    PublishChunk,
    ReplyWanted,
    ReplyWords,
    ResponseChanged,
    ResponseState,
    ResumePlayback,
    SettingChanged,
    StateChanged,
    TextArrived,
    TurnEnded,
    TurnOpened,
    TurnOutcome,
    TurnSettingChanged,
    TurnSettled,
    TurnState,
    UserWords,
    VoiceStarted,
)
from duplexd.streams.graph import ModelPlan
from duplexd.streams.stage import (
    FACE_ROLES,
    SPOKEN_ROLES,
    CopyJob,
    Failed,
    JudgeJob,
    JudgeResult,
    ListenJob,
    ListenResult,
    RenderJob,
    RenderResult,
    Role,
    StageSpec,
    TalkJob,
    TalkResult,
    ThinkJob,
    ThinkResult,
)
from duplexd.units import (
    INPUT_RATE,
    NANOS_PER_MS,
    Nanos,
    Span,
    Ticks,
    nanos_from_ticks,
    samples_from_ticks,
    ticks_from_ms,
    ticks_from_nanos,
)

HOLD_ANSWER_MAX = Nanos(150 * NANOS_PER_MS)  #: how long a cut waits for the page's own position (DESIGN §5 rule 13)
ECHO_THRESHOLD = 0.5
FEED_MAX = 64  #: tokens prefilled in one step: what an urgent chunk waits for at most
FEED_LONGEST = 256  #: the same where a step may take as long as one of decoding
KEYS_KEPT = 64  #: idempotency keys remembered
THINK_FAILURES_MAX = 3
TURNS_WAITING_MAX = 4
REPLIES_WANTED_MAX = 4  #: replies a client may ask for ahead of the present one's end
REPLIES_REMEMBERED = 8  #: replies whose history a client may still correct
MARKS_MAX = 16  #: tokens around a reply: what closes the person's turn, and what closes it
WORDS_FORGOTTEN = 64  #: of a turn that is too long: many at once, since all behind them are prefilled again
FINAL_AFTER = ticks_from_ms(160)  #: without a judge: silence after which the words are taken as complete
#: A frame of 20 ms is on its way to the transport while the next is asked for, and a report may err by as much.
PACE_MARGIN = ticks_from_ms(40)
#: Until a listener's first report can have come, the server's clock stands in for their ear.
REPORT_WITHIN = Nanos(500 * NANOS_PER_MS)
#: How long a first chunk waits at most until the reply can go on without a gap.
BEGINNING_WAIT_MAX = Nanos(1000 * NANOS_PER_MS)
#: A turn with so much voice and no word is told: whoever said it waits for an answer. A cough is shorter.
UNCLEAR_MIN = ticks_from_ms(600)
IDLE_UTTERANCE_MAX = ticks_from_ms(1000)  #: a hint of a voice that no block confirmed by then was none


#: As plain names: an enumeration takes ten times as long to give a member, and these are asked for at every event.
COPY, LISTEN, JUDGE, THINK, TALK, RENDER = SPOKEN_ROLES


class Contest(msgspec.Struct):
    """A voice over the reply, not yet judged."""

    source: str
    hold: int  #: 0: nothing is held: nothing was audible, or the front end's detector rests
    onset: Ticks
    position: Ticks  #: where the ear was when playout froze, or at the onset when nothing was frozen
    bound: Ticks
    assumed: bool
    answered: bool  #: the position is the listener's own
    audible: bool  #: something of the reply was there to be heard when the voice began
    answer_by: Nanos
    noticed_at: Nanos = Nanos(0)  #: when the front end noticed the voice; 0: it is no voice
    branch: Context | None = None
    dialogue: Dialogue | None = None  #: what the dialogue would be after an advance


class Flight(msgspec.Struct):
    """One launch that has not come back."""

    role: Role
    epoch: int
    launched_at: Nanos
    detail: Any = None
    reply: Reply | None = None  #: that it is a step of; None: it is a step of none
    condition: ConditionVersion = ConditionVersion(0)  #: the newest when it was launched


class Pace:
    """How long something took lately, at worst: media time, within bounds, over the last sixteen."""

    def __init__(self, *, floor: Ticks, ceiling: Ticks) -> None:
        self._floor = floor
        self._ceiling = ceiling
        self._lately: deque[Ticks] = deque(maxlen=16)
        self.worst = Ticks(max(floor, PACE_MARGIN))

    def note(self, took: Ticks) -> None:
        self._lately.append(took)
        self.worst = Ticks(min(self._ceiling, max(self._floor, max(self._lately) + PACE_MARGIN)))


class Session:
    """State of one session. `emit` takes news for the front end; it must not call back.

    `policy` says how far stages run ahead of the ear, how far delivery does, and how long chunks are.
    """

    def __init__(
        self,
        *,
        session: SessionId,
        plan: ModelPlan,
        stores: Stores,
        monitor: Monitor,
        policy: SchedulingPolicy,
        emit: Callable[[Any], None],
        endpoint: EndpointRule,
        barge_in: BargeInRule,
        allow_barge_in: bool,
        priority: int,
        response_deadline: Nanos,
        place_wait: Nanos,
        shortage: str,
        speculation: SpeculationTunables,
        governor: Governor,
        now: Nanos,
    ) -> None:
        self.id = session
        self._plan = plan
        self._stores = stores
        self._monitor = monitor
        self._policy = policy
        self._emit = emit
        self._model_endpoint = endpoint
        self._use_endpoint(endpoint)
        self._rule = barge_in
        self.allow_barge_in = allow_barge_in
        self.echo_cancelled = True  #: what the page says of its microphone
        self.priority = priority
        self.response_deadline = response_deadline
        self.wants_place = False  #: as the core was last told
        self.has_place = False  #: in the resident set: without it nothing is thought (see residency.py)
        self.quiet_since: Nanos | None = None  #: when the last reply ended
        self._place_wait = place_wait
        self._shortage = shortage
        self.timeline = Timeline()
        self.chunks = ChunkTable()
        self.dialogue = Dialogue(plan.dialect)
        self.context = stores.open_context(session, self.dialogue.tokens())
        self.ring = stores.lease(stores.ingest, session, CacheClass.INGEST, "copy")
        self.voice_state = stores.lease(stores.state, session, CacheClass.ANCHOR, "render")
        self.face: Face | None = None
        if plan.face is not None:
            self.face = Face(
                session=session,
                plan=plan,
                stores=stores,
                monitor=monitor,
                governor=governor,
                emit=emit,
                ring=self.ring,
                now=now,
            )
        self.reply: Reply | None = None
        self.utterance: Utterance | None = None
        self.contest: Contest | None = None
        self.speculation: Speculation | None = None
        self._turn_branch: Context | None = None  #: what the open turn grows on, once it was guessed at
        self.may_speculate = True  #: what the core says of the load
        self._speculating = speculation
        self._allow_speculation = speculation.turn_max > 0
        self._speculations_left = 0  #: of this turn
        self._early_left = 0  #: of them, in the middle of a voice
        self.turn = TurnId(0)
        self.condition = ConditionVersion(0)
        self.stalled = False
        self.closed = False
        self._warm_by: Nanos | None = None  #: it is being made ready to speak, and given up then
        self.state = TurnState.LISTENING
        self.copied_until = Ticks(0)
        self.input_end = Ticks(0)
        self.waiting: deque[tuple[str, Nanos]] = deque()  #: whole turns that came while a reply could not be cut
        self._to_copy: deque[MediaArrived] = deque()
        self._made: deque[Chunk] = deque()  #: chunks that are made and not handed over; each holds an output slot
        self._chunk_at: Nanos | None = None  #: when the next chunk may start, as `wanted` found last
        self.wants_slot = False  #: a chunk could start if an output slot were free
        self.interrupted_at: Nanos | None = None
        self._flights: dict[WorkId, Flight] = {}
        self._busy: dict[Role, int] = {}
        self._response = 0
        self._sequence = 0
        self._keys: deque[str] = deque(maxlen=KEYS_KEPT)
        self._window_floor = Ticks(0)  #: audio before this belongs to an earlier turn
        self._ready_since: dict[Role, Nanos] = {}
        self._chunk_pace = Pace(floor=ticks_from_ms(60), ceiling=ticks_from_ms(400))
        self._clause_pace = Pace(floor=ticks_from_ms(100), ceiling=ticks_from_ms(800))
        self._clause_since = now
        self._chunk_min, self._chunk_max = min(plan.chunk_ramp), max(plan.chunk_ramp)
        self._think_failures = 0
        self.fault = ""  #: why this session cannot go on
        self._reopened_text = ""  #: words of a turn whose reply nobody heard: what is said next belongs to it
        self._turns_by_client = False
        self._auto_reply = True
        self._eager = False
        self._overhears = True
        self._turn_key = ""  #: of the `TurnEnded` that ends the turn being spoken
        self._next_onset: Ticks | None = None  #: a voice that began while an ended turn was still being understood
        self._unanswered = ""  #: turns that ended over a reply and that nobody is to answer by itself
        self._wanted: deque[ReplyWanted] = deque()
        self._ended: dict[ResponseId, tuple[Wording, str]] = {}  #: the last replies that ended, with their turns

    # Facts ---------------------------------------------------------------------------------------------------------

    def on_media(self, fact: MediaArrived, now: Nanos) -> None:
        if fact.span.end <= self.input_end or len(self._to_copy) >= self._stores.copies_max:
            # A block of the past, or more than the copy lane can hold: its slot goes back at once.
            self._emit(FreeSlots((fact.slot,)))
            self._monitor.count("input_blocks_dropped")
            return
        self.input_end = fact.span.end
        self._to_copy.append(fact)
        if self.face is not None:
            self.face.note_input(fact)
        echo = fact.echo >= ECHO_THRESHOLD
        loud = fact.voice >= VOICE_THRESHOLD
        if self.utterance is not None and not self.utterance.ended:
            self.utterance.take(
                fact.span, voiced=loud and not echo, echo=loud and echo, voice=fact.voice, captured_at=fact.captured_at
            )

    def on_picture(self, fact: PictureFact, now: Nanos) -> None:
        if isinstance(fact, PersonSeen):
            self._see(present=fact.present)
        if self.face is not None:
            self.face.handle(fact, now)
        else:
            self._monitor.count("facts_about_no_face")

    def _see(self, *, present: bool) -> None:
        """The thinker is told between two turns. A guess or a branch supposes what was told when it was begun."""
        if self.dialogue.see(present=present) and self.speculation is None and self.contest is None:
            self._follow()

    def on_voice_started(self, fact: VoiceStarted, now: Nanos) -> None:
        if fact.source == "stop":
            self._stop(fact, now)
            return
        if self.utterance is None:
            # Over a reply, what was there before the onset is the character's own sound coming back.
            prefix = HELD_PREFIX if fact.held else PREFIX
            start = Ticks(max(0, fact.at - prefix, self._window_floor))
            self.utterance = Utterance(onset=fact.at, start=start, listen_max=self._plan.listen_max)
            self._speculations_left = self._speculating.turn_max
            self._early_left = self._speculating.early_max
            self.turn = TurnId(self.turn + 1)
            self._monitor.note(now, self.id, "voice_started", fact.at)
            judged = self.reply is not None and self.allow_barge_in
            self._emit(TurnOpened(self.id, self.turn, fact.at, judged))
        elif self.utterance.ended:
            self._next_onset = fact.at
        if self.reply is None or not self.allow_barge_in:
            if fact.hold:
                self._emit(ResumePlayback(self.id, fact.hold, self.timeline.epoch))
            return
        self._contest(fact, now)

    def _contest(self, fact: VoiceStarted, now: Nanos) -> None:
        onset, noticed_at = fact.at, Nanos(0) if fact.source == "stop" else fact.onset_at
        if self.contest is not None:
            if self.contest.hold or not fact.hold:
                return
            # The voice that could hold nothing so far does so now.
            onset, noticed_at = self.contest.onset, self.contest.noticed_at or noticed_at
        foreign = fact.cursor.epoch != self.timeline.epoch
        position = self.timeline.reported if foreign else fact.cursor.position
        measured = fact.held and fact.source != "server" and not fact.assumed
        self.contest = Contest(
            source=fact.source,
            hold=fact.hold,
            onset=onset,
            position=position,
            bound=fact.bound,
            assumed=fact.assumed,
            answered=measured or not fact.held,
            audible=fact.held or self._plays,
            answer_by=Nanos(now + HOLD_ANSWER_MAX),
            noticed_at=noticed_at,
        )
        self.timeline.held = fact.held
        if self.contest.answered:
            self._settle_contest(now)

    def _stop(self, fact: VoiceStarted, now: Nanos) -> None:
        """An interruption without words: it needs no judgement."""
        if self.reply is None:
            if fact.hold:
                self._emit(ResumePlayback(self.id, fact.hold, self.timeline.epoch))
            return
        self._drop_branch()
        self.contest = None
        self._contest(fact, now)

    def on_hold_answered(self, fact: HoldAnswered, now: Nanos) -> None:
        contest = self.contest
        if contest is None or contest.hold != fact.hold or fact.cursor.epoch != self.timeline.epoch:
            self._monitor.count("hold_answers_ignored")
            return
        if contest.branch is not None and fact.cursor.position < contest.position:
            self._drop_branch()
        contest.position, contest.bound, contest.assumed = fact.cursor.position, fact.bound, fact.assumed
        contest.answered = True
        self._settle_contest(now)

    def _settle_contest(self, now: Nanos) -> None:
        """The cut is known: from here the person's words have a branch to grow on."""
        contest, reply = self.contest, self.reply
        if contest is None or reply is None or contest.branch is not None:
            return
        if contest.hold:
            self.timeline.settle(contest.position, now)
        heard = self._words_heard(contest)
        contest.dialogue = self.dialogue.interrupted(kept=reply.tokens_of_words(heard), text=reply.text_of_words(heard))
        if contest.hold and self.context.forkable:  # Else the words wait as text, as they do without a hold.
            contest.branch = self.context.fork(contest.dialogue.tokens())

    def _words_heard(self, contest: Contest) -> int:
        assert self.reply is not None
        position = Ticks(min(contest.position, self.timeline.published))
        return max(self.reply.words_heard, self.reply.heard_by(Ticks(position - contest.bound)))

    def on_hold_expired(self, resumed: bool, hold: int, now: Nanos) -> None:
        if self.contest is None or self.contest.hold != hold:
            return
        if resumed:
            self._resume(now, told=True)
        else:
            self._advance(now)

    def on_cursor(self, fact: CursorReported, now: Nanos) -> None:
        if not self.timeline.report(fact, now):
            return
        self._commit_heard(now)

    def on_text(self, fact: TextArrived, now: Nanos) -> None:
        if fact.key in self._keys:
            return
        self._keys.append(fact.key)
        text = " ".join(fact.text.split())
        if not text:
            self._emit(InputRefusal(self.id, "empty_text", "The message holds no words; type some.", fact.key))
            return
        if self._refuse_long(text, fact.key):
            return
        waits = self.reply is not None and not self.allow_barge_in
        if waits and self._refuse_at_bound(fact.key):
            return
        self.turn = TurnId(self.turn + 1)
        self._emit(UserWords(self.id, self.turn, text, len(text), True))
        if self.reply is not None:
            if waits:
                self.waiting.append((text, now))
                return
            self._advance_here(now)
        spoken = self._drop_utterance()
        self._begin_reply(join(self._reopened(), join(spoken, text)), ended_at=now, now=now)

    def _refuse_long(self, text: str, key: str) -> bool:
        dialect = self._plan.dialect
        tokens = len(dialect.open_user()) + len(dialect.words(text, first=True))
        room = self._tokens_max - self.dialogue.head_with(self.dialogue.instructions)
        if tokens <= room:
            return False
        said = f"The message is {tokens} tokens long; this model takes at most {room}. Shorten it or send it in parts."
        self._emit(InputRefusal(self.id, "text_too_long", said, key))
        return True

    def _refuse_at_bound(self, key: str) -> bool:
        """With interruptions switched off, turns wait for the reply; the queue of them is bounded."""
        if len(self.waiting) < TURNS_WAITING_MAX:
            return False
        said = (
            f"{TURNS_WAITING_MAX} turns already wait for the reply to end; say it again when they have been answered."
        )
        self._emit(InputRefusal(self.id, "turns_full", said, key))
        self._monitor.count("turns_refused")
        return True

    def on_setting(self, fact: SettingChanged) -> None:
        if fact.barge_in is not None:
            self.allow_barge_in = fact.barge_in
        if fact.echo_cancellation is not None:
            self.echo_cancelled = fact.echo_cancellation
        if fact.speculation is not None:
            self._allow_speculation = fact.speculation and self._speculating.turn_max > 0
            if not self._allow_speculation:
                self._drop_speculation()
                self._follow()

    # The client's directions --------------------------------------------------------------------------------------

    def on_turn_setting(self, fact: TurnSettingChanged) -> None:
        if fact.by_client is not None:
            self._turns_by_client = fact.by_client
        if fact.auto_reply is not None:
            self._auto_reply = fact.auto_reply
        if fact.silence_ms is not None:
            self._use_endpoint(silence_rule(fact.silence_ms) if fact.silence_ms > 0 else self._model_endpoint)
        if fact.patience_ms is not None and self._plan.stage(JUDGE) is not None:
            self._use_endpoint(patient_rule(self._model_endpoint, fact.patience_ms))
        if fact.eager is not None:
            self._eager = fact.eager
        if fact.overhears is not None:
            self._overhears = fact.overhears
        self._drop_speculation()
        self._follow()

    def _use_endpoint(self, rule: EndpointRule) -> None:
        self._endpoint = rule
        self._final_after = rule.rows[0].silence if rule.rows else FINAL_AFTER

    def on_turn_ended(self, fact: TurnEnded, now: Nanos) -> None:
        """The client ends the turn; what it holds is still to be understood."""
        if self.utterance is None or self.utterance.ended:
            at = Span(fact.at, fact.at)
            self._emit(TurnSettled(self.id, self.turn, at, "", TurnOutcome.EMPTY, fact.key))
            return
        self.utterance.ended, self._turn_key = True, fact.key

    def on_input_cleared(self, now: Nanos) -> None:
        if self.contest is not None:
            self._resume(now, told=False, cleared=True)
        self._next_onset = None
        if self.utterance is not None:
            self._drop_utterance(TurnOutcome.CLEARED)
        self._drop_speculation()
        if self.reply is None:
            self._say_again("")

    def _reopen(self, onset: Ticks) -> None:
        """A turn that began while the one before was still being understood."""
        self._next_onset = None
        self.turn = TurnId(self.turn + 1)
        self.utterance = Utterance(onset=onset, start=onset, listen_max=self._plan.listen_max)
        self._emit(TurnOpened(self.id, self.turn, onset, False))

    def _keep_turn(self, text: str, whole: str) -> None:
        """A turn that nobody answers by itself: its words wait in the open turn, or for the end of the reply."""
        if self.reply is not None:
            self._unanswered = newest(join(self._unanswered, text), FROZEN_MAX)
        else:
            self._reopened_text = newest(whole, FROZEN_MAX)
            self._say_again("")

    def _say_again(self, spoken: str) -> None:
        """The open turn is what stood in it before, and `spoken`; no reply lives."""
        words = join(self._reopened_text, spoken)
        if words:
            self.dialogue.say(words)
        else:
            self.dialogue.forget_turn()
        self._make_room()

    def on_condition(self, fact: ConditionSet) -> None:
        """Taken at the next chunk of thought: what is being decoded ends with the old one. Instructions that are too
        long are refused, and those before them hold.
        """
        tokens, room = self.dialogue.head_with(fact.text), self._tokens_max // 2
        if tokens > room:
            said = f"The instructions are too long: with the model's own they take {tokens} tokens, and {room} at most"
            said += " are allowed. Shorten them; those before hold."
            self._emit(InputRefusal(self.id, "instructions_too_long", said, ""))
            return
        self.dialogue.instruct(fact.text)
        self.condition = ConditionVersion(self.condition + 1)
        self._history_changed()

    def on_history_set(self, fact: HistorySet) -> None:
        self._drop_speculation()
        self.dialogue.recast(fact.turns)
        if self.reply is None:
            self._reopened_text = fact.user
            self._say_again(self.utterance.stable_text if self.utterance is not None else "")
            return
        if fact.user.startswith(self.dialogue.user):  # The rest was said since.
            self._unanswered = fact.user[len(self.dialogue.user) :].strip()
        self._history_changed()

    def on_history_cut(self, fact: HistoryCut) -> None:
        """What was heard of a reply that has ended, by whoever heard it (DESIGN §5 rule 1: it corrects an estimate)."""
        if fact.response not in self._ended:
            reason = f"Response {fact.response} is not one of the last {REPLIES_REMEMBERED} that have ended."
            self._emit(InputRefusal(self.id, "unknown_response", reason, fact.key))
            return
        self._drop_speculation()
        said, user = self._ended[fact.response]
        heard = said.ended_by(Ticks(said.start + fact.heard))
        kept, text = said.tokens[: said.tokens_of_words(heard)], said.text_of_words(heard)
        open_before = self.dialogue.user
        if not self.dialogue.correct(fact.response, user, tokens=kept, text=text):
            heard, text = 0, ""
        if self.reply is None and self.dialogue.user != open_before:
            spoken = self.utterance.stable_text if self.utterance is not None else ""
            self._reopened_text = self.dialogue.user.removesuffix(spoken).strip()
        self._emit(HistoryChanged(self.id, fact.response, heard, text, (), False, True))
        self._history_changed()

    def _history_changed(self) -> None:
        self._drop_speculation()
        self._make_room()

    def _remember(self, reply: Reply) -> None:
        self._ended[reply.response] = (reply.wording(), self.dialogue.user)
        if len(self._ended) > REPLIES_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def on_reply_wanted(self, fact: ReplyWanted) -> None:
        if len(self._wanted) >= REPLIES_WANTED_MAX:
            said = f"{REPLIES_WANTED_MAX} replies are wanted already; ask again when one has ended."
            self._emit(InputRefusal(self.id, "replies_full", said, fact.key))
            return
        self._wanted.append(fact)

    def on_reply_unwanted(self, key: str, now: Nanos) -> None:
        self._wanted = deque(wanted for wanted in self._wanted if wanted.key != key)
        if self.reply is not None and self.reply.key == key:
            self._advance_here(now)

    def on_prefetch_wanted(self, now: Nanos) -> None:
        """It needs a place until its context is whole and read; then it rests, and its pages stay while others have
        room. Given up when there was no place within the stated wait.
        """
        self._warm_by = Nanos(now + self._place_wait)

    @property
    def is_warming(self) -> bool:
        return self._warm_by is not None

    def _settle_warmth(self, now: Nanos, by: Nanos) -> None:
        is_warm = self.context.readable and self.context.behind == 0 and self.context.flight is None
        if is_warm or now >= by:
            self._warm_by = None
            self._monitor.count("prefetches_done" if is_warm else "prefetches_given_up")

    def _begin_waiting(self, now: Nanos) -> None:
        """A turn that came while the reply could not be cut, and the reply was stopped after all."""
        if self.reply is None and self.contest is None and self.utterance is None:
            text, ended_at = self.waiting.popleft()
            self._begin_reply(join(self._reopened(), text), ended_at=ended_at, now=now)

    def _begin_wanted(self, now: Nanos) -> None:
        """A reply asked for begins when nothing is before it: no reply, no turn that is still being understood."""
        busy = self.reply is not None or self.contest is not None or bool(self.waiting)
        if busy or (self.utterance is not None and self.utterance.ended):
            return
        wanted = self._wanted.popleft()
        self._begin_reply(self._reopened(), ended_at=now, now=now, wanted=wanted)
        if wanted.script:
            self._recite(wanted.script, now)

    def _recite(self, script: str, now: Nanos) -> None:
        reply = self.reply
        assert reply is not None
        reply.recite(script, lambda word, first: self._plan.dialect.words(word, first=first))
        reply.prefilled_at = reply.worded_at = now
        self.dialogue.think(reply.tokens)
        self._move_reply(ResponseState.RUNNING)
        self._write(reply)
        self._complete_if_over(now)

    def _write(self, reply: Reply) -> None:
        """Without a voice, words are out as soon as they are thought."""
        if reply.speaks or not reply.to_talk:
            return
        first = len(reply.words)
        self._emit_words(reply, first, reply.write())
        if reply.state is ResponseState.RUNNING:
            self._move_reply(ResponseState.STREAMING)

    def _announce_calls(self, reply: Reply) -> None:
        if reply is not self.reply:
            return  # Made on suspicion: announced when the turn has ended.
        for call in reply.take_calls(reply.calls_told):
            reply.calls_told += 1
            self._emit(CallMade(self.id, reply.response, call.name, call.arguments))

    # Stages came back ----------------------------------------------------------------------------------------------

    def on_finished(self, fact: StageFinished, now: Nanos) -> None:
        if self.face is not None and self.face.owns(fact.work):
            self.face.finished(fact, now)
            return
        flight = self._flights.pop(fact.work)
        self._busy[flight.role] -= 1
        self._stores.fence_passed(FenceId(fact.work))
        result: Any = fact.results[0]
        if isinstance(result, Failed):
            self._failed(fact.work, flight, result.reason, now)
        elif flight.role is COPY:
            self._copied(flight.detail)
        elif flight.role is LISTEN:
            self._heard_words(flight, result, now)
        elif flight.role is JUDGE:
            self._judged(flight, result)
        elif flight.role is THINK:
            self._thought(fact.work, flight, result, now)
        elif flight.role is TALK:
            self._talked(flight, result, now)
        elif flight.role is RENDER:
            self._rendered(flight, result, now)

    def on_failed(self, fact: StageFailed, now: Nanos) -> None:
        if self.face is not None and self.face.owns(fact.work):
            self.face.finished(fact, now)
            return
        flight = self._flights.pop(fact.work)
        self._busy[flight.role] -= 1
        self._stores.fence_passed(FenceId(fact.work))
        self._failed(fact.work, flight, fact.reason, now)

    def _failed(self, work: WorkId, flight: Flight, reason: str, now: Nanos) -> None:
        """A fault ends its response (or loses its partial), never the session and never a neighbour."""
        self._monitor.count(f"{flight.role.value}_failures")
        if flight.role is COPY:
            self._copied(flight.detail)
        elif flight.role is LISTEN:
            if self.utterance is flight.detail:
                self.utterance.miss()
        elif flight.role is JUDGE:
            if self.utterance is flight.detail:
                self.utterance.judging = None
        else:
            if flight.role is THINK:
                flight.detail.abort(work)
                self._think_failures += 1
                if self._think_failures >= THINK_FAILURES_MAX:
                    self.fault = f"the thinker failed {self._think_failures} times in a row, last: {reason}"
            if flight.role is TALK and self._talk_in_halves(flight):
                return
            if flight.role is RENDER:
                self._retire_chunk(flight.detail)
            if flight.reply is None or flight.reply is not self._making:
                return
            if self.speculation is not None:
                self._abandon_speculation()  # What failed on suspicion is tried again when the turn has ended.
            else:
                self._fail_reply(f"stage {flight.role.value} failed: {reason}", now)

    def _talk_in_halves(self, flight: Flight) -> bool:
        """A clause the talker cannot take is too long, as a rule: try its halves. False for a single word."""
        reply = flight.reply
        lease, clause = flight.detail
        self._stores.discard(lease)
        parts = halves(clause)
        if parts is None or reply is None or reply is not self._making:
            return False
        reply.to_talk.extendleft(reversed(parts))
        return True

    def _copied(self, facts: list[MediaArrived]) -> None:
        self._emit(FreeSlots(tuple(f.slot for f in facts)))
        self.copied_until = Ticks(max(self.copied_until, facts[-1].span.end))
        if self.face is not None:
            self.face.copied_until = self.copied_until

    def _heard_words(self, flight: Flight, result: ListenResult, now: Nanos) -> None:
        utterance = self.utterance
        if utterance is None or utterance is not flight.detail:
            return
        before = utterance.stable_text
        utterance.hear(result.text, result.certainty, over_reply=self.contest is not None)
        text, stable = utterance.text, utterance.stable_text
        if text:
            self._emit(UserWords(self.id, self.turn, text, len(stable), False))
        if stable != before:
            self._prefill_words(stable)

    def _prefill_words(self, stable: str) -> None:
        """Stable words enter the context as they come: on the trunk in silence, on the branch over a reply."""
        contest = self.contest
        if contest is not None and contest.branch is not None and contest.dialogue is not None:
            carried = contest.dialogue.user if contest.dialogue.user_open else ""
            preview = contest.dialogue.past()
            preview.say(join(carried, stable))
            if preview.length <= self._tokens_max:  # Beyond it the words wait: room is made when the turn is taken.
                contest.branch.follow_dialogue(preview)
        elif self.reply is None and stable:
            self.dialogue.say(join(self._reopened_text, stable))
            self._make_room()

    def _reopened(self) -> str:
        text, self._reopened_text = self._reopened_text, ""
        return text

    def _judged(self, flight: Flight, result: JudgeResult) -> None:
        utterance = self.utterance
        if utterance is None or utterance is not flight.detail or utterance.judging is None:
            return
        utterance.answer(result.probability)

    def _thought(self, work: WorkId, flight: Flight, result: ThinkResult, now: Nanos) -> None:
        context: Context = flight.detail
        reply = flight.reply
        stale = flight.epoch != self.timeline.epoch or reply is None or reply is not self._making
        context.land(work, () if stale else result.tokens)
        self._think_failures = 0
        if stale or reply is None or not result.tokens:
            return
        if reply.prefilled_at == 0:
            reply.prefilled_at = now
        taken = reply.think(result.tokens, stop=self._plan.dialect.stop, condition=flight.condition)
        self._supposed.think(result.tokens[:taken])
        self._follow()
        self._announce_calls(reply)
        if reply.to_talk:
            reply.thinking = False
            reply.worded_at = reply.worded_at or now
        if self.speculation is not None:
            self._drop_if_empty(self.speculation)
            return
        if reply.state is ResponseState.ACCEPTED:
            self._move_reply(ResponseState.RUNNING)
        self._write(reply)
        self._complete_if_over(now)

    def _talked(self, flight: Flight, result: TalkResult, now: Nanos) -> None:
        reply = flight.reply
        lease, clause = flight.detail
        if flight.epoch != self.timeline.epoch or reply is None or reply is not self._making:
            self._stores.discard(lease)
            return
        if reply.words:
            self._clause_pace.note(ticks_from_nanos(now - self._clause_since))
        first = len(reply.words)
        words = reply.place(clause, result, lease)
        reply.talked_at = reply.talked_at or now
        if words and reply is self.reply:
            self._emit_words(reply, first, words)
        self._release_clauses(reply)
        self._complete_if_over(now)

    def _rendered(self, flight: Flight, result: RenderResult, now: Nanos) -> None:
        chunk: Chunk = flight.detail
        if chunk.state is ChunkState.RETIRING or flight.epoch != self.timeline.epoch:
            self._retire_chunk(chunk)
            return
        reply = flight.reply
        assert reply is not None
        self._chunk_pace.note(ticks_from_nanos(now - flight.launched_at))
        self.chunks.move(chunk, ChunkState.READY)
        chunk.samples = result.samples
        self._made.append(chunk)
        reply.chunks_made += 1
        reply.spoken[0].chunks_open -= 1
        self._release_clauses(reply)
        self._deliver(now)

    def _deliver(self, now: Nanos) -> None:
        """Hand over what is made, no further ahead of the ear than the policy says."""
        while self.reply is not None and (at := self._next_delivery_at(now)) is not None and at <= now:
            self._publish(self._made.popleft(), self.reply, now)

    def _next_delivery_at(self, now: Nanos) -> Nanos | None:
        """When the oldest chunk that is made may be handed over; None while there is none, or nothing plays."""
        if not self._made:
            return None
        chunk, reply = self._made[0], self.reply
        if reply is not None and reply.chunks_published == 0 and self._policy.spares_beginnings:
            return self._begins_at(reply, chunk, now)
        # A chunk that is longer than the bound goes when all before it was heard, or it would never go.
        ahead = Ticks(max(self._policy.delivers_ahead, chunk.span.length))
        return self.timeline.reenters_budget_at(chunk.span.end, ahead, now)

    def _begins_at(self, reply: Reply, first: Chunk, now: Nanos) -> Nanos:
        """When the first chunk may be handed over: so late that what follows it can be made while it is heard, as lanes
        stand now. At once where more is made already, nothing follows, or nothing was measured.
        """
        reply.held_since = reply.held_since or now
        goes_on = self._goes_on_at(reply, now)
        if len(self._made) > 1 or len(reply.spoken) > 1 or reply.unplanned() is not None or goes_on is None:
            return now
        lasts = nanos_from_ticks(Ticks(first.span.length + self.timeline.buffer))
        return Nanos(min(max(now, goes_on - lasts), max(now, reply.held_since + BEGINNING_WAIT_MAX)))

    def _goes_on_at(self, reply: Reply, now: Nanos) -> Nanos | None:
        """When the chunk after the first will be made, strays included, if its clause is talked next and alone."""
        times = self._monitor.times
        think, talk = self._plan.need(THINK).name, self._plan.need(TALK).name
        free_at, running = times.lane_free_at(talk, now)
        own, after = times.of_rows(talk, 1), times.after(talk)
        if own is None or after is None:
            return None
        if self._busy.get(TALK):
            return Nanos(free_at + times.stray(talk, running) + after)
        if reply.all_talked:
            return None
        worded_at = now if reply.to_talk else times.lane_free_at(think, now)[0]
        # Two launches that stray independently: their squares add up.
        return Nanos(max(worded_at, free_at) + own + times.stray(talk, round(hypot(own, running))) + after)

    def _drop_chunks(self, dropped: list[Chunk]) -> None:
        """Nobody will hear them, nor anything else that waits to be handed over. What a lane still writes keeps its
        slot until it has come back.
        """
        self._made.clear()
        for chunk in dropped:
            if chunk.state is ChunkState.DISCARDED:
                self._retire_chunk(chunk)

    def _retire_chunk(self, chunk: Chunk) -> None:
        """The work that was writing it has come back: nobody holds its slot any more."""
        if chunk.slot >= 0:
            self._stores.out_slots.append(chunk.slot)
            chunk.slot = -1
        if chunk.state is not ChunkState.DISCARDED:
            self.chunks.move(chunk, ChunkState.DISCARDED)

    def _publish(self, chunk: Chunk, reply: Reply, now: Nanos) -> None:
        if reply.chunks_published and (late := self.timeline.silent_for(now)):
            self._monitor.late(now, self.id, late)
        self.chunks.move(chunk, ChunkState.PUBLISHED)
        self.timeline.published = chunk.span.end
        if reply.published_at == 0:
            reply.published_at = now
            self._move_reply(ResponseState.STREAMING)
            self._enter(TurnState.SPEAKING)
            if self.timeline.reported_at < now and self.timeline.reported >= chunk.span.start:
                self.timeline.reported_at = now  # Nothing of it can be playing before it exists.
            self._emit(
                LatencyMeasured(
                    self.id,
                    reply.turn,
                    reply.response,
                    reply.ended_at,
                    reply.accepted_at,
                    reply.prefilled_at,
                    reply.worded_at,
                    now,
                )
            )
        reply.chunks_published += 1
        self._sequence += 1
        last = reply.all_planned and not self._made
        news = PublishChunk(
            self.id,
            reply.response,
            chunk.chunk_id,
            chunk.epoch,
            chunk.span,
            chunk.slot,
            chunk.samples,
            last,
            self._sequence,
            chunk.condition,
        )
        self._emit(news)
        if self.face is not None:
            self.face.overhear(news, reply.clause_at(chunk.span.start), now)
        chunk.slot = -1  # The front end owns it now.

    # The reply's life ----------------------------------------------------------------------------------------------

    def _begin_reply(self, text: str, *, ended_at: Nanos, now: Nanos, wanted: ReplyWanted | None = None) -> None:
        self._drop_speculation()
        self._take_turn_branch()
        self.dialogue.say(text)
        self.dialogue.close_user()
        self._make_room()
        self._accept(self._new_reply(now, wanted), ended_at=ended_at, now=now)

    def _new_reply(self, now: Nanos, wanted: ReplyWanted | None = None) -> Reply:
        limit = self._plan.reply_tokens_max
        return Reply(
            turn=self.turn,
            epoch=self.timeline.epoch,
            start=self.timeline.generation,
            stream=self._plan.dialect.stream,
            accepted_at=now,
            sentences_max=self._plan.reply_sentences_max,
            words_enough=self._plan.reply_words_enough,
            tokens_max=min(limit, wanted.tokens_max) if wanted is not None and wanted.tokens_max else limit,
            first_words=self._plan.first_words,
            key=wanted.key if wanted is not None else "",
            spoken=wanted is None or wanted.spoken,
        )

    def _accept(self, reply: Reply, *, ended_at: Nanos, now: Nanos) -> None:
        """From here on the reply exists for the person: it is announced, and will end exactly once."""
        self._response += 1
        reply.accept(ResponseId(self._response), self.turn, ended_at=ended_at, now=now)
        reply.context_tokens = self.dialogue.length - len(reply.tokens)
        reply.cached_tokens = min(len(self.context.ids), reply.context_tokens)
        self.reply = reply
        self._emit_response()
        self._enter(TurnState.THINKING)

    def _make_room(self) -> None:
        """The context follows the dialogue, within its bounds: at the bound the oldest exchange slides out, then the
        beginning of a turn that is too long by itself; anchor and instructions never. Pages are a bound of their own,
        since every cut and every branch may leave one partly filled.
        """
        while (surplus := self._surplus) > 0 and (self._slide(surplus) or self._forget_words()):
            pass
        self._follow()
        while self._short_of_pages and self._slide():
            pass

    @property
    def _surplus(self) -> int:
        """Tokens by which what stands before the reply takes the room that a reply needs."""
        return self.dialogue.length - len(self.dialogue.reply) - self._tokens_max

    @property
    def _short_of_pages(self) -> bool:
        """A whole reply would not fit. Within one, room is made when pages run out (`_give_way`)."""
        if self.reply is not None or self.speculation is not None:
            return False
        return not self.growing.may_grow(self._plan.reply_tokens_max + MARKS_MAX)

    def _slide(self, at_least: int = 1) -> bool:
        """Forget the oldest exchanges, so many tokens of them; False when there is none. Keys that stay are kept."""
        count = len(self.dialogue.exchanges)
        if not count:
            return False
        # A guess supposes a dialogue that is about to change. So does a branch: its words wait as text.
        self._drop_speculation()
        self._drop_branch()
        self._take_turn_branch()
        self.context.follow_dialogue(self.dialogue)
        self.dialogue.long_term = self.context.slide(
            len(self.dialogue.anchor),
            self.dialogue.slide(at_least),
            skip=self.dialogue.instructed_tokens,
            keep=self._plan.long_term_tokens,
        )
        self._monitor.count("exchanges_slid", count - len(self.dialogue.exchanges))
        return True

    def _forget_words(self) -> bool:
        """Forget the beginning of the open turn; False when too little would be left of it."""
        self._drop_speculation()
        if not self.dialogue.forget_words(WORDS_FORGOTTEN):
            return False
        self._monitor.count("turn_words_forgotten", WORDS_FORGOTTEN)
        return True

    def _give_way(self, context: Context) -> bool:
        """A launch on this context found no pages. At a bound of the session's own, something goes: a guess, then a
        branch, then the oldest exchange, then keys that lie scattered. Whether the launch may be tried again.
        """
        if self._stores.pages.refusal is Refusal.PARTITION_FULL:
            return False  # Others have the pages: the core makes room.
        if self.speculation is not None:
            self._monitor.count("speculations_without_room")
            self._abandon_speculation()
            return False
        if self.contest is not None and self.contest.branch is not None:
            spent = context is self.contest.branch
            self._drop_branch()
            self._monitor.count("branches_without_room")
            return not spent
        if self._slide():
            return True
        self._take_turn_branch()  # What a trunk still shares would not be given back.
        anew = context.prefill_anew()
        self._monitor.count("contexts_prefilled_anew", int(anew))
        return anew

    @property
    def _tokens_max(self) -> int:
        """Tokens before a reply: the reply itself and the marks around it still fit behind them."""
        return self._plan.context_tokens_max - self._plan.reply_tokens_max - MARKS_MAX

    def _move_reply(self, state: ResponseState) -> None:
        assert self.reply is not None
        self.reply.move(state)
        self._emit_response()

    def _emit_response(self, reason: str = "") -> None:
        assert self.reply is not None
        self._sequence += 1
        self._emit(
            ResponseChanged(
                self.id,
                self.reply.response,
                self.reply.epoch,
                self.reply.state,
                self.reply.outputs(),
                self._sequence,
                reason,
                self.reply.key,
                self.reply.context_tokens,
                self.reply.cached_tokens,
                len(self.reply.tokens),
                self.reply.cut_short,
            )
        )

    def _emit_words(self, reply: Reply, first: int, words: list[PlacedWord]) -> None:
        self._sequence += 1
        end = first + len(words)
        text, tokens = reply.text_between(first, end), reply.tokens_of_words(end)
        placed = spoken_words(words)
        self._emit(ReplyWords(self.id, reply.response, reply.epoch, first, placed, self._sequence, text, tokens))

    def _commit_heard(self, now: Nanos) -> None:
        """The ear has moved: chunks become HEARD, keys RECENT, words history."""
        position, reply = self.timeline.heard, self.reply
        self.chunks.hear(position)
        if reply is None:
            return
        heard = reply.heard_by(position)
        if heard > reply.words_heard:
            reply.words_heard = heard
            kept = self.dialogue.length - len(self.dialogue.reply) + reply.tokens_of_words(heard)
            self.context.commit(kept)
            self._emit_history(reply, heard, final=False)
        self._complete_if_over(now)

    def _complete_if_over(self, now: Nanos) -> None:
        reply = self.reply
        if reply is None or self.contest is not None or not reply.all_planned:
            return
        if self._busy.get(TALK) or self._busy.get(RENDER):
            return  # A clause on its way to the talker is in no list: without it the reply would look empty, or over.
        if reply.is_empty and not reply.avoided:
            self._monitor.count("empty_replies")
            reply.think_again(avoid=self._plan.dialect.stop)
            self.dialogue.reply = []
            self.context.follow_dialogue(self.dialogue)
            return
        if self.timeline.published < reply.planned_until or self.timeline.reported < self.timeline.published:
            return
        reply.words_heard = len(reply.words)
        self.chunks.hear(self.timeline.published)
        self._emit_history(reply, reply.words_heard, final=True)
        self._move_reply(ResponseState.COMPLETED)
        self._end_reply(reply, reply.words_heard, now=now)
        self._monitor.count("responses_completed")
        if self.waiting:
            text, ended_at = self.waiting.popleft()
            self._begin_reply(text, ended_at=ended_at, now=now)

    def _emit_history(
        self,
        reply: Reply,
        words: int,
        *,
        final: bool,
        ambiguous: tuple[int, ...] = (),
        estimated: bool | None = None,
    ) -> None:
        self._emit(
            HistoryChanged(
                self.id,
                reply.response,
                words,
                reply.text_of_words(words),
                ambiguous,
                self.timeline.assumed if estimated is None else estimated,
                final,
            )
        )

    def _end_reply(self, reply: Reply, heard: int, *, now: Nanos, words: str = "") -> None:
        """Common end of a reply: its latents go behind the work that still reads them, the dialogue keeps what was
        heard.

        `words` are what the person has said since; the keys a branch already holds for them are kept.
        """
        self._release_latents(reply)
        self._remember(reply)
        kept, text = reply.tokens_of_words(heard), reply.text_of_words(heard)
        self.dialogue.finish_reply(kept=kept, text=text, response=reply.response)
        longer = reply.recited or (bool(self.dialogue.exchanges) and self.dialogue.exchanges[-1].overheard)
        self.reply = None
        self._reopened_text = join(self.dialogue.user if self.dialogue.user_open else "", self._unanswered)
        self._unanswered = ""
        if self._reopened_text:
            self.dialogue.say(self._reopened_text)
        if words:
            self.dialogue.say(join(self._reopened_text, words))
        self.context.follow_dialogue(self.dialogue)
        if longer:
            self._make_room()  # It may be longer than what was thought, or what was overheard stands behind it.
        self.context.commit(len(self.context.ids))
        self.quiet_since = now
        self._enter(TurnState.LISTENING)

    def _release_latents(self, reply: Reply) -> None:
        """No more is made of it: latents go back behind the work that still reads them."""
        fences = tuple(FenceId(w) for w, f in self._flights.items() if f.role in (TALK, RENDER))
        for spoken in reply.spoken:
            self._stores.discard(spoken.latents, after=fences)
        reply.spoken.clear()
        reply.to_talk.clear()

    def _fail_reply(self, reason: str, now: Nanos) -> None:
        """The reply ends here; what was heard of it stays, what lies unheard is dropped like at an interruption."""
        reply = self.reply
        assert reply is not None
        at = self.timeline.playback(now)
        self._drop_branch()
        self.contest = None
        heard = reply.heard_by(at)
        reply.move(ResponseState.FAILED)
        self._emit_response(reason)
        self._emit_history(reply, heard, final=True)
        self._cut_timeline(at, hold=0, now=now)
        self._end_reply(reply, heard, now=now)
        if self._reopened():
            self.dialogue.forget_turn()
            self.context.follow_dialogue(self.dialogue)
        self._monitor.count("responses_failed")

    # Speculation ---------------------------------------------------------------------------------------------------

    @property
    def _making(self) -> Reply | None:
        """The reply that stages work for: the announced one, or one made on suspicion."""
        return self.reply if self.speculation is None else self.speculation.reply

    @property
    def _supposed(self) -> Dialogue:
        """What was said, or with a guess: what would have been."""
        return self.dialogue if self.speculation is None else self.speculation.dialogue

    @property
    def growing(self) -> Context:
        """The context that takes what is said and thought: the trunk, or the branch of a turn that was guessed at."""
        return self.context if self._turn_branch is None else self._turn_branch

    def _follow(self) -> None:
        """The growing context shall hold that dialogue; what it holds already stays."""
        self.growing.follow_dialogue(self._supposed)

    def _branch_off(self) -> bool:
        """From the first guess on the turn grows on a branch, and the trunk stays as it was; False while work that may
        yet fail, or a fold, stands between.
        """
        if self._turn_branch is None and self.context.flight is None and self.context.forkable:
            self._turn_branch = self.context.fork(self.context.ids)
        return self._turn_branch is not None

    def _take_turn_branch(self) -> None:
        """Advance: the turn counts, and what it grew on is the trunk. What was supposed wrongly is cut when it follows
        the dialogue next.
        """
        branch, self._turn_branch = self._turn_branch, None
        if branch is not None:
            self.context = self.context.become(branch)

    def _drop_turn_branch(self) -> None:
        """Resume: the turn came to nothing, and the trunk is what it was before the first guess."""
        branch, self._turn_branch = self._turn_branch, None
        if branch is not None:
            self._drop_speculation()  # It stands on the branch.
            branch.close()
            self._follow()

    def _speculate(self, now: Nanos) -> None:
        """Begin, keep or drop the reply to a turn that may be over; called when something about the turn changed."""
        utterance, speculation = self.utterance, self.speculation
        text = join(self._reopened_text, utterance.text) if utterance is not None else ""
        if speculation is not None:
            if self.may_speculate and speculation.answers(text):
                return
            self._drop_speculation()
        if utterance is not None and self._suspects_end(utterance):
            self._begin_speculation(utterance, text, now)
        if speculation is not None:
            self._follow()

    def _suspects_end(self, utterance: Utterance) -> bool:
        free = self.reply is None and self.contest is None and not self.waiting and not self.stalled
        allowed = self._allow_speculation and self.may_speculate and self._speculations_left > 0
        if not (free and allowed and self.has_place and self.growing.readable):
            return False
        likelihood = likelihood_of_end(utterance, self._speculating)
        return likelihood is Likelihood.QUIET or (likelihood is Likelihood.EARLY and self._early_left > 0)

    def _begin_speculation(self, utterance: Utterance, text: str, now: Nanos) -> None:
        dialogue = self.dialogue.supposing(text)
        # These words take the room a moment later, guess or not. Were it made only then, a conversation that has filled
        # its context would never be guessed at again.
        while (surplus := dialogue.length - self._tokens_max) > 0 and self._slide(surplus):
            dialogue = self.dialogue.supposing(text)
        if surplus > 0:
            self._speculations_left = 0  # The turn is too long by itself: that it ends is waited for.
            self._monitor.count("speculations_without_room")
            return
        if not self._branch_off():
            return
        self._speculations_left -= 1
        self._early_left -= likelihood_of_end(utterance, self._speculating) is Likelihood.EARLY
        self._monitor.count("speculations")
        self.speculation = Speculation(text, self._new_reply(now), dialogue)
        self._follow()

    def _drop_if_empty(self, speculation: Speculation) -> None:
        """Nothing to say to these words: when the turn has ended the ordinary reply tries again with other tokens."""
        if speculation.reply.is_empty:
            self._abandon_speculation()

    def _abandon_speculation(self) -> None:
        """Drop it, and do not guess again in this turn."""
        self._speculations_left = 0
        self._drop_speculation()
        self._follow()

    def _drop_speculation(self) -> None:
        """Nobody has seen it: no epoch ends. What still runs for it goes behind its fence. `_follow` comes next, when
        it is known what the context shall hold instead.
        """
        speculation, self.speculation = self.speculation, None
        if speculation is None:
            return
        dropped = self.chunks.forget_unpublished()
        self._drop_chunks(dropped)
        ticks = sum(chunk.span.length for chunk in dropped)
        self._monitor.count("speculative_us_discarded", ticks * 1000 // ticks_from_ms(1))
        self._release_latents(speculation.reply)
        self.timeline.generation = self.timeline.published
        self._monitor.count("speculations_dropped")
        self._monitor.count("speculative_tokens_discarded", len(speculation.reply.tokens))

    def _confirm_speculation(self, speculation: Speculation, *, ended_at: Nanos, now: Nanos) -> None:
        """The turn has ended with these words: what was made for them is the reply, and goes out at once."""
        self.speculation = None
        in_view = self.dialogue.in_view
        self.dialogue = speculation.dialogue
        self.dialogue.see(present=in_view)
        reply = speculation.reply
        self._monitor.count("speculations_confirmed")
        self._accept(reply, ended_at=ended_at, now=now)
        if reply.tokens or reply.thought:
            self._move_reply(ResponseState.RUNNING)
        self._announce_calls(reply)
        if reply.words:
            self._emit_words(reply, 0, reply.words)
        self._deliver(now)
        self._complete_if_over(now)

    # Interruption --------------------------------------------------------------------------------------------------

    def _view(self, contest: Contest) -> VoiceView:
        assert self.reply is not None
        utterance = self.utterance
        heard = self._words_heard(contest)
        tail = " ".join(w.text for w in self.reply.words[max(0, heard - 12) : heard + 8])
        if utterance is None:
            return VoiceView(
                contest.source, Ticks(0), Ticks(0), Ticks(0), Ticks(0), "", "", 0.0, True, True, True, True, False, tail
            )
        return VoiceView(
            source=contest.source,
            elapsed=Ticks(utterance.input_end - contest.onset),
            voiced=Ticks(utterance.voiced_ticks),
            echo=Ticks(utterance.echo_ticks),
            quiet=utterance.quiet,
            text=utterance.text,
            stable=utterance.stable_text,
            certainty=utterance.certainty,
            transcribed=utterance.complete,
            reply_heard=heard > 0,
            audible=contest.audible,
            cancelled=self.echo_cancelled,
            learning=self.echo_cancelled and contest.position < self._rule.tunables.learning_max,
            reply_tail=tail,
            eager=self._eager,
        )

    def _decide(self, now: Nanos) -> None:
        contest = self.contest
        if contest is None or self.reply is None:
            return
        decision = self._rule.decide(self._view(contest))
        if decision is Decision.RESUME:
            self._resume(now, told=False)
        elif decision is Decision.ADVANCE and (contest.answered or now >= contest.answer_by):
            self._advance(now)

    def _resume(self, now: Nanos, *, told: bool, cleared: bool = False) -> None:
        """A false alarm: the branch goes, playout goes on where it froze. What was said follows the reply in the
        history (DESIGN §6) and is counted apart. An acknowledgement is no news to the thinker, an echo or a guess of
        the ears nothing anybody said, and what the client has `cleared` is gone.
        """
        contest = self.contest
        assert contest is not None
        said = self.reply is not None and self._rule.is_said(self._view(contest))
        self._drop_branch()
        self.contest = None
        self.timeline.held = False
        self.timeline.reported_at = now
        self._monitor.count("false_alarms")
        self._monitor.note(now, self.id, "resumed")
        spoken = self._drop_utterance(TurnOutcome.OVERHEARD)
        if spoken:
            self._emit(UserWords(self.id, self.turn, spoken, len(spoken), True))
            self._monitor.count("overheard_turns" if content_words(spoken) and not told else "acknowledgements")
        if said and self._overhears and not cleared:
            self.dialogue.overhear(spoken)
        if contest.hold and not told:
            self._emit(ResumePlayback(self.id, contest.hold, self.timeline.epoch))
        self._enter(self._state_of_reply())

    def _state_of_reply(self) -> TurnState:
        """A reply of which no sound has been handed over is still being thought."""
        if self.reply is None:
            return TurnState.LISTENING
        return TurnState.SPEAKING if self.reply.published_at else TurnState.THINKING

    def _drop_branch(self) -> None:
        if self.contest is not None and self.contest.branch is not None:
            self.contest.branch.close()
            self.contest.branch = None

    def _drop_utterance(self, outcome: TurnOutcome = TurnOutcome.TAKEN) -> str:
        utterance, self.utterance = self.utterance, None
        if utterance is None:
            return ""
        self._window_floor = utterance.input_end
        span = Span(utterance.onset, utterance.input_end)
        if outcome is TurnOutcome.TAKEN and not utterance.text:
            outcome = TurnOutcome.EMPTY
        if outcome is TurnOutcome.TAKEN:
            self._take_turn_branch()
        else:
            self._drop_turn_branch()
        key, self._turn_key = self._turn_key, ""
        self._emit(TurnSettled(self.id, self.turn, span, utterance.text, outcome, key))
        if self._next_onset is not None:
            self._reopen(self._next_onset)
        return utterance.text

    def _advance_here(self, now: Nanos) -> None:
        """An interruption by something that is no voice, such as typed words: the cut is where the ear is known to
        be.
        """
        if self.contest is None:
            self.contest = Contest(
                source="stop",
                hold=0,
                onset=self.input_end,
                position=self.timeline.playback(now),
                bound=self.timeline.bound,
                assumed=self.timeline.assumed,
                answered=True,
                audible=self._plays,
                answer_by=now,
            )
        self._advance(now)

    def _advance(self, now: Nanos) -> None:
        """The interruption is true: everything heard stays, everything else goes (DESIGN §5 rule 4)."""
        contest, reply = self.contest, self.reply
        assert contest is not None
        assert reply is not None
        if not contest.hold and self.timeline.playback(now) > contest.position:
            # Nothing was frozen and the ear has moved on since the onset: how far is an estimate.
            contest.position, contest.assumed = self.timeline.playback(now), True
            contest.bound = Ticks(max(contest.bound, self.timeline.bound))
        at = Ticks(min(contest.position, self.timeline.published))
        heard = self._words_heard(contest)
        ambiguous = reply.ambiguous(at, contest.bound)
        reply.move(ResponseState.CANCELLING)
        self._emit_response()
        self._emit_history(reply, heard, ambiguous=ambiguous, estimated=contest.assumed, final=True)
        self._cut_timeline(at, hold=contest.hold, now=now, noticed_at=contest.noticed_at)
        branch, contest.branch = contest.branch, None
        reply.move(ResponseState.CANCELLED)
        self._emit_response("interrupted")
        self._adopt(branch, reply, heard, now)
        self._monitor.count("interruptions")
        self._monitor.note(now, self.id, "interrupted", at)
        self.interrupted_at = now

    def _adopt(self, branch: Context | None, reply: Reply, heard: int, now: Nanos) -> None:
        """The branch, which holds what was heard and what the person said since, becomes the trunk."""
        stable = self.utterance.stable_text if self.utterance is not None else ""
        if branch is not None:
            self.context = self.context.become(branch)
        self.contest = None
        self._end_reply(reply, heard, now=now, words=stable)

    def _cut_timeline(self, at: Ticks, *, hold: int, now: Nanos, noticed_at: Nanos = Nanos(0)) -> None:
        self._drop_chunks(self.chunks.interrupt(at))
        self.timeline.advance(at)
        self._emit(AdvanceEpoch(self.id, self.timeline.epoch, at, hold, now, noticed_at))
        if self.face is not None:
            self.face.advance(self.timeline.epoch, at)

    # End of turn ---------------------------------------------------------------------------------------------------

    def _came_to_nothing(self, utterance: Utterance) -> bool:
        """A hint of a voice that no block confirmed, or a turn that was ended before one did."""
        if self.contest is None and utterance.voiced_ticks == 0 and utterance.ended:
            return True
        return self.contest is None and utterance.voiced_ticks == 0 and utterance.silence >= IDLE_UTTERANCE_MAX

    def _turn_may_end(self) -> bool:
        """Ask the endpoint rule; a rule that wants the judge is answered by `wanted`."""
        utterance = self.utterance
        if utterance is None or self.contest is not None or utterance.voiced_ticks == 0:
            return False
        if not utterance.complete:
            return False
        if utterance.ended or self._turns_by_client:
            return utterance.ended
        utterance.weigh()
        return isinstance(self._verdict(utterance), End)

    def _verdict(self, utterance: Utterance) -> Verdict:
        pending = utterance.judging is not None or utterance.answered is not None
        return self._endpoint.decide(utterance.silence, utterance.judged, pending=pending)

    def _end_turn(self, now: Nanos) -> None:
        utterance = self.utterance
        assert utterance is not None
        ended_at, by_client, voiced = utterance.voiced_at, utterance.ended, utterance.voiced_ticks
        text = self._drop_utterance()
        self._monitor.count("turns")
        self._monitor.note(now, self.id, "turn_ended", ended_at)
        if not text:
            self._monitor.count("turns_without_words")
            if voiced >= UNCLEAR_MIN:
                self._emit(UserWords(self.id, self.turn, "", 0, True))
            self._drop_speculation()
            if not self._reopened_text:
                self.dialogue.forget_turn()
                self._follow()
                return
        whole = join(self._reopened(), text)
        self._emit(UserWords(self.id, self.turn, whole, len(whole), True))
        if not self._auto_reply or by_client:
            self._keep_turn(text, whole)
            return
        if self.reply is not None:
            if not self._refuse_at_bound(""):
                self.waiting.append((whole, ended_at))
            return
        wanted = self._wanted.popleft() if self._wanted else None  # A reply asked for meanwhile is this turn's.
        if wanted is None and self.speculation is not None and self.speculation.answers(whole):
            self._confirm_speculation(self.speculation, ended_at=ended_at, now=now)
        else:
            self._begin_reply(whole, ended_at=ended_at, now=now, wanted=wanted)

    # What it wants -------------------------------------------------------------------------------------------------

    def settle(self, now: Nanos) -> None:
        """Decide everything that can be decided now; called once after every event of this session."""
        if self.closed:
            return
        contest = self.contest
        if contest is not None and not contest.answered and now >= contest.answer_by:
            contest.assumed = True
            self._settle_contest(now)
        if self.contest is not None:
            self._decide(now)
        if self.utterance is not None and self._came_to_nothing(self.utterance):
            self._drop_utterance(TurnOutcome.EMPTY)
        if self.utterance is not None and self._turn_may_end():
            self._end_turn(now)
        elif self.reply is None and self._auto_reply and not self._turns_by_client:
            self._speculate(now)
        self._complete_if_over(now)  # What it waited for may have been work of an older reply.
        if self._made:
            self._deliver(now)
        if self.waiting:
            self._begin_waiting(now)
        if self._wanted:
            self._begin_wanted(now)
        if self._warm_by is not None:
            self._settle_warmth(now, self._warm_by)
        reply = self.reply
        if reply is None:
            return
        if self._too_late(reply, now):
            self._fail_reply("no sound within the response deadline", now)
        elif not self.has_place and now >= reply.accepted_at + self._place_wait:
            self._fail_busy(now)

    def _fail_busy(self, now: Nanos) -> None:
        said = f"{self._shortage}, and others have them; waited {self._place_wait // NANOS_PER_MS} ms"
        self._emit(InputRefusal(self.id, "busy", f"Session {self.id}: {said}. Say it again in a moment.", ""))
        self._fail_reply(f"busy: {said}", now)
        self._monitor.count("responses_busy")

    def _too_late(self, reply: Reply, now: Nanos) -> bool:
        deadline = self.response_deadline
        return deadline > 0 and reply.published_at == 0 and now >= reply.accepted_at + deadline

    def timer(self, now: Nanos) -> Nanos | None:
        """When this session wants to be looked at again without an event; asked after `wanted`."""
        times = []
        if self.face is not None and (at := self.face.timer(now)) is not None:
            times.append(at)
        if self.contest is not None and not self.contest.answered:
            times.append(self.contest.answer_by)
        if self._warm_by is not None:
            times.append(self._warm_by)
        reply = self.reply
        if reply is not None and not self._gated:
            if self.response_deadline and reply.published_at == 0:
                times.append(Nanos(reply.accepted_at + self.response_deadline))
            if not self.has_place:
                times.append(Nanos(reply.accepted_at + self._place_wait))
            if self._chunk_at is not None:
                times.append(self._chunk_at)
            if (at := self._next_delivery_at(now)) is not None:
                times.append(at)
        # What has passed was decided in `settle`: a timer in the past would spin for ever.
        return min((at for at in times if at > now), default=None) if times else None

    @property
    def _gated(self) -> bool:
        """Nothing new is generated while playout waits for the judgement of a voice, or the person's channel does not
        drain. A reply that plays on meanwhile (the voice froze nothing) must not run dry.
        """
        waits = self.contest is not None and (self.contest.hold > 0 or not self.contest.audible)
        return waits or self.stalled or self.timeline.held

    @property
    def needs_place(self) -> bool:
        """The thinker is, or may at any moment be, needed: somebody speaks, or a reply is not over."""
        if self.reply is not None or self.utterance is not None:
            return True
        return bool(self.waiting) or self.is_warming or self.context.behind > 0 or self.context.flight is not None

    @property
    def _plays(self) -> bool:
        """Something that was published has not been heard yet."""
        return self.timeline.published > self.timeline.reported

    def wanted(self, now: Nanos) -> list[Work]:
        """Work that could start now, at most one piece a stage. O(1)."""
        self.wants_slot, self._chunk_at = False, None
        works = [] if self.closed else self._offers(now)
        if len(self._ready_since) > len(works):  # No role offers two.
            offered = {work.role for work in works}
            for role in [r for r in self._ready_since if r not in offered]:
                del self._ready_since[role]  # What is not wanted any more does not grow old.
        if self.face is not None and not self.closed:
            self.face.hushed = self._sound_is_awaited
            works += self.face.offers(now)
        return works

    @property
    def _sound_is_awaited(self) -> bool:
        """The person has fallen silent, be it to think, and no reply sounds yet: ears and thinker have the machine."""
        said = self.utterance
        if self.state is TurnState.THINKING:
            return True
        if said is not None and not said.ended and not said.silence:
            return False  # A reply that is guessed ahead in the middle of a voice is in no hurry.
        return self.speculation is not None or (said is not None and self.reply is None)

    def _offers(self, now: Nanos) -> list[Work]:
        works = self._offers_of_input(now) if self._to_copy or self.utterance is not None else []
        making = None if self._gated else self._making
        if making is None:
            if self._context_behind() is not None:
                works.append(self._work(THINK, INPUT, now))
            return works
        need = CHUNK if self.speculation is None else SPECULATION
        if self._wants_thought(making, now):
            works.append(self._work(THINK, need, now))
        elif self.contest is not None and self._context_behind() is not None:
            works.append(self._work(THINK, INPUT, now))  # The person's words, on their branch.
        if self._wants_talk(making, now):
            works.append(self._work(TALK, need, now))
        if self._wants_chunk(making, now):
            works.append(self._work(RENDER, need, now))
        return works

    def _offers_of_input(self, now: Nanos) -> list[Work]:
        works = []
        if self._to_copy and not self._busy.get(COPY):
            works.append(self._work(COPY, INPUT, now))
        if (listen := self._listen_window()) is not None:
            need = TURN if listen.kind is ListenKind.FINAL else INPUT
            works.append(self._work(LISTEN, need, now))
        if self._wants_judge():
            works.append(self._work(JUDGE, TURN, now))
        return works

    def _work(self, role: Role, need: Need, now: Nanos) -> Work:
        reply, stage = self.reply, self._plan.need(role).name
        made = self._made_until(role)
        published = reply is not None and reply.published_at > 0
        follows = reply is not None and need is CHUNK and reply.talked_at > 0 and made > reply.start
        return Work(
            session=self.id,
            stage=stage,
            role=role,
            need=need,
            ready_at=self._ready_since.setdefault(role, now),
            started=published or follows,
            beginning=follows and reply is not None and reply.chunks_made <= 1,
            silence_at=self._silence_at(reply, made, now),
            sent_silence_at=Nanos(reply.published_at + nanos_from_ticks(made - reply.start))
            if reply is not None and published
            else None,
            after=self._monitor.times.reach_after(stage),
            priority=self.priority,
            pool_share=self._stores.pool_share(len(self.growing.ids)),
        )

    def _silence_at(self, reply: Reply | None, made: Ticks, now: Nanos) -> Nanos | None:
        """When all that is made will have been heard; None: nobody knows. Of a reply that has not begun: if its first
        chunk goes out as soon as it can be rendered.
        """
        if reply is not None and reply.published_at == 0 and reply.talked_at and made > reply.start:
            rendered = self._monitor.times.after(self._plan.need(TALK).name) or 0
            return Nanos(reply.talked_at + rendered + nanos_from_ticks(made - reply.start))
        if not self.timeline.assumed:
            return self.timeline.silence_at(made, now)
        if reply is not None and reply.published_at and now - reply.published_at < REPORT_WITHIN:
            return Nanos(reply.published_at + nanos_from_ticks(made - reply.start))
        return None

    def _made_until(self, role: Role) -> Ticks:
        """End of what a stage has made, as far as its length is known: a clause that was not spoken yet has none."""
        making = self._making
        return self.timeline.generation if making is None or role is RENDER else making.talked_until

    def _listen_window(self) -> ListenWindow | None:
        utterance = self.utterance
        if utterance is None or utterance.voiced_ticks == 0 or self._busy.get(LISTEN):
            return None
        # In a silence the next reading is the last one: it needs some of that silence, and the ears to be free.
        eager = self.reply is None and self.may_speculate and self._allow_speculation and utterance.silence == 0
        every = PARTIAL_EAGER if eager else PARTIAL_EVERY
        final = utterance.ended or utterance.silence >= self._final_after
        return utterance.wanted(self.copied_until, final=final, every=every)

    def _wants_judge(self) -> bool:
        utterance = self.utterance
        if utterance is None or self.contest is not None or utterance.voiced_ticks == 0:
            return False
        if self._turns_by_client or utterance.ended:
            return False
        if self._plan.stage(JUDGE) is None or utterance.judging is not None or self._busy.get(JUDGE):
            return False
        if self.copied_until < utterance.input_end:
            return False
        return isinstance(self._verdict(utterance), Ask)

    def _context_behind(self) -> Context | None:
        """A context that must catch up with words, reply or not; decoding is another matter."""
        if self.utterance is not None and not self._policy.prefills_speech:
            return None
        if self._busy.get(THINK) or not self.has_place:
            return None
        if self.contest is not None:
            branch = self.contest.branch
            return branch if branch is not None and branch.behind > 0 else None
        if self._making is None:
            return self.growing if self.growing.behind > 0 else None
        return None

    def _upstream_ahead(self, reply: Reply, now: Nanos) -> bool:
        """Upstream stages have the same budget in playback seconds, from one worst-case unit ahead (DESIGN §5 rule
        1).
        """
        return not self._upstream_may(THINK, reply, Ticks(len(reply.to_talk) * self._plan.clause_max), now)

    def _upstream_may(self, role: Role, reply: Reply, pending: Ticks, now: Nanos) -> bool:
        """Whether one more clause, of the worst length, stays within the lookahead; `pending` are not spoken yet."""
        unit, playback = self._plan.clause_max, self.timeline.playback(now)
        budget = Ticks(self._budget(reply, playback) + self._clause_pace.worst + unit)
        limit = self._policy.lookahead(Gate(role, unit, budget, self._plan.need(role).batch_max))
        return limit is None or reply.talked_until + pending + unit - playback <= limit

    def _wants_thought(self, reply: Reply, now: Nanos) -> bool:
        if reply.thought or not self.has_place or self._busy.get(THINK):
            return False
        if self.speculation is not None and self.speculation.first_clause_thought:
            return False
        return reply.chunks_published == 0 or not self._upstream_ahead(reply, now)

    def _wants_talk(self, reply: Reply, now: Nanos) -> bool:
        if not reply.to_talk or self._busy.get(TALK) or not self._stores.latents_free(self.id):
            return False
        return not reply.words or self._upstream_may(TALK, reply, Ticks(0), now)

    def _budget(self, reply: Reply, playback: Ticks) -> Ticks:
        return self.timeline.budget(self._chunk_aim(reply, playback), self._making_time)

    @property
    def _making_time(self) -> Ticks:
        """From the start of a chunk until all that is made of it is there: its sound, and the face that speaks it."""
        worst = self._chunk_pace.worst
        return worst if self.face is None else Ticks(worst + self.face.voice_ahead)

    def _chunk_aim(self, reply: Reply, playback: Ticks) -> Ticks:
        """Length of the next chunk: what is left to play while it is made, so that it grows from the smallest to the
        longest as the buffer does; nor less than making it takes, or a slow stage would never catch up. Without a
        measured position, the ramp of the plan.
        """
        if not self._policy.sizes_chunks or self.timeline.assumed or reply.chunks_made == 0:
            return self._ramp(reply.chunks_made)
        left = self.timeline.generation - playback
        wanted = Ticks(max(left, self._chunk_pace.worst) // self._plan.grain * self._plan.grain)
        shortest, longest = self._chunk_min, self._chunk_max
        return shortest if wanted < shortest else longest if wanted > longest else wanted

    def _ramp(self, index: int) -> Ticks:
        ramp = self._plan.chunk_ramp
        return ramp[min(index, len(ramp) - 1)]

    def _chunk_length(self, reply: Reply, spoken: SpokenClause, playback: Ticks) -> Ticks:
        left = spoken.length - spoken.planned
        length = self._chunk_aim(reply, playback)
        # A crumb at the end of a clause costs a launch for nothing: it goes with the chunk before it.
        return Ticks(left if left - length < 4 * self._plan.grain else length)

    def _wants_chunk(self, reply: Reply, now: Nanos) -> bool:
        if self._busy.get(RENDER):
            return False
        at = self._chunk_at = self._next_chunk_at(reply, now)
        if at is None or at > now or self.chunks.full:
            return False
        free = len(self._stores.out_slots)
        # Half of the slots are kept from what may never be heard, or suspicion would silence whoever speaks.
        self.wants_slot = not free or (self.speculation is not None and 2 * free <= self._stores.out_slots_count)
        return not self.wants_slot

    def _next_chunk_at(self, reply: Reply, now: Nanos) -> Nanos | None:
        """When the next chunk may start; None while there is none. None is being made."""
        if (spoken := reply.unplanned()) is None:
            return None
        timeline = self.timeline
        playback = timeline.playback(now)
        length = self._chunk_length(reply, spoken, playback)
        end = Ticks(spoken.start + spoken.planned + length)
        budget = timeline.budget(length, self._making_time)
        gate = Gate(RENDER, self._plan.chunk_ramp[-1], budget, self._plan.need(RENDER).batch_max)
        limit = self._policy.lookahead(gate)
        if limit is None or end - playback <= limit:
            return now
        return timeline.reenters_budget_at(end, limit, now)

    # Launching -----------------------------------------------------------------------------------------------------

    def launch(self, work: Work, work_id: WorkId, now: Nanos) -> Launch | None:
        """Turn an offer into an order; None when memory is short, which is counted and tried again."""
        role = work.role
        if role in FACE_ROLES:
            assert self.face is not None
            return self.face.launch(work, work_id, now)
        reply = self._making if work.need is CHUNK or work.need is SPECULATION else None
        job, detail = self._job(work, reply, work_id, now)
        if job is None:
            self._monitor.count("launches_short_of_memory")
            return None
        self._ready_since.pop(role, None)
        self._flights[work_id] = Flight(role, self.timeline.epoch, now, detail, reply, self.condition)
        self._busy[role] = self._busy.get(role, 0) + 1
        return Launch(work_id, work.stage, tuple(job) if isinstance(job, list) else (job,))

    def _job(self, work: Work, reply: Reply | None, work_id: WorkId, now: Nanos) -> tuple[Any, Any]:
        role = work.role
        if role is RENDER:
            return self._render_job(reply, now)
        if role is TALK:
            return self._talk_job(reply)
        if role is THINK:
            return self._think_job(self.context_of(work), reply, work_id, now)
        if role is COPY:
            return self._copy_job()
        if role is LISTEN:
            return self._listen_job()
        if role is JUDGE:
            return self._judge_job()
        raise ValueError(f"session {self.id} orders no {role.value}: its face or the core does")

    def _who(self, condition: ConditionVersion | None = None) -> dict[str, Any]:
        """Args:    condition: that the work belongs to; the newest, unless it goes on with what began earlier."""
        return {
            "session": self.id,
            "epoch": self.timeline.epoch,
            "chunk": ChunkId(0),
            "condition": self.condition if condition is None else condition,
        }

    def _copy_job(self) -> tuple[Any, Any]:
        facts = [self._to_copy.popleft() for _ in range(min(len(self._to_copy), self._spec(COPY).batch_max))]
        jobs = [
            CopyJob(
                **self._who(),
                slot=f.slot,
                ring=self.ring.slot,
                start=samples_from_ticks(f.span.start, INPUT_RATE),
                samples=samples_from_ticks(f.span.length, INPUT_RATE),
            )
            for f in facts
        ]
        return jobs, facts

    def _spec(self, role: Role) -> StageSpec:
        return self._plan.need(role)

    def _listen_job(self) -> tuple[Any, Any]:
        utterance, window = self.utterance, self._listen_window()
        if utterance is None or window is None:
            return None, None
        utterance.listen(window)
        start, samples = _samples(window.span)
        return ListenJob(**self._who(), ring=self.ring.slot, start=start, samples=samples), utterance

    def _judge_job(self) -> tuple[Any, Any]:
        utterance = self.utterance
        if utterance is None:
            return None, None
        utterance.judging = utterance.silence
        oldest = max(0, utterance.input_end - self._plan.listen_max)
        start, samples = _samples(Span(Ticks(max(oldest, utterance.onset - PREFIX)), utterance.input_end))
        return JudgeJob(**self._who(), ring=self.ring.slot, start=start, samples=samples), utterance

    def context_of(self, work: Work) -> Context:
        """The context a think step runs on."""
        return self._context_behind() or self.growing if work.need is INPUT else self.growing

    def _think_job(self, context: Context, reply: Reply | None, work_id: WorkId, now: Nanos) -> tuple[Any, Any]:
        if reply is not None and not reply.thinking:
            reply.thinking, self._clause_since = True, now
        feed = self._feed(context, reply, work_id)
        if feed is None:
            return None, None
        job = ThinkJob(
            **self._who(),
            pieces=feed.pieces,
            past=feed.past,
            feed=feed.tokens,
            steps=feed.steps,
            reply=(*reply.avoided, *reply.tokens) if reply else (),
            stop=self._plan.dialect.stop,
            folds=feed.folds,
        )
        return job, context

    def _feed(self, context: Context, reply: Reply | None, work_id: WorkId) -> Feed | None:
        """The context's next tokens, in the arena; None when pages are short."""
        feed_max = self._feed_max if reply is None or self.speculation is None else self._speculating.feed_max
        label = CacheClass.INGEST if reply is None else CacheClass.CURRENT
        while True:
            try:
                return context.launch(work_id, steps=self._think_steps(reply), feed_max=feed_max, label=label)
            except ArenaFull:
                if not self._give_way(context):
                    return None

    @property
    def _feed_max(self) -> int:
        """Tokens prefilled in one step. One that decodes is waited for anyway: one that prefills may take as long."""
        cost = self._spec(THINK).cost
        if not self._policy.feeds_by_cost or not cost.per_unit_us:
            return FEED_MAX
        return min(FEED_LONGEST, max(FEED_MAX, self._plan.think_steps * cost.per_step_us // cost.per_unit_us))

    def _think_steps(self, reply: Reply | None) -> int:
        """Tokens to decode in one step. Small steps cost a little more and end sooner: while somebody waits for the
        first clause nothing is decoded past its end, and a wrong guess does not hold the lane.
        """
        if reply is None:
            return 0
        return self._plan.think_steps if reply.words or reply.to_talk else self._plan.first_steps

    def _talk_job(self, reply: Reply | None) -> tuple[Any, Any]:
        assert reply is not None
        lease = self._stores.lease_latents(self.id, self.timeline.epoch)
        if lease is None:
            return None, None
        clause = reply.to_talk.popleft()
        who = self._who(condition=clause.condition)
        job = TalkJob(
            **who,
            text=clause.text,
            latents=lease.slot,
            first=clause.index == 0,
            before=clause.before,
            after=clause.after,
        )
        return job, (lease, clause)

    def _render_job(self, reply: Reply | None, now: Nanos) -> tuple[Any, Any]:
        assert reply is not None
        spoken = reply.unplanned()
        if spoken is None or not self._stores.out_slots:
            return None, None
        length = self._chunk_length(reply, spoken, self.timeline.playback(now))
        start = Ticks(spoken.start + spoken.planned)
        chunk = self.chunks.plan(
            epoch=self.timeline.epoch,
            offset=spoken.planned,
            span=Span(start, Ticks(start + length)),
            condition=spoken.clause.condition,
        )
        chunk.slot = self._stores.out_slots.popleft()
        spoken.planned = Ticks(spoken.planned + length)
        spoken.chunks_open += 1
        reply.planned_until = chunk.span.end
        self.timeline.generation = chunk.span.end
        self.chunks.move(chunk, ChunkState.RUNNING)
        job = RenderJob(
            session=self.id,
            epoch=self.timeline.epoch,
            chunk=chunk.chunk_id,
            condition=chunk.condition,
            latents=spoken.latents.slot,
            state=self.voice_state.slot,
            start=chunk.offset,
            length=length,
            fresh=chunk.offset == 0,
            slot=chunk.slot,
        )
        return job, chunk

    def _release_clauses(self, reply: Reply) -> None:
        """Clauses whose chunks are all made give their latents back; one that is being rendered keeps them."""
        while reply.spoken and reply.spoken[0].planned >= reply.spoken[0].length and not reply.spoken[0].chunks_open:
            self._stores.discard(reply.spoken.popleft().latents)

    # Leaving -------------------------------------------------------------------------------------------------------

    def progress(self, now: Nanos, urgency: str) -> Progress:
        """Args:    urgency: of what it offers; '' when nothing of its reply waits for a lane."""
        running = any(flight.reply is not None for flight in self._flights.values())
        t, playback = self.timeline, self.timeline.playback(now)
        budget = self._budget(self.reply, playback) if self.reply is not None else Ticks(0)
        shown = urgency or ("running" if running else "ahead")
        return Progress(self.id, t.epoch, t.generation, playback, budget, t.assumed, shown)

    def pressure(self, now: Nanos) -> SessionPressure:
        """This session at this moment, as a value."""
        reply, playback = self.reply, self.timeline.playback(now)
        buffers = {
            spec.name: Ticks(max(0, self._made_until(spec.role) - playback))
            for role in (THINK, TALK, RENDER)
            if (spec := self._plan.stage(role)) is not None
        }
        return SessionPressure(
            session=self.id,
            epoch=self.timeline.epoch,
            playback=playback,
            generation=self.timeline.generation,
            measured=not self.timeline.assumed,
            person_speaks=self.utterance is not None,
            interrupted_at=self.interrupted_at,
            replies=reply is not None,
            started=reply is not None and reply.published_at > 0,
            buffers=MappingProxyType(buffers),
        )

    def _enter(self, state: TurnState) -> None:
        if state is not self.state:
            self.state = state
            self._emit(StateChanged(self.id, state))
            if self.face is not None:
                self.face.show(state)

    def close(self) -> None:
        """Everything goes back, behind the work that still uses it; the reply ends as cancelled."""
        self.closed = True
        self._drop_speculation()
        if self.reply is not None:
            self.reply.move(ResponseState.CANCELLING)
            self.reply.move(ResponseState.CANCELLED)
            self._emit_response("session closed")
            self.reply = None
        self._drop_branch()
        self.contest = None
        while self._made:
            self._retire_chunk(self._made.popleft())
        fences = tuple(FenceId(work) for work in self._flights)
        if self.face is not None:
            fences += self.face.close()
        if self._turn_branch is not None:
            self._turn_branch.close()
        self.context.close()
        self._stores.close_session(self.id, after=fences)
        if self._to_copy:
            self._emit(FreeSlots(tuple(f.slot for f in self._to_copy)))
            self._to_copy.clear()

    def copy_lost(self) -> None:
        """What a failed copy carried is gone; long-term tokens among it cannot be prefilled again."""
        if self.context.long_term < self.dialogue.long_term:
            self._drop_speculation()  # It supposes the memory that is gone.
            self.dialogue.long_term = 0
            self._monitor.count("long_term_lost")
            self.context.follow_dialogue(self.dialogue)

    def orphan(self, fact: StageFinished | StageFailed) -> bool:
        """Work that came back after the close: its slots go home. True when nothing more is to come."""
        if self.face is not None and self.face.owns(fact.work):
            self.face.orphan(fact.work)
            return not self.in_flight
        flight = self._flights.pop(fact.work)
        self._stores.fence_passed(FenceId(fact.work))
        if flight.role is COPY:
            self._emit(FreeSlots(tuple(f.slot for f in flight.detail)))
        if flight.role is RENDER and flight.detail.slot >= 0:
            self._stores.out_slots.append(flight.detail.slot)
        return not self.in_flight

    @property
    def in_flight(self) -> bool:
        return bool(self._flights) or (self.face is not None and self.face.in_flight)


def _samples(span: Span) -> tuple[int, int]:
    return samples_from_ticks(span.start, INPUT_RATE), samples_from_ticks(span.length, INPUT_RATE)
