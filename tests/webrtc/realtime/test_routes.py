"""The Realtime protocol at a whole daemon (word clock): WebSocket, calls, sideband, secrets, limits, errands."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import wave
from typing import Any

import aiohttp
import av
import numpy as np
import pytest

from duplexd.media import tones
from tests.webrtc.realtime.daemon import Api, Caller, Talk, at_a_daemon, call
from tests.webrtc.realtime.simulated import b64, beep24

pytestmark = pytest.mark.slow
MANUAL = {"type": "realtime", "audio": {"input": {"turn_detection": None, "transcription": {"model": "x"}}}}


def test_over_a_socket_a_turn_is_typed_spoken_and_stopped() -> None:
    async def story(api: Api) -> None:
        async with api.socket() as socket:
            talk = Talk(socket)
            await talk.until("session.created")
            await talk.ask("say 3")
            done = await talk.until("response.done")
            assert done["response"]["status"] == "completed"
            assert talk.words() == [0, 1, 2]
            await talk.send("session.update", session=MANUAL)
            await talk.send("input_audio_buffer.append", audio=b64(np.concatenate([beep24(500), beep24(300, 0)])))
            await talk.send("input_audio_buffer.commit")
            await talk.send("response.create")
            heard = await talk.until("conversation.item.input_audio_transcription.completed")
            assert heard["transcript"] == "sound"
            while len(talk.sound) < 48 * 3000:
                await talk.until("response.output_audio.delta")
            await talk.send("response.cancel")
            item = talk.events[-1]["item_id"]
            await talk.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=700)
            await talk.send("conversation.item.retrieve", item_id=item)
            kept = await talk.until("conversation.item.retrieved")
            await asyncio.sleep(0.2)  # The correction goes to the engine and back.
            await talk.send("conversation.item.retrieve", item_id=item)
            kept = await talk.until("conversation.item.retrieved")
            assert kept["item"]["content"][0]["transcript"] == "1-0"
            assert talk.view.errors == []
        await api.until_empty()

    at_a_daemon(story)


def test_a_call_talks_is_watched_and_hung_up() -> None:
    """SDP in, SDP out; events on the channel, sound on the track; a sideband comes and goes and ends nothing."""

    async def story(api: Api) -> None:
        caller, call_id = await call(api, session={"type": "realtime", "instructions": "be brief"})
        created = await caller.until("session.created")
        assert created["session"]["instructions"] == "be brief"
        async with api.socket(query=f"call_id={call_id}") as side:
            assert json.loads(await side.receive_str())["type"] == "session.created"
            part = {"type": "input_text", "text": "say 3"}
            item = {"type": "message", "role": "user", "content": [part]}
            await side.send_str(json.dumps({"type": "conversation.item.create", "item": item}))
            await side.send_str(json.dumps({"type": "response.create"}))
            kinds = []
            while "response.done" not in kinds:
                kinds.append(json.loads(await side.receive_str())["type"])
        await caller.until("output_audio_buffer.started")
        await caller.until("output_audio_buffer.stopped")
        pcm = np.concatenate(caller.heard)
        assert [w.index for w in tones.decode(pcm, 16_000) if w.end_sample - w.start_sample > 3200] == [0, 1, 2]
        assert "response.output_audio.delta" not in {event["type"] for event in caller.talk.events}
        assert await api.sessions() == 1
        status, _, _ = await api.post(f"/v1/realtime/calls/{call_id}/hangup")
        assert status == 200
        await api.until_empty()
        assert (await api.post(f"/v1/realtime/calls/{call_id}/hangup"))[0] == 404
        await caller.close()

    at_a_daemon(story)


def test_a_voice_over_a_call_cuts_the_reply_where_it_was_heard() -> None:
    async def story(api: Api) -> None:
        caller, _ = await call(api)
        await caller.until("session.created")
        caller.send("conversation.item.create", item=_user("say 12"))
        caller.send("response.create")
        await caller.until("output_audio_buffer.started")
        await asyncio.sleep(2.4)
        caller.mic = beep24(900)
        await caller.until("output_audio_buffer.cleared")
        truncated = await caller.until("conversation.item.truncated")
        caller.send("conversation.item.retrieve", item_id=truncated["item_id"])
        kept = await caller.until("conversation.item.retrieved")
        words = kept["item"]["content"][0]["transcript"].split()
        pcm = np.concatenate(caller.heard)
        heard = [w.index for w in tones.decode(pcm, 16_000) if w.end_sample - w.start_sample > 5500 and w.index < 32]
        assert len(words) in (len(heard), len(heard) - 1)  # The last one lies inside the published error.
        assert len(words) >= 3
        await caller.close()
        await api.until_empty()

    at_a_daemon(story)


def _user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def test_who_has_no_key_gets_nothing_and_a_secret_opens_what_it_was_made_for() -> None:
    async def story(api: Api) -> None:
        for path in ("/v1/realtime/client_secrets", "/v1/realtime/calls", "/v1/chat/completions", "/v1/audio/speech"):
            for token in ("", "wrong", "ek_wrong"):
                headers = {"Content-Type": "application/sdp" if path.endswith("calls") else "application/json"}
                status, body, _ = await api.post(path, token=token, data=b'{"input": "1"}', headers=headers)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key"), path
        with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
            await api.socket()
        wanted = {
            "session": {"type": "realtime", "instructions": "only this"},
            "expires_after": {"anchor": "created_at", "seconds": 60},
            "locked_fields": ["instructions"],
        }
        status, secret, _ = await api.post("/v1/realtime/client_secrets", token="t0ken", json=wanted)
        assert (status, secret["value"][:3]) == (200, "ek_")
        protocols = ("realtime", f"openai-insecure-api-key.{secret['value']}", "openai-agents-sdk.1")
        async with api.socket(protocols=protocols) as socket:
            assert socket.protocol == "realtime"
            talk = Talk(socket)
            created = await talk.until("session.created")
            assert created["session"]["instructions"] == "only this"
            await talk.send("session.update", session={"type": "realtime", "instructions": "something else"})
            assert (await talk.until("error"))["error"]["code"] == "locked_field"
        assert (await api.post("/v1/realtime/client_secrets", token=secret["value"], json={}))[0] == 401
        assert "t0ken" not in api.daemon.said()
        assert secret["value"] not in api.daemon.said()

    at_a_daemon(story, "--token", "t0ken")


def test_secrets_live_for_ten_seconds_to_two_hours() -> None:
    async def story(api: Api) -> None:
        for seconds in (9, 7201, "many"):
            wanted = {"expires_after": {"anchor": "created_at", "seconds": seconds}}
            status, body, _ = await api.post("/v1/realtime/client_secrets", json=wanted)
            assert (status, body["error"]["param"]) == (400, "expires_after.seconds")

    at_a_daemon(story)


def test_pages_of_other_origins_are_served_only_when_they_are_named() -> None:
    """A page on the web must not reach a daemon on its reader's machine, not even by a WebSocket."""

    async def story(api: Api) -> None:
        evil, good = {"Origin": "https://evil.example"}, {"Origin": "https://good.example"}
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await api.socket(headers=evil)
        assert (await api.post("/v1/realtime/client_secrets", json={}, headers=evil))[0] == 403
        async with api.http.options(api.url("/v1/realtime/calls"), headers=evil) as answer:
            assert answer.status == 403
        async with api.http.options(api.url("/v1/realtime/calls"), headers=good) as answer:
            assert answer.status == 204
            assert "x-openai-agents-sdk" in answer.headers["Access-Control-Allow-Headers"]
        status, _, headers = await api.post("/v1/realtime/client_secrets", json={}, headers=good)
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, "https://good.example")
        assert headers["Access-Control-Expose-Headers"] == "Link, Location, Duplexd-View"
        async with api.socket(headers=good) as socket:
            await Talk(socket).until("session.created")

    at_a_daemon(story, "--cors-origins", "https://good.example")


