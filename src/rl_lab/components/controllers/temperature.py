"""Temperature: how much an entropy is worth, learned so that the policy keeps a wanted one (Haarnoja et al. 2018)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rl_lab.core.ranges import Count, Positive


class Temperature(nn.Module):
    """A positive number, kept as its logarithm; `learned` false leaves it as it is.

    The wanted entropy is minus the number of action dimensions unless `target_entropy` says otherwise.
    """

    log_value: Tensor

    def __init__(
        self, action: Count, initial: Positive = 1.0, target_entropy: float | None = None, learned: bool = True
    ) -> None:
        super().__init__()
        self.target_entropy = -float(action) if target_entropy is None else target_entropy
        logarithm = torch.tensor(math.log(initial))
        if learned:
            self.log_value = nn.Parameter(logarithm)
        else:
            self.register_buffer("log_value", logarithm)

    def forward(self) -> Tensor:
        """Return the temperature, without a gradient."""
        return self.log_value.detach().exp()

    def loss(self, log_probs: Tensor) -> Tensor:
        """Return a loss that lowers the temperature while the entropy is above the wanted one."""
        return -self.log_value * (log_probs.detach().mean() + self.target_entropy)
