"""Field cases that need a whole daemon: a place for one, taken again by whoever closed and came back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.webrtc.client import TestClient
from tests.webrtc.realtime.daemon import Api, Talk, at_a_daemon, call

pytestmark = pytest.mark.slow
TRIES = 30
TRY_EVERY_S = 0.1  #: 30 tries: three seconds


async def page(api: Api) -> tuple[TestClient, str]:
    """A page's session, and where its beacon goes. Raises PlaceTaken."""
    closing = ""

    async def answer(sdp: str) -> str:
        nonlocal closing
        body = {"sdp": sdp, "type": "offer"}
        async with api.http.post(api.url("/api/session"), json=body) as reply:
            made: dict[str, Any] = await reply.json()
            if reply.status == 503:
                raise PlaceTaken(made["error"]["code"])
            assert reply.status == 200, made
            closing = made["close_url"]
            return str(made["sdp"])

    client = await TestClient.connect(answer)
    assert json.loads(await client.next_message("duplexd"))["t"] == "ready"
    return client, closing


class PlaceTaken(Exception):
    """The daemon is full."""


async def within_three_seconds(come: Any) -> Any:
    for _ in range(TRIES):
        try:
            return await come()
        except PlaceTaken:
            await asyncio.sleep(TRY_EVERY_S)
    raise AssertionError("the place is still taken after three seconds")


@pytest.mark.parametrize("way", ["beacon", "goodbye", "call", "socket"])
def test_who_closes_and_comes_again_is_taken_at_once(way: str) -> None:
    """T-RC-08: one place, which the page's beacon, a connection's goodbye, a call's end or a closed socket frees."""

    async def story(api: Api) -> None:
        if way in ("beacon", "goodbye"):
            first, closing = await page(api)
            with pytest.raises(PlaceTaken):
                await page(api)
            if way == "beacon":
                async with api.http.post(api.url(closing)) as said:
                    assert said.status == 200
            await first.close()
        elif way == "call":
            caller, _ = await call(api)
            await caller.until("session.created")
            with pytest.raises(PlaceTaken):
                await page(api)
            await caller.close()
        else:
            async with api.socket() as socket:
                await Talk(socket).until("session.created")
                with pytest.raises(PlaceTaken):
                    await page(api)
        again, _ = await within_three_seconds(lambda: page(api))
        await again.close()
        await api.until_empty()

    at_a_daemon(story, "--sessions-max", "1")


def test_a_full_daemon_says_when_to_come_again() -> None:
    """T-CON-07, over HTTP: 503, typed, with `Retry-After`, and nobody who was there is disturbed."""

    async def story(api: Api) -> None:
        async with api.socket() as socket:
            talk = Talk(socket)
            await talk.until("session.created")
            await talk.ask("say 3")
            async with api.http.post(api.url("/v1/audio/speech"), json={"input": "1", "model": "clock"}) as refused:
                error = (await refused.json())["error"]
                assert (refused.status, error["type"]) == (503, "server_error")
                assert int(refused.headers["Retry-After"]) > 0
            with pytest.raises((aiohttp.ClientError, AssertionError)):
                async with api.socket() as second:
                    await Talk(second).until("session.created", seconds=1)
            await talk.until("response.done")
            assert talk.words() == [0, 1, 2]
        await api.until_empty()

    at_a_daemon(story, "--sessions-max", "1")
