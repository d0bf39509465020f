"""Sessions of the duplex dialect: opened by their client's first event, and taken up again after a broken connection.

1. One connection at a time: whoever resumes takes the session over, and the connection before is told so.
2. A session whose connection broke waits `GRACE_S`; then it ends like any other that was left.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import WSMsgType, web

from duplexd.webrtc.frontend import Refused
from duplexd.webrtc.realtime.duplex import (
    GRACE_S,
    DuplexConfig,
    Inbound,
    Outbound,
    Replay,
    settings_of,
    token_matches,
)
from duplexd.webrtc.realtime.faults import Fault
from duplexd.webrtc.realtime.secrets import Key
from duplexd.webrtc.realtime.session import Transport
from duplexd.webrtc.realtime.unpack import event_of
from duplexd.webrtc.realtime.visit import RealtimeVisit, SocketSink, turn_away

if TYPE_CHECKING:
    from duplexd.webrtc.realtime.routes import RealtimeRoutes

FIRST_WITHIN_S = 30.0
_encoder = msgspec.json.Encoder()


class DuplexSession:
    """One session, with or without a connection."""

    def __init__(self, visit: RealtimeVisit, config: DuplexConfig) -> None:
        self.visit = visit
        self.session_id = f"duplex_{secrets.token_urlsafe(12)}"
        self.token = secrets.token_urlsafe(24)
        self.replay = Replay()
        self.inbound = Inbound(config)
        self._ignored = config.ignored
        self.sink: SocketSink | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self._outbound = Outbound(session_id=self.session_id)
        visit.render = self._render

    def about(self) -> dict[str, Any]:
        own = {"id": self.session_id, "session_id": self.session_id, "resume_token": self.token}
        shown = self.visit.bridge.session.shown()
        return {**shown, **own, "duplexd": {**shown["duplexd"], "ignored": self._ignored}}

    def _render(self, event: dict[str, Any]) -> list[str]:
        if event["type"] in ("session.created", "session.updated"):
            event = {**event, "session": self.about(), "resume_token": self.token}
        return [self.replay.add(told) for told in self._outbound.translate(event)]

    def tell(self, kind: str, **fields: Any) -> None:
        """An event of the dialect that the protocol has no word for."""
        text = self.replay.add({"type": kind, "session_id": self.session_id, **fields})
        for sink in self.visit.sinks:
            sink.tell(text)

    def attach(self, sink: SocketSink) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None
        self.sink, self.visit.detached = sink, False
        self.visit.sinks[:] = [sink]

    def detach(self) -> None:
        self.sink, self.visit.detached = None, True
        self.visit.sinks.clear()


class DuplexSessions:
    """All of them, by id."""

    def __init__(self, realtime: RealtimeRoutes) -> None:
        self._realtime = realtime
        self._sessions: dict[str, DuplexSession] = {}

    async def serve(self, socket: web.WebSocketResponse, *, key: Key) -> None:
        """One connection, from its first event to its end."""
        sink = SocketSink(socket)
        try:
            first = await asyncio.wait_for(_first(socket), FIRST_WITHIN_S)
            session = self._resume(first, sink) if first.get("type") == "session.resume" else None
            if session is None:
                session = await self._begin(first, sink, key)
            await self._converse(socket, session, sink)
        except TimeoutError:
            await sink.close(1008, f"the first event must come within {FIRST_WITHIN_S:g} s")
        except Fault as fault:
            error = {"type": fault.kind, "code": fault.code, "message": str(fault), "param": fault.param}
            sink.tell(_encoder.encode({"type": "error", "error": error}).decode())
            await sink.close(1008, fault.code)
        except Refused as refused:
            await turn_away(socket, refused)
        finally:
            await sink.close(1011, "the connection has ended")

    async def _converse(self, socket: web.WebSocketResponse, session: DuplexSession, sink: SocketSink) -> None:
        """Everything the client says. A session that fails of itself ends; one whose connection broke is kept."""
        closed = True
        try:
            closed = await self._listen(socket, session)
        finally:
            if closed or session.visit.bridge.session.closed:
                await self._end(session, "the client closed its session")
            elif session.sink is sink:
                self._keep(session)

    async def _begin(self, first: dict[str, Any], sink: SocketSink, key: Key) -> DuplexSession:
        if first.get("type") != "session.update":
            raise Fault("invalid_value", "The first event is session.update or session.resume.", param="type")
        settings, config = settings_of(first.get("session"), key)
        visit = await self._realtime.frontend.admit(
            lambda number, line: self._realtime.core(
                number, line, settings, key.locked, Transport.WEBSOCKET, input_rate=config.rate_in
            )
        )
        session = DuplexSession(visit, config)
        self._sessions = {k: s for k, s in self._sessions.items() if not s.visit.bridge.session.closed}
        self._sessions[session.session_id] = session
        try:
            session.attach(sink)
            visit.open()
        except BaseException:
            await self._end(session, "it could not be opened")
            raise
        return session

    def _resume(self, first: dict[str, Any], sink: SocketSink) -> DuplexSession:
        session = self._sessions.get(str(first.get("session_id")))
        if session is None or session.visit.bridge.session.closed:
            raise Fault("session_resume_expired", "There is no such session any more; begin a new one.")
        if not token_matches(first.get("resume_token"), session.token):
            raise Fault("invalid_resume_token", "The token is not this session's.")
        seq = first.get("last_received_server_event_seq", 0)
        missed = session.replay.since(seq) if isinstance(seq, int) else None
        before = session.sink
        if before is not None:
            before.tell(_encoder.encode({"type": "session.replaced", "session_id": session.session_id}).decode())
            task = asyncio.get_running_loop().create_task(before.close(1000, "another connection took over"))
            session.visit.ending = task
        session.attach(sink)
        resumed = {"type": "session.resumed", "session": session.about(), "resume_token": session.token}
        sink.tell(_encoder.encode(resumed).decode())
        if missed is None:
            said = "Events since then are not kept any more; ask for what you need."
            sink.tell(_encoder.encode({"type": "session.resync_required", "message": said}).decode())
        for text in missed or ():
            sink.tell(text)
        return session

    async def _listen(self, socket: web.WebSocketResponse, session: DuplexSession) -> bool:
        """Whether the client closed the session, not only its connection."""
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                session.visit.refuse("invalid_frame", "A binary frame: events are JSON in text frames.")
            elif message.type is WSMsgType.TEXT and self._take(session, await session.visit.unpack(message.data)):
                return True
            if session.visit.bridge.session.closed:
                return True
        return False

    def _take(self, session: DuplexSession, text: str | dict[str, Any]) -> bool:
        """One event; True when it closes the session."""
        event = event_of(text, longest=session.visit.event_bytes_max)
        if event is None:
            session.visit.on_text(text)  # The core says what is wrong with it.
            return False
        kind = event.get("type")
        if kind == "session.close":
            session.tell("session.closed", reason="closed by the client")
            return True
        if kind == "session.event_ack":
            seq = event.get("server_event_seq")
            if isinstance(seq, int):
                session.replay.acknowledge(seq)
            return False
        try:
            translated = session.inbound.translate(event)
        except Fault as fault:
            given = event.get("event_id")
            event_id = given[:512] if isinstance(given, str) else None
            session.visit.refuse(fault.code, str(fault), event_id=event_id, param=fault.param)
            return False
        for one in translated:
            if not session.visit.on_text(one):
                break  # What was to follow, an answer, would be one to nothing.
        return False

    def _keep(self, session: DuplexSession) -> None:
        """The connection broke: the session waits for another one."""
        session.detach()
        loop = asyncio.get_running_loop()
        session.expiry = loop.call_later(GRACE_S, lambda: loop.create_task(self._end(session, "nobody resumed it")))

    async def _end(self, session: DuplexSession, reason: str) -> None:
        self._sessions.pop(session.session_id, None)
        self._realtime.frontend.leave(session.visit, reason)
        await session.visit.hang_up(reason)


async def _first(socket: web.WebSocketResponse) -> dict[str, Any]:
    message = await socket.receive()
    if message.type is not WSMsgType.TEXT:
        raise Fault("invalid_frame", "The first frame is an event: JSON as text.")
    try:
        event = msgspec.json.decode(message.data)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise Fault("invalid_json", f"The event is not JSON: {error}.") from error
    if not isinstance(event, dict):
        raise Fault("invalid_event", "An event is a JSON object.")
    return event
