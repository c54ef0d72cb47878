"""The deterministic policy: one action for what is seen (Silver et al. 2014); whoever acts adds the noise."""

from __future__ import annotations

from torch import Tensor, nn


class DeterministicActor(nn.Module):
    """The tanh of a network's outputs, so that actions lie in [-1, 1]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observations: Tensor) -> Tensor:
        """Return actions."""
        return self.network(observations).tanh()
