"""Products of matrices on a CPU: large ones by oneDNN, small ones by what torch takes itself.

Torch leaves products in float32 to MKL, which on cores that are not Intel's uses vectors of 256 bits. oneDNN uses all
512 bits of a core that has them: on an AMD EPYC of the fifth generation a product takes half the time, and its bias
nothing. A call of it costs ten microseconds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LARGE = 2**22  # multiplications from which a call of oneDNN pays
LARGE_MEMBER = 2**23  # the same for a member of a stack, which would otherwise be multiplied together with the others
THIN = 4  # rows or columns; below, MKL is faster

_AVAILABLE = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
_WIDE = _AVAILABLE and torch.backends.cpu.get_cpu_capability() == "AVX512"
# Torch's own compiler emits this call; an installation without oneDNN does not have it.
ONEDNN: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if _WIDE else None
# It keeps what it built for every number of rows it ever saw, half a megabyte each; a thousand of them by default.
for _name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "256")


def is_eager(rows: Tensor) -> bool:
    """Return whether a product is computed at once, in the type of its rows: not under autocast, nor compiled."""
    return not torch.is_autocast_enabled(rows.device.type) and not torch.compiler.is_compiling()


def is_large(left: Tensor, right: Tensor) -> bool:
    """Return whether oneDNN multiplies [R, K] by [K, C] faster."""
    fits = left.dtype == right.dtype and left.shape[1] == right.shape[0]  # otherwise torch says what does not fit
    return fits and _pays(left, right.shape, LARGE)


def is_large_stack(rows: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return whether rows [..., B, any] that pass weights [M, inputs, outputs] meet a large product.

    Then members are multiplied faster one after the other.
    """
    return any(_pays(rows, weight.shape, LARGE_MEMBER) for weight in weights)


def _pays(rows: Tensor, weight: torch.Size, least: int) -> bool:
    if ONEDNN is None or not rows.is_cpu or rows.dtype != torch.float32:
        return False
    sizes = rows.shape[-2], weight[-2], weight[-1]
    return sizes[0] * sizes[1] * sizes[2] >= least and min(sizes) >= THIN and is_eager(rows)


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left [R, K] times right [K, C], plus a bias [C]; no gradients. The answer is the caller's own."""
    if is_large(left, right) and (bias is None or bias.shape == right.shape[1:]):
        if not (right.is_contiguous() or right.T.is_contiguous()):
            right = right.contiguous()  # other layouts take oneDNN a thousand times as long
        if bias is not None:
            bias = bias.contiguous()  # it takes this for granted
        # It could apply ReLU, too, but its ReLU turns what is not a number into 0, and hides it.
        answer: Tensor = ONEDNN(left, right.T, bias, "none", [], "")
        return answer
    answer = torch.mm(left, right)
    return answer if bias is None else answer.add_(bias)


def fill(answers: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None) -> None:
    """Fill `answers` [R, C], in whatever layout, with left [R, K] times right [K, C], plus a bias [C]; no gradients."""
    if is_large(left, right):
        answers.copy_(product(left.contiguous(), right, bias))
    elif bias is None:
        torch.mm(left, right, out=answers)
    else:
        torch.addmm(bias, left, right, out=answers)


def add(answers: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left [R, K] times right [K, C] to `answers` [R, C]; no gradients."""
    if is_large(left, right):
        answers.add_(product(left.contiguous(), right))
    else:
        answers.addmm_(left, right)


def weight_gradient(rows: Tensor, outputs: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a weight [C, K] from its rows [R, K] and the gradient of its outputs [R, C].

    It is laid out in memory as the weight is: fused optimisers take that for granted.
    """
    is_turned = weight.T.is_contiguous() and not weight.is_contiguous()
    left, right = (rows, outputs) if is_turned else (outputs, rows)
    if left.is_cpu and 2 * right.shape[1] <= left.shape[1]:  # turning the narrower side is less work
        answer = product(right.T, left).T.contiguous()
    else:
        answer = product(left.T, right)
    return answer.T if is_turned else answer


def linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map values [..., inputs] by a weight [outputs, inputs]: `torch.nn.functional.linear`, once differentiable."""
    if not values.is_cpu or values.numel() * len(weight) < LARGE:
        return F.linear(values, weight, bias)
    rows = values if values.dim() == 2 else values.reshape(-1, values.shape[-1])
    if not is_large(rows, weight.T) or (bias is not None and bias.dim() != 1):
        return F.linear(values, weight, bias)
    if torch.is_grad_enabled():
        answer: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    else:
        answer = product(rows, weight.T, bias)
    return answer if values.dim() == 2 else answer.view(*values.shape[:-1], -1)


def stacked(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Map rows [M, R, inputs] of each member by its weight [M, inputs, outputs], plus a bias [M, 1 or R, outputs]."""
    if not is_large_stack(rows, [weight]):
        return torch.baddbmm(bias, rows, weight)
    members = zip(rows.unbind(), weight.unbind(), strict=True)
    return torch.stack([linear(own, matrix.T) for own, matrix in members]).add_(bias)


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
            weight_gradient(rows, gradient, weight) if to_weight else None,
            gradient.sum(0) if to_bias else None,
        )
