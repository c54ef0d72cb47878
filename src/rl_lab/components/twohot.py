"""Two-hot regression in symlog space: a scalar as weights of its two neighbouring bins (Hafner et al. 2023)."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_lab.components.fused import is_written_out
from rl_lab.core.ranges import Range


def symlog(values: Tensor) -> Tensor:
    """Compress both tails like a logarithm; the identity near zero."""
    return values.sign() * values.abs().log1p()


def symexp(values: Tensor) -> Tensor:
    """Invert symlog."""
    return values.sign() * values.abs().expm1()


class TwoHot(nn.Module):
    """Bins that are evenly spaced in symlog space, codes and expected values in that space (Hafner et al. 2023)."""

    bins: Tensor
    pure = ("mean", "loss")  # methods without chance, which may be compiled

    def __init__(self, num_bins: Annotated[int, Range(2, 4096)] = 101, low: float = -10.0, high: float = 10.0) -> None:
        super().__init__()
        self.num_parameters, self.low, self.high = num_bins, low, high
        self.register_buffer("bins", torch.linspace(low, high, num_bins), persistent=False)

    def encode(self, values: Tensor) -> Tensor:
        """Return weights [..., num_parameters]; values beyond the last bin are that bin."""
        width = (self.high - self.low) / (self.num_parameters - 1)
        position = (symlog(values).clamp(self.low, self.high) - self.low) / width
        lower = position.floor().clamp(max=self.num_parameters - 2)  # the upper neighbour always exists: nothing wraps
        share = position - lower
        index = lower.long().unsqueeze(-1)
        weights = torch.zeros(*values.shape, self.num_parameters, dtype=values.dtype, device=values.device)
        weights.scatter_(-1, index, (1.0 - share).unsqueeze(-1))
        return weights.scatter_(-1, index + 1, share.unsqueeze(-1))

    def mean(self, logits: Tensor) -> Tensor:
        """Return the scalar that logits mean."""
        return symexp((logits.float().softmax(-1) * self.bins).sum(-1))

    def loss(self, logits: Tensor, values: Tensor) -> Tensor:
        """Return the cross-entropy with the two-hot code, per entry."""
        return -(self.encode(values) * logits.float().log_softmax(-1)).sum(-1)


class SymexpTwoHot(nn.Module):
    """Bins that are the symexp of even steps, and codes in the space of the values themselves (Hafner et al. 2024)."""

    bins: Tensor

    def __init__(
        self, num_bins: Annotated[int, Range(3, 4095)] = 255, limit: Annotated[float, Range(1, 40)] = 20.0
    ) -> None:
        super().__init__()
        if num_bins % 2 == 0:
            raise ValueError(f"num_bins is {num_bins}: it must be odd, so that one bin is zero")
        half = symexp(torch.linspace(-limit, 0.0, num_bins // 2 + 1))
        self.num_parameters = num_bins
        self.register_buffer("bins", torch.cat([half, -half[:-1].flip(0)]), persistent=False)  # exactly symmetric

    def mean(self, logits: Tensor) -> Tensor:
        """Return the expected value; bins count in pairs of opposite sign, so that equal chances give exactly zero."""
        probs = logits.float().softmax(-1)
        center = self.num_parameters // 2
        return ((probs[..., center + 1 :] - probs[..., :center].flip(-1)) * self.bins[center + 1 :]).sum(-1)

    def loss(self, logits: Tensor, values: Tensor) -> Tensor:
        """Return the cross-entropy with the two-hot code, per entry; values beyond the last bin are that bin."""
        values = values.detach().clamp(self.bins[0], self.bins[-1])  # targets are constants
        lower = (torch.searchsorted(self.bins, values.contiguous(), right=True) - 1).clamp(max=self.num_parameters - 2)
        below, above = self.bins[lower], self.bins[lower + 1]
        share = (values - below) / (above - below)
        neighbours, weights = torch.stack([lower, lower + 1], -1), torch.stack([1.0 - share, share], -1)
        if is_written_out(logits):
            loss: Tensor = _CrossEntropy.apply(logits.float(), neighbours, weights)
            return loss
        return -(logits.float().log_softmax(-1).gather(-1, neighbours) * weights).sum(-1)


class _CrossEntropy(torch.autograd.Function):
    """The cross-entropy of logits with weights of two bins: its gradient is written over the probabilities."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, neighbours: Tensor, weights: Tensor) -> Tensor:
        log_shares = logits.log_softmax(-1)
        ctx.save_for_backward(log_shares, neighbours, weights)
        return -(log_shares.gather(-1, neighbours) * weights).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        log_shares, neighbours, weights = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(-1)
        found = log_shares.exp().mul_(gradient)
        return found.scatter_add_(-1, neighbours, -gradient * weights), None, None
