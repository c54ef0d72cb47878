"""The actor of Dreamer (Hafner et al. 2020, 2021, 2024): a stack of layers and a distribution over action vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.components.layers import (
    Activation,
    Linear,
    Normalization,
    Stack,
    Tape,
    Weights,
    constants,
    customary,
    keyed,
)
from rl_lab.core.ranges import Count, Natural, NonNegative


class DreamerActor(nn.Module):
    """Reads the features of a latent state. `policy` says what the outputs mean: OneHot, BoundedNormal, ...

    Mean and deviation have weights of their own: gradients are clipped tensor by tensor, and the small ones of one
    would else have the room of the other.
    """

    def __init__(
        self,
        inputs: Count,
        policy: Any,
        units: Count,
        num_layers: Natural = 3,
        activation: Activation = "silu",
        norm: Normalization = "rms",
        output_scale: NonNegative = 0.01,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.network = Stack(inputs, 0, units, num_layers, activation=activation, norm=norm)
        self.outputs = nn.ModuleList(
            Linear(self.network.outputs, size, initialization=customary(norm), scale=output_scale)
            for size in policy.sizes
        )
        self._layers = list(keyed(self).values())

    def forward(self, features: Tensor, weights: Weights | None = None) -> Tensor:
        """Return the parameters of the policy at features [..., F]; with `weights`, as if they were its parameters."""
        tape = None if weights is None else Tape(weights)
        hidden = self.network(features, tape)
        parameters = [output(hidden, tape).float() for output in self.outputs]
        return parameters[0] if len(parameters) == 1 else torch.cat(parameters, -1)

    def constants(self, dtype: torch.dtype) -> Weights:
        """Return the weights as constants of a type, for many steps."""
        return constants(self._layers, dtype)

    def act(
        self, features: Tensor, *, explore: bool, exploration: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """Return action vectors: drawn, and perturbed if there is an `exploration`, or else the most probable ones."""
        parameters = self(features)
        if not explore:
            return self.policy.mode(parameters)
        draws = self.policy.draw(tuple(parameters.shape[:-1]), parameters, generator)
        actions = self.policy.sample(parameters, draws)
        return actions if exploration is None else self.policy.perturb(actions, exploration, generator)
