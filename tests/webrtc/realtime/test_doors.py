"""What comes in by HTTP and by the first events of a WebSocket: what is wrong with it is said, what a key locks stays
locked, and nothing is left behind. Without an engine process.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from duplexd import clock
from duplexd.config import Config
from duplexd.ids import ChunkId, Epoch, ResponseId, TurnId
from duplexd.messages import (
    ConditionSet,
    HistorySet,
    PastTurn,
    PublishChunk,
    ReplyWanted,
    ResponseState,
    TurnOpened,
    TurnOutcome,
    TurnSettled,
    VoiceStarted,
)
from duplexd.units import NANOS_PER_SECOND, Nanos, Span, Ticks
from duplexd.webrtc.peer import Peer
from duplexd.webrtc.realtime.live import LiveRoutes, LiveVisit
from duplexd.webrtc.realtime.session import COUNTED
from duplexd.webrtc.realtime.visit import RealtimeVisit
from tests.webrtc.realtime.engineless import Place, at_a_door, reply_of, words_of, writers

LOCKED = {"session": {"type": "realtime", "instructions": "only this"}, "locked_fields": ["instructions"]}
CODES = {
    "a text as an item": ({"input": ["x"]}, "session.input[0]"),
    "no content": ({"input": [{"role": "user", "content": None}]}, "session.input[0].content"),
    "a part that is none": ({"input": [{"role": "user", "content": [3]}]}, "session.input[0].content"),
    "nobody": ({"input": [{"role": "nobody", "content": "x"}]}, "session.input[0].role"),
    "a format without a type": ({"audio": {"format": {"rate": 8000}}}, "session.audio.format.type"),
    "a format that is none": ({"audio": {"format": 3}}, "session.audio.format"),
}


@pytest.mark.parametrize(("session", "param"), CODES.values(), ids=CODES)
def test_a_live_session_with_a_wrong_start_is_told_and_leaves_nothing(session: Any, param: str) -> None:
    """It was admitted first and judged then: sessions_max such events, and the daemon said 503 to all."""

    async def story(place: Place) -> None:
        socket = await place.http.ws_connect("/v1/live/sessions")
        await socket.send_json({"type": "session.start", "session": {"model": "clock", **session}})
        error = (await socket.receive_json(timeout=5))["error"]
        assert error["param"].startswith(param.rpartition(".")[0] or param)
        await socket.receive(timeout=5)
        assert socket.close_code == 1008
        await place.settled()

        assert (place.session_count, writers()) == (0, [])

    at_a_door(story)


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/live/sessions", "/v1/realtime?duplex=1"])
def test_a_session_that_fails_by_a_bug_of_ours_leaves_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: RealtimeVisit, text: str, **more: Any) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(RealtimeVisit, "on_text", broken)
    monkeypatch.setattr(LiveVisit, "on_text", broken)

    async def story(place: Place) -> None:
        socket = await place.http.ws_connect(path)
        if path != "/v1/realtime":
            kind = "session.start" if "live" in path else "session.update"
            await socket.send_json({"type": kind, "session": {"model": "clock"}})
        await socket.receive_json(timeout=5)
        assert place.session_count == 1
        await socket.send_json({"type": "response.create"})
        await socket.receive(timeout=5)
        await place.settled()

        assert (place.session_count, writers()) == (0, [])

    at_a_door(story)


@pytest.mark.parametrize("path", ["/v1/live/sessions", "/v1/realtime?duplex=1"])
def test_who_is_turned_away_leaves_no_writer_behind(path: str) -> None:
    async def story(place: Place) -> None:
        place.frontend.closing = "the daemon is stopping"
        socket = await place.http.ws_connect(path)
        kind = "session.start" if "live" in path else "session.update"
        await socket.send_json({"type": kind, "session": {"model": "clock"}})
        assert (await socket.receive_json(timeout=5))["error"]["code"] == "closing"
        await socket.receive(timeout=5)
        await place.settled()

        assert writers() == []

    at_a_door(story)


DUPLEX = {
    "a list for a rate": ({"audio": {"output": [1]}}, "session.audio.output"),
    "a text for a rate": ({"audio": {"input": {"sample_rate_hz": "x"}}}, "session.audio.input.sample_rate_hz"),
    "a number for modalities": ({"modalities": 3}, "session.modalities"),
    "instructions that are none": ({"instructions": [1]}, "session.instructions"),
    "a kind of turns that is a list": ({"turn_detection": {"type": []}}, "session.audio.input.turn_detection.type"),
}


@pytest.mark.parametrize(("session", "param"), DUPLEX.values(), ids=DUPLEX)
def test_a_duplex_session_with_a_wrong_start_is_told_what(session: Any, param: str) -> None:
    async def story(place: Place) -> None:
        socket = await place.http.ws_connect("/v1/realtime?duplex=1")
        await socket.send_json({"type": "session.update", "session": session})
        assert (await socket.receive_json(timeout=5))["error"]["param"] == param
        await socket.receive(timeout=5)
        assert socket.close_code == 1008
        await place.settled()

        assert (place.session_count, writers()) == (0, [])

    at_a_door(story)


def test_null_in_a_duplex_session_means_absent() -> None:
    """`modalities: null` ended the connection without a word."""

    async def story(place: Place) -> None:
        socket = await place.http.ws_connect("/v1/realtime?duplex=1")
        null = dict.fromkeys(("modalities", "audio", "instructions", "extra_body", "turn_detection", "sample_rate_hz"))
        await socket.send_json({"type": "session.update", "session": null})
        assert (await socket.receive_json(timeout=5))["session"]["output_modalities"] == ["audio"]
        await socket.close()

    at_a_door(story)


def test_a_duplex_session_shows_which_of_its_fields_change_nothing() -> None:
    async def story(place: Place) -> None:
        socket = await place.http.ws_connect("/v1/realtime?duplex=1")
        await socket.send_json({"type": "session.update", "session": {"temperature": 0.7, "voice": "x", "model": "y"}})
        created = await socket.receive_json(timeout=5)
        assert created["session"]["duplexd"]["ignored"] == ["voice", "temperature"]
        await socket.close()

    at_a_door(story)


def test_an_empty_duplex_commit_is_refused_and_not_answered() -> None:
    async def story(place: Place) -> None:
        socket = await place.http.ws_connect("/v1/realtime?duplex=1")
        await socket.send_json({"type": "session.update", "session": {}})
        await socket.receive_json(timeout=5)
        await socket.send_json({"type": "input_audio_buffer.commit", "event_id": "c"})
        error = (await socket.receive_json(timeout=5))["error"]
        assert (error["code"], error["event_id"]) == ("input_audio_buffer_commit_empty", "c")
        await socket.send_json({"type": "response.cancel"})
        assert (await socket.receive_json(timeout=5))["error"]["code"] == "response_cancel_not_active"
        assert place.engine.told(ReplyWanted) == []
        await socket.close()

    at_a_door(story)


def test_sound_with_a_frame_is_heard_and_the_frame_left() -> None:
    """It was refused whole, so clients that let a camera's frames ride on their sound were deaf here."""

    async def story(place: Place) -> None:
        socket = await place.http.ws_connect("/v1/realtime?duplex=1")
        await socket.send_json({"type": "session.update", "session": {}})
        await socket.receive_json(timeout=5)
        sound = {"type": "input_audio_buffer.append", "audio": "A" * 4000, "video_frames": ["AAAA"]}
        await socket.send_json(sound)
        await socket.send_json({"type": "input_audio_buffer.commit"})
        assert (await socket.receive_json(timeout=5))["type"] == "input_audio_buffer.committed"
        await socket.close()

    at_a_door(story)


