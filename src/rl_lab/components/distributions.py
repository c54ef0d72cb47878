"""Distributions as pure functions on tensors; noise comes from a generator given by the caller."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LOG_ROOT_TWO_PI = 0.5 * math.log(2 * math.pi)


def categorical_sample(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw indices from logits [..., A] by the Gumbel-max rule."""
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits - noise.log_()).argmax(-1)


def categorical_log_prob(logits: Tensor, indices: Tensor) -> Tensor:
    """Return log probabilities of indices."""
    return F.log_softmax(logits, -1).gather(-1, indices.unsqueeze(-1)).squeeze(-1)


def categorical_entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats."""
    log_probs = F.log_softmax(logits, -1)
    return -(log_probs.exp() * log_probs).sum(-1)


def gaussian_sample(mean: Tensor, log_std: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw from a diagonal Gaussian."""
    noise = torch.empty_like(mean).normal_(generator=generator)
    return mean + noise * log_std.exp()


def gaussian_log_prob(mean: Tensor, log_std: Tensor, values: Tensor) -> Tensor:
    """Return log densities, summed over the last dimension."""
    standardized = (values - mean) * (-log_std).exp()
    return (-0.5 * standardized.square() - log_std - LOG_ROOT_TWO_PI).sum(-1)


def gaussian_entropy(mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the entropy in nats, summed over the last dimension."""
    return (log_std + 0.5 + LOG_ROOT_TWO_PI).expand_as(mean).sum(-1)


def one_hot(index: Tensor, num_classes: int) -> Tensor:
    """Return the codes [..., num_classes] of indices [...]; unlike torch's own it never asks the host."""
    codes = torch.zeros(*index.shape, num_classes, device=index.device)
    return codes.scatter_(-1, index.unsqueeze(-1), 1.0)
