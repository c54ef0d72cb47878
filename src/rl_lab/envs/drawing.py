"""Pictures of our worlds, drawn with Pillow at three times their size and averaged down, so that edges are smooth."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

WIDTH, HEIGHT = 300, 200
_SCALE = 3  # drawn pixels per pixel of the picture

_PAPER = (248, 249, 251)
_SHADE = (228, 232, 239)
_LINE = (148, 158, 174)
_DARK = (45, 55, 72)
_BLUE = (49, 110, 181)
_ORANGE = (226, 125, 47)
_RED = (203, 67, 67)
_GREEN = (64, 160, 98)

Point = tuple[float, float]


class Canvas:
    """A picture whose coordinates are world units: x to the right and y upwards, from a centre."""

    def __init__(self, width: int, height: int, *, unit: float, center: Point) -> None:
        self._image = Image.new("RGB", (width * _SCALE, height * _SCALE), _PAPER)
        self._draw = ImageDraw.Draw(self._image)
        self._unit, self._center = unit * _SCALE, (center[0] * _SCALE, center[1] * _SCALE)

    def _place(self, point: Point) -> Point:
        return self._center[0] + point[0] * self._unit, self._center[1] - point[1] * self._unit

    def line(self, start: Point, end: Point, width: float, color: Sequence[int]) -> None:
        """Draw a line with round ends; the width is in world units."""
        self._draw.line([self._place(start), self._place(end)], fill=tuple(color), width=round(width * self._unit))
        self.disc(start, width / 2, color)
        self.disc(end, width / 2, color)

    def disc(self, center: Point, radius: float, color: Sequence[int]) -> None:
        """Draw a filled circle."""
        x, y = self._place(center)
        r = radius * self._unit
        self._draw.ellipse([x - r, y - r, x + r, y + r], fill=tuple(color))

    def ring(self, center: Point, radius: float, width: float, color: Sequence[int]) -> None:
        """Draw a circle's outline."""
        x, y = self._place(center)
        r = radius * self._unit
        self._draw.ellipse([x - r, y - r, x + r, y + r], outline=tuple(color), width=round(width * self._unit))

    def box(self, center: Point, width: float, height: float, radius: float, color: Sequence[int]) -> None:
        """Draw a filled rectangle with rounded corners."""
        left, top = self._place((center[0] - width / 2, center[1] + height / 2))
        right, bottom = self._place((center[0] + width / 2, center[1] - height / 2))
        self._draw.rounded_rectangle([left, top, right, bottom], radius=radius * self._unit, fill=tuple(color))

    def polygon(self, points: Sequence[Point], color: Sequence[int]) -> None:
        """Draw a filled polygon."""
        self._draw.polygon([self._place(point) for point in points], fill=tuple(color))

    def frame(self) -> np.ndarray:
        """Return the picture, uint8 [H, W, 3]."""
        return np.array(self._image.reduce(_SCALE))


def cart_pole(x: float, theta: float) -> np.ndarray:
    """Draw a cart on its track and its pole; theta is 0 upright."""
    canvas = Canvas(WIDTH, HEIGHT, unit=54, center=(WIDTH / 2, 128))
    canvas.line((-2.6, -0.19), (2.6, -0.19), 0.05, _SHADE)
    for end in (-2.4, 2.4):
        canvas.line((end, -0.3), (end, -0.08), 0.05, _LINE)
    canvas.line((-2.4, -0.19), (2.4, -0.19), 0.05, _LINE)
    for wheel in (-0.2, 0.2):
        canvas.disc((x + wheel, -0.15), 0.08, _DARK)
    canvas.box((x, 0.0), 0.7, 0.28, 0.06, _DARK)
    tip = (x + math.sin(theta), math.cos(theta))
    canvas.line((x, 0.0), tip, 0.11, _ORANGE)
    canvas.disc(tip, 0.09, _ORANGE)
    canvas.disc((x, 0.0), 0.045, _PAPER)
    return canvas.frame()


def pendulum(theta: float) -> np.ndarray:
    """Draw a rod on its pivot; theta is 0 upright and grows anticlockwise, as in Gymnasium's picture."""
    canvas = Canvas(WIDTH, HEIGHT, unit=78, center=(WIDTH / 2, HEIGHT / 2))
    canvas.ring((0.0, 0.0), 1.0, 0.015, _SHADE)
    canvas.line((0.0, 1.09), (0.0, 1.16), 0.03, _GREEN)
    tip = (-math.sin(theta), math.cos(theta))
    canvas.line((0.0, 0.0), tip, 0.17, _RED)
    canvas.disc((0.0, 0.0), 0.055, _DARK)
    return canvas.frame()


def point_mass(x: float, y: float, x_dot: float, y_dot: float) -> np.ndarray:
    """Draw a point between its walls, the goal at the origin, and the point's velocity."""
    canvas = Canvas(WIDTH, HEIGHT, unit=60, center=(WIDTH / 2, HEIGHT / 2))
    canvas.box((0.0, 0.0), 3.2, 3.2, 0.06, _LINE)
    canvas.box((0.0, 0.0), 3.14, 3.14, 0.05, _PAPER)
    for place in (-1.0, 0.0, 1.0):
        canvas.line((place, -1.5), (place, 1.5), 0.012, _SHADE)
        canvas.line((-1.5, place), (1.5, place), 0.012, _SHADE)
    canvas.ring((0.0, 0.0), 0.14, 0.04, _GREEN)
    canvas.disc((0.0, 0.0), 0.04, _GREEN)
    canvas.line((x, y), (x + 0.25 * x_dot, y + 0.25 * y_dot), 0.035, _ORANGE)
    canvas.disc((x, y), 0.09, _BLUE)
    return canvas.frame()


def grid(agent: Sequence[int], goal: Sequence[int], walls: np.ndarray) -> np.ndarray:
    """Draw a grid's cells, walls bool [size, size], agent and goal, both (row, column): a square of HEIGHT pixels."""
    size = len(walls)
    canvas = Canvas(HEIGHT, HEIGHT, unit=HEIGHT / size, center=(0, 0))
    for row in range(size):
        for column in range(size):
            color = _DARK if walls[row, column] else _SHADE
            canvas.box((column + 0.5, -row - 0.5), 0.94, 0.94, 0.08, color)
    middle = (goal[1] + 0.5, -goal[0] - 0.5)
    star = [
        (middle[0] + radius * math.sin(angle), middle[1] + radius * math.cos(angle))
        for corner in range(10)
        for radius, angle in [((0.38, 0.16)[corner % 2], corner * math.pi / 5)]
    ]
    canvas.polygon(star, _GREEN)
    canvas.disc((agent[1] + 0.5, -agent[0] - 0.5), 0.3, _BLUE)
    return canvas.frame()
