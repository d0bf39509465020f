"""HTTP of the Realtime protocol.

GET  /v1/realtime?model=M           WebSocket: a session
GET  /v1/realtime?call_id=rtc_...   WebSocket: joins a call (sideband)
POST /v1/realtime/calls             SDP in, SDP out: a call
POST /v1/realtime/calls/ID/hangup   ends it
POST /v1/realtime/client_secrets    a short-lived secret
GET  /v1/models                     the model that is served

1. Errors are {"error": {"message", "type", "code", "param"}} with the status that says so; 429 and 503 say when to come
   again. After the upgrade of a WebSocket they are an `error` event and a close code.
2. A browser's page of another origin is served only when the configuration names it, WebSockets included.
3. No token, secret or sound is ever logged.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import WSMsgType, web

from duplexd import clock
from duplexd.errors import InputRefused
from duplexd.ids import SessionId
from duplexd.media.line import Line
from duplexd.units import Nanos
from duplexd.webrtc.frontend import Frontend, Refused, shortage_of
from duplexd.webrtc.peer import Peer
from duplexd.webrtc.realtime.broadcast import BroadcastRoutes
from duplexd.webrtc.realtime.faults import Fault
from duplexd.webrtc.realtime.idempotency import Answers
from duplexd.webrtc.realtime.limits import Bucket, Limits
from duplexd.webrtc.realtime.live import LiveRoutes
from duplexd.webrtc.realtime.requests import (
    ANSWERING,
    Refusal,
    bearer,
    json_body,
    read_body,
    read_form,
    upgrade,
)
from duplexd.webrtc.realtime.resume import DuplexSessions
from duplexd.webrtc.realtime.secrets import Doorkeeper, Key
from duplexd.webrtc.realtime.session import RealtimeSession, Transport
from duplexd.webrtc.realtime.settings import Settings
from duplexd.webrtc.realtime.visit import (
    CHANNEL,
    CHANNEL_BYTES_MAX,
    CHANNEL_GRACE,
    VIEW_HEADER,
    ChannelSink,
    RealtimeVisit,
    SocketSink,
    turn_away,
)

ADDRESSES_MAX = 4096  #: addresses whose rate is remembered
CALL_BYTES_MAX = 1024 * 1024  #: an offer and a session together
ALLOWED_HEADERS = (
    "authorization, content-type, idempotency-key, openai-beta, openai-organization, openai-project, "
    "x-openai-agents-sdk, "
    "x-stainless-arch, x-stainless-lang, x-stainless-os, x-stainless-package-version, x-stainless-retry-count, "
    "x-stainless-runtime, x-stainless-runtime-version, x-stainless-timeout, user-agent"
)
GONE = "/v1/realtime/sessions and /v1/realtime/transcription_sessions are of the beta; use /v1/realtime/client_secrets"

log = logging.getLogger("duplexd.realtime")


class Door:
    """Who may come in, from where, and how often."""

    def __init__(self, frontend: Frontend) -> None:
        self.config = frontend.config
        self.keeper = Doorkeeper(self.config.token)
        self._rates: OrderedDict[str, Bucket] = OrderedDict()

    def check(self, request: web.Request) -> None:
        """Origin and rate. Raises Refusal."""
        self.check_origin(request)
        address = request.remote or ""
        bucket = self._rates.pop(address, None)
        if bucket is None:
            per_minute = self.config.requests_per_minute
            bucket = Bucket(per_second=per_minute / 60, burst=per_minute)
        self._rates[address] = bucket
        if len(self._rates) > ADDRESSES_MAX:
            self._rates.popitem(last=False)
        if not bucket.take(clock.now()):
            said = f"More than {self.config.requests_per_minute:g} requests a minute from this address; try later."
            raise Refusal(429, "rate_limit_exceeded", said, kind="rate_limit_error")

    def check_origin(self, request: web.Request) -> None:
        """A page on the web must not talk to a daemon on its reader's machine; no preflight guards a WebSocket."""
        origin = request.headers.get("Origin", "")
        if not origin or self.allows(origin) or urlsplit(origin).netloc == request.host:
            return
        said = f"Pages of {origin[:200]} may not use this daemon; add the origin to cors_origins to allow it."
        raise Refusal(403, "origin_not_allowed", said)

    def allows(self, origin: str) -> bool:
        return "*" in self.config.cors_origins or origin in self.config.cors_origins

    def settings(self, request: web.Request, *, model: str) -> Key:
        """The session that the key stands for, and what its holder may not change. Raises Refusal (401)."""
        given = bearer(request)
        secret = self.keeper.secret(given, wall=clock.wall_seconds())
        if secret is not None:
            return Key(secret.settings, secret.locked)
        self.need_master(given)
        return Key(Settings.default(model=model), frozenset())

    def need_master(self, given: str) -> None:
        if not self.keeper.is_master(given):
            said = "Incorrect API key provided: this daemon asks for its token, or a client secret made with it."
            raise Refusal(401, "invalid_api_key", said)