# Keys ----------------------------------------------------------------------------------------------------------------


async def secret(place: Place, wanted: dict[str, Any]) -> dict[str, str]:
    headers = {"Authorization": "Bearer t0ken"}
    answer = await place.http.post("/v1/realtime/client_secrets", json=wanted, headers=headers)
    return {"Authorization": f"Bearer {(await answer.json())['value']}"}


TOKEN = Config(model="clock", voice_detector="energy", token="t0ken")


def test_what_a_secret_locks_is_locked_in_every_dialect() -> None:
    """?duplex=1 and /v1/live/sessions looked at the key and forgot what it stands for."""

    async def story(place: Place) -> None:
        headers = await secret(place, LOCKED)
        for path, kind in (("/v1/live/sessions", "session.start"), ("/v1/realtime?duplex=1", "session.update")):
            socket = await place.http.ws_connect(path, headers=headers)
            await socket.send_json({"type": kind, "session": {"model": "clock", "instructions": "else"}})
            assert (await socket.receive_json(timeout=5))["error"]["code"] == "locked_field", path
            await socket.close()
        chat = {"messages": [{"role": "system", "content": "else"}, {"role": "user", "content": "say 1"}]}
        answer = await place.http.post("/v1/chat/completions", json=chat, headers=headers)
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "locked_field")
        await place.settled()

        assert place.engine.told(ConditionSet) == []

    at_a_door(story, config=TOKEN)


