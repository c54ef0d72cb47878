"""Deterministic dynamics: a perceptron predicts the change of an observation; reward and end are heads of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.distributions import one_hot
from rl_lab.components.dynamics.analytic import index_of
from rl_lab.components.nets import MLP, Activation
from rl_lab.components.normalizers import RunningNormalizer
from rl_lab.core.batch import Batch
from rl_lab.core.ranges import Count


class Heads(nn.Module):
    """What learned dynamics share: normalised inputs, a head for the reward of an action and one for ends.

    Without a head, `rewards` or `ended` must come from elsewhere: a reward is a function, a head, or known.
    """

    def __init__(
        self,
        observation: Count,
        action: Count,
        hidden: Sequence[Count],
        activation: Activation,
        discrete: bool,
        reward: bool,
        done: bool,
    ) -> None:
        super().__init__()
        self.observation, self.action, self.discrete = observation, action, discrete
        self.inputs = RunningNormalizer(observation + action)
        self.changes = RunningNormalizer(observation)
        self.reward_head = MLP(observation + action, 1, hidden, activation) if reward else None
        self.done_head = MLP(observation, 1, hidden, activation) if done else None

    def encode(self, observations: Tensor) -> Tensor:
        """Return the latents of observations: themselves."""
        return observations

    def join(self, observations: Tensor, actions: Tensor) -> Tensor:
        """Put observations and actions side by side, [..., O + A]; discrete actions as codes."""
        if self.discrete:
            actions = one_hot(index_of(actions), self.action)
        return torch.cat([observations, actions.to(observations.dtype)], -1)

    def rewards(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return the rewards of actions, as the head predicts them."""
        assert self.reward_head is not None, "these dynamics have no reward head"
        return self.reward_head(self.inputs(self.join(latents, actions))).squeeze(-1)

    def ended(self, latents: Tensor) -> Tensor:
        """Return the probability that the world has ended; zero without a head."""
        if self.done_head is None:
            return torch.zeros(latents.shape[:-1], dtype=latents.dtype, device=latents.device)
        return self._done_logits(latents).sigmoid()

    def deviation(self, latents: Tensor) -> Tensor:
        """Return how far latents lie from what was seen: the greatest of their entries, in deviations."""
        return self.standardized(latents).abs().amax(-1)

    def _done_logits(self, observations: Tensor) -> Tensor:
        return self.done_head(self.standardized(observations)).squeeze(-1)  # type: ignore[misc]

    def standardized(self, observations: Tensor) -> Tensor:
        """Return observations in deviations from what was seen."""
        size = self.observation
        return (observations - self.inputs.shift[:size]) / self.inputs.scale[:size]

    def head_losses(self, batch: Batch, joined: Tensor) -> dict[str, Tensor]:
        """Return the losses of the heads that there are, on normalised inputs."""
        losses = {}
        if self.reward_head is not None:
            losses["reward"] = F.mse_loss(self.reward_head(joined).squeeze(-1), batch.rewards)
        if self.done_head is not None:
            logits = self._done_logits(batch.next_observations)
            losses["done"] = F.binary_cross_entropy_with_logits(logits, batch.terminated.to(logits.dtype))
        return losses

    @torch.no_grad()
    def observe(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Follow the statistics of a batch; return its inputs and changes, both normalised."""
        joined = self.join(batch.observations, batch.actions)
        changes = batch.next_observations - batch.observations
        self.inputs.update(joined)
        self.changes.update(changes)
        return self.inputs(joined), self.changes(changes)


class DeterministicDynamics(Heads):
    """Maps [observation, action] to the next observation by predicting the normalised change."""

    num_particles = 1

    def __init__(
        self,
        observation: Count,
        action: Count,
        hidden: Sequence[Count] = (128, 128),
        activation: Activation = "silu",
        discrete: bool = False,
        reward: bool = True,
        done: bool = False,
    ) -> None:
        super().__init__(observation, action, hidden, activation, discrete, reward, done)
        self.network = MLP(observation + action, observation, hidden, activation)

    def forward(self, observation_actions: Tensor) -> Tensor:
        """Map [..., O + A] to the next observations [..., O]."""
        change = self.changes.inverse(self.network(self.inputs(observation_actions)))
        return observation_actions[..., : self.observation] + change

    def step(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return the next latents."""
        return self(self.join(latents, actions))

    def losses(self, batch: Batch, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return the squared error of the normalised change, and the losses of the heads."""
        joined, changes = self.observe(batch)
        return {"dynamics": F.mse_loss(self.network(joined), changes), **self.head_losses(batch, joined)}
