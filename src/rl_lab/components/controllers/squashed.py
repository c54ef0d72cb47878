"""A squashed Gaussian policy: tanh of a Gaussian whose parameters a network gives (Haarnoja et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_lab.components.distributions import LOG_ROOT_TWO_PI
from rl_lab.core import noise

LOG_TWO = 0.6931471805599453


class Sample(NamedTuple):
    """Actions in [-1, 1] and what is known about them."""

    actions: Tensor
    log_probs: Tensor  # of the squashed actions
    gaussian_log_probs: Tensor  # of the Gaussian, before the squash


class Expectation(NamedTuple):
    """What a policy may expect of a function of its actions."""

    values: Tensor
    bonus: Tensor  # entropy as the objective of TD-MPC2 counts it
    entropy: Tensor


class SquashedGaussianActor(nn.Module):
    """The network gives mean and log standard deviation, which is kept between two bounds by a tanh."""

    discrete = False

    def __init__(self, network: nn.Module, min_log_std: float = -10.0, max_log_std: float = 2.0) -> None:
        super().__init__()
        self.network, self.min_log_std, self.max_log_std = network, min_log_std, max_log_std

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation of the Gaussian."""
        mean, raw = self.network(features).float().chunk(2, -1)
        return mean, self.min_log_std + 0.5 * (self.max_log_std - self.min_log_std) * (raw.tanh() + 1.0)

    def mode(self, features: Tensor) -> Tensor:
        """Return the actions that are chosen without chance."""
        return self(features)[0].tanh()

    def actions(self, features: Tensor, draws: Tensor) -> Tensor:
        """Return the actions that standard normal draws mean, without their probabilities."""
        mean, log_std = self(features)
        return (mean + draws * log_std.exp()).tanh()

    def given(self, features: Tensor, draws: Tensor) -> Sample:
        """Return the actions that standard normal draws mean, differentiably."""
        return _squashed(*self(features), draws)

    def expect(self, features: Tensor, draws: Tensor, value: Callable[[Tensor], Tensor]) -> Expectation:
        """Return a value at the actions that draws mean; gradients reach the policy through the actions.

        The bonus is the entropy before the squash, times the number of action dimensions, as the authors of TD-MPC2
        have it.
        """
        said = self.given(features, draws)
        bonus = -said.actions.shape[-1] * said.gaussian_log_probs
        return Expectation(value(said.actions), bonus, -said.log_probs)

    def sample(self, features: Tensor, generator: torch.Generator | None) -> Sample:
        """Draw actions, differentiably."""
        mean, log_std = self(features)
        return _squashed(mean, log_std, noise.normal(tuple(mean.shape), mean, generator))


def _squashed(mean: Tensor, log_std: Tensor, draws: Tensor) -> Sample:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return Sample(*_squash(mean, log_std, draws)[:3])
    return Sample(*_Squash.apply(mean, log_std, draws))


def _squash(mean: Tensor, log_std: Tensor, draws: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return actions, their log-probabilities after and before the squash, and how far they lie from the mean."""
    # Few operations: on a GPU each takes as long as a small product.
    size, spread = mean.shape[-1], draws * log_std.exp()
    gaussian = -LOG_ROOT_TWO_PI * size - torch.addcmul(log_std, draws, draws, value=0.5).sum(-1)
    raw = mean + spread
    # log(1 - tanh(raw)^2) is 2 (log 2 - raw - softplus(-2 raw)), and softplus(-2 raw) is -2 softplus(raw, beta=-2)
    surplus = torch.sub(raw, F.softplus(raw, beta=-2.0), alpha=2.0).sum(-1)
    log_probs = torch.add(gaussian, surplus, alpha=2.0) - 2.0 * LOG_TWO * size
    return raw.tanh(), log_probs, gaussian, spread


class _Squash(torch.autograd.Function):
    """`_squash`, and its way back in a third of the operations that autograd needs."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_std: Tensor, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        actions, log_probs, gaussian, spread = _squash(mean, log_std, draws)
        ctx.save_for_backward(actions, spread)
        ctx.set_materialize_grads(False)
        return actions, log_probs, gaussian

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        of_actions, of_log_probs, of_gaussian = gradients
        actions, spread = ctx.saved_tensors
        # tanh' is 1 - tanh^2, and the derivative of -log(1 - tanh^2) is 2 tanh
        of_raw = None if of_actions is None else torch.addcmul(of_actions, of_actions * actions, actions, value=-1.0)
        if of_log_probs is not None:
            pulled = (2.0 * of_log_probs).unsqueeze(-1)
            of_raw = pulled * actions if of_raw is None else torch.addcmul(of_raw, pulled, actions)
        of_log_std = None if of_raw is None else of_raw * spread
        for of_density in (of_log_probs, of_gaussian):  # each falls by log_std
            if of_density is not None:
                lost = of_density.unsqueeze(-1)
                of_log_std = -lost.expand_as(spread) if of_log_std is None else of_log_std - lost
        return of_raw, of_log_std, None
