"""What the daemon tells of a person's uplink: bounded, of every piece, and not to strangers."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from tests.webrtc.client import tone
from tests.webrtc.test_daemon import Visitor, at_a_daemon

pytestmark = pytest.mark.slow


def test_each_piece_is_told_with_its_time_and_the_sample_that_is_loud_first() -> None:
    """A tone for half a second: pieces of 20 ms, in order, and every one of them is loud."""

    async def story(visitor: Visitor) -> None:
        client = await visitor.connect(mic=tone(440))
        await asyncio.sleep(0.5)
        async with visitor.http.get(visitor.daemon.url + "api/uplink") as answer:
            told = await answer.json()
        (arrivals,) = told.values()
        await client.close()
        steps = [(after[0] - before[0]) % 2**32 for before, after in pairwise(arrivals)]

        assert len(arrivals) >= 10
        assert set(steps) == {960}
        assert all(after[1] >= before[1] for before, after in pairwise(arrivals))
        assert all(0 <= loud < 320 for _, _, loud in arrivals[2:])

    at_a_daemon(story)


def test_a_stranger_is_told_nothing() -> None:
    async def story(visitor: Visitor) -> None:
        async with visitor.http.get(visitor.daemon.url + "api/uplink") as answer:
            assert answer.status == 401
        headers = {"Authorization": "Bearer s3cret"}
        async with visitor.http.get(visitor.daemon.url + "api/uplink", headers=headers) as answer:
            assert (answer.status, await answer.json()) == (200, {})

    at_a_daemon(story, "--token", "s3cret")
