"""Normalised perceptrons of TD-MPC2 (Hansen et al. 2024): linear, layer norm, Mish; simplices at the output."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.core import noise
from rl_lab.core.ranges import Count, Range

MANY_ROWS = 512
Size = Annotated[int, Range(1, 65_536)]


def simplex(values: Tensor, group: int) -> Tensor:
    """SimNorm: a softmax over each group of neighbouring entries."""
    return values.unflatten(-1, (-1, group)).softmax(-1).flatten(-2)


def aligned(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Fill rows [..., inputs] and their weight [..., inputs] up with zeros, where that makes the product faster.

    Tensor cores multiply rows whose length is a multiple of eight about three times as fast as others.
    """
    missing = -values.shape[-1] % 8
    if not missing or not values.is_cuda or values.shape[:-1].numel() < MANY_ROWS:
        return values, weight
    return F.pad(values, (0, missing)), F.pad(weight, (0, missing))


class NormedMLP(nn.Module):
    """Linear, layer norm and Mish per hidden layer; the output is plain, or normalised to simplices.

    `zero_output` starts the last layer at zero: predictions begin neutral.
    """

    def __init__(
        self,
        inputs: Size,
        outputs: Size,
        hidden: Sequence[Size],
        simplex: Count | None = None,
        zero_output: bool = False,
    ) -> None:
        super().__init__()
        if simplex is not None and outputs % simplex:
            raise ValueError(f"{outputs} outputs cannot be divided into simplices of {simplex}")
        sizes = [inputs, *hidden, outputs]
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for size in (sizes[1:] if simplex else hidden))
        self.simplex = simplex
        for linear in self.linears:
            _initialize(linear.weight, linear.bias)
        if zero_output:
            nn.init.zeros_(self.linears[-1].weight)

    def forward(self, values: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        for linear, norm in zip(self.linears[:-1], self.norms, strict=False):
            values = F.mish(norm(F.linear(*aligned(values, linear.weight), linear.bias)))
        values = self.linears[-1](values)
        return values if self.simplex is None else simplex(self.norms[-1](values), self.simplex)


class NormedEnsemble(nn.Module):
    """Several normalised perceptrons as one: weights stacked over the members, one batched product per layer.

    Dropout acts after the first linear layer, by uniform noise that the caller drew with `dropout_noise`.
    """

    def __init__(
        self,
        inputs: Size,
        outputs: Size,
        hidden: Sequence[Size],
        num_members: Annotated[int, Range(2, 64)] = 5,
        dropout: Annotated[float, Range(0, 1)] = 0.0,
    ) -> None:
        super().__init__()
        sizes = [inputs, *hidden, outputs]
        self.num_members, self.dropout, self._first = num_members, dropout, sizes[1]
        pairs = list(itertools.pairwise(sizes))
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(num_members, a, b)) for a, b in pairs)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(num_members, 1, b)) for _, b in pairs)
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(num_members, 1, size)) for size in hidden)
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(num_members, 1, size)) for size in hidden)
        for weight in self.weights[:-1]:
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
        self, values: Tensor, members: Tensor | None = None, dropout: Tensor | None = None, frozen: bool = False
    ) -> Tensor:
        """Map [..., inputs] to [members, ..., outputs]; `frozen` lets gradients pass without reaching the weights."""
        leading = values.shape[:-1]
        count = self.num_members if members is None else len(members)
        rows = values.reshape(1, -1, values.shape[-1]).expand(count, -1, -1)

        def pick(parameter: Tensor) -> Tensor:
            parameter = parameter.detach() if frozen else parameter
            return parameter if members is None else parameter.index_select(0, members)

        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            rows, transposed = aligned(rows, pick(weight).mT)
            rows = torch.baddbmm(pick(bias), rows, transposed.mT)
            if i == len(self.weights) - 1:
                break
            if i == 0 and dropout is not None:
                rows = rows * (dropout >= self.dropout) / (1.0 - self.dropout)
            normed = F.layer_norm(rows, rows.shape[-1:])
            rows = F.mish(torch.addcmul(pick(self.shifts[i]), normed, pick(self.gains[i])))
        return rows.reshape(count, *leading, -1)


def _initialize(weight: Tensor, bias: Tensor | None = None) -> None:
    nn.init.trunc_normal_(weight, std=0.02)
    if bias is not None:
        nn.init.zeros_(bias)
