"""The Live surface: a session without turns. Sound in, sound out, what was said on both sides, and nothing to ask for.

GET  /v1/live/sessions             WebSocket; the first event is `session.start`
POST /v1/live/sessions             {"session", "transport": {"type": "webrtc", "sdp"}} -> the same with an answer
GET  /v1/live/sessions/ID/attach   WebSocket: joins (sideband)
POST /v1/live/sessions/ID/hangup   ends it
POST /v1/live/sessions/ID/accept|reject|refer|fork   501

1. Underneath is a session of the Realtime core with its own judge of turns; what it says of responses is left out.
2. A client of this surface plays what it gets, in order, and throws nothing away. So sound leaves as it is to be heard,
   20 ms at a time, and a hold or an interruption is silence that simply begins.
3. Words are told when their sound has left, with their place in the session's time.
4. A sideband is trusted: the limits of a data channel do not hold for it. It is told the sound of both sides, 24 kHz,
   as it came before any muting and as it left; it cannot bring any.
5. A muted person is silence to the engine, and time goes on.
6. What is to be communicated waits until nobody speaks, and is said once then, however much there is of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from aiohttp import WSMsgType, web
from numpy.typing import NDArray

from duplexd import clock
from duplexd.errors import InputRefused
from duplexd.ids import SessionId
from duplexd.media.line import Line
from duplexd.media.playout import FRAME
from duplexd.media.resample import Resampler
from duplexd.messages import AdvanceEpoch, ReplyWords, TurnOpened, TurnOutcome, TurnSettled, TurnState
from duplexd.units import INPUT_RATE, NANOS_PER_SECOND, Nanos, Ticks, ms_from_ticks
from duplexd.webrtc.frontend import Frontend, Refused
from duplexd.webrtc.peer import MessageFault
from duplexd.webrtc.realtime import check as c
from duplexd.webrtc.realtime.faults import Fault, invalid
from duplexd.webrtc.realtime.formats import ALAW, PCM, RATES, ULAW, WireIn, WireOut, base64_of
from duplexd.webrtc.realtime.items import TEXT_MAX
from duplexd.webrtc.realtime.pause import Pause
from duplexd.webrtc.realtime.requests import Refusal, json_body, upgrade
from duplexd.webrtc.realtime.secrets import Key
from duplexd.webrtc.realtime.session import RealtimeSession, Transport
from duplexd.webrtc.realtime.settings import Settings, locked_field
from duplexd.webrtc.realtime.unpack import event_of, parts
from duplexd.webrtc.realtime.visit import CHANNEL, ChannelSink, RealtimeVisit, SocketSink, turn_away

if TYPE_CHECKING:
    from duplexd.webrtc.realtime.routes import RealtimeRoutes

FIRST_WITHIN_S = 30.0
LIFE_SHOWN_S = 24 * 3600  #: a session without an end shows one a day away
WORDS_WAITING_MAX = 512
_encoder = msgspec.json.Encoder()
REFLECTED_RATE = 24_000  #: of sound told to a sideband
SILENCE = {PCM: b"\0", ULAW: b"\xff", ALAW: b"\xd5"}
_DELEGATION = c.nullable(c.fields({"type": c.one_of("client"), "acknowledgement_delay_ms": c.anything}))
_TRIGGERS = c.nullable(c.many(c.anything, most=0))
_NAMES = c.nullable(c.either(c.one_of("all"), c.many(c.text(longest=128), most=64)))
_SELECTORS = c.nullable(
    c.either(
        c.one_of("all"),
        c.many(c.fields({"type": c.text(longest=128), "response_event": c.anything}, required=("type",)), most=64),
    )
)
_CLIENT = c.fields({"data_channel": c.fields({"allowed_client_events": _NAMES, "allowed_server_events": _SELECTORS})})
_UPDATE = c.fields({"delegation": _DELEGATION, "triggers": _TRIGGERS})
_ROLES = {"developer": "system", "user": "user", "assistant": "assistant"}  #: of Live, as items have them
_PART = c.fields(
    {"type": c.one_of("input_text", "output_text", "text"), "text": c.text(longest=TEXT_MAX)}, required=("text",)
)
_SAID = c.fields(
    {
        "type": c.one_of("message"),
        "id": c.plain,
        "status": c.plain,
        "role": c.one_of(*_ROLES),
        "content": c.either(c.many(_PART, most=64), c.text(longest=TEXT_MAX)),
    },
    required=("role", "content"),
)
_FIELDS: dict[str, c.Check] = {
    "model": c.text(longest=128),
    "instructions": c.nullable(c.text(longest=32_768)),
    "audio": c.nullable(
        c.fields(
            {
                "format": c.nullable(
                    c.fields(
                        {"type": c.one_of(PCM, ULAW, ALAW), "rate": c.one_of(8000, 16_000, 24_000)}, required=("type",)
                    )
                ),
                "output": c.nullable(c.fields({"voice": c.plain})),
            }
        )
    ),
    "input": c.nullable(c.many(_SAID, most=128)),
    "client": c.nullable(_CLIENT),
    "delegation": _DELEGATION,
    "safety_identifier": c.nullable(c.text(longest=512)),
    "store": c.nullable(c.one_of(False)),
    "triggers": _TRIGGERS,
    "idle_timeout_s": c.nullable(c.whole(1, 3600)),
    "wake_policy": c.nullable(
        c.fields({"type": c.one_of("speech"), "vad_threshold": c.number(0, 1)}, required=("type",))
    ),
}
_START = c.fields(_FIELDS, required=("model",))


class Spoken(msgspec.Struct, frozen=True):
    """A word on its way to be heard."""

    epoch: int
    start: Ticks
    length: Ticks
    text: str


class LiveVisit(RealtimeVisit):
    """One Live session."""

    def __init__(
        self,
        owner: Frontend,
        session: SessionId,
        line: Line,
        core: RealtimeSession,
        *,
        start: dict[str, Any],
        rate: int,
        kind: str = PCM,
        locked: frozenset[str] = frozenset(),
    ) -> None:
        self.by_socket = rate > 0
        super().__init__(owner, session, line, core, fed=self.by_socket)
        self.live_id = f"live_{secrets.token_urlsafe(12)}"
        self.muted = False
        self._start = start
        self._locked = locked
        self._owes = False  #: something is to be communicated as soon as nobody speaks
        self._wire_out = WireOut(kind, rate=line.playout.rate, wire_rate=rate) if self.by_socket else None
        self._opened = clock.now()
        self._next = 0
        self._events = 0
        self._words: deque[Spoken] = deque(maxlen=WORDS_WAITING_MAX)
        self._kind = kind
        self._rate = rate
        #: what a data channel may carry; a WebSocket carries everything
        self._limits = {} if self.by_socket else (start.get("client") or {}).get("data_channel") or {}
        self._speaks = False  #: the person
        self.pause = _pause_of(start)
        self._side_in = Resampler(INPUT_RATE, REFLECTED_RATE)
        self._side_out = WireOut(PCM, rate=line.playout.rate, wire_rate=REFLECTED_RATE)
        self._side_wire = WireIn(kind, rate=rate)

    # Out --------------------------------------------------------------------------------------------------------------

    def shown(self) -> dict[str, Any]:
        expires = self.bridge.session.shown().get("expires_at") or round(clock.wall_seconds() + LIFE_SHOWN_S)
        kept = {name: self._start[name] for name in ("audio", "instructions", "input") if self._start.get(name)}
        model = self._owner.supervisor.ready.model if self._owner.supervisor.ready else self._start["model"]
        return {"id": self.live_id, "expires_at": expires, "model": model, "status": "active", **kept}

    def event(self, kind: str, **fields: Any) -> str:
        self._events += 1
        told = {name: value for name, value in fields.items() if value is not None}
        return _encoder.encode({"type": kind, "event_id": f"event_{self._events}", **told}).decode()

    def say(self, kind: str, **fields: Any) -> None:
        self._tell(kind, self.event(kind, **fields))

    def _tell(self, kind: str, text: str) -> None:
        for sink in list(self.sinks):
            if not isinstance(sink, ChannelSink) or _allows(self._limits.get("allowed_server_events"), kind):
                sink.tell(text)

    def _tell_events(self) -> None:
        for event in self.bridge.events():
            for text in self._render(event):
                self._tell("session.started" if event["type"] == "session.created" else "error", text)

    def open(self) -> None:
        super().open()
        if self._limits:
            said = "This data channel carries only the events that its session allows."
            self.say("info", code="data_channel_permissions", message=said)

    def welcome(self) -> str:
        return self.event("session.started", session=self.shown())

    def _render(self, event: dict[str, Any]) -> list[str]:
        """Of what the core tells, its start and its errors; all else is told from the news themselves."""
        if event["type"] == "session.created":
            return [self.event("session.started", session=self.shown())]
        if event["type"] != "error":
            return []
        error = dict(event["error"])
        client_event_id = error.pop("event_id", None)
        error.setdefault("code", "invalid_request")
        if client_event_id:
            error["client_event_id"] = client_event_id
        return [self.event("error", error=error, client_event_id=client_event_id)]

    @property
    def now_ms(self) -> int:
        return round((clock.now() - self._opened) / NANOS_PER_SECOND * 1000)

    # The engine and the clock -----------------------------------------------------------------------------------------

    def take(self, news: Any) -> None:
        match news:
            case ReplyWords():
                texts = _pieces(news)
                for word, text in zip(news.words, texts, strict=True):
                    self._words.append(Spoken(news.epoch, word.span.start, word.span.length, text))
            case AdvanceEpoch():
                self._words.clear()
            case TurnOpened():
                self._speaks = True
            case TurnSettled():
                self._speaks = False
                if news.outcome is TurnOutcome.TAKEN and news.text:
                    start, end = (round(self.bridge.input_ms(at)) for at in (news.span.start, news.span.end))
                    self.say("session.input_transcript.delta", delta=f"{news.text} ", start_ms=start, end_ms=end)
        super().take(news)

    def tick(self, now: Nanos) -> None:
        super().tick(now)
        if self.by_socket:
            self._play(now)
        self._tell_words()
        self._communicate()
        if self.pause is not None:
            busy = self._speaks or self.line.speaking.shown is not TurnState.LISTENING or not self.line.playout.quiet
            if self.pause.tick(now, busy=busy):
                self._rest(rests=True)

    # Rest -------------------------------------------------------------------------------------------------------------

    def pass_on(self, facts: list[Any]) -> None:
        if self.pause is not None and self.pause.paused:
            facts = self.pause.screen(facts, clock.now())
            if not self.pause.paused:
                self._rest(rests=False)
        super().pass_on(facts)

    def _wake(self) -> None:
        if self.pause is not None and self.pause.paused:
            kept = self.pause.wake(clock.now())
            self._rest(rests=False)
            super().pass_on(kept)

    def _rest(self, *, rests: bool) -> None:
        if self.view is not None:
            self.view.page_is_seen = not rests
        self.say("session.paused" if rests else "session.resumed")

    # Sound ------------------------------------------------------------------------------------------------------------

    def on_audio(self, pcm: NDArray[np.int16], rtp: int, how: str) -> None:
        if how != "gap":
            self._reflect(pcm)
        super().on_audio(np.zeros_like(pcm) if self.muted else pcm, rtp, how)

    def pull(self, pts: Ticks) -> NDArray[np.int16]:
        before = self.line.playout.sent_samples
        frame = super().pull(pts)
        if self.line.playout.sent_samples > before:
            self._reflect_out(frame, pts)
        return frame

    def _reflect(self, pcm: NDArray[np.int16]) -> None:
        """The person's sound, 16 kHz, to whoever joined."""
        if self.sides:
            sound = self._side_in.push(pcm).astype("<i2").tobytes()
            self._tell_sides({"type": "session.input_audio.append", "audio": base64_of(sound)})

    def _reflect_out(self, frame: NDArray[np.int16], pts: int) -> None:
        if self.sides:
            start = round(ms_from_ticks(Ticks(pts)))
            end = start + round(ms_from_ticks(FRAME))
            delta = base64_of(self._side_out.push(frame))
            self._tell_sides({"type": "session.output_audio.delta", "delta": delta, "start_ms": start, "end_ms": end})

    def _tell_sides(self, event: dict[str, Any]) -> None:
        text = _encoder.encode(event).decode()
        for sink in list(self.sides):
            sink.tell(text)

    def _play(self, now: Nanos) -> None:
        """What is due leaves; silence needs no words."""
        assert self._wire_out is not None
        while self._next <= self.now_pts(now):
            before = self.line.playout.sent_samples
            frame = self.line.pull(self._next, now)
            self._next += FRAME
            if self.line.playout.sent_samples > before:
                delta = {"type": "session.output_audio.delta", "delta": base64_of(self._wire_out.push(frame))}
                text = _encoder.encode(delta).decode()
                for sink in list(self.sinks):
                    if sink not in self.sides:
                        sink.tell(text)
                self._reflect_out(frame, self._next - FRAME)

    def _tell_words(self) -> None:
        while self._words:
            word = self._words[0]
            pts = self.line.playout.pts_of(self.line.playout.epoch, word.start)
            if word.epoch == self.line.playout.epoch and pts is None:
                return
            self._words.popleft()
            if pts is not None:
                start = round(ms_from_ticks(pts))
                end = start + round(ms_from_ticks(word.length))
                self.say("session.output_transcript.delta", delta=word.text, start_ms=start, end_ms=end)

    # The client -------------------------------------------------------------------------------------------------------

    def on_message(self, label: str, data: str | MessageFault) -> None:
        if isinstance(data, str) and label == CHANNEL:
            kind = _type_of(data)
            if not _allows(self._limits.get("allowed_client_events"), kind):
                said = f"This data channel may not send '{kind[:80]}' (session.client.data_channel)."
                self._tell_fault(Fault("event_not_allowed", said, param="type"), None)
                return
        super().on_message(label, data)

    async def hear(self, text: str, *, by_side: bool) -> None:
        """A frame of a socket; of a large one part after part, so that a sideband can be told each in its time."""
        event = await self.unpack(text)
        if not isinstance(event, dict):
            self.on_text(event, by_side=by_side)
            return
        for part in parts(event):
            self.on_text(part, by_side=by_side)
            await asyncio.sleep(0)

    def on_text(self, text: str | bytes | dict[str, Any], *, by_side: bool = False) -> bool:
        event = event_of(text, longest=self.event_bytes_max)
        if event is None:
            return super().on_text(text)  # The core says what is wrong with it.
        try:
            if event.get("type") == "session.input_audio.append" and (by_side or not self.by_socket):
                said = "Sound is appended on the session's own WebSocket; a call brings it by its track."
                raise Fault("event_not_allowed", said, param="type")
            self._hear(event)
        except Fault as fault:
            self._tell_fault(fault, _id_of(event.get("event_id")))
            return False
        return True

    def _tell_fault(self, fault: Fault, given: str | None) -> None:
        error = {"type": fault.kind, "code": fault.code, "message": str(fault), "param": fault.param}
        error["client_event_id"] = given or ""
        self.say("error", error={k: v for k, v in error.items() if v}, client_event_id=given)

    def _hear(self, event: dict[str, Any]) -> None:
        kind, given = event.get("type"), _id_of(event.get("event_id"))
        match kind:
            case "session.input_audio.append":
                self._append_sound(event.get("audio"), given)
            case "session.input_audio.mute" | "session.input_audio.unmute":
                self.muted = kind == "session.input_audio.mute"
                if self.muted:
                    self._core("input_audio_buffer.clear", None)
                self.say(f"{kind}d", client_event_id=given)
            case "session.instructions.append" | "session.thinking.append" | "session.commentary.append":
                self._append(kind, event, given)
            case "session.close":
                self._owner.end(self, "the client closed its session")
            case "session.update":
                _UPDATE(event.get("session"), "session")
                self.say("session.updated", session=self.shown(), client_event_id=given)
            case _:
                raise invalid("type", kind, "session.input_audio.append, .mute, .unmute, session.close, ...")

    def _append_sound(self, audio: Any, given: str | None) -> None:
        if self.sides and isinstance(audio, str | bytes):
            with contextlib.suppress(InputRefused):  # The core says so.
                self._reflect(self._side_wire.push(audio)[0])
        if self.muted and isinstance(audio, str | bytes):
            audio = SILENCE[self._kind] * (len(audio) if isinstance(audio, bytes) else len(audio) * 3 // 4)
        self._core("input_audio_buffer.append", given, audio=audio)

    def _append(self, kind: str, event: dict[str, Any], given: str | None) -> None:
        """Context that comes in the middle; what is to be communicated is, when nobody speaks."""
        if kind == "session.instructions.append" and "instructions" in self._locked:
            raise locked_field("instructions", param="type")
        content = c.text(longest=16_384, shortest=1)(event.get("content"), "content")
        part = {"type": "input_text", "text": content}
        item = {"type": "message", "role": "system", "content": [part]}
        if not self._core("conversation.item.create", None, item=item):
            return  # The core has said why.
        self.say(f"{kind}ed", start_ms=self.now_ms, end_ms=self.now_ms, client_event_id=given)
        if kind == "session.commentary.append":
            self._wake()
            self._owes = True
            self._communicate()

    def _communicate(self) -> None:
        """Module rule 6."""
        if self._owes and not self._speaks and self.bridge.session.is_idle:
            self._owes = False
            self._core("response.create", None)

    def _core(self, kind: str, event_id: str | None, **fields: Any) -> bool:
        """An event for the core; whether it was taken."""
        event = {"type": kind, **fields, **({"event_id": event_id} if event_id else {})}
        return super().on_text(event)

    def farewell(self, reason: str) -> None:
        kind = "close_requested" if "client" in reason else "connection_lost"
        if "has lived" in reason:
            kind = "expired"
        usage: dict[str, float] = {"seconds": self.now_ms / 1000}
        if self.pause is not None:
            paused = int(self.pause.paused_s(clock.now()))
            usage |= {"active_seconds": int(usage["seconds"]) - paused, "paused_seconds": paused}
        self.say("session.closed", reason=kind, session=self.shown(), usage=usage)
        self.bridge.end("session_ended", reason, clock.now(), close_code=1000)
        self.bridge.events()  # Said already.


class LiveRoutes:
    def __init__(self, realtime: RealtimeRoutes) -> None:
        self._realtime = realtime
        self._sessions: dict[str, LiveVisit] = {}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/live/sessions", self.socket),
            web.post("/v1/live/sessions", self.call),
            web.get("/v1/live/sessions/{session}/attach", self.attach),
            web.post("/v1/live/sessions/{session}/hangup", self.hang_up),
            web.post("/v1/live/sessions/{session}/{act:accept|reject|refer|fork}", self.not_here),
        ]

    def _enter(self, request: web.Request) -> Key:
        self._realtime.door.check(request)
        return self._realtime.door.settings(request, model=self._realtime.served(request))

    async def socket(self, request: web.Request) -> web.StreamResponse:
        key = self._enter(request)
        socket = await upgrade(request)
        sink = SocketSink(socket)
        visit: LiveVisit | None = None
        try:
            first = await asyncio.wait_for(socket.receive(), FIRST_WITHIN_S)
            visit = await self._admit(_started(first), key, by_socket=True)
            visit.sinks.append(sink)
            self._open(visit)
            await self._listen(socket, visit)
        except TimeoutError:
            await sink.close(1008, f"session.start must come within {FIRST_WITHIN_S:g} s")
        except Fault as fault:
            error = {"type": fault.kind, "code": fault.code, "message": str(fault), "param": fault.param}
            sink.tell(_encoder.encode({"type": "error", "event_id": "event_1", "error": error}).decode())
            await sink.close(1008, fault.code)
        except Refused as refused:
            await turn_away(socket, refused)
        finally:
            # Whatever has happened, a bug of ours included: the session ends and nobody waits for its socket.
            if visit is not None:
                self._leave(visit)
                await visit.hang_up("the client closed its connection")
            await sink.close(1011, "an internal error ended the session")
        return socket

    async def _admit(self, start: dict[str, Any], key: Key, *, by_socket: bool) -> LiveVisit:
        settings = _settings_of(start, key)
        kind = settings.input_format
        form = (start.get("audio") or {}).get("format") or {}
        rate = form.get("rate", RATES[PCM]) if kind == PCM else RATES[kind]

        def make(number: SessionId, line: Line) -> LiveVisit:
            core = self._realtime.protocol(number, settings, key.locked, Transport.WEBRTC, input_rate=rate)
            frontend = self._realtime.frontend
            wire_rate = rate if by_socket else 0
            return LiveVisit(frontend, number, line, core, start=start, kind=kind, rate=wire_rate, locked=key.locked)

        return await self._realtime.frontend.admit(make)

    def _remember(self, visit: LiveVisit) -> None:
        """By its id; those that have ended are forgotten."""
        self._sessions = {k: v for k, v in self._sessions.items() if not v.bridge.session.closed}
        self._sessions[visit.live_id] = visit

    def _open(self, visit: LiveVisit) -> None:
        self._remember(visit)
        visit.open()
        self._begin(visit)

    def _begin(self, visit: LiveVisit) -> None:
        """What was said before the session, as its client tells it."""
        for item in visit._start.get("input") or ():
            visit._core("conversation.item.create", None, item=_item_of(item))

    async def _listen(self, socket: web.WebSocketResponse, visit: LiveVisit, *, by_side: bool = False) -> None:
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                await visit.hear(message.data, by_side=by_side)
            elif message.type is WSMsgType.BINARY:
                visit.refuse("invalid_frame", "A binary frame: events are JSON in text frames.")
            if visit.bridge.session.closed:
                return

    def _leave(self, visit: LiveVisit) -> None:
        self._sessions.pop(visit.live_id, None)
        self._realtime.frontend.leave(visit, "the client closed its connection")

    async def call(self, request: web.Request) -> web.StreamResponse:
        key = self._enter(request)
        body = await json_body(request)
        return await self._realtime.answers.once(
            request, lambda: self._call(key, body), content=[_encoder.encode(body)], now=clock.now()
        )

    async def _call(self, key: Key, body: Any) -> web.Response:
        transport = body.get("transport") if isinstance(body, dict) else None
        if not isinstance(transport, dict) or not isinstance(transport.get("sdp"), str):
            raise Refusal(400, "missing_required_parameter", "The body needs transport.sdp.", param="transport.sdp")
        start = _START(body.get("session"), "session")
        visit = await self._admit(start, key, by_socket=False)
        try:
            peer = await self._realtime.connect(visit, transport["sdp"], visit.live_id)
        except BaseException:
            self._realtime.frontend.leave(visit, "the call could not be made")
            raise
        self._remember(visit)
        self._begin(visit)
        answer = {"session": {"id": visit.live_id}, "transport": {"type": "webrtc", "sdp": peer.answer_sdp}}
        headers = {"Location": f"/v1/live/sessions/{visit.live_id}", **visit.view_header}
        return web.json_response(answer, status=201, headers=headers)

    async def attach(self, request: web.Request) -> web.StreamResponse:
        self._enter(request)
        visit = self._need(request)
        socket = await upgrade(request)
        sink = SocketSink(socket)
        if not visit.join(sink):
            await sink.close(1013, "too many connections watch this session already")
            return socket
        try:
            await self._listen(socket, visit, by_side=True)
        finally:
            visit.part(sink)
            await sink.close(1000, "")
        return socket

    async def hang_up(self, request: web.Request) -> web.Response:
        self._enter(request)
        visit = self._need(request)
        self._realtime.frontend.end(visit, "a client hung up")
        self._sessions.pop(visit.live_id, None)
        return web.Response(status=200)

    async def not_here(self, request: web.Request) -> web.Response:
        self._enter(request)
        raise Refusal(501, "not_supported", "Live sessions are not forked here, and there is no SIP trunk.")

    def _need(self, request: web.Request) -> LiveVisit:
        visit = self._sessions.get(request.match_info["session"])
        if visit is None or visit.bridge.session.closed:
            raise Refusal(404, "session_not_found", "There is no such Live session; it may have ended.")
        return visit


