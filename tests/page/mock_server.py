"""A scripted front end for the page's tests: real HTTP, real WebRTC on 127.0.0.1, no engine.

It says one spoken reply to each turn, keeps the map from RTP to the reply's samples, holds on voice, decides as told,
and writes down everything the page sends. Every message is decoded by `duplexd.webrtc.wire`, so a field the protocol
does not have shows up in `invalid`.

    python tests/page/mock_server.py --port 8740 --decide flush|resume|never [--slots N] [--token T]
                                      [--no-udp] [--no-barge-in] [--faceless REASON]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import shutil
import subprocess
import tempfile
import wave
from pathlib import Path
from typing import Any

import aioice.ice
import av
import msgspec
import numpy as np
from aiohttp import web
from aiortc import MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription, VideoStreamTrack

from duplexd.webrtc import wire

PAGE = Path(wire.__file__).parent / "page"
RATE = 48_000
FRAME = 960
CURSOR_BIAS_MS = 12
TEXT = "I was just telling you about the old harbour, where the boats come in at six and the town smells of bread."


def voiced(seconds: float) -> np.ndarray:
    """A buzz with syllables, for machines without flite."""
    t = np.arange(int(seconds * RATE)) / RATE
    return 0.2 * np.sign(np.sin(2 * np.pi * 140 * t)) * (np.sin(2 * np.pi * 2 * t) > -0.5)


@functools.cache
def spoken(text: str) -> np.ndarray:
    """float64 samples at 48 kHz. Made once, before any session: the event loop paces the packets."""
    if shutil.which("flite") is None:
        return voiced(len(text) * 0.06)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/a.wav"
        subprocess.run(["flite", "-voice", "slt", "-t", text, "-o", path], check=True)
        with wave.open(path) as file:
            pcm = np.frombuffer(file.readframes(file.getnframes()), np.int16) / 32768
            rate = file.getframerate()
    at = np.arange(int(len(pcm) * RATE / rate)) * rate / RATE
    return np.interp(at, np.arange(len(pcm)), pcm)


class Downlink(MediaStreamTrack):
    """Opus packets with exact timestamps; `pull(pts)` gives 960 samples."""

    kind = "audio"

    def __init__(self, pull: Any) -> None:
        super().__init__()
        self.pull = pull
        self.pts = 0
        self.sender: Any = None
        self.origin: int | None = None
        self.started: float | None = None
        self.codec = av.CodecContext.create("libopus", "w")
        self.codec.sample_rate = RATE
        self.codec.layout = "mono"
        self.codec.format = "s16"
        self.codec.bit_rate = 32_000

    async def recv(self) -> Any:
        loop = asyncio.get_running_loop()
        if self.started is None:
            self.started = loop.time()
        elif self.origin is None:
            # The packet before this call is on the wire by now: its RTP timestamp minus its pts is the origin.
            self.origin = (self.sender._RTCRtpSender__rtp_timestamp - (self.pts - FRAME)) % 2**32
        await asyncio.sleep(max(0, self.started + self.pts / RATE - loop.time()))
        while True:
            frame = av.AudioFrame.from_ndarray(self.pull(self.pts)[None, :], format="s16", layout="mono")
            frame.sample_rate = RATE
            frame.pts = self.pts
            packets = self.codec.encode(frame)
            pts, self.pts = self.pts, self.pts + FRAME
            if packets:
                packets[0].pts = pts
                return packets[0]


class Portrait(VideoStreamTrack):
    """A still face, five times a second."""

    def __init__(self) -> None:
        super().__init__()
        y, x = np.mgrid[0:256, 0:256]
        image = np.full((256, 256, 3), (208, 226, 224), np.uint8)
        image[(x - 128) ** 2 / 92**2 + (y - 250) ** 2 / 96**2 < 1] = (38, 92, 96)
        image[(x - 128) ** 2 / 50**2 + (y - 112) ** 2 / 62**2 < 1] = (226, 186, 160)
        image[((x - 128) ** 2 / 55**2 + (y - 92) ** 2 / 58**2 < 1) & (y < 84)] = (60, 44, 40)
        for eye in (108, 148):
            image[(x - eye) ** 2 + (y - 114) ** 2 < 22] = (40, 34, 32)
        image[((x - 128) ** 2 / 18**2 + (y - 142) ** 2 / 6**2 < 1) & (y > 142)] = (170, 92, 86)
        self.frame = av.VideoFrame.from_ndarray(image, format="rgb24").reformat(format="yuv420p")

    async def recv(self) -> Any:
        await asyncio.sleep(0.2)
        pts, time_base = await self.next_timestamp()
        self.frame.pts, self.frame.time_base = pts, time_base
        return self.frame


class Reply:
    """One spoken reply on the session's timeline: `start` and words in ticks."""

    def __init__(self, number: int, start: int, text: str) -> None:
        self.number = number
        self.start = start
        self.samples = (spoken(text) * 32767).astype(np.int16)
        parts = text.split()
        edges = np.cumsum([0] + [len(p) + 1 for p in parts]) / sum(len(p) + 1 for p in parts) * len(self.samples)
        self.words = [
            wire.Word(p, start + int(a), start + int(b)) for p, a, b in zip(parts, edges, edges[1:], strict=False)
        ]

    @property
    def end(self) -> int:
        return self.start + len(self.samples)


