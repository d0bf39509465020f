"""A page without a browser: an aiortc client in this process that talks, listens and keeps both data channels.

    client = await TestClient.connect(answer)      # `answer(offer_sdp) -> answer_sdp`, e.g. around Peer.accept
    client.mic = tone(440)                         # pts -> int16 (480,) at 24 kHz
    client.send("duplexd", '{"t":"say",...}')
    text = await client.next_message("duplexd")
    client.heard                                   # [(pcm int16 16 kHz, rtp, how), ...] of the downlink
    await client.close()

It uses loopback only. With `lose` it loses packets on its way out: `lose(index) -> bool`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
from aiortc import RTCBundlePolicy, RTCConfiguration, RTCPeerConnection, RTCRtpSender, RTCSessionDescription
from aiortc.rtcsctptransport import WEBRTC_STRING

from duplexd.units import TICKS_PER_SECOND, Ticks
from duplexd.webrtc import wire
from duplexd.webrtc.opus import VOICE_FRAME, VOICE_FRAME_TICKS, VOICE_RATE, Pcm
from duplexd.webrtc.peer import LOOPBACK, bind_addresses
from duplexd.webrtc.receive import install
from duplexd.webrtc.tracks import MediaClock, VoiceTrack

Answer = Callable[[str], Awaitable[str]]
Source = Callable[[Ticks], Pcm]


def silence(pts: Ticks) -> Pcm:
    return np.zeros(VOICE_FRAME, np.int16)


def tone(hertz: float, *, level: float = 0.3) -> Source:
    """A steady tone, continuous over packets."""

    def source(pts: Ticks) -> Pcm:
        time = (pts * VOICE_RATE // TICKS_PER_SECOND + np.arange(VOICE_FRAME)) / VOICE_RATE
        return np.asarray(level * 32767 * np.sin(2 * np.pi * hertz * time), np.int16)

    return source


def recording(pcm: Pcm) -> Source:
    """A mono recording at 24 kHz, then silence."""
    padded = np.concatenate([pcm, np.zeros(VOICE_FRAME, np.int16)])

    def source(pts: Ticks) -> Pcm:
        start = min(pts // VOICE_FRAME_TICKS * VOICE_FRAME, len(pcm))
        part = padded[start : start + VOICE_FRAME]
        return np.concatenate([part, np.zeros(VOICE_FRAME - len(part), np.int16)])

    return source


class TestClient:
    __test__ = False  # pytest: not a test class

    def __init__(self, *, mic: Source = silence, video: Any = "", ping: bool = True) -> None:
        self.mic = mic
        self.heard: list[tuple[Pcm, int, str]] = []
        self.frames: list[Any] = []
        self.lose: Callable[[int], bool] = lambda index: False
        self.connection = RTCPeerConnection(RTCConfiguration(iceServers=[], bundlePolicy=RTCBundlePolicy.MAX_BUNDLE))
        self.track = VoiceTrack(MediaClock(), lambda pts: self.mic(pts))
        self.track.sender = self.connection.addTrack(self.track)
        self.channels = {
            wire.RELIABLE_CHANNEL: self.connection.createDataChannel(wire.RELIABLE_CHANNEL),
            wire.FAST_CHANNEL: self.connection.createDataChannel(wire.FAST_CHANNEL, ordered=False, maxRetransmits=0),
        }
        self.messages: dict[str, asyncio.Queue[Any]] = {label: asyncio.Queue() for label in self.channels}
        self.pongs: list[wire.Pong] = []
        self._ping = ping
        self._tasks: list[asyncio.Task[None]] = []
        self._receiver: Any = None
        self._listen_to_channels()
        if isinstance(video, str) and video:
            self.connection.addTransceiver("video", direction=video)
        elif video:
            self.connection.addTransceiver(video, direction="sendrecv")

    @classmethod
    async def connect(cls, answer: Answer, *, munge: Callable[[str], str] = str, **options: Any) -> TestClient:
        """Offer, take the answer, wait until both channels are open. `munge` changes the offer on its way."""
        client = cls(**options)
        await client.offer(answer, munge=munge)
        await client.wait_open()
        return client

    async def offer(self, answer: Answer, *, munge: Callable[[str], str] = str) -> None:
        opus = [codec for codec in RTCRtpSender.getCapabilities("audio").codecs if codec.mimeType == "audio/opus"]
        audio = self.connection.getTransceivers()[0]
        audio.setCodecPreferences(opus)
        self._receiver = install(audio.receiver, lambda pcm, rtp, how: self.heard.append((pcm, rtp, how)))
        self.connection.on("track", self._take_track)
        bind_addresses(self.connection, [LOOPBACK])
        await self.connection.setLocalDescription(await self.connection.createOffer())
        answered = await answer(munge(self.connection.localDescription.sdp))
        await self.connection.setRemoteDescription(RTCSessionDescription(sdp=answered, type="answer"))
        self._lossy(audio.sender.transport)

    async def wait_open(self, *, seconds: float = 10.0) -> None:
        opened = [asyncio.Event() for _ in self.channels]
        for event, channel in zip(opened, self.channels.values(), strict=True):
            channel.on("open", event.set)
            if channel.readyState == "open":
                event.set()
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in opened)), seconds)
        if self._ping:
            self._tasks.append(asyncio.ensure_future(self._keep_pinging()))

    def send(self, label: str, data: str | bytes) -> None:
        self.channels[label].send(data)

    async def send_raw(self, label: str, data: bytes) -> None:
        """A text message of these bytes, UTF-8 or not: no browser can send one that is not."""
        channel = self.channels[label]
        await channel.transport._send(channel.id, WEBRTC_STRING, data)

    async def next_message(self, label: str, *, seconds: float = 5.0) -> str:
        """The next message that is no pong."""
        message: str = await asyncio.wait_for(self.messages[label].get(), seconds)
        return message

    async def hear(self, samples: int, *, seconds: float = 5.0) -> Pcm:
        """Wait until that many samples (16 kHz) of the downlink have come; all of them so far."""

        async def enough() -> None:
            while sum(len(pcm) for pcm, _, _ in self.heard) < samples:
                await asyncio.sleep(0.005)

        await asyncio.wait_for(enough(), seconds)
        return np.concatenate([pcm for pcm, _, _ in self.heard])

    def vanish(self) -> None:
        """As if the network cable had been pulled: nothing leaves any more, nobody is told."""
        self._stop_tasks()
        for transceiver in self.connection.getTransceivers():
            transceiver.sender.transport.transport._send = _nowhere

    async def close(self) -> None:
        self._stop_tasks()
        if self._receiver is not None:
            self._receiver.close()
        await self.connection.close()
        self.track.stop()

    def _stop_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    def _listen_to_channels(self) -> None:
        for label, channel in self.channels.items():
            channel.on("message", lambda data, label=label: self._take_message(label, data))

    def _take_message(self, label: str, data: str | bytes) -> None:
        if isinstance(data, str) and '"t":"pong"' in data:
            self.pongs.append(_pong.decode(data))
            return
        self.messages[label].put_nowait(data)

    async def _keep_pinging(self) -> None:
        for n in itertools.count():
            if self.channels[wire.FAST_CHANNEL].readyState != "open":
                return  # The other side has hung up.
            self.send(wire.FAST_CHANNEL, _json.encode(wire.Ping(n=n, at=n * 1000.0)).decode())
            await asyncio.sleep(1.0)

    def _take_track(self, track: Any) -> None:
        if track.kind == "video":
            self._tasks.append(asyncio.ensure_future(self._watch(track)))

    async def _watch(self, track: Any) -> None:
        while True:
            self.frames.append(await track.recv())

    def _lossy(self, transport: Any) -> None:
        send = transport._send_rtp
        indexes = itertools.count()

        async def sometimes(data: bytes) -> None:
            is_media = data[1] & 0x7F < 64 or data[1] & 0x7F >= 96
            if is_media and self.lose(next(indexes)):
                return
            await send(data)

        transport._send_rtp = sometimes


async def _nowhere(data: bytes) -> None:
    return None


_json = msgspec.json.Encoder()
_pong = msgspec.json.Decoder(wire.Pong)
