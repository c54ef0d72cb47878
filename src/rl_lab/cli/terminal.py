"""Drawing in a terminal: learning curves with axes, and tables of plain text."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Collection, Sequence

Point = tuple[float, float]
_LARGEST = 1e300  # beyond it differences are not finite
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille: bits of the 4 x 2 dots in a character


def draw_curve(
    points: Sequence[Point],
    *,
    title: str,
    width: int = 72,
    height: int = 16,
    target: float | None = None,
    band: Sequence[tuple[float, float, float]] = (),
    unicode: bool | None = None,
) -> str:
    """Draw y over x as text: `height` rows of plot, axes and title around it, at most `width` characters wide.

    `target` is drawn as a dashed line, `band` (x, low, high) as shading. Points that are not finite are left out.
    `unicode=None` asks standard output what it can show.
    """
    unicode = shows_unicode() if unicode is None else unicode
    points = sorted(point for point in points if all(abs(value) < _LARGEST for value in point))
    band = sorted(entry for entry in band if all(abs(value) < _LARGEST for value in entry))
    if not points:
        return f"{title}\n(nothing to draw yet)"
    heights = [y for _, y in points] + [y for _, *pair in band for y in pair] + ([] if target is None else [target])
    low, high = _widened(min(heights), max(heights))
    labels = {y: short(y) for y in ticks_within(low, high, max(2, height // 3))}
    margin = max(map(len, labels.values()))
    plot = _Plot(
        x_range=_widened(points[0][0], points[-1][0]),
        y_range=(low, high),
        width=max(8, width - margin - 2),
        height=max(2, height),
        unicode=unicode,
    )
    plot.shade(band)
    if target is not None:
        plot.dash(target)
    plot.line(points)

    rows = plot.rows()
    at_row = {plot.row(y): label for y, label in labels.items()}
    vertical, tick, corner, horizontal, below = "│┤└─┬" if unicode else "|++-+"
    lines = [title]
    for number, row in enumerate(rows):
        label = at_row.get(number, "")
        lines.append(f"{label:>{margin}} {tick if label else vertical}{row}".rstrip())
    axis, numbers = plot.x_axis(horizontal, below, offset=margin + 2)
    lines += [" " * (margin + 1) + corner + axis, numbers]
    if target is not None:
        lines.append(" " * (margin + 2) + f"{plot.dash_mark * 3} {short(target)} = target")
    return "\n".join(lines)


class _Plot:
    """A raster of characters; in braille each holds 2 x 4 dots."""

    def __init__(self, x_range: Point, y_range: Point, width: int, height: int, unicode: bool) -> None:
        self.x_range, self.y_range, self.width, self.height, self.unicode = x_range, y_range, width, height, unicode
        self.per_column, self.per_row = (2, 4) if unicode else (1, 1)
        self.dash_mark = "╌" if unicode else "-"
        self.dots: set[tuple[int, int]] = set()
        self.marks = [[" "] * width for _ in range(height)]

    def dot(self, x: float, y: float) -> tuple[int, int]:
        """Return the column and row of the dot at a point."""
        num_columns, num_rows = self.width * self.per_column, self.height * self.per_row
        across = (x - self.x_range[0]) / (self.x_range[1] - self.x_range[0])
        down = (self.y_range[1] - y) / (self.y_range[1] - self.y_range[0])
        return round(across * (num_columns - 1)), round(down * (num_rows - 1))

    def row(self, y: float) -> int:
        """Return the row of characters at a height."""
        return self.dot(self.x_range[0], y)[1] // self.per_row

    def line(self, points: Sequence[Point]) -> None:
        dots = [self.dot(*point) for point in points]
        self.dots.update(dots)
        for (x0, y0), (x1, y1) in itertools.pairwise(dots):
            length = max(abs(x1 - x0), abs(y1 - y0), 1)
            for i in range(length + 1):
                self.dots.add((round(x0 + (x1 - x0) * i / length), round(y0 + (y1 - y0) * i / length)))

    def dash(self, y: float) -> None:
        self.marks[self.row(y)] = [self.dash_mark if column % 2 == 0 else " " for column in range(self.width)]

    def shade(self, band: Sequence[tuple[float, float, float]]) -> None:
        for (x0, *low_high0), (x1, *low_high1) in itertools.pairwise(band):
            first, last = self.dot(x0, 0)[0] // self.per_column, self.dot(x1, 0)[0] // self.per_column
            for column in range(first, last + 1):
                part = (column - first) / max(last - first, 1)
                low, high = (a + (b - a) * part for a, b in zip(low_high0, low_high1, strict=True))
                for row in range(self.row(high), self.row(low) + 1):
                    self.marks[row][column] = "░" if self.unicode else ":"

    def rows(self) -> list[str]:
        cells: dict[tuple[int, int], int] = {}
        for x, y in self.dots:
            cell = (x // self.per_column, y // self.per_row)
            cells[cell] = cells.get(cell, 0) | _DOTS[y % self.per_row][x % self.per_column]
        for (column, row), bits in cells.items():
            self.marks[row][column] = chr(0x2800 + bits) if self.unicode else "*"
        return ["".join(row) for row in self.marks]

    def x_axis(self, horizontal: str, below: str, offset: int) -> tuple[str, str]:
        """Return the axis with its ticks, and the line of numbers under it."""
        axis = [horizontal] * self.width
        numbers = [" "] * (offset + self.width)
        free_from = 0
        for x in ticks_within(*self.x_range, max(2, self.width // 14)):
            column = self.dot(x, self.y_range[0])[0] // self.per_column
            label = short(x)
            start = min(max(offset + column - len(label) // 2, 0), len(numbers) - len(label))
            if start >= free_from:
                axis[column] = below
                numbers[start : start + len(label)] = label
                free_from = start + len(label) + 1
        return "".join(axis), "".join(numbers).rstrip()


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return about so many round numbers from the last below `low` to the first above `high`."""
    low, high = _widened(low, high)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * (1.0 - 1e-12))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def ticks_within(low: float, high: float, about: int) -> list[float]:
    """Return about so many round numbers inside a range, at least two: a scale needs them."""
    for num_ticks in (about, 4 * about, 16 * about):
        found = [tick for tick in ticks(low, high, num_ticks) if low <= tick <= high]
        if len(found) >= 2:
            return found
    return [low, high]


def short(value: float) -> str:
    """Return a number as a label: 20k, 1.5M, 0.25."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if limit <= abs(value) < 1e12:
            return f"{value / (1e3 if suffix == 'k' else limit):.6g}{suffix}"
    return f"{value:.6g}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return the lines of a table; the columns in `right` are right-aligned."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    rule = "─" if shows_unicode() else "-"
    lines = [header, [rule * width for width in widths], *rows]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def shows_unicode() -> bool:
    """Whether standard output can show more than ASCII."""
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")


def _widened(low: float, high: float) -> Point:
    """Return a range that is not empty."""
    if high > low:
        return low, high
    room = abs(low) * 0.1 or 1.0
    return low - room, high + room
