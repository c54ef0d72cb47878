"""DreamEnvironment: a model that predicts rewards and ends, as a batched environment to act in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_lab.core import noise
from rl_lab.core.batch import Batch


class DreamEnvironment:
    """`num_envs` dreams that begin at given observations, end where the model says so, and are cut after a while.

    A dream that strays from what the model has seen, by more than `max_deviation` deviations in any entry, ends where
    `strays_end` (nothing is to be had there), and is only cut otherwise.
    `reset` and `step` are those of a Gymnasium vector environment whose resets are the caller's: what `step` returns
    is the true successor. An end is drawn from the model's probability. The state is a mapping of tensors, so that a
    dream can be checkpointed.
    """

    def __init__(
        self,
        dynamics: Any,
        num_envs: int,
        max_episode_steps: int,
        device: str | torch.device,
        max_deviation: float = 5.0,
        strays_end: bool = True,
    ) -> None:
        self.dynamics, self.num_envs, self.max_episode_steps = dynamics, num_envs, max_episode_steps
        self.max_deviation, self.strays_end = max_deviation, strays_end
        self.latents: Tensor | None = None
        self.elapsed = torch.zeros(num_envs, dtype=torch.int64, device=device)

    def reset(self, starts: Tensor, mask: Tensor | None = None) -> Tensor:
        """Begin new episodes at `starts` [num_envs, O], everywhere or where the mask says; return observations."""
        if mask is None or self.latents is None:
            self.latents = starts.clone()
            self.elapsed.zero_()
        else:
            self.latents = torch.where(mask.unsqueeze(-1), starts, self.latents)
            self.elapsed.masked_fill_(mask, 0)
        return self.latents

    @torch.no_grad()
    def step(
        self, actions: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Mapping[str, Any]]:
        """Return observations, rewards, terminated, truncated and infos."""
        assert self.latents is not None, "reset comes before the first step"
        rewards = self.dynamics.rewards(self.latents, actions)
        self.latents = self.dynamics.step(self.latents, actions)
        self.elapsed += 1
        draws = noise.uniform((self.num_envs,), self.latents, generator)
        terminated = draws < self.dynamics.ended(self.latents)
        strayed, truncated = (
            self.dynamics.deviation(self.latents) > self.max_deviation,
            self.elapsed >= self.max_episode_steps,
        )
        if self.strays_end:
            return self.latents, rewards, terminated | strayed, truncated, {}
        return self.latents, rewards, terminated, truncated | strayed, {}

    @torch.no_grad()
    def collect(self, act: Any, state: Any, starts: Any, generator: torch.Generator | None) -> Batch:
        """Take one decision in every dream: a batch [1, num_envs]; finished ones begin anew at `starts()`."""
        if self.latents is None:
            self.reset(starts())
        seen = self.latents
        said = act(seen, state, explore=True, generator=generator)
        following, rewards, terminated, truncated, _ = self.step(said.actions, generator)
        batch = Batch(
            observations=seen.unsqueeze(0),
            actions=said.actions.unsqueeze(0),
            rewards=rewards.unsqueeze(0),
            terminated=terminated.unsqueeze(0),
            truncated=truncated.unsqueeze(0),
            next_observations=following.unsqueeze(0),
        )
        self.reset(starts(), terminated | truncated)
        return batch

    def get_state(self) -> dict[str, Tensor | None]:
        """Return what a dream goes on from."""
        return {"latents": self.latents, "elapsed": self.elapsed}

    def set_state(self, state: Mapping[str, Tensor | None]) -> None:
        """Go on from a saved dream."""
        latents, elapsed = state["latents"], state["elapsed"]
        self.latents = None if latents is None else latents.to(self.elapsed.device).clone()
        assert elapsed is not None
        self.elapsed.copy_(elapsed)
