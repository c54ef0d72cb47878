"""Stochastic variables of a latent state: Gaussian (Dreamer v1) or categorical (v2, v3), from parameters and noise."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.components.fused import is_written_out, sample_codes
from rl_lab.core import noise
from rl_lab.core.ranges import Count, Positive, Range, Unit

Distribution = tuple[Tensor, Tensor]  # what divergences and entropies are computed from; each variable has its own two


class Gaussians:
    """Independent Gaussian variables; the parameters are means and raw deviations."""

    def __init__(self, num_variables: Count = 30, min_std: Positive = 0.1) -> None:
        self.num_variables, self.min_std = num_variables, min_std
        self.size, self.num_parameters = num_variables, 2 * num_variables

    def draw(self, shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw the noise that samples of a leading shape need."""
        return noise.normal((*shape, self.num_variables), like, generator)

    def sample(self, parameters: Tensor, draws: Tensor) -> Tensor:
        """Return samples [..., size], differentiable in the parameters."""
        mean, std = self.distribution(parameters)
        return mean + std * draws

    def mode(self, parameters: Tensor) -> Tensor:
        """Return the means."""
        return self.distribution(parameters)[0]

    def distribution(self, parameters: Tensor) -> Distribution:
        """Return means and deviations."""
        mean, raw = parameters.float().chunk(2, -1)
        return mean, F.softplus(raw) + self.min_std

    def divergence(self, left: Distribution, right: Distribution) -> Tensor:
        """Return the Kullback-Leibler divergence [...] of one distribution from another, in nats."""
        (mean, std), (other_mean, other_std) = left, right
        ratio = (std / other_std).square()
        distance = ((mean - other_mean) / other_std).square()
        return 0.5 * (ratio + distance - 1.0 - ratio.log()).sum(-1)

    def entropy(self, distribution: Distribution) -> Tensor:
        """Return the entropy [...] in nats."""
        return (distribution[1].log() + 1.4189385332046727).sum(-1)

    def usage(self, parameters: Tensor) -> float:
        """Return the share of variables [R, ...] whose means tell states apart: that vary by more than a tenth."""
        return (self.mode(parameters).std(0) > 0.1).float().mean().item()

    def pack(self, samples: Tensor) -> Tensor:
        """Return samples as they are stored."""
        return samples.to(torch.bfloat16)

    def unpack(self, stored: Tensor) -> Tensor:
        """Return stored samples."""
        return stored.float()


class Categoricals:
    """Independent categorical variables as one-hot codes, with straight-through gradients; parameters are logits.

    `unimix` is the share of the uniform distribution that is mixed in, so that no class is ever impossible.
    """

    def __init__(
        self,
        num_variables: Count = 32,
        num_classes: Annotated[int, Range(2, 255)] = 32,  # each, and nothing, is a byte of replay
        unimix: Unit = 0.01,
    ) -> None:
        self.num_variables, self.num_classes, self.unimix = num_variables, num_classes, unimix
        self.size = self.num_parameters = num_variables * num_classes

    def draw(self, shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw the noise that samples of a leading shape need: one number for each variable."""
        return noise.uniform((*shape, self.num_variables), like, generator)

    def sample(self, parameters: Tensor, draws: Tensor) -> Tensor:
        """Return samples [..., size]; gradients pass to the probabilities as if the codes were those."""
        if is_written_out(parameters):
            logits = parameters.unflatten(-1, (self.num_variables, self.num_classes))
            return sample_codes(logits, draws, self.unimix).flatten(-2)
        probs = self.probs(parameters)
        # The class whose share of [0, 1) the number falls into; rounding may leave the shares a little short of 1.
        index = (probs.detach().cumsum(-1) <= draws.unsqueeze(-1)).sum(-1).clamp(max=self.num_classes - 1)
        return self._code(index, probs)

    def mode(self, parameters: Tensor) -> Tensor:
        """Return the codes of the most probable classes."""
        probs = self.probs(parameters)
        return self._code(probs.argmax(-1), probs)

    def probs(self, parameters: Tensor) -> Tensor:
        """Return the probabilities [..., variables, classes], the uniform share mixed in."""
        probs = softmax(parameters.float().unflatten(-1, (self.num_variables, self.num_classes)))
        return probs if self.unimix == 0.0 else (1.0 - self.unimix) * probs + self.unimix / self.num_classes

    def distribution(self, parameters: Tensor) -> Distribution:
        """Return `probs` and their logarithms."""
        probs = self.probs(parameters)
        if self.unimix:
            return probs, probs.log()
        return probs, parameters.float().unflatten(-1, (self.num_variables, self.num_classes)).log_softmax(-1)

    def divergence(self, left: Distribution, right: Distribution) -> Tensor:
        """Return the Kullback-Leibler divergence [...] of one distribution from another, in nats."""
        (probs, log_probs), (_, other_log_probs) = left, right
        return (probs * (log_probs - other_log_probs)).sum((-2, -1))

    def entropy(self, distribution: Distribution) -> Tensor:
        """Return the entropy [...] in nats."""
        probs, log_probs = distribution
        return -(probs * log_probs).sum((-2, -1))

    def usage(self, parameters: Tensor) -> float:
        """Return the share of the classes that are in use over all rows [R, ...]: 1 if all are equally."""
        mean = self.probs(parameters).mean(0)
        used = (-(mean * mean.clamp(min=1e-9).log()).sum(-1)).exp()
        return (used.mean() / self.num_classes).item()

    def pack(self, samples: Tensor) -> Tensor:
        """Return samples as they are stored: class indices from 1 on, since 0 is what replay has before."""
        return samples.unflatten(-1, (self.num_variables, self.num_classes)).argmax(-1).add_(1).to(torch.uint8)

    def unpack(self, stored: Tensor) -> Tensor:
        """Return stored samples as codes; where nothing was stored, zeros, as where an episode begins."""
        return one_hot(stored.long(), self.num_classes + 1)[..., 1:].flatten(-2)

    def _code(self, index: Tensor, probs: Tensor) -> Tensor:
        code = one_hot(index, self.num_classes)
        return (code + (probs - probs.detach()) if probs.requires_grad else code).flatten(-2)


def detached(distribution: Distribution) -> Distribution:
    """Return a distribution that no gradient reaches."""
    first, second = distribution
    return first.detach(), second.detach()


def one_hot(index: Tensor, num_classes: int) -> Tensor:
    """Return the codes [..., num_classes] of indices [...]; unlike torch's it never asks the host."""
    return torch.zeros(*index.shape, num_classes, device=index.device).scatter_(-1, index.unsqueeze(-1), 1.0)


def softmax(logits: Tensor) -> Tensor:
    """Return the softmax over the last dimension; over few classes torch's own takes six times longer on a CPU."""
    if logits.device.type != "cpu":
        return logits.softmax(-1)
    shares = (logits - logits.detach().amax(-1, keepdim=True)).exp()
    return shares / shares.sum(-1, keepdim=True)
