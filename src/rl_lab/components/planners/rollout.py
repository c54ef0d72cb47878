"""Rolling a latent model out over given actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Dynamics = Callable[[Tensor, Tensor], Tensor]  # latents, actions -> latents
Reward = Callable[[Tensor, Tensor], Tensor]  # latents, actions -> rewards
Termination = Callable[[Tensor], Tensor]  # latents -> probability that the world has ended
MANY_ROWS = 16_384


class Rollout(NamedTuple):
    """A trajectory in latent space."""

    latents: list[Tensor]  # [H + 1] of [..., Z]
    rewards: Tensor  # [H, ...]
    alive: Tensor  # [H + 1, ...]: 1 until the model predicts that the world ended, then 0


def rollout_dynamics_multi_step(
    start: Tensor, actions: Tensor, dynamics: Dynamics, reward: Reward, termination: Termination | None = None
) -> Rollout:
    """Apply actions [H, ..., A] from latents [..., Z]. What happens after a predicted end is marked as not alive."""
    latents = [start]
    for action in actions:
        latents.append(dynamics(latents[-1], action))
    rewards = _predict(reward, latents[:-1], actions)
    alive = rewards.new_ones((len(latents), *start.shape[:-1]))
    if termination is not None:
        alive[1:] = (_predict(termination, latents[1:]) <= 0.5).to(alive.dtype).cumprod(0)
    return Rollout(latents, rewards, alive)


def _predict(function: Callable[..., Tensor], latents: list[Tensor], *others: Tensor) -> Tensor:
    """Return what a function predicts at every step.

    All steps at once are fewer operations; where rows are many, joining them costs more than it saves.
    """
    if latents[0].shape[:-1].numel() < MANY_ROWS:
        return function(torch.stack(latents), *others)
    return torch.stack([function(*step) for step in zip(latents, *others, strict=True)])
