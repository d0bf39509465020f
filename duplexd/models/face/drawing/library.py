"""skia and OpenCV, which draw the face, or a sentence that says what is missing. Whoever draws takes them from here."""

from __future__ import annotations

from typing import Any

from duplexd.errors import ModelError

try:
    import cv2 as _cv2
    import skia as _skia
except ImportError as error:
    raise ModelError(
        f"the face is drawn with skia-python and OpenCV, of which one cannot be loaded ({error}): install the "
        "requirements; on Debian and Ubuntu skia also needs: apt-get install libegl1 libgl1"
    ) from error

skia: Any = _skia
cv2: Any = _cv2
cv2.setNumThreads(1)  # A frame is too small to be shared out, and the other core is the conversation's.
