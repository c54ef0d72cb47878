"""Ensemble dynamics: probabilistic networks whose differences say what is not known (PETS, Chua et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.dynamics.deterministic import Heads
from rl_lab.components.nets import Activation
from rl_lab.components.stacked import StackedMLP
from rl_lab.core import noise
from rl_lab.core.batch import Batch
from rl_lab.core.errors import UserError
from rl_lab.core.ranges import Count, NonNegative, Range, Unit

HELD_OUT = 8  # of so many rows of the replay, one is never learned from and judges the members


class EnsembleDynamics(Heads):
    """Members predict mean and variance of the normalised change; the best on held-out rows, the elites, are used.

    While planning, a state is `num_particles` particles: with `ts1` each meets another member at every step, with
    `tsinf` it keeps its own (trajectory sampling of the paper).
    """

    def __init__(
        self,
        observation: Count,
        action: Count,
        hidden: Sequence[Count] = (200, 200, 200),
        activation: Activation = "silu",
        discrete: bool = False,
        reward: bool = True,
        done: bool = False,
        num_members: Annotated[int, Range(2, 64)] = 7,
        num_elites: Annotated[int, Range(1, 64)] = 5,
        num_particles: Annotated[int, Range(1, 1000)] = 20,
        propagation: Literal["ts1", "tsinf"] = "tsinf",
        bound_weight: NonNegative = 0.01,
        error_rate: Unit = 0.01,
    ) -> None:
        super().__init__(observation, action, hidden, activation, discrete, reward, done)
        if num_elites > num_members:
            raise ValueError(f"num_elites is {num_elites}: it must not exceed num_members, {num_members}")
        if num_particles % num_elites:
            raise ValueError(f"num_particles is {num_particles}: it must be a multiple of num_elites, {num_elites}")
        self.num_members, self.num_elites, self.num_particles = num_members, num_elites, num_particles
        self.propagation, self.bound_weight, self.error_rate = propagation, bound_weight, error_rate
        self.network = StackedMLP(observation + action, 2 * observation, hidden, num_members, activation)
        self.min_log_variance = nn.Parameter(torch.full((observation,), -10.0))
        self.max_log_variance = nn.Parameter(torch.full((observation,), 0.5))
        self.register_buffer("errors", torch.zeros(num_members))  # moving averages on held-out rows

    errors: Tensor

    def forward(self, observation_actions: Tensor) -> Tensor:
        """Map [..., O + A] to the next observations [..., O]: the mean of the elites' means."""
        rows = self.inputs(observation_actions).reshape(1, -1, observation_actions.shape[-1])
        means, _ = self._split(self.network.each(rows.expand(self.num_elites, -1, -1), members=self.elites()))
        change = self.changes.inverse(means.mean(0)).reshape(*observation_actions.shape[:-1], -1)
        return observation_actions[..., : self.observation] + change

    def step(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return the mean of the next latents."""
        return self(self.join(latents, actions))

    def elites(self) -> Tensor | None:
        """Return the members with the least error on held-out rows; None where all are wanted."""
        if self.num_elites == self.num_members:
            return None
        return self.errors.topk(self.num_elites, largest=False).indices

    def propagate(self, particles: Tensor, actions: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw the next particles [..., P, O] after actions [..., A]."""
        count, elites = self.num_particles, self.elites()
        joined = self.inputs(self.join(particles, actions.unsqueeze(-2).expand(*particles.shape[:-1], -1)))
        if self.propagation == "ts1":
            order = noise.permutation(count, particles, generator)
            joined = joined.index_select(-2, order)
        # [..., P, O + A] as [K, rows, O + A]: particle p belongs to elite p % K.
        rows = joined.reshape(-1, count // self.num_elites, self.num_elites, joined.shape[-1])
        rows = rows.permute(2, 0, 1, 3).reshape(self.num_elites, -1, joined.shape[-1])
        means, log_variances = self._split(self.network.each(rows, members=elites))
        drawn = means + (0.5 * log_variances).exp() * noise.normal(tuple(means.shape), means, generator)
        drawn = drawn.reshape(self.num_elites, -1, count // self.num_elites, self.observation)
        change = self.changes.inverse(drawn.permute(1, 2, 0, 3).reshape(particles.shape))
        if self.propagation == "ts1":
            change = torch.empty_like(change).index_copy_(-2, order, change)
        return particles + change

    def disagreement(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Return how far the members' means differ: their deviation, averaged over normalised dimensions."""
        joined = self.inputs(self.join(observations, actions))
        means, _ = self._split(self.network(joined))
        return means.std(0).mean(-1)

    def losses(self, batch: Batch, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return the likelihood loss of every member on rows drawn for it, and the losses of the heads.

        Rows that are held out do not count; the members' errors on them are followed.
        """
        if batch.rows is None:
            raise UserError(
                "an ensemble holds rows of the replay out, but is not told which rows these are",
                key="buffer.storage",
                value="cpu",
                remedy="use buffer.storage=device, or training.capture=none",
            )
        joined, changes = self.observe(batch)
        learned = (batch.rows.reshape(-1) % HELD_OUT != 0).to(joined.dtype)
        rows, targets = joined.reshape(-1, joined.shape[-1]), changes.reshape(-1, changes.shape[-1])
        self._follow_errors(rows, targets, 1.0 - learned)
        draws = noise.uniform((self.num_members, len(rows)), rows, generator)
        chosen = (draws * len(rows)).long()  # with replacement, for each member anew
        means, log_variances = self._split(self.network.each(rows[chosen]))
        errors = (means - targets[chosen]).square() * (-log_variances).exp() + log_variances
        weights = learned[chosen]  # [M, B]
        likelihood = (errors.mean(-1) * weights).sum(1) / weights.sum(1).clamp(min=1.0)
        bounds = self.bound_weight * (self.max_log_variance - self.min_log_variance).sum()
        return {"dynamics": likelihood.sum(), "bounds": bounds, **self.head_losses(batch, joined)}

    @torch.no_grad()
    def _follow_errors(self, rows: Tensor, targets: Tensor, weights: Tensor) -> None:
        means, _ = self._split(self.network(rows))
        errors = ((means - targets).square().mean(-1) * weights).sum(1) / weights.sum().clamp(min=1.0)
        self.errors.lerp_(errors, self.error_rate)

    def _split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and log variances, softly between their bounds."""
        means, raw = outputs.chunk(2, -1)
        below = self.max_log_variance - F.softplus(self.max_log_variance - raw)
        return means, self.min_log_variance + F.softplus(below - self.min_log_variance)
