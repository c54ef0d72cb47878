"""Pieces of world models that a GPU does in one kernel each, with their gradients.

`fuses` says where: on a GPU, outside compiled functions, which are fused by the compiler. Everywhere else the plain
operations are used; they say what these compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_lab.core.activation_kernels import Resize, activate, activate_backward, build_backward
from rl_lab.core.cell_kernels import gate, gate_backward, sample, sample_backward
from rl_lab.core.kernels import AVAILABLE


def fuses(values: Tensor) -> bool:
    """Return whether these kernels can be used on a tensor."""
    return values.is_cuda and AVAILABLE and not torch.compiler.is_compiling()


class Gated(torch.autograd.Function):
    """A gated recurrent unit's mix of old state and candidate."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, states: Tensor, width: int, update_bias: float) -> Tensor:
        """Return new states [..., D] from gates [..., 3 * D] in blocks of `width`."""
        gates, states = gates.contiguous(), states.contiguous()
        ctx.save_for_backward(gates, states)
        ctx.width, ctx.update_bias = width, update_bias
        answers = torch.empty_like(states)
        gate(gates, states, width, update_bias, answers)
        return answers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of gates and states."""
        gates, states = ctx.saved_tensors
        found = torch.empty_like(gates), torch.empty_like(states)
        gate_backward(gates, states, gradients[0].contiguous(), ctx.width, ctx.update_bias, found)
        return *found, None, None


class Sampled(torch.autograd.Function):
    """One-hot codes drawn from logits; gradients pass to the probabilities as if the codes were those."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, draws: Tensor, unimix: float) -> Tensor:
        """Return codes [..., classes] of logits [..., classes] by numbers [...] in [0, 1)."""
        rows = logits.reshape(-1, logits.shape[-1]).contiguous()
        ctx.save_for_backward(rows)
        ctx.shape, ctx.unimix = logits.shape, unimix
        codes = torch.empty(logits.shape, device=logits.device)
        sample(rows, draws.contiguous(), unimix, codes)
        return codes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient of the logits."""
        (rows,) = ctx.saved_tensors
        found = torch.empty_like(rows)
        sample_backward(rows, gradients[0].contiguous(), ctx.unimix, found)
        return found.view(ctx.shape), None, None


class Activated(torch.autograd.Function):
    """What follows a product or a convolution: a bias, perhaps a change of size, a root-mean-square norm, and SiLU."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, bias: Tensor | None, scale: Tensor, eps: float, resize: Resize | None
    ) -> Tensor:
        """Return activations [..., C] of values [..., C]; of pictures [R, H, W, C] if they are resized."""
        values = values.contiguous()
        ctx.save_for_backward(values, bias, scale)
        ctx.eps, ctx.resize = eps, resize
        answers = activate(values, bias, scale, eps, resize)
        if any(ctx.needs_input_grad):
            build_backward(values, bias, scale, answers, eps, resize)
        return answers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of values, bias and scale."""
        gradient, learns = gradients[0].contiguous(), any(ctx.needs_input_grad[1:3])
        found = activate_backward(*ctx.saved_tensors, gradient, ctx.eps, ctx.resize, learns=learns)
        return *found, None, None


class Attached(torch.autograd.Function):
    """An output and an offset of zeros: the output as it is, and its gradient for both."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, offset: Tensor) -> Tensor:
        """Return the output."""
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient twice."""
        return gradients[0], gradients[0]


def attach(output: Tensor, offset: Tensor) -> Tensor:
    """Return an output to which zeros are added that receive its gradient."""
    if torch.compiler.is_compiling():
        return output + offset
    attached: Tensor = Attached.apply(output, offset)
    return attached
