"""A part of the portrait, and what is painted of it once, with the head at rest.

The paint is laid on as the parts move (texture.py); outlines and features are drawn anew in every frame (portrait.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from duplexd.models.face.drawing import pen
from duplexd.models.face.drawing.character import Character, Lock
from duplexd.models.face.drawing.library import skia
from duplexd.models.face.drawing.pen import argb, mix
from duplexd.models.face.drawing.pose import Points, Pose
from duplexd.models.face.drawing.texture import Texture
from duplexd.models.face.motion import Channel, Motion

Shape = npt.NDArray[np.float64]  #: (n, 3) in head space
Layer = Literal["back", "front"]

EYE_Y, EYE_X = -0.02, 0.43
_RAYS = [(float(np.cos(angle)), float(np.sin(angle))) for angle in np.linspace(0, 2 * np.pi, 16, endpoint=False)]


def _surface(x: Shape | float, y: Shape | float) -> Any:
    """How far the front of the head comes forward at (x, y)."""
    return np.sqrt(np.clip(1.12 - np.square(x) * 0.95, 0.02, None)) * (0.98 - 0.10 * np.square(np.asarray(y) - 0.2))


def on_face(flat: npt.ArrayLike, *, forward: float = 0.0) -> Shape:
    """(n, 2) drawn on the front of the head -> (n, 3)."""
    points = np.asarray(flat, np.float64)
    depth = _surface(points[:, 0], points[:, 1]) + forward
    return np.column_stack([points, depth])


def cross(x: float, y: float, across: float, down: float) -> Points:
    """Pins of a disc: the ends of its two diameters."""
    return np.array([(x - across, y), (x + across, y), (x, y - down), (x, y + down)])


@lru_cache(64)
def _bumps(lock: Lock) -> Shape:
    """Middles of the curls along a lock's outline, not quite their own width apart."""
    corners = np.asarray(lock.points, np.float64)
    sides = pairwise(np.concatenate([corners, corners[:1]]))
    counts = ((a, b, max(1, round(float(np.linalg.norm(b - a)) / (1.25 * lock.curls)))) for a, b in sides)
    return np.array([a + (b - a) * (step + 0.5) / count for a, b, count in counts for step in range(count)])


class Sketch:
    """A character in one pose: what all its parts are drawn from."""

    def __init__(self, canvas: Any, character: Character, motion: Motion, pose: Pose) -> None:
        self.canvas, self.motion, self.pose = canvas, motion, pose
        self.colours, self.features, self.extras = character.colours, character.features, character.extras
        self.locks = character.hair
        self.m = {channel: float(motion[channel]) for channel in Channel}
        self.unit = pose.length(1.0)
        self.outline = self._outline()

    def _outline(self) -> Points:
        """The face without hair: forehead, temples, cheeks, jaw, chin."""
        f = self.features
        drop = 0.125 * self.m[Channel.JAW]
        squeeze = 1 - 0.035 * self.m[Channel.JAW]
        lift = 0.03 * max(0.0, self.m[Channel.SMILE])
        chin = 1.235 + 0.09 * (f.chin - 1) + drop
        right = [
            (0.34, -1.22, 0.30),
            (0.72, -0.98, 0.22),
            (0.935 * f.cheeks, -0.50, 0.12),
            (0.955 * f.cheeks, -0.02, 0.10),
            ((0.925 + lift) * f.cheeks, 0.34, 0.16),
            (0.815 * f.jaw * squeeze, 0.70 + 0.35 * drop, 0.24),
            (0.560 * f.jaw * squeeze, 1.01 + 0.8 * drop, 0.42),
            (0.250 * f.jaw * squeeze, chin - 0.050, 0.56),
        ]
        left = [(-x, y, z) for x, y, z in reversed(right)]
        return self.pose([(0.0, -1.27, 0.34), *right, (0.0, chin, 0.60), *left])

    def locks_of(self, layer: Layer) -> list[Lock]:
        return [lock for lock in self.locks if lock.layer == layer]

    def hair_shapes(self, layer: Layer) -> list[Any]:
        return [self.shape(lock) for lock in self.locks_of(layer)]

    def dye(self, lock: Lock) -> tuple[str, str]:
        """Colours of a lock, above and below."""
        names = {"hair": self.colours.hair, "light": self.colours.hair_light, "shade": self.colours.hair_shade}
        return names[lock.colours[0]], names[lock.colours[1]]

    def shape(self, lock: Lock) -> Any:
        return self._curly(lock) if lock.curls else pen.smooth(self.pose(lock.points))

    def _curly(self, lock: Lock) -> Any:
        """An outline of bumps: curls, as one sees them against the light."""
        path = skia.Path()
        path.setFillType(skia.PathFillType.kWinding)
        path.addPath(pen.smooth(self.pose(lock.points)))
        bumps = _bumps(lock)
        radius = self.pose.length(lock.curls) * (1.0 + 0.22 * np.sin(12.9 * bumps[:, 0] + 7.3 * bumps[:, 1]))
        for (x, y), r in zip(self.pose(bumps).tolist(), radius.tolist(), strict=True):
            path.addCircle(x, y, r)
        return path


