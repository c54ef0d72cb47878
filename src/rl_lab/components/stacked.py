"""Stacked perceptrons: several networks of one shape as one, with a batched product for each layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.nets import ACTIVATIONS, Activation
from rl_lab.components.rectified import Pass, StackedPass, rectified
from rl_lab.core.products import is_eager, is_large_stack, stacked
from rl_lab.core.ranges import Count, Range


class StackedMLP(nn.Module):
    """Members with weights [M, inputs, outputs], each initialised as a network of its own would be.

    `layer_norm` normalises every hidden layer before its activation.
    """

    def __init__(
        self,
        inputs: Count,
        outputs: Count,
        hidden: Sequence[Count] = (256, 256),
        num_members: Annotated[int, Range(1, 256)] = 2,
        activation: Activation = "relu",
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.num_members, self.layer_norm = num_members, layer_norm
        # What it acts on is nobody else's, so that ReLU may overwrite it.
        self.activation = nn.ReLU(inplace=True) if activation == "relu" else ACTIVATIONS[activation][0]()
        self._is_written_out = activation == "relu" and not layer_norm
        pairs = list(itertools.pairwise([inputs, *hidden, outputs]))
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(num_members, a, b)) for a, b in pairs)
        self.biases = nn.ParameterList(nn.Parameter(torch.empty(num_members, 1, b)) for _, b in pairs)
        self._layers = list(zip(self.weights, self.biases, strict=True))  # walking a ParameterList takes longer
        normed = hidden if layer_norm else ()
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(num_members, 1, size)) for size in normed)
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(num_members, 1, size)) for size in normed)
        with torch.no_grad():
            for (weight, bias), member in itertools.product(self._layers, range(num_members)):
                linear = nn.Linear(weight.shape[1], weight.shape[2])
                weight[member], bias[member, 0] = linear.weight.T, linear.bias

    def _apply(self, *args: Any, **kwargs: Any) -> StackedMLP:
        super()._apply(*args, **kwargs)  # moving to a device may replace the parameters
        self._layers = list(zip(self.weights, self.biases, strict=True))
        return self

    def forward(self, values: Tensor, *, frozen: bool = False, num_members: int | None = None) -> Tensor:
        """Map [..., inputs], the same for all members (or the first few), to [M, ..., outputs].

        `frozen` lets gradients pass to the inputs without reaching the weights.
        """
        count = self.num_members if num_members is None else num_members
        rows = values.reshape(1, -1, values.shape[-1]).expand(count, -1, -1)
        return self.each(rows, frozen=frozen).reshape(count, *values.shape[:-1], -1)

    def written(self, values: Tensor, num_members: int | None = None) -> Pass | StackedPass | None:
        """Return how [B, inputs] pass through all members, or the first few, or None where autograd has to follow."""
        if not (self._is_written_out and values.is_cpu and values.dim() == 2 and is_eager(values)):
            return None
        count = self.num_members if num_members is None else num_members
        own = self._entries()
        if count < self.num_members:  # of slices only the rows' gradient is of use
            own = [entry[:count] for entry in own]
        rows = values.expand(count, -1, -1)
        return StackedPass(values, *own) if is_large_stack(values, own[::2]) else Pass(rows, *own)

    def each(self, rows: Tensor, *, frozen: bool = False, members: Tensor | None = None) -> Tensor:
        """Map rows [M, B, inputs] of each member, or of the first few, or of `members`, to [M, B, outputs]."""

        def read(parameter: Tensor) -> Tensor:
            own = parameter.detach() if frozen else parameter
            if members is not None:
                return own.index_select(0, members)
            return own if len(rows) == self.num_members else own[: len(rows)]

        if self._is_written_out and is_eager(rows):
            return rectified(rows, *map(read, self._entries()))
        last = len(self._layers) - 1
        for i, (weight, bias) in enumerate(self._layers):
            rows = stacked(rows, read(weight), read(bias))
            if i < last:
                if self.layer_norm:
                    rows = torch.addcmul(read(self.shifts[i]), F.layer_norm(rows, rows.shape[-1:]), read(self.gains[i]))
                rows = self.activation(rows)
        return rows

    def _entries(self) -> list[nn.Parameter]:
        return [entry for layer in self._layers for entry in layer]
