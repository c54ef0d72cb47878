"""Encoders: from observations (vectors, images, or a dict of both) to a feature vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_lab.components.nets import MLP, Activation, ConvNet
from rl_lab.core.ranges import Count


class MLPEncoder(nn.Module):
    """Vectors to features."""

    def __init__(
        self, input_dim: Count, latent_dim: Count, hidden: Sequence[Count] = (64,), activation: Activation = "relu"
    ) -> None:
        super().__init__()
        self.network = MLP(input_dim, latent_dim, hidden, activation)

    def forward(self, observations: Tensor) -> Tensor:
        """Encode [..., input_dim] as [..., latent_dim]."""
        return self.network(observations)


class ConvEncoder(nn.Module):
    """Images [..., C, H, W] to features."""

    def __init__(self, input_dim: Sequence[Count], latent_dim: Count, channels: Sequence[Count] = (16, 32)) -> None:
        super().__init__()
        self.network = ConvNet(input_dim, latent_dim, channels, hidden=())

    def forward(self, observations: Tensor) -> Tensor:
        """Encode images as [..., latent_dim]."""
        return self.network(observations)


class DictEncoder(nn.Module):
    """A dict of vectors and images to one feature vector: the sum of one encoder per entry."""

    def __init__(self, input_dim: Mapping[str, Count | Sequence[Count]], latent_dim: Count) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(
            {
                name: MLPEncoder(size, latent_dim) if isinstance(size, int) else ConvEncoder(size, latent_dim)
                for name, size in input_dim.items()
            }
        )

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        """Encode every entry and add."""
        return torch.stack([encoder(observations[name]) for name, encoder in self.encoders.items()]).sum(0)
