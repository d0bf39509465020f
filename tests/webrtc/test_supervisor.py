"""When an engine that says nothing is given up, and when the silence is our own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from duplexd.config import Config
from duplexd.units import NANOS_PER_MS, Nanos
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