@pytest.mark.parametrize("path", ["/v1/live/sessions", "/v1/realtime?duplex=1"])
def test_a_secrets_instructions_hold_in_every_dialect(path: str) -> None:
    async def story(place: Place) -> None:
        headers = await secret(place, LOCKED)
        socket = await place.http.ws_connect(path, headers=headers)
        kind = "session.start" if "live" in path else "session.update"
        await socket.send_json({"type": kind, "session": {"model": "clock"}})
        await socket.receive_json(timeout=5)
        assert [fact.text for fact in place.engine.told(ConditionSet)] == ["only this"]
        change = (
            {"type": "session.instructions.append", "content": "else"}
            if "live" in path
            else {"type": "session.update", "session": {"instructions": "else"}}
        )
        await socket.send_json(change)
        assert (await socket.receive_json(timeout=5))["error"]["code"] == "locked_field"
        await socket.close()

    at_a_door(story, config=TOKEN)


def test_a_response_of_its_own_does_not_open_what_is_locked() -> None:
    async def story(place: Place) -> None:
        headers = await secret(place, LOCKED)
        socket = await place.http.ws_connect("/v1/realtime", headers=headers)
        await socket.receive_json(timeout=5)
        await socket.send_json({"type": "response.create", "response": {"instructions": "else"}})
        error = (await socket.receive_json(timeout=5))["error"]
        assert (error["code"], error["param"]) == ("locked_field", "response.instructions")
        await socket.close()

    at_a_door(story, config=TOKEN)


def test_a_secret_for_transcription_transcribes_by_http_and_says_nothing() -> None:
    async def story(place: Place) -> None:
        headers = await secret(place, {"session": {"type": "transcription"}})
        answer = await place.http.post("/v1/audio/speech", json={"input": "1"}, headers=headers)
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_request")

    at_a_door(story, config=TOKEN)


def test_an_offer_is_not_read_before_its_key() -> None:
    async def story(place: Place) -> None:
        kind = {"Content-Type": "application/xml"}  # Which would be told, were the body looked at.
        answer = await place.http.post("/v1/realtime/calls", data=b"x", headers=kind)
        assert answer.status == 401
        headers = {"Content-Type": "application/sdp", "Authorization": "Bearer t0ken"}
        answer = await place.http.post("/v1/realtime/calls", data=io.BytesIO(bytes(2_000_000)), headers=headers)
        assert answer.status == 413
        form = aiohttp.FormData({str(number): "x" for number in range(20)}, default_to_multipart=True)
        answer = await place.http.post("/v1/realtime/calls", data=form, headers={"Authorization": "Bearer t0ken"})
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_form")

    at_a_door(story, config=TOKEN)


# Answers that break off -------------------------------------------------------------------------------------------


def breaks_off(place: Place, text: str) -> None:
    """The reply that is wanted says something, and fails."""

    def fail(wanted: ReplyWanted) -> None:
        reply = reply_of(wanted.session, number=1, key=wanted.key)
        place.engine.say(reply(ResponseState.ACCEPTED))
        if text:
            place.engine.say(words_of(wanted.session, number=1, text=text))
        place.engine.say(reply(ResponseState.FAILED, reason="the thinker gave NaN"))

    place.engine.on_reply_wanted = fail


def test_a_streamed_chat_that_fails_midway_does_not_look_finished() -> None:
    """It ended with finish_reason "stop" and [DONE]."""

    async def story(place: Place) -> None:
        breaks_off(place, "half a")
        chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        answer = await place.http.post("/v1/chat/completions", json=chat)
        lines = [line[6:] for line in (await answer.text()).splitlines() if line]
        chunks = [json.loads(line) for line in lines]
        assert chunks[0]["choices"][0]["delta"]["content"] == "half a"
        assert chunks[-1]["error"]["message"] == "the thinker gave NaN"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])

    at_a_door(story)


