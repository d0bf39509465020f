"""The portrait: one frame of motion drawn as a picture, part by part, from the back to the front.

1. Drawing is a pure function of (character, motion): the same motion is the same picture, in whatever order.
2. Light comes from the upper left. Catch-lights stay with the light, not with the iris.
3. A part's shape is made in head space and projected once; only what is inside the mouth and the eyes is clipped.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from duplexd.models.face.drawing import pen
from duplexd.models.face.drawing.character import Character
from duplexd.models.face.drawing.library import skia
from duplexd.models.face.drawing.pen import argb, mix
from duplexd.models.face.drawing.pose import SIZE, Points, Pose
from duplexd.models.face.drawing.resting import EYE_X, EYE_Y, Layer, Paints, Shape, Sketch, cross, on_face
from duplexd.models.face.drawing.texture import Collage, surface_on
from duplexd.models.face.motion import Channel, Motion, clamped

Picture = npt.NDArray[np.uint8]  #: (height, width, 4), BGRA

_MOUTH_Y = 0.735


class Portrait:
    """Draws one character.

    Args:    size: pixels of a side.
    """

    def __init__(self, character: Character, *, size: int = SIZE) -> None:
        self.character, self.size = character, size
        self.pixels: Picture = np.zeros((size, size, 4), np.uint8)
        self._surface = surface_on(self.pixels)
        self.canvas = self._surface.getCanvas()
        self._backdrop = self._paint_backdrop()
        self.paints, self.collage = Paints(character, size), Collage(self.pixels)

    def draw(self, motion: Motion) -> Picture:
        """One frame (CHANNELS,) -> the picture, which the next call overwrites."""
        self.pixels[:] = self._backdrop
        part = _Frame(self, clamped(motion))
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
        self.canvas.drawPaint(skia.Paint(Shader=shader, Dither=True))
        return self.pixels.copy()


class _Frame(Sketch):
    """One frame being drawn."""

    def __init__(self, portrait: Portrait, motion: Motion) -> None:
        super().__init__(portrait.canvas, portrait.character, motion, Pose(motion, size=portrait.size))
        self.paints, self.collage = portrait.paints, portrait.collage

    # Behind the face --------------------------------------------------------------------------------------------------

    def hair(self, layer: Layer) -> None:
        shapes, texture = self.hair_shapes(layer), self.paints.hair.get(layer)
        if texture is not None:
            self.collage.lay(texture, self.paints.hair_pins(layer, self.pose), *shapes)
            return
        for shape, lock in zip(shapes, self.locks_of(layer), strict=True):
            pen.fill(self.canvas, shape, argb(self.dye(lock)[0]))

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
        rows = [top, top + 0.24 * (bottom - top), top + 0.75 * (bottom - top)]
        self.collage.lay_gradient([dark, dark, self.colours.skin], rows, path)

    def trunk(self) -> None:
        pins = self.pose.trunk(Paints.TRUNK_PINS)
        self.collage.lay_whole(self.paints.trunk, pins, top=pins[0, 1])

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
        self.collage.lay(self.paints.skin, self.pose(Paints.SKIN_PINS), pen.smooth(self.outline))
        c, smile = self.colours, max(0.0, self.m[Channel.SMILE])
        rise = 0.05 * (smile + 0.5 * self.m[Channel.SQUINT])
        if smile > 0.1:
            for side in (-1.0, 1.0):
                x, y = self.pose(on_face([(side * 0.58, 0.34 - rise)]))[0].tolist()
                pen.glow(self.canvas, (x, y), self.unit * 0.27, self.unit * 0.19, c.blush, 0.20 * smile)
            x, y = self.pose(on_face([(-0.60, 0.15 - rise)]))[0].tolist()
            pen.glow(self.canvas, (x, y), self.unit * 0.20, self.unit * 0.12, "#ffffff", 0.16 * smile)

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
        x = EYE_X * f.eye_gap + (along - 0.47) * 0.50 * big
        corner = EYE_Y + 0.035 - along * (0.050 + 0.10 * f.eye_tilt)
        rise = np.array([0.0, 0.118, 0.188, 0.186, 0.108, 0.0]) * big
        fall = np.array([0.0, 0.050, 0.090, 0.098, 0.062, 0.0]) * big * (1 - 0.55 * squint)
        lower = corner + fall
        # A shut eye is a line that hangs a little, where the lower lid is.
        shut = corner + fall * 0.92
        open_ = corner - rise * (1 - 0.10 * squint)
        upper = shut + (open_ - shut) * lid
        upper = np.minimum(upper, lower - 0.002)
        return on_face(np.column_stack([side * x, upper])), on_face(np.column_stack([side * x, lower]))

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
            self._iris(side, opening)
            shadow = upper.copy()
            shadow[:, 1] += 0.018 * u
            pen.stroke(canvas, pen.smooth(shadow, closed=False), argb("#2a1626", 0.34), 0.055 * u, blur=0.018 * u)
            canvas.restore()
            corner = self.pose(
                on_face([(side * (EYE_X * self.features.eye_gap - 0.222 * self.features.eyes), EYE_Y + 0.038)])
            )[0].tolist()
            canvas.drawCircle(
                *corner, 0.017 * u, skia.Paint(AntiAlias=True, Color=argb(mix(c.blush, "#b3565c", 0.5), 0.75))
            )
        self._lashes(side, upper, lower)

    def _iris(self, side: float, opening: pen.Path) -> None:
        canvas, u = self.canvas, self.unit
        f, m = self.features, self.m
        x3 = side * EYE_X * f.eye_gap + 0.135 * m[Channel.GAZE_X]
        y3 = EYE_Y - 0.044 - 0.085 * m[Channel.GAZE_Y]
        x, y = self.pose(on_face([(x3, y3)]))[0].tolist()
        r = 0.150 * f.eyes * u
        # Seen from the side it is narrower.
        across = r * (1 - 0.10 * abs(m[Channel.GAZE_X]))
        disc = skia.Path()
        disc.addOval(skia.Rect.MakeLTRB(x - across, y - r, x + across, y + r))
        self.collage.lay(self.paints.iris, cross(x, y, across, r), disc, within=opening)
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
        base = EYE_Y + 0.02 - along * (0.055 + 0.10 * f.eye_tilt)
        arch = np.array([0.045, 0.172, 0.248, 0.250, 0.185, 0.080]) * f.eyes * (1 + 0.08 * max(0.0, lid - 1))
        raised = 0.02 * m[Channel.BROW_LEFT if side < 0 else Channel.BROW_RIGHT]
        crease = on_face(np.column_stack([upper[:, 0], base - arch - raised]))
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
        top = self.pose(on_face(np.column_stack([side * x, y - thick]), forward=0.02))
        bottom = self.pose(on_face(np.column_stack([side * x, y + thick * 0.8]), forward=0.02))
        path = pen.ring(top, bottom)
        pen.soft(self.canvas, path, argb(c.brows, 0.55), self.unit * 0.012)
        pen.fill(self.canvas, path, argb(c.brows, 0.80))
        if knit > 0.15:
            fold = self.pose(on_face([(side * 0.075, -0.40), (side * 0.085, -0.30)], forward=0.02))
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
                on_face(
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
        self._tongue(lips, m[Channel.TONGUE])
        self._teeth(lips.teeth_y, lips, lower=False)
        if lips.lower_teeth_y is not None:
            self._teeth(lips.lower_teeth_y, lips, lower=True)
        # Lips shade what is behind them.
        pen.stroke(canvas, pen.smooth(top, closed=False), argb("#1c060b", 0.50), 0.045 * u, blur=0.020 * u)
        canvas.restore()

    def _tongue(self, lips: _Lips, up: float) -> None:
        """At rest its back fills the lower half of a wide mouth, less of a small or rounded one; its tip comes up to
        the teeth.
        """
        high = min(0.06 + 0.30 * lips.gap, (0.2 + 1.6 * lips.gap) * lips.gap)
        rest = lips.bottom_y - high * (1 - 0.8 * self.m[Channel.PUCKER])
        tip = rest + (lips.teeth_y + 0.035 - rest) * 0.9 * up
        side, floor, w = tip + 0.30 * (lips.bottom_y - tip), lips.bottom_y + 0.03, lips.wide
        line = [
            (-0.25 * w, floor, 0.84), (-0.175 * w, side, 0.86), (0.0, tip, 0.88), (0.175 * w, side, 0.86),
            (0.25 * w, floor, 0.84), (0.0, floor + 0.16, 0.84),
        ]  # fmt: skip
        points = self.pose(line)
        top, bottom = float(points[2, 1]), float(points[0, 1])
        # Nearer the teeth there is more light.
        edge, back = mix("#b9555f", "#d9737c", up), mix("#843440", "#a8444f", up)
        pen.shade(self.canvas, pen.smooth(points), pen.vertical(top, bottom, [argb(edge), argb(back)]))
        groove = self.pose([(0.0, tip + 0.03, 0.88), (0.0, floor, 0.86)])
        pen.stroke(
            self.canvas,
            pen.smooth(groove, closed=False),
            argb("#5d1c27", 0.45 * (1 - up)),
            0.020 * self.unit,
            blur=0.012 * self.unit,
        )

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
        # Rounded lips are full to the sides too: a narrow mouth with the shape of a wide one ends in a point.
        side = 0.62 + 0.16 * pucker
        lower_shape = np.array([0.0, side, 0.95, 1.0, 0.95, side, 0.0])
        lower = 0.108 * full * (1 - 0.35 * press) * (1 - 0.10 * smile) * (1 - 0.08 * pucker) * (1 - 0.45 * tuck)
        # Tucked, the lower lip rises to the teeth and turns in.
        inner_bottom = inner_bottom - tuck * (0.6 * down + 0.018) * lower_shape
        outer_top = inner_top - upper * cupid
        outer_bottom = inner_bottom + lower * lower_shape
        outer, inner = x * (1 + 0.16 * pucker), x * (1 - 0.10 * pucker)
        self.outer_top = on_face(np.column_stack([outer, outer_top]), forward=forward - 0.02)
        self.inner_top = on_face(np.column_stack([inner, inner_top]), forward=forward)
        self.inner_bottom = on_face(np.column_stack([inner, inner_bottom]), forward=forward)
        self.outer_bottom = on_face(np.column_stack([outer, outer_bottom]), forward=forward - 0.02)
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
