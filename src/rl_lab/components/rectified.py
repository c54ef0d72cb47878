"""Layers with ReLU between them, and their way back written out, which on a CPU takes autograd a fifth longer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def may_write_out(rows: Tensor) -> bool:
    """Return whether gradients are wanted, products keep the type of what they are given, and nobody compiles them."""
    return (
        torch.is_grad_enabled()
        and not torch.is_autocast_enabled(rows.device.type)
        and not torch.compiler.is_compiling()
    )


def affine(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Map rows [B, inputs] by a weight [outputs, inputs], or rows [M, B, inputs] by stacked ones [M, inputs, outputs].

    The answer is the caller's own, to be overwritten.
    """
    return F.linear(rows, weight, bias) if weight.dim() == 2 else torch.bmm(rows, weight).add_(bias)


class Rectified(torch.autograd.Function):
    """A perceptron, or stacked ones, given as rows and weight, bias, weight, bias, ... as `affine` takes them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *parameters: Tensor) -> Tensor:
        """Return the outputs of the last layer, on which no ReLU acts."""
        weights, biases = parameters[::2], parameters[1::2]
        seen = [rows]
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            seen.append(affine(seen[-1], weight, bias).relu_())
        ctx.save_for_backward(*seen, *weights)
        return affine(seen[-1], weights[-1], biases[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of rows, weights and biases, or none where none is wanted."""
        count, (gradient,) = len(ctx.saved_tensors) // 2, gradients
        seen, weights = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        to_rows, to_parameters = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:])
        found: list[Tensor | None] = [] if to_parameters else [None] * (2 * count)
        for i in reversed(range(count)):
            if to_parameters:
                found = [*_gradients(seen[i], gradient), *found]
            if i or to_rows:
                gradient = _across(gradient, weights[i])
            if i:
                torch.ops.aten.threshold_backward.grad_input(gradient, seen[i], 0, grad_input=gradient)
        return gradient if to_rows else None, *found


def _gradients(seen: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    if seen.dim() == 2:
        return torch.mm(gradient.T, seen), gradient.sum(0)
    return torch.bmm(seen.transpose(1, 2), gradient), gradient.sum(1, keepdim=True)


def _across(gradient: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() == 2:
        return torch.mm(gradient, weight)
    across = weight.transpose(1, 2)
    return gradient * across if across.shape[1] == 1 else torch.bmm(gradient, across)
