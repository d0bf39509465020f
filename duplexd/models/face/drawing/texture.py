"""Textures: paint laid on a part once, at rest, and carried along as the part moves.

1. The outline of a part is exact in every frame; only the paint within it is moved, as a flat picture.
2. Skia shades a pixel for 12 ns and fills one for 0.5 (its wheel has no vector code for shaders); OpenCV moves one for
   2 ns and blends it for 1. So whatever is large and shaded is a texture. Small parts are not worth it.
3. A texture reaches beyond its part at rest: an outline that moves another way must find paint under it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from duplexd.models.face.drawing.library import cv2, skia
from duplexd.models.face.drawing.pen import Path, Points, argb

Pixels = npt.NDArray[np.uint8]  #: (height, width, 4), BGRA, premultiplied
Cover = npt.NDArray[np.uint8]  #: (height, width): how much of each pixel a shape covers, 0..255
Box = tuple[slice, slice]  #: rows and columns of a picture

#: Around the picture, as a share of its side: what may come into it when a part moves.
MARGIN = 0.2


class Texture:
    """Paint of one part at rest.

    Args:    size: pixels of the picture's side; pins: (n, 2) points of the part at rest, three at least.
             paint: draws on a canvas in the picture's coordinates, beyond its sides too.
    """

    def __init__(self, size: int, pins: Points, paint: Callable[[Any], None]) -> None:
        margin = round(MARGIN * size)
        pixels: Pixels = np.zeros((size + 2 * margin, size + 2 * margin, 4), np.uint8)
        canvas = surface_on(pixels).getCanvas()
        canvas.translate(margin, margin)
        paint(canvas)
        alpha = cv2.extractChannel(pixels, 3)
        left, top, width, height = cv2.boundingRect(alpha)
        self._pixels = pixels[top : top + height, left : left + width].copy()
        corner = np.array([left - margin, top - margin], np.float64)
        self._fit = np.linalg.pinv(np.column_stack([pins - corner, np.ones(len(pins))]))
        # What covers everything goes on for ever: no outline of it, however it moves, finds nothing under it.
        self._beyond = cv2.BORDER_REPLICATE if alpha.min() == 255 else cv2.BORDER_CONSTANT

    def move(self, pins: Points, box: Box, into: Pixels) -> None:
        """What lies in a box of the picture when the pins are there: the best flat movement for all of them."""
        rows, columns = box
        matrix = (self._fit @ pins).T  # (2, 3): rest -> now
        matrix[:, 2] -= (columns.start, rows.start)
        cv2.warpAffine(
            self._pixels, matrix, into.shape[1::-1], dst=into, flags=cv2.INTER_LINEAR, borderMode=self._beyond
        )


class Collage:
    """Lays paint on one picture, within shapes.

    It keeps the memory it works in: touching fresh memory took twice as long as the work itself.

    Args:    pixels: (size, size, 4), opaque; what is laid stays opaque.
    """

    def __init__(self, pixels: Pixels) -> None:
        self._pixels = pixels
        self._cover: Cover = np.zeros(pixels.shape[:2], np.uint8)
        info = skia.ImageInfo.MakeA8(*self._cover.shape)
        self._surface = skia.Surface.MakeRasterDirect(info, self._cover, self._cover.strides[0])
        self._stencil = self._surface.getCanvas()
        self._inside = skia.Paint(AntiAlias=True)
        self._paint, self._share, self._rest = (np.zeros(pixels.size, np.uint8) for _ in range(3))

    def lay(self, texture: Texture, pins: Points, *shapes: Path, within: Path | None = None) -> None:
        """A texture where its pins are now, inside of any of the shapes, and there only `within`."""
        box = self._around(shapes)
        if box is None:
            return
        paint = self._cut(self._paint, box)
        texture.move(pins, box, paint)
        self._stencil.save()
        if within is not None:
            self._stencil.clipPath(within, skia.ClipOp.kIntersect, True)
        self._within(box, shapes, paint)
        self._stencil.restore()

    def lay_gradient(self, colours: Sequence[str], rows: Sequence[float], shape: Path) -> None:
        """From "#rrggbb" to "#rrggbb" downwards, each at its row of the picture, within a shape."""
        box = self._around((shape,))
        if box is not None:
            paint = self._cut(self._paint, box)
            at = np.arange(box[0].start, box[0].stop) + 0.5
            table = np.array([[argb(colour) >> shift & 255 for shift in (0, 8, 16, 24)] for colour in colours])
            line = np.stack([np.interp(at, rows, table[:, channel]) for channel in range(4)], 1)
            paint[:] = np.rint(line)[:, None]
            self._within(box, (shape,), paint)

    def lay_whole(self, texture: Texture, pins: Points, top: float) -> None:
        """A texture that says itself how much it covers, from a row of the picture down."""
        size = len(self._pixels)
        box = (slice(min(max(0, int(top)), size - 1), size), slice(0, size))
        paint, share = self._cut(self._paint, box), self._cut(self._share, box)
        texture.move(pins, box, paint)
        cv2.cvtColor(cv2.extractChannel(paint, 3), cv2.COLOR_GRAY2BGRA, dst=share)
        paint[:, :, 3] = 255
        self._blend(box, paint, share)

    def _within(self, box: Box, shapes: Sequence[Path], paint: Pixels) -> None:
        cover, share = self._cover[box], self._cut(self._share, box)
        cover[:] = 0
        for shape in shapes:
            self._stencil.drawPath(shape, self._inside)
        # Alpha 255: there the paint's comes. A texture that ends inside of the box (an iris) would leave a hole there.
        cv2.cvtColor(cover, cv2.COLOR_GRAY2BGRA, dst=share)
        paint[:, :, 3] = 255
        cv2.multiply(paint, share, dst=paint, scale=1 / 255)
        self._blend(box, paint, share)

    def _blend(self, box: Box, paint: Pixels, share: Pixels) -> None:
        ground, rest = self._pixels[box], self._cut(self._rest, box)
        cv2.multiply(ground, cv2.bitwise_not(share, dst=share), dst=rest, scale=1 / 255)
        cv2.add(rest, paint, dst=ground)  # Both are rounded: the sum may be one too many, and `add` saturates.

    def _around(self, shapes: Sequence[Path]) -> Box | None:
        """The box round shapes; None outside of the picture."""
        sides = [shape.getBounds() for shape in shapes]
        left, top = min(s.left() for s in sides), min(s.top() for s in sides)
        right, bottom = max(s.right() for s in sides), max(s.bottom() for s in sides)
        size = len(self._pixels)
        rows = slice(max(0, int(top) - 1), min(size, int(bottom) + 2))
        columns = slice(max(0, int(left) - 1), min(size, int(right) + 2))
        return (rows, columns) if rows.start < rows.stop and columns.start < columns.stop else None

    @staticmethod
    def _cut(memory: Pixels, box: Box) -> Pixels:
        """A piece of memory in the shape of a box."""
        height, width = (side.stop - side.start for side in box)
        return memory[: 4 * height * width].reshape(height, width, 4)


def surface_on(pixels: Pixels) -> Any:
    """A surface that draws into an array."""
    return skia.Surface(pixels, skia.kBGRA_8888_ColorType, skia.kPremul_AlphaType)
