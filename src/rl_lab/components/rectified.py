"""Layers with ReLU between them, and their way back written out, which on a CPU takes autograd a fifth longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_lab.core.products import is_large_stack, product, weight_gradient


def rectified(rows: Tensor, *parameters: Tensor) -> Tensor:
    """Return the outputs of a perceptron, or of stacked ones, with ReLU between its layers.

    It is given as weight, bias, weight, bias, ...: weights [outputs, inputs] and biases [outputs] for rows [B, inputs],
    weights [M, inputs, outputs] and biases [M, 1, outputs] for rows [M, B, inputs] of stacked ones.
    """
    if rows.dim() == 3 and is_large_stack(rows, parameters[::2]):
        members = zip(rows.unbind(), _apart(parameters), strict=True)
        return torch.stack([rectified(own, *member) for own, member in members])
    if torch.is_grad_enabled():
        outputs: Tensor = _Rectified.apply(rows, *parameters)
        return outputs
    return _layers(rows, parameters)[-1]


def _affine(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if weight.dim() == 2:  # on a CPU a small linear layer of torch first copies its bias to every row
        return product(rows, weight.T, bias) if rows.is_cpu else F.linear(rows, weight, bias)
    return torch.bmm(rows, weight).add_(bias)


def _layers(rows: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows, what each ReLU gives, and the outputs of the last layer, on which none acts."""
    seen, last = [rows], len(parameters) - 2
    for i in range(0, last, 2):
        seen.append(_affine(seen[-1], parameters[i], parameters[i + 1]).relu_())
    return [*seen, _affine(seen[-1], parameters[last], parameters[last + 1])]


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
        _leave(self._parameters, self.gradients(gradient))

    def gradients(self, gradient: Tensor) -> list[Tensor]:
        """Return the gradients of the parameters, given that of the outputs."""
        return _back(self._seen, self._parameters[::2], gradient, to_rows=False, to_parameters=True)[1]


class StackedPass:
    """The same rows on their way through the members of a stack, one after the other, and back."""

    def __init__(self, rows: Tensor, *parameters: Tensor) -> None:
        self._members = [Pass(rows, *member) for member in _apart(parameters)]
        self._parameters = parameters
        self.outputs = torch.stack([member.outputs for member in self._members])

    def to_rows(self, gradient: Tensor) -> Tensor:
        """Return the gradients of the rows [M, B, inputs], given those of the outputs."""
        return torch.stack([member.to_rows(own) for member, own in zip(self._members, gradient, strict=True)])

    def to_parameters(self, gradient: Tensor) -> None:
        """Leave the gradients of the parameters that learn in them, given that of the outputs of all members."""
        found = [member.gradients(own) for member, own in zip(self._members, gradient, strict=True)]
        _leave(self._parameters, _together(found))


def _apart(parameters: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return the parameters of each member of a stack as those of linear layers."""
    members = zip(*(entry.unbind() for entry in parameters), strict=True)
    return [tuple(own.squeeze(0) if i % 2 else own.T for i, own in enumerate(member)) for member in members]


def _together(members: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the parameters of a stack, or their gradients, from those of its members: the opposite of `_apart`."""
    same = enumerate(zip(*members, strict=True))
    return [torch.stack(own).unsqueeze(1) if i % 2 else torch.stack([each.T for each in own]) for i, own in same]


def _leave(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.requires_grad:
            parameter.grad = gradient


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
            found = [*_gradients(seen[i], gradient, weights[i]), *found]
        if i or to_rows:
            gradient = _across(gradient, weights[i])
        if i:
            torch.ops.aten.threshold_backward.grad_input(gradient, seen[i], 0, grad_input=gradient)
    return gradient, found


def _gradients(seen: Tensor, gradient: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if seen.dim() == 2:
        return weight_gradient(seen, gradient, weight), gradient.sum(0)
    summed = gradient.sum(1, keepdim=True)
    if gradient.shape[2] == 1:  # a row times a matrix takes a third of the time of a matrix times a column
        return torch.bmm(gradient.transpose(1, 2), seen).transpose(1, 2), summed
    return torch.bmm(seen.transpose(1, 2), gradient), summed


def _across(gradient: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() == 2:
        return product(gradient, weight)
    across = weight.transpose(1, 2)
    return gradient * across if across.shape[1] == 1 else torch.bmm(gradient, across)
