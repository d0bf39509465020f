"""skia, which draws the face, or a sentence that says what is missing. Whoever draws takes it from here."""

from __future__ import annotations

from typing import Any

from duplexd.errors import ModelError

try:
    import skia as _skia
except ImportError as error:
    raise ModelError(
        f"the face is drawn with skia-python, which cannot be loaded ({error}): install the requirements; on Debian "
        "and Ubuntu it also needs: apt-get install libegl1 libgl1. Without a face: --face none"
    ) from error

skia: Any = _skia