def _pause_of(start: dict[str, Any]) -> Pause | None:
    policy, after_s = start.get("wake_policy"), start.get("idle_timeout_s")
    if after_s is None:
        return None
    if policy is None:
        raise Fault(
            "missing_required_parameter", "A session that rests needs 'wake_policy'.", param="session.wake_policy"
        )
    return Pause(after_s=after_s, threshold=policy.get("vad_threshold", 0.5))


def _allows(allowed: Any, kind: str) -> bool:
    """Whether a data channel carries events of this type. `allowed`: "all", None, names, or selectors of them."""
    if allowed is None or allowed == "all":
        return True
    return any((one if isinstance(one, str) else one["type"]) == kind for one in allowed)


def _type_of(text: str) -> str:
    try:
        event = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return ""
    return str(event.get("type")) if isinstance(event, dict) else ""


def _id_of(value: object) -> str | None:
    return value[:512] if isinstance(value, str) else None


def _started(message: Any) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(message.data) if message.type is WSMsgType.TEXT else None
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        event = None
    if not isinstance(event, dict) or event.get("type") != "session.start":
        raise Fault("session_not_started", "The first event is session.start.", param="type")
    start: dict[str, Any] = _START(event.get("session"), "session")
    return start


def _settings_of(start: dict[str, Any], key: Key) -> Settings:
    """The session that its start asks for, within what its key allows. Raises Fault."""
    asked: dict[str, Any] = {}
    if start.get("instructions"):
        asked["instructions"] = start["instructions"]
    if start.get("audio"):
        form = start["audio"].get("format")
        asked["audio"] = {"input": {"format": {"type": form["type"]}}} if form else {}
    settings = key.settings.change({"type": "realtime", **asked}, locked=key.locked)
    # How turns are judged is not the client's here, whatever its key was made for.
    own = {"turn_detection": {"type": "semantic_vad"}, "transcription": {}}
    return settings.change({"audio": {"input": own}})


def _item_of(item: dict[str, Any]) -> dict[str, Any]:
    """A message as Live tells it (`_SAID`), as an item."""
    role = _ROLES[item["role"]]
    kind = "output_text" if role == "assistant" else "input_text"
    content = item["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


def _pieces(news: ReplyWords) -> list[str]:
    """The stretch of text of each word, white space included: their sum is the whole."""
    pieces, rest = [], news.text
    for word in news.words:
        end = rest.find(word.text) + len(word.text)
        pieces.append(rest[:end])
        rest = rest[end:]
    if pieces:
        pieces[-1] += rest
    return pieces
