"""iCEM: the cross-entropy method with fewer samples (Pinneri et al. 2020): coloured noise, kept and shifted elites."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from rl_lab.components.planners.mppi import Plan
from rl_lab.components.planners.slot import moved_on, returns_of
from rl_lab.core import noise
from rl_lab.core.ranges import Count, NonNegative, Positive, Range, Unit


class ICEM:
    """Samples sequences whose noise is correlated in time, and never forgets good ones.

    A share of the elites joins the next round, and, moved on by a step, the next plan. The number of samples falls by
    `decay` with every round; the mean joins the last one; the best sequence found is begun. Discrete actions are
    relaxed: a vector stands for its largest entry.
    """

    def __init__(
        self,
        action: Count,
        horizon: Annotated[int, Range(1, 1000)] = 15,
        num_samples: Annotated[int, Range(4, 1_000_000)] = 40,
        num_elites: Annotated[int, Range(1, 1_000_000)] = 10,
        num_iterations: Annotated[int, Range(1, 1000)] = 3,
        momentum: Unit = 0.1,
        initial_std: Positive = 0.5,
        min_std: Positive = 0.02,
        noise_exponent: NonNegative = 2.0,
        kept_share: Unit = 0.3,
        decay: Annotated[float, Range(1, 100)] = 1.25,
    ) -> None:
        if 2 * num_elites > num_samples:
            raise ValueError(f"num_elites is {num_elites}: it must be at most half of num_samples, {num_samples}")
        self.action, self.horizon = action, horizon
        self.num_samples, self.num_elites, self.num_iterations = num_samples, num_elites, num_iterations
        self.momentum, self.initial_std, self.min_std = momentum, initial_std, min_std
        self.noise_exponent, self.decay = noise_exponent, decay
        self.num_kept = max(1, round(kept_share * num_elites)) if kept_share else 0

    def initial_mean(self, num_envs: int, like: Tensor) -> Tensor:
        """Return where a new episode starts from: the mean, then the kept sequences, one after another in time."""
        steps = (1 + self.num_kept) * self.horizon
        return torch.zeros(num_envs, steps, self.action, dtype=like.dtype, device=like.device)

    @property
    def sample_counts(self) -> list[int]:
        """How many sequences each round draws."""
        rounds = range(self.num_iterations)
        return [max(int(self.num_samples * self.decay**-i), 2 * self.num_elites) for i in rounds]

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
        """Decide one action for each of the latents [E, Z]; exploring adds noise of the last deviation."""
        before = previous_mean.unflatten(1, (1 + self.num_kept, self.horizon))  # [E, 1 + kept, H, A]
        mean, kept = moved_on(before[:, 0]), moved_on(before[:, 1:].transpose(1, 2))  # [E, H, A], [E, H, kept, A]
        std, waves = torch.full_like(mean, self.initial_std), self.waves(mean)
        for i, count in enumerate(self.sample_counts):
            draws = self.coloured((len(latents), count, self.action), waves, generator)  # [E, H, N, A]
            drawn = (mean.unsqueeze(2) + std.unsqueeze(2) * draws).clamp(-1.0, 1.0)
            last = i == self.num_iterations - 1
            actions = torch.cat([kept, drawn, *([mean.unsqueeze(2)] if last else [])], 2)
            elite_returns, elites = returns_of(latents, actions, **model).topk(self.num_elites, 1)
            index = elites[:, None, :, None].expand(-1, self.horizon, -1, self.action)
            elite_actions = actions.gather(2, index)  # [E, H, K, A], the best first
            kept = elite_actions[:, :, : self.num_kept]
            mean = torch.lerp(elite_actions.mean(2), mean, self.momentum)
            std = torch.lerp(elite_actions.std(2, correction=0), std, self.momentum).clamp(min=self.min_std)
        chosen = elite_actions[:, 0, 0]
        if explore:
            chosen = (chosen + std[:, 0] * noise.normal(tuple(chosen.shape), chosen, generator)).clamp(-1.0, 1.0)
        following = torch.cat([mean.unsqueeze(1), kept.transpose(1, 2)], 1).flatten(1, 2)
        following[:, 0] = elite_actions[:, 0, 0]  # what is done, so that it can be learned from
        return Plan(chosen, following, std, elite_returns)

    @staticmethod
    def coloured(shape: tuple[int, int, int], waves: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw [E, H, N, A] of deviation one whose power falls as that of the waves does (Timmer 1995)."""
        num_envs, count, action = shape
        draws = noise.normal((2, num_envs, count, action, waves.shape[1]), waves, generator)
        return (draws[0] @ waves[0] - draws[1] @ waves[1]).permute(0, 3, 1, 2)

    def waves(self, like: Tensor) -> Tensor:
        """Return the cosines and sines [2, frequencies, H] that noise is made of; they are few, so no transform.

        Their power falls with the frequency to `noise_exponent`.
        """
        times = torch.arange(self.horizon, device=like.device, dtype=like.dtype)
        frequencies = times[: self.horizon // 2 + 1] / self.horizon
        angles = 2.0 * torch.pi * frequencies.unsqueeze(1) * times
        waves = torch.stack([angles.cos(), angles.sin()])
        waves[1, 0] = 0.0  # the mean of a real signal has no phase, nor has the highest frequency
        waves[0, 0] *= 0.5**0.5
        if self.horizon % 2 == 0:
            waves[1, -1] = 0.0
            waves[0, -1] *= 0.5**0.5
        waves = waves * frequencies.clamp(min=1.0 / self.horizon).unsqueeze(1) ** (-0.5 * self.noise_exponent)
        return waves / waves.square().sum((0, 1)).sqrt()
