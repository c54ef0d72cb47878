"""Actors: stochastic policies over a network that maps observations to distribution parameters."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn

from rl_lab.components import distributions
from rl_lab.core.ranges import Count, Range


class CategoricalActor(nn.Module):
    """A policy over discrete actions; the network gives logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def act(self, observations: Tensor, *, explore: bool, generator: torch.Generator | None) -> Tensor:
        """Sample, or take the most probable action."""
        logits = self.network(observations)
        return distributions.categorical_sample(logits, generator) if explore else logits.argmax(-1)

    def evaluate(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log probabilities of actions and the entropy."""
        logits = self.network(observations)
        return distributions.categorical_log_prob(logits, actions), distributions.categorical_entropy(logits)


class GaussianActor(nn.Module):
    """A policy over continuous actions; the network gives the mean, the spread is a learned constant."""

    def __init__(self, network: nn.Module, action: Count, log_std: Annotated[float, Range(-20, 5)] = 0.0) -> None:
        super().__init__()
        self.network = network
        self.log_std = nn.Parameter(torch.full((action,), float(log_std)))

    def act(self, observations: Tensor, *, explore: bool, generator: torch.Generator | None) -> Tensor:
        """Sample, or take the mean. The environment adapter clips to [-1, 1]; the density is the unclipped one's."""
        mean = self.network(observations)
        return distributions.gaussian_sample(mean, self.log_std, generator) if explore else mean

    def evaluate(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log densities of actions and the entropy."""
        mean = self.network(observations)
        log_probs = distributions.gaussian_log_prob(mean, self.log_std, actions)
        return log_probs, distributions.gaussian_entropy(mean, self.log_std)
