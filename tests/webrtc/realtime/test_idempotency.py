"""Requests that come again under one Idempotency-Key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from duplexd.config import Config
from duplexd.messages import ReplyWanted, ResponseState
from duplexd.units import Nanos
from duplexd.webrtc.realtime.idempotency import ANSWER_BYTES_MAX, WINDOW, Answers
from duplexd.webrtc.realtime.requests import Refusal
from tests.webrtc.realtime.engineless import Place, at_a_door, reply_of, words_of

KEY = {"Idempotency-Key": "k1"}
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def answering(place: Place) -> None:
    """Every reply says its number."""

    def answer(wanted: ReplyWanted) -> None:
        number = len(place.engine.told(ReplyWanted))
        reply = reply_of(wanted.session, number=number, key=wanted.key)
        place.engine.say(
            reply(ResponseState.ACCEPTED), words_of(wanted.session, number=number, text=f"number {number}")
        )
        place.engine.say(reply(ResponseState.COMPLETED))

    place.engine.on_reply_wanted = answer


async def chat(place: Place, body: dict[str, Any] = CHAT, **headers: str) -> tuple[int, str, Any]:
    answer = await place.http.post("/v1/chat/completions", json=body, headers=headers)
    return answer.status, await answer.text(), answer.headers


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_chat_that_comes_again_is_told_again_and_not_made_again(stream: bool) -> None:
    async def story(place: Place) -> None:
        answering(place)
        first = await chat(place, {**CHAT, "stream": stream}, **KEY)
        second = await chat(place, {**CHAT, "stream": stream}, **KEY)
        third = await chat(place, {**CHAT, "stream": stream})
        assert first[:2] == second[:2]
        assert "number 1" in second[1]
        assert (first[2].get("Idempotent-Replayed"), second[2].get("Idempotent-Replayed")) == (None, "true")
        assert second[2]["Content-Type"] == first[2]["Content-Type"]
        assert "number 2" in third[1]

    at_a_door(story)


def test_one_key_for_two_contents_is_refused() -> None:
    async def story(place: Place) -> None:
        answering(place)
        await chat(place, **KEY)
        other = {"messages": [{"role": "user", "content": "y"}]}
        status, text, _ = await chat(place, other, **KEY)
        assert status == 422
        assert "idempotency_key_reused" in text
        assert len(place.engine.told(ReplyWanted)) == 1

    at_a_door(story)


def test_what_failed_is_made_anew() -> None:
    async def story(place: Place) -> None:
        def fail(wanted: ReplyWanted) -> None:
            reply = reply_of(wanted.session, number=1, key=wanted.key)
            place.engine.say(reply(ResponseState.ACCEPTED), reply(ResponseState.FAILED, reason="NaN"))

        place.engine.on_reply_wanted = fail
        assert (await chat(place, **KEY))[0] == 500
        answering(place)
        assert (await chat(place, **KEY))[0] == 200

    at_a_door(story)


def test_a_stream_that_broke_off_is_made_anew() -> None:
    async def story(place: Place) -> None:
        def fail(wanted: ReplyWanted) -> None:
            reply = reply_of(wanted.session, number=1, key=wanted.key)
            place.engine.say(reply(ResponseState.ACCEPTED), words_of(wanted.session, number=1, text="half"))
            place.engine.say(reply(ResponseState.FAILED, reason="NaN"))

        body = {**CHAT, "stream": True}
        place.engine.on_reply_wanted = fail
        assert "half" in (await chat(place, body, **KEY))[1]
        answering(place)
        assert "number 2" in (await chat(place, body, **KEY))[1]

    at_a_door(story)


def test_one_that_comes_again_while_it_is_being_answered_is_told_to_wait() -> None:
    async def story(place: Place) -> None:
        first = asyncio.create_task(chat(place, **KEY))
        while not place.engine.told(ReplyWanted):
            await asyncio.sleep(0.001)
        status, text, _ = await chat(place, **KEY)
        assert (status, "request_in_progress" in text) == (409, True)
        wanted = place.engine.told(ReplyWanted)[0]
        reply = reply_of(wanted.session, number=1, key=wanted.key)
        place.engine.say(reply(ResponseState.ACCEPTED), words_of(wanted.session, number=1, text="late"))
        place.engine.say(reply(ResponseState.COMPLETED))
        assert "late" in (await first)[1]
        assert "late" in (await chat(place, **KEY))[1]
        assert len(place.engine.told(ReplyWanted)) == 1

    at_a_door(story)


def test_a_key_belongs_to_who_sent_it() -> None:
    """Nobody is told another's answer because they chose the same key."""

    async def story(place: Place) -> None:
        answering(place)
        master = {"Authorization": "Bearer t0ken"}
        made = await place.http.post("/v1/realtime/client_secrets", json={}, headers=master)
        other = {"Authorization": f"Bearer {(await made.json())['value']}"}
        assert "number 1" in (await chat(place, **KEY, **master))[1]
        assert "number 2" in (await chat(place, **KEY, **other))[1]
        assert (await chat(place, **KEY))[0] == 401

    at_a_door(story, config=Config(model="clock", voice_detector="energy", token="t0ken"))


def test_a_secret_is_made_once() -> None:
    async def story(place: Place) -> None:
        values = []
        for _ in range(2):
            answer = await place.http.post("/v1/realtime/client_secrets", json={}, headers=KEY)
            values.append((await answer.json())["value"])
        assert values[0] == values[1]

    at_a_door(story)


def once(answers: Answers, key: str, made: list[str], *, now: int = 0, body: bytes = b"answer") -> web.StreamResponse:
    async def make() -> web.StreamResponse:
        made.append(key)
        return web.Response(body=body)

    request = make_mocked_request("POST", "/x", headers={"Idempotency-Key": key})
    return asyncio.run(answers.once(request, make, content=[b"same"], now=Nanos(now)))


def test_after_its_window_a_key_is_new() -> None:
    answers, made = Answers(), list[str]()
    for now in (0, WINDOW - 1, WINDOW):
        once(answers, "a", made, now=now)

    assert made == ["a", "a"]


def test_at_the_bounds_the_oldest_gives_way_and_what_is_too_large_is_not_kept() -> None:
    answers, made = Answers(keys_max=2), list[str]()
    for key in ("a", "b", "c", "c", "b", "a"):
        once(answers, key, made)
    assert made == ["a", "b", "c", "a"]
    small, sizes = Answers(bytes_max=100), list[str]()
    for key in ("a", "b", "b", "a"):
        once(small, key, sizes, body=bytes(60))
    assert sizes == ["a", "b", "a"]
    once(small, "large", sizes, body=bytes(ANSWER_BYTES_MAX + 1))
    assert len(small) == 1


@pytest.mark.parametrize("key", ["", "x" * 256])
def test_a_key_has_a_length(key: str) -> None:
    with pytest.raises(Refusal) as caught:
        once(Answers(), key, [])

    assert (caught.value.status, caught.value.code) == (400, "invalid_value")
