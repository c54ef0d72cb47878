"""Pictures of what a world model predicts, as uint8 [H, W, 3]: filmstrips, curves, and calibrations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.components.representation.observations import ONLY
from rl_lab.core.batch import Tree

FRAME_SIDE = 64  # pixels of a frame in a filmstrip, at least
CALIBRATION_SIDE = 240
_PAPER, _TRUE, _PREDICTED = (248, 249, 251), (148, 158, 174), (49, 110, 181)


def draw_dream(seen: Tree, dreamed: Tree, num_context: int) -> dict[str, Tensor]:
    """Draw what was seen [T, ...] above what the model decoded; it saw the first `num_context` steps only.

    Images become filmstrips with their difference below; vectors become curves.
    """
    named = seen if isinstance(seen, Mapping) else {ONLY: seen}
    decoded: Any = dreamed if isinstance(dreamed, Mapping) else {ONLY: dreamed}
    pictures = {}
    for name, true in named.items():
        title = "dream" if name == ONLY else f"dream_{name}"
        draw = filmstrip if true.dim() == 4 else curves
        pictures[title] = draw(true.cpu(), decoded[name].cpu(), num_context)
    return pictures


def filmstrip(true: Tensor, decoded: Tensor, num_context: int, num_frames: int = 16) -> Tensor:
    """Draw images uint8 [T, C, H, W]: seen, decoded, difference; the frames that the model saw have a bar above."""
    chosen = torch.arange(num_frames) * (len(true) - 1) // (num_frames - 1) if len(true) > num_frames else None
    places = torch.arange(len(true)) if chosen is None else chosen
    rows = [true[places].float(), decoded[places].float()]
    rows.append((rows[0] - rows[1]).abs())
    frames = torch.stack([_as_colours(row) for row in rows])  # [3, F, 3, H, W]
    scale = max(FRAME_SIDE // frames.shape[-1], 1)
    frames = F.pad(frames.repeat_interleave(scale, -1).repeat_interleave(scale, -2), (2, 2, 4, 2), value=255.0)
    for column, place in enumerate(places.tolist()):
        colour = torch.tensor(_TRUE if place < num_context else _PREDICTED).float()[:, None, None]
        frames[:, column, :, :3, 2:-2] = colour
    return frames.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1).clamp(0, 255).to(torch.uint8)


def _as_colours(images: Tensor) -> Tensor:
    """Return images [F, C, H, W] with three channels: the newest of several frames, which are grey if C is no three."""
    return images[:, -3:] if images.shape[1] % 3 == 0 else images[:, -1:].expand(-1, 3, -1, -1)


def curves(true: Tensor, decoded: Tensor, num_context: int, max_entries: int = 6, height: int = 48) -> Tensor:
    """Draw up to six entries of vectors [T, D], one below the other: seen in grey, decoded in blue."""
    width = max(4 * len(true), 64)
    panels = []
    for entry in range(min(true.shape[1], max_entries)):
        both = torch.stack([true[:, entry], decoded[:, entry]]).double()
        low, high = both.min(), both.max()
        levels = ((both - low) / (high - low).clamp(min=1e-9) * (height - 5)).round().long() + 2
        panel = torch.tensor(_PAPER, dtype=torch.uint8).repeat(height, width, 1)
        panel[:, 4 * num_context : 4 * num_context + 1] = torch.tensor(_TRUE, dtype=torch.uint8)
        for line, colour in zip(levels, (_TRUE, _PREDICTED), strict=True):
            for step, level in enumerate(line.tolist()):
                panel[height - 2 - level : height - level, 4 * step : 4 * step + 4] = torch.tensor(
                    colour, dtype=torch.uint8
                )
        panels.append(panel)
    return torch.cat(panels)


def calibration_picture(predicted: Tensor, observed: Tensor, size: int = CALIBRATION_SIDE) -> Tensor:
    """Draw predicted (upwards) against observed values (to the right); on the diagonal they agree."""
    both = torch.stack([observed, predicted]).cpu().double()
    low, high = both.min(), both.max()
    at = ((both - low) / (high - low).clamp(min=1e-9) * (size - 5)).round().long() + 2  # two pixels of margin
    picture = torch.tensor(_PAPER, dtype=torch.uint8).repeat(size, size, 1)
    line = torch.arange(2, size - 2)
    picture[size - 1 - line, line] = torch.tensor(_TRUE, dtype=torch.uint8)
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            picture[size - 1 - at[1] + down, at[0] + right] = torch.tensor(_PREDICTED, dtype=torch.uint8)
    return picture