def test_a_streamed_chat_tells_its_usage_with_every_piece() -> None:
    """continuous_usage_stats was taken and changed nothing: benches that count tokens by it saw none."""

    async def story(place: Place) -> None:
        def answer(wanted: ReplyWanted) -> None:
            reply = reply_of(wanted.session, number=1, key=wanted.key)
            place.engine.say(reply(ResponseState.ACCEPTED))
            for count, text in ((2, "one two"), (5, " three four five")):
                words = words_of(wanted.session, number=1, text=text)
                place.engine.say(msgspec.structs.replace(words, tokens=count))
            place.engine.say(msgspec.structs.replace(reply(ResponseState.COMPLETED), written=5))

        place.engine.on_reply_wanted = answer
        options = {"include_usage": True, "continuous_usage_stats": True}
        chat = {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": options}
        told = await (await place.http.post("/v1/chat/completions", json=chat)).text()
        chunks = [json.loads(line[6:]) for line in told.splitlines() if line and "[DONE]" not in line]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [2, 5, 5, 5]
        chat["stream_options"] = {}
        told = await (await place.http.post("/v1/chat/completions", json=chat)).text()
        assert "usage" not in told

    at_a_door(story)


def test_a_chat_that_fails_before_its_first_word_is_a_refusal() -> None:
    async def story(place: Place) -> None:
        breaks_off(place, "")
        chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        answer = await place.http.post("/v1/chat/completions", json=chat)
        assert (answer.status, (await answer.json())["error"]["code"]) == (500, "response_failed")

    at_a_door(story)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x"}], "stream_options": [1]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [1]},
        {"messages": [{"role": "user", "content": "x"}], "tool_choice": {"function": [1]}},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": 5}}]}]},
    ],
    ids=["options", "tools", "choice", "calls", "sound", "data"],
)
def test_a_chat_with_a_wrong_field_is_the_clients_fault(body: Any) -> None:
    async def story(place: Place) -> None:
        answer = await place.http.post("/v1/chat/completions", json=body)
        assert (answer.status, (await answer.json())["error"]["type"]) == (400, "invalid_request_error")
        await place.settled()
        assert place.session_count == 0

    at_a_door(story)


def test_a_bug_of_ours_is_a_typed_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: LiveRoutes, request: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(LiveRoutes, "hang_up", broken)

    async def story(place: Place) -> None:
        answer = await place.http.post("/v1/live/sessions/x/hangup")
        assert (answer.status, (await answer.json())["error"]["code"]) == (500, "internal_error")

    at_a_door(story)


# Live -----------------------------------------------------------------------------------------------------------------


def test_what_is_to_be_communicated_waits_until_nobody_speaks_and_is_said_once() -> None:
    """During a reply it was refused by the core and lost, and the client was told an error and `appended`."""

    async def story(place: Place) -> None:
        place.engine.on_reply_wanted = lambda wanted: place.engine.say(
            reply_of(wanted.session, number=len(place.engine.told(ReplyWanted)), key=wanted.key)(ResponseState.ACCEPTED)
        )

        async def until(kind: str) -> dict[str, Any]:
            while (event := await socket.receive_json(timeout=5))["type"] != kind:
                assert event["type"] != "error", event
            return dict(event)

        async def comment(text: str) -> None:
            await socket.send_json({"type": "session.commentary.append", "content": text})
            await until("session.commentary.appended")
            await place.happen()

        socket = await place.http.ws_connect("/v1/live/sessions")
        await socket.send_json({"type": "session.start", "session": {"model": "clock"}})
        await until("session.started")
        (visit,) = place.frontend.visits.values()
        assert isinstance(visit, LiveVisit)
        await comment("one")
        await comment("two")
        await comment("three")
        visit.tick(clock.now())
        assert len(place.engine.told(ReplyWanted)) == 1
        place.engine.say(TurnOpened(visit.session, TurnId(1), Ticks(0), True))
        place.engine.say(reply_of(visit.session, number=1)(ResponseState.COMPLETED))
        await place.happen()
        visit.tick(clock.now())
        assert len(place.engine.told(ReplyWanted)) == 1  # The person speaks.
        none = Span(Ticks(0), Ticks(0))
        place.engine.say(TurnSettled(visit.session, TurnId(1), none, "", TurnOutcome.EMPTY))
        await place.happen()
        visit.tick(clock.now())
        visit.tick(clock.now())
        await place.happen()

        assert len(place.engine.told(ReplyWanted)) == 2
        await socket.close()

    at_a_door(story)


