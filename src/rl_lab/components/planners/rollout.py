"""Rolling a latent model out over given actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Dynamics = Callable[[Tensor, Tensor], Tensor]  # latents, actions -> latents
Reward = Callable[[Tensor, Tensor], Tensor]  # latents, actions -> rewards
Termination = Callable[[Tensor], Tensor]  # latents -> probability that the world has ended


class Rollout(NamedTuple):
    """A trajectory in latent space."""

    latents: Tensor  # [H + 1, ..., Z]
    rewards: Tensor  # [H, ...]
    alive: Tensor  # [H + 1, ...]: 1 until the model predicts that the world ended, then 0


def rollout_dynamics_multi_step(
    start: Tensor, actions: Tensor, dynamics: Dynamics, reward: Reward, termination: Termination | None = None
) -> Rollout:
    """Apply actions [H, ..., A] from latents [..., Z]. What happens after a predicted end is marked as not alive."""
    latents, rewards = [start], []
    alive = [torch.ones(start.shape[:-1], dtype=start.dtype, device=start.device)]
    for action in actions:
        rewards.append(reward(latents[-1], action))
        latents.append(dynamics(latents[-1], action))
        ended = 0.0 if termination is None else (termination(latents[-1]) > 0.5).to(start.dtype)
        alive.append(alive[-1] * (1.0 - ended))
    return Rollout(torch.stack(latents), torch.stack(rewards), torch.stack(alive))
