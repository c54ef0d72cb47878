"""A categorical policy whose actions are one-hot codes, for models that take discrete actions as vectors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rl_lab.components.controllers.squashed import Expectation
from rl_lab.components.distributions import one_hot


class OneHotActor(nn.Module):
    """The network gives one logit per action."""

    discrete = True

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, features: Tensor) -> Tensor:
        """Return the log-probabilities of the actions."""
        return self.network(features).float().log_softmax(-1)

    def mode(self, features: Tensor) -> Tensor:
        """Return the code of the likeliest action."""
        return _code(self(features))

    def actions(self, features: Tensor, draws: Tensor) -> Tensor:
        """Return the codes of the actions that standard normal draws mean."""
        log_probs = self(features)
        gumbel = -(-torch.special.log_ndtr(draws)).log()  # the draws' place in their distribution, in that of Gumbel
        return _code(log_probs + gumbel)

    def expect(self, features: Tensor, draws: Tensor, value: Callable[[Tensor], Tensor]) -> Expectation:
        """Return the mean value over all actions, weighed by their probabilities: nothing is drawn.

        Gradients reach the policy through the probabilities, so that values away from the codes never matter.
        """
        log_probs = self(features)
        probs, num_actions = log_probs.exp(), log_probs.shape[-1]
        codes = torch.eye(num_actions, dtype=probs.dtype, device=probs.device)
        values = torch.stack([value(code.expand_as(probs)) for code in codes], -1)
        entropy = -(probs * log_probs).sum(-1)
        return Expectation((probs * values).sum(-1), num_actions * entropy, entropy)


def _code(scores: Tensor) -> Tensor:
    return one_hot(scores.argmax(-1), scores.shape[-1])
