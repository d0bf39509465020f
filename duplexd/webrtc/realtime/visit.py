"""One session of the Realtime protocol in the front end: a bridge, and whoever listens to its events.

1. The first sink is the client's own; others (sideband) may join and leave, and their leaving ends nothing.
2. A sink that does not read is told nothing more and closed; generation stops before that (`ClientStalled`), but for
   nobody else's slowness than the client's own.
3. Whoever offers a video line is shown the face, from the moment its media path is up; for nobody else one is made.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd import clock
from duplexd.ids import SessionId
from duplexd.media.lateness import Lateness
from duplexd.media.line import Block, Line, way_by_reports
from duplexd.messages import (
    AdmitSession,
    AdvanceEpoch,
    ClientStalled,
    CutFrames,
    EndSession,
    LatencyMeasured,
    Progress,
    PublishChunk,
    PublishFrames,
    RefuseSession,
    TurnSettled,
)
from duplexd.units import NANOS_PER_SECOND, Nanos, Ticks, ticks_from_nanos
from duplexd.webrtc.audience import Audience
from duplexd.webrtc.camera import CameraReceiver
from duplexd.webrtc.frontend import STALL_BYTES, Frontend, Refused, shortage_of, tick_view
from duplexd.webrtc.peer import MessageFault, Peer
from duplexd.webrtc.realtime.bridge import Bridge
from duplexd.webrtc.realtime.session import RealtimeSession
from duplexd.webrtc.realtime.unpack import unpack
from duplexd.webrtc.view import View

CHANNEL = "oai-events"
VIEW_HEADER = "Duplexd-View"
BACKLOG_BYTES_MAX = 8 * 1024 * 1024  #: events that wait for a socket that does not read
SINKS_MAX = 8  #: connections that may join one session
CHANNEL_BYTES_MAX = 262_144  #: of an event on a data channel; Chromium and Firefox take as much or more
CHANNEL_GRACE = Nanos(5 * NANOS_PER_SECOND)  #: a call whose data channel closed lives so long without one

log = logging.getLogger("duplexd.realtime")
_encoder = msgspec.json.Encoder()


def _as_json(event: dict[str, Any]) -> list[str]:
    return [_encoder.encode(event).decode()]


class Sink(Protocol):
    """Somebody who is told events."""

    def tell(self, text: str) -> None: ...

    @property
    def backlog_bytes(self) -> int: ...

    async def close(self, code: int, reason: str) -> None: ...


class SocketSink:
    """A WebSocket's outgoing side: a bounded queue, and the one task that writes."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.backlog_bytes = 0
        self._queue: deque[str] = deque()
        self._wake = asyncio.Event()
        self._closing: tuple[int, str] | None = None
        self._writer = asyncio.get_running_loop().create_task(self._write())

    def tell(self, text: str) -> None:
        if self._closing is not None:
            return
        if self.backlog_bytes + len(text) > BACKLOG_BYTES_MAX:
            self._queue.clear()
            self._closing = (1008, f"the client does not read: {self.backlog_bytes} bytes wait")
        else:
            self._queue.append(text)
            self.backlog_bytes += len(text)
        self._wake.set()

    async def _write(self) -> None:
        try:
            while True:
                while self._queue:
                    text = self._queue.popleft()
                    await self.socket.send_str(text)
                    self.backlog_bytes -= len(text)
                if self._closing is not None:
                    code, reason = self._closing
                    await self.socket.close(code=code, message=reason.encode()[:120])
                    return
                await self._wake.wait()
                self._wake.clear()
        except (ConnectionError, RuntimeError):
            self._queue.clear()  # The socket is gone; whoever reads it notices by itself.
            self._closing = self._closing or (1006, "the socket is gone")

    async def close(self, code: int, reason: str) -> None:
        """After everything that waits has been written; bounded by a second."""
        self._closing = self._closing or (code, reason)
        self._wake.set()
        done, _ = await asyncio.wait([self._writer], timeout=1.0)
        if not done:
            self._writer.cancel()
            transport = getattr(self.socket, "_req", None)
            if transport is not None and transport.transport is not None:
                transport.transport.abort()


