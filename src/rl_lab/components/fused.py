"""Pieces of world models that a GPU does in one kernel each, with their gradients.

`fuses` says where: on a GPU, outside compiled functions, which are fused by the compiler. Everywhere else the plain
operations are used; they say what these compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_lab.core import cell_kernels, picture_kernels


def fuses(values: Tensor) -> bool:
    """Return whether these kernels can be used on a tensor."""
    return values.is_cuda and cell_kernels.AVAILABLE and not torch.compiler.is_compiling()


class Gated(torch.autograd.Function):
    """A gated recurrent unit's mix of old state and candidate."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, states: Tensor, width: int, update_bias: float) -> Tensor:
        """Return new states [..., D] from gates [..., 3 * D] in blocks of `width`."""
        gates, states = gates.contiguous(), states.contiguous()
        ctx.save_for_backward(gates, states)
        ctx.width, ctx.update_bias = width, update_bias
        return cell_kernels.gate(gates, states, width, update_bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of gates and states."""
        found = cell_kernels.gate_backward(*ctx.saved_tensors, gradients[0].contiguous(), ctx.width, ctx.update_bias)
        return *found, None, None


class Sampled(torch.autograd.Function):
    """One-hot codes drawn from logits; gradients pass to the probabilities as if the codes were those."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, draws: Tensor, unimix: float) -> Tensor:
        """Return codes [..., classes] of logits [..., classes] by numbers [...] in [0, 1)."""
        rows = logits.reshape(-1, logits.shape[-1]).contiguous()
        ctx.save_for_backward(rows)
        ctx.shape, ctx.unimix = logits.shape, unimix
        return cell_kernels.sample(rows, draws.contiguous(), unimix).view(logits.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient of the logits."""
        (rows,) = ctx.saved_tensors
        found = cell_kernels.sample_backward(rows, gradients[0].reshape(rows.shape).contiguous(), ctx.unimix)
        return found.view(ctx.shape), None, None


class NormedSilu(torch.autograd.Function):
    """SiLU behind a root-mean-square norm with a constant scale."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ahead: Tensor | None, scale: Tensor, eps: float) -> Tensor:
        """Return activations [..., size] of values, to which `ahead` is added."""
        rows = values.reshape(-1, values.shape[-1]).contiguous()
        added = None if ahead is None else ahead.reshape(rows.shape).contiguous()
        normed = cell_kernels.norm_silu(rows, added, scale, eps)
        ctx.save_for_backward(scale, normed.normalized, normed.roots)
        ctx.shape, ctx.has_ahead = values.shape, ahead is not None
        return normed.answers.view(values.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of values and of what was added to them."""
        scale, normalized, roots = ctx.saved_tensors
        given = gradients[0].reshape(normalized.shape).contiguous()
        found = cell_kernels.norm_silu_backward(given, scale, normalized, roots)[1].view(ctx.shape)
        return found, found if ctx.has_ahead else None, None, None


class NormedPixels(torch.autograd.Function):
    """What lies between two convolutions: a bias, a change of size, a norm over the channels of a pixel, and SiLU."""

    @staticmethod
    def forward(ctx: Any, products: Tensor, bias: Tensor, scale: Tensor, eps: float, pools: bool) -> Tensor:
        """Return pictures [R, C, H, W]: half as large as the products if `pools`, else twice, of fewer channels."""
        values = products.permute(0, 2, 3, 1).contiguous()
        ctx.save_for_backward(values, bias, scale)
        ctx.eps, ctx.pools = eps, pools
        return picture_kernels.norm_pixels(values, bias, scale, eps, pools=pools).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of products, bias and scale."""
        given = gradients[0].permute(0, 2, 3, 1).contiguous()
        found, *others = picture_kernels.norm_pixels_backward(*ctx.saved_tensors, given, ctx.eps, pools=ctx.pools)
        return found.permute(0, 3, 1, 2), *others, None, None


class Attached(torch.autograd.Function):
    """An output and an offset of zeros: the output as it is, and its gradient for both."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, offset: Tensor) -> Tensor:
        """Return the output."""
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient twice."""
        return gradients[0], gradients[0]


def attach(output: Tensor, offset: Tensor) -> Tensor:
    """Return an output to which zeros are added that receive its gradient."""
    if torch.compiler.is_compiling():
        return output + offset
    attached: Tensor = Attached.apply(output, offset)
    return attached
