"""The pen: smooth paths through points, fills, soft shadows. A thin layer over Skia."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from duplexd.models.face.drawing.library import skia

Points = npt.NDArray[np.float64]
Path = Any  #: skia.Path
Canvas = Any  #: skia.Canvas

BLUR_MIN = 1.0  #: pixels; a line blurred by less looks the same and costs ten times as much


@functools.lru_cache(4096)
def argb(colour: str, alpha: float = 1.0) -> int:
    """ "#rrggbb" -> 0xAARRGGBB."""
    return (round(max(0.0, min(1.0, alpha)) * 255) << 24) | int(colour[1:], 16)


@functools.lru_cache(4096)
def mix(a: str, b: str, share: float) -> str:
    """`share` of b in a."""
    left, right = ([int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in (a, b))
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in zip(left, right, strict=True))


def smooth(points: Points, *, closed: bool = True, tension: float = 1.0) -> Path:
    """A path through all points without corners (Catmull-Rom)."""
    path = skia.Path()
    extend(path, points, closed=closed, tension=tension, move=True)
    if closed:
        path.close()
    return path


def extend(path: Path, points: Points, *, closed: bool = False, tension: float = 1.0, move: bool = False) -> None:
    """Go on through points; `move`: begin at the first of them, else draw a line to it."""
    x, y = points[0].tolist()
    path.moveTo(x, y) if move else path.lineTo(x, y)
    for knot in (_spline(len(points), closed, tension) @ points).reshape(-1, 6).tolist():
        path.cubicTo(*knot)


@functools.lru_cache(256)
def _spline(count: int, closed: bool, tension: float) -> Points:
    """(3 segments, count): what turns points into two handles and an end for each stretch between them."""
    here = np.eye(count)
    if closed:
        around = np.concatenate([here[-1:], here, here[:2]])
    else:
        around = np.concatenate([2 * here[:1] - here[1:2], here, 2 * here[-1:] - here[-2:-1]])
    slope = (around[2:] - around[:-2]) * (tension / 6.0)
    at = around[1:-1]
    stretches: Points = np.stack([at[:-1] + slope[:-1], at[1:] - slope[1:], at[1:]], 1).reshape(-1, count)
    return stretches


def ring(there: Points, back: Points) -> Path:
    """A closed shape between two open curves from the same side to the other."""
    path = skia.Path()
    extend(path, there, move=True)
    extend(path, back[::-1])
    path.close()
    return path


def fill(canvas: Canvas, path: Path, colour: int) -> None:
    canvas.drawPath(path, skia.Paint(AntiAlias=True, Color=colour))


def shade(canvas: Canvas, path: Path, shader: Any) -> None:
    canvas.drawPath(path, skia.Paint(AntiAlias=True, Shader=shader))


def stroke(canvas: Canvas, path: Path, colour: int, width: float, *, blur: float = 0.0) -> None:
    paint = skia.Paint(
        AntiAlias=True, Color=colour, Style=skia.Paint.kStroke_Style, StrokeWidth=width,
        StrokeCap=skia.Paint.kRound_Cap, StrokeJoin=skia.Paint.kRound_Join,
    )  # fmt: skip
    if blur >= BLUR_MIN:
        paint.setMaskFilter(skia.MaskFilter.MakeBlur(skia.kNormal_BlurStyle, blur))
    canvas.drawPath(path, paint)


def soft(canvas: Canvas, path: Path, colour: int, blur: float) -> None:
    """A shape with blurred sides."""
    mask = skia.MaskFilter.MakeBlur(skia.kNormal_BlurStyle, blur)
    canvas.drawPath(path, skia.Paint(AntiAlias=True, Color=colour, MaskFilter=mask))


def glow(
    canvas: Canvas, centre: Sequence[float], across: float, down: float, colour: str, alpha: float, *, turn: float = 0.0
) -> None:
    """A soft elliptic spot; cheaper than a blur."""
    canvas.save()
    canvas.translate(*centre)
    if turn:
        canvas.rotate(turn)
    canvas.scale(1.0, down / across)
    shader = skia.GradientShader.MakeRadial(
        (0, 0), across, [argb(colour, alpha), argb(colour, alpha * 0.55), argb(colour, 0)], [0.0, 0.5, 1.0]
    )
    canvas.drawCircle(0, 0, across, skia.Paint(AntiAlias=True, Shader=shader))
    canvas.restore()


def vertical(top: float, bottom: float, colours: Sequence[int], stops: Sequence[float] | None = None) -> Any:
    return skia.GradientShader.MakeLinear([(0, top), (0, bottom)], list(colours), list(stops) if stops else None)


def radial(centre: Sequence[float], radius: float, colours: Sequence[int], stops: Sequence[float] | None = None) -> Any:
    return skia.GradientShader.MakeRadial(tuple(centre), radius, list(colours), list(stops) if stops else None)
