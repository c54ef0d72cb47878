"""Normalisers: running statistics as components, so that an exported agent has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_lab.core.ranges import Unit


class PercentileScale(nn.Module):
    """A moving average of the range between two percentiles, at least one; dividing by it tames the scale of values.

    `floor_first` bounds the range before it is averaged, starting at one (TD-MPC2); otherwise the average starts at
    zero and is bounded when it is read (Dreamer).
    """

    average: Tensor
    levels: Tensor

    def __init__(self, rate: Unit = 0.01, low: Unit = 0.05, high: Unit = 0.95, floor_first: bool = True) -> None:
        super().__init__()
        self.rate, self.floor_first = rate, floor_first
        self.register_buffer("average", torch.ones(()) if floor_first else torch.zeros(()))
        self.register_buffer("levels", torch.tensor([low, high]), persistent=False)

    @property
    def value(self) -> Tensor:
        """The scale to divide by."""
        return self.average if self.floor_first else self.average.clamp(min=1.0)

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """Move the average towards the range of these values."""
        low, high = torch.quantile(values.detach().float().flatten(), self.levels)
        spread = (high - low).clamp(min=1.0) if self.floor_first else high - low
        self.average.lerp_(spread, self.rate)
