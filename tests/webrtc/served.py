"""What stories at a whole daemon share: running one, and waiting for pictures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import aiohttp

from duplexd.bench.daemon import Daemon

T = TypeVar("T")


class Seer(Protocol):
    @property
    def frames(self) -> Sequence[Any]:
        """Pictures that have come."""


def serve(
    story: Callable[[T], Awaitable[None]],
    guest: Callable[[Daemon, aiohttp.ClientSession], T],
    flags: Sequence[str],
    *,
    within_s: float,
) -> None:
    """Tell the story to a guest of a daemon of its own, which must end without having said anything of a fault."""

    async def run() -> None:
        async with Daemon(*flags) as daemon, aiohttp.ClientSession() as http:
            await asyncio.wait_for(story(guest(daemon, http)), within_s)
            said = daemon.said()
        assert "Traceback" not in said, said[-3000:]
        assert "was never retrieved" not in said

    asyncio.run(run())


async def until_frames(seer: Seer, count: int) -> None:
    for _ in range(100):
        if len(seer.frames) >= count:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{len(seer.frames)} frames have come, not {count}")
