"""Predictions: what the outputs of a head mean, and how wrong they are. Two-hot predictions are in `twohot.py`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from rl_lab.components.twohot import symexp, symlog


class UnitNormal:
    """A Gaussian of variance one; its loss is half the squared error, the negative log-density but for a constant."""

    num_parameters = 1

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the expected value."""
        return outputs.float().squeeze(-1)

    def loss(self, outputs: Tensor, values: Tensor) -> Tensor:
        """Return the loss per entry."""
        return 0.5 * (self.mean(outputs) - values).square()


class SymlogError:
    """A value predicted in symlog space; its loss is the squared error there."""

    num_parameters = 1

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the predicted value."""
        return symexp(outputs.float().squeeze(-1))

    def loss(self, outputs: Tensor, values: Tensor) -> Tensor:
        """Return the loss per entry."""
        return (outputs.float().squeeze(-1) - symlog(values)).square()


class Bernoulli:
    """A probability; targets may lie between zero and one."""

    num_parameters = 1

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the probability."""
        return outputs.float().squeeze(-1).sigmoid()

    def loss(self, outputs: Tensor, values: Tensor) -> Tensor:
        """Return the cross-entropy per entry."""
        return F.binary_cross_entropy_with_logits(outputs.float().squeeze(-1), values, reduction="none")
