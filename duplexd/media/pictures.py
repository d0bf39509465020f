"""Pictures: which frame of the face stands at which pts of the transport, and what became of the others.

1. The transport asks at each tick of its clock, with a pts that never goes back, and gets the newest frame that is due
   and was not shown yet, or nothing: then the one shown last is held. No frame is ever shown before its pts.
2. A frame whose moment had been asked for before it came is late. It is dropped: whoever sees it would see the lips
   hurry after the voice.
3. `cut` ends older picture epochs at a pts: of those, nothing at or after it is shown, whether it waits or is still to
   come. What lies before stays, so that the face does not jump.
4. The queue has a bound; a frame beyond it is refused and counted. The voice never notices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from duplexd.units import TICKS_PER_SECOND, Nanos, Ticks, nanos_from_ticks

I420 = NDArray[np.uint8]
PICTURE_FRAME = Ticks(TICKS_PER_SECOND // 25)  #: the grid on which pictures stand
#: A picture leaves so much later than the voice of its moment. Whoever plays the voice holds it longer than that
#: (jitter buffer and device: 100 ms measured in Chromium on loopback), and a picture made in this time is not late.
PICTURES_BEHIND = Nanos(nanos_from_ticks(PICTURE_FRAME))
QUEUED_MAX = 75  #: three seconds; at 512 x 512 that is 30 MB


class Picture(msgspec.Struct, frozen=True):
    """One frame of the face."""

    epoch: int  #: of the picture, not of the voice
    start: Ticks
    end: Ticks
    planes: I420  #: (height * 3 // 2, width)


class PictureCounts(msgspec.Struct):
    """What became of the frames that were published; none of these ever falls."""

    published: int = 0
    shown: int = 0
    late: int = 0  #: came when their moment had been shown already
    skipped: int = 0  #: waited in time, and were not asked for in time: the transport is too slow
    cut: int = 0  #: of an epoch that ended before them
    refused: int = 0  #: beyond the bound, or over a frame that is there


class Pictures:
    """One session's frames on their way to the transport.

    Args:    queued_max: frames accepted and not yet shown; at the bound `publish` refuses.
    """

    def __init__(self, *, queued_max: int = QUEUED_MAX) -> None:
        self.counts = PictureCounts()
        self.last: Picture | None = None  #: shown last, and held
        self._queue: deque[Picture] = deque()
        self._queued_max = queued_max
        self._asked = Ticks(-1)  #: the pts asked for last
        self._cut: tuple[int, Ticks] = (0, Ticks(0))  #: epochs below the first one show nothing from the second on

    # The engine's side ----------------------------------------------------------------------------------------------

    def publish(self, *, epoch: int, start: Ticks, frame: Ticks, frames: Sequence[I420]) -> int:
        """Queue consecutive frames, each `frame` long; returns how many were accepted. Raises nothing."""
        accepted = 0
        for index, planes in enumerate(frames):
            at = Ticks(start + index * frame)
            accepted += self._take(Picture(epoch, at, Ticks(at + frame), planes))
        return accepted

    def _take(self, picture: Picture) -> bool:
        self.counts.published += 1
        if self._is_cut(picture):
            self.counts.cut += 1
        elif picture.start <= self._asked:
            self.counts.late += 1
        elif len(self._queue) >= self._queued_max or (self._queue and picture.start < self._queue[-1].end):
            self.counts.refused += 1
        else:
            self._queue.append(picture)
            return True
        return False

    def cut(self, *, epoch: int, at: Ticks) -> int:
        """Epochs before `epoch` show nothing at or after `at`; returns how many frames that dropped.

        An older cut that comes late changes nothing.
        """
        if epoch <= self._cut[0]:
            return 0
        self._cut = (epoch, at)
        kept = [picture for picture in self._queue if not self._is_cut(picture)]
        dropped = len(self._queue) - len(kept)
        self._queue = deque(kept)
        self.counts.cut += dropped
        return dropped

    def _is_cut(self, picture: Picture) -> bool:
        epoch, at = self._cut
        return picture.epoch < epoch and picture.start >= at

    def clear(self) -> int:
        """Nobody looks any more: everything that waits is dropped, and nothing is held."""
        dropped = len(self._queue)
        self._queue.clear()
        self.last = None
        return dropped

    # The transport's side -------------------------------------------------------------------------------------------

    def pull(self, pts: Ticks) -> Picture | None:
        """The frame to show at `pts`; None when there is nothing new. A pts that goes back gets nothing."""
        if pts <= self._asked:
            return None
        self._asked = pts
        found: Picture | None = None
        while self._queue and self._queue[0].start <= pts:
            self.counts.skipped += found is not None
            found = self._queue.popleft()
        if found is not None:
            self.counts.shown += 1
            self.last = found
        return found

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def until(self) -> Ticks:
        """Behind the newest frame that waits, or that was shown."""
        newest = self._queue[-1] if self._queue else self.last
        return newest.end if newest is not None else Ticks(0)
