"""Bias, layer norm and activation behind a product, in one pass over memory: for decisions on a GPU.

A normalised layer is a product, a bias, perhaps the share of an action, a layer norm and an activation. As operations
of their own each reads and writes all rows; `fused_norm` reads and writes them once. It knows no gradients: where they
are asked for, and on a CPU, the plain operations do the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rl_lab.core.kernels import AVAILABLE
from rl_lab.core.norm_kernel import launch

EPS = 1e-5
MAX_SIZE, MAX_ACTIONS = 4096, 64


class Beside(NamedTuple):
    """Actions [..., A] that join a product before its norm, through weights [M, A, size]."""

    actions: Tensor
    weights: Tensor


def can_fuse(values: Tensor, size: int, group: int | None, num_actions: int) -> bool:
    """Return whether `fused_norm` can do what follows a product of `values` that has `size` entries."""
    if not values.is_cuda or torch.is_grad_enabled() or not AVAILABLE:
        return False
    divisible = group is None or (size & (size - 1) == 0 and group & (group - 1) == 0)
    return size <= MAX_SIZE and num_actions <= MAX_ACTIONS and divisible


def fused_norm(
    products: Tensor,
    bias: Tensor,
    gain: Tensor,
    shift: Tensor,
    *,
    group: int | None = None,
    beside: Beside | None = None,
) -> Tensor:
    """Return activations [M, rows, size] of products [M, R, size] of M networks with parameters [M, size].

    The activation is Mish, or with `group` a softmax over neighbouring entries. Actions [rows, A] are the same for
    all networks; where there are more of them than products, `rows / R` in a row share one product.
    """
    members, num_products, size = products.shape
    rows = num_products if beside is None else beside.actions.shape[:-1].numel()
    answer = torch.empty(members, rows, size, dtype=products.dtype, device=products.device)
    launch(
        products.contiguous(),
        bias.contiguous(),
        gain.contiguous(),
        shift.contiguous(),
        None if beside is None else beside.actions.contiguous(),
        None if beside is None else beside.weights.contiguous(),
        answer,
        group,
        EPS,
    )
    return answer