class _AtRest(Sketch):
    """Paints a character's textures."""

    def hair(self, layer: Layer) -> None:
        """All locks of a layer, and paint all round them: outlines that turn must not leave it."""
        self.canvas.clear(argb(self.colours.hair))
        for shape, lock in zip(self.hair_shapes(layer), self.locks_of(layer), strict=True):
            style = skia.Paint.kStroke_Style
            self.canvas.drawPath(shape, skia.Paint(Style=style, StrokeWidth=0.5 * self.unit, Shader=self._shader(lock)))
        for lock in self.locks_of(layer):
            self._lock(lock)

    def _shader(self, lock: Lock) -> Any:
        points = self.pose(lock.points)
        return pen.vertical(points[:, 1].min(), points[:, 1].max(), [argb(colour) for colour in self.dye(lock)])

    def _lock(self, lock: Lock) -> None:
        pen.shade(self.canvas, self.shape(lock), self._shader(lock))
        if lock.strands:
            self._strands(lock)

    def _strands(self, lock: Lock) -> None:
        """Fine lines between the guides, light and dark by turns, as hair lies."""
        guides = np.asarray(lock.strands, np.float64)
        count = 7 * (len(guides) - 1)
        along = np.arange(count + 1) / count * (len(guides) - 1)
        low = np.minimum(along.astype(int), len(guides) - 2)
        lines = guides[low] + (along - low)[:, None, None] * (guides[low + 1] - guides[low])
        flat = self.pose(lines.reshape(-1, 3)).reshape(*lines.shape[:2], 2)
        c = self.colours
        looks = (
            (c.hair_shade, 0.42, 0.020), (c.hair_light, 0.34, 0.030), (mix(c.hair_light, "#ffffff", 0.12), 0.40, 0.013),
        )  # fmt: skip
        for look, (colour, alpha, width) in enumerate(looks):
            path = skia.Path()
            for index in range(look, count + 1, len(looks)):
                pen.extend(path, flat[index], move=True)
            pen.stroke(self.canvas, path, argb(colour, lock.shine * alpha), self.unit * width)

    def skin(self) -> None:
        """All of the skin at rest, beyond the outline too: a moving outline must find skin under it."""
        c, canvas = self.colours, self.canvas
        dark = mix(c.shade, "#5a2030", 0.18)
        x, y = self.pose([(-0.30, -0.30, 0.9)])[0].tolist()
        light = pen.radial(
            (x, y),
            self.unit * 1.75,
            [argb(c.light), argb(c.skin), argb(mix(c.skin, c.shade, 0.7)), argb(c.shade)],
            [0.0, 0.38, 0.78, 1.0],
        )
        canvas.drawPaint(skia.Paint(Shader=light, Dither=True))
        left, right = self.outline[:, 0].min(), self.outline[:, 0].max()
        side = skia.GradientShader.MakeLinear(
            [(left, 0), (right, 0.35 * (right - left))],
            [argb(dark, 0.0), argb(dark, 0.0), argb(dark, 0.30), argb(dark, 0.62)],
            [0, 0.55, 0.86, 1.0],
        )
        canvas.drawPaint(skia.Paint(Shader=side, Dither=True))
        chin = float(self.outline[:, 1].max())
        below = pen.vertical(chin - 0.30 * self.unit, chin, [argb(dark, 0.0), argb(dark, 0.36)])
        canvas.drawPaint(skia.Paint(Shader=below, Dither=True))
        if self.extras.stubble:
            self._stubble()
        self._modelling()
        self._cast()

    def _modelling(self) -> None:
        c = self.colours
        for side in (-1.0, 1.0):
            x, y = self.pose(on_face([(side * 0.58, 0.36)]))[0].tolist()
            pen.glow(self.canvas, (x, y), self.unit * 0.34, self.unit * 0.24, c.blush, 0.36)
            x, y = self.pose(on_face([(side * EYE_X, EYE_Y + 0.01)]))[0].tolist()
            pen.glow(self.canvas, (x, y), self.unit * 0.38, self.unit * 0.27, mix(c.shade, c.blush, 0.3), 0.34)
        x, y = self.pose(on_face([(-0.16, -0.62)]))[0].tolist()
        pen.glow(self.canvas, (x, y), self.unit * 0.55, self.unit * 0.34, "#ffffff", 0.16)
        x, y = self.pose(on_face([(-0.60, 0.16)]))[0].tolist()
        pen.glow(self.canvas, (x, y), self.unit * 0.24, self.unit * 0.15, "#ffffff", 0.20)
        if self.features.freckles:
            self._freckles()

    def _stubble(self) -> None:
        c = self.colours
        beard = pen.smooth(
            self.pose(
                [
                    (-0.90, 0.24, 0.2),
                    (-0.66, 0.52, 0.6),
                    (-0.38, 0.56, 0.85),
                    (0.0, 0.50, 1.0),
                    (0.38, 0.56, 0.85),
                    (0.66, 0.52, 0.6),
                    (0.90, 0.24, 0.2),
                    (0.80, 1.1, 0.3),
                    (0.0, 1.5, 0.5),
                    (-0.80, 1.1, 0.3),
                ]
            )
        )
        pen.soft(self.canvas, beard, argb(mix(c.hair_shade, c.skin, 0.30), self.extras.stubble), self.unit * 0.12)

    def _freckles(self) -> None:
        spots = np.random.default_rng(7).uniform((-0.62, 0.14), (0.62, 0.40), (26, 2))
        paint = skia.Paint(
            AntiAlias=True, Color=argb(mix(self.colours.shade, "#7a3b1c", 0.5), 0.4 * self.features.freckles)
        )
        for index, (x, y) in enumerate(self.pose(on_face(spots)).tolist()):
            self.canvas.drawCircle(x, y, self.unit * (0.009 + 0.006 * (index % 3)), paint)

    def _cast(self) -> None:
        """The shadow of hair on the face: three thin ones are soft enough."""
        dark = argb(mix(self.colours.shade, "#3a1420", 0.35), 0.15)
        left, top = self.outline.min(0).tolist()
        right, eyes = float(self.outline[:, 0].max()), float(self.pose([(0.0, 0.25, 0.5)])[0, 1])
        self.canvas.save()
        self.canvas.clipRect(skia.Rect.MakeLTRB(left, top, right, eyes))
        for shape in self.hair_shapes("front"):
            for step in (0.035, 0.065, 0.095):
                shadow = skia.Path(shape)
                shadow.offset(0.35 * step * self.unit, step * self.unit)
                pen.fill(self.canvas, shadow, dark)
        self.canvas.restore()

    def trunk(self) -> None:
        wide, c = self.features.shoulders, self.colours
        at = self.pose.trunk
        half = [(0, 474), (30, 466), (57, 443), (100, 457), (150, 478), (196, 500), (226, 540), (226, 600)]
        if self.extras.collar == "turtle":
            half[:4] = [(0, 425), (25, 421), (41, 409), (51, 420), (60, 446), (106, 461)]
        if self.extras.collar in ("shirt", "v"):
            half[:3] = [(0, 520), (24, 492), (58, 446)]
        right = np.array([(256 + x * (wide if x > 58 else 1), y) for x, y in half], np.float64)
        left = np.column_stack([512 - right[::-1, 0], right[::-1, 1]])
        path = pen.smooth(at(np.concatenate([left, right[1:]])), closed=False, tension=0.8)
        path.close()
        # Light from the left, and the head's shadow on the chest.
        centre = at([(232, 424)])[0].tolist()
        lit = mix(c.cloth, "#ffffff", 0.10)
        colours = [
            argb(mix(c.cloth_shade, "#000000", 0.15)),
            argb(mix(c.cloth, c.cloth_shade, 0.45)),
            argb(lit),
            argb(c.cloth),
            argb(c.cloth_shade),
        ]
        pen.shade(self.canvas, path, pen.radial(centre, 262 * self.pose.zoom, colours, [0.0, 0.17, 0.40, 0.62, 1.0]))
        if self.extras.collar == "round":
            line = pen.smooth(at(np.concatenate([left[-3:], right[1:3]])), closed=False)
            pen.stroke(self.canvas, line, argb(c.cloth_shade, 0.55), 6 * self.pose.zoom)
            pen.stroke(self.canvas, line, argb(mix(c.cloth, "#ffffff", 0.25), 0.6), 1.6 * self.pose.zoom)
        if self.extras.collar == "turtle":
            for y, alpha in ((433, 0.26), (449, 0.34)):
                fold = pen.smooth(
                    at([(211, y - 11), (231, y - 1), (256, y + 3), (281, y - 1), (301, y - 11)]), closed=False
                )
                for width in (2.5, 6.0):
                    pen.stroke(self.canvas, fold, argb(c.cloth_shade, 0.6 * alpha), width * self.pose.zoom)
        if self.extras.collar in ("shirt", "v"):
            self._collar()

    def _collar(self) -> None:
        at, c = self.pose.trunk, self.colours
        for side in (-1, 1):
            flap = np.array(
                [(side * 52, 441), (side * 62, 458), (side * 44, 506), (side * 12, 524), (side * 30, 488)], np.float64
            )
            path = pen.smooth(at(flap + np.array([256.0, 0.0])), tension=0.35)
            light = mix(c.cloth, "#ffffff", 0.16 if side < 0 else 0.06)
            pen.fill(self.canvas, path, argb(light))
            pen.stroke(self.canvas, path, argb(c.cloth_shade, 0.5), 1.4 * self.pose.zoom)


