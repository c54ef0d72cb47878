"""The GPU kernel of LaProp (`components/laprop.py`), in Triton, which comes with torch for GPUs.

One launch does for all parameters what would be a dozen operations, three of which torch does parameter by parameter,
because each parameter has numbers of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rl_lab.core.kernels import jit, tl

_BLOCK = 2048


@jit
def _step(  # type: ignore[no-untyped-def]
    flat,
    addresses,
    blocks,
    starts,
    sizes,
    factors,
    spreads,
    rates,
    applied,
    mean_share,
    square_share,
    eps,
    BLOCK: tl.constexpr,  # noqa: N803
):
    program = tl.program_id(0)
    index, first = tl.load(blocks + 2 * program), tl.load(blocks + 2 * program + 1)
    parameters = tl.load(addresses + 3 * index).to(tl.pointer_type(tl.float32))
    means = tl.load(addresses + 3 * index + 1).to(tl.pointer_type(tl.float32))
    squares = tl.load(addresses + 3 * index + 2).to(tl.pointer_type(tl.float32))
    at = first + tl.arange(0, BLOCK)
    inside = at < tl.load(sizes + index)
    is_applied = tl.load(applied)
    gradient = tl.load(flat + tl.load(starts + index) + at, mask=inside, other=0.0) * tl.load(factors + index)
    square = tl.load(squares + at, mask=inside, other=0.0) * (1.0 - square_share * is_applied)
    square += square_share * gradient * gradient
    scale = tl.sqrt(square) * tl.load(spreads + index) + eps
    mean = tl.load(means + at, mask=inside, other=0.0) * (1.0 - mean_share * is_applied) + mean_share * gradient / scale
    moved = tl.load(parameters + at, mask=inside, other=0.0) - tl.load(rates + index) * mean
    tl.store(squares + at, square, mask=inside)
    tl.store(means + at, mean, mask=inside)
    tl.store(parameters + at, moved, mask=inside)


class Tables(NamedTuple):
    """Where parameters and their moments lie, and how they are divided among programs."""

    addresses: Tensor  # [P, 3]: of parameter, mean and square
    blocks: Tensor  # [N, 2]: parameter, and first entry
    starts: Tensor  # [P]: of the parameter in the flat gradient
    sizes: Tensor  # [P]


class Numbers(NamedTuple):
    """What each parameter [P] has for itself, and whether the step is taken at all."""

    factors: Tensor  # of the gradient
    spreads: Tensor  # of the root of the mean square
    rates: Tensor  # of the move
    applied: Tensor  # []: 1, or 0 if the step is skipped


def tabulate(triples: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tables:
    """Return the tables of parameters with their means and squares, which must not move any more."""
    device = triples[0][0].device
    sizes = [parameter.numel() for parameter, _, _ in triples]
    blocks = [(i, first) for i, size in enumerate(sizes) for first in range(0, size, _BLOCK)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    addresses = [[tensor.data_ptr() for tensor in triple] for triple in triples]
    columns = (addresses, blocks, starts, sizes)
    return Tables(*(torch.tensor(column, dtype=torch.int64).to(device) for column in columns))


def take_step(flat: Tensor, tables: Tables, numbers: Numbers, betas: tuple[float, float], eps: float) -> None:
    """Move all parameters and their moments by a flat gradient [sum of sizes]."""
    shares = (1.0 - betas[0], 1.0 - betas[1])
    _step[(len(tables.blocks),)](flat, *tables, *numbers, *shares, eps, BLOCK=_BLOCK)
