"""A whole daemon as strangers meet it: bad offers, bad messages, people who vanish, a crowd, and a killed engine.

The word clock speaks; the neighbour in most tests is a second session that must not notice anything.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import av
import numpy as np
import pytest

from duplexd.bench.daemon import Daemon
from duplexd.media import tones
from duplexd.webrtc.opus import VOICE_FRAME
from tests.webrtc.client import TestClient
from tests.webrtc.served import serve, until_frames

SESSIONS_MAX = 3
FLAGS = ("--model", "clock", "--loopback-media", "--sessions-max", str(SESSIONS_MAX))
pytestmark = pytest.mark.slow


class Visitor:
    """A person at a daemon: HTTP and a test client."""

    def __init__(self, daemon: Daemon, http: aiohttp.ClientSession) -> None:
        self.daemon = daemon
        self.http = http

    async def post(self, body: Any, **options: Any) -> tuple[int, dict[str, Any], Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.daemon.url + "api/session", data=data, **options) as answer:
            return answer.status, await answer.json(), answer.headers

    async def offer(self, sdp: object) -> tuple[int, dict[str, Any], Any]:
        return await self.post({"sdp": sdp, "type": "offer"})

    async def connect(self, **options: Any) -> TestClient:
        async def answer(sdp: str) -> str:
            status, body, _ = await self.offer(sdp)
            assert status == 200, body
            return str(body["sdp"])

        client = await TestClient.connect(answer, **options)
        ready = json.loads(await client.next_message("duplexd"))
        assert ready["t"] == "ready"
        return client

    async def sessions(self) -> int:
        return int((await self.ready())["sessions"])

    async def ready(self) -> dict[str, Any]:
        async with self.http.get(self.daemon.url + "readyz") as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def until_sessions(self, count: int, *, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            if await self.sessions() == count:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{await self.sessions()} sessions are left, not {count}, after {seconds} s")

    async def until_views(self, count: int, *, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            views = (await self.daemon.metrics())["duplexd_frontend_views"]
            if views == count:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{views} people see the face, not {count}, after {seconds} s")


Story = Callable[[Visitor], Awaitable[None]]


def at_a_daemon(story: Story, *flags: str, within_s: float = 90) -> None:
    serve(story, Visitor, (*FLAGS, *flags), within_s=within_s)


def say(client: TestClient, text: str, key: str) -> None:
    client.send("duplexd", json.dumps({"t": "say", "text": text, "id": key}))


async def message(client: TestClient, kind: str, *, seconds: float = 10.0, **wanted: Any) -> dict[str, Any]:
    """The next message of a kind; others are passed over."""

    async def search() -> dict[str, Any]:
        while True:
            found: dict[str, Any] = json.loads(await client.next_message("duplexd", seconds=seconds))
            if found["t"] == kind and all(found.get(k) == v for k, v in wanted.items()):
                return found

    return await asyncio.wait_for(search(), seconds)


@contextmanager
def undisturbed(client: TestClient, words: int) -> Iterator[None]:
    """The neighbour's reply of `words` words comes through complete and in order."""
    yield
    pcm = np.concatenate([pcm for pcm, _, _ in client.heard])
    heard = [word.index for word in tones.decode(pcm, 16_000) if word.end_sample - word.start_sample > 3200]
    assert heard == list(range(words)), heard


def test_strangers_with_bad_offers_get_a_sentence_and_the_neighbour_hears_nothing_of_it() -> None:
    async def story(visitor: Visitor) -> None:
        neighbour = await visitor.connect()
        say(neighbour, "say 12", "n1")
        with undisturbed(neighbour, 12):
            for offer, expected in [
                ("this is no sdp", "SDP"),
                (None, "SDP"),
                ("v=0\r\no=- 1 1 IN IP4 0.0.0.0\r\ns=-\r\nt=0 0\r\n", "audio"),
                ("v=0\r\n" + "a=x\r\n" * 60_000, ""),
            ]:
                status, body, _ = await visitor.offer(offer)
                assert status in (400, 413), body
                assert expected.lower() in body["error"]["message"].lower()
            for raw in (b"not json", b"\xff\xfe", b"[]", b'{"type": "answer"}'):
                status, body, _ = await visitor.post(raw)
                assert (status, body["error"]["code"]) == (400, "bad_offer")
            await message(neighbour, "reply", state="completed", seconds=15)
        assert await visitor.sessions() == 1
        await neighbour.close()

    at_a_daemon(story)


