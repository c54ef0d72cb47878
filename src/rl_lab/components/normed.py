"""Normalised perceptrons of TD-MPC2 (Hansen et al. 2024): linear, layer norm, Mish; simplices at the output."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.layer_norm import Beside, can_fuse, fused_norm
from rl_lab.core import noise
from rl_lab.core.products import linear, stacked
from rl_lab.core.ranges import Count, Range

MANY_ROWS, VERY_MANY_ROWS = 512, 4096
Size = Annotated[int, Range(1, 65_536)]


def simplex(values: Tensor, group: int) -> Tensor:
    """SimNorm: a softmax over each group of neighbouring entries."""
    return values.unflatten(-1, (-1, group)).softmax(-1).flatten(-2)


def distinct(values: Tensor) -> Tensor:
    """Return one of rows [..., N, Z] that were made equal by `expand`: it broadcasts like all of them."""
    return values[..., :1, :] if values.dim() > 1 and values.stride(-2) == 0 else values


def aligned(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Fill rows [..., inputs] and their weight [..., inputs] up with zeros, where that makes the product faster.

    Tensor cores multiply rows whose length is a multiple of eight about three times as fast as others.
    """
    missing = -values.shape[-1] % 8
    if not missing or not values.is_cuda or values.shape[:-1].numel() < MANY_ROWS:
        return values, weight
    return F.pad(values, (0, missing)), F.pad(weight, (0, missing))


def missing_outputs(values: Tensor, outputs: int) -> int:
    """Return by how many outputs a product should be widened, as `aligned` does with its inputs; for plans only."""
    few = values.shape[:-1].numel() < VERY_MANY_ROWS
    return 0 if few or not values.is_cuda or torch.is_grad_enabled() else -outputs % 8


class NormedMLP(nn.Module):
    """Linear, layer norm and Mish per hidden layer; the output is plain, or normalised to simplices.

    `actions` entries may come beside the inputs, with weights of their own. `zero_output` starts the last layer at
    zero: predictions begin neutral.
    """

    def __init__(
        self,
        inputs: Size,
        outputs: Size,
        hidden: Sequence[Size],
        actions: Annotated[int, Range(0, 65_536)] = 0,
        simplex: Count | None = None,
        zero_output: bool = False,
    ) -> None:
        super().__init__()
        if simplex is not None and outputs % simplex:
            raise ValueError(f"{outputs} outputs cannot be divided into simplices of {simplex}")
        sizes = [inputs, *hidden, outputs]
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for size in (sizes[1:] if simplex else hidden))
        self.action_weight = nn.Parameter(torch.empty(actions, sizes[1])) if actions else None
        self.simplex = simplex
        for layer in self.linears:
            _initialize(layer.weight, layer.bias)
        if self.action_weight is not None:
            _initialize(self.action_weight)
        if zero_output:
            nn.init.zeros_(self.linears[-1].weight)

    def forward(self, values: Tensor, actions: Tensor | None = None) -> Tensor:
        """Map [..., inputs] and [..., actions] to [..., outputs]."""
        values = values if actions is None else distinct(values)
        for layer, norm in itertools.zip_longest(self.linears, self.norms):
            group = self.simplex if layer is self.linears[-1] else None
            if norm is None:
                missing = missing_outputs(values, layer.out_features)
                weight = F.pad(layer.weight, (0, 0, 0, missing)) if missing else layer.weight
                bias = F.pad(layer.bias, (0, missing)) if missing else layer.bias
                values = linear(values, weight, bias)[..., : layer.out_features]
                values = values if actions is None else values + actions @ self.action_weight
            elif can_fuse(values, layer.out_features, group, 0 if actions is None else actions.shape[-1]):
                products = linear(*aligned(values, layer.weight))
                leading = products.shape[:-1] if actions is None else actions.shape[:-1]
                beside = None if actions is None else Beside(actions, self.action_weight)
                parameters = layer.bias, norm.weight, norm.bias
                rows = products.reshape(1, -1, products.shape[-1])
                values = fused_norm(rows, *parameters, group=group, beside=beside).view(*leading, -1)
            else:
                values = linear(*aligned(values, layer.weight), layer.bias)
                values = norm(values if actions is None else values + actions @ self.action_weight)
                values = F.mish(values) if group is None else simplex(values, group)
            actions = None  # they enter at the first layer
        return values


