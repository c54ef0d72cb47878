"""Layers with ReLU between them, and their way back written out, which on a CPU takes autograd a fifth longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

NARROW = 32  # columns up to which a CPU multiplies them faster as rows


def may_write_out(rows: Tensor) -> bool:
    """Return whether products keep the type of what they are given, and nobody compiles them."""
    return not torch.is_autocast_enabled(rows.device.type) and not torch.compiler.is_compiling()


def rectified(rows: Tensor, *parameters: Tensor) -> Tensor:
    """Return the outputs of a perceptron, or of stacked ones, with ReLU between its layers.

    It is given as weight, bias, weight, bias, ... as `affine` takes them.
    """
    if torch.is_grad_enabled():
        outputs: Tensor = _Rectified.apply(rows, *parameters)
        return outputs
    return _layers(rows, parameters)[-1]


def affine(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Map rows [B, inputs] by a weight [outputs, inputs], or rows [M, B, inputs] by stacked ones [M, inputs, outputs].

    The answer is the caller's own, to be overwritten.
    """
    if weight.dim() == 2:  # on a CPU a linear layer first copies its bias to every row
        return torch.mm(rows, weight.T).add_(bias) if rows.is_cpu else F.linear(rows, weight, bias)
    # There a batch of products with vectors takes half as long again as one product after the other.
    one_by_one = rows.is_cpu and weight.shape[2] == 1 and len(weight) > 1
    return (_products(rows, weight) if one_by_one else torch.bmm(rows, weight)).add_(bias)


def _products(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([torch.mm(*pair) for pair in zip(rows, weight, strict=True)])


def _layers(rows: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows, what each ReLU gives, and the outputs of the last layer, on which none acts."""
    seen, last = [rows], len(parameters) - 2
    for i in range(0, last, 2):
        seen.append(affine(seen[-1], parameters[i], parameters[i + 1]).relu_())
    return [*seen, affine(seen[-1], parameters[last], parameters[last + 1])]


class Pass:
    """Rows on their way through the layers, and back: what autograd does, without its bookkeeping.

    It is made, and asked, where autograd is off (`torch.no_grad`).
    """

    def __init__(self, rows: Tensor, *parameters: Tensor) -> None:
        *self._seen, self.outputs = _layers(rows, parameters)
        self._parameters = parameters

    def to_rows(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the rows, given that of the outputs."""
        return _back(self._seen, self._parameters[::2], gradient, to_rows=True, to_parameters=False)[0]

    def to_parameters(self, gradient: Tensor) -> None:
        """Leave the gradients of the parameters that learn in them, given that of the outputs."""
        _, found = _back(self._seen, self._parameters[::2], gradient, to_rows=False, to_parameters=True)
        for parameter, own in zip(self._parameters, found, strict=True):
            if parameter.requires_grad:
                parameter.grad = own


class _Rectified(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *parameters: Tensor) -> Tensor:
        *seen, outputs = _layers(rows, parameters)
        ctx.save_for_backward(*seen, *parameters[::2])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        saved, (gradient,) = ctx.saved_tensors, gradients
        count = len(saved) // 2
        to_rows, to_parameters = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:])
        gradient, found = _back(saved[:count], saved[count:], gradient, to_rows=to_rows, to_parameters=to_parameters)
        return gradient if to_rows else None, *(found if to_parameters else [None] * (2 * count))


def _back(
    seen: Sequence[Tensor], weights: Sequence[Tensor], gradient: Tensor, *, to_rows: bool, to_parameters: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradient of the rows, and those of weight, bias, weight, bias, ..., where they are asked for."""
    found: list[Tensor] = []
    for i in reversed(range(len(seen))):
        if to_parameters:
            found = [*_gradients(seen[i], gradient), *found]
        if i or to_rows:
            gradient = _across(gradient, weights[i])
        if i:
            torch.ops.aten.threshold_backward.grad_input(gradient, seen[i], 0, grad_input=gradient)
    return gradient, found


def _gradients(seen: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    if seen.dim() == 2:
        if seen.is_cpu and seen.shape[1] <= NARROW < gradient.shape[1]:
            return torch.mm(seen.T, gradient).T.contiguous(), gradient.sum(0)
        return torch.mm(gradient.T, seen), gradient.sum(0)
    summed = gradient.sum(1, keepdim=True)
    if gradient.shape[2] == 1:  # a row times a matrix takes a third of the time of a matrix times a column
        return torch.bmm(gradient.transpose(1, 2), seen).transpose(1, 2), summed
    return torch.bmm(seen.transpose(1, 2), gradient), summed


def _across(gradient: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() == 2:
        return torch.mm(gradient, weight)
    across = weight.transpose(1, 2)
    return gradient * across if across.shape[1] == 1 else torch.bmm(gradient, across)
