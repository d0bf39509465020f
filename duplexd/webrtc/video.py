"""The character's face as a video track: on the clock of the voice, encoded here, and never in its way.

1. pts comes from the same `MediaClock` as the voice; RTP timestamps are pts in 90 kHz, so that the browser can align
   both by their sender reports (tracks.py rule 5).
2. The track asks for a picture at each tick of 40 ms, `PICTURES_BEHIND` after the voice of that tick. Nothing new:
   nothing is sent, but for one repeat a second and one for whoever asks for a key frame. Video never catches up: what
   is late is skipped.
3. Encoding takes 2 ms a frame at 512 x 512 and 7 to 11 ms for a key frame, so it runs beside the loop, on one thread
   for all sessions and at most one frame a session: a thread that cannot keep up makes tracks ask less often.
4. aiortc's own VP8 starts anew, with a key frame, at each estimate of the line that differs by a tenth. Here the
   encoder follows a falling estimate at once and a rising one late, and the voice's share is taken off first.
"""

from __future__ import annotations

import asyncio
import fractions
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeAlias

import av
import msgspec
import numpy as np
from aiortc.codecs import vpx
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from av.video.frame import PictureType
from numpy.typing import NDArray

from duplexd.errors import ConfigError
from duplexd.media.pictures import I420, PICTURE_FRAME, PICTURES_BEHIND, Picture
from duplexd.units import TICKS_PER_MS, TICKS_PER_SECOND, Nanos, Ticks, ticks_from_nanos
from duplexd.webrtc.tracks import MediaClock, next_pts, rtp_origin

logger = logging.getLogger(__name__)

Look: TypeAlias = Callable[[Ticks], Picture | None]  #: pts of a tick -> what is new at it, asked in order, on the loop

VIDEO_RATE = 90_000
PORTRAIT_SIDE = 256
REPEAT_AFTER = Ticks(TICKS_PER_SECOND)  #: a decoder that begins now waits no longer than this for its first picture
KEY_EVERY = Ticks(300 * TICKS_PER_MS)  #: key frames on request come no faster
VOICE_SHARE = 60_000  #: bit/s of a line that belong to the voice and to what steers it
FAULTS_MAX = 10  #: failed frames in a row that end the track

_TIME_BASE = fractions.Fraction(1, VIDEO_RATE)
#: Measured on a talking face, 512 x 512 at 600 kbit/s: 1.7 ms a frame and 45.8 dB; -6 costs 1.8 and gives 46.0, with
#: noise filtering 3.2; a second thread makes it slower.
_REALTIME = {
    "deadline": "realtime",
    "cpu-used": "-8",
    "lag-in-frames": "0",
    "static-thresh": "1",
    "partitions": "0",
    "undershoot-pct": "100",
    "overshoot-pct": "15",
}


# Bits ---------------------------------------------------------------------------------------------------------------


class Bitrates(msgspec.Struct, frozen=True):
    """bit/s of one size of picture."""

    lowest: int
    first: int  #: until the line has been estimated
    highest: int


def bitrates(width: int, height: int) -> Bitrates:
    """By area: 512 x 512 begins at 300 kbit/s (42 dB) and ends at 600 (46 dB); half of that is the least for a face."""
    area = width * height / (512 * 512)
    first = round(300_000 * max(0.25, min(area, 4.0)))
    return Bitrates(lowest=60_000, first=first, highest=2 * first)


class RateRule:
    """Which bitrate an encoder is given while the estimate of the line moves.

    A new bitrate costs a key frame, so a rise is followed when it is worth it, and a fall as soon as it hurts.
    """

    def __init__(self, bounds: Bitrates) -> None:
        self.bounds = bounds
        self.current = bounds.first

    def estimate(self, line: int) -> int:
        """The line carries so much, says the receiver (REMB): returns what to encode with from now on."""
        wanted = max(self.bounds.lowest, min(line - VOICE_SHARE, self.bounds.highest))
        if wanted < 0.85 * self.current or wanted >= 1.3 * self.current:
            self.current = wanted
        return self.current


class Vp8Encoder:
    """I420 in, VP8 out; belongs to one thread at a time. A new size or bitrate begins with a key frame."""

    def __init__(self) -> None:
        self._codec: Any = None

    def encode(self, planes: I420, *, bitrate: int, keyframe: bool, at: int) -> bytes:
        """One frame, uint8 (height * 3 / 2, width), with its time in 1/90000 s, rising. Raises av.FFmpegError."""
        height, width = planes.shape[0] * 2 // 3, planes.shape[1]
        codec = self._codec
        if codec is None or (codec.width, codec.height, codec.bit_rate) != (width, height, bitrate):
            codec = self._codec = _codec(width, height, bitrate)
        frame = av.VideoFrame.from_ndarray(planes, format="yuv420p")
        frame.pts, frame.time_base = at, _TIME_BASE
        if keyframe:
            frame.pict_type = PictureType.I
        return b"".join(bytes(packet) for packet in codec.encode(frame))

    def restart(self) -> None:
        self._codec = None


