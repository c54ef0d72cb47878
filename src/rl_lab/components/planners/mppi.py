"""MPPI: model-predictive path integral control, as TD-MPC2 uses it (Hansen et al. 2024), batched over environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from rl_lab.components.planners.rollout import Dynamics, Reward, Termination, rollout_dynamics_multi_step
from rl_lab.core import noise
from rl_lab.core.ranges import Count, Positive, Range

Policy = Callable[[Tensor], Tensor]  # latents -> sampled actions
Value = Callable[[Tensor], Tensor]  # latents -> values


class Plan(NamedTuple):
    """What planning decided, for every environment."""

    actions: Tensor  # [E, A]
    mean: Tensor  # [E, H, A]: where the next plan starts from
    std: Tensor  # [E, H, A]
    values: Tensor  # [E, elites]: returns of the best candidates, as the model sees them


class MPPI:
    """Improves a Gaussian over action sequences by the model's returns; the policy's own sequences always compete."""

    pure = ("candidates", "refine", "returns")  # methods without chance, which may be compiled

    def __init__(
        self,
        action: Count,
        horizon: Annotated[int, Range(1, 1000)] = 3,
        num_samples: Annotated[int, Range(2, 1_000_000)] = 512,
        num_policy_samples: Annotated[int, Range(0, 1_000_000)] = 24,
        num_elites: Annotated[int, Range(1, 1_000_000)] = 64,
        num_iterations: Annotated[int, Range(1, 1000)] = 6,
        temperature: Positive = 0.5,
        min_std: Positive = 0.05,
        max_std: Positive = 2.0,
        select: Literal["sample", "mean"] = "sample",
    ) -> None:
        if not num_policy_samples < num_samples:
            raise ValueError(f"num_policy_samples is {num_policy_samples}: it must be below num_samples, {num_samples}")
        if num_elites > num_samples:
            raise ValueError(f"num_elites is {num_elites}: it must not exceed num_samples, {num_samples}")
        self.action, self.horizon = action, horizon
        self.num_samples, self.num_policy_samples, self.num_elites = num_samples, num_policy_samples, num_elites
        self.num_iterations, self.temperature = num_iterations, temperature
        self.min_std, self.max_std, self.select = min_std, max_std, select

    def initial_mean(self, num_envs: int, like: Tensor) -> Tensor:
        """Return where the plan of a new episode starts from."""
        return torch.zeros(num_envs, self.horizon, self.action, dtype=like.dtype, device=like.device)

    @torch.no_grad()
    def plan(
        self,
        latents: Tensor,
        previous_mean: Tensor,
        *,
        dynamics: Dynamics,
        reward: Reward,
        value: Value,
        policy: Policy,
        discount: float,
        termination: Termination | None = None,
        explore: bool = False,
        generator: torch.Generator | None = None,
    ) -> Plan:
        """Decide one action for each of the latents [E, Z]."""
        num_envs, num_free = len(latents), self.num_samples - self.num_policy_samples
        starts = latents.unsqueeze(1).expand(-1, self.num_samples, -1)  # [E, N, Z]
        proposed = self._policy_sequences(starts[:, : self.num_policy_samples], dynamics, policy, previous_mean)
        mean = torch.cat([previous_mean[:, 1:], torch.zeros_like(previous_mean[:, :1])], 1)  # [E, H, A]
        std = torch.full_like(mean, self.max_std)
        for _ in range(self.num_iterations):
            draws = noise.normal((num_envs, self.horizon, num_free, self.action), mean, generator)
            actions = self.candidates(mean, std, draws, proposed)  # [E, H, N, A]
            rollout = rollout_dynamics_multi_step(starts, actions.transpose(0, 1), dynamics, reward, termination)
            returns = self.returns(rollout.rewards, rollout.alive, value(rollout.latents[-1]), discount)
            elite_returns, elites = returns.topk(self.num_elites, 1)  # [E, K]
            index = elites[:, None, :, None].expand(-1, self.horizon, -1, self.action)
            elite_actions = actions.gather(2, index)  # [E, H, K, A]
            mean, std, weights = self.refine(elite_actions, elite_returns)
        chosen = mean[:, 0] if self.select == "mean" else self._sample_elite(weights, elite_actions, generator)
        if explore:
            chosen = chosen + std[:, 0] * noise.normal(tuple(chosen.shape), chosen, generator)
        return Plan(chosen.clamp(-1.0, 1.0), mean, std, elite_returns)

    def _policy_sequences(self, starts: Tensor, dynamics: Dynamics, policy: Policy, like: Tensor) -> Tensor:
        """Let the policy act in the model: [E, H, P, A]."""
        actions, latents = [], starts
        if not self.num_policy_samples:
            return like.new_zeros(len(starts), self.horizon, 0, self.action)
        for t in range(self.horizon):
            actions.append(policy(latents))
            if t < self.horizon - 1:
                latents = dynamics(latents, actions[-1])
        return torch.stack(actions, 1)

    @staticmethod
    def candidates(mean: Tensor, std: Tensor, draws: Tensor, proposed: Tensor) -> Tensor:
        """Return the policy's sequences and those drawn around the mean."""
        free = (mean.unsqueeze(2) + std.unsqueeze(2) * draws).clamp(-1.0, 1.0)
        return torch.cat([proposed, free], 2)

    def refine(self, elite_actions: Tensor, elite_returns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and deviation of the elites, weighed by their returns, and the weights [E, 1, K, 1]."""
        weights = (self.temperature * (elite_returns - elite_returns.amax(1, keepdim=True))).exp()
        weights = (weights / weights.sum(1, keepdim=True))[:, None, :, None]
        mean = (weights * elite_actions).sum(2) / (weights.sum(2) + 1e-9)
        variance = (weights * (elite_actions - mean.unsqueeze(2)).square()).sum(2) / (weights.sum(2) + 1e-9)
        return mean, variance.sqrt().clamp(self.min_std, self.max_std), weights

    @staticmethod
    def returns(rewards: Tensor, alive: Tensor, last_values: Tensor, discount: float) -> Tensor:
        """Return discounted sums [E, N] of rewards [H, E, N] and the value at the horizon; nothing after an end."""
        total, factor = torch.zeros_like(rewards[0]), 1.0
        for reward, living in zip(rewards, alive[:-1], strict=True):
            total = total + factor * living * reward
            factor *= discount
        return (total + factor * alive[-1] * last_values).nan_to_num(0.0)

    def _sample_elite(self, weights: Tensor, elite_actions: Tensor, generator: torch.Generator | None) -> Tensor:
        """Take the first action of one elite, drawn by weight (Gumbel-max)."""
        log_weights = weights[:, 0, :, 0].log()
        gumbel = -noise.exponential(tuple(log_weights.shape), log_weights, generator).log()
        index = (log_weights + gumbel).argmax(1)
        return elite_actions[torch.arange(len(index), device=index.device), 0, index]
