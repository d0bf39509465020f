"""The front end: people's connections on one side, the engine process on the other.

1. Everything of one person lives in a `Visit`: peer, line, and what the page was told. A visit ends exactly once.
2. An order of the fast channel is sent up to three times with one id (wire.py rule 2); the page acts on it once.
3. Nothing here blocks: the only computing is voice detection (0.15 ms a block), Opus, and copies of pictures (0.1 ms
   a frame); pictures are encoded on a thread of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd import clock
from duplexd.config import NO_FACE, Config, face_of
from duplexd.errors import ConfigError, SessionRefused
from duplexd.ids import SessionId
from duplexd.media.echo import EchoReference
from duplexd.media.energy import EnergyDetector
from duplexd.media.lateness import Lateness
from duplexd.media.line import (
    BIAS,
    Block,
    Detector,
    EarReport,
    FlushOrder,
    HoldOrder,
    LatencyReady,
    Line,
    Muted,
    ResumeOrder,
    StateShown,
)
from duplexd.media.person import PersonFinder, Sighting
from duplexd.messages import (
    AdmitSession,
    AdvanceEpoch,
    ClientStalled,
    CutFrames,
    EndSession,
    HistoryChanged,
    ImageArrived,
    InputRefusal,
    LatencyMeasured,
    MediaArrived,
    PersonSeen,
    PicturesFreed,
    Progress,
    PublishChunk,
    PublishFrames,
    RefuseSession,
    ReplyWords,
    ResponseChanged,
    ResponseState,
    ResumePlayback,
    SessionClosed,
    SessionOpened,
    SettingChanged,
    Shortage,
    SlotsFreed,
    StateChanged,
    TurnSettled,
    UserWords,
)
from duplexd.units import (
    NANOS_PER_MS,
    RTP_WRAP,
    Nanos,
    Ticks,
    nanos_from_ms,
    rtp_distance,
    ticks_from_ms,
    ticks_from_nanos,
)
from duplexd.webrtc import wire
from duplexd.webrtc.audience import Audience
from duplexd.webrtc.camera import CameraReceiver
from duplexd.webrtc.figures import Figures
from duplexd.webrtc.peer import IceServer, MessageFault, Peer, PeerConfig, Sight
from duplexd.webrtc.supervisor import EngineState, Supervisor
from duplexd.webrtc.tracks import MediaClock
from duplexd.webrtc.video import Still, VideoTrack, i420, portrait
from duplexd.webrtc.view import View

REPEATS_S = (0.02, 0.06)
ORDERS_REPEATED_MAX = 8  #: orders of the last moments that may still have a repeat to come
ADMISSION_WITHIN_S = 2.0
TICK_S = 0.02
RETRY_AFTER_S = 5
STALL_BYTES = 262_144  #: this much unread on the reliable channel gates generation
PASSED_MAX_MS = 100.0  #: what a page may claim to have played of a packet of 20 ms, or to be wrong by
BOUND_MIN_MS = 5.0  #: sound leaves the jitter buffer in steps of 10 ms: nobody knows better than half of one
PLAYOUT_COUNTS = ("stale_samples", "underruns", "underrun_ticks", "gaps", "dropped_samples", "sent_samples")
#: Response states as the page knows them.
PAGE_STATES = {
    ResponseState.ACCEPTED: "created",
    ResponseState.COMPLETED: "completed",
    ResponseState.CANCELLED: "cancelled",
    ResponseState.FAILED: "failed",
}

log = logging.getLogger("duplexd.frontend")


class Refused(SessionRefused):
    """A session that was not admitted, with the HTTP status that says so."""

    def __init__(self, status: int, code: str, message: str, shortage: Shortage | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.shortage = shortage  #: what there is too little of, where that is why


def shortage_of(refused: Refused) -> dict[str, Any]:
    """What a client is told beside code and sentence; empty where nothing is short."""
    return {} if refused.shortage is None else {"shortage": msgspec.structs.asdict(refused.shortage)}


class Guest(Protocol):
    """What the front end asks of a session, whatever its client speaks."""

    session: SessionId
    line: Line
    admitted: asyncio.Future[RefuseSession | None]
    lateness: Lateness
    progress: Progress | None
    counts: Counter[str]  #: of what its protocol met and its client need not know
    peer: Peer | None
    view: View | None  #: None: its client is shown no face
    eye: CameraReceiver | None  #: None: no camera is looked at
    audience: Audience | None  #: None: nobody has watched it yet

    def take(self, news: Any) -> None: ...

    def tick(self, now: Nanos) -> None: ...

    def now_pts(self, now: Nanos) -> int: ...

    def farewell(self, reason: str) -> None:
        """Tell the client why its session ends."""

    async def hang_up(self, reason: str) -> None:
        """Close whatever connects it."""

    def cancel_timers(self) -> None: ...


G = TypeVar("G", bound=Guest)


class Visit:
    """One session of the page in the front end."""

    def __init__(self, owner: Frontend, session: SessionId, line: Line) -> None:
        self.session = session
        self.line = line
        self.peer: Peer | None = None
        self.admitted: asyncio.Future[RefuseSession | None] = asyncio.get_running_loop().create_future()
        self.stalled = False
        self.lateness = Lateness()
        self.progress: Progress | None = None  #: newest cursors the engine told
        self.counts: Counter[str] = Counter()  #: the page's wire counts nothing
        self.view: View | None = None  #: None: the model has no face
        self.eye: CameraReceiver | None = None  #: None: no camera is looked at
        self.audience: Audience | None = None
        if owner.has_face:
            self.view = owner.view(session, line)
            self.eye = owner.eye(self.on_person)
        self._owner = owner
        self._order_id = 0
        self._words: dict[int, int] = {}
        self._repeats: dict[int, list[asyncio.TimerHandle]] = {}  #: by order, until the page says it has it
        self._ready_sent = False
        self._clocks_told = False

    # Transport ----------------------------------------------------------------------------------------

    def now_pts(self, now: Nanos) -> int:
        return 0 if self.peer is None or self.peer.clock.origin is None else int(self.peer.clock.position(now))

    def on_audio(self, pcm: NDArray[np.int16], rtp: int, how: str) -> None:
        if how == "gap":
            return  # The framer sees the gap by the next timestamp and says so in its blocks.
        now = clock.now()
        late = self.lateness.note(rtp, now, pcm)
        self.line.on_audio(pcm, rtp, now, late=late)
        self.carry()

    def pull(self, pts: Ticks) -> NDArray[np.int16]:
        return self.line.pull(pts, clock.now())

    def sight(self) -> Sight:
        """Where the peer's pictures come from."""
        return self._owner.sight(self.view)

    def tick(self, now: Nanos) -> None:
        self.line.tick(now)
        self.carry()
        self._tick_view(now)
        stalled = self.peer is not None and self.peer.backlog_bytes > STALL_BYTES
        if stalled != self.stalled:
            self.stalled = self.line.client_stalled = stalled
            self._owner.supervisor.send(ClientStalled(self.session, stalled))

    def on_person(self, seen: Sighting) -> None:
        self._owner.supervisor.send(PersonSeen(self.session, seen.present, seen.place.x, seen.place.y))

    def _tick_view(self, now: Nanos) -> None:
        if self.eye is not None:
            self.eye.tick(now)
        if self.view is not None and self.peer is not None:
            tick_view(self.view, self.peer, self.audience, now)
            self._tell_clocks()

    def _tell_clocks(self) -> None:
        """Once, when both tracks have sent something."""
        assert self.peer is not None
        voice, face = self.peer.rtp_origin, self.peer.video_origin
        if not self._clocks_told and voice is not None and face is not None and self._ready_sent:
            self._clocks_told = True
            self.tell(wire.Clocks(voice, face))

    # The page -----------------------------------------------------------------------------------------

    def on_open(self, label: str) -> None:
        if label == wire.RELIABLE_CHANNEL and not self._ready_sent:
            ready = self._owner.supervisor.ready
            if ready is None:
                return
            self._ready_sent = True
            self.tell(
                wire.Ready(
                    session=self.session,
                    model=ready.model,
                    epoch=self.line.playout.epoch,
                    barge_in=self.line.allow_barge_in,
                    takes=tuple(m.value for m in ready.takes),
                    cut=ready.cut,
                    camera=self.peer is not None and self.peer.takes_camera,
                    faceless=ready.faceless,
                )
            )

    def on_message(self, label: str, data: str | MessageFault) -> None:
        if isinstance(data, MessageFault):
            self.tell(wire.Error(data.code, data.message))
            return
        try:
            message = wire.decode(data)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            self.tell(wire.Error("bad_message", f"session {self.session}: {error}"))
            return
        self._hear(message, clock.now())
        self.carry()

    def _hear(self, message: wire.PageMessage, now: Nanos) -> None:
        match message:
            case wire.Pos():
                self._on_pos(message, now)
            case wire.Voice():
                if message.on:
                    self.line.on_page_voice(message.id, at=self._muted_at(message), now=now)
            case wire.Stop():
                self.line.on_stop(message.id, at=self._muted_at(message), now=now)
            case wire.Say():
                self._on_say(message, now)
            case wire.Image():
                self._owner.supervisor.send(ImageArrived(self.session, message.id, len(message.data) * 3 // 4))
            case wire.Set():
                self._on_set(message)
            case wire.Seen():
                if self.view is not None:
                    self.view.page_is_seen = message.on
                    self._tick_view(now)
            case wire.Picture():
                self._on_picture(message)
            case wire.Camera():
                if self.eye is not None:
                    self.eye.switch(on=message.on, now=now)
            case wire.Played():
                for handle in self._repeats.pop(message.id, ()):
                    handle.cancel()
            case wire.Ping():
                pass  # Answered by the peer.

    def _on_say(self, message: wire.Say, now: Nanos) -> None:
        if len(message.text) > wire.TEXT_MAX:
            said = f"The message has {len(message.text)} characters; at most {wire.TEXT_MAX} are taken at once."
            self.tell(wire.Error("text_too_long", f"session {self.session}: {said} Send it in parts.", message.id))
            return
        self.line.say(message.text, message.id, now)

    def _on_set(self, message: wire.Set) -> None:
        if message.barge_in is not None:
            self.line.allow_barge_in = message.barge_in
        if message.echo_cancellation is not None:
            self.line.set_echo_cancellation(message.echo_cancellation)
        changed = SettingChanged(self.session, message.barge_in, message.echo_cancellation, message.speculation)
        self._owner.supervisor.send(changed)

    def _on_picture(self, message: wire.Picture) -> None:
        if self.view is not None:
            self.view.count(message)
            if message.skew_ms is not None:
                self._owner.skew_ms.append(max(-wire.SKEW_MAX_MS, min(message.skew_ms, wire.SKEW_MAX_MS)))

    def _on_pos(self, message: wire.Pos, now: Nanos) -> None:
        if message.hold:
            at = self._muted_at(message)
            if at is not None:  # A hold is answered by muting; anything else is no answer.
                self.line.on_hold_answer(message.hold, at=at, now=now)
            return
        network = nanos_from_ms((self._rtt_ms() or 0.0) / 2)
        age = max(0.0, min(message.age_ms, 5000.0))
        playout = max(0.0, min(message.playout_ms, 1000.0))
        pts = self._unwrap(message.rtp) + ticks_from_ms(age - playout) - BIAS
        report = EarReport(
            pts=pts,
            observed_at=Nanos(now - network),
            network=ticks_from_nanos(network),
            jitter_buffer=ticks_from_ms(max(0.0, min(message.buffer_ms, 5000.0))),
            output=ticks_from_ms(playout),
            input=ticks_from_ms(max(0.0, min(message.input_ms, 1000.0))),
        )
        self.line.on_report(report, now, muted=message.muted, silent=message.silent)

    def _rtt_ms(self) -> float | None:
        return None if self.peer is None else self.peer.rtt_ms

    def _muted_at(self, message: wire.Pos | wire.Voice | wire.Stop) -> Muted | None:
        """Where the sound of a muted page ended. The element mutes before the output device: what that still holds is
        heard, so its delay is not subtracted.
        """
        if not message.muted:
            return None
        passed = max(-PASSED_MAX_MS, min(message.passed_ms, PASSED_MAX_MS))
        bound = max(BOUND_MIN_MS, min(message.bound_ms, PASSED_MAX_MS))
        return Muted(int(self._unwrap(message.rtp) + ticks_from_ms(passed)), ticks_from_ms(bound))

    def _unwrap(self, rtp: int) -> int:
        """Downlink RTP timestamp -> pts: the one nearest to what was sent last."""
        origin = self.peer.rtp_origin if self.peer is not None else None
        if origin is None:
            return 0
        near = self.line.next_pts
        return near + rtp_distance(rtp, origin + near)

    def _rtp(self, pts: int) -> int:
        origin = self.peer.rtp_origin if self.peer is not None else None
        return ((origin or 0) + pts) % RTP_WRAP

    # Out ----------------------------------------------------------------------------------------------

    def carry(self) -> None:
        """Bring what the line produced to where it belongs."""
        for item in self.line.drain():
            match item:
                case Block():
                    self._owner.send_block(self.session, item)
                case HoldOrder():
                    self.order(wire.Hold(self._next_order(), item.hold, item.epoch))
                    self.tell(wire.State("held"))
                case ResumeOrder():
                    self.order(wire.Resume(self._next_order(), item.hold, item.epoch, self._rtp(item.pts)))
                    self._tell_state()  # To the engine it has been speaking all the while.
                case FlushOrder():
                    self.order(wire.Flush(self._next_order(), item.hold, item.epoch, self._rtp(item.pts), item.at))
                case LatencyReady():
                    total = sum(ms for _, ms in item.parts)
                    self.tell(wire.Latency(item.turn, item.response, item.parts, round(total, 1)))
                case StateShown():
                    self._tell_state()
                case _:
                    self._owner.supervisor.send(item)

    def _tell_state(self) -> None:
        self.tell(wire.State(self.line.speaking.shown.value))

    def _next_order(self) -> int:
        self._order_id += 1
        return self._order_id

    def order(self, order: wire.ToPage) -> None:
        text = wire.encode(order)
        self._send(wire.FAST_CHANNEL, text)
        loop = asyncio.get_running_loop()
        self._repeats[self._order_id] = [loop.call_later(s, self._send, wire.FAST_CHANNEL, text) for s in REPEATS_S]
        while len(self._repeats) > ORDERS_REPEATED_MAX:
            del self._repeats[next(iter(self._repeats))]  # Long since sent.

    def tell(self, message: wire.ToPage, *, droppable: bool = False) -> None:
        self._send(wire.RELIABLE_CHANNEL, wire.encode(message), droppable=droppable)

    def _send(self, label: str, text: str, *, droppable: bool = False) -> None:
        if self.peer is not None:
            self.peer.send(label, text, droppable=droppable)

    # The engine ---------------------------------------------------------------------------------------

    def take(self, news: Any) -> None:
        match news:
            case AdmitSession():
                self._settle(None)
            case RefuseSession():
                self._settle(news)
            case PublishChunk():
                self._publish(news)
            case PublishFrames():
                self._publish_frames(news)
            case CutFrames():
                if self.view is not None:
                    self.view.cut(news)
            case AdvanceEpoch():
                self.line.advance(news)
                self._owner.note_advance(news)
            case ResumePlayback():
                self.line.resume(news, clock.now())
            case LatencyMeasured():
                self.line.measure(news)
                self._owner.note_reply(news)
            case TurnSettled():
                self.line.settle_turn(news)
            case EndSession():
                self._owner.end(self, news.reason)
            case _:
                self._show(news)
        self.carry()

    def _settle(self, refusal: RefuseSession | None) -> None:
        if not self.admitted.done():
            self.admitted.set_result(refusal)

    def _publish(self, news: PublishChunk) -> None:
        self.line.publish(news, self._owner.read_chunk(news))

    def _publish_frames(self, news: PublishFrames) -> None:
        frames = self._owner.read_frames(news)
        if self.view is not None:
            self.view.publish(news, frames)

    def farewell(self, reason: str) -> None:
        self.tell(wire.Closed(reason))

    async def hang_up(self, reason: str) -> None:
        if self.peer is not None:
            await self.peer.close(reason)

    def _show(self, news: Any) -> None:
        """What the page shows; a page that lags behind loses cursors first."""
        match news:
            case Progress():
                self.progress = news
                playout = self.line.playout
                self.tell(
                    wire.CursorShown(
                        news.epoch, news.generation, playout.delivered, news.playback, news.budget, news.assumed
                    ),
                    droppable=True,
                )
            case StateChanged():
                self.line.enter(news.state, clock.now())
                self._tell_state()
            case UserWords():
                self.tell(wire.User(news.turn, news.text, news.stable, news.final))
            case ResponseChanged():
                if news.state is ResponseState.COMPLETED:
                    self.line.playout.finish()
                state = PAGE_STATES.get(news.state)
                if state is not None:
                    outputs = {one.output: PAGE_STATES.get(one.state, one.state.value) for one in news.outputs}
                    self.tell(wire.Reply(news.response, news.epoch, state, news.reason, outputs))
            case ReplyWords():
                words = tuple(wire.Word(w.text, w.span.start, w.span.end) for w in news.words)
                self.tell(wire.Words(news.response, news.first, words))
            case HistoryChanged():
                self.tell(wire.Heard(news.response, news.words, news.ambiguous, news.estimated, news.final))
            case InputRefusal():
                self.tell(wire.Error(news.code, news.reason, news.key))

    def cancel_timers(self) -> None:
        for handle in chain.from_iterable(self._repeats.values()):
            handle.cancel()
        self._repeats.clear()
        if not self.admitted.done():
            self.admitted.cancel()


def tick_view(view: View, peer: Peer, audience: Audience | None, now: Nanos) -> None:
    """A session's face is on the track of its own client, or on one for its viewers alone."""
    track = peer.video if peer.video is not None or audience is None else audience.own_face
    watched = audience is not None and audience.sees
    view.tick(track if peer.is_connected else None, peer.clock.origin, now, watched=watched)


class Frontend:
    """All visits of one daemon."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.supervisor = Supervisor(config, on_news=self._on_news, on_gone=self._on_engine_gone)
        self.visits: dict[SessionId, Guest] = {}
        self.counts: Counter[str] = Counter()
        self.figures = Figures()
        self._left: Counter[str] = Counter()  #: what the playouts of ended sessions counted
        self._left_protocols: Counter[str] = Counter()  #: and their protocols
        self._left_lapses = 0  #: and how often they said that they spoke, and were not heard
        self._left_pictures: Counter[str] = Counter()  #: and their pictures
        self._left_cameras: Counter[str] = Counter()  #: and their cameras
        self.loop_lag_ms: deque[float] = deque(maxlen=3000)  #: one a tick: the last minute
        self.reply_ms: deque[float] = deque(maxlen=1000)  #: end of a turn -> its answer is on its way
        self.skew_ms: deque[float] = deque(maxlen=1000)  #: voice ahead of the picture, as browsers know it
        self.advance_ms: deque[float] = deque(maxlen=1000)  #: decision of the engine -> old epoch flushed here
        self.closing = ""
        self._last_session = 0
        self._networks: dict[str, Any] = {}
        self._portrait = i420(portrait())
        self._video_pool = ThreadPoolExecutor(1, thread_name_prefix="duplexd-video")
        self._camera_pool = ThreadPoolExecutor(1, thread_name_prefix="duplexd-camera")
        self._finder: PersonFinder | None = None  #: once it is loaded, if the model has a face
        self._ticker: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    # Life ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.supervisor.start()
        # Their threads begin now, not with the first visitor: there they look like a leak.
        self._video_pool.submit(int)
        self._camera_pool.submit(int if face_of(self.config) == NO_FACE else self._load_finder)
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def stop(self) -> None:
        self.closing = "the daemon is stopping"
        for visit in list(self.visits.values()):
            self.end(visit, self.closing)
        while self._ending:
            await asyncio.wait(set(self._ending), timeout=5)
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        self._video_pool.shutdown(wait=False)
        self._camera_pool.shutdown(wait=False)
        await self.supervisor.stop()

    async def _tick(self) -> None:
        """Deadlines of all visits, on an absolute schedule; how late a tick is, is the loop's lag."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += TICK_S
            await asyncio.sleep(max(0.0, due - loop.time()))
            lag = loop.time() - due
            self.loop_lag_ms.append(1000 * max(0.0, lag))
            self.figures.loop_lag_ms.observe(1000 * max(0.0, lag))
            if lag > 1.0:
                due = loop.time()  # A stall is not made up for by a burst.
            now = clock.now()
            for visit in list(self.visits.values()):
                self._tick_visit(visit, now)
            self.supervisor.watch(now, busy=bool(self.visits))

    def _tick_visit(self, visit: Guest, now: Nanos) -> None:
        speaking = visit.line.speaking
        lapses = speaking.lapses
        self._guarded(visit, visit.tick, now)
        self.figures.note_line(visit.line)
        if speaking.lapses > lapses:
            log.warning("session %d speaks, says the engine, and nothing was heard of it for 2 s", visit.session)

    # Sessions -----------------------------------------------------------------------------------------

    async def open(self, offer_sdp: object) -> tuple[Visit, str]:
        """Admit a person and answer their offer. Raises Refused or InputRefused; nothing is left behind then."""
        visit = await self.admit(lambda session, line: Visit(self, session, line))
        session = visit.session
        try:
            visit.peer = await Peer.accept(
                offer_sdp,
                config=self.peer_config(),
                on_audio=visit.on_audio,
                pull_audio=visit.pull,
                on_message=visit.on_message,
                on_closed=lambda reason: self._gone(visit, reason),
                on_open=visit.on_open,
                sight=visit.sight(),
                eye=visit.eye,
            )
            if session not in self.visits:
                await visit.peer.close("the engine is gone")
                raise Refused(503, "loading", "the engine restarted meanwhile; try again in a few seconds")
        except BaseException:
            self._forget(visit, "the connection could not be made")
            raise
        return visit, visit.peer.answer_sdp

    async def admit(self, make: Callable[[SessionId, Line], G]) -> G:
        """A session that the engine has a place for. Raises Refused; nothing is left behind then."""
        self._check_open()
        self._last_session += 1
        session = SessionId(self._last_session)
        guest = make(session, self._line(session))
        self.visits[session] = guest
        try:
            await self._admit(guest)
        except BaseException:
            self._forget(guest, "it was not admitted")
            raise
        self.counts["sessions_opened"] += 1
        return guest

    def _check_open(self) -> None:
        if self.closing:
            raise Refused(503, "closing", f"{self.closing}; no new session is taken")
        if self.supervisor.state is not EngineState.READY:
            raise Refused(503, "loading", f"the engine is {self.supervisor.state.value}; try again in a few seconds")
        if len(self.visits) >= self.config.sessions_max:
            self.counts["sessions_refused"] += 1
            raise Refused(
                503,
                "busy",
                f"all {self.config.sessions_max} sessions are taken; "
                "try again when one has ended, or raise sessions_max",
                Shortage("sessions", len(self.visits) + 1, self.config.sessions_max, "sessions"),
            )

    def _line(self, session: SessionId) -> Line:
        ready = self.supervisor.ready
        assert ready is not None
        visits = self.visits

        def pts_at(now: Nanos) -> int:
            return visits[session].now_pts(now) if session in visits else 0

        return Line(
            session=session,
            rate=ready.sample_rate,
            detector=self._detector(self._voice(ready.voice)),
            echo=self._echo(self._voice(ready.voice)),
            allow_barge_in=self.config.barge_in,
            pts_at=pts_at,
            hold_max=nanos_from_ms(self.config.hold_max_ms),
            echo_warmup=nanos_from_ms(self.config.echo_warmup_ms),
            rest=nanos_from_ms(self.config.rest_ms),
        )

    def _voice(self, of_model: str) -> str:
        return of_model if self.config.voice_detector == "auto" else self.config.voice_detector

    def _detector(self, name: str) -> Detector:
        if name == "energy":
            return EnergyDetector()
        from duplexd import weights
        from duplexd.media.vad import VoiceDetector

        if name not in self._networks:
            self._networks[name] = VoiceDetector.load(weights.path("silero-vad"))
        return VoiceDetector(self._networks[name])

    def _echo(self, name: str) -> EchoReference | None:
        """The word clock takes any sound for voice, tones most of all: only speech can be told from its echo."""
        return EchoReference() if name == "silero" else None

    def peer_config(self) -> PeerConfig:
        return PeerConfig(
            ice_servers=tuple(ice_server(text) for text in self.config.ice_servers),
            public_address=self.config.public_address,
            loopback_only=self.config.loopback_media,
        )

    async def _admit(self, visit: Guest) -> None:
        deadline = nanos_from_ms(self.config.response_deadline_ms)
        self.supervisor.send(SessionOpened(visit.session, barge_in=self.config.barge_in, response_deadline=deadline))
        try:
            refusal = await asyncio.wait_for(asyncio.shield(visit.admitted), ADMISSION_WITHIN_S)
        except TimeoutError as error:
            raise Refused(503, "engine_silent", "the engine did not answer in time; try again") from error
        if refusal is not None:
            self.counts["sessions_refused"] += 1
            raise Refused(503, refusal.code, refusal.reason, refusal.shortage)

    def end(self, visit: Guest, reason: str) -> None:
        """End a session and tell its client why."""
        if visit.session in self.visits:
            visit.farewell(reason)
            self._forget(visit, reason)
            self._close(visit, reason, linger=True)

    def _gone(self, visit: Guest, reason: str) -> None:
        """The connection ended by itself."""
        self._forget(visit, reason)

    def leave(self, guest: Guest, reason: str) -> None:
        """The client has left."""
        self._gone(guest, reason)

    def _forget(self, visit: Guest, reason: str) -> None:
        if self.visits.pop(visit.session, None) is None:
            return
        log.info("session %d ended: %s", visit.session, reason)
        self.counts["sessions_ended"] += 1
        visit.cancel_timers()
        if visit.audience is not None:
            visit.audience.close(reason)
        self.figures.note_line(visit.line)
        self._left.update(_playout_counts(visit))
        self._left_protocols.update(visit.counts)
        self._left_lapses += visit.line.speaking.lapses
        self._left_pictures.update(_picture_counts(visit))
        self._left_cameras.update(_camera_counts(visit))
        self.supervisor.send(SessionClosed(visit.session, reason))

    def _close(self, visit: Guest, reason: str, *, linger: bool) -> None:
        async def close() -> None:
            if linger:
                await asyncio.sleep(0.1)  # The client learns the reason before the channel goes.
            await visit.hang_up(reason)

        self.later(close())

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Something that ends; the daemon waits for it before it stops."""
        task = asyncio.get_running_loop().create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def hang_up(self, session: SessionId) -> bool:
        visit = self.visits.get(session)
        if visit is None:
            return False
        self._forget(visit, "the person left")
        self._close(visit, "the person left", linger=False)
        return True

    def playout_counts(self) -> Counter[str]:
        """Over all sessions, those that have ended too: a counter never falls."""
        total = Counter(self._left)
        for visit in self.visits.values():
            total.update(_playout_counts(visit))
        return total

    def protocol_counts(self) -> Counter[str]:
        """What the protocols of all sessions counted."""
        total = Counter(self._left_protocols)
        for visit in self.visits.values():
            total.update(visit.counts)
        return total

    @property
    def lapse_count(self) -> int:
        """How often a session said that it spoke, and was not heard."""
        return self._left_lapses + sum(visit.line.speaking.lapses for visit in self.visits.values())

    @property
    def view_count(self) -> int:
        """How many people see a face now."""
        return sum(v.view is not None and v.view.shown for v in self.visits.values())

    def picture_counts(self) -> Counter[str]:
        """What became of all frames of all sessions."""
        total = Counter(self._left_pictures)
        for visit in self.visits.values():
            total.update(_picture_counts(visit))
        return total

    @property
    def person_count(self) -> int:
        """How many sessions' cameras show somebody now."""
        return sum(v.eye is not None and v.eye.sees_somebody for v in self.visits.values())

    def camera_counts(self) -> Counter[str]:
        total = Counter(self._left_cameras)
        for visit in self.visits.values():
            total.update(_camera_counts(visit))
        return total

    # The engine ---------------------------------------------------------------------------------------

    def _on_news(self, news: Any) -> None:
        session = getattr(news, "session", None)
        if session is None:
            return
        visit = self.visits.get(session)
        if isinstance(news, Progress):
            self.figures.note_progress(news)
        if visit is not None:
            self._guarded(visit, visit.take, news)
        elif isinstance(news, PublishChunk):
            self.supervisor.send(SlotsFreed((news.slot,)))  # The person has left meanwhile.
        elif isinstance(news, PublishFrames):
            self.supervisor.send(PicturesFreed((news.slot,)))

    def note_advance(self, news: AdvanceEpoch) -> None:
        now = clock.now()
        self.advance_ms.append((now - news.decided_at) / NANOS_PER_MS)
        self.figures.note_advance(news, now)

    def note_reply(self, news: LatencyMeasured) -> None:
        self.reply_ms.append((clock.now() - news.ended_at) / NANOS_PER_MS)

    def send_block(self, session: SessionId, block: Block) -> None:
        """Into a slot of shared memory and to the engine; without a free slot it is lost, and counted."""
        supervisor = self.supervisor
        slot = supervisor.take_input_slot()
        if slot is None or supervisor.media is None:
            self.counts["input_blocks_lost"] += 1
            return
        supervisor.media.write_input(slot, block.pcm)
        supervisor.send_media(
            MediaArrived(session, slot, block.span, block.captured_at, block.voice, block.echo, block.gap)
        )

    def read_chunk(self, news: PublishChunk) -> NDArray[np.int16]:
        """The sound of a chunk; its slot goes back to the engine."""
        media = self.supervisor.media
        assert media is not None
        pcm = media.read_output(news.slot, news.samples)
        self.supervisor.send(SlotsFreed((news.slot,)))
        return pcm

    def read_frames(self, news: PublishFrames) -> NDArray[np.uint8]:
        """The pictures of a slot, uint8 (count, height * 3 / 2, width); it goes back to the engine."""
        media, ready = self.supervisor.media, self.supervisor.ready
        assert media is not None
        assert ready is not None
        assert ready.picture is not None
        width, height = ready.picture
        frames = media.read_pictures(news.slot, news.count, width=width, height=height)
        self.supervisor.send(PicturesFreed((news.slot,)))
        return frames

    # Pictures -----------------------------------------------------------------------------------------

    @property
    def has_face(self) -> bool:
        ready = self.supervisor.ready
        return ready is not None and ready.picture is not None

    def _load_finder(self) -> None:
        """On the camera's thread, while the engine loads. Without it everything but the camera works."""
        try:
            self._finder = PersonFinder()
        except ConfigError as error:
            log.warning("%s; nobody is seen", error)
        except Exception:
            log.exception("the search for faces could not be loaded; nobody is seen")

    def eye(self, on_person: Callable[[Sighting], None]) -> CameraReceiver | None:
        return CameraReceiver(on_person, finder=self._finder, pool=self._camera_pool) if self._finder else None

    def view(self, session: SessionId, line: Line) -> View | None:
        """What this session's client may see; None when the model has no face."""
        return View(session, line, self.supervisor.send) if self.has_face else None

    def sight(self, view: View | None) -> Sight:
        """Where a peer's pictures come from: for a model without a face, a portrait that never moves."""
        if view is None:
            return Sight(Still(self._portrait), self._video_pool, shown=True)
        return Sight(view.look, self._video_pool)

    def face(self, view: View | None, media_clock: MediaClock) -> VideoTrack:
        """A track for viewers of a session whose client is sent no face."""
        sight = self.sight(view)
        track = VideoTrack(media_clock, sight.look, pool=sight.pool)
        if sight.shown:
            track.show()
        return track

    def audience(self, guest: Guest) -> Audience:
        """Who watches a session. Raises Refused when it has no track that could be watched."""
        if guest.audience is None:
            peer = guest.peer
            if peer is None:
                said = "this session's sound leaves by a WebSocket, as fast as it is made; only tracks can be watched"
                raise Refused(409, "no_track", said)
            guest.audience = Audience(
                clock=peer.clock, voice=peer.voice, face=peer.video, make_face=lambda at: self.face(guest.view, at)
            )
        return guest.audience

    @property
    def viewer_count(self) -> int:
        return sum(visit.audience.count for visit in self.visits.values() if visit.audience is not None)

    def _guarded(self, visit: Guest, act: Callable[[Any], None], argument: Any) -> None:
        """A fault in one visit ends that visit: its neighbours' news and deadlines go on (DESIGN §5 rule 10)."""
        try:
            act(argument)
        except Exception:
            log.exception("session %d failed", visit.session)
            self.counts["sessions_failed"] += 1
            self.end(visit, "an internal error ended the session; connect again")

    def _on_engine_gone(self, reason: str) -> None:
        self.counts["engine_deaths"] += 1
        for visit in list(self.visits.values()):
            visit.take(RefuseSession(visit.session, reason, "loading"))
            self.end(visit, reason)


def _playout_counts(visit: Guest) -> dict[str, int]:
    playout = visit.line.playout
    return {name: getattr(playout, name) for name in PLAYOUT_COUNTS}


def _camera_counts(visit: Guest) -> dict[str, int]:
    if visit.eye is None:
        return {}
    counts: dict[str, int] = msgspec.structs.asdict(visit.eye.counts)
    return counts


def _picture_counts(visit: Guest) -> dict[str, int]:
    """Of the queue of frames, of the track that sends them, and of the page that shows them."""
    if visit.view is None:
        return {}
    counts: dict[str, int] = msgspec.structs.asdict(visit.view.pictures.counts)
    track: Counter[str] = Counter()
    if visit.peer is not None and visit.peer.video is not None:
        track.update(msgspec.structs.asdict(visit.peer.video.counts))
    if visit.audience is not None:
        track.update(visit.audience.face_counts())
    for name, count in track.items():
        counts["ticks_skipped" if name == "skipped" else name] = count
    return counts | visit.view.page_counts


def ice_server(text: str) -> IceServer:
    """stun:host:port, or turn:user:password@host:port."""
    kind, _, rest = text.partition(":")
    if "@" not in rest:
        return IceServer(url=text)
    credentials, _, place = rest.rpartition("@")
    username, _, credential = credentials.partition(":")
    return IceServer(url=f"{kind}:{place}", username=username, credential=credential)
