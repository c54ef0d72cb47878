"""Chart: learning curves as a picture (SVG), a panel for each experiment; nothing but text is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]
WIDTH, HEIGHT, GAP = 300, 200, 16  # of a panel, in pixels, and between panels
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 30, 36  # margins of the plotted area inside a panel
NUM_COLUMNS = 3
OURS, THEIRS, AXIS, GRID = "#1f6fb2", "#c2491d", "#444444", "#e4e4e4"


@dataclass(frozen=True)
class Published:
    """A score that somebody else reports."""

    x: float
    mean: float
    spread: float
    source: str


@dataclass(frozen=True)
class Panel:
    """One experiment: the mean of its runs, the range between them, each run, and published scores."""

    title: str
    mean: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()  # x, low, high
    runs: Sequence[Sequence[Point]] = ()
    published: Sequence[Published] = field(default_factory=tuple)
    x_label: str = "env_steps"


def chart(panels: Sequence[Panel], y_label: str) -> str:
    """Return the picture of all panels, in rows of three."""
    num_columns = min(NUM_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)
    width, height = num_columns * (WIDTH + GAP) + GAP, num_rows * (HEIGHT + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i, panel in enumerate(panels):
        x, y = GAP + i % num_columns * (WIDTH + GAP), GAP + i // num_columns * (HEIGHT + GAP)
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel, y_label), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers that cover a range."""
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(step for step in (power, 2 * power, 2.5 * power, 5 * power, 10 * power) if span / step <= most)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * i for i in range(first, max(last, first + 1) + 1)]


def _panel(panel: Panel, y_label: str) -> list[str]:
    xs = [x for x, _ in panel.mean] + [entry.x for entry in panel.published]
    ys = [
        value for _, *values in (*panel.mean, *panel.band, *(p for run in panel.runs for p in run)) for value in values
    ]
    ys += [value for entry in panel.published for value in (entry.mean - entry.spread, entry.mean + entry.spread)]
    last = max(xs) or 1.0
    x_ticks, y_ticks = [tick for tick in ticks(0.0, last) if tick <= last], ticks(min(ys), max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        right, up = x / last, (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return LEFT + right * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="18" font-weight="bold" font-size="12">{escape(panel.title)}</text>']
    for value in y_ticks:
        (x0, y), (x1, _) = place(0.0, value), place(last, value)
        parts.append(f'<line x1="{x0:.1f}" y1="{y:.1f}" x2="{x1:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(_label(x0 - 5, y + 4, _short(value), "end"))
    for value in x_ticks:
        x, y = place(value, y_ticks[0])
        parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{y + 3:.1f}" stroke="{AXIS}"/>')
        parts.append(_label(x, y + 14, _short(value), "middle"))
    parts.append(_label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, panel.x_label, "middle"))
    parts.append(
        _label(0, 0, y_label, "middle", f' transform="translate(11 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)"')
    )
    if panel.band:
        outline = [(x, high) for x, _, high in panel.band] + [(x, low) for x, low, _ in reversed(panel.band)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in outline))
        parts.append(f'<polygon points="{path}" fill="{OURS}" fill-opacity="0.15"/>')
    parts += [_line([place(*point) for point in run], 'stroke-width="0.7" stroke-opacity="0.5"') for run in panel.runs]
    parts.append(_line([place(*point) for point in panel.mean], 'stroke-width="2"'))
    for entry in panel.published:
        (x, y), (_, low), (_, high) = (place(entry.x, entry.mean + sign * entry.spread) for sign in (0, -1, 1))
        parts.append(f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}" stroke="{THEIRS}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{THEIRS}"/>')
        parts.append(_label(x - 6, y - 6, entry.source, "end", f' style="fill:{THEIRS}"'))
    return parts


def _line(points: Sequence[Point], style: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{OURS}" {style}/>'


def _label(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{AXIS}"{more}>{escape(text)}</text>'


def _short(value: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
