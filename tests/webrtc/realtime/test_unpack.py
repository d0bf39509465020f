"""A large event of a socket holds up nobody: it is taken apart between turns of the loop, and is whole or nothing."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from duplexd.webrtc.realtime.errands import _unpack_recordings
from duplexd.webrtc.realtime.items import HEADER_MAX, check_image
from duplexd.webrtc.realtime.limits import EVENT_BYTES_MAX
from duplexd.webrtc.realtime.unpack import LARGE, PART_BYTES, PIECE, parts, unpack
from tests.webrtc.realtime.engineless import Place, at_a_door

MINUTE = bytes(range(256)) * (60 * 24_000 * 2 // 256)  #: 2.7 MiB: a minute of PCM at 24 kHz


def append(sound: bytes, **fields: Any) -> str:
    return json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(sound).decode(), **fields})


def unpacked(text: str, *, longest: int = EVENT_BYTES_MAX) -> tuple[Any, int]:
    """What becomes of a frame, and how many turns the loop had meanwhile."""
    return beside(lambda: unpack(text, longest=longest))


def beside(act: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[Any, int]:
    async def run() -> tuple[Any, int]:
        work = asyncio.ensure_future(act())
        turns = 0
        while not work.done():
            await asyncio.sleep(0)
            turns += 1
        return work.result(), turns

    return asyncio.run(run())


def test_a_minute_of_sound_leaves_the_loop_a_turn_for_every_piece() -> None:
    """At once it took as long as nine packets of everybody's voice."""
    event, turns = unpacked(append(MINUTE, event_id="e1"))

    assert event == {"type": "input_audio_buffer.append", "audio": MINUTE, "event_id": "e1"}
    assert turns > len(MINUTE) * 4 / 3 / PIECE


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(append(b"\0" * 480), id="small"),
        pytest.param("[" + " " * LARGE, id="no JSON"),
        pytest.param("[" + " " * LARGE + "]", id="no object"),
    ],
)
def test_what_is_small_or_no_event_is_left_as_it_came(text: str) -> None:
    assert unpacked(text)[0] is text


def test_what_is_too_long_is_not_even_read() -> None:
    text = append(MINUTE)

    assert unpacked(text, longest=len(text) - 1) == (text, 1)


def test_parts_are_the_sound_in_its_order() -> None:
    event = {"type": "session.input_audio.append", "audio": MINUTE}
    found = list(parts(event))

    assert b"".join(part["audio"] for part in found) == MINUTE
    assert max(len(part["audio"]) for part in found) == PART_BYTES
    assert {part["type"] for part in found} == {"session.input_audio.append"}


async def told(socket: Any, *kinds: str) -> dict[str, Any]:
    while True:
        event: dict[str, Any] = await socket.receive_json(timeout=5)
        if event["type"] in kinds:
            return event


def test_what_follows_a_large_append_finds_all_of_it() -> None:
    async def story(place: Place) -> None:
        async with place.http.ws_connect("/v1/realtime?model=clock") as socket:
            await socket.send_str(append(MINUTE))
            await socket.send_json({"type": "input_audio_buffer.commit"})
            assert (await told(socket, "error", "input_audio_buffer.committed"))["type"] != "error"
            (visit,) = place.frontend.visits.values()
            (item,) = visit.bridge.session._commits.values()
            assert item.duration_ms == 60_000

    at_a_door(story)


@pytest.mark.parametrize("at", [100, PIECE - 2, -10], ids=["in the first piece", "at its end", "in the last piece"])
@pytest.mark.parametrize("wrong", ["!", "="])
def test_a_large_append_that_is_no_base64_somewhere_is_one_error_and_leaves_nothing(at: int, wrong: str) -> None:
    text = base64.b64encode(MINUTE).decode()
    at %= len(text)
    broken = text[:at] + wrong * 2 + text[at + 2 :]

    async def story(place: Place) -> None:
        async with place.http.ws_connect("/v1/realtime?model=clock") as socket:
            await socket.send_json({"type": "input_audio_buffer.append", "audio": broken, "event_id": "mine"})
            error = (await told(socket, "error"))["error"]
            assert (error["code"], error["param"], error["event_id"]) == ("invalid_value", "audio", "mine")
            await socket.send_json({"type": "input_audio_buffer.commit"})
            assert (await told(socket, "error"))["error"]["code"] == "input_audio_buffer_commit_empty"

    at_a_door(story)


def test_the_other_dialects_take_it_too() -> None:
    """The duplex dialect as it stands; a Live session part after part, whatever joined it is told each."""

    async def story(place: Place) -> None:
        async with place.http.ws_connect("/v1/realtime?duplex=1") as socket:
            await socket.send_json({"type": "session.update", "session": {"sample_rate_hz": 24_000}})
            await socket.send_str(append(MINUTE))
            await socket.send_json({"type": "session.heartbeat"})
            await socket.send_json({"type": "input_audio_buffer.commit", "response_create": False})
            assert (await told(socket, "error", "input_audio_buffer.committed"))["type"] != "error"
        async with place.http.ws_connect("/v1/live/sessions") as socket:
            await socket.send_json({"type": "session.start", "session": {"model": "clock"}})
            started = await told(socket, "session.started")
            async with place.http.ws_connect(f"/v1/live/sessions/{started['session']['id']}/attach") as side:
                await told(side, "session.started")
                await socket.send_json(
                    {"type": "session.input_audio.append", "audio": base64.b64encode(MINUTE).decode()}
                )
                heard = 0
                while heard < len(MINUTE) * 0.99:
                    heard += len(base64.b64decode((await told(side, "session.input_audio.append"))["audio"]))

    at_a_door(story)


@pytest.mark.parametrize("kind", ["input_audio", "audio_url"])
def test_a_recording_in_a_chat_is_taken_apart_too(kind: str) -> None:
    text = base64.b64encode(MINUTE).decode()
    given = {"data": text} if kind == "input_audio" else {"url": f"data:audio/wav;base64,{text}"}
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": kind, kind: given}]}]
    _, turns = beside(lambda: _unpack_recordings(messages))

    assert given["data"] == MINUTE
    assert turns > len(text) / PIECE


def test_a_large_recording_in_a_chat_that_is_no_base64_is_the_clients_fault() -> None:
    part = {"type": "input_audio", "input_audio": {"data": "A" * LARGE + "!!!!"}}

    async def story(place: Place) -> None:
        body = {"messages": [{"role": "user", "content": [part]}]}
        answer = await place.http.post("/v1/chat/completions", json=body)
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_value")
        assert place.session_count == 0

    at_a_door(story)


def test_of_a_picture_only_the_beginning_is_undone_to_know_its_size() -> None:
    header = base64.b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x40\0\0\0\x30").decode()

    assert check_image("data:image/png;base64," + header.ljust(HEADER_MAX, "A") + "!", "url") == (64, 48)
