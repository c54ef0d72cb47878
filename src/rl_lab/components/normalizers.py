"""Normalisers: running statistics as components, so that an exported agent has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_lab.core.ranges import Count, Positive, Unit


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
        """Move the average towards the range of these values; one that is not finite is passed over."""
        low, high = torch.quantile(values.detach().float().flatten(), self.levels)
        spread = (high - low).clamp(min=1.0) if self.floor_first else high - low
        self.average.lerp_(torch.where(spread.isfinite(), spread, self.average), self.rate)


class RunningNormalizer(nn.Module):
    """Mean and deviation of vectors seen so far, kept in double precision; at most `max_count` of them weigh in.

    Entries that vary by less than `epsilon` are only shifted.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, size: Count, max_count: Count = 1_000_000, epsilon: Positive = 1e-4) -> None:
        super().__init__()
        self.max_count, self.epsilon = max_count, epsilon
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """Take vectors [..., size] into account (Chan et al. 1979)."""
        rows = values.detach().double().reshape(-1, values.shape[-1])
        own_variance, own_mean = torch.var_mean(rows, 0, correction=0)
        total = self.count + len(rows)
        share = len(rows) / total
        apart = own_mean - self.mean
        self.variance.lerp_(own_variance, share).add_(apart.square() * share * (1.0 - share))
        self.mean.add_(apart * share)
        self.count.copy_(total.clamp(max=float(self.max_count)))
        deviation = self.variance.sqrt().float()
        self.shift.copy_(self.mean)
        self.scale.copy_(torch.where(deviation > self.epsilon, deviation, torch.ones_like(deviation)))

    def forward(self, values: Tensor) -> Tensor:
        """Return vectors with mean zero and deviation one."""
        return (values - self.shift) / self.scale

    def inverse(self, values: Tensor) -> Tensor:
        """Return the vectors that `forward` would make these."""
        return torch.addcmul(self.shift, values, self.scale)