class Live:
    """One session of the mock."""

    def __init__(self, number: int, decide: str, *, may_interrupt: bool, faceless: str) -> None:
        self.number = number
        self.decide = decide
        takes = ("audio", "text")
        self.ready = wire.Ready(number, "mock", 0, may_interrupt, takes, "at_cursor", faceless=faceless)
        self.log: list[dict[str, Any]] = []
        self.invalid: list[str] = []
        self.closed = asyncio.Event()
        self.pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.downlink = Downlink(self.pull)
        self.channels: dict[str, Any] = {}
        self.tasks: set[asyncio.Task[Any]] = set()
        self.epoch = self.order = self.hold = self.turn = self.responses = 0
        self.held = False
        self.reply: Reply | None = None
        self.next = 0  # timeline position of the next sample to send
        self.end = 0  # timeline position after the last reply
        self.sent: list[tuple[int, int, int]] = []  # pts, timeline, length
        self.playback = 0
        self.voices: set[int] = set()
        self.stops: set[int] = set()
        self.silent = False

    # -- media -------------------------------------------------------------------------------------------------------

    def pull(self, pts: int) -> np.ndarray:
        reply, out = self.reply, np.zeros(FRAME, np.int16)
        if reply is None or self.held or self.silent or self.next >= reply.end:
            return out
        begin = self.next - reply.start
        piece = reply.samples[begin : begin + FRAME]
        out[: len(piece)] = piece
        self.sent.append((pts, self.next, len(piece)))
        self.next += len(piece)
        return out

    def timeline(self, rtp: int, ms: float) -> int:
        """Timeline position of what left the jitter buffer `ms` after `rtp`."""
        pts = (rtp - (self.downlink.origin or 0)) % 2**32 + int((ms - CURSOR_BIAS_MS) * 48)
        before = [s for s in self.sent if s[0] <= pts]
        return before[-1][1] + min(pts - before[-1][0], before[-1][2]) if before else self.playback

    # -- talking to the page -----------------------------------------------------------------------------------------

    def send(self, message: wire.ToPage, label: str = wire.RELIABLE_CHANNEL) -> None:
        channel = self.channels.get(label)
        if channel is not None and channel.readyState == "open":
            channel.send(wire.encode(message))

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def thrice(self, message: wire.ToPage) -> None:
        for wait in (0.0, 0.02, 0.04):
            await asyncio.sleep(wait)
            self.send(message, wire.FAST_CHANNEL)

    def opened(self, channel: Any) -> None:
        self.channels[channel.label] = channel
        channel.on("message", self.received)
        if len(self.channels) == 2:
            self.send(self.ready)
            self.send(wire.State("listening"))

    def received(self, data: str) -> None:
        try:
            message = wire.decode(data)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            self.invalid.append(f"{error}: {data}")
            return
        self.log.append({"received": asyncio.get_running_loop().time(), **json.loads(data)})
        getattr(self, f"on_{type(message).__name__.lower()}", lambda _: None)(message)

    # -- what the page says ------------------------------------------------------------------------------------------

    def on_ping(self, message: wire.Ping) -> None:
        self.send(wire.Pong(message.n, message.at), wire.FAST_CHANNEL)

    def on_pos(self, message: wire.Pos) -> None:
        self.silent = message.silent and not message.hold
        if not message.muted and message.rtp and not self.held:
            self.playback = max(self.playback, self.timeline(message.rtp, message.age_ms - message.playout_ms))
        if message.hold == self.hold and message.hold and self.held:
            self.playback = max(self.playback, self.timeline(message.rtp, message.passed_ms))

    def on_say(self, message: wire.Say) -> None:
        if self.reply is not None:
            self.flush()
        self.spawn(self.answer(message.text))

    def on_voice(self, message: wire.Voice) -> None:
        if not message.on or message.id in self.voices:
            return
        self.voices.add(message.id)
        if self.reply is not None:
            self.spawn(self.barge_in())

    def on_stop(self, message: wire.Stop) -> None:
        if message.id not in self.stops:
            self.stops.add(message.id)
            self.playback = max(self.playback, self.timeline(message.rtp, message.passed_ms))
            self.flush()

    # -- the script --------------------------------------------------------------------------------------------------

    async def barge_in(self) -> None:
        if self.held:
            return
        self.held, self.hold, self.order = True, self.hold + 1, self.order + 1
        self.send(wire.State("held"))
        await self.thrice(wire.Hold(self.order, self.hold, self.epoch))
        await asyncio.sleep(0.35)
        if self.decide == "never":
            return
        if self.decide == "resume":
            self.resume()
        else:
            self.flush()
            await self.answer("Wait, I meant the other one")

    def resume(self) -> None:
        """Sends again from the muted sample, at the next pts."""
        self.next, self.held, self.order = self.playback, False, self.order + 1
        rtp = ((self.downlink.origin or 0) + self.downlink.pts) % 2**32
        self.spawn(self.thrice(wire.Resume(self.order, self.hold, self.epoch, rtp)))
        self.send(wire.State("speaking"))

    def flush(self) -> None:
        reply, self.reply, self.held = self.reply, None, False
        self.epoch, self.order = self.epoch + 1, self.order + 1
        rtp = ((self.downlink.origin or 0) + self.downlink.pts) % 2**32
        self.spawn(self.thrice(wire.Flush(self.order, self.hold, self.epoch, rtp, self.playback)))
        if reply is not None:
            self.finish(reply, "cancelled")
        self.send(wire.State("listening"))

    def finish(self, reply: Reply, state: str) -> None:
        heard = sum(w.end <= self.playback for w in reply.words) if state == "cancelled" else len(reply.words)
        unsure = (heard,) if heard < len(reply.words) else ()
        self.send(wire.Reply(reply.number, self.epoch, state))
        self.send(wire.Heard(reply.number, heard, unsure, False, True))
        self.end = max(self.end, reply.end)

    async def answer(self, text: str) -> None:
        self.turn += 1
        self.send(wire.User(self.turn, text, len(text) // 2, False))
        await asyncio.sleep(0.12)
        self.send(wire.User(self.turn, text, len(text), True))
        self.send(wire.State("thinking"))
        await asyncio.sleep(0.3)
        self.responses += 1
        reply = self.reply = Reply(self.responses, self.end, TEXT)
        self.next = self.playback = reply.start
        self.send(wire.Reply(reply.number, self.epoch, "created"))
        self.send(wire.State("speaking"))
        parts = (
            ("endpoint", 212.0),
            ("prefill", 48.0),
            ("first_token", 93.0),
            ("first_audio", 121.0),
            ("network", 9.0),
        )
        parts += (("jitter_buffer", 44.0 + 7 * self.turn), ("output", 34.0))
        self.send(wire.Latency(self.turn, reply.number, parts, sum(ms for _, ms in parts)))
        await self.speak(reply)

    async def speak(self, reply: Reply) -> None:
        shown = 0
        while self.reply is reply:
            made = min(reply.end, self.playback + 52_000)
            fresh = tuple(w for w in reply.words[shown:] if w.start <= made)
            if fresh:
                self.send(wire.Words(reply.number, shown, fresh))
                shown += len(fresh)
            ahead = min(reply.end, self.next)
            self.send(wire.CursorShown(self.epoch, max(made, ahead), ahead, self.playback, 72_000, False))
            if self.playback >= reply.end - 480:
                self.reply = None
                self.finish(reply, "completed")
                self.send(wire.State("listening"))
                return
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        if self.closed.is_set():
            return
        self.closed.set()
        for task in list(self.tasks):
            task.cancel()
        await self.pc.close()


class Mock:
    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        self.sessions: dict[int, Live] = {}

    async def config(self, _: web.Request) -> web.Response:
        wanted = bool(self.settings.token)
        return web.json_response({"ice_servers": [], "model": "mock", "version": "0", "token_required": wanted})

    async def offer(self, request: web.Request) -> web.Response:
        if self.settings.token and request.headers.get("authorization") != f"Bearer {self.settings.token}":
            return refusal(401, "unauthorized", "The token is missing or wrong.")
        if sum(not s.closed.is_set() for s in self.sessions.values()) >= self.settings.slots:
            busy = refusal(503, "sessions_full", "All 1 sessions are in use.")
            busy.headers["Retry-After"] = "5"
            return busy
        settings = self.settings
        live = Live(
            len(self.sessions) + 1,
            settings.decide,
            may_interrupt=not settings.no_barge_in,
            faceless=settings.faceless,
        )
        self.sessions[live.number] = live
        body = await request.json()
        live.pc.on("datachannel", live.opened)
        live.pc.on("track", lambda track: live.spawn(drain(track)))
        live.downlink.sender = live.pc.addTrack(live.downlink)
        live.pc.addTrack(Portrait())
        await live.pc.setRemoteDescription(RTCSessionDescription(body["sdp"], body["type"]))
        await live.pc.setLocalDescription(await live.pc.createAnswer())
        sdp = live.pc.localDescription.sdp
        if self.settings.no_udp:
            sdp = "".join(line for line in sdp.splitlines(True) if not line.startswith("a=candidate"))
            await live.pc.close()
        answer = {
            "sdp": sdp,
            "type": "answer",
            "session": live.number,
            "close_url": f"/api/session/{live.number}/close",
        }
        return web.json_response(answer)

    async def close(self, request: web.Request) -> web.Response:
        await self.sessions[int(request.match_info["number"])].close()
        return web.Response(status=204)

    async def log(self, request: web.Request) -> web.Response:
        live = self.sessions[int(request.match_info["number"])]
        return web.json_response({"log": live.log, "invalid": live.invalid, "closed": live.closed.is_set()})

    async def silence(self, request: web.Request) -> web.Response:
        """Answers once the page has said that its sound is blocked: a test that asked the page would unblock it."""
        for _ in range(200):
            live = self.sessions.get(int(request.match_info["number"]))
            if live is not None and live.silent:
                return web.json_response(live.log)
            await asyncio.sleep(0.1)
        return refusal(504, "not_silent", "No position with `silent` came within 20 s.")

    async def order(self, request: web.Request) -> web.Response:
        """Tests send raw messages to the page: {"label", "message"}."""
        live, body = self.sessions[int(request.match_info["number"])], await request.json()
        if body["message"].get("rtp") == "next":
            body["message"]["rtp"] = ((live.downlink.origin or 0) + live.downlink.pts) % 2**32
        live.channels[body["label"]].send(json.dumps(body["message"]))
        return web.json_response({"pts": live.downlink.pts, "origin": live.downlink.origin})

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/api/config", self.config)
        app.router.add_post("/api/session", self.offer)
        app.router.add_post("/api/session/{number}/close", self.close)
        app.router.add_get("/mock/{number}", self.log)
        app.router.add_get("/mock/{number}/silence", self.silence)
        app.router.add_post("/mock/{number}", self.order)
        app.router.add_get("/", lambda _: web.FileResponse(PAGE / "index.html"))  # type: ignore[arg-type,return-value]
        app.router.add_static("/", PAGE)
        app.on_shutdown.append(self.shutdown)
        return app

    async def shutdown(self, _: web.Application) -> None:
        for live in self.sessions.values():
            await live.close()


def refusal(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"code": code, "message": message}}, status=status)


async def drain(track: Any) -> None:
    while True:
        await track.recv()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--decide", choices=("flush", "resume", "never"), default="flush")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--token", default="")
    parser.add_argument("--no-udp", action="store_true")
    parser.add_argument("--no-barge-in", action="store_true")
    parser.add_argument("--faceless", default="")
    settings = parser.parse_args()
    # aioice leaves out loopback; the tests must run on a machine that has nothing else.
    aioice.ice.get_host_addresses = lambda use_ipv4, use_ipv6: ["127.0.0.1"]
    spoken(TEXT)
    web.run_app(Mock(settings).app(), host="127.0.0.1", port=settings.port, print=lambda *_: print("ready", flush=True))


if __name__ == "__main__":
    main()