def _paint_iris(canvas: Any, *, x: float, y: float, r: float, character: Character) -> None:
    c = character.colours
    canvas.translate(x, y)
    dark = mix(c.iris, "#120a14", 0.62)
    shader = pen.radial(
        (0, 0.22 * r),
        r * 1.12,
        [argb(c.iris_light), argb(mix(c.iris, c.iris_light, 0.35)), argb(c.iris), argb(dark)],
        [0.0, 0.42, 0.74, 1.0],
    )
    canvas.drawCircle(0, 0, 1.2 * r, skia.Paint(AntiAlias=True, Shader=shader))
    ring = skia.Paint(AntiAlias=True, Color=argb(dark, 0.85), Style=skia.Paint.kStroke_Style, StrokeWidth=0.11 * r)
    canvas.drawCircle(0, 0, r * 0.95, ring)
    rays = skia.Path()
    for cos, sin in _RAYS:
        rays.moveTo(cos * 0.50 * r, sin * 0.50 * r)
        rays.lineTo(cos * 0.80 * r, sin * 0.80 * r)
    pen.stroke(canvas, rays, argb(c.iris_light, 0.32), 0.045 * r)
    canvas.drawCircle(0, 0, r * 0.46, skia.Paint(AntiAlias=True, Color=argb("#0d080c")))
    shade = pen.vertical(-r, r * 0.5, [argb("#0d0610", 0.62), argb("#0d0610", 0.0)])
    canvas.drawCircle(0, 0, r, skia.Paint(AntiAlias=True, Shader=shade))


