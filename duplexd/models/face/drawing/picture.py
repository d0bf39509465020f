"""Pictures as video wants them: I420, three planes in one array of height * 3 / 2 rows."""

from __future__ import annotations

from collections import OrderedDict

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import Colorspace, VideoReformatter

from duplexd.models.face.drawing.character import load_character
from duplexd.models.face.drawing.portrait import Picture, Portrait
from duplexd.models.face.motion import Motion

I420 = npt.NDArray[np.uint8]  #: (height * 3 // 2, width)


class Studio:
    """Portraits ready to be drawn.

    Args:    portraits_max: beyond it the least lately drawn one is let go of.
    """

    def __init__(self, *, size: int, portraits_max: int) -> None:
        self._size, self._most = size, portraits_max
        self._portraits: OrderedDict[str, Portrait] = OrderedDict()
        self._reformatter = VideoReformatter()

    def portrait(self, name: str) -> Portrait:
        """Raises ConfigError for a character that does not exist."""
        if name not in self._portraits:
            self._portraits[name] = Portrait(load_character(name), size=self._size)
            if len(self._portraits) > self._most:
                self._portraits.popitem(last=False)
        self._portraits.move_to_end(name)
        return self._portraits[name]

    def picture(self, name: str, motion: Motion) -> I420:
        return self.i420(self.portrait(name).draw(motion))

    def i420(self, picture: Picture) -> I420:
        """BGRA to limited-range BT.601, what browsers expect of small video."""
        frame = av.VideoFrame.from_numpy_buffer(picture, format="bgra")
        planes = self._reformatter.reformat(frame, format="yuv420p", dst_colorspace=Colorspace.ITU601).to_ndarray()
        return np.asarray(planes, np.uint8)
