"""When an engine that says nothing is given up, and when the silence is our own."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Any

import msgspec
import pytest

from duplexd.channel import MediaShape
from duplexd.config import Config
from duplexd.engine.bargein import BargeInRule, Decision, VoiceView
from duplexd.engine.process import EngineConfig, tunables_of
from duplexd.errors import DuplexdError
from duplexd.units import NANOS_PER_MS, Nanos, Ticks, ticks_from_ms
from duplexd.webrtc import supervisor as module
from duplexd.webrtc.server import serve
from duplexd.webrtc.supervisor import EngineState, Supervisor


class Process:
    def __init__(self) -> None:
        self.kills = 0

    def kill(self) -> None:
        self.kills += 1


@pytest.mark.parametrize(("pauses_ms", "kills"), [((20,) * 600, 1), ((20,) * 300 + (30_000,) + (20,) * 300, 0)])
def test_a_silent_engine_is_killed_but_not_for_the_time_we_stood_still(pauses_ms: tuple[int, ...], kills: int) -> None:
    """Twelve seconds of silence while media flows to it, against six before and six after a suspended half minute."""

    async def story() -> Process:
        supervisor = Supervisor(Config(), on_news=lambda news: None, on_gone=lambda reason: None)
        process: Any = Process()
        supervisor._process, supervisor.state = process, EngineState.READY
        at = 1_000
        for pause in pauses_ms:
            at += pause
            supervisor.watch(Nanos(at * NANOS_PER_MS), busy=True)
        return process

    assert asyncio.run(story()).kills == kills


def no_process(*_: Any, **__: Any) -> Any:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def unheard(url: str) -> None:
    raise AssertionError(f"nothing is served at {url}")


def test_an_engine_that_cannot_be_forked_is_not_told_as_a_taken_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.subprocess, "Popen", no_process)
    with pytest.raises(DuplexdError, match=r"engine process could not be started .*temporarily unavailable"):
        asyncio.run(serve(Config(port=0, model="clock"), started=unheard))


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DuplexdError, match=f"cannot listen on 127.0.0.1:{port}"):
            asyncio.run(serve(Config(port=port, model="clock"), started=unheard))


def test_a_failed_start_leaves_nothing_and_is_tried_again_after_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has no process to give twice; the third try does, as after a moment without memory."""

    async def story() -> tuple[int, int, Supervisor]:
        supervisor = Supervisor(Config(model="clock"), on_news=lambda news: None, on_gone=lambda reason: None)
        supervisor._backoff_s = 0.0
        before, tries = len(os.listdir("/proc/self/fd")), []

        def scarce(*arguments: Any, **options: Any) -> Any:
            tries.append(len(os.listdir("/proc/self/fd")))
            if len(tries) < 3:
                no_process()
            return Process()

        monkeypatch.setattr(module.subprocess, "Popen", scarce)
        monkeypatch.setattr(module, "RESTART_MAX_S", 0.0)
        await supervisor._start_again()
        assert len(set(tries)) == 1  # No failed try has left a descriptor behind.
        supervisor._drop()
        return before, len(os.listdir("/proc/self/fd")), supervisor

    before, after, supervisor = asyncio.run(story())

    assert before == after
    assert supervisor.restarts == 1


def test_the_engine_is_told_how_long_a_voice_over_the_reply_may_be_judged() -> None:
    """From the daemon's options to the rule: 400 ms of quiet end a voice that shall end after 300, not after 500."""
    decided = []
    for voice_end_ms in (300.0, 500.0):
        config = Config(model="clock", voice_end_ms=voice_end_ms, voice_min_ms=150.0, judge_max_ms=900.0)
        told = Supervisor(config, on_news=print, on_gone=print)._engine_config(MediaShape(1, 512, 1, 24_000))
        tunables = tunables_of(msgspec.json.decode(told, type=EngineConfig))
        assert (tunables.voice_min, tunables.decide_max) == (ticks_from_ms(150), ticks_from_ms(900))
        decided.append(BargeInRule(tunables).decide(SHORT_VOICE))

    assert decided == [Decision.RESUME, Decision.WAIT]


SHORT_VOICE = VoiceView(
    source="page",
    elapsed=ticks_from_ms(650),
    voiced=ticks_from_ms(250),
    echo=Ticks(0),
    quiet=ticks_from_ms(400),
    text="Mm-hmm.",
    stable="",
    certainty=-0.1,
    transcribed=True,
    reply_heard=True,
    audible=True,
    cancelled=True,
    learning=False,
    reply_tail="",
)
