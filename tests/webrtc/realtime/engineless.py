"""The daemon's HTTP side without an engine process: an `Engine` that says yes to every session, and otherwise what a
test has it say. What is wrong with a request, and what is left behind by one, needs no model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from duplexd.config import Config
from duplexd.ids import Epoch, ResponseId, SessionId
from duplexd.messages import (
    AdmitSession,
    EngineReady,
    Modality,
    ReplyWanted,
    ReplyWords,
    ResponseChanged,
    ResponseState,
    SessionOpened,
    SpokenWord,
)
from duplexd.units import Span, Ticks
from duplexd.webrtc.server import Server
from duplexd.webrtc.supervisor import EngineState


class Engine:
    """Facts in; news out when a test says so."""

    def __init__(self, server: Server) -> None:
        self.facts: list[Any] = []
        self.on_reply_wanted: Callable[[ReplyWanted], None] = lambda fact: None
        self._frontend = server.frontend
        supervisor = server.frontend.supervisor
        takes = (Modality.AUDIO, Modality.TEXT)
        supervisor.ready = EngineReady("clock", 4, 24_000, takes, "at_cursor", "energy")
        supervisor.state = EngineState.READY
        supervisor.send = self._take  # type: ignore[method-assign]

    def _take(self, fact: Any) -> bool:
        self.facts.append(fact)
        if isinstance(fact, SessionOpened):
            self.say(AdmitSession(fact.session))
        elif isinstance(fact, ReplyWanted):
            self.on_reply_wanted(fact)
        return True

    def say(self, *news: Any) -> None:
        for one in news:
            asyncio.get_running_loop().call_soon(self._frontend._on_news, one)

    def told(self, kind: type) -> list[Any]:
        return [fact for fact in self.facts if isinstance(fact, kind)]


class Place:
    """A served daemon without an engine, and a client of it."""

    def __init__(self, server: Server, http: TestClient[Any, Any]) -> None:
        self.server = server
        self.frontend = server.frontend
        self.engine = Engine(server)
        self.http = http

    @property
    def session_count(self) -> int:
        return len(self.frontend.visits)

    async def happen(self) -> None:
        """What the engine said is taken."""
        for _ in range(10):
            await asyncio.sleep(0)

    async def settled(self) -> None:
        """Every session has ended and every socket is closed; or they do not, within half a second."""
        for _ in range(50):
            if not self.session_count and not writers():
                return
            await asyncio.sleep(0.01)


def writers() -> list[asyncio.Task[Any]]:
    """Tasks that write to a WebSocket."""
    tasks = asyncio.all_tasks()
    return [task for task in tasks if getattr(task.get_coro(), "__qualname__", "") == "SocketSink._write"]


def at_a_door(story: Callable[[Place], Awaitable[None]], *, config: Config | None = None) -> None:
    async def run() -> None:
        server = Server(config or Config(model="clock", voice_detector="energy"))
        async with TestClient(TestServer(server.app)) as http:
            place = Place(server, http)
            await asyncio.wait_for(story(place), 20)
        await server.frontend.stop()

    asyncio.run(run())


def reply_of(session: SessionId, *, number: int, key: str = "") -> Callable[..., ResponseChanged]:
    """News of one reply: `reply(state)`."""

    def changed(state: ResponseState, *, reason: str = "") -> ResponseChanged:
        return ResponseChanged(session, ResponseId(number), Epoch(0), state, (), 0, reason, key)

    return changed


def words_of(session: SessionId, *, number: int, text: str) -> ReplyWords:
    words = tuple(SpokenWord(one, Span(Ticks(0), Ticks(480))) for one in text.split())
    return ReplyWords(session, ResponseId(number), Epoch(0), 0, words, 0, text)
