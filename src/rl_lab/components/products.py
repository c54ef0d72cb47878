"""Products of matrices on a CPU: large ones by oneDNN, small ones by what torch takes itself.

Torch leaves products in float32 to MKL, which on cores that are not Intel's uses vectors of 256 bits. oneDNN uses all
512 bits of a core that has them: there a product takes half the time and adds its bias for nothing. A call of it costs
ten microseconds, so that it pays from about two million multiplications on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LARGE = 2**21  # multiplications
# Torch's own compiler emits this call; an installation without oneDNN does not have it.
_WIDE = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
_ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if _WIDE else None


def is_large(rows: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN multiplies rows [..., B, inputs] faster by a weight with so many entries."""
    size = rows.shape[-2] * weight.shape[-2] * weight.shape[-1]
    is_plain = rows.is_cpu and rows.dtype == weight.dtype == torch.float32
    return size >= LARGE and is_plain and _ONEDNN is not None and keeps_type(rows)


def keeps_type(rows: Tensor) -> bool:
    """Return whether products keep the type of what they are given, and nobody compiles them."""
    return not torch.is_autocast_enabled(rows.device.type) and not torch.compiler.is_compiling()


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left [R, K] times right [K, C], plus a bias [C]; no gradients. The answer is the caller's own."""
    if is_large(left, right):
        if not (right.is_contiguous() or right.T.is_contiguous()):
            right = right.contiguous()  # other layouts take oneDNN a thousand times as long
        # It could apply ReLU, too, but its ReLU turns what is not a number into 0, and hides it.
        answer: Tensor = _ONEDNN(left, right.T, bias, "none", [], "")
        return answer
    answer = torch.mm(left, right)
    return answer if bias is None else answer.add_(bias)


def linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map values [..., inputs] by a weight [outputs, inputs]: `torch.nn.functional.linear`, with its gradients."""
    if not values.is_cpu:
        return F.linear(values, weight, bias)
    rows = values if values.dim() == 2 else values.reshape(-1, values.shape[-1])
    if not is_large(rows, weight):
        return F.linear(values, weight, bias)
    answer: Tensor = _Linear.apply(rows, weight, bias) if torch.is_grad_enabled() else product(rows, weight.T, bias)
    return answer if values.dim() == 2 else answer.view(*values.shape[:-1], -1)


def stacked(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Map rows [M, B, inputs] of each member by its weight [M, inputs, outputs], plus a bias [M, 1 or B, outputs]."""
    if not is_large(rows, weight):
        return torch.baddbmm(bias, rows, weight)
    members = zip(rows.unbind(), weight.transpose(1, 2).unbind(), strict=True)
    return torch.stack([linear(*member) for member in members]) + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return product(rows, weight.T, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (rows, weight), (gradient,) = ctx.saved_tensors, gradients
        to_rows, to_weight, to_bias = ctx.needs_input_grad
        return (
            product(gradient, weight) if to_rows else None,
            product(gradient.T, rows) if to_weight else None,
            gradient.sum(0) if to_bias else None,
        )
