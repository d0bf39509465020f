"""Whether somebody sits in front of the camera, and where: small grey pictures in, facts out. Nothing is kept.

1. A finder looks at one picture; a rule makes facts of what it finds. A face counts once it was found twice in a row:
   the detector sees one now and then in a curtain. It is gone after `GONE_AFTER` without: people turn aside.
2. A fact is told when somebody comes or goes, or has moved by more than `MOVED`; never more than five a second.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd.errors import ConfigError
from duplexd.units import NANOS_PER_MS, NANOS_PER_SECOND, Nanos

FIND_WIDTH, FIND_HEIGHT = 240, 180  #: pictures are looked at within this size, in their own shape
GONE_AFTER = Nanos(1500 * NANOS_PER_MS)
TOLD_EVERY = Nanos(NANOS_PER_SECOND // 5)
MOVED = 0.05
FOUND_TWICE = 2
_SMALLEST = FIND_HEIGHT // 5  # a face half an arm's length behind the desk; smaller ones cost twice the time


class Place(msgspec.Struct, frozen=True):
    """The middle of a face, -1..1 from the middle of the picture, as whoever looks out of the screen sees it."""

    x: float  #: to the right of whoever looks is positive
    y: float  #: up is positive


class Sighting(msgspec.Struct, frozen=True):
    present: bool
    place: Place


class PersonFinder:
    """The largest frontal face of a picture, by OpenCV's cascade; belongs to one thread.

    Raises:  ConfigError when OpenCV or its cascade cannot be loaded.
    """

    def __init__(self) -> None:
        try:
            import cv2
        except ImportError as error:
            raise ConfigError(f"the camera needs the package opencv-python-headless: {error}") from error
        self._cv2: Any = cv2
        cv2.setNumThreads(1)  # Threads of its own take both cores, for a fifth more work (measured).
        path = self._cv2.data.haarcascades + "haarcascade_frontalface_default.xml"
        self._cascade: Any = self._cv2.CascadeClassifier(path)
        if self._cascade.empty():
            raise ConfigError(f"the camera needs {path} of opencv-python-headless, which cannot be read")

    def find(self, grey: NDArray[np.uint8]) -> Place | None:
        """Args:    grey: uint8 (height, width), any size."""
        height, width = grey.shape
        scale = min(FIND_WIDTH / width, FIND_HEIGHT / height)
        across, down = max(1, round(width * scale)), max(1, round(height * scale))
        small = self._cv2.resize(grey, (across, down), interpolation=self._cv2.INTER_AREA)
        found = self._cascade.detectMultiScale(small, scaleFactor=1.2, minNeighbors=4, minSize=(_SMALLEST, _SMALLEST))
        if not len(found):
            return None
        left, top, wide, high = (float(value) for value in max(found, key=lambda face: face[2]))
        return Place(2 * (left + wide / 2) / across - 1, 1 - 2 * (top + high / 2) / down)


class PersonRule:
    """What the character is told of what is found."""

    def __init__(self) -> None:
        self._told = Sighting(False, Place(0.0, 0.0))
        self._told_at: Nanos | None = None
        self._found_at: Nanos | None = None
        self._in_a_row = 0

    @property
    def present(self) -> bool:
        """What was told last."""
        return self._told.present

    def look(self, found: Place | None, now: Nanos) -> Sighting | None:
        """One picture's finding; the fact it makes, if any."""
        if found is None:
            self._in_a_row = 0
            return self.wait(now)
        self._in_a_row += 1
        if self._told.present or self._in_a_row >= FOUND_TWICE:
            self._found_at = now
            return self._tell(Sighting(True, found), now)
        return None

    def wait(self, now: Nanos) -> Sighting | None:
        """No picture, or nobody in it: the fact that the person has gone, when it is time."""
        if self._found_at is None or now - self._found_at < GONE_AFTER:
            return None
        return self.leave(now)

    def leave(self, now: Nanos) -> Sighting | None:
        """The camera is off: whoever was there cannot be seen any more."""
        self._in_a_row, self._found_at = 0, None
        return self._tell(Sighting(False, self._told.place), now) if self._told.present else None

    def _tell(self, sighting: Sighting, now: Nanos) -> Sighting | None:
        if sighting.present == self._told.present:
            before, after = self._told.place, sighting.place
            still = max(abs(after.x - before.x), abs(after.y - before.y)) <= MOVED
            if still or (self._told_at is not None and now - self._told_at < TOLD_EVERY):
                return None
        self._told, self._told_at = sighting, now
        return sighting
