"""CEM: the cross-entropy method over action sequences (Rubinstein 1999; PETS, Chua et al. 2018)."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from rl_lab.components.distributions import categorical_sample, one_hot
from rl_lab.components.planners.mppi import Plan
from rl_lab.components.planners.slot import moved_on, returns_of
from rl_lab.core import noise
from rl_lab.core.ranges import Count, Positive, Range, Unit


class CEM:
    """Refits a distribution over sequences to the best of its samples, several times.

    Continuous actions: a Gaussian, its samples clipped to [-1, 1]. Discrete ones: a categorical distribution for each
    step. `momentum` is how much of the distribution before stays. What is done is the mean of the last one (the best
    sample would profit from the model's mistakes), or, of discrete actions, the best.
    """

    def __init__(
        self,
        action: Count,
        horizon: Annotated[int, Range(1, 1000)] = 15,
        num_samples: Annotated[int, Range(2, 1_000_000)] = 350,
        num_elites: Annotated[int, Range(1, 1_000_000)] = 35,
        num_iterations: Annotated[int, Range(1, 1000)] = 5,
        momentum: Unit = 0.1,
        initial_std: Positive = 0.8,
        min_std: Positive = 0.05,
        min_probability: Unit = 0.02,
        discrete: bool = False,
    ) -> None:
        if num_elites > num_samples:
            raise ValueError(f"num_elites is {num_elites}: it must not exceed num_samples, {num_samples}")
        self.action, self.horizon, self.discrete = action, horizon, discrete
        self.num_samples, self.num_elites, self.num_iterations = num_samples, num_elites, num_iterations
        self.momentum, self.initial_std, self.min_std = momentum, initial_std, min_std
        self.min_probability = min_probability

    def initial_mean(self, num_envs: int, like: Tensor) -> Tensor:
        """Return where the plan of a new episode starts from."""
        value = 1.0 / self.action if self.discrete else 0.0
        return torch.full((num_envs, self.horizon, self.action), value, dtype=like.dtype, device=like.device)

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
        """Decide one action for each of the latents [E, Z]; exploring draws from the last distribution."""
        mean = moved_on(previous_mean)
        std = torch.full_like(mean, self.initial_std)
        if self.discrete:
            mean = 0.5 * mean + 0.5 / self.action  # nothing is certain at the start
        for _ in range(self.num_iterations):
            actions = self._sample(mean, std, generator)
            elite_returns, elites = returns_of(latents, actions, **model).topk(self.num_elites, 1)
            index = elites[:, None, :, None].expand(-1, self.horizon, -1, self.action)
            elite_actions = actions.gather(2, index)  # [E, H, K, A]
            mean, std = self._refit(mean, std, elite_actions)
        chosen = elite_actions[:, 0, 0] if self.discrete else mean[:, 0]
        if explore and self.discrete:
            chosen = one_hot(categorical_sample(mean[:, 0].log(), generator), self.action)
        elif explore:
            chosen = (chosen + std[:, 0] * noise.normal(tuple(chosen.shape), latents, generator)).clamp(-1.0, 1.0)
        return Plan(chosen, mean, std, elite_returns)

    def _sample(self, mean: Tensor, std: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw sequences [E, H, N, A]."""
        shape = (*mean.shape[:2], self.num_samples, self.action)
        if self.discrete:
            return one_hot(categorical_sample(mean.log().unsqueeze(2).expand(shape), generator), self.action)
        return (mean.unsqueeze(2) + std.unsqueeze(2) * noise.normal(shape, mean, generator)).clamp(-1.0, 1.0)

    def _refit(self, mean: Tensor, std: Tensor, elite_actions: Tensor) -> tuple[Tensor, Tensor]:
        mean = torch.lerp(elite_actions.mean(2), mean, self.momentum)
        if self.discrete:
            floored = mean.clamp(min=self.min_probability)
            return floored / floored.sum(-1, keepdim=True), std
        spread = elite_actions.std(2, correction=0)
        return mean, torch.lerp(spread, std, self.momentum).clamp(min=self.min_std)
