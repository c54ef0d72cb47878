"""Two-hot regression in symlog space: a scalar as weights of its two neighbouring bins (Hafner et al. 2023)."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn

from rl_lab.core.ranges import Range


def symlog(values: Tensor) -> Tensor:
    """Compress both tails like a logarithm; the identity near zero."""
    return values.sign() * values.abs().log1p()


def symexp(values: Tensor) -> Tensor:
    """Invert symlog."""
    return values.sign() * values.abs().expm1()


class TwoHot(nn.Module):
    """Bins that are evenly spaced in symlog space, and what they mean."""

    bins: Tensor
    pure = ("decode", "loss")  # methods without chance, which may be compiled

    def __init__(self, num_bins: Annotated[int, Range(2, 4096)] = 101, low: float = -10.0, high: float = 10.0) -> None:
        super().__init__()
        self.num_bins, self.low, self.high = num_bins, low, high
        self.register_buffer("bins", torch.linspace(low, high, num_bins), persistent=False)

    def encode(self, values: Tensor) -> Tensor:
        """Return weights [..., num_bins]; values beyond the last bin are that bin."""
        position = (symlog(values).clamp(self.low, self.high) - self.low) * (self.num_bins - 1) / (self.high - self.low)
        lower = position.floor().clamp(max=self.num_bins - 2)  # the upper neighbour always exists: nothing wraps
        share = position - lower
        index = lower.long().unsqueeze(-1)
        weights = torch.zeros(*values.shape, self.num_bins, dtype=values.dtype, device=values.device)
        weights.scatter_(-1, index, (1.0 - share).unsqueeze(-1))
        return weights.scatter_(-1, index + 1, share.unsqueeze(-1))

    def decode(self, logits: Tensor) -> Tensor:
        """Return the scalar that logits mean."""
        return symexp((logits.softmax(-1) * self.bins).sum(-1))

    def loss(self, logits: Tensor, values: Tensor) -> Tensor:
        """Return the cross-entropy with the two-hot code, per entry."""
        return -(self.encode(values) * logits.log_softmax(-1)).sum(-1)