DOOR = web.AppKey("door", Door)


@web.middleware
async def refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Typed errors and CORS for everything under /v1."""
    if not request.path.startswith("/v1/"):
        return await handler(request)
    try:
        answer = await handler(request)
    except Exception as error:
        if request.get(ANSWERING):
            raise  # An answer has begun, and a second one cannot follow: the connection breaks, by aiohttp.
        answer = _refusal_of(error).answer()
    _allow(request, answer)
    return answer


def _refusal_of(error: Exception) -> Refusal:
    match error:
        case Refusal():
            return error
        case Refused():
            return Refusal(error.status, error.code, str(error), more=shortage_of(error))
        case Fault():
            return Refusal(400, error.code, str(error), param=error.param)
        case InputRefused():
            return Refusal(400, "bad_offer", str(error), param="sdp")
        case web.HTTPException():
            return Refusal(error.status, "http", error.text or error.reason)
    log.error("a request failed", exc_info=error)
    return Refusal(500, "internal_error", "An internal error: the daemon's log has it.")


def _allow(request: web.Request, answer: web.StreamResponse) -> None:
    origin = request.headers.get("Origin", "")
    configured = request.app[DOOR].allows(origin) if origin else False
    if configured and not answer.prepared:
        answer.headers["Access-Control-Allow-Origin"] = origin
        answer.headers["Access-Control-Expose-Headers"] = f"Link, Location, {VIEW_HEADER}"
        answer.headers["Vary"] = "Origin"


class RealtimeRoutes:
    """The protocol over one front end."""

    def __init__(self, frontend: Frontend, door: Door) -> None:
        self.frontend = frontend
        self.door = door
        self.calls: dict[str, RealtimeVisit] = {}
        self.answers = Answers()
        self.duplex = DuplexSessions(self)

    def routes(self) -> list[web.AbstractRouteDef]:
        return [
            web.get("/v1/realtime", self.realtime),
            web.post("/v1/realtime/calls", self.call),
            web.post("/v1/realtime/calls/{call_id}/hangup", self.hang_up),
            web.post("/v1/realtime/calls/{call_id}/{act:accept|reject|refer}", self.no_sip),
            web.post("/v1/realtime/client_secrets", self.client_secret),
            web.post("/v1/realtime/{old:sessions|transcription_sessions}", self.gone),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model}", self.model),
            *LiveRoutes(self).routes(),
            *BroadcastRoutes(self).routes(),
            web.options("/v1/{rest:.*}", self.preflight),
        ]

    # Sessions ---------------------------------------------------------------------------------------------------------

    def core(
        self,
        session: SessionId,
        line: Line,
        settings: Settings,
        locked: frozenset[str],
        transport: Transport,
        *,
        input_rate: int = 0,
    ) -> RealtimeVisit:
        """A session whose protocol has not begun."""
        protocol = self.protocol(session, settings, locked, transport, input_rate=input_rate)
        return RealtimeVisit(self.frontend, session, line, protocol)

    def protocol(
        self,
        session: SessionId,
        settings: Settings,
        locked: frozenset[str],
        transport: Transport,
        *,
        input_rate: int = 0,
    ) -> RealtimeSession:
        """The core alone."""
        ready = self.frontend.supervisor.ready
        assert ready is not None
        config = self.frontend.config
        limits = Limits(responses_per_minute=config.requests_per_minute, life_s=config.session_life_s)
        life = config.session_life_s
        return RealtimeSession(
            session=session,
            settings=settings,
            transport=transport,
            rate=ready.sample_rate,
            takes=tuple(modality.value for modality in ready.takes),
            limits=limits,
            locked=locked,
            public_id=f"sess_{secrets.token_urlsafe(12)}",
            expires_at=round(clock.wall_seconds() + life) if life else None,
            input_rate=input_rate,
        )

    def served(self, request: web.Request) -> str:
        """The name of the model: whatever a client calls it, there is one."""
        ready = self.frontend.supervisor.ready
        return ready.model if ready is not None else self.frontend.config.model

    async def realtime(self, request: web.Request) -> web.StreamResponse:
        self.door.check(request)
        settings, locked = self.door.settings(request, model=self.served(request))
        if request.query.get("intent") == "transcription":
            settings = settings.as_kind("transcription")
        if request.query.get("duplex") == "1":
            socket = await upgrade(request)
            await self.duplex.serve(socket, key=Key(settings, locked))
            return socket
        call_id = request.query.get("call_id")
        if call_id is not None:
            return await self._sideband(request, call_id)
        socket = await upgrade(request)
        try:
            visit = await self.frontend.admit(
                lambda session, line: self.core(session, line, settings, locked, Transport.WEBSOCKET)
            )
        except Refused as refused:
            await turn_away(socket, refused)
            return socket
        try:
            visit.sinks.append(SocketSink(socket))
            visit.open()
            await self._listen(socket, visit)
        finally:
            # Whatever has happened, a bug of ours included: nothing of a session outlives its socket.
            self.frontend.leave(visit, "the client closed its connection")
            await visit.hang_up("the client closed its connection")
        return socket

    async def _sideband(self, request: web.Request, call_id: str) -> web.StreamResponse:
        visit = self.calls.get(call_id)
        if visit is None:
            raise Refusal(404, "call_not_found", f"There is no call '{call_id[:80]}'.", param="call_id")
        socket = await upgrade(request)
        sink = SocketSink(socket)
        if not visit.join(sink):
            await sink.close(1013, "too many connections watch this call already")
            return socket
        try:
            await self._listen(socket, visit)
        finally:
            visit.part(sink)
            await sink.close(1000, "the call has ended" if visit.finished.is_set() else "")
        return socket

    async def _listen(self, socket: web.WebSocketResponse, visit: RealtimeVisit) -> None:
        """Everything the client says, until it or the session ends."""
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                visit.on_text(await visit.unpack(message.data))
            elif message.type is WSMsgType.BINARY:
                visit.refuse("invalid_frame", "A binary frame: events are JSON in text frames.")
            if visit.bridge.session.closed:
                break

    async def call(self, request: web.Request) -> web.StreamResponse:
        self.door.check(request)
        # Asked for before the offer is read: strangers bring nothing in.
        key = self.door.settings(request, model=self.served(request))
        offer, session = await _call_of(request)
        content = (offer, msgspec.json.encode(session))
        return await self.answers.once(
            request, lambda: self._call(key, offer, session), content=content, now=clock.now()
        )

    async def _call(self, key: Key, offer: str, session: Any) -> web.Response:
        settings, locked = key
        if session is not None:
            settings = settings.change(session, locked=locked)
        visit = await self.frontend.admit(
            lambda number, line: self.core(number, line, settings, locked, Transport.WEBRTC)
        )
        call_id = f"rtc_{secrets.token_urlsafe(18)}"
        try:
            peer = await self.connect(visit, offer, call_id)
        except BaseException:
            self.frontend.leave(visit, "the call could not be made")
            raise
        self.calls[call_id] = visit
        headers = {"Location": f"/v1/realtime/calls/{call_id}", **visit.view_header}
        return web.Response(status=201, text=peer.answer_sdp, content_type="application/sdp", headers=headers)

    async def connect(self, visit: RealtimeVisit, offer: str, call_id: str) -> Peer:
        """Answer the offer of a call and begin its protocol."""

        def closed(reason: str) -> None:
            self.calls.pop(call_id, None)
            self.frontend.leave(visit, reason)
            task = asyncio.ensure_future(visit.hang_up(reason))
            visit.ending = task

        config = msgspec.structs.replace(
            self.frontend.peer_config(),
            labels=(CHANNEL,),
            heartbeat_ns=Nanos(0),
            one_stream=True,
            message_bytes_max=CHANNEL_BYTES_MAX,
            channel_grace_ns=CHANNEL_GRACE,
        )
        visit.view = self.frontend.view(visit.session, visit.line)
        peer = await Peer.accept(
            offer,
            config=config,
            on_audio=visit.on_audio,
            pull_audio=visit.pull,
            on_message=visit.on_message,
            on_closed=closed,
            sight=self.frontend.sight(visit.view),
        )
        if visit.session not in self.frontend.visits:
            await peer.close("the session has ended")
            raise Refused(503, "loading", "the engine restarted meanwhile; try again in a few seconds")
        visit.peer, visit.call_id = peer, call_id
        visit.sinks.append(ChannelSink(lambda: visit.peer))
        visit.open()
        return peer

    async def hang_up(self, request: web.Request) -> web.Response:
        self.door.check(request)
        self.door.settings(request, model="")
        visit = self.calls.pop(request.match_info["call_id"], None)
        if visit is None:
            raise Refusal(404, "call_not_found", "There is no such call; it may have ended already.", param="call_id")
        self.frontend.hang_up(visit.session)
        return web.Response(status=200)

    async def no_sip(self, request: web.Request) -> web.Response:
        raise Refusal(501, "sip_not_supported", "Calls come by WebRTC here; there is no SIP trunk to accept from.")

    async def gone(self, request: web.Request) -> web.Response:
        raise Refusal(410, "beta_endpoint_gone", GONE)

    # Secrets and models -----------------------------------------------------------------------------------------------

    async def client_secret(self, request: web.Request) -> web.StreamResponse:
        self.door.check(request)
        self.door.need_master(bearer(request))
        body = await json_body(request)

        async def make() -> web.Response:
            return self._make_secret(request, body)

        return await self.answers.once(request, make, content=[msgspec.json.encode(body)], now=clock.now())

    def _make_secret(self, request: web.Request, body: Any) -> web.Response:
        secret = self.door.keeper.make(body, model=self.served(request), wall=clock.wall_seconds())
        session = {"id": f"sess_{secrets.token_urlsafe(12)}", **secret.settings.values}
        session["expires_at"] = round(secret.expires_at)
        session.pop("duplexd")
        shown = {name: value for name, value in session.items() if value is not None}
        return web.json_response({"value": secret.value, "expires_at": round(secret.expires_at), "session": shown})

    async def models(self, request: web.Request) -> web.Response:
        self.door.check(request)
        self.door.settings(request, model="")
        return web.json_response({"object": "list", "data": [_model(self.served(request))]})

    async def model(self, request: web.Request) -> web.Response:
        self.door.check(request)
        self.door.settings(request, model="")
        name = request.match_info["model"]
        if name != self.served(request):
            said = f"The model '{name[:80]}' is not served here; '{self.served(request)}' is."
            raise Refusal(404, "model_not_found", said, param="model")
        return web.json_response(_model(name))

    async def preflight(self, request: web.Request) -> web.Response:
        origin = request.headers.get("Origin", "")
        if not self.door.allows(origin):
            raise Refusal(403, "origin_not_allowed", f"Pages of {origin[:200]} may not use this daemon (cors_origins).")
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, PATCH, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": ALLOWED_HEADERS,
            "Access-Control-Max-Age": "600",
        }
        return web.Response(status=204, headers=headers)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "duplexd"}


async def _call_of(request: web.Request) -> tuple[str, Any]:
    """(offer, session) of a call: SDP alone, or a form with `sdp` and `session`. Raises Refusal."""
    kind = request.content_type
    if kind == "application/sdp":
        return _text(await read_body(request, bytes_max=CALL_BYTES_MAX), "sdp"), None
    if kind == "application/json":
        body = await json_body(request, bytes_max=CALL_BYTES_MAX)
        if not isinstance(body, dict) or not isinstance(body.get("sdp"), str):
            raise Refusal(400, "missing_required_parameter", "The body needs 'sdp'.", param="sdp")
        return body["sdp"], body.get("session")
    if kind != "multipart/form-data":
        said = "Send the offer as application/sdp, or as multipart/form-data with the parts 'sdp' and 'session'."
        raise Refusal(415, "unsupported_media_type", said)
    parts = await read_form(request, bytes_max=CALL_BYTES_MAX)
    if "sdp" not in parts:
        raise Refusal(400, "missing_required_parameter", "The form needs a part 'sdp'.", param="sdp")
    session = None
    if "session" in parts:
        try:
            session = msgspec.json.decode(parts["session"])
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise Refusal(400, "invalid_json", f"The part 'session' is not JSON: {error}.", param="session") from error
    return _text(parts["sdp"], "sdp"), session


def _text(data: bytes, param: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Refusal(400, "invalid_value", f"'{param}' is not UTF-8: {error.reason}.", param=param) from error