def _paint_hair(canvas: Any, *, layer: Layer, at_rest: Callable[[Any], _AtRest]) -> None:
    at_rest(canvas).hair(layer)


def _shaded_layers(character: Character) -> set[Layer]:
    """Layers of hair in which there is more to see than one colour a lock."""
    return {lock.layer for lock in character.hair if lock.strands or lock.colours[0] != lock.colours[1]}


class Paints:
    """A character's textures."""

    #: Points of the front of the head by which the skin is laid on; of the trunk, which moves as one flat piece.
    SKIN_PINS = ((-0.6, -0.5, 0.62), (0.6, -0.5, 0.62), (0.0, 0.9, 0.70))
    TRUNK_PINS = ((0.0, 400.0), (512.0, 400.0), (256.0, 512.0))

    def __init__(self, character: Character, size: int) -> None:
        motion = character.identity.neutral()
        pose = Pose(motion, size=size)

        def at_rest(canvas: Any) -> _AtRest:
            return _AtRest(canvas, character, motion, pose)

        self.skin = Texture(size, pose(self.SKIN_PINS), lambda canvas: at_rest(canvas).skin())
        self.trunk = Texture(size, pose.trunk(self.TRUNK_PINS), lambda canvas: at_rest(canvas).trunk())
        x = y = size / 2
        r = 0.150 * character.features.eyes * pose.length(1.0)
        self.iris = Texture(size, cross(x, y, r, r), partial(_paint_iris, x=x, y=y, r=r, character=character))
        self._hair_pins: dict[Layer, Shape] = {}
        for layer in _shaded_layers(character):
            locks = [lock.points for lock in character.hair if lock.layer == layer]
            self._hair_pins[layer] = np.concatenate([np.asarray(points) for points in locks])
        self.hair: dict[Layer, Texture] = {
            layer: Texture(size, pose(pins), partial(_paint_hair, layer=layer, at_rest=at_rest))
            for layer, pins in self._hair_pins.items()
        }

    def hair_pins(self, layer: Layer, pose: Pose) -> Points:
        return pose(self._hair_pins[layer])
