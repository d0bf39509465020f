"""The portrait: one frame of motion drawn as a picture, part by part, from the back to the front.

1. Drawing is a pure function of (character, motion): the same motion is the same picture, in whatever order.
2. Light comes from the upper left. Catch-lights stay with the light, not with the iris.
3. A part's shape is made in head space and projected once; only what is inside the mouth and the eyes is clipped.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from duplexd.models.face.drawing import pen
from duplexd.models.face.drawing.character import Character, Lock
from duplexd.models.face.drawing.library import skia
from duplexd.models.face.drawing.pen import argb, mix
from duplexd.models.face.drawing.pose import SIZE, Points, Pose
from duplexd.models.face.motion import Channel, Motion, clamped

Picture = npt.NDArray[np.uint8]  #: (height, width, 4), BGRA
Shape = npt.NDArray[np.float64]  #: (n, 3) in head space

_EYE_Y, _EYE_X = -0.02, 0.43
_RAYS = [(float(np.cos(angle)), float(np.sin(angle))) for angle in np.linspace(0, 2 * np.pi, 16, endpoint=False)]
_MOUTH_Y = 0.735


def _surface(x: Shape | float, y: Shape | float) -> Any:
    """How far the front of the head comes forward at (x, y)."""
    return np.sqrt(np.clip(1.12 - np.square(x) * 0.95, 0.02, None)) * (0.98 - 0.10 * np.square(np.asarray(y) - 0.2))


def _on_face(flat: npt.ArrayLike, *, forward: float = 0.0) -> Shape:
    """(n, 2) drawn on the front of the head -> (n, 3)."""
    points = np.asarray(flat, np.float64)
    depth = _surface(points[:, 0], points[:, 1]) + forward
    return np.column_stack([points, depth])


class Portrait:
    """Draws one character.

    Args:    size: pixels of a side.
    """

    def __init__(self, character: Character, *, size: int = SIZE) -> None:
        self.character, self.size = character, size
        self.pixels: Picture = np.zeros((size, size, 4), np.uint8)
        self._surface = skia.Surface(self.pixels, skia.kBGRA_8888_ColorType, skia.kPremul_AlphaType)
        self._canvas = self._surface.getCanvas()
        self._backdrop = self._paint_backdrop()
        self._skin = _Skin(character, size)

    def draw(self, motion: Motion) -> Picture:
        """One frame (CHANNELS,) -> the picture, which the next call overwrites."""
        motion = clamped(motion)
        self.pixels[:] = self._backdrop
        part = _Parts(self._canvas, self.character, self._skin, motion, Pose(motion, size=self.size))
        part.hair("back")
        part.neck()
        part.trunk()
        part.ears()
        part.face()
        part.nose()
        part.mouth()
        part.eye(-1.0)
        part.eye(1.0)
        part.hair("front")
        part.brow(-1.0)
        part.brow(1.0)
        part.glasses()
        return self.pixels

    def _paint_backdrop(self) -> Picture:
        middle, edge = self.character.colours.background
        shader = pen.radial(
            (self.size * 0.42, self.size * 0.36),
            self.size * 0.85,
            [argb(middle), argb(mix(middle, edge, 0.55)), argb(edge)],
            [0, 0.5, 1],
        )
        self._canvas.drawPaint(skia.Paint(Shader=shader, Dither=True))
        return self.pixels.copy()


class _Skin:
    """Light and colour of a face, painted once for the head at rest and laid on it as the head moves.

    A frame then pays for one pass over the face instead of a dozen; the outline and all features stay exact.
    """

    #: Points of the front of the head by which the picture is laid on.
    PINS = ((-0.6, -0.5, 0.62), (0.6, -0.5, 0.62), (0.0, 0.9, 0.70))

    def __init__(self, character: Character, size: int) -> None:
        surface = skia.Surface(size, size)
        motion = character.identity.neutral()
        pose = Pose(motion, size=size)
        part = _Parts(surface.getCanvas(), character, self, motion, pose)
        part.paint_skin()
        self._image = surface.makeImageSnapshot()
        self._pins = pose(self.PINS)

    def shader(self, pose: Pose) -> Any:
        """The skin where the head is now."""
        there = np.column_stack([self._pins, np.ones(3)])
        a = np.linalg.solve(there, pose(self.PINS))
        matrix = skia.Matrix.MakeAll(a[0, 0], a[1, 0], a[2, 0], a[0, 1], a[1, 1], a[2, 1], 0, 0, 1)
        # The picture has no detail that could be seen to step from pixel to pixel.
        nearest = skia.SamplingOptions(skia.FilterMode.kNearest)
        return self._image.makeShader(skia.TileMode.kClamp, skia.TileMode.kClamp, nearest, matrix)


class _Parts:
    """One frame being drawn."""

    def __init__(self, canvas: Any, character: Character, skin: _Skin, motion: Motion, pose: Pose) -> None:
        self.canvas, self.motion, self.pose, self.skin = canvas, motion, pose, skin
        self.colours, self.features, self.extras = character.colours, character.features, character.extras
        self.locks = character.hair
        self.m = {channel: float(motion[channel]) for channel in Channel}
        self.unit = pose.length(1.0)
        self.outline = self._outline()

    # Outline ----------------------------------------------------------------------------------------------------------

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

    # Behind the face --------------------------------------------------------------------------------------------------

    def hair(self, layer: str) -> None:
        for lock in self.locks:
            if lock.layer == layer:
                self._lock(lock)

    def _lock(self, lock: Lock) -> None:
        points = self.pose(lock.points)
        path = self._shape(lock)
        top, bottom = points[:, 1].min(), points[:, 1].max()
        names = {"hair": self.colours.hair, "light": self.colours.hair_light, "shade": self.colours.hair_shade}
        first, last = (names[name] for name in lock.colours)
        if lock.colours[0] == lock.colours[1]:
            pen.fill(self.canvas, path, argb(first))
        else:
            pen.shade(self.canvas, path, pen.vertical(top, bottom, [argb(first), argb(last)]))
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

    def _shape(self, lock: Lock) -> Any:
        return self._curly(lock) if lock.curls else pen.smooth(self.pose(lock.points))

    def _curly(self, lock: Lock) -> Any:
        """An outline of bumps: curls, as one sees them against the light."""
        corners = np.asarray(lock.points, np.float64)
        around = np.concatenate([corners, corners[:1]])
        path = skia.Path()
        path.setFillType(skia.PathFillType.kWinding)
        path.addPath(pen.smooth(self.pose(corners)))
        for a, b in pairwise(around):
            count = max(1, round(float(np.linalg.norm(b - a)) / (1.25 * lock.curls)))
            for step in range(count):
                at = a + (b - a) * (step + 0.5) / count
                wobble = 1.0 + 0.22 * np.sin(12.9 * at[0] + 7.3 * at[1])
                x, y = self.pose([at])[0].tolist()
                path.addCircle(x, y, self.pose.length(lock.curls) * wobble)
        return path

    def _cast(self) -> None:
        """The shadow of hair on the face: four thin ones are soft enough, and a tenth of the price of a blur."""
        dark = argb(mix(self.colours.shade, "#3a1420", 0.35), 0.15)
        left, top = self.outline.min(0).tolist()
        right, eyes = float(self.outline[:, 0].max()), float(self.pose([(0.0, 0.25, 0.5)])[0, 1])
        self.canvas.save()
        self.canvas.clipRect(skia.Rect.MakeLTRB(left, top, right, eyes))
        for lock in self.locks:
            if lock.layer == "front":
                shape = self._shape(lock)
                for step in (0.035, 0.065, 0.095):
                    shadow = skia.Path(shape)
                    shadow.offset(0.35 * step * self.unit, step * self.unit)
                    pen.fill(self.canvas, shadow, dark)
        self.canvas.restore()

    def neck(self) -> None:
        width = 34.0 * self.features.neck
        head = self.pose([(-0.36 * self.features.neck, 0.80, -0.15), (0.36 * self.features.neck, 0.80, -0.15)])
        base = self.pose.trunk(
            [(256 - width - 8, 448), (256 - width - 34, 560), (256 + width + 34, 560), (256 + width + 8, 448)]
        )
        path = skia.Path()
        pen.extend(path, np.stack([head[0], base[0], base[1]]), move=True)
        pen.extend(path, np.stack([base[2], base[3], head[1]]))
        path.close()
        top, bottom = float(head[0, 1]), float(base[1, 1])
        dark = mix(self.colours.shade, "#40161c", 0.22)
        pen.shade(
            self.canvas,
            path,
            pen.vertical(top, bottom, [argb(dark), argb(dark), argb(self.colours.skin)], [0, 0.24, 0.75]),
        )

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

    def ears(self) -> None:
        for side in (-1.0, 1.0):
            x = 0.955 * self.features.cheeks
            shape = [
                (x, -0.16, -0.1),
                (x + 0.10, -0.20, -0.16),
                (x + 0.145, -0.06, -0.2),
                (x + 0.105, 0.14, -0.16),
                (x + 0.03, 0.30, -0.1),
                (x - 0.06, 0.26, -0.06),
            ]
            points = self.pose([(side * a, b, d) for a, b, d in shape])
            path = pen.smooth(points)
            edge = self.colours.skin if side < 0 else self.colours.shade
            pen.shade(
                self.canvas,
                path,
                pen.vertical(
                    points[:, 1].min(), points[:, 1].max(), [argb(edge), argb(mix(edge, self.colours.blush, 0.4))]
                ),
            )
            inner = self.pose(
                [
                    (side * (x + 0.035), -0.1, -0.1),
                    (side * (x + 0.095), -0.11, -0.14),
                    (side * (x + 0.10), 0.02, -0.16),
                    (side * (x + 0.045), 0.15, -0.1),
                ]
            )
            pen.stroke(
                self.canvas,
                pen.smooth(inner, closed=False),
                argb(mix(self.colours.shade, "#5a1f1f", 0.3), 0.55),
                self.unit * 0.022,
                blur=self.unit * 0.008,
            )
            if self.extras.earrings:
                drop = self.pose([(side * (x + 0.015), 0.36, -0.06)])[0]
                self._earring(drop)

    def _earring(self, at: Points) -> None:
        x, y = at.tolist()
        r = 0.062 * self.unit
        colour = self.extras.earrings
        shader = pen.radial(
            (x - r * 0.3, y - r * 0.3),
            r * 1.5,
            [argb(mix(colour, "#ffffff", 0.75)), argb(colour), argb(mix(colour, "#000000", 0.35))],
            [0, 0.45, 1],
        )
        self.canvas.drawCircle(x, y, r, skia.Paint(AntiAlias=True, Shader=shader))

    # The face ---------------------------------------------------------------------------------------------------------

    def face(self) -> None:
        pen.shade(self.canvas, pen.smooth(self.outline), self.skin.shader(self.pose))
        self._cast()
        c, smile = self.colours, max(0.0, self.m[Channel.SMILE])
        rise = 0.05 * (smile + 0.5 * self.m[Channel.SQUINT])
        if smile > 0.1:
            for side in (-1.0, 1.0):
                x, y = self.pose(_on_face([(side * 0.58, 0.34 - rise)]))[0].tolist()
                pen.glow(self.canvas, (x, y), self.unit * 0.27, self.unit * 0.19, c.blush, 0.20 * smile)
            x, y = self.pose(_on_face([(-0.60, 0.15 - rise)]))[0].tolist()
            pen.glow(self.canvas, (x, y), self.unit * 0.20, self.unit * 0.12, "#ffffff", 0.16 * smile)

    def paint_skin(self) -> None:
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

    def _modelling(self) -> None:
        c = self.colours
        for side in (-1.0, 1.0):
            x, y = self.pose(_on_face([(side * 0.58, 0.36)]))[0].tolist()
            pen.glow(self.canvas, (x, y), self.unit * 0.34, self.unit * 0.24, c.blush, 0.36)
            x, y = self.pose(_on_face([(side * _EYE_X, _EYE_Y + 0.01)]))[0].tolist()
            pen.glow(self.canvas, (x, y), self.unit * 0.38, self.unit * 0.27, mix(c.shade, c.blush, 0.3), 0.34)
        x, y = self.pose(_on_face([(-0.16, -0.62)]))[0].tolist()
        pen.glow(self.canvas, (x, y), self.unit * 0.55, self.unit * 0.34, "#ffffff", 0.16)
        x, y = self.pose(_on_face([(-0.60, 0.16)]))[0].tolist()
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
        for index, (x, y) in enumerate(self.pose(_on_face(spots)).tolist()):
            self.canvas.drawCircle(x, y, self.unit * (0.009 + 0.006 * (index % 3)), paint)

    def nose(self) -> None:
        c, big = self.colours, self.features.nose
        tip = 0.40 + 0.008 * self.m[Channel.SMILE]
        dark = mix(c.shade, "#6b2a2a", 0.30)
        side = pen.smooth(
            self.pose(
                [
                    (0.07, -0.14, 1.02),
                    (0.085 * big, 0.12, 1.16),
                    (0.155 * big, 0.33, 1.10),
                    (0.115 * big, 0.42, 1.10),
                    (0.04, 0.36, 1.22),
                    (0.035, 0.0, 1.16),
                ]
            )
        )
        pen.soft(self.canvas, side, argb(dark, 0.34), self.unit * 0.035)
        under = pen.smooth(
            self.pose(
                [
                    (-0.15 * big, tip + 0.02, 1.08),
                    (0.0, tip + 0.075, 1.16),
                    (0.16 * big, tip + 0.02, 1.08),
                    (0.10 * big, tip + 0.105, 1.0),
                    (-0.08 * big, tip + 0.105, 1.0),
                ]
            )
        )
        pen.soft(self.canvas, under, argb(dark, 0.42), self.unit * 0.028)
        for s in (-1.0, 1.0):
            wing = self.pose(
                [
                    (s * 0.135 * big, tip - 0.085, 1.05),
                    (s * 0.178 * big, tip - 0.01, 1.0),
                    (s * 0.15 * big, tip + 0.055, 1.02),
                    (s * 0.105 * big, tip + 0.058, 1.08),
                ]
            )
            pen.stroke(
                self.canvas,
                pen.smooth(wing, closed=False),
                argb(dark, 0.42 if s > 0 else 0.26),
                self.unit * 0.018,
                blur=self.unit * 0.008,
            )
            hole = pen.smooth(
                self.pose(
                    [
                        (s * 0.045 * big, tip + 0.062, 1.14),
                        (s * 0.085 * big, tip + 0.04, 1.11),
                        (s * 0.118 * big, tip + 0.055, 1.07),
                        (s * 0.08 * big, tip + 0.078, 1.10),
                    ]
                )
            )
            pen.soft(self.canvas, hole, argb(mix(dark, "#2a0a0a", 0.55), 0.75), self.unit * 0.010)
        x, y = self.pose([(-0.035, tip - 0.045, 1.26)])[0].tolist()
        pen.glow(self.canvas, (x, y), self.unit * 0.085, self.unit * 0.065, "#ffffff", 0.42)
        x, y = self.pose([(-0.02, 0.06, 1.16)])[0].tolist()
        pen.glow(self.canvas, (x, y), self.unit * 0.055, self.unit * 0.22, "#ffffff", 0.20)

    # Eyes -------------------------------------------------------------------------------------------------------------

    def _lids(self, side: float) -> tuple[Shape, Shape]:
        """Upper and lower edge of the open eye, inner corner to outer."""
        m, f = self.m, self.features
        lid = m[Channel.LID_LEFT if side < 0 else Channel.LID_RIGHT]
        squint = m[Channel.SQUINT]
        big = f.eyes
        along = np.array([0.0, 0.16, 0.38, 0.62, 0.84, 1.0])
        x = _EYE_X * f.eye_gap + (along - 0.47) * 0.50 * big
        corner = _EYE_Y + 0.035 - along * (0.050 + 0.10 * f.eye_tilt)
        rise = np.array([0.0, 0.118, 0.188, 0.186, 0.108, 0.0]) * big
        fall = np.array([0.0, 0.050, 0.090, 0.098, 0.062, 0.0]) * big * (1 - 0.55 * squint)
        lower = corner + fall
        # A shut eye is a line that hangs a little, where the lower lid is.
        shut = corner + fall * 0.92
        open_ = corner - rise * (1 - 0.10 * squint)
        upper = shut + (open_ - shut) * lid
        upper = np.minimum(upper, lower - 0.002)
        return _on_face(np.column_stack([side * x, upper])), _on_face(np.column_stack([side * x, lower]))

    def eye(self, side: float) -> None:
        c, canvas, u = self.colours, self.canvas, self.unit
        upper3, lower3 = self._lids(side)
        upper, lower = self.pose(upper3), self.pose(lower3)
        lid = self.m[Channel.LID_LEFT if side < 0 else Channel.LID_RIGHT]
        self._lid_skin(side, upper3)
        if lid > 0.06:
            opening = pen.ring(upper, lower)
            top, bottom = float(upper[:, 1].min()), float(lower[:, 1].max())
            white = mix("#fdfaf7", c.shade, 0.05)
            pen.shade(
                canvas,
                opening,
                pen.vertical(
                    top,
                    bottom,
                    [argb(mix(white, "#8d7f8f", 0.42)), argb(white), argb(mix(white, c.blush, 0.10))],
                    [0.0, 0.45, 1.0],
                ),
            )
            canvas.save()
            canvas.clipPath(opening, skia.ClipOp.kIntersect, True)
            self._iris(side)
            shadow = upper.copy()
            shadow[:, 1] += 0.018 * u
            pen.stroke(canvas, pen.smooth(shadow, closed=False), argb("#2a1626", 0.34), 0.055 * u, blur=0.018 * u)
            canvas.restore()
            corner = self.pose(
                _on_face([(side * (_EYE_X * self.features.eye_gap - 0.222 * self.features.eyes), _EYE_Y + 0.038)])
            )[0].tolist()
            canvas.drawCircle(
                *corner, 0.017 * u, skia.Paint(AntiAlias=True, Color=argb(mix(c.blush, "#b3565c", 0.5), 0.75))
            )
        self._lashes(side, upper, lower)

    def _iris(self, side: float) -> None:
        c, canvas, u = self.colours, self.canvas, self.unit
        f, m = self.features, self.m
        x3 = side * _EYE_X * f.eye_gap + 0.135 * m[Channel.GAZE_X]
        y3 = _EYE_Y - 0.044 - 0.085 * m[Channel.GAZE_Y]
        x, y = self.pose(_on_face([(x3, y3)]))[0].tolist()
        r = 0.150 * f.eyes * u
        canvas.save()
        canvas.translate(x, y)
        # Seen from the side it is narrower.
        canvas.scale(1 - 0.10 * abs(m[Channel.GAZE_X]), 1.0)
        dark = mix(c.iris, "#120a14", 0.62)
        shader = pen.radial(
            (0, 0.22 * r),
            r * 1.12,
            [argb(c.iris_light), argb(mix(c.iris, c.iris_light, 0.35)), argb(c.iris), argb(dark)],
            [0.0, 0.42, 0.74, 1.0],
        )
        canvas.drawCircle(0, 0, r, skia.Paint(AntiAlias=True, Shader=shader))
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
        canvas.restore()
        # The light stays where it is: it moves half as far as the iris does.
        lx, ly = x - 0.42 * r - 0.05 * u * m[Channel.GAZE_X], y - 0.40 * r + 0.03 * u * m[Channel.GAZE_Y]
        canvas.drawOval(
            skia.Rect.MakeXYWH(lx - 0.20 * r, ly - 0.23 * r, 0.46 * r, 0.46 * r),
            skia.Paint(AntiAlias=True, Color=argb("#ffffff", 0.96)),
        )
        canvas.drawCircle(x + 0.42 * r, y + 0.46 * r, 0.12 * r, skia.Paint(AntiAlias=True, Color=argb("#ffffff", 0.62)))

    def _lid_skin(self, side: float, upper: Shape) -> None:
        """The lid between its crease and its edge."""
        c, u, m = self.colours, self.unit, self.m
        lid = m[Channel.LID_LEFT if side < 0 else Channel.LID_RIGHT]
        along = np.array([0.0, 0.16, 0.38, 0.62, 0.84, 1.0])
        f = self.features
        base = _EYE_Y + 0.02 - along * (0.055 + 0.10 * f.eye_tilt)
        arch = np.array([0.045, 0.172, 0.248, 0.250, 0.185, 0.080]) * f.eyes * (1 + 0.08 * max(0.0, lid - 1))
        raised = 0.02 * m[Channel.BROW_LEFT if side < 0 else Channel.BROW_RIGHT]
        crease = _on_face(np.column_stack([upper[:, 0], base - arch - raised]))
        top = self.pose(crease)
        edge = self.pose(upper)
        if lid < 0.97:
            skin = mix(c.skin, c.shade, 0.45)
            pen.shade(
                self.canvas,
                pen.ring(top, edge),
                pen.vertical(
                    top[:, 1].min(),
                    edge[:, 1].max(),
                    [argb(skin), argb(mix(skin, c.light, 0.45)), argb(skin)],
                    [0, 0.5, 1],
                ),
            )
        pen.stroke(
            self.canvas,
            pen.smooth(top[:-1], closed=False),
            argb(mix(c.shade, "#4a1a20", 0.42), 0.62),
            0.020 * u,
            blur=0.006 * u,
        )

    def _lashes(self, side: float, upper: Points, lower: Points) -> None:
        c, u, f = self.colours, self.unit, self.features
        lid = self.m[Channel.LID_LEFT if side < 0 else Channel.LID_RIGHT]
        thick = np.array([0.003, 0.014, 0.024, 0.027, 0.020, 0.004]) * u * f.lashes
        # Beyond the outer corner, lashes sweep up while the eye is open and down when it is shut.
        tip = upper[-1] + np.array([side * 0.048, -0.046 * min(1.0, lid) + 0.02 * (1 - min(1.0, lid))]) * u * f.lashes
        above = upper - np.column_stack([np.zeros(len(thick)), thick])
        path = skia.Path()
        pen.extend(path, np.concatenate([above[:-1], tip[None]]), move=True)
        pen.extend(path, np.concatenate([(upper + np.array([0.0, 0.006 * u]))[:0:-1], upper[:1]]))
        path.close()
        pen.fill(self.canvas, path, argb(c.lashes))
        if lid > 0.08:
            pen.stroke(
                self.canvas, pen.smooth(lower[1:], closed=False), argb(mix(c.lashes, c.shade, 0.45), 0.55), 0.012 * u
            )
            pouch = lower[1:5] + np.array([0.0, 0.062 * u])
            strength = 0.16 + 0.34 * self.m[Channel.SQUINT]
            pen.stroke(
                self.canvas,
                pen.smooth(pouch, closed=False),
                argb(mix(c.shade, "#7a3030", 0.25), strength),
                0.020 * u,
                blur=0.010 * u,
            )

    def brow(self, side: float) -> None:
        c, f, m = self.colours, self.features, self.m
        raised = m[Channel.BROW_LEFT if side < 0 else Channel.BROW_RIGHT]
        knit = m[Channel.KNIT]
        along = np.array([0.0, 0.28, 0.60, 0.85, 1.0])
        x = 0.205 * f.eye_gap - 0.045 * knit + along * (0.56 + 0.045 * knit)
        base = -0.395 - f.brow_height + np.array([-0.006, -0.030, -0.052, -0.030, 0.026])
        # Knit brows that are raised go up inside (sorrow), lowered ones go down inside (concern).
        inner = np.array([1.0, 0.72, 0.25, 0.0, 0.0])
        worry = float(np.clip((raised + 0.02) / 0.16, 0, 1))
        move = -0.150 * raised + knit * (inner * (0.050 - 0.150 * worry) + (1 - inner) * 0.050 * worry)
        y = base + move
        thick = np.array([0.013, 0.028, 0.027, 0.017, 0.003]) * f.brows
        top = self.pose(_on_face(np.column_stack([side * x, y - thick]), forward=0.02))
        bottom = self.pose(_on_face(np.column_stack([side * x, y + thick * 0.8]), forward=0.02))
        path = pen.ring(top, bottom)
        pen.soft(self.canvas, path, argb(c.brows, 0.55), self.unit * 0.012)
        pen.fill(self.canvas, path, argb(c.brows, 0.80))
        if knit > 0.15:
            fold = self.pose(_on_face([(side * 0.075, -0.40), (side * 0.085, -0.30)], forward=0.02))
            pen.stroke(
                self.canvas,
                pen.smooth(fold, closed=False),
                argb(mix(c.shade, "#5a2020", 0.3), 0.40 * knit),
                self.unit * 0.022,
                blur=self.unit * 0.01,
            )

    # Mouth ------------------------------------------------------------------------------------------------------------

    def mouth(self) -> None:
        lips = _Lips(self.m, self.features.lips, self.features.mouth)
        c, canvas, u = self.colours, self.canvas, self.unit
        outer_top, outer_bottom = self.pose(lips.outer_top), self.pose(lips.outer_bottom)
        inner_top, inner_bottom = self.pose(lips.inner_top), self.pose(lips.inner_bottom)
        self._folds(lips)
        below = self.pose([(0.0, lips.outer_bottom[3, 1] + 0.085, 1.0)])[0].tolist()
        pen.glow(canvas, below, 0.26 * u, 0.085 * u, mix(c.shade, "#6b2a2a", 0.25), 0.42)
        if lips.gap > 0.006:
            self._inside(lips, inner_top, inner_bottom)
        upper = pen.ring(outer_top, inner_top)
        lower = pen.ring(inner_bottom, outer_bottom)
        top, bottom = float(outer_top[:, 1].min()), float(inner_top[:, 1].max())
        dark = mix(c.lips, "#4a0f1c", 0.30)
        pen.shade(canvas, upper, pen.vertical(top, bottom, [argb(mix(c.lips, c.skin, 0.22)), argb(dark)]))
        top, bottom = float(inner_bottom[:, 1].min()), float(outer_bottom[:, 1].max())
        pen.shade(
            canvas,
            lower,
            pen.vertical(
                top,
                bottom,
                [argb(mix(c.lips, dark, 0.35)), argb(mix(c.lips, "#ffffff", 0.10)), argb(mix(c.lips, c.shade, 0.25))],
                [0, 0.45, 1],
            ),
        )
        x, y = ((inner_bottom[3] + outer_bottom[3]) / 2).tolist()
        thick = float(outer_bottom[3, 1] - inner_bottom[3, 1])
        across = 0.15 * u * min(1.0, lips.wide) ** 1.5
        pen.glow(canvas, (x - 0.3 * across, y - 0.04 * thick), across, min(0.36 * thick, across), "#ffffff", 0.42)
        if lips.gap <= 0.03:
            seam = pen.smooth((inner_top + inner_bottom) / 2, closed=False)
            pen.stroke(
                canvas, seam, argb(mix(c.lips, "#2a0812", 0.62), 0.85), 0.020 * u * (1 + 0.3 * self.m[Channel.PRESS])
            )
        for corner in (outer_top[0], outer_top[-1]):
            pen.glow(canvas, corner.tolist(), 0.055 * u, 0.045 * u, mix(c.shade, "#5a1a20", 0.5), 0.50)

    def _folds(self, lips: _Lips) -> None:
        """From the wings of the nose past the corners: deeper in a smile."""
        depth = 0.10 + 0.40 * max(0.0, self.m[Channel.SMILE]) + 0.12 * max(0.0, self.m[Channel.WIDTH])
        for side in (-1.0, 1.0):
            corner = lips.outer_top[-1 if side > 0 else 0]
            reach = abs(float(corner[0])) + 0.10
            line = self.pose(
                _on_face(
                    [
                        (side * 0.23, 0.42),
                        (side * (0.6 * reach + 0.12), 0.55),
                        (side * (reach + 0.02), float(corner[1]) - 0.03),
                    ]
                )
            )
            pen.stroke(
                self.canvas,
                pen.smooth(line, closed=False),
                argb(mix(self.colours.shade, "#6b2a2a", 0.25), min(0.55, depth)),
                0.024 * self.unit,
                blur=0.014 * self.unit,
            )

    def _inside(self, lips: _Lips, top: Points, bottom: Points) -> None:
        canvas, u, m = self.canvas, self.unit, self.m
        hole = pen.ring(top, bottom)
        high, low = float(top[:, 1].min()), float(bottom[:, 1].max())
        pen.shade(
            canvas, hole, pen.vertical(high, low, [argb("#2b0d14"), argb("#4a141d"), argb("#6b2029")], [0, 0.55, 1])
        )
        canvas.save()
        canvas.clipPath(hole, skia.ClipOp.kIntersect, True)
        # The tongue rests low and far back; its tip comes up to the teeth.
        up = m[Channel.TONGUE]
        rest = lips.bottom_y - 0.012 + 0.03 * (1 - up)
        tip = rest + (lips.teeth_y + 0.035 - rest) * up * 0.9
        tongue = pen.smooth(
            self.pose(
                [
                    (-0.24 * lips.wide, rest + 0.10, 0.80),
                    (-0.15 * lips.wide, tip + 0.012, 0.86),
                    (0.0, tip - 0.004, 0.88),
                    (0.15 * lips.wide, tip + 0.012, 0.86),
                    (0.24 * lips.wide, rest + 0.10, 0.80),
                    (0.0, rest + 0.26, 0.80),
                ]
            )
        )
        pen.shade(canvas, tongue, pen.vertical(low - 0.20 * u, low, [argb("#d9737c"), argb("#a8444f")]))
        self._teeth(lips.teeth_y, lips, lower=False)
        if lips.lower_teeth_y is not None:
            self._teeth(lips.lower_teeth_y, lips, lower=True)
        # Lips shade what is behind them.
        pen.stroke(canvas, pen.smooth(top, closed=False), argb("#1c060b", 0.50), 0.045 * u, blur=0.020 * u)
        canvas.restore()

    def _teeth(self, edge: float, lips: _Lips, *, lower: bool) -> None:
        """A row of teeth whose biting edge is at `edge`; what shows is what the lips leave open."""
        wide = 0.31 * lips.wide if not lower else 0.26 * lips.wide
        sign = 1.0 if lower else -1.0
        bow = np.array([0.030, 0.010, 0.0, -0.002, 0.0, 0.010, 0.030]) * -sign * -1.0
        x = np.linspace(-1, 1, 7) * wide
        line = np.column_stack([x, edge + sign * np.abs(bow) * 1.0, np.full(7, 0.93) - 0.10 * (x / 0.31) ** 2])
        back = line.copy()
        back[:, 1] += sign * 0.30
        path = pen.ring(self.pose(line), self.pose(back))
        near, far = self.pose(line)[3, 1], self.pose(back)[3, 1]
        white, grey = ("#efe6df", "#b9a6a2") if lower else ("#fffaf4", "#d8c8c2")
        shader = pen.vertical(
            float(min(near, far)),
            float(max(near, far)),
            [argb(grey if not lower else white), argb(white if not lower else grey)],
        )
        pen.shade(self.canvas, path, shader)
        for x_gap in (-0.62, -0.36, -0.12, 0.12, 0.36, 0.62):
            a, b = self.pose([(x_gap * wide, edge, 0.93), (x_gap * wide, edge + sign * 0.12, 0.92)]).tolist()
            line_paint = skia.Paint(
                AntiAlias=True,
                Color=argb("#a58f8c", 0.30),
                Style=skia.Paint.kStroke_Style,
                StrokeWidth=0.008 * self.unit,
            )
            self.canvas.drawLine(*a, *b, line_paint)

    # On top -----------------------------------------------------------------------------------------------------------

    def glasses(self) -> None:
        if not self.extras.glasses:
            return
        colour, u = self.extras.glasses, self.unit
        for side in (-1.0, 1.0):
            x, y = side * 0.445 * self.features.eye_gap, 0.0
            angle = np.linspace(0, 2 * np.pi, 14, endpoint=False)
            # A soft rectangle.
            cos, sin = np.cos(angle), np.sin(angle)
            shape = np.column_stack(
                [x + 0.345 * np.sign(cos) * np.abs(cos) ** 0.72, y + 0.265 * np.sign(sin) * np.abs(sin) ** 0.72]
            )
            rim = pen.smooth(self.pose(np.column_stack([shape, np.full(14, 1.06) - 0.18 * shape[:, 0] ** 2])))
            pen.fill(self.canvas, rim, argb("#ffffff", 0.055))
            pen.stroke(self.canvas, rim, argb("#000000", 0.16), 0.045 * u, blur=0.022 * u)
            pen.stroke(self.canvas, rim, argb(colour), 0.036 * u)
            self.canvas.save()
            self.canvas.clipPath(rim, skia.ClipOp.kIntersect, True)
            glint = self.pose(
                [(x - 0.30, -0.30, 1.1), (x - 0.10, -0.30, 1.1), (x - 0.34, 0.30, 1.1), (x - 0.54, 0.30, 1.1)]
            )
            path = skia.Path()
            path.addPoly([skia.Point(*point) for point in glint.tolist()], True)
            pen.fill(self.canvas, path, argb("#ffffff", 0.10))
            self.canvas.restore()
            arm = self.pose([(side * 0.785, -0.03, 0.92), (side * 0.98, -0.07, 0.30)])
            pen.stroke(self.canvas, pen.smooth(arm, closed=False), argb(colour), 0.032 * u)
        bridge = self.pose([(-0.115, -0.045, 1.10), (0.0, -0.085, 1.16), (0.115, -0.045, 1.10)])
        pen.stroke(self.canvas, pen.smooth(bridge, closed=False), argb(colour), 0.034 * u)


class _Lips:
    """Four curves of seven points, corner to corner: outer and inner edge of both lips."""

    def __init__(self, m: dict[Channel, float], full: float, broad: float) -> None:
        opening = m[Channel.OPENING]
        press = m[Channel.PRESS] * (1 - min(1.0, 6 * opening))
        pucker, smile, tuck = m[Channel.PUCKER], m[Channel.SMILE], m[Channel.TUCK]
        self.gap = 0.34 * opening
        half = broad * (0.315 + 0.075 * m[Channel.WIDTH] + 0.060 * smile - 0.125 * pucker - 0.018 * self.gap)
        self.wide = half / 0.315
        up = 0.22 * self.gap + 0.030 * m[Channel.LIFT]
        down = 0.78 * self.gap + 0.020 * m[Channel.JAW] * (opening > 0.02)
        forward = 0.03 + 0.075 * pucker
        t = np.array([-1.0, -0.66, -0.30, 0.0, 0.30, 0.66, 1.0])
        x = half * t
        corner = _MOUTH_Y - 0.150 * smile * t**2 + 0.012 * smile * (1 - t**2)
        arch = np.clip(1 - t**2, 0, 1) ** 0.72
        rounder = arch ** (1.0 - 0.25 * pucker)
        inner_top = corner - (up * rounder if opening > 0.004 else 0.0 * rounder)
        inner_bottom = corner + down * rounder
        cupid = np.array([0.0, 0.58, 1.0, 0.84, 1.0, 0.58, 0.0])
        upper = (
            0.080 * full * (1 - 0.42 * press) * (1 - 0.16 * smile) * (1 + 0.22 * pucker) * (1 - 0.25 * m[Channel.LIFT])
        )
        lower_shape = np.array([0.0, 0.62, 0.95, 1.0, 0.95, 0.62, 0.0])
        lower = 0.108 * full * (1 - 0.35 * press) * (1 - 0.10 * smile) * (1 + 0.20 * pucker) * (1 - 0.45 * tuck)
        # Tucked, the lower lip rises to the teeth and turns in.
        inner_bottom = inner_bottom - tuck * (0.6 * down + 0.018) * lower_shape
        outer_top = inner_top - upper * cupid
        outer_bottom = inner_bottom + lower * lower_shape
        self.outer_top = _on_face(np.column_stack([x, outer_top]), forward=forward - 0.02)
        self.inner_top = _on_face(np.column_stack([x, inner_top]), forward=forward)
        self.inner_bottom = _on_face(np.column_stack([x, inner_bottom]), forward=forward)
        self.outer_bottom = _on_face(np.column_stack([x, outer_bottom]), forward=forward - 0.02)
        self.bottom_y = float(inner_bottom[3])
        shown = 0.034 + 0.030 * m[Channel.LIFT] + 0.016 * max(0.0, smile)
        self.teeth_y = float(inner_top[3]) + min(shown + 0.10 * tuck * self.gap, 0.75 * (self.gap + 0.02))
        closed = m[Channel.TEETH]
        self.lower_teeth_y = None
        if closed > 0.25 or self.gap > 0.20:
            open_at = self.bottom_y - 0.030 - 0.02 * closed
            self.lower_teeth_y = open_at + (self.teeth_y + 0.006 - open_at) * closed
            if closed > 0.25:
                # Closed teeth meet in the middle of what is open.
                middle = float(inner_top[3]) + 0.5 * (self.bottom_y - float(inner_top[3]))
                self.teeth_y += (middle - self.teeth_y) * closed
                self.lower_teeth_y += (middle + 0.004 - self.lower_teeth_y) * closed
