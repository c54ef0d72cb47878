"""Pictures of what a world model predicts, as uint8 [H, W, 3]: filmstrips, curves, and calibrations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from rl_lab.components.representation.observations import ONLY
from rl_lab.core.batch import Tree

FRAME_SIDE = 64  # pixels that smaller frames of a filmstrip are enlarged to, by whole factors that do not pass it
MARGIN, HEADER = 72, 52  # pixels left of frames and points and above all drawings, for text
GAP, BAR = 4, 8  # between frames; the height of the bars above them
CURVES_WIDTH, CURVE_HEIGHT, NAME_WIDTH = 600, 64, 88  # of what is drawn; of the entries' names
CALIBRATION_SIDE = 240
_PAPER, _INK, _FRAME = (248, 249, 251), (60, 66, 78), (206, 211, 219)
_TRUE, _PREDICTED = (148, 158, 174), (49, 110, 181)
_LINE = 16  # pixels from one line of text to the next
_FONT = ImageFont.load_default(12)


class _Sheet:
    """Paper to draw and write on."""

    def __init__(self, width: int, height: int) -> None:
        self._image = Image.new("RGB", (width, height), _PAPER)
        self.pen = ImageDraw.Draw(self._image)

    def write(self, x: float, y: float, text: str, anchor: str, colour: tuple[int, int, int] = _INK) -> None:
        """Write beside a point; the anchor is Pillow's: l, m or r across, and m for the middle of the line."""
        self.pen.text((x, y), text, fill=colour, font=_FONT, anchor=anchor)

    def pixels(self) -> Tensor:
        return torch.from_numpy(np.array(self._image))


def draw_dream(seen: Tree, dreamed: Tree, num_context: int) -> dict[str, Tensor]:
    """Draw what was seen [T, ...] beside what the model decoded; it saw the first `num_context` steps only.

    Images become filmstrips with their difference below; vectors become curves.
    """
    named = seen if isinstance(seen, Mapping) else {ONLY: seen}
    decoded: Any = dreamed if isinstance(dreamed, Mapping) else {ONLY: dreamed}
    pictures = {}
    for name, true in named.items():
        title = "dream" if name == ONLY else f"dream_{name}"
        pair = true.cpu(), decoded[name].cpu()
        if true.dim() == 4:
            pictures[title] = filmstrip(*pair, num_context)
        else:
            pictures[title] = curves(*pair, num_context, "entry" if name == ONLY else name)
    return pictures


