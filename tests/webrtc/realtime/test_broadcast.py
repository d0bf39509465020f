"""WHIP and WHEP at a daemon of the word clock: a publisher whose session is watched, viewers of a call, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiortc import RTCPeerConnection, RTCRtpSender, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError

from duplexd.media import tones
from duplexd.webrtc.audience import VIEWERS_MAX
from duplexd.webrtc.opus import VOICE_FRAME
from duplexd.webrtc.peer import LOOPBACK, bind_addresses
from duplexd.webrtc.realtime.broadcast import links
from duplexd.webrtc.receive import install
from duplexd.webrtc.tracks import MediaClock, VoiceTrack
from duplexd.webrtc.video import Still, VideoTrack, i420, portrait
from tests.webrtc.client import TestClient
from tests.webrtc.realtime.daemon import Api, Talk, at_a_daemon, call
from tests.webrtc.realtime.simulated import beep24
from tests.webrtc.realtime.test_call_face import flashes, user

pytestmark = pytest.mark.slow
SDP = {"Content-Type": "application/sdp"}


class Station:
    """A publisher (`sends`) or a viewer: one HTTP request, no channel."""

    def __init__(self, *, sends: bool, video: bool = True, camera: VideoTrack | None = None) -> None:
        self.connection = RTCPeerConnection()
        self.heard: list[np.ndarray] = []
        self.frames: list[Any] = []
        self.mic = np.zeros(0, np.int16)
        self.location = ""
        self._sends = sends
        self._tasks: list[asyncio.Task[None]] = []
        if sends:
            track = VoiceTrack(MediaClock(), lambda pts: self._frame())
            track.sender = self.connection.addTransceiver(track, direction="sendonly").sender
        else:
            self.connection.addTransceiver("audio", direction="recvonly")
        if camera is not None:
            transceiver = self.connection.addTransceiver(camera, direction="sendonly")
            vp8 = [c for c in RTCRtpSender.getCapabilities("video").codecs if c.mimeType == "video/VP8"]
            transceiver.setCodecPreferences(vp8)
            camera.attach(transceiver.sender)
        elif video:
            self.connection.addTransceiver("video", direction="sendonly" if sends else "recvonly")
        self.connection.on("track", self._take_track)

    def _frame(self) -> np.ndarray:
        frame, self.mic = self.mic[:VOICE_FRAME], self.mic[VOICE_FRAME:]
        return np.concatenate([frame, np.zeros(VOICE_FRAME - len(frame), np.int16)])

    def _take_track(self, track: Any) -> None:
        if track.kind == "video":
            self._tasks.append(asyncio.ensure_future(self._watch(track)))

    async def _watch(self, track: Any) -> None:
        with contextlib.suppress(MediaStreamError):
            while True:
                self.frames.append(await track.recv())

    async def offer(self) -> str:
        if not self._sends:
            receiver = self.connection.getTransceivers()[0].receiver
            self.receiver = install(receiver, lambda pcm, rtp, how: self.heard.append(pcm))
        bind_addresses(self.connection, [LOOPBACK])
        await self.connection.setLocalDescription(await self.connection.createOffer())
        sdp: str = self.connection.localDescription.sdp
        return sdp

    async def connect(self, api: Api, path: str) -> Station:
        status, body, headers = await api.post(path, data=await self.offer(), headers=SDP)
        assert (status, headers["Content-Type"]) == (201, "application/sdp"), body
        self.location, self.headers = headers["Location"], headers
        await self.connection.setRemoteDescription(RTCSessionDescription(sdp=body.decode(), type="answer"))
        for _ in range(200):
            if self.connection.connectionState == "connected":
                return self
            await asyncio.sleep(0.02)
        raise AssertionError(self.connection.connectionState)

    def words(self) -> list[int]:
        pcm = np.concatenate(self.heard)
        return [word.index for word in tones.decode(pcm, 16_000) if word.end_sample - word.start_sample > 3200]

    def directions(self) -> list[str]:
        answer = self.connection.remoteDescription.sdp.splitlines()
        return [line[2:] for line in answer if line[2:] in ("sendonly", "recvonly", "sendrecv", "inactive")]

    async def until_closed(self) -> None:
        for _ in range(200):
            if self.connection.connectionState == "closed":
                return
            await asyncio.sleep(0.02)
        raise AssertionError(self.connection.connectionState)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if not self._sends:
            self.receiver.close()
        await self.connection.close()


async def delete(api: Api, location: str) -> int:
    async with api.http.delete(api.url(location)) as answer:
        return answer.status


async def until_words(station: Station, count: int) -> list[int]:
    for _ in range(150):
        if len(station.heard) > 20 and len(station.words()) >= count:
            return station.words()
        await asyncio.sleep(0.1)
    raise AssertionError(f"{station.words()} were heard, not {count} words")


def test_a_publisher_speaks_and_whoever_watches_hears_and_sees_the_answer() -> None:
    async def story(api: Api) -> None:
        publisher = await Station(sends=True).connect(api, "/v1/whip")
        assert publisher.location.startswith("/v1/whip/whip_")
        assert set(publisher.directions()) <= {"recvonly", "inactive"}
        session = publisher.location.rsplit("/", 1)[1]
        first = await Station(sends=False).connect(api, f"/v1/whep?session={session}")
        second = await Station(sends=False).connect(api, f"/v1/whep?session={session}")
        assert set(first.directions()) == {"sendonly"}
        metrics = await api.daemon.metrics()
        assert (metrics["duplexd_frontend_sessions"], metrics["duplexd_frontend_viewers"]) == (1, 2)
        publisher.mic = beep24(700)
        spoken = await until_words(first, 6)
        await asyncio.sleep(0.5)
        assert spoken[:6] == list(range(6))
        assert second.words()[:6] == spoken[:6]
        assert len(flashes(first.frames)) >= 5
        assert len(flashes(second.frames)) >= 5
        # One encoding for both: what the encoder made is about what one of them got.
        made = (await api.daemon.metrics())["duplexd_frontend_pictures_sent_total"]
        assert len(first.frames) / 1.5 < made < 1.5 * len(first.frames)
        assert await delete(api, second.location) == 200
        assert await delete(api, second.location) == 404
        assert await delete(api, publisher.location) == 200
        await first.until_closed()
        await api.until_empty()
        assert await delete(api, publisher.location) == 404
        assert (await api.daemon.metrics())["duplexd_frontend_viewers"] == 0
        for station in (publisher, first, second):
            await station.close()

    at_a_daemon(story)


def test_a_publishers_camera_is_looked_at() -> None:
    async def story(api: Api) -> None:
        pool = ThreadPoolExecutor(1)
        camera = VideoTrack(MediaClock(), Still(i420(portrait())), pool=pool)
        publisher = Station(sends=True, camera=camera)
        await publisher.connect(api, "/v1/whip")
        assert publisher.directions() == ["recvonly", "recvonly"]
        camera.show()
        for _ in range(100):
            camera.want_keyframe()
            if (await api.daemon.metrics()).get("duplexd_frontend_camera_decoded_total", 0) >= 1:
                break
        else:
            raise AssertionError("no picture of the camera was looked at")
        await publisher.close()
        await api.until_empty()
        pool.shutdown()

    at_a_daemon(story)


def test_a_publisher_of_another_codec_is_heard_and_its_picture_declined() -> None:
    """What OBS sends: H.264 alone."""

    async def story(api: Api) -> None:
        publisher = Station(sends=True)
        h264 = [c for c in RTCRtpSender.getCapabilities("video").codecs if c.mimeType == "video/H264"]
        publisher.connection.getTransceivers()[1].setCodecPreferences(h264)
        await publisher.connect(api, "/v1/whip")
        assert publisher.directions() == ["recvonly", "inactive"]
        session = publisher.location.rsplit("/", 1)[1]
        viewer = await Station(sends=False, video=False).connect(api, f"/v1/whep?session={session}")
        publisher.mic = beep24(700)
        assert (await until_words(viewer, 2))[:2] == [0, 1]
        assert (await api.daemon.metrics())["duplexd_frontend_views"] == 0  # Who only listens has no face made.
        await viewer.close()
        await publisher.close()
        await api.until_empty()

    at_a_daemon(story)


def test_a_viewer_of_a_call_hears_the_same_cut_and_costs_a_face_only_while_it_watches() -> None:
    async def story(api: Api) -> None:
        caller, call_id = await call(api)
        await caller.until("session.created")
        viewer = await Station(sends=False).connect(api, f"/v1/whep?session={call_id}")
        caller.send("conversation.item.create", item=user("say 12"))
        caller.send("response.create")
        await caller.until("output_audio_buffer.started")
        await asyncio.sleep(2.4)
        caller.mic = beep24(900)
        truncated = await caller.until("conversation.item.truncated")
        caller.send("conversation.item.retrieve", item_id=truncated["item_id"])
        kept = (await caller.until("conversation.item.retrieved"))["item"]["content"][0]["transcript"].split()
        await caller.until("output_audio_buffer.stopped")
        pcm = np.concatenate(caller.heard)
        heard = [w.index for w in tones.decode(pcm, 16_000) if w.end_sample - w.start_sample > 3200]
        first = [word for word in heard if word < 32]
        assert viewer.words() == heard
        assert 2 <= len(first) < 12
        assert len(kept) in (len(first) - 1, len(first), len(first) + 1)
        assert len(flashes(viewer.frames)) >= len(first) - 1
        assert (await api.daemon.metrics())["duplexd_frontend_views"] == 1
        assert await delete(api, viewer.location) == 200
        await asyncio.sleep(0.3)
        assert (await api.daemon.metrics())["duplexd_frontend_views"] == 0
        assert await api.sessions() == 1
        await viewer.close()
        await caller.close()
        await api.until_empty()

    at_a_daemon(story)


def test_a_call_watched_in_the_middle_shows_its_viewer_the_face_its_caller_sees() -> None:
    async def story(api: Api) -> None:
        caller, call_id = await call(api, video="recvonly")
        await caller.until("session.created")
        caller.send("conversation.item.create", item=user("say 9"))
        caller.send("response.create")
        await caller.until("output_audio_buffer.started")
        viewer = await Station(sends=False).connect(api, f"/v1/whep?session={call_id}")
        await caller.until("output_audio_buffer.stopped")
        assert viewer.words() == list(range(9))[-len(viewer.words()) :]
        assert len(viewer.words()) >= 4
        # Under load a frame is skipped, and a flash with it.
        assert len(viewer.words()) - 1 <= len(flashes(viewer.frames)) <= len(viewer.words()) + 1
        assert 8 <= len(flashes(caller.frames)) <= 9
        await viewer.close()
        await caller.close()
        await api.until_empty()

    at_a_daemon(story)


def test_a_hidden_page_is_watched_by_its_number_and_costs_a_face_only_then() -> None:
    async def story(api: Api) -> None:
        opened: dict[str, Any] = {}

        async def answer(sdp: str) -> str:
            _, body, _ = await api.post("/api/session", json={"sdp": sdp, "type": "offer"})
            opened.update(body)
            return str(body["sdp"])

        async def views(wanted: int) -> None:
            for _ in range(40):
                if (await api.daemon.metrics())["duplexd_frontend_views"] == wanted:
                    return
            raise AssertionError(f"not {wanted} views")

        page = await TestClient.connect(answer, video="recvonly")
        await views(1)
        page.send("duplexd", json.dumps({"t": "seen", "on": False}))
        await views(0)
        viewer = await Station(sends=False).connect(api, f"/v1/whep?session={opened['session']}")
        await views(1)
        page.send("duplexd", json.dumps({"t": "say", "text": "say 4", "id": "k"}))
        assert await until_words(viewer, 4) == [0, 1, 2, 3]
        assert 3 <= len(flashes(viewer.frames)) <= 4
        assert await delete(api, viewer.location) == 200
        await views(0)
        await viewer.close()
        await page.close()
        await api.until_empty()

    at_a_daemon(story)


def test_publishers_and_viewers_that_come_and_go_leave_nothing_behind() -> None:
    """They leave by DELETE, by hanging up, or with their session."""

    async def story(api: Api) -> None:
        async def visit(number: int) -> None:
            publisher = await Station(sends=True, video=False).connect(api, "/v1/whip")
            session = publisher.location.rsplit("/", 1)[1]
            viewers = [await Station(sends=False).connect(api, f"/v1/whep?session={session}") for _ in range(2)]
            if number % 3 == 0:
                assert await delete(api, viewers[0].location) == 200
            elif number % 3 == 1:
                await viewers[0].connection.close()
            assert await delete(api, publisher.location) == 200
            for station in (publisher, *viewers):
                await station.close()

        await visit(0)
        await asyncio.sleep(1.5)  # The first figures of the engine come with its first session.
        before = await api.daemon.held_at_rest()
        for number in range(9):
            await visit(number)
        await api.until_empty()
        after = await api.daemon.held_at_rest()
        assert {k: v for k, v in after.items() if v > before[k] + 2} == {}

    at_a_daemon(story)


def test_views_end_with_a_session_whose_engine_died() -> None:
    async def story(api: Api) -> None:
        publisher = await Station(sends=True).connect(api, "/v1/whip")
        session = publisher.location.rsplit("/", 1)[1]
        viewer = await Station(sends=False).connect(api, f"/v1/whep?session={session}")
        os.kill(api.daemon.engine_pid(), signal.SIGKILL)
        await viewer.until_closed()
        await publisher.until_closed()
        metrics = await api.daemon.metrics()
        assert (metrics["duplexd_frontend_sessions"], metrics["duplexd_frontend_viewers"]) == (0, 0)
        assert await delete(api, viewer.location) == 404
        assert await delete(api, publisher.location) == 404
        for station in (publisher, viewer):
            await station.close()

    at_a_daemon(story)


def test_what_cannot_be_published_or_watched_is_refused_with_the_status_that_says_why() -> None:
    async def story(api: Api) -> None:
        async def ask(path: str, offer: str, *, kind: str = "application/sdp") -> tuple[int, str, Any]:
            status, body, headers = await api.post(path, data=offer, headers={"Content-Type": kind})
            return status, body["error"]["code"] if isinstance(body, dict) else "", headers

        sends, receives = await Station(sends=True).offer(), await Station(sends=False).offer()
        assert (await ask("/v1/whip", sends, kind="text/plain"))[:2] == (415, "unsupported_media_type")
        assert (await ask("/v1/whip", "no offer"))[:2] == (400, "bad_offer")
        assert (await ask("/v1/whip", receives))[:2] == (400, "bad_offer")
        assert (await ask("/v1/whep", receives))[:2] == (400, "missing_required_parameter")
        assert (await ask("/v1/whep?session=whip_x", receives))[:2] == (404, "session_not_found")
        assert (await ask("/v1/whep?session=99", receives))[:2] == (404, "session_not_found")
        async with api.socket() as socket:
            await Talk(socket).until("session.created")
            codes = [(await ask(f"/v1/whep?session={n}", receives))[:2] for n in range(1, 8)]
            assert sorted(set(codes)) == [(404, "session_not_found"), (409, "no_track")]
        await api.until_empty()
        publisher = await Station(sends=True, video=False).connect(api, "/v1/whip")
        session = publisher.location.rsplit("/", 1)[1]
        for _ in range(VIEWERS_MAX):
            assert (await ask(f"/v1/whep?session={session}", await Station(sends=False).offer()))[0] == 201
        status, code, headers = await ask(f"/v1/whep?session={session}", receives)
        assert (status, code) == (503, "busy")
        assert int(headers["Retry-After"]) > 0
        assert (await ask(f"/v1/whep?session={session}", sends))[0] in (400, 503)
        for path, trickles in (("/v1/whip", 405), (publisher.location, 501), ("/v1/whep", 405), ("/v1/whep/x", 501)):
            for method, expected in (("PATCH", trickles), ("PUT", 405), ("GET", 405), ("HEAD", 405)):
                async with api.http.request(method, api.url(path), data=b"a=candidate") as answer:
                    assert answer.status == expected
                    assert "OPTIONS" in answer.headers["Allow"]
            async with api.http.options(api.url(path)) as answer:
                posts = "application/sdp" if path.count("/") == 2 else None
                assert (answer.status, answer.headers.get("Accept-Post")) == (200, posts)
        assert await delete(api, publisher.location) == 200
        await publisher.close()
        await api.until_empty()

    at_a_daemon(story)


def test_a_full_daemon_tells_a_publisher_when_to_come_again_and_nobody_comes_without_the_token() -> None:
    async def story(api: Api) -> None:
        offer = await Station(sends=True, video=False).offer()
        status, _, _ = await api.post("/v1/whip", data=offer, headers=SDP)
        assert status == 401
        wanted = {"session": {"type": "realtime"}}
        _, secret, _ = await api.post("/v1/realtime/client_secrets", token="t0ken", json=wanted)
        for _ in range(3):
            offer = await Station(sends=True, video=False).offer()
            status, _, _ = await api.post("/v1/whip", data=offer, headers=SDP, token=secret["value"])
            assert status == 201
        offer = await Station(sends=True, video=False).offer()
        status, _, headers = await api.post("/v1/whip", data=offer, headers=SDP, token="t0ken")
        assert (status, int(headers["Retry-After"]) > 0) == (503, True)
        # A number is no secret: whoever holds a client secret does not watch others by it.
        receives = await Station(sends=False).offer()
        for token, expected in ((secret["value"], {403}), ("t0ken", {201, 404})):
            for path in ("/v1/whep?session=1", "/v1/whep?session=2"):
                status, _, _ = await api.post(path, data=receives, headers=SDP, token=token)
                assert status in expected

    at_a_daemon(story, "--token", "t0ken")


def test_who_may_watch_a_session_can_neither_join_nor_end_it() -> None:
    """The view id is told to who began the session; it opens a view and nothing else."""

    async def story(api: Api) -> None:
        publisher = await Station(sends=True, video=False).connect(api, "/v1/whip")
        address = publisher.headers["Duplexd-View"]
        view_id = address.partition("=")[2]
        viewer = await Station(sends=False, video=False).connect(api, address)
        assert viewer.location.startswith("/v1/whep/")
        assert view_id.startswith("view_")
        for path in (f"/v1/realtime?call_id={view_id}", f"/v1/live/sessions/{view_id}/attach"):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await api.http.ws_connect(api.url(path))
            assert refused.value.status == 404
        for path in (f"/v1/realtime/calls/{view_id}/hangup", f"/v1/live/sessions/{view_id}/hangup"):
            assert (await api.post(path))[0] == 404
        for path in (f"/v1/whip/{view_id}", f"/v1/whip/{viewer.location.rsplit('/', 1)[1]}", f"/v1/whep/{view_id}"):
            assert await delete(api, path) == 404
        assert (await api.daemon.metrics())["duplexd_frontend_sessions"] == 1
        assert await delete(api, publisher.location) == 200
        await viewer.close()
        await publisher.close()

    at_a_daemon(story)


def test_servers_to_reach_the_daemon_by_are_links() -> None:
    found = list(links(["stun:example.org:3478", "turn:me:secret@example.org:3478"]))

    assert found == [
        '<stun:example.org:3478>; rel="ice-server"',
        '<turn:example.org:3478>; rel="ice-server"; username="me"; credential="secret"; credential-type="password"',
    ]
    assert r'credential="a\"b\\"' in next(links(['turn:me:a"b\\@example.org:3478']))