def test_an_offer_without_candidates_connects() -> None:
    """What some SDKs send (notes: agents-realtime); the person's packets say where they are."""

    def without(sdp: str) -> str:
        return "".join(line for line in sdp.splitlines(keepends=True) if "candidate" not in line)

    async def story(visitor: Visitor) -> None:
        neighbour = await visitor.connect()
        say(neighbour, "say 9", "n1")
        with undisturbed(neighbour, 9):
            client = await visitor.connect(munge=without)
            say(client, "say 2", "a")
            await message(client, "reply", state="completed")
            await message(neighbour, "reply", state="completed", seconds=15)
        await client.close()
        await neighbour.close()

    at_a_daemon(story)


def test_a_client_that_takes_video_sees_the_face_until_it_is_hidden() -> None:
    """25 frames a second; nothing while nobody sees the page, and a picture again when somebody does. The neighbour,
    who takes no video, hears its reply undisturbed.
    """

    async def story(visitor: Visitor) -> None:
        neighbour, client = await visitor.connect(), await visitor.connect(video="recvonly")
        say(neighbour, "say 12", "n1")
        with undisturbed(neighbour, 12):
            clocks = await message(client, "clocks")
            await message(neighbour, "reply", state="completed", seconds=15)
        assert {"voice", "face"} <= clocks.keys()
        assert len(client.frames) >= 60
        assert {(frame.width, frame.height) for frame in client.frames} == {(64, 64)}
        client.send("duplexd", '{"t":"seen","on":false}')
        await visitor.until_views(0, seconds=3)
        await asyncio.sleep(0.3)
        hidden = len(client.frames)
        await asyncio.sleep(1.5)
        assert len(client.frames) <= hidden + 1
        client.send("duplexd", '{"t":"seen","on":true}')
        await visitor.until_views(1, seconds=3)
        await until_frames(client, hidden + 20)
        await neighbour.close()
        await client.close()

    at_a_daemon(story)


def test_bad_messages_get_an_error_each_and_the_session_goes_on() -> None:
    async def story(visitor: Visitor) -> None:
        neighbour, client = await visitor.connect(), await visitor.connect()
        say(neighbour, "say 12", "n1")
        with undisturbed(neighbour, 12):
            for data in (
                "not json",
                '{"t":"say"}',
                '{"t":"unheard-of"}',
                '{"t":"say","text":"x","id":"y","extra":1}',
                '{"t":"pos","rtp":"many","age_ms":0}',
                "[]",
                "x" * 60_000,
            ):
                client.send("duplexd", data)
                error = await message(client, "error")
                assert error["code"] == "bad_message", error
                assert len(error["message"]) > 20
            client.send("duplexd", b"\xff\xfe\x00binary")
            assert (await message(client, "error"))["code"] == "not_text"
            await client.send_raw("duplexd", b'{"t":"\xff\xfe"}')
            assert (await message(client, "error"))["code"] == "not_utf8"
            client.send("duplexd", json.dumps({"t": "say", "text": "   ", "id": "blank"}))
            assert (await message(client, "error"))["code"] == "empty_text"
            client.send("duplexd", json.dumps({"t": "image", "data": "AAAA", "id": "pic"}))
            refusal = await message(client, "error")
            assert (refusal["code"], refusal["id"]) == ("modality_unsupported", "pic")
            say(client, "say 3", "fine")
            await message(client, "reply", state="completed")
            await message(neighbour, "reply", state="completed", seconds=15)
        await client.close()
        await neighbour.close()

    at_a_daemon(story)


def test_a_message_of_a_megabyte_is_refused_and_nobody_else_notices() -> None:
    """Its sender ignores the size that was announced; the session goes on."""

    async def story(visitor: Visitor) -> None:
        neighbour, client = await visitor.connect(), await visitor.connect()
        say(neighbour, "say 16", "n1")
        with undisturbed(neighbour, 16):
            client.connection.sctp._remote_max_message_size = 0
            say(client, "x" * 1_000_000, "megabyte")
            assert (await message(client, "error", seconds=20))["code"] == "too_large"
            say(client, "say 2", "fine")
            await message(client, "reply", state="completed")
            await message(neighbour, "reply", state="completed", seconds=20)
        await client.close()
        await neighbour.close()

    at_a_daemon(story)


def test_positions_from_the_past_and_the_future_are_harmless() -> None:
    """Positions far away, backwards, of no packet: nothing raises, and no word is committed before it was heard."""

    async def story(visitor: Visitor) -> None:
        neighbour, client = await visitor.connect(), await visitor.connect()
        say(neighbour, "say 9", "n1")
        say(client, "say 9", "a")
        with undisturbed(neighbour, 9):
            for rtp, age in [(0, 0), (2**32 - 1, 1e9), (12345, -5.0), (2**31, 0), (0, float(2**40))]:
                for hold in (0, 7):
                    where = {"rtp": rtp, "age_ms": age, "passed_ms": age, "bound_ms": -age, "muted": hold > 0}
                    pos = {"t": "pos", **where, "hold": hold, "epoch": 99}
                    client.send("duplexd-fast", json.dumps(pos))
                    await asyncio.sleep(0.05)
            counts = await committed(client)
            await message(neighbour, "reply", state="completed", seconds=15)
        assert counts[-1] == (9, 9)
        assert len(counts) >= 5  # Word by word.
        assert [told for told, heard in counts if told > heard] == []
        await client.close()
        await neighbour.close()

    at_a_daemon(story)


