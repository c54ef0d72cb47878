"""Policies as distributions over action vectors, from parameters and noise: one-hot codes, and three kinds of Gaussian.

All of them are differentiable in their parameters: by reparameterisation, or straight through the code.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.components.distributions import LOG_ROOT_TWO_PI
from rl_lab.components.representation.variables import Categoricals, one_hot
from rl_lab.core import noise
from rl_lab.core.errors import UserError
from rl_lab.core.ranges import Count, Positive, Range, Unit


class OneHot:
    """Discrete actions as one-hot codes with straight-through gradients; `unimix` of them are drawn uniformly."""

    def __init__(self, action: Annotated[int, Range(1, 256)], unimix: Unit = 0.01) -> None:
        if action == 1:
            raise UserError(
                "there is nothing to choose among one action; continuous ones need another policy",
                key="action",
                value=action,
                remedy="set _target_ of this policy to rl_lab.components.policies.BoundedNormal",
            )
        self.action, self.sizes = action, (action,)  # of the parameters: logits
        self._code = Categoricals(1, action, unimix)

    def draw(self, shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw the noise that samples of a leading shape need."""
        return self._code.draw(shape, like, generator)

    def sample(self, parameters: Tensor, draws: Tensor) -> Tensor:
        """Return codes [..., A]."""
        return self._code.sample(parameters, draws)

    def mode(self, parameters: Tensor) -> Tensor:
        """Return the codes of the most probable actions."""
        return self._code.mode(parameters)

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """Return the log-probabilities [...] of codes."""
        return (self._code.distribution(parameters)[1].squeeze(-2) * actions).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return the entropy [...] in nats."""
        return self._code.entropy(self._code.distribution(parameters))

    def perturb(self, actions: Tensor, amount: Tensor, generator: torch.Generator | None) -> Tensor:
        """Replace a share of the actions by uniformly drawn ones."""
        shape = tuple(actions.shape[:-1])
        replaced = noise.uniform((*shape, 1), actions, generator) < amount
        other = (noise.uniform(shape, actions, generator) * self.action).long().clamp(max=self.action - 1)
        return torch.where(replaced, one_hot(other, self.action), actions)

    def to_environment(self, actions: Tensor) -> Tensor:
        """Return codes as the environment takes them: indices."""
        return actions.argmax(-1)

    def from_replay(self, actions: Tensor) -> Tensor:
        """Return stored indices as codes."""
        return one_hot(actions, self.action)


class _Gaussian:
    """What Gaussian policies share: an environment that takes the vectors as they are."""

    def __init__(self, action: Count) -> None:
        self.action, self.sizes = action, (action, action)  # of the parameters: mean and deviation, both raw

    def draw(self, shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw the noise that samples of a leading shape need."""
        return noise.normal((*shape, self.action), like, generator)

    def perturb(self, actions: Tensor, amount: Tensor, generator: torch.Generator | None) -> Tensor:
        """Add Gaussian noise, inside the limits."""
        return (actions + amount * noise.normal(tuple(actions.shape), actions, generator)).clamp(-1.0, 1.0)

    def to_environment(self, actions: Tensor) -> Tensor:
        """Return vectors as the environment takes them, which clips them."""
        return actions

    def from_replay(self, actions: Tensor) -> Tensor:
        """Return stored vectors."""
        return actions


