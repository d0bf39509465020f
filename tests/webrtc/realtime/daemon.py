"""A daemon of the word clock, and clients that speak the Realtime protocol with it: a socket, and a WebRTC caller."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import numpy as np
from aiortc import RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError

from duplexd.bench.daemon import Daemon
from duplexd.media import tones
from duplexd.webrtc.opus import VOICE_FRAME
from duplexd.webrtc.peer import LOOPBACK, bind_addresses
from duplexd.webrtc.receive import install
from duplexd.webrtc.tracks import MediaClock, VoiceTrack
from tests.webrtc.realtime.rules import View
from tests.webrtc.served import serve

FLAGS = ("--model", "clock", "--loopback-media", "--sessions-max", "3")


class Api:
    """One daemon and a client of its API."""

    def __init__(self, daemon: Daemon, http: aiohttp.ClientSession) -> None:
        self.daemon = daemon
        self.http = http

    def url(self, path: str) -> str:
        return self.daemon.url.rstrip("/") + path

    async def post(self, path: str, *, token: str = "", **options: Any) -> tuple[int, Any, Any]:
        headers = {**options.pop("headers", {}), **({"Authorization": f"Bearer {token}"} if token else {})}
        async with self.http.post(self.url(path), headers=headers, **options) as answer:
            body = await answer.read()
            kind = answer.content_type
            return answer.status, json.loads(body) if kind == "application/json" else body, answer.headers

    def socket(self, *, query: str = "model=clock", **options: Any) -> Any:
        return self.http.ws_connect(self.url(f"/v1/realtime?{query}"), max_msg_size=0, **options)

    async def sessions(self) -> int:
        return int(json.loads(await self.daemon.get("/readyz"))["sessions"])

    async def until_empty(self) -> None:
        for _ in range(100):
            if await self.sessions() == 0:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{await self.sessions()} sessions are left")


class Talk:
    """A conversation over a WebSocket; every event is checked."""

    def __init__(self, socket: Any, *, webrtc: bool = False) -> None:
        self.socket = socket
        self.view = View(webrtc=webrtc)
        self.events: list[dict[str, Any]] = []
        self.sound = b""

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send_str(json.dumps({"type": kind, **fields}))

    async def until(self, kind: str, *, seconds: float = 10.0) -> dict[str, Any]:
        async def search() -> dict[str, Any]:
            while True:
                event: dict[str, Any] = json.loads(await self.socket.receive_str())
                self.take(event)
                if event["type"] == kind:
                    return event

        return await asyncio.wait_for(search(), seconds)

    def take(self, event: dict[str, Any]) -> None:
        self.view.take(event)
        self.events.append(event)
        if event["type"] == "response.output_audio.delta":
            self.sound += base64.b64decode(event["delta"])

    async def ask(self, text: str) -> None:
        part = {"type": "input_text", "text": text}
        await self.send("conversation.item.create", item={"type": "message", "role": "user", "content": [part]})
        await self.send("response.create")

    def words(self) -> list[int]:
        return [word.index for word in tones.decode(np.frombuffer(self.sound, "<i2"), 24_000)]


Story = Callable[[Api], Awaitable[None]]


def at_a_daemon(story: Story, *flags: str, within_s: float = 60) -> None:
    serve(story, Api, (*FLAGS, *flags), within_s=within_s)


class Caller:
    """A WebRTC client of `calls`, as stock SDKs are: one channel, an offer without candidates."""

    def __init__(self, *, video: str = "") -> None:
        self.connection = RTCPeerConnection()
        self.frames: list[Any] = []  #: of the face, when `video` is a direction
        self.watching: asyncio.Task[None] | None = None
        self.channel = self.connection.createDataChannel("oai-events")
        self.talk = Talk(None, webrtc=True)
        self.arrived = asyncio.Event()
        self.heard: list[np.ndarray] = []
        self.mic = np.zeros(0, np.int16)
        track = VoiceTrack(MediaClock(), lambda pts: self._frame())
        track.sender = self.connection.addTrack(track)
        self.channel.on("message", self._take)
        if video:
            self.connection.addTransceiver("video", direction=video)
        self.connection.on("track", self._take_track)

    def _take_track(self, track: Any) -> None:
        if track.kind == "video":
            self.watching = asyncio.ensure_future(self._watch(track))

    async def _watch(self, track: Any) -> None:
        with contextlib.suppress(MediaStreamError):
            while True:
                self.frames.append(await track.recv())

    def _frame(self) -> np.ndarray:
        frame, self.mic = self.mic[:VOICE_FRAME], self.mic[VOICE_FRAME:]
        return np.concatenate([frame, np.zeros(VOICE_FRAME - len(frame), np.int16)])

    def _take(self, text: str) -> None:
        self.talk.take(json.loads(text))
        self.arrived.set()

    async def offer(self) -> str:
        receiver = self.connection.getTransceivers()[0].receiver
        self.receiver = install(receiver, lambda pcm, rtp, how: self.heard.append(pcm))
        bind_addresses(self.connection, [LOOPBACK])
        await self.connection.setLocalDescription(await self.connection.createOffer())
        sdp: str = self.connection.localDescription.sdp
        return "".join(line for line in sdp.splitlines(keepends=True) if "candidate" not in line)

    async def answer(self, sdp: str) -> None:
        await self.connection.setRemoteDescription(RTCSessionDescription(sdp=sdp, type="answer"))

    def send(self, kind: str, **fields: Any) -> None:
        self.channel.send(json.dumps({"type": kind, **fields}))

    async def until(self, kind: str, *, seconds: float = 10.0) -> dict[str, Any]:
        async def search() -> dict[str, Any]:
            seen = 0
            while True:
                while seen < len(self.talk.events):
                    event = self.talk.events[seen]
                    seen += 1
                    if event["type"] == kind:
                        return event
                self.arrived.clear()
                await self.arrived.wait()

        return await asyncio.wait_for(search(), seconds)

    async def close(self) -> None:
        if self.watching is not None:
            self.watching.cancel()
        self.receiver.close()
        await self.connection.close()


async def call(
    api: Api, *, token: str = "", session: dict[str, Any] | None = None, video: str = ""
) -> tuple[Caller, str]:
    caller = Caller(video=video)
    form = aiohttp.FormData()
    form.add_field("sdp", await caller.offer(), content_type="application/sdp")
    form.add_field("session", json.dumps(session or {"type": "realtime"}), content_type="application/json")
    status, body, headers = await api.post("/v1/realtime/calls", token=token, data=form)
    assert status == 201, body
    await caller.answer(body.decode())
    return caller, headers["Location"].rsplit("/", 1)[1]
