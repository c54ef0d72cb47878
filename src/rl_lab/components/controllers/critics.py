"""Critics: value estimates over a network."""

from __future__ import annotations

from torch import Tensor, nn


class ValueCritic(nn.Module):
    """The value of an observation; the network has one output."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observations: Tensor) -> Tensor:
        """Return values without the last dimension."""
        return self.network(observations).squeeze(-1)
