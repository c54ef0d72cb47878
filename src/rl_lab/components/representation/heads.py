"""Heads: predictions from features (reward, continuation, observation), each with its loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components import layers
from rl_lab.components.nets import MLP
from rl_lab.core.ranges import Count, Natural, NonNegative


class RewardHead(nn.Module):
    """Predicts a reward by its mean."""

    def __init__(self, latent_dim: Count, hidden: Sequence[Count] = (64,)) -> None:
        super().__init__()
        self.network = MLP(latent_dim, 1, hidden, "relu")

    def forward(self, features: Tensor) -> Tensor:
        """Return expected rewards."""
        return self.network(features).squeeze(-1)

    def loss(self, features: Tensor, rewards: Tensor) -> Tensor:
        """Return the squared error."""
        return F.mse_loss(self(features), rewards)


class ContinueHead(nn.Module):
    """Predicts whether the world goes on."""

    def __init__(self, latent_dim: Count, hidden: Sequence[Count] = (64,)) -> None:
        super().__init__()
        self.network = MLP(latent_dim, 1, hidden, "relu")

    def forward(self, features: Tensor) -> Tensor:
        """Return the probability of continuing."""
        return self.network(features).squeeze(-1).sigmoid()

    def loss(self, features: Tensor, terminated: Tensor) -> Tensor:
        """Return the cross-entropy."""
        return F.binary_cross_entropy_with_logits(self.network(features).squeeze(-1), 1.0 - terminated.float())


class ObservationHead(nn.Module):
    """Predicts a vector observation."""

    def __init__(self, latent_dim: Count, output_dim: Count, hidden: Sequence[Count] = (64,)) -> None:
        super().__init__()
        self.network = MLP(latent_dim, output_dim, hidden, "relu")

    def forward(self, features: Tensor) -> Tensor:
        """Return the reconstruction."""
        return self.network(features)

    def loss(self, features: Tensor, observations: Tensor) -> Tensor:
        """Return the squared error."""
        return F.mse_loss(self(features), observations)


class Head(nn.Module):
    """A network from the features of a state to a prediction of one number: a reward, a value, whether it goes on.

    Called, it returns the raw outputs; `mean` and `loss` say what they mean. `output_scale` multiplies the initial
    weights of the last layer: zero makes a two-hot prediction begin at exactly zero.
    """

    pure = ("mean", "loss")  # methods without chance, which may be compiled

    def __init__(
        self,
        inputs: Count,
        prediction: Any,  # UnitNormal, SymlogError, TwoHot, SymexpTwoHot, Bernoulli
        units: Count,
        num_layers: Natural,
        activation: layers.Activation = "silu",
        norm: layers.Normalization = "rms",
        output_scale: NonNegative = 1.0,
    ) -> None:
        super().__init__()
        self.prediction = prediction
        self.network = layers.Stack(
            inputs,
            prediction.num_parameters,
            units,
            num_layers,
            activation=activation,
            norm=norm,
            output_scale=output_scale,
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return raw outputs [..., num_parameters]."""
        return self.network(features)

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the predicted number."""
        return self.prediction.mean(outputs)

    def loss(self, outputs: Tensor, values: Tensor) -> Tensor:
        """Return the loss per entry."""
        return self.prediction.loss(outputs, values)