def _codec(width: int, height: int, bitrate: int) -> Any:
    codec: Any = av.CodecContext.create("libvpx", "w")
    codec.width, codec.height, codec.pix_fmt = width, height, "yuv420p"
    codec.time_base, codec.framerate = _TIME_BASE, fractions.Fraction(TICKS_PER_SECOND, PICTURE_FRAME)
    codec.bit_rate, codec.qmin, codec.qmax, codec.gop_size, codec.thread_count = bitrate, 4, 56, 3000, 1
    # minrate = maxrate makes the rate constant; the buffer of a second bounds a key frame's burst.
    rate = {name: str(bitrate) for name in ("minrate", "maxrate", "bufsize")}
    codec.options = _REALTIME | rate
    return codec


# The track ----------------------------------------------------------------------------------------------------------


class VideoCounts(msgspec.Struct):
    sent: int = 0  #: frames given to the transport, repeats included
    repeated: int = 0
    keyframes: int = 0
    skipped: int = 0  #: ticks that passed while the frame before was being encoded, or the loop stalled
    faults: int = 0


class VideoTrack(MediaStreamTrack):  # type: ignore[misc]
    """Pictures of `look(pts)` for one aiortc sender, as VP8.

    Args:    look: called once a tick while the track is shown; if it raises, the tick brings nothing new.
             pool: where frames are encoded; one thread is enough for six sessions of 512 x 512 on one core.
    A track begins hidden: `show` starts it.
    """

    kind = "video"

    def __init__(self, media_clock: MediaClock, look: Look, *, pool: Executor) -> None:
        super().__init__()
        self.counts = VideoCounts()
        self.rtp_origin: int | None = None  #: RTP timestamp of pts 0, known once the first packet has left
        self.on_packet: Callable[[av.Packet, bool], None] | None = None  #: sees every frame, and whether it is a key
        self._clock = media_clock
        self._look = look
        self._pool = pool
        self._encoder = Vp8Encoder()
        self._packer: Packer | None = None
        self._sender: Any = None
        self._shown = asyncio.Event()
        self._next = Ticks(0)
        self._last: Picture | None = None
        self._stamp = Ticks(-1)  #: pts of the newest frame given away
        self._key_at: Ticks | None = None  #: of the newest key frame
        self._key_wanted = False
        self._returned: Ticks | None = None
        self._faults = 0

    def attach(self, sender: Any) -> None:
        """Take the encoder's place in an aiortc sender, before it starts. Raises ConfigError for an unknown aiortc."""
        check_encoder(sender)
        self._packer = Packer()
        self._sender = sender
        sender._RTCRtpSender__encoder = self._packer
        sender._send_keyframe = self.want_keyframe

    def want_keyframe(self) -> None:
        """Somebody cannot decode (PLI, FIR): the next tick brings a key frame, new picture or not."""
        self._key_wanted = True

    def show(self) -> None:
        """Somebody looks: from the next tick on pictures are asked for. Begins with a key frame."""
        if self._shown.is_set():
            return
        if self._clock.origin is not None:  # Before the first track asks there is no time that could have passed.
            position = self._clock.position(Nanos(self._clock.now() - PICTURES_BEHIND))
            self._next = Ticks(max(self._next, -(-position // PICTURE_FRAME) * PICTURE_FRAME))
        self._key_wanted = True
        self._shown.set()

    def hide(self) -> None:
        """Nobody looks: nothing is asked for, encoded or sent. The last picture is what `show` begins with."""
        self._shown.clear()

    @property
    def next_pts(self) -> Ticks:
        """Pictures before this one have been asked for, or never will be."""
        return self._next

    async def recv(self) -> av.Packet:
        self._learn_origin()
        while True:
            picture, pts = await self._next_picture()
            payload = await self._encode(picture, pts)
            if payload:
                break
        self.counts.sent += 1
        packet = av.Packet(payload)
        packet.pts, packet.time_base = _video_time(pts), _TIME_BASE
        self._returned = pts
        if self.on_packet is not None:
            self.on_packet(packet, _is_keyframe(payload))
        return packet

    async def _next_picture(self) -> tuple[Picture, Ticks]:
        """The next one to send and its pts, when it is due."""
        while True:
            await self._shown.wait()
            due = Nanos(self._clock.due(self._next) + PICTURES_BEHIND)
            now = await self._clock.wait_until(due)
            if self.readyState != "live":
                raise MediaStreamError
            if not self._shown.is_set():
                continue
            late = ticks_from_nanos(now - due)
            tick = next_pts(self._next, late=late, frame=PICTURE_FRAME, burst_max=Ticks(PICTURE_FRAME - 1))
            self.counts.skipped += (tick - self._next) // PICTURE_FRAME
            self._next = Ticks(tick + PICTURE_FRAME)
            found = self._choose(tick)
            if found is not None:
                return found

    def _choose(self, tick: Ticks) -> tuple[Picture, Ticks] | None:
        picture = self._new(tick)
        if picture is not None:
            self._last = picture
            # A frame that had to wait keeps its own moment, unless one that came before it stands there.
            return picture, picture.start if picture.start > self._stamp else tick
        if self._last is not None and (tick - self._stamp >= REPEAT_AFTER or self._owes_keyframe(tick)):
            self.counts.repeated += 1
            return self._last, tick
        return None

    def _new(self, tick: Ticks) -> Picture | None:
        try:
            return self._look(tick)
        except Exception as error:
            self._note_fault(error)
            return None

    def _owes_keyframe(self, pts: Ticks) -> bool:
        return self._key_wanted and (self._key_at is None or pts - self._key_at >= KEY_EVERY)

    async def _encode(self, picture: Picture, pts: Ticks) -> bytes:
        self._stamp = pts
        keyframe = self._owes_keyframe(pts)
        if keyframe:
            self._key_wanted, self._key_at = False, pts
        job = self._job(picture, pts, keyframe=keyframe)
        try:
            payload = await asyncio.get_running_loop().run_in_executor(self._pool, job)
        except (av.FFmpegError, ValueError) as error:
            self._encoder.restart()
            self._key_wanted = True
            self._note_fault(error)
            self._faults += 1
            if self._faults >= FAULTS_MAX:
                raise MediaStreamError from error
            return b""
        self._faults = 0
        self.counts.keyframes += _is_keyframe(payload)
        return payload

    def _job(self, picture: Picture, pts: Ticks, *, keyframe: bool) -> Callable[[], bytes]:
        height, width = picture.planes.shape[0] * 2 // 3, picture.planes.shape[1]
        bitrate = self._packer.bitrate_of(width, height) if self._packer else bitrates(width, height).first
        at = _video_time(pts)
        return lambda: self._encoder.encode(picture.planes, bitrate=bitrate, keyframe=keyframe, at=at)

    def _note_fault(self, error: Exception) -> None:
        self.counts.faults += 1
        if self.counts.faults == 1:
            logger.error("a picture could not be made; the one before it is held", exc_info=error)

    def _learn_origin(self) -> None:
        # As the voice does: aiortc asks for the next packet when this one is on the wire.
        if self.rtp_origin is None and self._returned is not None and self._sender is not None:
            self.rtp_origin = rtp_origin(self._sender, _video_time(self._returned))


def check_encoder(sender: Any) -> None:
    """Raises ConfigError if this aiortc keeps its sender's encoder elsewhere."""
    missing = [name for name in ("_RTCRtpSender__encoder", "_send_keyframe") if not hasattr(sender, name)]
    if missing:
        raise ConfigError(f"This aiortc has no {', '.join(missing)}; duplexd's send path knows aiortc 1.16.")


def _video_time(pts: Ticks) -> int:
    """90 kHz for 48 kHz: 15/8, whole on the grid of pictures."""
    return pts * 15 // 8


def _is_keyframe(payload: bytes) -> bool:
    return bool(payload) and not payload[0] & 1  # RFC 6386 §9.1


class Packer(vpx.Vp8Encoder):  # type: ignore[misc]
    """What aiortc takes for its encoder: it cuts our frames into packets and hands on what the line carries."""

    def __init__(self) -> None:
        self._line = 0
        self._rules: dict[tuple[int, int], RateRule] = {}
        super().__init__()

    def bitrate_of(self, width: int, height: int) -> int:
        if (width, height) not in self._rules:
            self._rules = {(width, height): RateRule(bitrates(width, height))}
        rule = self._rules[width, height]
        return rule.estimate(self._line) if self._line else rule.current

    @property
    def target_bitrate(self) -> int:
        return self._line

    @target_bitrate.setter
    def target_bitrate(self, line: int) -> None:
        self._line = line


# The portrait -------------------------------------------------------------------------------------------------------


class Still:
    """A `look` that has one picture, for models without a face: sent once, then repeated each second."""

    def __init__(self, planes: I420) -> None:
        self._planes: I420 | None = planes

    def __call__(self, pts: Ticks) -> Picture | None:
        if self._planes is None:
            return None
        planes, self._planes = self._planes, None
        return Picture(0, pts, Ticks(pts + PICTURE_FRAME), planes)


def i420(picture: NDArray[np.uint8]) -> I420:
    """RGB, uint8 (height, width, 3), as planes."""
    frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuv420p")
    return np.asarray(frame.to_ndarray(), np.uint8)


def portrait(side: int = PORTRAIT_SIDE) -> NDArray[np.uint8]:
    """Head and shoulders in soft light, uint8 (side, side, 3), drawn from shapes; the same on every machine."""
    y, x = np.mgrid[0:side, 0:side].astype(np.float64) / side
    canvas = _blend(_rgb(38, 50, 66), _rgb(18, 24, 36), y)
    canvas = _paint(canvas, _rgb(84, 106, 128), 0.55 * np.exp(-(((x - 0.36) / 0.34) ** 2 + ((y - 0.32) / 0.36) ** 2)))
    canvas = _paint(canvas, _rgb(46, 34, 32), _ellipse(x, y, 0.5, 0.43, 0.205, 0.245))  # hair, behind
    canvas = _paint(canvas, _rgb(46, 34, 32), _ellipse(x, y, 0.5, 0.60, 0.175, 0.16))
    canvas = _paint(canvas, _rgb(52, 92, 104), _ellipse(x, y, 0.5, 1.06, 0.40, 0.315))  # shoulders
    canvas = _paint(canvas, _skin(x, 0.80), _ellipse(x, y, 0.5, 0.69, 0.075, 0.115))  # neck
    canvas = _paint(canvas, _skin(x, 1.0), _ellipse(x, y, 0.5, 0.475, 0.148, 0.19))  # face
    canvas = _paint(canvas, _rgb(46, 34, 32), _ellipse(x, y, 0.475, 0.318, 0.152, 0.08))  # fringe
    for centre in (0.437, 0.563):
        canvas = _paint(canvas, _rgb(58, 42, 38), 0.8 * _ellipse(x, y, centre, 0.437, 0.032, 0.006, soft=0.25))
        canvas = _paint(canvas, _rgb(242, 238, 232), _ellipse(x, y, centre, 0.474, 0.026, 0.0125, soft=0.15))
        canvas = _paint(canvas, _rgb(52, 38, 32), _ellipse(x, y, centre, 0.474, 0.0125, 0.0125, soft=0.15))
        canvas = _paint(canvas, _rgb(255, 255, 255), _ellipse(x, y, centre - 0.005, 0.469, 0.004, 0.004, soft=0.3))
        canvas = _paint(canvas, _rgb(216, 122, 104), 0.28 * np.exp(-_distance(x, y, centre, 0.545, 0.05, 0.035)))
    canvas = _paint(canvas, _rgb(176, 118, 92), 0.5 * _ellipse(x, y, 0.5, 0.535, 0.016, 0.007, soft=0.6))  # nose
    smile = _ellipse(x, y, 0.5, 0.583, 0.05, 0.022, soft=0.2) * (1 - _ellipse(x, y, 0.5, 0.572, 0.06, 0.02, soft=0.2))
    canvas = _paint(canvas, _rgb(160, 76, 72), smile)
    vignette = 1 - 0.35 * np.clip(np.hypot(x - 0.5, y - 0.5) - 0.35, 0, 1)[..., None]
    return np.asarray((canvas * vignette).clip(0, 255), dtype=np.uint8)


Field: TypeAlias = NDArray[np.float64]


def _rgb(red: int, green: int, blue: int) -> Field:
    return np.array([red, green, blue], np.float64)


def _blend(first: Field, second: Field, weight: Field) -> Field:
    return np.asarray(first * (1 - weight[..., None]) + second * weight[..., None])


def _paint(canvas: Field, colour: Field, alpha: Field) -> Field:
    return canvas + (colour - canvas) * alpha[..., None]


def _distance(x: Field, y: Field, cx: float, cy: float, rx: float, ry: float) -> Field:
    return np.asarray(((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2)


def _ellipse(x: Field, y: Field, cx: float, cy: float, rx: float, ry: float, *, soft: float = 0.06) -> Field:
    """1 inside, 0 outside, an edge of relative width `soft` between."""
    radius = np.sqrt(_distance(x, y, cx, cy, rx, ry))
    return np.asarray(np.clip((1 + soft / 2 - radius) / soft, 0, 1))


def _skin(x: Field, light: float) -> Field:
    """Lit from the left."""
    return np.asarray(_blend(_rgb(236, 190, 160), _rgb(196, 142, 112), np.clip((x - 0.38) / 0.26, 0, 1)) * light)
