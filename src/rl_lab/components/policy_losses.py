"""Losses that make a policy follow given actions: cloning of a planner, and regression weighted by advantages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_lab.components.distributions import gaussian_log_prob

LARGEST = 0.98  # of a continuous action that is learned from: the squash would need infinite means for 1


def exp_weight(advantages: Tensor, temperature: float, limit: float) -> Tensor:
    """Return exp(advantage / temperature), at most `limit` (AWR, Peng et al. 2019)."""
    return (advantages / temperature).exp().clamp(max=limit)


def log_probs_of(policy: Any, latents: Tensor, actions: Tensor) -> Tensor:
    """Return log probabilities of indices, or log densities of vectors in [-1, 1] under a squashed Gaussian."""
    if policy.discrete:
        return policy(latents).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    mean, log_std = policy(latents)
    inside = actions.clamp(-LARGEST, LARGEST)
    squash = torch.log1p(-inside.square()).sum(-1)  # log of the derivative of tanh there
    return gaussian_log_prob(mean, log_std, inside.atanh()) - squash


def cloning_loss(policy: Any, latents: Tensor, plans: Tensor) -> Tensor:
    """Return how unlikely a planner's decisions are: weights of discrete actions [B, A], or vectors."""
    if policy.discrete:
        return -(plans * policy(latents)).sum(-1).mean()
    return -log_probs_of(policy, latents, plans).mean()


def advantage_weighted_loss(
    policy: Any, latents: Tensor, actions: Tensor, advantages: Tensor, temperature: float, limit: float
) -> Tensor:
    """Return how unlikely actions are, those with a greater (standardised) advantage counting more."""
    spread, center = torch.std_mean(advantages, correction=0)
    weights = exp_weight((advantages - center) / (spread + 1e-6), temperature, limit)
    return -(weights.detach() * log_probs_of(policy, latents, actions)).mean()