async def committed(client: TestClient) -> list[tuple[int, int]]:
    """Until the reply is over: the words the daemon counts as heard, and those that have come out of the track by
    then.
    """
    counts = []
    while True:
        found = json.loads(await client.next_message("duplexd", seconds=15))
        if found["t"] == "heard":
            counts.append((found["words"], whole_words(client)))
        elif (found["t"], found.get("state")) == ("reply", "completed"):
            return counts


def whole_words(client: TestClient) -> int:
    pcm = np.concatenate([pcm for pcm, _, _ in client.heard])
    return sum(word.end_sample - word.start_sample > 3200 for word in tones.decode(pcm, 16_000))


def test_one_who_vanishes_is_noticed_within_seconds() -> None:
    """A killed tab sends no goodbye: the heartbeat notices, the slot is free, the neighbour talks on (T-ICE-05)."""

    async def story(visitor: Visitor) -> None:
        neighbour, client = await visitor.connect(), await visitor.connect()
        say(client, "say 30", "a")
        say(neighbour, "say 16", "n1")
        await asyncio.sleep(1.0)
        with undisturbed(neighbour, 16):
            client.vanish()
            await visitor.until_sessions(1, seconds=6)
            await message(neighbour, "reply", state="completed", seconds=15)
        await neighbour.close()

    at_a_daemon(story)


def test_a_crowd_is_admitted_up_to_the_limit_and_refused_beyond_it() -> None:
    """Twelve offers at once, three places (T-CON-05): three are in, nine get 503 with Retry-After and a reason."""

    async def story(visitor: Visitor) -> None:
        statuses: list[int] = []
        refusals: list[tuple[dict[str, Any], Any]] = []

        async def answer(sdp: str) -> str:
            status, body, headers = await visitor.offer(sdp)
            statuses.append(status)
            if status != 200:
                refusals.append((body, headers))
                raise ConnectionRefusedError
            return str(body["sdp"])

        async def attempt() -> TestClient | None:
            try:
                return await TestClient.connect(answer)
            except ConnectionRefusedError:
                return None

        clients = [c for c in await asyncio.gather(*(attempt() for _ in range(12))) if c is not None]
        assert statuses.count(200) == SESSIONS_MAX
        assert statuses.count(503) == 12 - SESSIONS_MAX
        for body, headers in refusals:
            assert body["error"]["code"] == "busy"
            assert "3 sessions" in body["error"]["message"]
            assert body["error"]["shortage"] == {"of": "sessions", "needed": 4, "available": 3, "unit": "sessions"}
            assert int(headers["Retry-After"]) > 0
        for client in clients:
            await client.close()
        await visitor.until_sessions(0, seconds=5)

    at_a_daemon(story)


def test_a_killed_engine_ends_its_sessions_with_a_reason_and_comes_back() -> None:
    """kill -9: every page is told why, no shared memory is left, and the next person is served by a new engine."""

    async def story(visitor: Visitor) -> None:
        clients = [await visitor.connect(), await visitor.connect()]
        say(clients[0], "say 20", "a")
        await message(clients[0], "state", state="speaking")
        old = visitor.daemon.engine_pid()
        os.kill(old, signal.SIGKILL)
        for client in clients:
            closed = await message(client, "closed", seconds=10)
            assert "engine" in closed["reason"]
            assert "signal 9" in closed["reason"]
        await visitor.until_sessions(0, seconds=5)
        assert not Path(f"/proc/{old}").exists()
        assert not memory_files(visitor.daemon.pid)
        for _ in range(200):
            if (await visitor.ready())["engine"] == "ready":
                break
            await asyncio.sleep(0.1)
        assert visitor.daemon.engine_pid() != old
        fresh = await visitor.connect()
        say(fresh, "say 2", "b")
        await message(fresh, "reply", state="completed")
        for client in (*clients, fresh):
            await client.close()

    at_a_daemon(story)