def test_twenty_at_once_at_a_daemon_for_three_leave_three_and_typed_refusals() -> None:
    """T-CON-05, T-CON-07: never one too many; an event and 1013, or 503 and when to come again."""

    async def story(api: Api) -> None:
        async def knock() -> Any:
            socket = await api.socket()
            first = json.loads(await socket.receive_str())
            return socket, first

        knocks = await asyncio.gather(*(knock() for _ in range(20)))
        taken = [socket for socket, first in knocks if first["type"] == "session.created"]
        refused = [(socket, first) for socket, first in knocks if first["type"] == "error"]
        assert (len(taken), len(refused)) == (3, 17)
        for socket, first in refused:
            assert first["error"]["code"] == "busy"
            assert first["error"]["shortage"]["available"] == 3
            await socket.receive()
            assert socket.close_code == 1013
        status, body, headers = await api.post("/v1/audio/speech", json={"input": "1"})
        assert (status, body["error"]["code"]) == (503, "busy")
        assert body["error"]["shortage"] == {"of": "sessions", "needed": 4, "available": 3, "unit": "sessions"}
        assert int(headers["Retry-After"]) > 0
        for socket in taken:
            await socket.close()
        await api.until_empty()

    at_a_daemon(story)


def test_too_many_requests_are_told_when_to_come_again() -> None:
    async def story(api: Api) -> None:
        answers = [await api.post("/v1/realtime/client_secrets", json={}) for _ in range(14)]
        assert [status for status, _, _ in answers].count(429) >= 3
        status, body, headers = answers[-1]
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert "Retry-After" in headers

    at_a_daemon(story, "--requests-per-minute", "10")


