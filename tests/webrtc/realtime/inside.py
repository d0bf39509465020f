"""A daemon inside this process (its engine is a process as ever): its tasks, descriptors, slots and exceptions can be
counted, and nothing lies between a test's bytes and its sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from duplexd.config import Config
from duplexd.webrtc.server import Server
from tests.webrtc.realtime.daemon import Talk

REST_WITHIN = 75  #: looks, five a second; the engine tells its figures once a second
OF_ENGINE = ("pages_free", "latents_held", "ingest_held", "out_slots_free")


class Faults(logging.Handler):
    """What nobody caught: exceptions of tasks and callbacks, and records with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.found.append(self.format(record))

    def of_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.found.append(f"{context.get('message')}: {context.get('exception')!r}")


class Inside:
    """The daemon and a client of its API. Use `inside`."""

    def __init__(self, server: Server, url: str, http: aiohttp.ClientSession, faults: Faults) -> None:
        self.server = server
        self.base = url
        self.http = http
        self.faults = faults

    def url(self, path: str) -> str:
        return self.base + path

    @property
    def port(self) -> int:
        return int(self.base.rsplit(":", 1)[1])

    async def post(self, path: str, **options: Any) -> tuple[int, Any, Any]:
        """(status, body, headers), as `daemon.Api` has it."""
        options.pop("token", None)
        async with self.http.post(self.url(path), **options) as answer:
            body = await answer.read()
            kind = answer.content_type
            return answer.status, json.loads(body) if kind == "application/json" else body, answer.headers

    def held(self) -> dict[str, float]:
        """What sessions and connections take and must give back."""
        frontend = self.server.frontend
        supervisor = frontend.supervisor
        found = {f"engine_{name}": supervisor.metrics.get(name, -1.0) for name in OF_ENGINE}
        return found | {
            "sessions": float(len(frontend.visits)),
            "tasks": float(len(asyncio.all_tasks())),
            "descriptors": float(len(list(Path("/proc/self/fd").iterdir()))),
            "input_slots_free": float(len(supervisor._free_in)),
            "calls": float(len(self.server.realtime.calls)),
            "duplex_sessions": float(len(self.server.realtime.duplex._sessions)),
        }

    async def held_at_rest(self, like: dict[str, float] | None = None) -> dict[str, float]:
        """The same when nobody is left and it is `like` that (descriptors aside) or changes no more; else the last."""
        found = self.held()
        for _ in range(REST_WITHIN):
            await asyncio.sleep(0.2)
            found, before = self.held(), found
            expected = before if like is None else like
            settled = all(found[name] == expected[name] for name in found if name != "descriptors")
            if settled and found["sessions"] == found["engine_ingest_held"] == 0:
                break
        return found


@contextlib.asynccontextmanager
async def inside(**options: Any) -> AsyncIterator[Inside]:
    """A daemon of the word clock. Args: options: of its configuration."""
    wanted = {"model": "clock", "loopback_media": True, "port": 0, "requests_per_minute": 1e9, "face": "none"}
    server = Server(Config(**(wanted | options)))
    faults = Faults()
    asyncio.get_running_loop().set_exception_handler(faults.of_loop)
    logging.getLogger().addHandler(faults)
    runner = web.AppRunner(server.app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.frontend.start()
        await server.frontend.supervisor.wait_ready()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as http:
            yield Inside(server, url, http, faults)
    finally:
        await server.frontend.stop()
        await runner.cleanup()
        logging.getLogger().removeHandler(faults)


class Neighbour:
    """Somebody in conversation all the while: every word of every reply is counted."""

    def __init__(self, place: Inside) -> None:
        self._place = place
        self._enough = asyncio.Event()
        self.replies = 0

    async def converse(self) -> None:
        async with self._place.http.ws_connect(self._place.url("/v1/realtime?model=clock"), max_msg_size=0) as socket:
            talk = Talk(socket)
            await talk.until("session.created")
            while not self._enough.is_set():
                talk.sound = b""
                await talk.ask("say 4")
                done = await talk.until("response.done", seconds=30)
                assert done["response"]["status"] == "completed"
                assert talk.words() == [(32 * self.replies + word) % 1024 for word in range(4)]
                self.replies += 1
            assert talk.view.errors == []

    def leave(self) -> None:
        self._enough.set()
