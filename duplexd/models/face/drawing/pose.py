"""Head space -> picture. x right, y down, z towards the viewer; half a face's width is 1; the middle of the head is 0.

A point further in front moves further when the head turns, which is all the depth a portrait needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from duplexd.models.face.motion import Channel, Motion

Points = npt.NDArray[np.float64]  #: (n, 2) pixels

SIZE = 512  #: pixels of a side
SCALE = 111.0  #: pixels of 1 in head space
MIDDLE = (256.0, 244.0)  #: of the head, when nothing moves
_NECK = np.array([0.0, 1.05, -0.35])
_PERSPECTIVE = 0.13
_TURN_MAX = 0.32


class Pose:
    """Where the head is in one frame, and how its points are projected."""

    def __init__(self, motion: Motion, *, size: int = SIZE) -> None:
        m = motion
        self.zoom = size / SIZE
        yaw, pitch, roll = (float(m[channel]) for channel in (Channel.YAW, Channel.PITCH, Channel.ROLL))
        # A drawing without a back can be turned so far and no further.
        yaw, pitch = _TURN_MAX * np.tanh(0.85 * yaw / _TURN_MAX), _TURN_MAX * np.tanh(pitch / _TURN_MAX)
        cos, sin = np.cos, np.sin
        turn = np.array([[cos(yaw), 0, sin(yaw)], [0, 1, 0], [-sin(yaw), 0, cos(yaw)]])
        nod = np.array([[1, 0, 0], [0, cos(pitch), -sin(pitch)], [0, sin(pitch), cos(pitch)]])
        tilt = np.array([[cos(roll), -sin(roll), 0], [sin(roll), cos(roll), 0], [0, 0, 1]])
        self._matrix = tilt @ nod @ turn
        breath = -2.6 * float(m[Channel.BREATH])
        self.shift = np.array([float(m[Channel.SWAY]) * 2 * SCALE * 0.5, breath])
        self.scale = SCALE * (1 + 0.10 * float(m[Channel.LEAN]))
        self.body = np.array([0.35 * self.shift[0], breath])  #: the trunk follows a little
        self.body_scale = 1 + 0.05 * float(m[Channel.LEAN])

    def __call__(self, points: Sequence[Sequence[float]] | npt.NDArray[np.float64]) -> Points:
        """(n, 3) of head space -> (n, 2) pixels."""
        turned = (np.asarray(points, np.float64) - _NECK) @ self._matrix.T + _NECK
        near = self.scale * (1 + _PERSPECTIVE * turned[:, 2:])
        flat: Points = (turned[:, :2] * near + MIDDLE + self.shift) * self.zoom
        return flat

    def trunk(self, points: Sequence[Sequence[float]] | npt.NDArray[np.float64]) -> Points:
        """(n, 2) pixels of the resting picture -> where they are now."""
        base = np.array([256.0, 512.0])
        flat: Points = ((np.asarray(points, np.float64) - base) * self.body_scale + base + self.body) * self.zoom
        return flat

    def length(self, units: float) -> float:
        """Pixels of a length in head space near the front of the face."""
        return units * self.scale * self.zoom * 1.1
