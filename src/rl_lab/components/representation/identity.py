"""The identity: observations are the latent state."""

from __future__ import annotations

from torch import Tensor, nn


class Identity(nn.Module):
    """Passes observations through, with the interface of a representation learner."""

    def forward(self, observations: Tensor) -> Tensor:
        """Return the observations."""
        return observations

    def observe(self, observations: Tensor) -> Tensor:
        """Return the latent state of one step."""
        return observations

    def observe_sequence(self, observations: Tensor) -> Tensor:
        """Return the latent states of a sequence."""
        return observations
