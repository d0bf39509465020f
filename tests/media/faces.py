"""A picture of somebody: the portrait of the still face, on a plain wall."""

from __future__ import annotations

import functools

import av
import numpy as np
from numpy.typing import NDArray

from duplexd.webrtc.video import portrait

FACE_Y = 0.47  #: middle of the portrait's face, as a share of its height


@functools.cache
def _grey(side: int) -> NDArray[np.uint8]:
    frame = av.VideoFrame.from_ndarray(portrait(256), format="rgb24").reformat(side, side, "gray")
    return np.asarray(frame.to_ndarray(), np.uint8)


def with_a_face(width: int, height: int, *, x: float = 0.0, y: float = 0.0) -> NDArray[np.uint8]:
    """Grey, uint8 (height, width); the face's middle at x, y in -1..1, up and right positive."""
    side = round(height * 1.2)
    wall = np.full((height + 2 * side, width + 2 * side), 40, np.uint8)
    left = round((x + 1) / 2 * width - side / 2) + side
    top = round((1 - y) / 2 * height - FACE_Y * side) + side
    wall[top : top + side, left : left + side] = _grey(side)
    return np.ascontiguousarray(wall[side : side + height, side : side + width])
