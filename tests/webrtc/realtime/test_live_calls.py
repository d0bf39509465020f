"""Live over WebRTC at a daemon of the word clock: muting, rest, what a data channel may carry, and who joins."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from duplexd.media import tones
from tests.webrtc.realtime.daemon import Api, Caller, at_a_daemon
from tests.webrtc.realtime.simulated import beep24
from tests.webrtc.served import until_frames

pytestmark = pytest.mark.slow
Event = dict[str, Any]


class LiveCaller:
    """A caller of the Live surface."""

    def __init__(self, *, video: str = "") -> None:
        self.caller = Caller(video=video)
        self.got: list[Event] = []
        self.id = ""
        self.caller.channel.remove_all_listeners("message")
        self.caller.channel.on("message", lambda text: self.got.append(json.loads(text)))

    async def start(self, api: Api, **session: Any) -> Event:
        transport = {"type": "webrtc", "sdp": await self.caller.offer()}
        body = {"session": {"model": "clock", **session}, "transport": transport}
        status, answer, _ = await api.post("/v1/live/sessions", json=body)
        assert status == 201, answer
        await self.caller.answer(answer["transport"]["sdp"])
        self.id = answer["session"]["id"]
        for _ in range(200):
            if self.caller.channel.readyState == "open":
                return await self.until("session.started") if "client" not in session else {}
            await asyncio.sleep(0.02)
        raise AssertionError("the channel has not opened")

    def send(self, kind: str, **fields: Any) -> None:
        self.caller.channel.send(json.dumps({"type": kind, **fields}))

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.got]

    async def until(self, kind: str, *, seconds: float = 10.0) -> Event:
        return await until(lambda: next((event for event in self.got if event["type"] == kind), None), seconds=seconds)

    async def close(self) -> None:
        await self.caller.close()


async def until(find: Callable[[], Any], *, seconds: float = 10.0) -> Any:
    for _ in range(round(seconds / 0.02)):
        if found := find():
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen")


def test_a_muted_person_is_not_heard_on_a_call_either() -> None:
    async def story(api: Api) -> None:
        live = LiveCaller()
        await live.start(api)
        live.send("session.input_audio.mute", event_id="m")
        assert (await live.until("session.input_audio.muted"))["client_event_id"] == "m"
        live.caller.mic = beep24(700)
        await asyncio.sleep(2.5)
        assert "session.input_transcript.delta" not in live.kinds()
        live.send("session.input_audio.unmute")
        await live.until("session.input_audio.unmuted")
        live.caller.mic = beep24(700)
        await live.until("session.input_transcript.delta")
        await live.close()
        await api.until_empty()

    at_a_daemon(story)


def test_a_session_in_which_nothing_happens_rests_with_its_face_until_somebody_speaks() -> None:
    async def story(api: Api) -> None:
        live = LiveCaller(video="recvonly")
        await live.start(api, idle_timeout_s=1, wake_policy={"type": "speech"})
        await until_frames(live.caller, 5)
        await live.until("session.paused")
        assert (await api.daemon.metrics())["duplexd_frontend_views"] == 0
        live.caller.mic = beep24(700)
        await live.until("session.resumed")
        heard = await live.until("session.input_transcript.delta")
        assert heard["delta"] == "sound "
        await live.until("session.output_transcript.delta")
        assert (await api.daemon.metrics())["duplexd_frontend_views"] == 1
        live.send("session.close")
        usage = (await live.until("session.closed"))["usage"]
        assert usage["active_seconds"] + usage["paused_seconds"] == int(usage["seconds"])
        await live.close()
        await api.until_empty()
        bad = {"session": {"model": "clock", "idle_timeout_s": 1}, "transport": {"type": "webrtc", "sdp": "v=0"}}
        status, answer, _ = await api.post("/v1/live/sessions", json=bad)
        assert (status, answer["error"]["param"]) == (400, "session.wake_policy")

    at_a_daemon(story)


def test_a_page_sends_and_gets_only_what_its_session_allows() -> None:
    """The session was started by a server that does not trust the page; whoever joins beside it is trusted."""

    async def story(api: Api) -> None:
        live = LiveCaller()
        channel = {
            "allowed_client_events": ["session.input_audio.mute"],
            "allowed_server_events": [{"type": "session.input_audio.muted"}, {"type": "error"}],
        }
        await live.start(api, client={"data_channel": channel})
        live.send("session.commentary.append", content="say 2")
        error = (await live.until("error"))["error"]
        assert error["code"] == "event_not_allowed"
        live.send("session.input_audio.mute")
        await live.until("session.input_audio.muted")
        async with api.http.ws_connect(api.url(f"/v1/live/sessions/{live.id}/attach")) as side:
            assert json.loads(await side.receive_str())["type"] == "session.started"
            await side.send_json({"type": "session.commentary.append", "content": "say 2"})
            words = 0
            while words < 2:
                words += json.loads(await side.receive_str())["type"] == "session.output_transcript.delta"
        assert set(live.kinds()) == {"error", "session.input_audio.muted"}
        await live.close()
        await api.until_empty()

    at_a_daemon(story)


def test_who_joins_a_call_is_told_the_sound_of_both_sides_and_cannot_bring_any() -> None:
    async def story(api: Api) -> None:
        live = LiveCaller()
        await live.start(api)
        live.send("session.input_audio.mute")
        spoken, heard = b"", b""
        ends: list[int] = []
        async with api.http.ws_connect(api.url(f"/v1/live/sessions/{live.id}/attach")) as side:
            assert json.loads(await side.receive_str())["type"] == "session.started"
            await side.send_json({"type": "session.input_audio.append", "audio": ""})
            live.caller.mic = beep24(400)
            await side.send_json({"type": "session.commentary.append", "content": "say 3"})
            refused, words = "", 0
            while words < 3 or not refused:
                event = json.loads(await asyncio.wait_for(side.receive_str(), 10))
                match event["type"]:
                    case "session.input_audio.append":
                        spoken += base64.b64decode(event["audio"])
                    case "session.output_audio.delta":
                        heard += base64.b64decode(event["delta"])
                        assert event["end_ms"] - event["start_ms"] == 20
                        ends.append(event["end_ms"])
                    case "session.output_transcript.delta":
                        words += 1
                    case "error":
                        refused = event["error"]["code"]
        assert refused == "event_not_allowed"
        assert ends == sorted(ends)
        assert [word.index for word in tones.decode(np.frombuffer(heard, "<i2"), 24_000)][:2] == [0, 1]
        assert np.abs(np.frombuffer(spoken, "<i2")).max() > 4000  # Reflected before it was muted.
        assert "session.input_transcript.delta" not in live.kinds()
        await live.close()
        await api.until_empty()

    at_a_daemon(story)


def test_what_a_live_session_cannot_change_or_do_is_said() -> None:
    async def story(api: Api) -> None:
        live = LiveCaller()
        await live.start(api)
        live.send("session.update", session={"instructions": "other"}, event_id="u")
        error = (await live.until("error"))["error"]
        assert (error["code"], error["client_event_id"]) == ("unknown_parameter", "u")
        live.send("session.update", session={"delegation": {"type": "client"}})
        await live.until("session.updated")
        for act in ("fork", "accept"):
            assert (await api.post(f"/v1/live/sessions/{live.id}/{act}", json={}))[0] == 501
        await live.close()
        await api.until_empty()

    at_a_daemon(story)
