"""Random shooting: try many random action sequences in the model and begin the best (Nagabandi et al. 2018)."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from rl_lab.components.distributions import one_hot
from rl_lab.components.planners.mppi import Plan
from rl_lab.components.planners.slot import moved_on, returns_of
from rl_lab.core import noise
from rl_lab.core.ranges import Count, Range


class RandomShooting:
    """Draws sequences uniformly; what was left of the last plan competes with them.

    Discrete actions are drawn as codes. Of equally good sequences the first is taken.
    """

    def __init__(
        self,
        action: Count,
        horizon: Annotated[int, Range(1, 1000)] = 15,
        num_samples: Annotated[int, Range(2, 1_000_000)] = 1000,
        discrete: bool = False,
    ) -> None:
        self.action, self.horizon, self.num_samples, self.discrete = action, horizon, num_samples, discrete

    def initial_mean(self, num_envs: int, like: Tensor) -> Tensor:
        """Return where the plan of a new episode starts from: doing nothing, or the first action again and again."""
        mean = torch.zeros(num_envs, self.horizon, self.action, dtype=like.dtype, device=like.device)
        if self.discrete:
            mean[..., 0] = 1.0
        return mean

    @torch.no_grad()
    def plan(
        self,
        latents: Tensor,
        previous_mean: Tensor,
        *,
        explore: bool = False,
        generator: torch.Generator | None = None,
        policy: Any = None,
        **model: Any,
    ) -> Plan:
        """Decide one action for each of the latents [E, Z]; exploring changes nothing."""
        shape = (len(latents), self.horizon, self.num_samples - 1, self.action)
        draws = noise.uniform(shape, latents, generator)
        drawn = one_hot(draws.argmax(-1), self.action) if self.discrete else 2.0 * draws - 1.0
        actions = torch.cat([moved_on(previous_mean).unsqueeze(2), drawn], 2)  # [E, H, N, A]
        best_return, best = returns_of(latents, actions, **model).max(1, keepdim=True)
        index = best[:, None, :, None].expand(-1, self.horizon, -1, self.action)
        sequence = actions.gather(2, index).squeeze(2)  # [E, H, A]
        return Plan(sequence[:, 0], sequence, torch.zeros_like(sequence), best_return)