def test_abuse_gets_errors_and_the_neighbour_hears_nothing_of_it() -> None:
    """T-BAD-05: bad JSON, 20 MB, wrong base64, unknown types, binary, a flood; 1009 only for what is too large."""

    async def story(api: Api) -> None:
        async with api.socket() as quiet, api.socket() as loud:
            neighbour, bad = Talk(quiet), Talk(loud)
            await neighbour.until("session.created")
            await bad.until("session.created")
            await neighbour.ask("say 8")
            await loud.send_str("no json")
            await loud.send_str('{"type":"input_audio_buffer.append","audio":"%%%"}')
            await loud.send_str('{"type":"unheard.of"}')
            await loud.send_str(json.dumps({"type": "input_audio_buffer.append", "audio": "A" * 22_000_000}))
            await loud.send_bytes(b"\x00\xff")
            codes = [(await bad.until("error"))["error"]["code"] for _ in range(5)]
            assert codes == ["invalid_json", "invalid_value", "invalid_value", "event_too_large", "invalid_frame"]
            for _ in range(2000):
                await bad.send("session.update", session={"type": "realtime"})
            assert (await bad.until("error"))["error"]["code"] == "rate_limit_exceeded"
            await neighbour.until("response.done")
            assert neighbour.words() == list(range(8))
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                await loud.send_str("x" * 24_000_000)  # It is closed while we are still writing.
            async for _ in loud:
                pass
            assert loud.close_code in (1009, 1006)
        await api.until_empty()

    at_a_daemon(story)


def test_a_session_lives_as_long_as_it_may() -> None:
    async def story(api: Api) -> None:
        async with api.socket() as socket:
            talk = Talk(socket)
            created = await talk.until("session.created")
            assert created["session"]["expires_at"] > 1_700_000_000
            assert (await talk.until("error"))["error"]["code"] == "session_expired"
            await socket.receive()
            assert socket.close_code == 1001
        await api.until_empty()

    at_a_daemon(story, "--session-life-s", "1.5")


def test_closing_at_any_moment_gives_everything_back() -> None:
    """T-RC-11: fifty times, in the middle of whatever was going on."""

    async def story(api: Api) -> None:
        async with api.socket() as socket:
            await socket.receive_str()
        await asyncio.sleep(1.5)  # The first figures of the engine come with its first session.
        before = await api.daemon.held_at_rest()
        for index in range(50):
            async with api.socket() as socket:
                await socket.receive_str()
                talk = Talk(socket)
                await talk.ask("say 9")
                await asyncio.sleep(0.003 * index)
        await api.until_empty()
        after = await api.daemon.held_at_rest()
        assert {k: v for k, v in after.items() if v > before[k] + 2} == {}

    at_a_daemon(story)


