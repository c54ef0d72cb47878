"""The GPU kernel behind normalised layers (`components/layer_norm.py`), in Triton, which comes with torch for GPUs."""

from __future__ import annotations

from torch import Tensor

from rl_lab.core.kernels import jit, tl, triton


@jit
def _normalize_rows(  # type: ignore[no-untyped-def]
    products,
    biases,
    gains,
    shifts,
    actions,
    weights,
    answers,
    num_rows,
    rows_per_member,
    rows_per_product,
    eps,
    NUM_ACTIONS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    member = first // rows_per_member  # all rows of a program belong to one network
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    within = columns < SIZE
    inside = (rows < num_rows)[:, None] & within[None, :]
    own = member * SIZE + columns
    values = tl.load(products + (rows // rows_per_product)[:, None] * SIZE + columns[None, :], mask=inside, other=0.0)
    values = values.to(tl.float32) + tl.load(biases + own, mask=within, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(NUM_ACTIONS):
        at = actions + (rows - member * rows_per_member) * NUM_ACTIONS + k
        taken = tl.load(at, mask=rows < num_rows, other=0.0).to(tl.float32)
        weight = tl.load(weights + (member * NUM_ACTIONS + k) * SIZE + columns, mask=within, other=0.0)
        values += taken[:, None] * weight.to(tl.float32)[None, :]
    mean = tl.sum(values, 1) / SIZE
    centred = tl.where(inside, values - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / SIZE
    gain = tl.load(gains + own, mask=within, other=0.0).to(tl.float32)[None, :]
    shift = tl.load(shifts + own, mask=within, other=0.0).to(tl.float32)[None, :]
    values = centred * (1.0 / tl.sqrt(variance + eps))[:, None] * gain + shift
    if GROUP == 0:
        # Mish: x * tanh(log(1 + e^x)) = x * n / (n + 2) with n = e^x (e^x + 2)
        power = tl.exp(tl.minimum(values, 20.0))
        grown = power * (power + 2.0)
        values = values * grown / (grown + 2.0)
    else:
        grouped = tl.reshape(values, (ROWS, BLOCK // GROUP, GROUP))
        grouped = tl.exp(grouped - tl.max(grouped, 2)[:, :, None])
        grouped = grouped / tl.sum(grouped, 2)[:, :, None]
        values = tl.reshape(grouped, (ROWS, BLOCK))
    tl.store(answers + rows[:, None] * SIZE + columns[None, :], values, mask=inside)


def _shape(members: int, rows: int, block: int) -> tuple[int, int]:
    """Return how many rows a program does, and by how many warps."""
    if rows % 4 == 0 and members * rows >= 4096 and block <= 1024:
        return 4, 4
    return 1, 8 if block > 1024 else 4


def launch(
    products: Tensor,
    biases: Tensor,
    gains: Tensor,
    shifts: Tensor,
    actions: Tensor | None,
    weights: Tensor | None,
    answers: Tensor,
    group: int | None,
    eps: float,
) -> None:
    """Fill `answers` [M, rows, size]; every tensor is contiguous."""
    members, rows, size = answers.shape
    block = triton.next_power_of_2(size)
    several, warps = _shape(members, rows, block)
    _normalize_rows[(triton.cdiv(members * rows, several),)](
        products,
        biases,
        gains,
        shifts,
        products if actions is None else actions,
        products if weights is None else weights,
        answers,
        members * rows,
        rows,
        rows // products.shape[1],
        eps,
        NUM_ACTIONS=0 if actions is None else actions.shape[-1],
        SIZE=size,
        BLOCK=block,
        GROUP=0 if group is None else group,
        ROWS=several,
        num_warps=warps,
    )