def memory_files(pid: int) -> list[str]:
    """Shared media this process still holds."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if "duplexd-media" in target:
            found.append(target)
    return found


def test_three_long_conversations_share_memory_for_one() -> None:
    """What the first has said leaves for host memory when the others need room, and is back for its next turn."""

    async def story(visitor: Visitor) -> None:
        clients = [await visitor.connect() for _ in range(3)]
        for turn in range(2):
            for number, client in enumerate(clients):
                say(client, "say 2 " + "word " * (380 if turn == 0 else 3), f"{turn}-{number}")
                await message(client, "reply", state="completed", seconds=15)
        metrics = await visitor.daemon.metrics()
        assert metrics["duplexd_engine_pages_offloaded"] > 0
        assert metrics["duplexd_engine_pages_restored"] > 0
        held = {
            place: [v for n, v in metrics.items() if n.startswith(f"duplexd_engine_session_{place}_bytes{{session=")]
            for place in ("arena", "host")
        }
        assert [len(values) for values in held.values()] == [3, 3]
        assert min(held["arena"]) > 0
        assert sum(map(sum, held.values())) == metrics["duplexd_engine_session_bytes_all"]
        assert sum(held["host"]) == metrics["duplexd_engine_bytes_long_term"]
        for client in clients:
            await client.close()

    at_a_daemon(story, "--sessions-resident", "1")


def test_fifty_connections_leave_nothing_behind() -> None:
    """Threads, tasks, descriptors, slots and pages return to where they were (T-MEM-04)."""

    async def story(visitor: Visitor) -> None:
        await visit(visitor, 0)
        before = await visitor.daemon.held_at_rest()
        for number in range(1, 51):
            await visit(visitor, number)
        after = await visitor.daemon.held_at_rest()
        assert after == before

    at_a_daemon(story, within_s=300)


async def visit(visitor: Visitor, number: int) -> None:
    """One short conversation, left in the middle of the reply."""
    client = await visitor.connect(video="recvonly")
    say(client, "say 20", f"v{number}")
    await message(client, "state", state="speaking")
    await client.close()
    await visitor.until_sessions(0, seconds=8)


def test_an_empty_packet_does_not_make_the_person_deaf() -> None:
    """Empty and garbage Opus payloads between words (aiortc#1349): the person is heard afterwards."""

    async def story(visitor: Visitor) -> None:
        neighbour, client = await visitor.connect(), await visitor.connect()
        say(neighbour, "say 12", "n1")
        spoil(client, [b"", b"\x00", b"\xff" * 3, bytes(range(200)), b""])
        await asyncio.sleep(0.3)
        at = np.arange(24_000 // 2) / 24_000
        loud = np.asarray(0.4 * 32767 * np.sin(2 * np.pi * 700 * at), np.int16)
        spoken = np.concatenate([loud, np.zeros(VOICE_FRAME * 200, np.int16)])
        with undisturbed(neighbour, 12):
            client.mic = from_now(spoken)
            said = await message(client, "user", final=True, seconds=15)
            assert said["text"].startswith("sound")
            await message(neighbour, "reply", state="completed", seconds=15)
        await client.close()
        await neighbour.close()

    at_a_daemon(story)


def from_now(pcm: np.ndarray[Any, np.dtype[np.int16]]) -> Callable[[Any], Any]:
    """The recording from the first frame that is asked for on."""
    at = {"next": 0}

    def source(pts: Any) -> Any:
        start = at["next"]
        at["next"] = start + VOICE_FRAME
        part = pcm[start : start + VOICE_FRAME]
        return np.concatenate([part, np.zeros(VOICE_FRAME - len(part), np.int16)])

    return source


def spoil(client: TestClient, payloads: list[bytes]) -> None:
    """The next packets of this client carry these payloads instead of Opus."""
    encode = client.track._encoder.encode

    def encode_badly(pcm: Any, *, pts: Any) -> Any:
        packet = encode(pcm, pts=pts)
        if not payloads:
            return packet
        bad = av.Packet(payloads.pop(0))
        bad.pts, bad.time_base = packet.pts, packet.time_base
        return bad

    client.track._encoder.encode = encode_badly


def test_a_token_is_asked_for_when_one_is_set() -> None:
    async def story(visitor: Visitor) -> None:
        status, body, _ = await visitor.offer("v=0")
        assert (status, body["error"]["code"]) == (401, "unauthorised")
        status, body, _ = await visitor.post(
            {"sdp": "v=0", "type": "offer"}, headers={"Authorization": "Bearer s3cret"}
        )
        assert status == 400
        for headers, servers in (
            ({}, 0),
            ({"Authorization": "Bearer wrong"}, 0),
            ({"Authorization": "Bearer s3cret"}, 1),
        ):
            async with visitor.http.get(visitor.daemon.url + "api/config", headers=headers) as answer:
                config = await answer.json()
            assert config["token_required"]
            assert len(config["ice_servers"]) == servers  # Their passwords are for those who have the token.
        assert "s3cret" not in visitor.daemon.said()

    at_a_daemon(story, "--token", "s3cret", "--ice-servers", "turn:me:pass@127.0.0.1:3478")
