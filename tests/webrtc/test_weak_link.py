"""A face over a link of 400 kbit/s: the voice loses nothing, and pictures get through.

The link is the impaired wire's own arithmetic (bench/netem.py) between the two sockets of a connection in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import numpy as np

from duplexd import clock
from duplexd.bench.netem import Impairment, Link
from duplexd.media.pictures import I420, PICTURE_FRAME, Picture
from duplexd.units import NANOS_PER_SECOND, Ticks
from duplexd.webrtc.peer import Sight
from tests.webrtc.client import TestClient, tone
from tests.webrtc.test_peer import Host, session

SIDE = 512
KBPS = 400
SECONDS = 6
UDP_HEADERS = 28  #: IPv4 and UDP


def restless(seed: int, count: int = 50) -> list[I420]:
    """A soft picture that wanders, in the noise of a cheap camera: an encoder takes all the bits it may for it."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    waves = [(rng.uniform(1, 6), rng.uniform(1, 6), rng.uniform(0, 6), rng.uniform(4, 9)) for _ in range(12)]
    pictures = []
    for number in range(count):
        turn = 2 * np.pi * number / count
        light = 128 + sum(size * np.sin(2 * np.pi * (fx * x + fy * y) + at + turn) for fx, fy, at, size in waves)
        planes = np.full((SIDE * 3 // 2, SIDE), 128, np.uint8)
        planes[:SIDE] = np.clip(light + rng.normal(0, 4, light.shape), 16, 235).astype(np.uint8)
        pictures.append(planes)
    return pictures


def narrow(peer: Any, link: Link) -> None:
    """All that the peer sends goes through the link."""
    loop = asyncio.get_running_loop()
    for transport in {t.sender.transport.transport for t in peer._connection.getTransceivers()}:
        send = transport._send

        async def arrive(data: bytes, send: Any = send) -> None:
            with contextlib.suppress(ConnectionError):  # The test is over, and this was under way.
                await send(data)

        async def through(data: bytes, arrive: Any = arrive) -> None:
            due = link.due(len(data) + UDP_HEADERS, clock.now())
            if due is not None:
                loop.call_at(
                    loop.time() + (due - clock.now()) / NANOS_PER_SECOND, lambda: loop.create_task(arrive(data))
                )

        transport._send = through


def test_the_voice_is_whole_and_pictures_come_over_400_kbit_a_second() -> None:
    pictures = restless(1)
    link = Link(rng=Random(1))
    link.impairment = Impairment(rate_kbps=KBPS, queue_ms=200)

    def look(pts: Ticks) -> Picture:
        frame = pts // PICTURE_FRAME
        return Picture(0, pts, Ticks(pts + PICTURE_FRAME), pictures[frame % len(pictures)])

    async def story(host: Host, page: TestClient) -> tuple[list[str], int]:
        narrow(host.peer, link)
        begun = len(page.heard)
        for _ in range(SECONDS * 100):
            await asyncio.sleep(0.01)
        return [how for _, _, how in page.heard[begun:]], len(page.frames)

    with ThreadPoolExecutor(1) as pool:
        host = Host(sight=Sight(look, pool, shown=True), pull_audio=tone(440))
        heard, frames = session(story, host=host, video="recvonly")
    print({how: heard.count(how) for how in set(heard)}, frames, link.stats)

    assert heard.count("ok") >= 0.95 * SECONDS * 50
    assert set(heard) == {"ok"}
    assert frames >= 5 * SECONDS
