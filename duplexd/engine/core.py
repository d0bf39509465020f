"""The engine's core: facts in, orders and news out, no clock, no socket, no tensor (DESIGN §4).

1. `handle` and `handle_timer` take `now`; `timer` is None or strictly later than the last `now`.
2. Everything to do comes out of `commands`, in order: `Launch` for the executor, all else for the front end.
3. A fact about an unknown or closed session changes nothing and is counted.
4. A think step runs only for a session with a place, on a context that is wholly in the arena. What is missing is
   ordered here (a copy back, room for it), and the step is tried again when the copy has ended.
5. Steps of several sessions share one launch where the stage takes several rows: whoever ranks next rides along, if
   the policy lets them. Each gets its own result.
6. What differs between policies is asked of the policy; the rest of this file is the same for all.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from heapq import nlargest
from itertools import islice
from types import MappingProxyType
from typing import Any

import msgspec

from duplexd.engine.admission import Aimd, Door, taken
from duplexd.engine.bargein import BargeInRule
from duplexd.engine.dialogue import Context, Dialogue
from duplexd.engine.face import PICTURE_FACTS
from duplexd.engine.governor import Governor, Seen
from duplexd.engine.monitor import Load, Monitor, Pressure
from duplexd.engine.policy import Eviction, Misfit, SchedulingPolicy
from duplexd.engine.residency import Residency, Transfer
from duplexd.engine.scheduler import OfferId, Scheduler
from duplexd.engine.session import FEED_LONGEST, FEED_MAX, Session
from duplexd.engine.speculation import SpeculationTunables
from duplexd.engine.stores import FaceStores, Stores
from duplexd.engine.work import PATIENT, Launch, StageFailed, StageFinished, Work
from duplexd.errors import SessionRefused
from duplexd.ids import ChunkId, ConditionVersion, Epoch, FenceId, SessionId, WorkId
from duplexd.media.endpoint import EndpointRule
from duplexd.memory.agenda import Agenda
from duplexd.memory.eviction import Verdict
from duplexd.memory.ledger import Refusal
from duplexd.memory.pages import Move
from duplexd.messages import (
    AdmitSession,
    ClientStalled,
    ConditionSet,
    CursorReported,
    EndSession,
    EngineReady,
    FreeSlots,
    HistoryCut,
    HistorySet,
    HoldAnswered,
    HoldExpired,
    ImageArrived,
    InputCleared,
    InputRefusal,
    MediaArrived,
    Metrics,
    Modality,
    PicturesFreed,
    PrefetchWanted,
    RefuseSession,
    ReplyUnwanted,
    ReplyWanted,
    SessionClosed,
    SessionOpened,
    SettingChanged,
    SlotsFreed,
    TextArrived,
    TurnEnded,
    TurnSettingChanged,
    VoiceStarted,
)
from duplexd.streams.graph import ModelPlan, face_lanes
from duplexd.streams.stage import FACE_ROLES, MoveJob, Role, StageSpec, ThinkJob
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos, Ticks, ms_from_ticks

PROGRESS_EVERY = Nanos(100 * NANOS_PER_MS)
METRICS_EVERY = Nanos(NANOS_PER_SECOND)
PAGES_A_STEP = 4  #: what one think step takes beside its feed: the tokens it decodes, one page begun by a cut
CONTEXTS_A_LOOK = 8  #: whose pages are counted again at one look, ten looks a second: 0.07 ms for 60 new pages
SESSIONS_LISTED_MAX = 32  #: sessions whose bytes are told one by one: those that hold most
RIDERS_LOOKED_AT = 4  #: offers looked at for each row that is free: a launch does not search a thousand for one rider
STARVED_AFTER = Nanos(NANOS_PER_SECOND)  #: work that was ready and found no lane for so long
LOAD_AGE_MAX = Nanos(20 * NANOS_PER_MS)
RECOUNT_EVERY = Nanos(5 * NANOS_PER_MS)  #: who is short asks for the same pages round after round
#: Counters that tell how memory comes and goes; they stand at 0 from the start.
RESIDENCY_COUNTS = (
    "preload_hits",  #: memory was back before the thinker needed it
    "preload_misses",  #: the thinker had to wait for a copy that was admitted
    "preload_skips",  #: not admitted; `preloads_*` say why
    "preloads_unused",  #: the thinker was not needed after all
    *(f"preloads_{verdict.name.lower()}" for verdict in Verdict),
    *("restores_early", "restores_late", "pages_offloaded", "pages_restored", "transfers_failed"),
    *("offload_us", "restore_us", "evictions", "evictions_in_line"),
)
ENDS = (StageFinished, StageFailed)
ANCHOR_SESSION = SessionId(0)  #: the anchor's prefill is nobody's session


class EngineCore:
    """All sessions of one engine process."""

    def __init__(
        self,
        *,
        plan: ModelPlan,
        stores: Stores,
        policy: SchedulingPolicy,
        endpoint: EndpointRule,
        barge_in: BargeInRule,
        door: Door,
        residency: Residency,
        place_wait: Nanos,
        speculation: SpeculationTunables,
        mover: StageSpec | None = None,
        admission: Aimd | None = None,
        cores: int | None = None,
        governor: Governor | None = None,
        faceless: str = "",
    ) -> None:
        self.plan = plan
        self.stores = stores
        self.monitor = Monitor(_ways_of(plan))
        self.governor = governor or Governor()
        self._frames_seen = FramesCounted(0, 0, {})  #: as counted at the last look
        self._face_lanes = face_lanes(plan.stages.values())
        self.sessions: dict[SessionId, Session] = {}
        self._closing: dict[SessionId, Session] = {}  #: closed, with work still in flight
        self._policy = policy
        self._endpoint = endpoint
        self._barge_in = barge_in
        self._door = door
        self.residency = residency
        self._place_wait = place_wait
        self._speculation = speculation
        self._mover = mover
        self._admission = admission
        self._cores = cores
        self._faceless = faceless
        self._harmed = 0  #: as counted at the last look
        self._starving: frozenset[tuple[OfferId, Nanos]] = frozenset()
        self._scheduler = Scheduler(plan.stages if mover is None else {**plan.stages, mover.name: mover}, policy)
        self._out: list[Any] = []
        self._work_of: dict[WorkId, tuple[SessionId, ...]] = {}
        self._transfers: dict[WorkId, Transfer] = {}
        self._onsets: dict[SessionId, Nanos] = {}  #: when a voice began for which the thinker has not been needed yet
        self._preloads: dict[SessionId, None] = {}  #: admitted, and the thinker has not been needed yet
        self._recounted_at = Nanos(-RECOUNT_EVERY)
        self._pages_free = -1  #: as the scheduler was last told
        self._last_work = 0
        self._timers: Agenda[SessionId] = Agenda()
        self._slotless: dict[SessionId, None] = {}  #: sessions with a chunk that waits for an output slot
        self._load: Load | None = None
        for name in RESIDENCY_COUNTS if mover is not None else ():
            self.monitor.count(name, 0)
        self._now = Nanos(0)
        self._ready = False
        self._next_progress = Nanos(0)
        self._next_metrics = Nanos(0)
        self._ended_heard = self._ended_wasted = Ticks(0)  # of the chunks of sessions that have ended
        self._watch_until = Nanos(0)  #: figures go on for a while after the last session, to show that all came back
        self._anchor = tuple(Dialogue(plan.dialect).anchor)

    # The contract --------------------------------------------------------------------------------------------------

    def start(self, now: Nanos) -> None:
        """Prefill the anchor; the engine is ready when it lies in the arena."""
        self._now = now
        self.stores.anchor.follow(self._anchor)
        self._warm()

    def handle(self, event: Any, now: Nanos) -> None:
        self._now = now
        if isinstance(event, ENDS):
            self._handle_stage(event, now)
        elif isinstance(event, SlotsFreed):
            self.stores.slots_freed(event.slots)
            self._wake_slotless(now)
        elif isinstance(event, PicturesFreed):
            self._pictures_freed(event, now)
        elif isinstance(event, SessionOpened):
            self._open(event, now)
        else:
            self._handle_session(event, now)
        self._round(now)

    def handle_timer(self, now: Nanos) -> None:
        self._now = now
        while (session_id := self._timers.due(now)) is not None:
            self._touch(self.sessions[session_id], now)
        if now >= self._next_progress:
            self._report(now)
        self._round(now)

    def timer(self) -> Nanos | None:
        """When to call `handle_timer` if nothing happens before; strictly later than the last call."""
        at = self._next_progress if self.sessions or self._now < self._watch_until else None
        if (first := self._timers.first()) is not None and (at is None or first[0] < at):
            at = first[0]
        if (wakes := self._scheduler.wakes_at()) is not None and (at is None or wakes < at):
            at = wakes
        return None if at is None else Nanos(max(at, self._now + 1))

    def commands(self) -> list[Any]:
        out, self._out = self._out, []
        return out

    def _wake_slotless(self, now: Nanos) -> None:
        """Output slots are free again."""
        for session_id in tuple(self._slotless):
            self._touch(self.sessions[session_id], now)

    def _pictures_freed(self, event: PicturesFreed, now: Nanos) -> None:
        if self.stores.face is None:
            return
        owners = {self.stores.face.pictures.give_back(slot) for slot in event.slots}
        for session_id in sorted(owner for owner in owners if owner is not None):
            if session_id in self.sessions:
                self._touch(self.sessions[session_id], now)

    # Sessions ------------------------------------------------------------------------------------------------------

    def _open(self, fact: SessionOpened, now: Nanos) -> None:
        refused = self._refusal(fact.session)
        if refused is None:
            try:
                self.sessions[fact.session] = Session(
                    session=fact.session,
                    plan=self.plan,
                    stores=self.stores,
                    monitor=self.monitor,
                    policy=self._policy,
                    emit=self._emit,
                    endpoint=self._endpoint,
                    barge_in=self._barge_in,
                    allow_barge_in=fact.barge_in,
                    priority=fact.priority,
                    response_deadline=fact.response_deadline,
                    place_wait=self._place_wait,
                    shortage=self.residency.places.shortage,
                    speculation=self._speculation,
                    governor=self.governor,
                    now=now,
                )
            except SessionRefused as error:
                self.stores.close_session(fact.session, after=None)
                refused = RefuseSession(fact.session, str(error), "no_slot")
        if refused is not None:
            self.monitor.count("sessions_refused")
            self.monitor.count(f"sessions_refused_{refused.code}")
            self._emit(refused)
            return
        self.monitor.count("sessions_admitted")
        self._next_progress = Nanos(now + PROGRESS_EVERY)
        self._emit(AdmitSession(fact.session))
        self._touch(self.sessions[fact.session], now)

    def _refusal(self, session: SessionId) -> RefuseSession | None:
        """Why this session cannot be admitted: what is missing, and by how much (DESIGN §5 rule 9)."""
        if not self._ready:
            return RefuseSession(
                session, f"session {session}: the engine is still loading; try again in a few seconds", "loading"
            )
        refused = self._door.refuses(
            open_count=len(self.sessions), closing_count=len(self._closing), places=self.residency.places
        )
        if refused is None:
            return None
        return RefuseSession(session, f"session {session}: {refused.sentence}", refused.code, refused.shortage)

    def describe_admission(self) -> str:
        """One sentence: how many are let in, and how many of them may talk at once."""
        places = self.residency.places
        admitted = self._door.count(places)
        said = f"{admitted} of sessions_max {self._door.sessions_max} are let in, {places.count} may talk at once"
        if admitted == self._door.sessions_max:
            return f"{said} ({places.shortage})"
        refused = self._door.refuses(open_count=admitted, closing_count=0, places=places)
        assert refused is not None
        return f"{said} ({places.shortage}); one more would be refused: {refused.sentence}"

    def _handle_session(self, event: Any, now: Nanos) -> None:
        session = self.sessions.get(event.session)
        if session is None:
            if isinstance(event, MediaArrived):
                self._emit(FreeSlots((event.slot,)))
            self.monitor.count("facts_about_nobody")
            return
        match event:
            case CursorReported():
                session.on_cursor(event, now)
            case MediaArrived():
                session.on_media(event, now)
            case VoiceStarted():
                session.on_voice_started(event, now)
            case HoldAnswered():
                session.on_hold_answered(event, now)
            case HoldExpired():
                session.on_hold_expired(event.resumed, event.hold, now)
            case TextArrived():
                session.on_text(event, now)
            case ImageArrived():
                takes = ", ".join(self.plan.takes)
                reason = f"The model {self.plan.name} does not read images; it takes {takes}."
                self._emit(InputRefusal(session.id, "modality_unsupported", reason, event.key))
            case SettingChanged():
                session.on_setting(event)
            case TurnSettingChanged():
                session.on_turn_setting(event)
            case TurnEnded():
                session.on_turn_ended(event, now)
            case InputCleared():
                session.on_input_cleared(now)
            case ReplyWanted():
                session.on_reply_wanted(event)
            case ReplyUnwanted():
                session.on_reply_unwanted(event.key, now)
            case PrefetchWanted():
                session.on_prefetch_wanted(now)
            case ConditionSet():
                session.on_condition(event)
            case HistorySet():
                session.on_history_set(event)
            case HistoryCut():
                session.on_history_cut(event)
            case _ if isinstance(event, PICTURE_FACTS):
                session.on_picture(event, now)
            case ClientStalled():
                session.stalled = event.stalled
            case SessionClosed():
                self._close(session)
                return
        self._touch(session, now)

    def _close(self, session: Session) -> None:
        del self.sessions[session.id]
        self._timers.remove(session.id)
        self._slotless.pop(session.id, None)
        self._scheduler.forget(session.id)
        self._end_voice(session.id)
        session.close()
        self._count_ended(session)
        if session.in_flight:
            self._closing[session.id] = session
        self.monitor.count("sessions_closed")
        self._watch_until = Nanos(self._now + 3 * METRICS_EVERY)
        self._seat(self.residency.forget(session.id), self._now)
        self._go_on_preloading(self._now)

    def _count_ended(self, session: Session) -> None:
        """What it made and nobody has heard by now, nobody will."""
        chunks = session.chunks
        self._ended_heard = Ticks(self._ended_heard + chunks.heard_ticks)
        unheard = chunks.discarded_ticks + sum(chunk.span.length for chunk in chunks.alive())
        self._ended_wasted = Ticks(self._ended_wasted + unheard)

    def _touch(self, session: Session, now: Nanos) -> None:
        """Something about this session has changed: decide, then offer what it wants."""
        free = self.residency.taken_by_others(session.id) < self._speculation.load_max
        session.may_speculate = free and self._policy.admits_speculation(self.load())
        session.settle(now)
        if session.fault:
            self._emit(EndSession(session.id, session.fault))
            self._close(session)
            return
        self._place(session, now)
        self._offer(session, now)
        at = session.timer(now)
        if at is None:
            self._timers.remove(session.id)
        else:
            self._timers.put(session.id, at)

    def _offer(self, session: Session, now: Nanos) -> None:
        self._scheduler.offer(session.id, session.wanted(now), now)
        if session.wants_slot:
            self._slotless[session.id] = None
        elif self._slotless:
            self._slotless.pop(session.id, None)

    # Work ----------------------------------------------------------------------------------------------------------

    def _handle_stage(self, event: StageFinished | StageFailed, now: Nanos) -> None:
        took = Nanos(event.ended_at - event.started_at) if isinstance(event, StageFinished) else None
        lane, stage = self._scheduler.end(event.work, took or Nanos(0))
        self.monitor.ended(lane, now)
        times = self.monitor.times
        rows = times.end(stage)
        if took is not None:
            self.monitor.ran(lane, stage, took, rows=rows)
            self._scheduler.note_times(stage, took=times.mean(stage) or took, reach=times.reach(stage) or took)
        if event.work in self._transfers:
            self._transferred(event, now)
            return
        owners = self._work_of.pop(event.work)
        if owners == (ANCHOR_SESSION,):
            self._warmed(event)
            return
        # All of a batch first, then what follows from it: nobody is asked while a neighbour's result still waits.
        if len(owners) == 1:
            self._tell(owners[0], event, now)
        else:
            for session_id, own in zip(owners, _shares(event, len(owners)), strict=True):
                self._tell(session_id, own, now)
        for session_id in owners:
            if session_id in self.sessions:
                self._touch(self.sessions[session_id], now)
        if self._slotless and self.stores.out_slots:
            self._wake_slotless(now)  # A face was the last to read a slot that the front end had done with.

    def _tell(self, session_id: SessionId, event: StageFinished | StageFailed, now: Nanos) -> None:
        if session_id in self._closing:
            if self._closing[session_id].orphan(event):
                del self._closing[session_id]
        elif isinstance(event, StageFinished):
            self.sessions[session_id].on_finished(event, now)
        else:
            self.sessions[session_id].on_failed(event, now)

    def _round(self, now: Nanos) -> None:
        """Every idle lane gets the most urgent work that can start."""
        if (free := self.stores.pages.free_count) != self._pages_free:
            self._pages_free = free
            self._scheduler.note_pool(self._pages_taken)
        for lane in self._scheduler.idle_lanes():
            offers = self._scheduler.urgent(lane, now)
            for work in offers:
                if self._launch(work, now) or self._policy.misfit is Misfit.STOP:
                    break
            offers.close()

    @property
    def _pages_taken(self) -> float:
        return 1.0 - self.stores.pages.free_count / self.stores.pages.spec.count

    @property
    def _pages_needed(self) -> float:
        """Share of the pages that is taken for good: what may leave for host memory is as good as free."""
        cached = self.residency.cached_count / self.stores.pages.spec.count if self._mover is not None else 0.0
        return max(0.0, self._pages_taken - cached)

    def _begin_work(self, work: WorkId, stage: str, owners: Sequence[SessionId], now: Nanos) -> None:
        """A launch is ordered: its lane is taken, and the time goes to its owners' accounts."""
        weights = [(owner, self.sessions[owner].priority) for owner in owners if owner in self.sessions]
        self.monitor.began(self._scheduler.begin(work, stage, weights), now)
        self.monitor.times.begin(stage, max(1, len(owners)), now)

    def _launch(self, work: Work, now: Nanos) -> bool:
        self._last_work += 1
        work_id = WorkId(self._last_work)
        launch = self._begin(work, work_id, now)
        if launch is None:
            return False
        place = len(self._out)  # Before the copies that riders may order: names of work only grow (streams/fence.py).
        owners, jobs = [work.session], list(launch.jobs)
        rows = self._rows(work, now)
        if len(jobs) < rows:
            with closing(self._riders(work, looked_at=RIDERS_LOOKED_AT * rows)) as riders:
                for other in riders:
                    own = self._begin(other, work_id, now)
                    if own is not None:
                        owners.append(other.session)
                        jobs += own.jobs
                    if len(jobs) == rows or (own is None and self._policy.misfit is Misfit.STOP):
                        break
        self._work_of[work_id] = tuple(owners)
        self._begin_work(work_id, work.stage, owners, now)
        self._out.insert(place, Launch(work_id, work.stage, tuple(jobs)))
        return True

    def _rows(self, work: Work, now: Nanos) -> int:
        """How many may share the launch that this offer leads. Where a reply has just begun, so many that it ends
        before the beginning has been heard; all there may be where it comes too late anyway.
        """
        rows = self._scheduler.rows_max(work.stage)
        if not work.beginning or not self._policy.spares_beginnings or work.silence_at is None:
            return rows
        times = self.monitor.times
        left = work.silence_at - (times.after(work.stage) or 0) - now
        for count in range(rows, 1, -1):
            worst = times.at_worst(work.stage, count)
            if worst is None or worst <= left:
                return count
        alone = times.of_rows(work.stage, 1)
        return 1 if alone is None or alone <= left else rows

    def _riders(self, work: Work, *, looked_at: int) -> Generator[Work, None, None]:
        """Whose step may share a launch with this one: never so long a one that the most urgent would wait for it."""
        seen = {work.session}
        with closing(self._scheduler.beside(work.stage)) as offers:
            for other in islice(offers, looked_at):
                if other.session not in seen and self._policy.may_ride(other, work):
                    seen.add(other.session)
                    yield other

    def _begin(self, work: Work, work_id: WorkId, now: Nanos) -> Launch | None:
        """One session's share of a launch; None when it cannot start now."""
        session = self.sessions[work.session]
        if work.role is Role.THINK and self._mover is not None:
            context = session.context_of(work)
            self._note_needed(session.id, readable=context.readable, now=now)
            if not context.readable:
                self._restore(session, context, now, early=False)
                return None
        launch = session.launch(work, work_id, now)
        if launch is None and work.role is Role.THINK and self.stores.pages.refusal is Refusal.PARTITION_FULL:
            self._make_room(PAGES_A_STEP + FEED_LONGEST // self.stores.pages.spec.page_tokens, now)
        self._offer(session, now)
        return launch

    # Residency -------------------------------------------------------------------------------------------------------

    def _place(self, session: Session, now: Nanos) -> None:
        """Give it a place when it needs one, take the place back when it does not."""
        if session.needs_place:
            began = not session.wants_place
            if began:
                self._note_gap(session, now)
                if session.utterance is not None and self._mover is not None:
                    self._onsets[session.id] = now
            session.wants_place = True
            had, session.has_place = session.has_place, self._has_place(session)
            if session.has_place and session.is_warming and not session.context.readable:
                # Asked for: it need not hide behind anything.
                self._restore(session, session.context, now, early=True)
            # At the onset, in line or not, and again when its place comes: then there is room for it.
            elif began or (session.has_place and not had):
                self._preload(session, now)
        elif session.wants_place:
            session.wants_place = session.has_place = False
            self._end_voice(session.id)
            pages = self._leavable(session)
            # Whose playback is not known leaves first, least recently used first: of nobody's known, that is LRU.
            known = self._policy.eviction is Eviction.NEXT_USE and not session.timeline.assumed
            self.residency.index.note_playback(session.id, session.quiet_since if known else None)
            self._seat(self.residency.rest(session.id, pages, now), now)
            self._go_on_preloading(now)

    def _has_place(self, session: Session) -> bool:
        """It has one, or takes one; else it stands in line. Its pages are counted for the line alone."""
        residency = self.residency
        return residency.seats(session.id) or residency.need(session.id, self._pages_of(session))

    def _seat(self, seated: Sequence[SessionId], now: Nanos) -> None:
        for session_id in seated:
            self._touch(self.sessions[session_id], now)

    def _note_gap(self, session: Session, now: Nanos) -> None:
        if session.quiet_since is not None:
            self.residency.index.note_reply_gap(session.id, Nanos(now - session.quiet_since))

    def _pages_of(self, session: Session) -> int:
        """Of its context, in the arena and in host memory."""
        pages = self.stores.pages
        return pages.owned(session.id) + pages.away_pages(session.context.id)

    def _leavable(self, session: Session) -> int:
        """Pages that may leave now."""
        return self.stores.pages.offloadable(session.context.id) if session.context.settled else 0

    def _note_needed(self, session_id: SessionId, *, readable: bool, now: Nanos) -> None:
        """The thinker is needed: how long after the onset, and was the memory back by then."""
        if (onset := self._onsets.pop(session_id, None)) is not None:
            self.residency.first_words.note(Nanos(now - onset))
        if session_id in self._preloads:
            del self._preloads[session_id]
            self.monitor.count("preload_hits" if readable else "preload_misses")

    def _end_voice(self, session_id: SessionId) -> None:
        """It rests, or has closed, and the thinker was perhaps never needed."""
        self._onsets.pop(session_id, None)
        if session_id in self._preloads:
            del self._preloads[session_id]
            self.monitor.count("preloads_unused")

    def _preload(self, session: Session, now: Nanos) -> None:
        """A person speaks to a character whose memory is away: bring it back now if that can hide.

        Typed words need the thinker at once: nothing can hide behind them, and nothing is judged.
        """
        onset = self._onsets.get(session.id)
        away = onset is not None and not session.context.readable and session.id not in self._preloads
        if onset is None or not away or not self._policy.preloads:
            return
        pages = self.stores.pages.away_pages(session.context.id)
        verdict = self.residency.judge_preload(
            session.id,
            pages,
            short=self.residency.short(pages, free=self.stores.pages.free_count),
            queued=self._queued_moves(),
            spoken=Nanos(now - onset),
        )
        self.monitor.count(f"preloads_{verdict.name.lower()}")
        if verdict is not Verdict.HIDEABLE:
            self.monitor.count("preload_skips")
            return
        self._preloads[session.id] = None
        self._restore(session, session.context, now, early=True)

    def _go_on_preloading(self, now: Nanos) -> None:
        """A copy has ended, or pages came free: what was admitted and had no room begins now."""
        for session_id in tuple(self._preloads):
            session = self.sessions[session_id]
            if not session.context.readable:
                self._restore(session, session.context, now, early=True)

    def _queued_moves(self) -> Nanos:
        """Time of the copies that run or wait: each launch has its overhead, and the bytes move at the lane's pace."""
        assert self._mover is not None
        pages = sum(transfer.pages for transfer in self._transfers.values())
        moving = self.residency.pace.time_of(pages * self.residency.page_bytes)
        return Nanos(moving + len(self._transfers) * self._mover.cost.fixed_us * 1000)

    def _restore(self, session: Session, context: Context, now: Nanos, *, early: bool) -> None:
        """Order the copy back of all that is away, or room for it first."""
        if context.moving is not None:
            return
        self._last_work += 1
        work = WorkId(self._last_work)
        moves = context.restore(work)
        if moves is None:
            self._make_room(self.stores.pages.away_pages(context.id), now)
            return
        self.monitor.count("restores_early" if early else "restores_late")
        self._transfer(work, session, context, moves, leaving=False, now=now)

    def _make_room(self, pages: int, now: Nanos) -> None:
        """Order the copies out of those who are needed last; the pages are free when the copies have ended."""
        if self._mover is None:
            return  # Everybody fits: what is short is on its way back behind a fence.
        short = self.residency.short(pages, free=self.stores.pages.free_count)
        short = self._send_resting(short, now)
        if short and now - self._recounted_at >= RECOUNT_EVERY:
            self._recounted_at = now
            self._count_again()
            short = self._send_resting(short, now)
        for session_id in self.residency.in_line_unprotected() if short else ():
            session = self.sessions[session_id]
            if short and self._leavable(session):
                self.monitor.count("evictions_in_line")
                short = max(0, short - self._send_away(session, short, now))

    def _send_resting(self, short: int, now: Nanos) -> int:
        """Let those leave who are needed last until enough pages do; returns how many are still short.

        Whoever is chosen and cannot leave is no candidate any more, so this ends.
        """
        while chosen := self.residency.choose(short, now):
            for candidate in chosen:
                short = max(0, short - self._send_away(self.sessions[candidate.session], short, now))
                if not short:
                    break
        return short

    def _send_away(self, session: Session, pages_max: int, now: Nanos) -> int:
        """Order the last pages of a session out, at most so many; returns how many leave."""
        self._last_work += 1
        work = WorkId(self._last_work)
        moves = session.context.offload(work, pages_max=pages_max)
        self.residency.left(session.id, work, len(moves))
        if moves:
            self.monitor.count("evictions")
            self._transfer(work, session, session.context, moves, leaving=True, now=now)
        return len(moves)

    def _count_again(self) -> None:
        """Pages that a fence still guarded when their session came to rest may leave by now."""
        for session in self.sessions.values():
            self.residency.recount(session.id, self._leavable(session))

    def _transfer(
        self, work: WorkId, session: Session, context: Context, moves: Sequence[Move], *, leaving: bool, now: Nanos
    ) -> None:
        assert self._mover is not None
        self._transfers[work] = Transfer(session.id, context, leaving, len(moves), now)
        job = MoveJob(
            session=session.id,
            epoch=session.timeline.epoch,
            chunk=ChunkId(0),
            condition=session.condition,
            leaving=leaving,
            moves=tuple((move.page, move.host) for move in moves),
        )
        self._begin_work(work, self._mover.name, (), now)
        self._out.append(Launch(work, self._mover.name, (job,)))

    def _transferred(self, event: StageFinished | StageFailed, now: Nanos) -> None:
        transfer = self._transfers.pop(event.work)
        self.stores.fence_passed(FenceId(event.work))
        self.residency.gone(event.work)
        lost = isinstance(event, StageFailed)
        if isinstance(event, StageFinished):
            took = Nanos(event.ended_at - event.started_at)
            self.residency.pace.note(transfer.pages * self.residency.page_bytes, took)
        transfer.context.moved(event.work, lost=lost)
        if (session := self.sessions.get(transfer.session)) is not None:
            if lost:
                session.copy_lost()
            self.residency.recount(session.id, self._leavable(session))
        self.monitor.count(
            "transfers_failed" if lost else "pages_offloaded" if transfer.leaving else "pages_restored", transfer.pages
        )
        self.monitor.count("offload_us" if transfer.leaving else "restore_us", (now - transfer.ordered_at) // 1000)
        self._go_on_preloading(now)
        for session in list(self.sessions.values()):
            if session.has_place:
                self._touch(session, now)

    def _emit(self, news: Any) -> None:
        self._out.append(news)

    # The anchor ----------------------------------------------------------------------------------------------------

    def _warm(self) -> None:
        anchor = self.stores.anchor
        if anchor.behind == 0:
            self.stores.pin_anchor()
            self._ready = True
            self._emit(self._engine_ready())
            return
        self._last_work += 1
        work = WorkId(self._last_work)
        feed = anchor.launch(work, steps=0, feed_max=4 * FEED_MAX)
        stage = self.plan.need(Role.THINK).name
        job = ThinkJob(
            session=ANCHOR_SESSION,
            epoch=Epoch(0),
            chunk=ChunkId(0),
            condition=ConditionVersion(0),
            pieces=feed.pieces,
            past=feed.past,
            feed=feed.tokens,
            steps=0,
        )
        self._work_of[work] = (ANCHOR_SESSION,)
        self._begin_work(work, stage, (), self._now)
        self._out.append(Launch(work, stage, (job,)))

    def _warmed(self, event: StageFinished | StageFailed) -> None:
        self.stores.fence_passed(FenceId(event.work))
        if isinstance(event, StageFailed):
            raise RuntimeError(f"the model {self.plan.name} cannot read its own anchor: {event.reason}")
        self.stores.anchor.land(event.work, ())
        self._warm()

    def _engine_ready(self) -> EngineReady:
        return EngineReady(
            model=self.plan.name,
            sessions_max=self._door.sessions_max,
            sample_rate=self.plan.sample_rate,
            takes=tuple(Modality(name) for name in self.plan.takes),
            cut=self.plan.cut.value,
            voice=self.plan.voice,
            picture=None if self.plan.face is None else self.plan.face.size,
            faceless=self._faceless,
        )

    # News for whoever watches --------------------------------------------------------------------------------------

    def _report(self, now: Nanos) -> None:
        self._next_progress = Nanos(now + PROGRESS_EVERY)
        self.stores.pages.usage(contexts_max=CONTEXTS_A_LOOK)
        for session in self.sessions.values():
            if session.reply is not None:
                self._emit(session.progress(now, self._scheduler.urgency(session.id)))
        if now >= self._next_metrics:
            self._next_metrics = Nanos(now + METRICS_EVERY)
            self._look(now)
            self._emit(self.metrics(contexts_max=CONTEXTS_A_LOOK))

    def _look(self, now: Nanos) -> None:
        """Once a second: who starves, how much face there is time for, and how many may have a place from now on."""
        self._count_starved(now)
        self._govern()
        self._scheduler.note_loads(self.load().lanes)
        if self._admission is None or not self._policy.places_follow:
            return
        harmed = self.monitor["chunks_late"] + self.monitor["works_starved"]
        places = self._admission.look(
            self.residency.places,
            utilisation=taken(self.load().lanes, cores=self._cores),
            harmed=harmed - self._harmed,
            seated=self.residency.seated_count,
            waiting=self.residency.waiting_count,
            ladder=self.governor if self._policy.yields_fidelity and self._faces_seen else None,
        )
        self._harmed = harmed
        if places is not self.residency.places:
            self.monitor.count("places_grown" if places.count > self.residency.places.count else "places_shrunk")
            self._seat(self.residency.resize(places), now)

    def _count_starved(self, now: Nanos) -> None:
        """Work that somebody waits for and that found no lane for too long, each piece once.

        A miss is counted when a chunk comes late. Where nothing is made any more no chunk comes, and misses stay at 0.
        """
        starving = {
            ((work.session, work.stage, work.need), work.ready_at)
            for work, since in self._scheduler.waiting()
            # Nobody is served late because a face is; that is the governor's affair.
            if work.need not in PATIENT and work.role not in FACE_ROLES and now - since >= STARVED_AFTER
        }
        for name, ready_at in sorted(starving - self._starving):
            self.monitor.count("works_starved")
            self.monitor.note(now, name[0], "starved", now - ready_at)
        self._starving = frozenset(starving)

    def _govern(self) -> None:
        if self.plan.face is None:
            return
        counted, before = self._frames_counted(), self._frames_seen
        self._frames_seen = counted
        if self._faces_seen:
            made, missed = counted.made - before.made, counted.missed - before.missed
            worked = [us - before.busy_us.get(lane, 0) for lane, us in counted.busy_us.items()]
            self.governor.look(Seen(made + missed, missed, max(worked, default=0) * 1000 / METRICS_EVERY))

    @property
    def _faces_seen(self) -> bool:
        return any(session.face is not None and session.face.viewed for session in self.sessions.values())

    def _frames_counted(self) -> FramesCounted:
        monitor = self.monitor
        return FramesCounted(
            made=monitor["face_frames"] - monitor["face_frames_late"],
            missed=monitor["face_frames_late"] + monitor["face_frames_dropped"],
            busy_us={lane: monitor[f"busy_us_{lane}"] for lane in self._face_lanes},
        )

    def load(self) -> Load:
        """What all sessions share, as policies see it; at most `LOAD_AGE_MAX` old."""
        if self._load is None or self._now - self._load.at > LOAD_AGE_MAX:
            stores, residency = self.stores, self.residency
            self._load = Load(
                at=self._now,
                pages=self._pages_needed,
                latents=1.0 - stores.latents.free_count / stores.latents.spec.count,
                out_slots=1.0 - len(stores.out_slots) / max(1, stores.out_slots_count),
                lanes=MappingProxyType(
                    {
                        lane: used
                        for lane, used in self.monitor.utilisation(self._now).items()
                        if lane not in self._face_lanes
                    }
                ),
                places_taken=residency.seated_count,
                places_free=max(0, residency.places.count - residency.seated_count),
                places_waited_for=residency.waiting_count,
            )
        return self._load

    def pressure(self) -> Pressure:
        """The engine as it is now, session by session. O(sessions)."""
        sessions = {name: one.pressure(self._now) for name, one in self.sessions.items()}
        return Pressure(self.load(), MappingProxyType(sessions))

    def metrics(self, *, contexts_max: int | None = None) -> Metrics:
        """Counters, and what is held now: the baseline that every close returns to.

        Args:    contexts_max: contexts whose pages are counted again, of those that have changed; None: all of them.
                 The engine itself looks at a few ten times a second, so that no look takes long; under load the
                 figures by class are as old as that makes them.
        """
        usage = self.stores.pages.usage(contexts_max=contexts_max)
        values = self.monitor.values()
        values |= {
            "sessions": float(len(self.sessions)),
            "closing_sessions": float(len(self._closing)),
            "work_in_flight": float(self._scheduler.running_count),
            "out_slots_free": float(len(self.stores.out_slots)),
            "pages_free": float(usage.free),
            "pages_retiring": float(usage.retiring),
            "latents_held": float(self.stores.latents.spec.count - self.stores.latents.free_count),
            "pages_away": float(
                0 if self.stores.host is None else self.stores.host.spec.count - self.stores.host.free_count
            ),
            "sessions_admitted_max": float(self._door.count(self.residency.places)),
            "places": float(self.residency.places.count),
            "places_taken": float(self.residency.seated_count),
            "places_waited_for": float(self.residency.waiting_count),
            "ingest_held": float(self.stores.ingest.spec.count - self.stores.ingest.free_count),
        }
        if self.stores.face is not None:
            values |= self._face_values(self.stores.face)
        values |= {f"tokens_{kind.value}": float(count) for kind, count in usage.tokens.items()}
        values |= {f"bytes_{kind.value}": float(held) for kind, held in self.stores.bytes_by_class(usage).items()}
        values |= {f"page_{act}": float(count) for act, count in sorted(self.stores.pages.counts.items())}
        values |= {f"slot_{act}": float(count) for act, count in sorted(self.stores.slot_counts().items())}
        index = self.residency.index
        values |= {
            "protections_refused": float(index.protections_refused),
            "protected_bytes": float(index.protected_bytes),
            "eviction_choices": float(self.residency.choices_count),
        }
        values["bytes_long_term"] += (
            values["pages_away"] * usage.page_bytes
        )  # in host memory, whatever they were before
        held = self.stores.bytes_of_all((*self.sessions, *self._closing))
        listed = nlargest(SESSIONS_LISTED_MAX, held, key=lambda one: one.arena + one.host)
        values["session_bytes_max"] = float(max((one.arena + one.host for one in listed), default=0))
        values["session_bytes_all"] = float(sum(one.arena + one.host for one in held))
        values["sessions_unlisted"] = float(len(held) - len(listed))
        chunks = [s.chunks for s in self.sessions.values()]
        heard, discarded = sum(c.heard_ticks for c in chunks), sum(c.discarded_ticks for c in chunks)
        values["heard_ticks_open"], values["discarded_ticks_open"] = float(heard), float(discarded)
        values["heard_ms_total"] = ms_from_ticks(self._ended_heard + heard)
        values["wasted_ms_total"] = ms_from_ticks(self._ended_wasted + discarded)
        return Metrics(values, tuple(listed))

    def measured(self) -> dict[str, float]:
        """Times of its own decisions, by the machine's clock. They are no part of what it says, or a replay of its
        trace would say something else: a live world adds them to the figures it passes on.
        """
        return {"eviction_choice_us": self.residency.choices_took / 1000}

    def _face_values(self, own: FaceStores) -> dict[str, float]:
        """Counters of frames stand among the monitor's own; here is what faces hold, and how good they are."""
        held = {"noisy": own.noisy, "clean": own.clean, "motion": own.motion}
        return {
            "face_level": float(self.governor.level),
            "face_pictures_free": float(own.pictures.free_count),
            **{f"face_{name}_held": float(ledger.spec.count - ledger.free_count) for name, ledger in held.items()},
        }


class FramesCounted(msgspec.Struct, frozen=True):
    """Counters of all faces, at one moment."""

    made: int  #: frames handed over in time
    missed: int  #: late, or never made
    busy_us: dict[str, int]  #: by lane of the face


def _ways_of(plan: ModelPlan) -> tuple[tuple[str, str], ...]:
    """Edges of the plan, and the one that carries no payload: what is being thought is still to be talked."""
    think, talk = plan.stage(Role.THINK), plan.stage(Role.TALK)
    words = () if think is None or talk is None else ((think.name, talk.name),)
    return tuple(dict.fromkeys((*plan.edges, *words)))


def _shares(event: StageFinished | StageFailed, owners: int) -> Iterator[StageFinished | StageFailed]:
    """What each owner of a shared launch is told: its own result."""
    if isinstance(event, StageFailed):
        return iter([event] * owners)
    return (StageFinished(event.work, (result,), event.started_at, event.ended_at) for result in event.results)