def test_what_was_said_before_a_live_session_may_be_a_plain_text() -> None:
    """Of a message whose content was a string nothing was kept."""

    async def story(place: Place) -> None:
        said = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": [{"text": "hi"}, {"text": "you"}]},
        ]
        socket = await place.http.ws_connect("/v1/live/sessions")
        await socket.send_json({"type": "session.start", "session": {"model": "clock", "input": said}})
        await socket.receive_json(timeout=5)
        await place.happen()

        assert place.engine.told(HistorySet)[-1].turns == (PastTurn("hello", "hi you"),)
        await socket.close()

    at_a_door(story)


def test_a_duplex_session_that_has_lived_long_enough_is_told_in_its_own_words() -> None:
    async def story(place: Place) -> None:
        socket = await place.http.ws_connect("/v1/realtime?duplex=1")
        await socket.send_json({"type": "session.update", "session": {}})
        session = (await socket.receive_json(timeout=5))["session"]["id"]
        (visit,) = place.frontend.visits.values()
        visit.tick(Nanos(clock.now() + 60 * NANOS_PER_SECOND))
        told = [await socket.receive_json(timeout=5) for _ in range(2)]
        assert told[0]["error"]["code"] == "session_expired"
        assert (told[1]["type"], told[1]["session_id"]) == ("session.expired", session)
        assert [event["server_event_seq"] for event in told] == [2, 3]
        assert "60 s" in told[1]["reason"]
        await socket.receive(timeout=5)
        assert socket.close_code == 1001

    at_a_door(story, config=Config(model="clock", voice_detector="energy", session_life_s=60))


def test_a_live_session_on_a_socket_rests_too_until_somebody_speaks() -> None:
    """It was for calls alone: a WebSocket was told that `idle_timeout_s` is unknown."""

    async def story(place: Place) -> None:
        def spoken(level: int) -> dict[str, str]:
            tone = (level * np.sin(np.arange(4800) * 0.2)).astype("<i2")
            return {"type": "session.input_audio.append", "audio": base64.b64encode(tone.tobytes()).decode()}

        socket = await place.http.ws_connect("/v1/live/sessions")
        session = {"model": "clock", "idle_timeout_s": 1, "wake_policy": {"type": "speech"}}
        await socket.send_json({"type": "session.start", "session": session})
        await socket.receive_json(timeout=5)
        (visit,) = place.frontend.visits.values()
        begun = clock.now()
        for passed_s in (0.0, 0.9, 1.1):
            visit.tick(Nanos(begun + round(passed_s * NANOS_PER_SECOND)))
        assert (await socket.receive_json(timeout=5))["type"] == "session.paused"
        place.engine.facts.clear()
        for level in (20, 20, 9000, 9000, 9000):
            await socket.send_json(spoken(level))
        while len(visit.bridge._queue) < 2:  # All of it has come.
            await place.happen()
        for tick in range(60):  # It is listened to at four times its speed.
            visit.tick(Nanos(begun + round((1.2 + 0.02 * tick) * NANOS_PER_SECOND)))
        assert (await socket.receive_json(timeout=5))["type"] == "session.resumed"
        assert len(place.engine.told(VoiceStarted)) == 1
        await socket.send_json({"type": "session.close"})
        while (event := await socket.receive_json(timeout=5))["type"] != "session.closed":
            pass
        usage = event["usage"]
        assert usage["paused_seconds"] + usage["active_seconds"] == int(usage["seconds"])
        await socket.close()

    at_a_door(story)


# Speech ---------------------------------------------------------------------------------------------------------------


