"""The character's face: a still portrait at a few frames a second, on the clock of the voice.

1. pts comes from the same `MediaClock` as the voice: the browser aligns both by their sender reports (RFC 3550 §6.4.1).
2. Video never catches up: what is late is skipped.
3. aiortc's VP8 starts at 500 kbit/s and never goes below 250: on a 400 kbit/s line it starves the voice. The bounds
   here are for 256 x 256 (measured: no audio lost at 400 kbit/s).
"""

from __future__ import annotations

import fractions
from collections.abc import Callable
from typing import Any, TypeAlias

import av
import numpy as np
from aiortc.codecs import vpx
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from numpy.typing import NDArray

from duplexd.errors import ConfigError
from duplexd.units import TICKS_PER_SECOND, Ticks, ticks_from_nanos
from duplexd.webrtc.tracks import MediaClock, next_pts

Frame: TypeAlias = Callable[[Ticks], Any]  #: pts -> av.VideoFrame, yuv420p, a new object each time

PORTRAIT_SIDE = 256
PORTRAIT_FPS = 5
VP8_BITRATE_MIN = 60_000
VP8_BITRATE_DEFAULT = 150_000
VP8_BITRATE_MAX = 350_000

_VIDEO_TIME_BASE = fractions.Fraction(1, 90_000)


class PortraitTrack(MediaStreamTrack):  # type: ignore[misc]
    """Frames of `frame(pts)` at `fps`, for one aiortc sender.

    `fps` must divide 6000, so that a period is whole at 48 kHz and at video's 90 kHz (else ConfigError).
    An exception of `frame` ends the track; the voice goes on.
    """

    kind = "video"

    def __init__(self, media_clock: MediaClock, frame: Frame, *, fps: int = PORTRAIT_FPS) -> None:
        super().__init__()
        if fps < 1 or 6000 % fps:
            raise ConfigError(f"A portrait's frame rate must divide 6000, {fps} does not.")
        self._clock = media_clock
        self._frame = frame
        self._period = Ticks(TICKS_PER_SECOND // fps)
        self._next = Ticks(0)
        self.frame_count = 0
        self.skipped_count = 0

    async def recv(self) -> av.VideoFrame:
        due = self._clock.due(self._next)
        now = await self._clock.wait_until(due)
        if self.readyState != "live":
            raise MediaStreamError
        late = ticks_from_nanos(now - due)
        pts = next_pts(self._next, late=late, frame=self._period, burst_max=self._period)
        self.skipped_count += (pts - self._next) // self._period
        self._next = Ticks(pts + self._period)
        self.frame_count += 1
        picture = self._frame(pts)
        # 90 kHz for 48 kHz: 15/8, whole because a period is a multiple of 8 ticks.
        picture.pts, picture.time_base = pts * 15 // 8, _VIDEO_TIME_BASE
        return picture


def bound_vp8_bitrate() -> None:
    """Give aiortc's VP8 encoder this module's bitrates. Raises ConfigError if this aiortc does not heed them."""
    vpx.MIN_BITRATE = VP8_BITRATE_MIN
    vpx.DEFAULT_BITRATE = VP8_BITRATE_DEFAULT
    vpx.MAX_BITRATE = VP8_BITRATE_MAX
    if _vp8_bounds() != (VP8_BITRATE_MIN, VP8_BITRATE_DEFAULT, VP8_BITRATE_MAX):
        raise ConfigError(f"This aiortc bounds VP8 by {_vp8_bounds()} bit/s whatever it is told; 1.16 is expected.")


def _vp8_bounds() -> tuple[int, int, int]:
    encoder = vpx.Vp8Encoder()
    default = encoder.target_bitrate
    encoder.target_bitrate = 1
    lowest = encoder.target_bitrate
    encoder.target_bitrate = 1 << 40
    return lowest, default, encoder.target_bitrate


# The portrait -------------------------------------------------------------------------------------------------------


def still(picture: NDArray[np.uint8]) -> Frame:
    """A `frame` callback that always shows one RGB picture, uint8 (height, width, 3); converted once."""
    planes = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuv420p").to_ndarray()

    def frame(pts: Ticks) -> Any:
        return av.VideoFrame.from_ndarray(planes, format="yuv420p")

    return frame


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
