"""Calls that offer a video line are shown the face; the word clock's is white while a word sounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from duplexd.media import tones
from tests.webrtc.realtime.daemon import Api, Caller, at_a_daemon, call
from tests.webrtc.realtime.simulated import beep24
from tests.webrtc.served import until_frames

pytestmark = pytest.mark.slow
WHITE_ABOVE = 190  #: luma; grey is 110, white 235
FRAME = 3600  #: of a picture, in 1/90000 s


def flashes(frames: Sequence[Any]) -> list[tuple[int, int]]:
    """Stretches of white, as (first, last) in 1/90000 s since the first frame that came."""
    found: list[tuple[int, int]] = []
    was_white = False
    for frame in frames:
        at = frame.pts - frames[0].pts
        is_white = frame.to_ndarray(format="gray").mean() > WHITE_ABOVE
        if is_white and was_white:
            found[-1] = (found[-1][0], at)
        elif is_white:
            found.append((at, at))
        was_white = is_white
    return found


def words(caller: Caller) -> list[int]:
    pcm = np.concatenate(caller.heard)
    return [word.index for word in tones.decode(pcm, 16_000) if word.end_sample - word.start_sample > 3200]


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def test_a_call_that_takes_video_sees_the_face_speak_and_one_that_does_not_costs_no_picture() -> None:
    async def story(api: Api) -> None:
        blind, _ = await call(api)
        await blind.until("session.created")
        blind.send("conversation.item.create", item=user("say 3"))
        blind.send("response.create")
        await blind.until("output_audio_buffer.stopped")
        metrics = await api.daemon.metrics()
        assert metrics["duplexd_frontend_views"] == 0
        assert metrics.get("duplexd_engine_face_frames", 0) == 0
        await blind.close()
        caller, _ = await call(api, video="recvonly")
        await caller.until("session.created")
        await until_frames(caller, 5)
        assert {(frame.width, frame.height) for frame in caller.frames} == {(64, 64)}
        assert (await api.daemon.metrics())["duplexd_frontend_views"] == 1
        caller.send("conversation.item.create", item=user("say 6"))
        caller.send("response.create")
        await caller.until("output_audio_buffer.stopped")
        assert words(caller) == list(range(6))
        assert 5 <= len(flashes(caller.frames)) <= 6  # Under load a frame is skipped, and a flash with it.
        await caller.close()
        await api.until_empty()
        assert (await api.daemon.metrics())["duplexd_frontend_pictures_shown_total"] >= len(caller.frames) / 2

    at_a_daemon(story)


def test_a_voice_over_a_call_stops_its_face_with_its_sound() -> None:
    async def story(api: Api) -> None:
        caller, _ = await call(api, video="recvonly")
        await caller.until("session.created")
        await until_frames(caller, 5)
        caller.send("conversation.item.create", item=user("say 12"))
        caller.send("response.create")
        await caller.until("output_audio_buffer.started")
        await asyncio.sleep(2.0)
        caller.mic = beep24(900)
        await caller.until("output_audio_buffer.cleared")
        cut = len(caller.frames)
        await caller.until("output_audio_buffer.stopped")  # Of the answer to what was said over the first reply.
        told = words(caller)
        first = [word for word in told if word < 32]
        assert 2 <= len(first) < 12
        assert told[len(first) :]
        # A word that was cut may flash for a moment, and is too short to be read.
        assert len(told) - 1 <= len(flashes(caller.frames)) <= len(told) + 1
        assert len(flashes(caller.frames[: cut + 5])) <= len(first) + 1
        await caller.close()
        await api.until_empty()

    at_a_daemon(story)


def test_voice_and_face_of_a_call_are_one_stream() -> None:
    """Stock clients play the stream of the track that came last: of two streams they would lose the voice."""

    async def story(api: Api) -> None:
        caller, _ = await call(api, video="recvonly")
        await caller.until("session.created")
        answer = caller.connection.remoteDescription.sdp
        streams = [line.split(":", 1)[1].split()[0] for line in answer.splitlines() if line.startswith("a=msid:")]
        assert len(streams) == 2
        assert len(set(streams)) == 1
        await caller.close()
        await api.until_empty()

    at_a_daemon(story)


def test_a_live_call_that_takes_video_sees_the_face() -> None:
    async def story(api: Api) -> None:
        caller = Caller(video="recvonly")
        caller.channel.remove_all_listeners("message")
        body = {"session": {"model": "clock"}, "transport": {"type": "webrtc", "sdp": await caller.offer()}}
        status, answer, _ = await api.post("/v1/live/sessions", json=body)
        assert status == 201, answer
        await caller.answer(answer["transport"]["sdp"])
        await until_frames(caller, 5)
        said = {"type": "session.commentary.append", "content": "say 3"}
        caller.channel.send(json.dumps(said))
        for _ in range(120):
            await asyncio.sleep(0.05)
            if len(flashes(caller.frames)) >= 3:
                break
        assert len(flashes(caller.frames)) == 3
        await caller.close()
        await api.until_empty()

    at_a_daemon(story)