def test_speech_is_streamed_in_the_container_asked_for() -> None:
    async def story(api: Api) -> None:
        body = {"model": "clock", "input": "5 6 7", "response_format": "pcm"}
        status, pcm, _ = await api.post("/v1/audio/speech", json=body)
        sound = np.frombuffer(pcm, "<i2")
        assert (status, [w.index for w in tones.decode(sound, 24_000)]) == (200, [5, 6, 7])
        _, data, _ = await api.post("/v1/audio/speech", json={**body, "response_format": "wav"})
        assert data[44:] == pcm
        _, data, _ = await api.post("/v1/audio/speech", json={**body, "response_format": "opus"})
        with av.open(io.BytesIO(data)) as ogg:
            made = np.concatenate([frame.to_ndarray().reshape(-1) for frame in ogg.decode(audio=0)])
            assert abs(len(made) / 48 - len(sound) / 24) < 1
            assert ogg.streams.audio[0].codec_context.name == "opus"
        _, data, headers = await api.post("/v1/audio/speech", json={**body, "stream_format": "sse"})
        events = [json.loads(line[6:]) for line in data.decode().splitlines() if line]
        assert headers["Content-Type"].startswith("text/event-stream")
        assert events[-1]["type"] == "speech.audio.done"
        assert b"".join(base64.b64decode(e["audio"]) for e in events[:-1]) == pcm
        for bad, param in (({}, "input"), ({"input": ""}, "input"), ({"input": "1", "speed": 2}, "speed")):
            status, answer, _ = await api.post("/v1/audio/speech", json=bad)
            assert (status, answer["error"]["param"]) == (400, param)
        await api.until_empty()

    at_a_daemon(story)


