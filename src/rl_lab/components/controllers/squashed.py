"""A squashed Gaussian policy: tanh of a Gaussian whose parameters a network gives (Haarnoja et al. 2018)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.distributions import LOG_ROOT_TWO_PI
from rl_lab.core import noise


class Sample(NamedTuple):
    """Actions in [-1, 1] and what is known about them."""

    actions: Tensor
    mean: Tensor  # tanh of the Gaussian's mean
    log_probs: Tensor  # of the squashed actions
    gaussian_log_probs: Tensor  # of the Gaussian, before the squash


class SquashedGaussianActor(nn.Module):
    """The network gives mean and log standard deviation, which is kept between two bounds by a tanh."""

    def __init__(self, network: nn.Module, min_log_std: float = -10.0, max_log_std: float = 2.0) -> None:
        super().__init__()
        self.network, self.min_log_std, self.max_log_std = network, min_log_std, max_log_std

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation of the Gaussian."""
        mean, raw = self.network(features).chunk(2, -1)
        return mean, self.min_log_std + 0.5 * (self.max_log_std - self.min_log_std) * (raw.tanh() + 1.0)

    def actions(self, features: Tensor, draws: Tensor) -> Tensor:
        """Return the actions that standard normal draws mean, without their probabilities."""
        mean, log_std = self(features)
        return (mean + draws * log_std.exp()).tanh()

    def given(self, features: Tensor, draws: Tensor) -> Sample:
        """Return the actions that standard normal draws mean, differentiably."""
        return _squashed(*self(features), draws)

    def sample(self, features: Tensor, generator: torch.Generator | None) -> Sample:
        """Draw actions, differentiably."""
        mean, log_std = self(features)
        return _squashed(mean, log_std, noise.normal(tuple(mean.shape), mean, generator))


def _squashed(mean: Tensor, log_std: Tensor, draws: Tensor) -> Sample:
    gaussian = (-0.5 * draws.square() - log_std - LOG_ROOT_TWO_PI).sum(-1)
    raw = mean + draws * log_std.exp()
    correction = 2.0 * (0.6931471805599453 - raw - F.softplus(-2.0 * raw))  # log(1 - tanh(raw)^2), stably
    return Sample(raw.tanh(), mean.tanh(), gaussian - correction.sum(-1), gaussian)