class NormedEnsemble(nn.Module):
    """Several normalised perceptrons as one: weights stacked over the members, one batched product per layer.

    Dropout acts after the first linear layer, by uniform noise that the caller drew with `dropout_noise`.
    """

    def __init__(
        self,
        inputs: Size,
        outputs: Size,
        hidden: Sequence[Size],
        actions: Size,
        num_members: Annotated[int, Range(2, 64)] = 5,
        dropout: Annotated[float, Range(0, 1)] = 0.0,
    ) -> None:
        super().__init__()
        if not hidden:
            raise ValueError("an ensemble needs at least one hidden layer")
        sizes = [inputs, *hidden, outputs]
        self.num_members, self.dropout, self._first = num_members, dropout, sizes[1]
        pairs = list(itertools.pairwise(sizes))
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(num_members, a, b)) for a, b in pairs)
        self.action_weight = nn.Parameter(torch.empty(num_members, actions, sizes[1]))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(num_members, 1, b)) for _, b in pairs)
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(num_members, 1, size)) for size in hidden)
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(num_members, 1, size)) for size in hidden)
        for weight in (*self.weights[:-1], self.action_weight):
            _initialize(weight)
        nn.init.zeros_(self.weights[-1])  # the output layer only: hidden layers start as everywhere else

    def dropout_noise(
        self, values: Tensor, generator: torch.Generator | None, num_members: int | None = None
    ) -> Tensor | None:
        """Draw the noise for inputs; none where nothing is dropped."""
        if self.dropout == 0.0:
            return None
        num_rows = values.shape[:-1].numel()
        return noise.uniform((num_members or self.num_members, num_rows, self._first), values, generator)

    def forward(
        self,
        values: Tensor,
        actions: Tensor,
        members: Tensor | None = None,
        dropout: Tensor | None = None,
        frozen: bool = False,
    ) -> Tensor:
        """Map [..., inputs] and [..., actions] to [members, ..., outputs].

        `frozen` lets gradients pass without reaching the weights.
        """
        count = self.num_members if members is None else len(members)
        rows = values.reshape(1, -1, values.shape[-1]).expand(count, -1, -1)
        taken = actions.reshape(1, -1, actions.shape[-1]).expand(count, -1, -1)

        def pick(parameter: Tensor) -> Tensor:
            parameter = parameter.detach() if frozen else parameter
            return parameter if members is None else parameter.index_select(0, members)

        for i in range(len(self.gains)):
            weight, bias, gain, shift = (pick(p[i]) for p in (self.weights, self.biases, self.gains, self.shifts))
            if dropout is None and can_fuse(rows, weight.shape[-1], None, taken.shape[-1]):
                beside = Beside(taken[0], pick(self.action_weight)) if i == 0 else None
                rows = fused_norm(torch.bmm(rows, weight), bias, gain, shift, beside=beside)
                continue
            if i == 0:
                bias = torch.baddbmm(bias, taken, pick(self.action_weight))
            rows = stacked(rows, weight, bias)
            if i == 0 and dropout is not None:
                rows = rows * (dropout >= self.dropout) / (1.0 - self.dropout)
            rows = F.mish(torch.addcmul(shift, F.layer_norm(rows, rows.shape[-1:]), gain))
        bias, weight = pick(self.biases[-1]), pick(self.weights[-1])
        missing, outputs = missing_outputs(rows, weight.shape[-1]), weight.shape[-1]
        if missing:
            bias, weight = F.pad(bias, (0, missing)), F.pad(weight, (0, missing))
        return stacked(rows, weight, bias)[..., :outputs].reshape(count, *values.shape[:-1], -1)


def _initialize(weight: Tensor, bias: Tensor | None = None) -> None:
    nn.init.trunc_normal_(weight, std=0.02)
    if bias is not None:
        nn.init.zeros_(bias)
