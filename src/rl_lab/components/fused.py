"""Pieces of world models with their way back written out: on a GPU one kernel each, on a CPU a few operations.

`is_written_out` says where, `fuses` where by kernels: not in compiled functions, which are fused by the compiler.
Everywhere else plain operations are used; they say what these compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_lab.core import activation_kernels, cell_kernels, cell_operations
from rl_lab.core.activation_kernels import Resize
from rl_lab.core.kernels import AVAILABLE


def fuses(values: Tensor) -> bool:
    """Return whether kernels can be used on a tensor."""
    return values.is_cuda and AVAILABLE and not torch.compiler.is_compiling()


def is_written_out(values: Tensor) -> bool:
    """Return whether these pieces can be used on a tensor."""
    return (values.is_cpu or fuses(values)) and not torch.compiler.is_compiling()


def pieces(values: Tensor) -> Any:
    """Return what has the pieces of a recurrent step for a tensor: kernels, or operations of torch."""
    return cell_kernels if values.is_cuda else cell_operations


class Gated(torch.autograd.Function):
    """A gated recurrent unit's mix of old state and candidate; on a CPU autograd's own way back is as fast."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, states: Tensor, width: int, update_bias: float) -> Tensor:
        """Return new states [..., D] from gates [..., 3 * D] in blocks of `width`."""
        ctx.save_for_backward(gates, states)
        ctx.width, ctx.update_bias = width, update_bias
        return _mixed(gates, states, width, update_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of gates and states."""
        gates, states = (tensor.contiguous() for tensor in ctx.saved_tensors)
        found = torch.empty_like(gates), torch.empty_like(states)
        pieces(gates).gate_backward(gates, states, gradients[0].contiguous(), ctx.width, ctx.update_bias, found)
        return *found, None, None


def mix(gates: Tensor, states: Tensor, width: int, update_bias: float) -> Tensor:
    """Return new states [..., D] from gates [..., 3 * D] in blocks of `width`."""
    mixed: Tensor = (Gated.apply if torch.is_grad_enabled() else _mixed)(gates, states, width, update_bias)
    return mixed


def _mixed(gates: Tensor, states: Tensor, width: int, update_bias: float) -> Tensor:
    gates, states = gates.contiguous(), states.contiguous()
    answers = torch.empty_like(states)
    pieces(gates).gate(gates, states, width, update_bias, answers)
    return answers


class Sampled(torch.autograd.Function):
    """One-hot codes drawn from logits; gradients pass to the probabilities as if the codes were those."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, draws: Tensor, unimix: float) -> Tensor:
        """Return codes [..., classes] of logits [..., classes] by numbers [...] in [0, 1)."""
        ctx.save_for_backward(logits)
        ctx.unimix = unimix
        return _sampled(logits, draws, unimix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient of the logits."""
        (logits,) = ctx.saved_tensors
        rows = logits.reshape(-1, logits.shape[-1]).contiguous()
        found = torch.empty_like(rows)
        pieces(rows).sample_backward(rows, gradients[0].contiguous(), ctx.unimix, found)
        return found.view(logits.shape), None, None


def sample_codes(logits: Tensor, draws: Tensor, unimix: float) -> Tensor:
    """Return codes [..., classes] of logits [..., classes] by numbers [...] in [0, 1)."""
    codes: Tensor = (Sampled.apply if torch.is_grad_enabled() else _sampled)(logits, draws, unimix)
    return codes


def _sampled(logits: Tensor, draws: Tensor, unimix: float) -> Tensor:
    rows = logits.reshape(-1, logits.shape[-1]).contiguous()
    codes = torch.empty(logits.shape, device=logits.device)
    pieces(rows).sample(rows, draws.contiguous(), unimix, codes)
    return codes


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
        answers = _activated(values, bias, scale, eps, resize)
        if values.is_cuda and any(ctx.needs_input_grad):
            activation_kernels.build_backward(values, bias, scale, answers, eps, resize)
        return answers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of values, bias and scale."""
        gradient, learns = gradients[0].contiguous(), any(ctx.needs_input_grad[1:3])
        if gradient.is_cpu:
            found = cell_operations.activate_backward(*ctx.saved_tensors, gradient, ctx.eps, learns=learns)
        else:
            found = activation_kernels.activate_backward(
                *ctx.saved_tensors, gradient, ctx.eps, ctx.resize, learns=learns
            )
        return *found, None, None


def activate(values: Tensor, bias: Tensor | None, scale: Tensor, eps: float, resize: Resize | None = None) -> Tensor:
    """Return activations [..., C] of values [..., C]; of pictures [R, H, W, C] if a GPU is to resize them."""
    run = Activated.apply if torch.is_grad_enabled() else _activated
    activations: Tensor = run(values, bias, scale, eps, resize)
    return activations


def _activated(values: Tensor, bias: Tensor | None, scale: Tensor, eps: float, resize: Resize | None) -> Tensor:
    if values.is_cpu:
        assert resize is None
        return cell_operations.activate(values, bias, scale, eps)
    return activation_kernels.activate(values.contiguous(), bias, scale, eps, resize)


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
