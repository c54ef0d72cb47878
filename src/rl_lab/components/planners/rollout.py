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
    """Apply actions [H, ..., A] from latents [..., Z]. What happens after a predicted end is marked as not alive.

    Only the dynamics go step by step; rewards and ends of all steps are predicted at once.
    """
    steps = [start]
    for action in actions:
        steps.append(dynamics(steps[-1], action))
    latents = torch.stack(steps)
    rewards = reward(latents[:-1], actions)
    alive = torch.ones(latents.shape[:-1], dtype=start.dtype, device=start.device)
    if termination is not None:
        alive[1:] = (termination(latents[1:]) <= 0.5).to(start.dtype).cumprod(0)
    return Rollout(latents, rewards, alive)
