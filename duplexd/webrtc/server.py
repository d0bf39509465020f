"""HTTP: the page, the signalling of sessions, health and metrics.

GET  /                       the page
GET  /api/config             what the page must know before it connects
POST /api/session            {"sdp", "type": "offer"} -> {"sdp", "type": "answer", "session", "close_url"}
POST /api/session/N/close/K  the person leaves (sendBeacon); K is the key in close_url
GET  /healthz /readyz        the process lives / the engine is loaded
GET  /metrics                Prometheus text
GET  /api/watch?rows=N       a snapshot for `duplexd top`: cursors of N sessions, lanes, figures; needs the token, or
                             without one a caller on this machine
GET  /api/uplink             when each piece of each person's sound came, half a minute back; for the same callers
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import signal
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from duplexd import __version__
from duplexd.config import Config, is_loopback
from duplexd.errors import DuplexdError, InputRefused
from duplexd.ids import SessionId
from duplexd.webrtc.figures import prometheus
from duplexd.webrtc.frontend import RETRY_AFTER_S, Frontend, Refused, ice_server, shortage_of
from duplexd.webrtc.peer import guard_loop
from duplexd.webrtc.realtime.errands import Errands
from duplexd.webrtc.realtime.requests import BODY_BYTES_MAX
from duplexd.webrtc.realtime.routes import DOOR, Door, RealtimeRoutes, refusals
from duplexd.webrtc.realtime.session import COUNTED
from duplexd.webrtc.supervisor import EngineState
from duplexd.webrtc.watch import ROWS, ROWS_MAX, snapshot

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POOL_THREADS = 4
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
#: Counters of the engine that are told as such, by the name they are counted under.
ENGINE_TOTALS = {"misses_total": "chunks_late", "miss_ms_total": "chunks_late_ms", "starved_total": "works_starved"}
TICKS_PER_SAMPLE = 2  #: of the voice's 24 kHz
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; media-src 'self' blob: mediastream:; img-src 'self' data:; "
    "style-src 'self' 'unsafe-inline'; script-src 'self' blob:; worker-src 'self' blob:; connect-src 'self'; "
    "frame-ancestors 'none'",
}

log = logging.getLogger("duplexd.server")


class Server:
    """Routes over one front end."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.frontend = Frontend(config)
        self._close_keys: dict[SessionId, str] = {}
        self.door = Door(self.frontend)
        self.realtime = RealtimeRoutes(self.frontend, self.door)
        self.app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[errors_as_json, refusals])
        self.app[DOOR] = self.door
        self.app.add_routes(self.realtime.routes())
        self.app.add_routes(Errands(self.realtime).routes())
        self.app.add_routes(
            [
                web.get("/", self.page),
                web.get("/api/config", self.page_config),
                web.post("/api/session", self.open_session),
                web.post("/api/session/{session}/close/{key}", self.close_session),
                web.get("/healthz", self.healthy),
                web.get("/readyz", self.ready),
                web.get("/metrics", self.metrics),
                web.get("/api/watch", self.watch),
                web.get("/api/uplink", self.uplink),
                web.get("/{name}", self.page),
            ]
        )

    # The page -------------------------------------------------------------------------------------------

    async def page(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("name", "index.html")
        path = PAGE / name
        kind = PAGE_FILES.get(path.suffix)
        if kind is None or path.parent != PAGE or not path.is_file():
            raise web.HTTPNotFound(text=f"there is no page {name!r}")
        return web.FileResponse(path, headers={**HEADERS, "Content-Type": f"{kind}; charset=utf-8"})

    async def page_config(self, request: web.Request) -> web.Response:
        ready = self.frontend.supervisor.ready
        # The password of a TURN server is for those who may open a session.
        servers = [ice_server(text) for text in self.config.ice_servers] if self._authorised(request) else []
        return web.json_response(
            {
                "ice_servers": [
                    {"urls": s.url, "username": s.username, "credential": s.credential}
                    if s.username
                    else {"urls": s.url}
                    for s in servers
                ],
                "model": ready.model if ready else self.config.model,
                "version": __version__,
                "token_required": bool(self.config.token),
                "sessions_max": self.config.sessions_max,
            },
            headers=HEADERS,
        )

    # Sessions -------------------------------------------------------------------------------------------

    async def open_session(self, request: web.Request) -> web.Response:
        self._authorise(request)
        offer = await _offer(request)
        visit, answer = await self.frontend.open(offer)
        key = secrets.token_urlsafe(9)
        self._close_keys = {s: k for s, k in self._close_keys.items() if s in self.frontend.visits}
        self._close_keys[visit.session] = key
        return web.json_response(
            {
                "sdp": answer,
                "type": "answer",
                "session": visit.session,
                "close_url": f"/api/session/{visit.session}/close/{key}",
            }
        )

    def _authorise(self, request: web.Request) -> None:
        if not self._authorised(request):
            raise Refused(401, "unauthorised", "this daemon asks for its token; open the page with ?token=...")

    def _authorised(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return not self.config.token or hmac.compare_digest(given.encode(), self.config.token.encode())

    async def close_session(self, request: web.Request) -> web.Response:
        session = request.match_info["session"]
        number = SessionId(int(session)) if session.isdigit() else SessionId(-1)
        key = self._close_keys.get(number, "")
        if not hmac.compare_digest(key.encode(), request.match_info["key"].encode()) or not key:
            raise web.HTTPNotFound(text=f"there is no session {session}")
        self.frontend.hang_up(number)
        return web.json_response({"session": number, "closed": True})

    # Health ---------------------------------------------------------------------------------------------

    async def healthy(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "alive", "version": __version__})

    async def ready(self, request: web.Request) -> web.Response:
        state = self.frontend.supervisor.state
        status = 200 if state is EngineState.READY and not self.frontend.closing else 503
        return web.json_response({"engine": state.value, "sessions": len(self.frontend.visits)}, status=status)

    async def metrics(self, request: web.Request) -> web.Response:
        text = prometheus(self.values()) + self.frontend.figures.text()
        return web.Response(text=text, headers={"Content-Type": PROMETHEUS})

    async def watch(self, request: web.Request) -> web.Response:
        self._authorise_watcher(request)
        rows = request.query.get("rows", str(ROWS))
        if not rows.isascii() or not rows.isdigit() or not 1 <= int(rows) <= ROWS_MAX:
            raise Refused(400, "bad_rows", f"rows is {rows[:20]!r}; it lies in 1..{ROWS_MAX}")
        found = snapshot(self.frontend, self.values(), rows=int(rows))
        return web.Response(body=msgspec.json.encode(found), content_type="application/json", headers=HEADERS)

    async def uplink(self, request: web.Request) -> web.Response:
        """When each piece of each person's sound came lately, for whoever measures the way here (`bench uplink`)."""
        self._authorise_watcher(request)
        found = {str(session): list(visit.lateness.arrivals) for session, visit in self.frontend.visits.items()}
        return web.Response(body=msgspec.json.encode(found), content_type="application/json", headers=HEADERS)

    def _authorise_watcher(self, request: web.Request) -> None:
        self._authorise(request)
        if not self.config.token and not is_loopback(request.remote or ""):
            said = "sessions are shown to this machine only; start the daemon with a token to watch it from elsewhere"
            raise Refused(403, "forbidden", said)

    def values(self) -> dict[str, float]:
        frontend = self.frontend
        lag = sorted(frontend.loop_lag_ms) or [0.0]
        late = sorted(ms for visit in frontend.visits.values() for ms in visit.lateness.excess_ms()) or [0.0]
        playouts = frontend.playout_counts()
        engine = frontend.supervisor.metrics
        values = {f"engine_{name}": value for name, value in engine.items()}
        values |= _by_class(engine)
        values |= {f"engine_{told}": engine.get(counted, 0.0) for told, counted in ENGINE_TOTALS.items()}
        for held in frontend.supervisor.session_bytes:
            values[f'engine_session_arena_bytes{{session="{held.session}"}}'] = float(held.arena)
            values[f'engine_session_host_bytes{{session="{held.session}"}}'] = float(held.host)
        values |= {f"frontend_{name}": float(value) for name, value in frontend.counts.items()}
        values |= {f"frontend_pictures_{name}_total": float(n) for name, n in frontend.picture_counts().items()}
        values |= {f"frontend_camera_{name}_total": float(n) for name, n in frontend.camera_counts().items()}
        counted = dict.fromkeys(COUNTED, 0) | frontend.protocol_counts()
        values |= {f"realtime_{name}_total": float(n) for name, n in counted.items()}
        values["frontend_silent_speaking_total"] = float(frontend.lapse_count)
        values["frontend_persons_seen"] = float(frontend.person_count)
        skews = frontend.skew_ms
        values |= {"frontend_skew_ms_p05": _share(skews, 0.05), "frontend_skew_ms_p95": _p95(skews)}
        values["frontend_views"] = float(frontend.view_count)
        sent = playouts["sent_samples"]
        values |= {
            "frontend_sent_samples_total": float(sent),
            "frontend_dropped_samples_total": float(playouts["dropped_samples"]),
            "frontend_gaps_total": float(playouts["gaps"]),
            "frontend_gap_ms_total": playouts["underrun_ticks"] / 48.0,
            "frontend_waste": playouts["dropped_samples"] / max(1, sent + playouts["dropped_samples"]),
            "frontend_continuity": 1.0 - min(1.0, playouts["underrun_ticks"] / max(1, sent * TICKS_PER_SAMPLE)),
            "realtime_calls": float(len(self.realtime.calls)),
            "frontend_sessions": float(len(frontend.visits)),
            "frontend_viewers": float(frontend.viewer_count),
            "frontend_tasks": float(len(asyncio.all_tasks())),
            "frontend_loop_lag_ms_p50": lag[len(lag) // 2],
            "frontend_loop_lag_ms_p99": lag[len(lag) * 99 // 100],
            "frontend_loop_lag_ms_max": lag[-1],
            "frontend_advance_ms_p95": _p95(frontend.advance_ms),
            "frontend_reply_ms_p50": _share(frontend.reply_ms, 0.5),
            "frontend_reply_ms_p95": _p95(frontend.reply_ms),
            "frontend_uplink_late_ms_p50": late[len(late) // 2],
            "frontend_uplink_late_ms_p99": late[len(late) * 99 // 100],
            "frontend_stale_samples_sent": float(playouts["stale_samples"]),
            "frontend_underruns": float(playouts["underruns"]),
            "frontend_underrun_ms": playouts["underrun_ticks"] / 48.0,
            "frontend_old_epoch_samples_dropped": float(playouts["dropped_samples"]),
            "frontend_engine_restarts": float(frontend.supervisor.restarts),
        }
        return values


def _by_class(engine: Mapping[str, float]) -> dict[str, float]:
    """What the caches hold, by class, with the class as a label."""
    return {
        f'engine_kv_{unit}{{class="{name.removeprefix(unit + "_")}"}}': value
        for name, value in engine.items()
        for unit in ("bytes", "tokens")
        if name.startswith(f"{unit}_")
    }


def _p95(values: Iterable[float]) -> float:
    return _share(values, 0.95)


def _share(values: Iterable[float], share: float) -> float:
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


async def _offer(request: web.Request) -> object:
    try:
        body = await request.json()
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputRefused(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict) or body.get("type", "offer") != "offer":
        raise InputRefused('the body must be {"sdp": ..., "type": "offer"}')
    return body.get("sdp")


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every error is {"error": {"code", "message"}} with a sentence a person can act on."""
    try:
        return await handler(request)
    except Refused as error:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status == 503 else {}
        return _error(error.status, error.code, str(error), headers, **shortage_of(error))
    except InputRefused as error:
        return _error(400, "bad_offer", str(error))
    except web.HTTPException as error:
        return _error(error.status, "http", error.text or error.reason)


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None, **more: object) -> web.Response:
    return web.json_response({"error": {"code": code, "message": message, **more}}, status=status, headers=headers)


async def serve(config: Config, *, started: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `started` is given the URL once the engine is loaded."""
    loop = asyncio.get_running_loop()
    guard_loop(loop)
    loop.set_default_executor(_pool())
    server = Server(config)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    context = _tls(config) if config.tls else None
    runner = web.AppRunner(server.app, access_log=None)
    await runner.setup()
    try:
        await _listen(runner, config, context)
        server.frontend.start()
        supervisor = server.frontend.supervisor
        await _first(supervisor.wait_ready(), stop.wait())
        if supervisor.failure:
            raise DuplexdError(supervisor.failure)
        if not stop.is_set():
            started(_url(config, runner, tls=context is not None))
            await stop.wait()
    finally:
        await server.frontend.stop()
        await runner.cleanup()


async def _listen(runner: web.AppRunner, config: Config, context: ssl.SSLContext | None) -> None:
    """Raises DuplexdError when the address cannot be had."""
    try:
        await web.TCPSite(runner, config.host, config.port, ssl_context=context).start()
    except OSError as error:
        raise DuplexdError(
            f"cannot listen on {config.host}:{config.port} ({error.strerror}); choose another port with --port"
        ) from error


def _pool() -> ThreadPoolExecutor:
    """Threads for files of the page, names of ICE servers and pictures (aiortc encodes there; voice does not).

    All are started now: on demand they would come with the first visitors and look like a leak.
    """
    pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="duplexd-pool")
    together = threading.Barrier(POOL_THREADS)
    for _ in range(POOL_THREADS):
        pool.submit(together.wait)
    return pool


async def _first(*waits: Any) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _url(config: Config, runner: web.AppRunner, *, tls: bool) -> str:
    host, port = runner.addresses[0][:2]
    shown = "localhost" if host in ("127.0.0.1", "::1", "0.0.0.0", "::") else host
    return f"{'https' if tls else 'http'}://{shown}:{port}/"


def _tls(config: Config) -> ssl.SSLContext:
    from duplexd.webrtc.certificate import self_signed

    return self_signed(config.host)