class ChannelSink:
    """The data channel of a call."""

    def __init__(self, peer: Callable[[], Peer | None]) -> None:
        self._peer = peer

    def tell(self, text: str) -> None:
        peer = self._peer()
        if peer is None:
            return
        longest = peer.message_bytes_max
        if len(text.encode()) > longest:
            text = _too_large(text, longest)
        if len(text.encode()) <= longest:
            peer.send(CHANNEL, text)

    @property
    def backlog_bytes(self) -> int:
        peer = self._peer()
        return 0 if peer is None else peer.backlog_bytes

    async def close(self, code: int, reason: str) -> None:
        peer = self._peer()
        if peer is not None:
            await peer.close(reason)


class _Head(msgspec.Struct):
    type: str = ""
    event_id: str = ""


def _too_large(text: str, longest: int) -> str:
    """What is told in place of an event that a data channel does not take, under that event's id: ids have no gap."""
    head = msgspec.json.decode(text, type=_Head)
    said = f"An event '{head.type}' is larger than this data channel takes ({longest} bytes); a sideband is told it."
    error = {"type": "server_error", "code": "event_too_large", "message": said}
    return _encoder.encode({"type": "error", "event_id": head.event_id, "error": error}).decode()


class RealtimeVisit:
    """One session; a `Guest` of the front end."""

    def __init__(
        self, owner: Frontend, session: SessionId, line: Line, core: RealtimeSession, *, fed: bool = False
    ) -> None:
        self.session = session
        self.line = line
        self.bridge = Bridge(line=line, session=core, fed=fed)
        self.admitted: asyncio.Future[RefuseSession | None] = asyncio.get_running_loop().create_future()
        self.lateness = Lateness()
        self.peer: Peer | None = None
        self.view: View | None = None  #: of a call, when the model has a face
        self.eye: CameraReceiver | None = None
        self.audience: Audience | None = None
        self.call_id = ""  #: by which whoever knows it controls the session
        self.view_id = f"view_{secrets.token_urlsafe(18)}"  #: by which whoever knows it watches, and no more
        self.sinks: list[Sink] = []
        self.sides: list[Sink] = []  #: those among them that only joined
        self.stalled = False
        self.progress: Progress | None = None
        self.counts = core.counts
        self.finished = asyncio.Event()
        self.ending: asyncio.Task[None] | None = None
        self.render: Callable[[dict[str, Any]], list[str]] = _as_json  #: an event as its client reads it
        self.detached = False  #: its client's connection broke and may come back
        self._origin = clock.now()
        self._owner = owner

    # Transport --------------------------------------------------------------------------------------------------------

    def now_pts(self, now: Nanos) -> int:
        """A track has a clock of its own; without one, time since the session opened is as good."""
        if self.peer is None:
            return int(ticks_from_nanos(max(0, now - self._origin)))
        return 0 if self.peer.clock.origin is None else int(self.peer.clock.position(now))

    def open(self) -> None:
        self.bridge.open(clock.now())
        self.flush()

    def join(self, sink: Sink) -> bool:
        """Somebody watches from here on; False when too many do."""
        if len(self.sides) >= SINKS_MAX:
            return False
        sink.tell(self.welcome())
        self.sinks.append(sink)
        self.sides.append(sink)
        return True

    def welcome(self) -> str:
        """What somebody who joins is told first."""
        return _encoder.encode(self.bridge.session.greeting()).decode()

    def part(self, sink: Sink) -> None:
        for sinks in (self.sinks, self.sides):
            if sink in sinks:
                sinks.remove(sink)

    @property
    def view_header(self) -> dict[str, str]:
        """Told to whoever began the session, to be handed on to those who may watch it."""
        return {VIEW_HEADER: f"/v1/whep?session={self.view_id}"}

    async def unpack(self, text: str) -> str | dict[str, Any]:
        """A frame of a socket, as `on_text` takes it."""
        return await unpack(text, longest=self.event_bytes_max)

    @property
    def event_bytes_max(self) -> int:
        return self.bridge.session.limits.event_bytes_max

    def on_text(self, text: str | bytes | dict[str, Any]) -> bool:
        """One event of the client; whether it was taken."""
        taken = self.bridge.on_text(text, clock.now())
        self.flush()
        return taken

    def refuse(self, code: str, message: str, *, event_id: str | None = None, param: str = "") -> None:
        self.bridge.session.refuse(code, message, clock.now(), event_id=event_id, param=param)
        self.flush()

    def on_message(self, label: str, data: str | MessageFault) -> None:
        """From a data channel."""
        if isinstance(data, MessageFault):
            self.refuse(data.code, data.message)
        else:
            self.on_text(data)

    def on_audio(self, pcm: NDArray[np.int16], rtp: int, how: str) -> None:
        """From a track."""
        if how == "gap":
            return  # The framer sees the gap by the next timestamp and says so in its blocks.
        now = clock.now()
        self.lateness.note(rtp, now, pcm)
        self.bridge.on_audio(pcm, rtp, now)
        self.flush()

    def pull(self, pts: Ticks) -> NDArray[np.int16]:
        return self.line.pull(pts, clock.now())

    # The front end ----------------------------------------------------------------------------------------------------

    def take(self, news: Any) -> None:
        match news:
            case AdmitSession():
                self._settle(None)
                return
            case RefuseSession():
                self._settle(news)
                return
            case EndSession():
                self._owner.end(self, news.reason)
                return
            case PublishChunk():
                self.bridge.take(news, clock.now(), self._owner.read_chunk(news))
            case AdvanceEpoch():
                self.bridge.take(news, clock.now())
                self._owner.note_advance(news)
            case LatencyMeasured():
                self.bridge.take(news, clock.now())
                self._owner.note_reply(news)
            case PublishFrames():
                frames = self._owner.read_frames(news)
                if self.view is not None:
                    self.view.publish(news, frames)
            case CutFrames():
                if self.view is not None:
                    self.view.cut(news)
            case _:
                self._note(news)
                self.bridge.take(news, clock.now())
        self.flush()

    def _note(self, news: Any) -> None:
        """For whoever watches the daemon, and for the detector."""
        if isinstance(news, Progress):
            self.progress = news
        elif isinstance(news, TurnSettled):
            self.line.settle_turn(news)

    def _settle(self, refusal: RefuseSession | None) -> None:
        if not self.admitted.done():
            self.admitted.set_result(refusal)

    def tick(self, now: Nanos) -> None:
        self._learn_way()
        self.bridge.tick(now)
        self.flush()
        self._tick_view(now)
        stalled = self.detached or any(s.backlog_bytes > STALL_BYTES for s in self.sinks if s not in self.sides)
        if stalled != self.stalled:
            self.stalled = self.line.client_stalled = stalled
            self._owner.supervisor.send(ClientStalled(self.session, stalled))

    def _learn_way(self) -> None:
        """How far the ear is behind the track of a call: by the receiver's reports, once there are any."""
        round_trip, jitter = (None, None) if self.peer is None else (self.peer.rtt_ms, self.peer.jitter_ms)
        if round_trip is not None and jitter is not None:
            self.line.way = way_by_reports(round_trip_ms=round_trip, jitter_ms=jitter)
            self.bridge.session.way_by_reports = True

    def _tick_view(self, now: Nanos) -> None:
        if self.view is not None and self.peer is not None:
            tick_view(self.view, self.peer, self.audience, now)

    def farewell(self, reason: str) -> None:
        self.bridge.end("session_ended", reason, clock.now(), close_code=1011)
        self._tell_events()

    async def hang_up(self, reason: str) -> None:
        code = self.bridge.goodbye.code if self.bridge.goodbye is not None else 1000
        self.bridge.session.close()
        await asyncio.gather(*(sink.close(code, reason) for sink in list(self.sinks)), return_exceptions=True)
        if self.peer is not None:
            await self.peer.close(reason)
        self.finished.set()

    def cancel_timers(self) -> None:
        if not self.admitted.done():
            self.admitted.cancel()

    # Out --------------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Bring what the bridge produced to where it belongs."""
        self.pass_on(self.bridge.facts())
        self._tell_events()
        if self.bridge.goodbye is not None:
            self._owner.end(self, self.bridge.goodbye.reason)

    def pass_on(self, facts: list[Any]) -> None:
        """To the engine."""
        for fact in facts:
            if isinstance(fact, Block):
                self._owner.send_block(self.session, fact)
            else:
                self._owner.supervisor.send(fact)

    def _tell_events(self) -> None:
        for event in self.bridge.events():
            for text in self.render(event):
                for sink in list(self.sinks):
                    sink.tell(text)


async def turn_away(socket: Any, refused: Refused) -> None:
    """A refusal after the upgrade: an event, and the code for "try again later". Whoever has gone hears neither."""
    error = {"type": "server_error", "code": refused.code, "message": str(refused)} | shortage_of(refused)
    with suppress(ConnectionResetError):
        await socket.send_json({"type": "error", "event_id": "event_1", "error": error})
        await socket.close(code=1013, message=str(refused).encode()[:120])