def filmstrip(true: Tensor, decoded: Tensor, num_context: int, num_frames: int = 16) -> Tensor:
    """Draw images uint8 [T, C, H, W]: seen, decoded, difference, below the step from the last frame the model saw.

    All of these are shown, below a grey bar; as many as there is room for of those it dreamed, below a blue one.
    """
    places = _shown(len(true), num_context, num_frames)
    rows = [true[places].float(), decoded[places].float()]
    rows.append((rows[0] - rows[1]).abs())
    frames = torch.stack([_as_colours(row) for row in rows])  # [3, F, 3, H, W]
    scale = max(FRAME_SIDE // frames.shape[-1], 1)
    frames = frames.repeat_interleave(scale, -1).repeat_interleave(scale, -2)
    frames = frames.permute(0, 1, 3, 4, 2).clamp(0, 255).to(torch.uint8)
    height, width = frames.shape[2:4]
    lefts = [MARGIN + column * (width + GAP) for column in range(len(places))]
    tops = [HEADER + row * (height + GAP) for row in range(3)]
    sheet = _Sheet(lefts[-1] + width + GAP, tops[-1] + height + GAP)
    bars = HEADER - GAP - BAR
    for left, place in zip(lefts, places, strict=True):
        colour = _TRUE if place < num_context else _PREDICTED
        sheet.pen.rectangle((left, bars, left + width - 1, bars + BAR - 1), fill=colour)
        sheet.write(left + width / 2, bars - _LINE / 2, _step(place, num_context), "mm")
        if place in (0, num_context):
            word, ink = ("dreamed", colour) if place == num_context else ("seen", _INK)
            sheet.write(left, bars - 1.5 * _LINE, word, "lm", ink)
    sheet.write(MARGIN - 8, bars - _LINE / 2, "step", "rm")
    for top, name in zip(tops, ("true", "model", "difference"), strict=True):
        sheet.write(MARGIN - 8, top + height / 2, name, "rm")
    picture = sheet.pixels()
    for top, row in zip(tops, frames, strict=True):
        for left, frame in zip(lefts, row, strict=True):
            picture[top : top + height, left : left + width] = frame
    return picture


def _shown(num_steps: int, num_context: int, num_frames: int) -> list[int]:
    """Return the steps to show: the whole context, then steps spread from the first dreamed one to the last."""
    num_dreamed = max(num_steps - num_context, 0)
    room = min(max(num_frames - num_context, 1), num_dreamed)
    spread = [num_context + i * (num_dreamed - 1) // max(room - 1, 1) for i in range(room)]
    return [*range(min(num_context, num_steps)), *spread]


def _step(place: int, num_context: int) -> str:
    """Name a step by its distance from the last one that the model saw."""
    ahead = place - num_context + 1
    return f"{ahead:+d}" if ahead else "0"


def _as_colours(images: Tensor) -> Tensor:
    """Return images [F, C, H, W] with three channels: the newest of several frames, which are grey if C is no three."""
    return images[:, -3:] if images.shape[1] % 3 == 0 else images[:, -1:].expand(-1, 3, -1, -1)


def curves(true: Tensor, decoded: Tensor, num_context: int, name: str = "entry", max_entries: int = 6) -> Tensor:
    """Draw up to six entries of vectors [T, D], one below the other: true in grey, the model in blue upon it.

    A vertical line stands between the last step that the model saw and the first that it dreamed.
    """
    num_steps, num_entries = true.shape
    num_shown = min(num_entries, max_entries)
    left, width = NAME_WIDTH + MARGIN, max(CURVES_WIDTH, 4 * num_steps)
    tops = [HEADER + entry * (CURVE_HEIGHT + 2 * GAP) for entry in range(num_shown)]
    bottom = tops[-1] + CURVE_HEIGHT
    sheet = _Sheet(left + width + 2 * _LINE, bottom + 2 * _LINE)
    spacing = (width - 1) / max(num_steps - 1, 1)
    begins = left + (num_context - 0.5) * spacing
    for entry, top in enumerate(tops):
        sheet.pen.rectangle((left, top, left + width - 1, top + CURVE_HEIGHT - 1), fill="white", outline=_FRAME)
        both = torch.stack([true[:, entry], decoded[:, entry]])
        places, low, high = _placed(both, CURVE_HEIGHT - 2 * GAP)
        sheet.write(8, top + CURVE_HEIGHT / 2, f"{name[:12]} {entry}" if num_entries > 1 else name[:12], "lm")
        sheet.write(left - 6, top + GAP + 3, f"{high:.4g}", "rm")
        sheet.write(left - 6, top + CURVE_HEIGHT - GAP - 3, f"{low:.4g}", "rm")
        for line, colour, thickness in zip(places.tolist(), (_TRUE, _PREDICTED), (4, 2), strict=True):
            points = [(left + i * spacing, top + CURVE_HEIGHT - 1 - GAP - place) for i, place in enumerate(line)]
            for finite, run in itertools.groupby(points, key=lambda point: point[1] == point[1]):
                if finite:  # others leave a gap
                    sheet.pen.line(list(run), fill=colour, width=thickness, joint="curve")
    sheet.pen.line((begins, HEADER - _LINE, begins, bottom - 1), fill=_INK)
    sheet.write(begins - 5, HEADER - _LINE / 2 - 2, "seen", "rm")
    sheet.write(begins + 5, HEADER - _LINE / 2 - 2, "dreamed", "lm", _PREDICTED)
    for x, text, colour, thickness in ((left, "true", _TRUE, 4), (left + 80, "model", _PREDICTED, 2)):
        sheet.pen.line((x, _LINE, x + 24, _LINE), fill=colour, width=thickness)
        sheet.write(x + 30, _LINE, text, "lm")
    if num_shown < num_entries:
        sheet.write(left + width, _LINE, f"{num_shown} of {num_entries} entries", "rm")
    sheet.write(8, bottom + _LINE, "step", "lm")
    for place in _marked(num_steps, num_context):
        sheet.write(left + place * spacing, bottom + _LINE, _step(place, num_context), "mm")
    return sheet.pixels()


def _marked(num_steps: int, num_context: int) -> list[int]:
    """Return the steps below which their numbers stand: the first, the last seen one, and round ones after it."""
    ahead = num_steps - num_context
    every = next(size for size in itertools.chain((1, 2, 5), itertools.count(10, 10)) if ahead <= 12 * size)
    return sorted({0, *range(num_context - 1, num_steps, every)})


def _placed(values: Tensor, height: int) -> tuple[Tensor, float, float]:
    """Return how high values stand between the lowest and the highest (NaN where they are not finite), and these."""
    values = values.cpu().double()
    finite = values.isfinite()
    if not finite.any():
        return torch.full_like(values, torch.nan), 0.0, 0.0
    low, high = values[finite].min(), values[finite].max()
    if low < high:
        places = ((values - low) / (high - low) * (height - 1)).round()
    else:
        places = torch.full_like(values, height // 2)
    return torch.where(finite, places, torch.nan), low.item(), high.item()


def calibration_picture(predicted: Tensor, observed: Tensor, what: str, size: int = CALIBRATION_SIDE) -> Tensor:
    """Draw predicted (upwards) against observed values (to the right); on the diagonal they agree."""
    places, low, high = _placed(torch.stack([observed, predicted]), size - 2 * GAP)
    left, top = MARGIN, HEADER
    right, bottom = left + size - 1, top + size - 1
    sheet = _Sheet(right + 2 * _LINE, bottom + 1 + 2 * _LINE)
    sheet.pen.rectangle((left, top, right, bottom), fill="white", outline=_FRAME)
    sheet.pen.line((left + GAP, bottom - GAP, right - GAP, top + GAP), fill=_TRUE)
    for across, up in places[:, places.isfinite().all(0)].T.tolist():
        x, y = left + GAP + across, bottom - GAP - up
        sheet.pen.rectangle((x - 1, y - 1, x + 1, y + 1), fill=_PREDICTED)
    sheet.write(left, _LINE, f"predicted {what}", "lm", _PREDICTED)
    sheet.write(left, 2 * _LINE, "line: predicted = observed", "lm")
    sheet.write((left + right) / 2, bottom + _LINE, f"observed {what}", "mm")
    for number, x, y in ((low, left, bottom - GAP), (high, right, top + GAP)):
        sheet.write(left - 6, y, f"{number:.4g}", "rm")
        sheet.write(x, bottom + _LINE, f"{number:.4g}", "mm")
    return sheet.pixels()