class BoundedNormal(_Gaussian):
    """A Gaussian whose mean lies in [-1, 1] and whose deviation lies between two bounds (Dreamer v3)."""

    def __init__(self, action: Count, min_std: Positive = 0.1, max_std: Positive = 1.0) -> None:
        super().__init__(action)
        self.min_std, self.max_std = min_std, max_std

    def moments(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation."""
        mean, raw = parameters.float().chunk(2, -1)
        return mean.tanh(), (self.max_std - self.min_std) * (raw + 2.0).sigmoid() + self.min_std

    def sample(self, parameters: Tensor, draws: Tensor) -> Tensor:
        """Return actions [..., A], which may leave [-1, 1]."""
        mean, std = self.moments(parameters)
        return torch.addcmul(mean, std, draws)

    def mode(self, parameters: Tensor) -> Tensor:
        """Return the means."""
        return self.moments(parameters)[0]

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """Return log-densities [...]."""
        mean, std = self.moments(parameters)
        return (-0.5 * ((actions - mean) / std).square() - std.log() - LOG_ROOT_TWO_PI).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return the entropy [...] in nats."""
        return (self.moments(parameters)[1].log() + 0.5 + LOG_ROOT_TWO_PI).sum(-1)


class TanhNormal(_Gaussian):
    """The tanh of a Gaussian (Dreamer v1). Its deviation begins at `initial_std`."""

    def __init__(self, action: Count, min_std: Positive = 1e-4, initial_std: Positive = 5.0) -> None:
        super().__init__(action)
        self.min_std, self._raw_std = min_std, math.log(math.expm1(initial_std))

    def moments(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean, at most 5 in size, and deviation of the Gaussian."""
        mean, raw = parameters.float().chunk(2, -1)
        return 5.0 * (mean / 5.0).tanh(), F.softplus(raw + self._raw_std) + self.min_std

    def sample(self, parameters: Tensor, draws: Tensor) -> Tensor:
        """Return actions [..., A] inside [-1, 1]."""
        mean, std = self.moments(parameters)
        return (mean + std * draws).tanh()

    def mode(self, parameters: Tensor) -> Tensor:
        """Return the tanh of the means."""
        return self.moments(parameters)[0].tanh()

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """Return log-densities [...]."""
        mean, std = self.moments(parameters)
        raw = actions.clamp(-1.0 + 1e-6, 1.0 - 1e-6).atanh()
        return (-0.5 * ((raw - mean) / std).square() - std.log() - LOG_ROOT_TWO_PI - _log_slope(raw)).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return the entropy [...] in nats: the Gaussian's, and what the squash takes from it, by the trapezoid rule.

        That of the Gaussian alone has no bound, so a bonus on it would drive actions to both ends.
        """
        mean, std = self.moments(parameters)
        points = torch.linspace(-4.0, 4.0, 17, device=mean.device)
        slopes = _log_slope(mean.unsqueeze(-1) + std.unsqueeze(-1) * points)
        lost = (slopes * (-0.5 * points.square()).softmax(-1)).sum(-1)
        return (std.log() + 0.5 + LOG_ROOT_TWO_PI + lost).sum(-1)


class TruncatedNormal(_Gaussian):
    """A Gaussian cut off at -1 and 1 (Dreamer v2)."""

    def __init__(self, action: Count, min_std: Positive = 0.1) -> None:
        super().__init__(action)
        self.min_std = min_std

    def draw(self, shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw the noise that samples of a leading shape need: shares of the probability mass."""
        return noise.uniform((*shape, self.action), like, generator)

    def moments(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation before the cut."""
        mean, raw = parameters.float().chunk(2, -1)
        return mean.tanh(), 2.0 * (raw / 2.0).sigmoid() + self.min_std

    def sample(self, parameters: Tensor, draws: Tensor) -> Tensor:
        """Return actions [..., A] inside [-1, 1]."""
        mean, std = self.moments(parameters)
        low, high = _cumulative((-1.0 - mean) / std), _cumulative((1.0 - mean) / std)
        share = (low + draws * (high - low)).clamp(1e-6, 1.0 - 1e-6)
        return (mean + std * math.sqrt(2.0) * torch.erfinv(2.0 * share - 1.0)).clamp(-1.0 + 1e-6, 1.0 - 1e-6)

    def mode(self, parameters: Tensor) -> Tensor:
        """Return the means."""
        return self.moments(parameters)[0]

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """Return log-densities [...]."""
        mean, std = self.moments(parameters)
        mass = _cumulative((1.0 - mean) / std) - _cumulative((-1.0 - mean) / std)
        return (-0.5 * ((actions - mean) / std).square() - std.log() - LOG_ROOT_TWO_PI - mass.log()).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return the entropy [...] in nats."""
        mean, std = self.moments(parameters)
        low, high = (-1.0 - mean) / std, (1.0 - mean) / std
        mass = _cumulative(high) - _cumulative(low)
        spread = (low * _density(low) - high * _density(high)) / (2.0 * mass)
        return (std.log() + mass.log() + 0.5 + LOG_ROOT_TWO_PI + spread).sum(-1)


def _log_slope(raw: Tensor) -> Tensor:
    """Return log(1 - tanh(raw)^2), stably."""
    return 2.0 * (math.log(2.0) - raw - F.softplus(-2.0 * raw))


def _cumulative(values: Tensor) -> Tensor:
    return 0.5 * (1.0 + torch.erf(values / math.sqrt(2.0)))


def _density(values: Tensor) -> Tensor:
    return (-0.5 * values.square() - LOG_ROOT_TWO_PI).exp()
