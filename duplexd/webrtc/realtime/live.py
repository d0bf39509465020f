"""The Live surface: a session without turns. Sound in, sound out, what was said on both sides, and nothing to ask for.

GET  /v1/live/sessions             WebSocket; the first event is `session.start`
POST /v1/live/sessions             {"session", "transport": {"type": "webrtc", "sdp"}} -> the same with an answer
GET  /v1/live/sessions/ID/attach   WebSocket: joins (sideband)
POST /v1/live/sessions/ID/hangup   ends it

1. Underneath is a session of the Realtime core with its own judge of turns; what it says of responses is left out.
2. A client of this surface plays what it gets, in order, and throws nothing away. So sound leaves as it is to be heard,
   20 ms at a time, and a hold or an interruption is silence that simply begins.
3. Words are told when their sound has left, with their place in the session's time.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import WSMsgType, web

from duplexd import clock
from duplexd.ids import SessionId
from duplexd.media.line import Line
from duplexd.media.playout import FRAME
from duplexd.messages import AdvanceEpoch, ReplyWords, TurnOutcome, TurnSettled
from duplexd.units import NANOS_PER_SECOND, Nanos, Ticks, ms_from_ticks
from duplexd.webrtc.frontend import Frontend, Refused
from duplexd.webrtc.realtime import check as c
from duplexd.webrtc.realtime.faults import Fault, invalid
from duplexd.webrtc.realtime.formats import ALAW, PCM, ULAW, WireOut, base64_of
from duplexd.webrtc.realtime.requests import Refusal, json_body, upgrade
from duplexd.webrtc.realtime.session import RealtimeSession, Transport
from duplexd.webrtc.realtime.settings import Settings
from duplexd.webrtc.realtime.visit import RealtimeVisit, Sink, SocketSink, turn_away

if TYPE_CHECKING:
    from duplexd.webrtc.realtime.routes import RealtimeRoutes

FIRST_WITHIN_S = 30.0
LIFE_SHOWN_S = 24 * 3600  #: a session without an end shows one a day away
WORDS_WAITING_MAX = 512
_encoder = msgspec.json.Encoder()
_START = c.fields(
    {
        "model": c.text(longest=128),
        "instructions": c.nullable(c.text(longest=32_768)),
        "audio": c.nullable(
            c.fields(
                {
                    "format": c.nullable(
                        c.fields({"type": c.one_of(PCM, ULAW, ALAW), "rate": c.one_of(8000, 16_000, 24_000)})
                    ),
                    "output": c.nullable(c.fields({"voice": c.anything})),
                }
            )
        ),
        "input": c.nullable(c.many(c.anything, most=128)),
        "client": c.anything,
        "delegation": c.anything,
        "safety_identifier": c.nullable(c.text(longest=512)),
        "store": c.nullable(c.one_of(False)),
        "triggers": c.nullable(c.many(c.anything, most=0)),
    },
    required=("model",),
)


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
    ) -> None:
        self.by_socket = rate > 0
        super().__init__(owner, session, line, core, fed=self.by_socket)
        self.live_id = f"live_{secrets.token_urlsafe(12)}"
        self.muted = False
        self.render = self._render
        self._start = start
        kind = ((start.get("audio") or {}).get("format") or {}).get("type", PCM)
        self._wire_out = WireOut(kind, rate=line.playout.rate, wire_rate=rate) if self.by_socket else None
        self._opened = clock.now()
        self._next = 0
        self._events = 0
        self._words: deque[Spoken] = deque(maxlen=WORDS_WAITING_MAX)

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
        text = self.event(kind, **fields)
        for sink in list(self.sinks):
            sink.tell(text)

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
            case TurnSettled():
                if news.outcome is TurnOutcome.TAKEN and news.text:
                    start, end = (round(self.bridge.input_ms(at)) for at in (news.span.start, news.span.end))
                    self.say("session.input_transcript.delta", delta=f"{news.text} ", start_ms=start, end_ms=end)
        super().take(news)

    def tick(self, now: Nanos) -> None:
        super().tick(now)
        if self.by_socket:
            self._play(now)
        self._tell_words()

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
                    sink.tell(text)

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

    def on_text(self, text: str | bytes) -> None:
        try:
            event = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            event = None
        if not isinstance(event, dict):
            super().on_text(text)  # The core says what is wrong with it.
            return
        try:
            self._hear(event)
        except Fault as fault:
            given = _id_of(event.get("event_id"))
            error = {"type": fault.kind, "code": fault.code, "message": str(fault), "param": fault.param}
            error["client_event_id"] = given or ""
            self.say("error", error={k: v for k, v in error.items() if v}, client_event_id=given)

    def _hear(self, event: dict[str, Any]) -> None:
        kind, given = event.get("type"), _id_of(event.get("event_id"))
        match kind:
            case "session.input_audio.append":
                if not self.muted:
                    self._core("input_audio_buffer.append", given, audio=event.get("audio"))
            case "session.input_audio.mute" | "session.input_audio.unmute":
                self.muted = kind.endswith(".mute")
                if self.muted:
                    self._core("input_audio_buffer.clear", None)
                self.say(f"{kind}d", client_event_id=given)
            case "session.instructions.append" | "session.thinking.append" | "session.commentary.append":
                self._append(kind, event, given)
            case "session.close":
                self._owner.end(self, "the client closed its session")
            case "session.update":
                self.say("session.updated", session=self.shown(), client_event_id=given)
            case _:
                raise invalid("type", str(kind)[:80], "session.input_audio.append, .mute, .unmute, session.close, ...")

    def _append(self, kind: str, event: dict[str, Any], given: str | None) -> None:
        """Context that comes in the middle; what is to be communicated is, when nobody speaks."""
        content = c.text(longest=16_384, shortest=1)(event.get("content"), "content")
        part = {"type": "input_text", "text": content}
        self._core("conversation.item.create", None, item={"type": "message", "role": "system", "content": [part]})
        if kind == "session.commentary.append":
            self._core("response.create", None)
        self.say(f"{kind}ed", start_ms=self.now_ms, end_ms=self.now_ms, client_event_id=given)

    def _core(self, kind: str, event_id: str | None, **fields: Any) -> None:
        event = {"type": kind, **fields, **({"event_id": event_id} if event_id else {})}
        super().on_text(_encoder.encode(event))

    def farewell(self, reason: str) -> None:
        kind = "close_requested" if "client" in reason else "connection_lost"
        if "has lived" in reason:
            kind = "expired"
        usage = {"seconds": self.now_ms / 1000}
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
        ]

    def _enter(self, request: web.Request) -> None:
        self._realtime.door.check(request)
        self._realtime.door.settings(request, model="")

    async def socket(self, request: web.Request) -> web.StreamResponse:
        self._enter(request)
        socket = await upgrade(request)
        sink = SocketSink(socket)
        try:
            first = await asyncio.wait_for(socket.receive(), FIRST_WITHIN_S)
            start = _started(first)
            visit = await self._admit(start, by_socket=True)
        except TimeoutError:
            await sink.close(1008, f"session.start must come within {FIRST_WITHIN_S:g} s")
            return socket
        except Fault as fault:
            error = {"type": fault.kind, "code": fault.code, "message": str(fault), "param": fault.param}
            sink.tell(_encoder.encode({"type": "error", "event_id": "event_1", "error": error}).decode())
            await sink.close(1008, fault.code)
            return socket
        except Refused as refused:
            await turn_away(socket, refused)
            return socket
        visit.sinks.append(sink)
        self._open(visit)
        await self._listen(socket, visit)
        self._leave(visit)
        await visit.hang_up("the client closed its connection")
        return socket

    async def _admit(self, start: dict[str, Any], *, by_socket: bool) -> LiveVisit:
        form = (start.get("audio") or {}).get("format") or {"type": PCM, "rate": 24_000}
        rate = form.get("rate", 24_000) if form["type"] == PCM else 8000
        wanted = {
            "type": "realtime",
            "instructions": start.get("instructions") or "",
            "audio": {
                "input": {
                    "format": {"type": form["type"]},
                    "turn_detection": {"type": "semantic_vad"},
                    "transcription": {},
                }
            },
        }
        settings = Settings.default(model=start["model"]).change(wanted)

        def make(number: SessionId, line: Line) -> LiveVisit:
            core = self._realtime.protocol(number, settings, frozenset(), Transport.WEBRTC, input_rate=rate)
            frontend = self._realtime.frontend
            return LiveVisit(frontend, number, line, core, start=start, rate=rate if by_socket else 0)

        return await self._realtime.frontend.admit(make)

    def _open(self, visit: LiveVisit) -> None:
        self._sessions = {k: v for k, v in self._sessions.items() if not v.bridge.session.closed}
        self._sessions[visit.live_id] = visit
        visit.open()
        self._begin(visit)

    def _begin(self, visit: LiveVisit) -> None:
        """What was said before the session, as its client tells it."""
        for item in visit._start.get("input") or ():
            visit._core("conversation.item.create", None, item=_item_of(item))

    async def _listen(self, socket: web.WebSocketResponse, visit: LiveVisit) -> None:
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                visit.on_text(message.data)
            elif message.type is WSMsgType.BINARY:
                visit.refuse("invalid_frame", "A binary frame: events are JSON in text frames.")
            if visit.bridge.session.closed:
                return

    def _leave(self, visit: LiveVisit) -> None:
        self._sessions.pop(visit.live_id, None)
        self._realtime.frontend.leave(visit, "the client closed its connection")

    async def call(self, request: web.Request) -> web.Response:
        self._enter(request)
        body = await json_body(request)
        transport = body.get("transport") if isinstance(body, dict) else None
        if not isinstance(transport, dict) or not isinstance(transport.get("sdp"), str):
            raise Refusal(400, "missing_required_parameter", "The body needs transport.sdp.", param="transport.sdp")
        start = _START(body.get("session"), "session")
        visit = await self._admit(start, by_socket=False)
        try:
            peer = await self._realtime.connect(visit, transport["sdp"], visit.live_id)
        except BaseException:
            self._realtime.frontend.leave(visit, "the call could not be made")
            raise
        self._sessions[visit.live_id] = visit
        self._begin(visit)
        answer = {"session": {"id": visit.live_id}, "transport": {"type": "webrtc", "sdp": peer.answer_sdp}}
        return web.json_response(answer, status=201, headers={"Location": f"/v1/live/sessions/{visit.live_id}"})

    async def attach(self, request: web.Request) -> web.StreamResponse:
        self._enter(request)
        visit = self._need(request)
        socket = await upgrade(request)
        sink: Sink = SocketSink(socket)
        sink.tell(visit.event("session.started", session=visit.shown()))
        visit.sinks.append(sink)
        await self._listen(socket, visit)
        visit.part(sink)
        await sink.close(1000, "")
        return socket

    async def hang_up(self, request: web.Request) -> web.Response:
        self._enter(request)
        visit = self._need(request)
        self._realtime.frontend.end(visit, "a client hung up")
        self._sessions.pop(visit.live_id, None)
        return web.Response(status=200)

    def _need(self, request: web.Request) -> LiveVisit:
        visit = self._sessions.get(request.match_info["session"])
        if visit is None or visit.bridge.session.closed:
            raise Refusal(404, "session_not_found", "There is no such Live session; it may have ended.")
        return visit


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


def _item_of(item: Any) -> dict[str, Any]:
    """A message as Live tells it, as an item."""
    if not isinstance(item, dict) or item.get("role") not in ("developer", "user", "assistant"):
        raise invalid("session.input", item, "messages of developer, user, assistant")
    role = "system" if item["role"] == "developer" else item["role"]
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [
        {"type": kind, "text": str(part.get("text", ""))} for part in item.get("content", ()) if isinstance(part, dict)
    ]
    return {"type": "message", "role": role, "content": parts}


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