def recording(*, rate: int = 16_000) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        at = np.arange(rate // 2) / rate
        file.writeframes((8000 * np.sin(2 * np.pi * 700 * at)).astype("<i2").tobytes() + bytes(rate // 2))
    return out.getvalue()


def test_a_recording_becomes_words() -> None:
    async def story(api: Api) -> None:
        for kind, expected in (("json", {"text": "sound"}), ("text", b"sound\n")):
            form = aiohttp.FormData({"model": "clock", "response_format": kind})
            form.add_field("file", recording(rate=44_100), filename="a.wav")
            status, body, _ = await api.post("/v1/audio/transcriptions", data=form)
            assert status == 200
            assert (body if kind == "text" else {"text": body["text"]}) == expected
        form = aiohttp.FormData({"model": "clock"})
        form.add_field("file", b"no sound at all", filename="a.wav")
        assert (await api.post("/v1/audio/transcriptions", data=form))[0] == 400
        await api.until_empty()

    at_a_daemon(story)


def test_chat_answers_in_text_and_in_sound_whole_and_streamed() -> None:
    async def story(api: Api) -> None:
        told = [{"role": "user", "content": "say 5"}, {"role": "assistant", "content": "3-0 3-1."}]
        messages = [{"role": "system", "content": "be brief"}, *told, {"role": "user", "content": "say 2"}]
        _, body, _ = await api.post("/v1/chat/completions", json={"messages": messages})
        assert body["choices"][0]["message"]["content"] == "4-0 4-1."
        assert body["usage"]["completion_tokens"] == 2
        spoken = {"messages": messages, "modalities": ["text", "audio"], "audio": {"voice": "x", "format": "wav"}}
        _, body, _ = await api.post("/v1/chat/completions", json=spoken)
        sound = base64.b64decode(body["choices"][0]["message"]["audio"]["data"])[44:]
        assert [w.index for w in tones.decode(np.frombuffer(sound, "<i2"), 24_000)] == [128, 129]
        _, data, _ = await api.post("/v1/chat/completions", json={**spoken, "stream": True, "temperature": 0})
        lines = [line[6:] for line in data.decode().splitlines() if line]
        chunks = [json.loads(line) for line in lines[:-1]]
        assert lines[-1] == "[DONE]"
        assert {chunk["modality"] for chunk in chunks} == {"text", "audio"}
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
        assert (text, chunks[-1]["choices"][0]["finish_reason"]) == ("4-0 4-1.", "stop")
        heard = {
            "type": "input_audio",
            "input_audio": {"data": base64.b64encode(recording()).decode(), "format": "wav"},
        }
        listened = {"messages": [{"role": "user", "content": [heard]}], "max_tokens": 3}
        _, body, _ = await api.post("/v1/chat/completions", json=listened)
        assert body["choices"][0]["finish_reason"] == "length"
        for bad in ({}, {"messages": []}, {"messages": [3]}, {"messages": [{"role": "x"}]}, {"messages": told, "n": 2}):
            status, body, _ = await api.post("/v1/chat/completions", json=bad)
            assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        await api.until_empty()

    at_a_daemon(story)


def live_tone(at_s: float, *, speaks: tuple[tuple[float, float], ...]) -> str:
    loud = any(begin <= at_s < end for begin, end in speaks)
    return b64(beep24(20) if loud else beep24(20, 30))


def test_a_live_session_has_no_turns_and_can_be_spoken_over() -> None:
    """The sound of a reply ends by itself when somebody speaks, and the words told are those whose sound has left."""

    async def story(api: Api) -> None:
        sound, words, kinds = b"", [], []
        async with api.http.ws_connect(api.url("/v1/live/sessions"), max_msg_size=0) as socket:
            await socket.send_json({"type": "session.start", "session": {"model": "clock"}})
            started = json.loads(await socket.receive_str())
            assert (started["type"], started["session"]["status"]) == ("session.started", "active")

            async def speak() -> None:
                begun = asyncio.get_running_loop().time()
                for index in range(450):
                    await asyncio.sleep(max(0.0, begun + 0.02 * index - asyncio.get_running_loop().time()))
                    audio = live_tone(0.02 * index, speaks=((0.5, 1.1), (4.0, 5.0)))
                    await socket.send_json({"type": "session.input_audio.append", "audio": audio})
                async with api.http.ws_connect(api.url(f"/v1/live/sessions/{started['session']['id']}/attach")) as side:
                    assert json.loads(await side.receive_str())["type"] == "session.started"
                    await side.send_json({"type": "session.input_audio.mute", "event_id": "m"})
                    assert json.loads(await side.receive_str())["type"]
                await socket.send_json({"type": "session.nonsense", "event_id": "n"})
                await socket.send_json({"type": "session.close"})

            speaking = asyncio.create_task(speak())
            async for message in socket:
                event = json.loads(message.data)
                if event["type"] == "session.output_audio.delta":
                    sound += base64.b64decode(event["delta"])
                    continue
                kinds.append(event["type"])
                if event["type"] == "session.output_transcript.delta":
                    words.append(event["delta"].strip(" ,."))
                elif event["type"] == "session.closed":
                    assert event["reason"] == "close_requested"
                    assert event["usage"]["seconds"] > 8
                elif event["type"] == "error":
                    assert event["error"]["client_event_id"] == "n"
            await speaking
        heard = [w.index for w in tones.decode(np.frombuffer(sound, "<i2"), 24_000) if w.end_sample > w.start_sample]
        told = [32 * int(word.split("-")[0]) + int(word.split("-")[1]) for word in words]
        assert kinds.count("session.input_transcript.delta") == 2
        assert {"session.input_audio.muted", "error", "session.closed"} <= set(kinds)
        assert list(dict.fromkeys(heard)) == told
        assert 0 < sum(word < 32 for word in told) < 12  # The first reply was cut.
        await api.until_empty()

    at_a_daemon(story)


def test_a_live_call_is_started_by_its_offer_and_hung_up() -> None:
    async def story(api: Api) -> None:
        caller = Caller()
        got: list[dict[str, Any]] = []
        caller.channel.remove_all_listeners("message")
        caller.channel.on("message", lambda text: got.append(json.loads(text)))
        item = {"role": "user", "content": [{"text": "say 3"}]}
        body = {
            "session": {"model": "clock", "instructions": "be brief", "input": [item]},
            "transport": {"type": "webrtc", "sdp": await caller.offer()},
        }
        status, answer, _ = await api.post("/v1/live/sessions", json=body)
        assert status == 201, answer
        await caller.answer(answer["transport"]["sdp"])
        for _ in range(100):
            await asyncio.sleep(0.05)
            if got:
                break
        assert got[0]["type"] == "session.started"
        caller.channel.send(
            json.dumps({"type": "session.commentary.append", "content": "say 2", "delegation_id": None})
        )
        for _ in range(100):
            await asyncio.sleep(0.05)
            if sum(event["type"] == "session.output_transcript.delta" for event in got) >= 2:
                break
        text = "".join(e["delta"] for e in got if e["type"] == "session.output_transcript.delta")
        assert text == "0-0 0-1."
        assert (await api.post(f"/v1/live/sessions/{answer['session']['id']}/hangup"))[0] == 200
        await api.until_empty()
        assert (await api.post(f"/v1/live/sessions/{answer['session']['id']}/hangup"))[0] == 404
        await caller.close()

    at_a_daemon(story)


def test_a_duplex_session_is_resumed_and_only_what_was_missed_is_told_again() -> None:
    """The connection breaks in the middle of a reply; the client comes back with its token (T-RC-01)."""

    async def story(api: Api) -> None:
        seen: list[dict[str, Any]] = []

        async def until(socket: Any, kind: str) -> dict[str, Any]:
            while True:
                event: dict[str, Any] = json.loads(await asyncio.wait_for(socket.receive_str(), 10))
                if "server_event_seq" in event:
                    assert event["server_event_seq"] == (seen[-1]["server_event_seq"] + 1 if seen else 1)
                    seen.append(event)
                if event["type"] == kind:
                    return event

        session = {"model": "clock", "modalities": ["audio", "text"], "sample_rate_hz": 16_000, "turn_detection": None}
        async with api.socket(query="duplex=1&model=clock") as socket:
            await socket.send_json({"type": "session.update", "session": session})
            created = await until(socket, "session.created")
            told = {"type": "input.text.append", "text": "say 6", "event_id": "e1"}
            await socket.send_json(told)
            await socket.send_json({"type": "response.create", "event_id": "e2"})
            await until(socket, "response.output_audio.delta")
            await socket.send_json({"type": "session.event_ack", "server_event_seq": 2})
        resume = {
            "type": "session.resume",
            "session_id": created["session"]["id"],
            "resume_token": created["resume_token"],
            "last_received_server_event_seq": seen[-1]["server_event_seq"],
        }
        wrongs = (({"resume_token": "x"}, "invalid_resume_token"), ({"session_id": "x"}, "session_resume_expired"))
        for wrong, code in wrongs:
            async with api.socket(query="duplex=1") as socket:
                await socket.send_json({**resume, **wrong})
                assert (await until(socket, "error"))["error"]["code"] == code
        async with api.socket(query="duplex=1&model=clock") as socket:
            await socket.send_json(resume)
            assert (await until(socket, "session.resumed"))["session"]["id"] == created["session"]["id"]
            await until(socket, "response.done")
            await socket.send_json({"type": "session.close"})
            await until(socket, "session.closed")
        sound = b"".join(base64.b64decode(e["delta"]) for e in seen if e["type"] == "response.output_audio.delta")
        assert [w.index for w in tones.decode(np.frombuffer(sound, "<i2"), 24_000)] == list(range(6))
        await api.until_empty()

    at_a_daemon(story)


def test_what_is_not_there_says_so() -> None:
    async def story(api: Api) -> None:
        assert (await api.post("/v1/realtime/sessions", json={}))[0] == 410
        assert (await api.post("/v1/realtime/calls/x/accept", json={}))[0] == 501
        assert (await api.post("/v1/nothing", json={}))[1]["error"]["type"] == "invalid_request_error"
        with pytest.raises(aiohttp.WSServerHandshakeError, match="404"):
            await api.socket(query="call_id=rtc_none")
        metrics = await api.daemon.get("/metrics")
        assert "# TYPE duplexd_frontend_sessions gauge\nduplexd_frontend_sessions 0\n" in metrics

    at_a_daemon(story)