def speaks_and_fails(place: Place) -> None:
    """The first tenth of a second of a reply is made, and then its voice fails."""

    def fail(wanted: ReplyWanted) -> None:
        reply = reply_of(wanted.session, number=1, key=wanted.key)
        span = Span(Ticks(0), Ticks(4800))
        chunk = PublishChunk(wanted.session, ResponseId(1), ChunkId(1), Epoch(0), span, 0, 2400, False, 1)
        place.engine.say(reply(ResponseState.ACCEPTED), chunk, reply(ResponseState.FAILED, reason="the voice gave NaN"))

    place.frontend.read_chunk = lambda news: np.ones(news.samples, np.int16)  # type: ignore[method-assign]
    place.engine.on_reply_wanted = fail


def test_speech_that_fails_midway_breaks_off() -> None:
    """It ended as a clean 200: half a sentence that nobody could tell from a whole one."""

    async def story(place: Place) -> None:
        speaks_and_fails(place)
        answer = await place.http.post("/v1/audio/speech", json={"input": "x", "response_format": "pcm"})
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
        await place.settled()
        assert place.session_count == 0

    at_a_door(story)


def test_speech_by_events_that_fails_midway_says_so() -> None:
    async def story(place: Place) -> None:
        speaks_and_fails(place)
        answer = await place.http.post("/v1/audio/speech", json={"input": "x", "stream_format": "sse"})
        events = [json.loads(line[6:]) for line in (await answer.text()).splitlines() if line]
        assert [event["type"] for event in events] == ["speech.audio.delta", "error"]
        assert events[-1]["error"]["message"] == "the voice gave NaN"

    at_a_door(story)


def test_a_call_whose_session_ended_while_its_offer_was_answered_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It got its answer, and a connection that nobody spoke on."""

    async def story(place: Place) -> None:
        closed: list[str] = []

        class Answered:
            answer_sdp = "v=0"

            async def close(self, reason: str) -> None:
                closed.append(reason)

        async def accept(offer: str, **options: Any) -> Answered:
            place.frontend._on_engine_gone("the engine died")
            return Answered()

        monkeypatch.setattr(Peer, "accept", accept)
        headers = {"Content-Type": "application/sdp"}
        answer = await place.http.post("/v1/realtime/calls", data="v=0", headers=headers)
        assert answer.status == 503
        assert closed == ["the session has ended"]
        assert place.server.realtime.calls == {}

    at_a_door(story)


def test_speech_by_events_ends_with_what_its_pieces_are_together() -> None:
    async def story(place: Place) -> None:
        def speak(wanted: ReplyWanted) -> None:
            reply = reply_of(wanted.session, number=1, key=wanted.key)
            chunk = PublishChunk(
                wanted.session, ResponseId(1), ChunkId(1), Epoch(0), Span(Ticks(0), Ticks(4800)), 0, 2400, True, 1
            )
            place.engine.say(reply(ResponseState.ACCEPTED), chunk, reply(ResponseState.COMPLETED))

        place.frontend.read_chunk = lambda news: np.ones(news.samples, np.int16)  # type: ignore[method-assign]
        place.engine.on_reply_wanted = speak
        answer = await place.http.post("/v1/audio/speech", json={"input": "x", "stream_format": "sse"})
        events = [json.loads(line[6:]) for line in (await answer.text()).splitlines() if line]
        data = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
        output = events[-1]["duplexd"]["output"]
        assert output == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        assert len(data) > 4800

    at_a_door(story)


def test_what_protocols_count_is_told_to_prometheus_also_of_sessions_that_have_ended() -> None:
    """An acknowledgement of nothing and an event that is none; what nobody did is told as 0."""

    async def told(place: Place) -> dict[str, float]:
        async with place.http.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        samples = (line.split() for line in lines if line.startswith("duplexd_realtime_"))
        return {name.removeprefix("duplexd_realtime_"): float(value) for name, value in samples}

    async def story(place: Place) -> None:
        before = await told(place)
        async with place.http.ws_connect("/v1/realtime?model=clock") as socket:
            await socket.receive_json(timeout=5)
            await socket.send_json({"type": "playback.ack", "played_ms": 100})
            await socket.send_json({"type": "no.such.event"})
            await socket.receive_json(timeout=5)
            during = await told(place)
        await place.settled()

        assert {before[f"{name}_total"] for name in COUNTED} == {0}
        assert (during["acks_ignored_total"], during["faults_total"], during["acks_clamped_total"]) == (1, 1, 0)
        assert await told(place) == during

    at_a_door(story)
