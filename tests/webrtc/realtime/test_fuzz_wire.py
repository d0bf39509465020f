"""Ten thousand mutated frames, messages, packets and requests at a daemon's own sockets, beside a neighbour who talks.

The core alone is fuzzed in test_fuzz.py; here everything before it is: frames of a WebSocket (fragments, binary, bytes
that are no UTF-8, broken framing), the duplex and Live dialects with their first events, bodies of HTTP, messages of a
data channel and packets of RTP. What must hold each time: nobody's exception, every word of the neighbour's in its
place, and afterwards as many sessions, tasks, slots and descriptors as before.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import struct
from collections.abc import Awaitable, Callable
from enum import Enum
from random import Random
from typing import Any

import aiohttp
import numpy as np
import pytest

from duplexd.webrtc.realtime import resume
from tests.webrtc.realtime.daemon import Caller, call
from tests.webrtc.realtime.inside import Inside, Neighbour, inside
from tests.webrtc.realtime.rules import Broken
from tests.webrtc.realtime.simulated import b64, beep24
from tests.webrtc.realtime.test_fuzz import JUNK, VALID, mutated, part

pytestmark = pytest.mark.slow
#: How many of each; ten thousand together.
COUNTS = {"realtime": 3000, "duplex": 1500, "live": 1500, "channel": 1400, "rtp": 2000, "http": 600}
FRAMES_PER_CONNECTION = 100  #: below what a session may send at once: all of them are looked at
DESCRIPTORS_MORE = 3  #: that may be open afterwards: the client's own kept connections


def asked(text: str) -> dict[str, Any]:
    return {"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": [said(text)]}}


def said(text: str) -> dict[str, Any]:
    return part("input_text", text=text)


# A WebSocket as bytes -------------------------------------------------------------------------------------------------


def frame(
    opcode: int, payload: bytes, *, fin: bool = True, rsv: int = 0, masks: bool = True, length: int = -1
) -> bytes:
    """One frame of RFC 6455, or of nobody. `length`: what its header claims."""
    claimed = len(payload) if length < 0 else length
    head = bytes([(0x80 if fin else 0) | rsv << 4 | opcode])
    mask = os.urandom(4) if masks else b""
    bit = 0x80 if masks else 0
    if claimed < 126:
        head += bytes([bit | claimed])
    elif claimed < 65_536:
        head += bytes([bit | 126]) + struct.pack("!H", claimed)
    else:
        head += bytes([bit | 127]) + struct.pack("!Q", claimed)
    body = bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload)) if masks else payload
    return head + mask + body


TEXT, BINARY, GO_ON, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10


class After(Enum):
    """What becomes of a connection behind some bytes."""

    GOES_ON = "goes on"
    ENDS = "ends"  #: a strict server closes it
    WAITS = "waits"  #: for the rest of a frame, which never comes


def framed(text: str, rng: Random) -> tuple[bytes, After]:
    """An event on the wire, and what follows."""
    data = text.encode("utf-8", "surrogatepass")
    cut = rng.randrange(len(data) + 1)
    kind = rng.choices(
        ("plain", "fragments", "binary", "not_utf8", "control", "interleaved", "stray", "framing", "close", "short"),
        (60, 10, 6, 5, 6, 3, 3, 3, 2, 2),
    )[0]
    match kind:
        case "fragments":
            control = frame(rng.choice((PING, PONG)), b"x") if rng.random() < 0.3 else b""
            return frame(TEXT, data[:cut], fin=False) + control + frame(GO_ON, data[cut:]), After.GOES_ON
        case "binary":
            return frame(BINARY, data), After.GOES_ON
        case "not_utf8":
            return frame(TEXT, data[:cut] + rng.choice((b"\xff", b"\xc3(", b"\xed\xa0\x80")) + data[cut:]), After.ENDS
        case "control":
            return frame(rng.choice((PING, PONG)), rng.randbytes(rng.randint(0, 125))), After.GOES_ON
        case "interleaved":
            return frame(TEXT, data[:cut], fin=False) + frame(TEXT, data[cut:]), After.ENDS
        case "stray":
            return frame(GO_ON, data), After.ENDS
        case "framing":
            bad = (
                frame(TEXT, data, rsv=rng.randint(1, 7)),
                frame(rng.choice((3, 7, 11, 15)), data),
                frame(PING, rng.randbytes(126)),
                frame(PING, b"x", fin=False),
                frame(TEXT, b"", length=2**63 - 1),
            )
            return rng.choice(bad), After.ENDS
        case "close":
            return frame(
                CLOSE, rng.choice((b"", b"\x03", struct.pack("!H", rng.randint(0, 5000)), b"\x03\xe8\xff"))
            ), After.ENDS
        case "short":
            return frame(TEXT, data[:cut], length=len(data) + 1), After.WAITS
    return frame(TEXT, data), After.GOES_ON


class Wire:
    """A client's end of a WebSocket: bytes go out as they are, what comes is read and thrown away."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._marker, self._answered = b"", asyncio.Event()
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def open(cls, place: Inside, path: str) -> Wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
        key = base64.b64encode(os.urandom(16)).decode()
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{place.port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
        )
        status = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert status.startswith(b"HTTP/1.1 101"), status[:200]
        return cls(reader, writer)

    async def _read(self) -> None:
        with contextlib.suppress(ConnectionError):
            tail = b""
            while data := await self._reader.read(65_536):
                tail = tail[-64:] + data
                if self._marker and self._marker in tail:
                    self._answered.set()

    @property
    def ended(self) -> bool:
        return self._reading.done()

    async def put(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    async def leave(self, after: After) -> None:
        if after is not After.WAITS:
            await self.settle()
        await self.close()

    async def settle(self) -> None:
        """Until everything before has been looked at: a ping is answered in its turn, or the connection has ended."""
        self._marker = os.urandom(8).hex().encode()
        await self.put(frame(PING, self._marker))
        answered = asyncio.ensure_future(self._answered.wait())
        done, _ = await asyncio.wait([answered, self._reading], timeout=10, return_when=asyncio.FIRST_COMPLETED)
        answered.cancel()
        assert done, "the daemon neither answers a ping nor ends the connection"

    async def close(self) -> None:
        """Without a word, as a machine that is switched off."""
        self._reading.cancel()
        self._writer.transport.abort()
        await asyncio.gather(self._reading, return_exceptions=True)


async def put_frames(place: Inside, path: str, count: int, events: Callable[[Random], str], first: list[Any]) -> None:
    """So many mutated events, on as many connections as that takes; each begins with an event that may be valid."""
    rng = Random(count)
    wire: Wire | None = None
    on_this, after = 0, After.GOES_ON
    for _ in range(count):
        if wire is None or wire.ended or on_this >= FRAMES_PER_CONNECTION:
            if wire is not None:
                await wire.leave(after)
            wire, on_this = await Wire.open(place, path), 0
            if first:
                begin = rng.choice(first)
                text = json.dumps(begin) if rng.random() < 0.4 else mutated(begin, rng)
                await wire.put(frame(TEXT, text.encode("utf-8", "surrogatepass")))
        data, after = framed(events(rng), rng)
        await wire.put(data)
        on_this += 1
        if after is not After.GOES_ON:
            on_this = FRAMES_PER_CONNECTION
    assert wire is not None
    await wire.leave(after)


def either(valid: list[dict[str, Any]]) -> Callable[[Random], str]:
    """Mutated events, and one in five as it should be: something is alive that the others can hurt."""
    return lambda rng: json.dumps(rng.choice(valid)) if rng.random() < 0.2 else mutated(rng.choice(valid), rng)


REALTIME = [*VALID, asked("say 9"), {"type": "response.create"}, {"type": "response.cancel"}]


async def fuzz_realtime(place: Inside, count: int) -> None:
    await put_frames(place, "/v1/realtime?model=clock", count, either(REALTIME), [])


DUPLEX_FIRST: list[dict[str, Any]] = [
    {
        "type": "session.update",
        "session": {
            "model": "clock",
            "modalities": ["audio", "text"],
            "input_audio_format": "pcm16",
            "output_audio_format": "pcm16",
            "sample_rate_hz": 16_000,
            "audio": {"input": {"sample_rate_hz": 16_000}, "output": {"sample_rate_hz": 24_000}},
            "turn_detection": {"type": "server_vad"},
            "instructions": "x",
            "extra_body": {"auto_response": True},
        },
    },
    {"type": "session.update", "session": {"audio": {"output": [1]}}},
    {"type": "session.update", "session": {"audio": {"input": 3}, "modalities": None}},
    {
        "type": "session.resume",
        "session_id": "duplex_x",
        "resume_token": "x",
        "last_received_server_event_seq": 3,
    },
]
DUPLEX = [
    *VALID,
    {
        "type": "input_audio_buffer.append",
        "audio": b64(beep24(20)),
        "format": "pcm16",
        "sample_rate_hz": 16_000,
        "duration_ms": 20,
        "audio_end_ms": 20,
        "is_speech": True,
        "video_frames": ["aGVsbG8="],
    },
    {"type": "input_audio_buffer.commit", "final": True, "response_create": True},
    {"type": "input.text.append", "text": "say 5"},
    {"type": "input.cancel"},
    {"type": "barge_in"},
    {"type": "response.create"},
    {"type": "session.update", "session": {"instructions": "y"}},
    {"type": "session.heartbeat"},
    {"type": "session.event_ack", "server_event_seq": 2},
    {"type": "turn.signal", "signal": "end"},
]


async def fuzz_duplex(place: Inside, count: int) -> None:
    await put_frames(place, "/v1/realtime?duplex=1&model=clock", count, either(DUPLEX), DUPLEX_FIRST)


LIVE_FIRST: list[dict[str, Any]] = [
    {
        "type": "session.start",
        "session": {
            "model": "clock",
            "instructions": "x",
            "audio": {"format": {"type": "audio/pcm", "rate": 16_000}, "output": {"voice": "marin"}},
            "input": [{"type": "message", "role": "user", "content": [said("hello")]}],
            "client": {"data_channel": {"allowed_client_events": ["session.close"], "allowed_server_events": "all"}},
            "delegation": {"type": "client"},
            "store": False,
            "triggers": [],
        },
    },
    {"type": "session.start", "session": {"model": "clock", "audio": {"format": {"type": "audio/pcmu", "rate": 8000}}}},
    {"type": "session.start", "session": {"model": "clock", "input": ["x"]}},
    {"type": "session.start", "session": {"model": "clock", "input": [{"role": "user", "content": None}]}},
]
LIVE: list[dict[str, Any]] = [
    {"type": "session.input_audio.append", "audio": b64(beep24(20))},
    {"type": "session.input_audio.mute", "event_id": "m"},
    {"type": "session.input_audio.unmute"},
    {"type": "session.instructions.append", "content": "be brief", "delegation_id": None},
    {"type": "session.thinking.append", "content": "hm", "delegation_id": None},
    {"type": "session.commentary.append", "content": "say 4", "delegation_id": None},
    {"type": "session.update", "session": {"delegation": {"type": "client"}, "triggers": []}},
]


async def fuzz_live(place: Inside, count: int) -> None:
    await put_frames(place, "/v1/live/sessions", count, either(LIVE), LIVE_FIRST)


# A call ---------------------------------------------------------------------------------------------------------------


async def calling(place: Inside) -> Caller:
    """A caller whose channel is open, and whose rules of order are written down where they break."""
    caller, _ = await call(place)  # type: ignore[arg-type]
    await caller.until("session.created")
    broken: list[str] = []
    caller.channel.remove_all_listeners("message")

    def take(text: str) -> None:
        try:
            caller.talk.take(json.loads(text))
        except Broken as error:
            broken.append(str(error))
        caller.arrived.set()

    caller.channel.on("message", take)
    caller.broken = broken  # type: ignore[attr-defined]
    return caller


def message_of(rng: Random) -> str | bytes:
    text = either(REALTIME)(rng)
    kind = rng.choices(("text", "bytes", "empty", "large", "junk"), (80, 8, 3, 1, 8))[0]
    if kind == "bytes":
        return text.encode("utf-8", "surrogatepass")
    if kind == "large":
        return "x" * rng.choice((65_535, 65_536, 65_537, 100_000))
    if kind == "junk":
        return rng.choice((json.dumps(rng.choice(JUNK)), rng.randbytes(30), "\u0000", "[" * 3000))
    return "" if kind == "empty" else text


async def fuzz_channel(place: Inside, count: int) -> None:
    """In calls of 200 messages, so that a session's allowance lasts; strict rules of order hold on each."""
    rng = Random(2)
    each = 200
    for _ in range(count // each):
        caller = await calling(place)
        for index in range(each):
            with contextlib.suppress(UnicodeEncodeError, ValueError):  # Too large, says the client itself.
                caller.channel.send(message_of(rng))
            if index % 10 == 0:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert caller.broken == []  # type: ignore[attr-defined]
        await caller.close()


def packet_of(genuine: bytes, rng: Random) -> bytes:
    """A packet like one that was sent, but for one thing; another stream's number, or the same one's next."""
    first, second, _, stamp, ssrc = struct.unpack("!BBHII", genuine[:12])
    payload = genuine[12:]
    sequence = rng.randrange(65_536)
    ssrc = rng.choice((ssrc ^ 1, rng.randrange(2**32)))
    extra = b""
    match rng.randrange(9):
        case 0:
            payload = rng.randbytes(rng.randint(0, 300))
        case 1:
            payload = b""
        case 2:
            payload = payload[: rng.randint(0, 3)]
        case 3:
            second = (second & 0x80) | rng.randrange(128)
        case 4:
            stamp = rng.randrange(2**32)
        case 5:
            first |= 0x20  # Padding, and a count that may exceed everything.
            payload += bytes([rng.choice((0, 1, 255))])
        case 6:
            first |= 0x10
            extra = struct.pack("!HH", rng.choice((0xBEDE, 0x1000, 0)), 1) + rng.randbytes(4)
        case 7:
            first |= rng.randint(1, 3)
            extra = rng.randbytes(4 * (first & 15))
        case 8:
            payload = rng.randbytes(1400)
    return struct.pack("!BBHII", first, second, sequence, stamp, ssrc) + extra + payload


def is_rtcp(packet: bytes) -> bool:
    return 192 <= packet[1] <= 223


async def fuzz_rtp(place: Inside, count: int) -> None:
    """Beside each genuine packet ten that are not, protected as it is, or bare bytes. Nobody is deaf afterwards."""
    rng = Random(3)
    caller = await calling(place)
    transport = caller.connection.getSenders()[0].transport
    send, sent = transport._send_rtp, 0

    async def send_more(data: bytes) -> None:
        nonlocal sent
        await send(data)
        for _ in range(10):
            if sent >= count or len(data) < 12:
                return
            sent += 1
            if is_rtcp(data):
                junk = data[:2] + bytes(rng.choice((byte, rng.randrange(256))) for byte in data[2:])
                with contextlib.suppress(Exception):  # Of the library that protects it: not every header can be.
                    await send(junk)
            elif rng.random() < 0.15:
                await transport.transport._send(rng.choice((data, rng.randbytes(rng.randint(1, 200)))))
            else:
                with contextlib.suppress(Exception):
                    await send(packet_of(data, rng))

    transport._send_rtp = send_more
    while sent < count:
        await asyncio.sleep(0.05)
    transport._send_rtp = send
    assert caller.connection.connectionState == "connected"
    # Whoever sends under another number takes the stream over for two seconds (receive.py): speak again and again.
    caller.mic = np.tile(np.concatenate([beep24(900), beep24(900, 0)]), 6)
    await caller.until("input_audio_buffer.speech_started", seconds=15)
    assert caller.broken == []  # type: ignore[attr-defined]
    await caller.close()


# HTTP -----------------------------------------------------------------------------------------------------------------

CHAT: dict[str, Any] = {
    "model": "clock",
    "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "say 1"}]}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 4,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "n": 1,
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/audio/speech", {"model": "clock", "input": "1 2", "voice": "x", "response_format": "pcm", "speed": 1}),
    ("/v1/realtime/client_secrets", {"expires_after": {"anchor": "created_at", "seconds": 60}, "session": {}}),
    ("/v1/realtime/calls", {"sdp": "v=0", "session": {"type": "realtime"}}),
    ("/v1/live/sessions", {"session": LIVE_FIRST[0]["session"], "transport": {"type": "webrtc", "sdp": "v=0"}}),
]


async def ask_badly(place: Inside, rng: Random) -> None:
    """One request; whatever is wrong with it, the answer is typed and is not our fault."""
    path, body = rng.choice(BODIES)
    kind = rng.choices(("json", "form", "bytes", "type"), (80, 8, 6, 6))[0]
    options: dict[str, Any] = {"data": mutated(body, rng).encode("utf-8", "surrogatepass")}
    options["headers"] = {"Content-Type": "application/json"}
    if kind == "form":
        form = aiohttp.FormData({"model": rng.choice(("clock", "\u0000", "x" * 999))})
        form.add_field(rng.choice(("file", "sdp", "session")), rng.randbytes(rng.randint(0, 2000)), filename="a.wav")
        path, options = rng.choice(("/v1/audio/transcriptions", "/v1/realtime/calls")), {"data": form}
    elif kind == "bytes":
        options["data"] = rng.randbytes(rng.randint(0, 500))
    elif kind == "type":
        options["headers"] = {
            "Content-Type": rng.choice(("text/plain", "application/sdp", "multipart/form-data; boundary=x"))
        }
    async with place.http.post(place.url(path), **options) as answer:
        data = await answer.read()
        if answer.status >= 400:
            error = json.loads(data)["error"]
            assert answer.status != 500, (path, options, error)
            assert min(len(error["message"]), len(error["type"])) > 0, error


async def fuzz_http(place: Inside, count: int) -> None:
    rng = Random(4)
    left = count

    async def ask_on() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await ask_badly(place, rng)

    await asyncio.gather(*(ask_on() for _ in range(4)))


# ----------------------------------------------------------------------------------------------------------------------

Fuzz = Callable[[Inside, int], Awaitable[None]]
FUZZES: dict[str, Fuzz] = {
    "realtime": fuzz_realtime,
    "duplex": fuzz_duplex,
    "live": fuzz_live,
    "channel": fuzz_channel,
    "rtp": fuzz_rtp,
    "http": fuzz_http,
}
WARM_UP = {"realtime": 20, "duplex": 20, "live": 20, "channel": 200, "rtp": 20, "http": 20}


@pytest.mark.parametrize("kind", list(FUZZES))
def test_whatever_comes_on_a_wire_nothing_is_left_of_it_and_no_neighbour_notices(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "GRACE_S", 0.1)  # A duplex session waits so long for who broke off, not 30 s.

    async def story() -> None:
        async with inside(sessions_max=8) as place:
            await FUZZES[kind](place, WARM_UP[kind])
            before = await place.held_at_rest()
            neighbour = Neighbour(place)
            conversation = asyncio.ensure_future(neighbour.converse())
            await FUZZES[kind](place, COUNTS[kind])
            neighbour.leave()
            await conversation
            after = await place.held_at_rest(like=before)
            assert neighbour.replies > 0
            assert place.faults.found == []
            more = {name: after[name] - before[name] for name in before if after[name] != before[name]}
            assert 0 <= more.pop("descriptors", 0.0) <= DESCRIPTORS_MORE
            assert more == {}

    asyncio.run(story())


def test_ten_thousand_in_all() -> None:
    assert sum(COUNTS.values()) == 10_000
