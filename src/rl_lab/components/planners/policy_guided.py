"""Policy-guided planning: the policy acts in the model many times, with noise, and the best beginning is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor

from rl_lab.components.distributions import one_hot
from rl_lab.components.planners.mppi import Plan
from rl_lab.components.planners.slot import returns_along
from rl_lab.core import noise
from rl_lab.core.ranges import Count, NonNegative, Positive, Range, Unit


class PolicyGuided:
    """Weighs the sequences that the policy proposes by their returns, the value at the horizon included.

    Noise of deviation `noise_std` is added to continuous actions; with probability `random_share` a discrete one is
    replaced by a random one. The first actions are averaged with the weights exp(return / temperature), returns
    standardised; a discrete action is the one with the greatest weight, or drawn by weight while exploring.
    """

    def __init__(
        self,
        action: Count,
        horizon: Annotated[int, Range(1, 1000)] = 10,
        num_samples: Annotated[int, Range(2, 1_000_000)] = 128,
        temperature: Positive = 0.1,
        noise_std: NonNegative = 0.3,
        random_share: Unit = 0.1,
        discrete: bool = False,
    ) -> None:
        self.action, self.horizon, self.num_samples, self.discrete = action, horizon, num_samples, discrete
        self.temperature, self.noise_std, self.random_share = temperature, noise_std, random_share

    def initial_mean(self, num_envs: int, like: Tensor) -> Tensor:
        """Return zeros: every plan begins anew with the policy."""
        return torch.zeros(num_envs, 1, self.action, dtype=like.dtype, device=like.device)

    @torch.no_grad()
    def plan(
        self,
        latents: Tensor,
        previous_mean: Tensor,
        *,
        dynamics: Callable[[Tensor, Tensor], Tensor],
        policy: Any,
        explore: bool = False,
        generator: torch.Generator | None = None,
        **model: Any,
    ) -> Plan:
        """Decide one action for each of the latents [E, Z]."""
        if policy is None:
            raise ValueError("policy-guided planning needs a policy")
        states, steps = [latents.unsqueeze(1).expand(-1, self.num_samples, -1)], []
        for _ in range(self.horizon):
            steps.append(self._perturbed(policy(states[-1]), generator))
            states.append(dynamics(states[-1], steps[-1]))
        returns = returns_along(torch.stack(states), torch.stack(steps), **model)
        first, weights = steps[0], self.weights(returns)  # [E, N, A], [E, N]
        mean = (weights.unsqueeze(-1) * first).sum(1)
        chosen = mean
        if explore:
            gumbel = -noise.exponential(tuple(weights.shape), weights, generator).log()
            drawn = (weights.log() + gumbel).argmax(1)
            chosen = first[torch.arange(len(drawn), device=drawn.device), drawn]
        std = (weights.unsqueeze(-1) * (first - mean.unsqueeze(1)).square()).sum(1).sqrt()
        return Plan(chosen, mean.unsqueeze(1), std.unsqueeze(1), returns)

    def weights(self, returns: Tensor) -> Tensor:
        """Return weights [E, N] that sum to one; what is not feasible gets none, unless nothing is."""
        feasible = returns > -torch.inf
        number = feasible.sum(1, keepdim=True).clamp(min=1)
        known = returns.masked_fill(~feasible, 0.0)
        center = known.sum(1, keepdim=True) / number
        apart = (known - center) * feasible
        spread = (apart.square().sum(1, keepdim=True) / number).sqrt()
        scores = (apart / (spread + 1e-6) / self.temperature).masked_fill(~feasible, -1e9)
        return scores.softmax(1)

    def _perturbed(self, actions: Tensor, generator: torch.Generator | None) -> Tensor:
        if not self.discrete:
            return (actions + self.noise_std * noise.normal(tuple(actions.shape), actions, generator)).clamp(-1.0, 1.0)
        draws = noise.uniform((*actions.shape[:-1], 1 + self.action), actions, generator)
        random_actions = one_hot(draws[..., 1:].argmax(-1), self.action)
        return torch.where(draws[..., :1] < self.random_share, random_actions, actions)
