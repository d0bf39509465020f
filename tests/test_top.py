"""`duplexd top`: what is shown, who may ask, and what is said when nobody answers."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web
from rich.console import Console

from duplexd.__main__ import main
from duplexd.config import Config
from duplexd.ids import ChunkId, Epoch, ResponseId, SessionId
from duplexd.messages import EngineReady, Metrics, Modality, Progress, PublishChunk, StateChanged, TurnState
from duplexd.top import Watcher, WatchError, cursors, frame, urgency, url_of, waste, watch
from duplexd.units import NANOS_PER_SECOND, Nanos, Span, Ticks, ticks_from_ms
from duplexd.webrtc.frontend import Frontend, Visit
from duplexd.webrtc.server import Server
from duplexd.webrtc.watch import Snapshot, Watched, snapshot

SPEAKING = Watched(7, "speaking", 2, 1000.0, 1060.0, 1500.0, 1700.0, 600.0, False, 0, "ahead")
SEEN = Snapshot(
    version="1.2.3",
    model="clock",
    policy="interaction",
    engine="ready",
    sessions_max=4,
    sessions_count=1,
    sessions=(SPEAKING,),
    lanes={"think": 0.5, "voice": 0.95},
    engine_values={
        "bytes_anchor": 1000.0,
        "bytes_recent": 3000.0,
        "tokens_recent": 96.0,
        "pages_free": 11.0,
        "heard_ticks_open": 900.0,
        "discarded_ticks_open": 100.0,
        "chunks_late": 3.0,
    },
    frontend_values={"frontend_underruns": 2.0},
)


def shown(seen: Snapshot, **options: Any) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    console.print(frame(seen, "http://here", **options))
    console.file.close()
    return console.export_text()


def row_of(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(name))


def test_a_frame_shows_sessions_lanes_arena_and_figures() -> None:
    text = shown(SEEN)

    assert "engine ready  1 of 4 sessions" in text
    assert "ahead" in row_of(text, "7 ")
    assert "700" in row_of(text, "7 ")  # generation is so far ahead of the ear
    assert "50%" in row_of(text, "think")
    assert "95%" in row_of(text, "voice")
    assert "3.0 kB" in row_of(text, "recent")
    assert "96" in row_of(text, "recent")
    assert "free pages 11" in text
    assert "10.0%" in row_of(text, "waste")
    assert " 2 " in row_of(text, "underruns")
    assert " 3 " in row_of(text, "deadline misses")


def test_an_empty_daemon_is_a_frame_too() -> None:
    empty = msgspec.structs.replace(SEEN, sessions=(), sessions_count=0, lanes={}, engine_values={}, engine="starting")
    text = shown(empty, lost="no daemon answers")

    assert "no session is open" in text
    assert "no figures yet" in text
    assert "no daemon answers; trying again" in text
    assert "-" in row_of(text, "waste")


def test_rows_are_bounded_and_the_rest_is_counted() -> None:
    assert "and 41 more" in shown(msgspec.structs.replace(SEEN, sessions_count=42))


@pytest.mark.parametrize(
    ("state", "expected"), [("thinking", "due"), ("speaking", "due"), ("held", "held"), ("listening", "")]
)
def test_the_class_is_the_one_the_engine_told_while_something_is_made(state: str, expected: str) -> None:
    session = msgspec.structs.replace(SPEAKING, state=state, urgency="due")

    assert urgency(session) == expected
    if expected:
        assert expected in row_of(shown(msgspec.structs.replace(SEEN, sessions=(session,))), "7 ")


def test_a_bar_is_as_long_as_what_lies_ahead() -> None:
    """Full scale is 700 ms here: 60 delivered, 440 published behind it, 200 generated; the budget is marked at 600."""
    text = cursors(SPEAKING).plain

    assert len(text) == 30
    assert text.count("█") == 3
    assert text.count("▓") in (18, 19)
    assert text.index("|") == 26
    assert "·" not in text


def test_waste_is_of_what_was_made() -> None:
    assert waste({}) is None
    assert waste({"heard_ticks_open": 3.0, "discarded_ticks_open": 1.0}) == 0.25


def test_where_a_daemon_listens_follows_its_configuration() -> None:
    assert url_of(Config()) == "http://127.0.0.1:8787"
    assert url_of(Config(host="::1", port=9, tls=True)) == "https://[::1]:9"
    assert url_of(Config(host="0.0.0.0", token="t")) == "http://127.0.0.1:8787"


# Who asks ---------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_no_daemon_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SystemExit) as left:
        main(["top", "--once", "--url", url])
    said = capsys.readouterr().err

    assert left.value.code == 2
    assert f"no daemon answers at {url} (" in said
    assert "start one with `duplexd serve`" in said


@pytest.mark.parametrize("url", ["127.0.0.1:8787", "ftp://x", "http://"])
def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(WatchError, match="is no URL of a daemon"):
        Watcher(url, token="", rows=4)


def test_rows_have_a_range() -> None:
    with pytest.raises(WatchError, match=r"--rows is 0; it lies in 1\.\.256"):
        watch("http://127.0.0.1:1", token="", rows=0, once=True)


async def tell(app: web.Application, story: Callable[[str], Awaitable[None]]) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        await story(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


def at_an_app(app: web.Application, story: Callable[[str], Awaitable[None]]) -> None:
    asyncio.run(tell(app, story))


def served(config: Config, story: Callable[[str], Awaitable[None]]) -> None:
    async def run() -> None:
        server = Server(config)
        try:
            await tell(server.app, story)
        finally:
            await server.frontend.stop()

    asyncio.run(run())


async def ask(url: str, **options: Any) -> Snapshot:
    watcher = Watcher(url, **{"token": "", "rows": 4, **options})
    return await asyncio.to_thread(watcher.ask)


def test_a_daemon_answers_on_loopback() -> None:
    async def story(url: str) -> None:
        seen = await ask(url)

        assert (seen.model, seen.engine, seen.sessions_count) == ("clock", "gone", 0)
        assert "frontend_loop_lag_ms_p99" in seen.frontend_values

    served(Config(model="clock"), story)


def test_a_token_is_asked_for_and_given() -> None:
    async def story(url: str) -> None:
        with pytest.raises(WatchError, match="asks for its token; give it with --token"):
            await ask(url)
        with pytest.raises(WatchError, match="asks for its token"):
            await ask(url, token="wrong")
        assert (await ask(url, token="right")).sessions_count == 0

    served(Config(model="clock", token="right"), story)


def test_without_a_token_only_this_machine_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duplexd.webrtc.server.is_loopback", lambda host: False)

    async def story(url: str) -> None:
        with pytest.raises(WatchError, match="403: sessions are shown to this machine only; start the daemon with a"):
            await ask(url)

    served(Config(model="clock"), story)


def test_a_bad_number_of_rows_is_refused() -> None:
    async def story(url: str) -> None:
        watcher = Watcher(url, token="", rows=9999)
        with pytest.raises(WatchError, match=r"400: rows is '9999'; it lies in 1\.\.256"):
            await asyncio.to_thread(watcher.ask)

    served(Config(model="clock"), story)


def test_another_server_is_no_duplexd() -> None:
    app = web.Application()
    app.add_routes([web.get("/api/watch", _other)])

    async def story(url: str) -> None:
        with pytest.raises(WatchError, match="is no duplexd of this version"):
            await ask(url)

    at_an_app(app, story)
    at_an_app(web.Application(), story)


async def _other(request: web.Request) -> web.Response:
    return web.Response(text='{"version": 3}')


# What the front end knows -----------------------------------------------------------------------------------------


def visit_of(frontend: Frontend, number: int) -> Visit:
    session = SessionId(number)
    visit = Visit(frontend, session, frontend._line(session))
    frontend.visits[session] = visit
    return visit


def in_a_front_end(act: Callable[[Frontend], None]) -> None:
    async def run() -> None:
        frontend = Frontend(Config(model="clock", voice_detector="energy"))
        frontend.supervisor.ready = EngineReady("clock", 4, 24_000, (Modality.AUDIO,), "at_cursor", "energy")
        act(frontend)
        await frontend.supervisor.stop()

    asyncio.run(run())


def publish(visit: Visit, length_ms: float) -> None:
    import numpy as np

    samples = round(24 * length_ms)
    chunk = PublishChunk(
        visit.session,
        ResponseId(1),
        ChunkId(1),
        Epoch(0),
        Span(Ticks(0), ticks_from_ms(length_ms)),
        0,
        samples,
        False,
        1,
    )
    visit.line.publish(chunk, np.zeros(samples, np.int16))


def test_cursors_are_those_of_the_playout_and_of_the_engine() -> None:
    def act(frontend: Frontend) -> None:
        visit = visit_of(frontend, 3)
        publish(visit, 500)
        visit.take(StateChanged(visit.session, TurnState.SPEAKING))
        for index in range(5):
            visit.pull(Ticks(960 * index))
        now = ticks_from_ms(60)
        visit.take(Progress(visit.session, Epoch(0), ticks_from_ms(700), now, ticks_from_ms(610), False, "U1"))
        (found,) = snapshot(frontend, {}, rows=4).sessions

        assert found == Watched(3, "speaking", 0, 60.0, 100.0, 500.0, 700.0, 610.0, False, 0, "U1")

    in_a_front_end(act)


def test_old_cursors_of_a_dead_epoch_are_not_shown() -> None:
    def act(frontend: Frontend) -> None:
        visit = visit_of(frontend, 3)
        publish(visit, 500)
        visit.take(Progress(visit.session, Epoch(0), ticks_from_ms(700), Ticks(0), ticks_from_ms(610), True, "U0"))
        visit.line.playout.advance(Epoch(1), ticks_from_ms(80))
        (found,) = snapshot(frontend, {}, rows=4).sessions

        assert (found.epoch, found.playback, found.generation, found.budget) == (1, 80.0, 80.0, 0.0)
        assert found.urgency == ""

    in_a_front_end(act)


def test_who_talks_comes_first_and_the_rest_is_only_counted() -> None:
    def act(frontend: Frontend) -> None:
        for number in range(1, 7):
            visit_of(frontend, number)
        frontend.visits[SessionId(5)].line.enter(TurnState.SPEAKING, Nanos(0))
        seen = snapshot(frontend, {}, rows=3)

        assert [s.session for s in seen.sessions] == [5, 1, 2]
        assert seen.sessions_count == 6

    in_a_front_end(act)


def test_a_lane_is_busy_by_what_it_worked_since_the_last_figures() -> None:
    def act(frontend: Frontend) -> None:
        supervisor = frontend.supervisor
        second = NANOS_PER_SECOND
        supervisor._measure({"busy_us_think": 1_000_000.0}, Nanos(second))
        assert supervisor.lane_shares(Nanos(second)) == {}  # One figure is no rate.
        supervisor._measure({"busy_us_think": 1_500_000.0, "busy_us_talk": 100_000.0}, Nanos(2 * second))

        assert supervisor.lane_shares(Nanos(2 * second)) == {"think": 0.5, "talk": 0.1}
        assert supervisor.lane_shares(Nanos(9 * second)) == {}

    in_a_front_end(act)


@pytest.mark.slow
def test_one_frame_of_a_real_daemon() -> None:
    from tests.webrtc.test_daemon import Visitor, at_a_daemon, message, say

    async def story(visitor: Visitor) -> None:
        client = await visitor.connect()
        await visitor.connect()
        say(client, "say 12", "a1")
        await message(client, "state", state="speaking")
        await message(client, "words")
        command = [sys.executable, "-m", "duplexd", "top", "--once", "--url", visitor.daemon.url, "--rows", "1"]
        asked = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        out, _ = await asked.communicate()
        text = out.decode()

        assert asked.returncode == 0
        assert "engine ready  2 of 3 sessions" in text
        assert "speaking" in row_of(text, "1 ")
        assert "and 1 more" in text
        assert "free pages" in text
        await client.close()

    at_a_daemon(story)


def test_metrics_reach_the_lanes_through_the_news() -> None:
    def act(frontend: Frontend) -> None:
        frontend.supervisor._take(Metrics({"busy_us_copy": 5.0}))

        assert frontend.supervisor.metrics == {"busy_us_copy": 5.0}

    in_a_front_end(act)
