"""GPU kernels of a recurrent step (`components/fused.py`), in Triton, which comes with torch for GPUs.

Each does for all rows what would be a dozen operations, each of which takes as long as the whole kernel: the rows of a
scan are few, and what counts is the number of launches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = tl = None


def _gate(  # type: ignore[no-untyped-def]
    gates,
    states,
    gradients,
    answers,
    gate_gradients,
    num_entries,
    update_bias,
    SIZE: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    BACKWARD: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    entries = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < num_entries
    row, column = entries // SIZE, entries % SIZE
    at = row * (3 * SIZE) + column // WIDTH * (3 * WIDTH) + column % WIDTH  # reset, candidate, update: block by block
    state = tl.load(states + entries, mask=inside, other=0.0).to(tl.float32)
    raw = tl.load(gates + at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    reset = tl.sigmoid(tl.load(gates + at, mask=inside, other=0.0).to(tl.float32))
    update = tl.sigmoid(tl.load(gates + at + 2 * WIDTH, mask=inside, other=0.0).to(tl.float32) + update_bias)
    candidate = 2.0 * tl.sigmoid(2.0 * reset * raw) - 1.0  # the hyperbolic tangent
    if BACKWARD:
        gradient = tl.load(gradients + entries, mask=inside, other=0.0).to(tl.float32)
        inner = gradient * update * (1.0 - candidate * candidate)
        tl.store(gate_gradients + at, inner * raw * reset * (1.0 - reset), mask=inside)
        tl.store(gate_gradients + at + WIDTH, inner * reset, mask=inside)
        of_update = gradient * (candidate - state) * update * (1.0 - update)
        tl.store(gate_gradients + at + 2 * WIDTH, of_update, mask=inside)
        tl.store(answers + entries, gradient * (1.0 - update), mask=inside)
    else:
        tl.store(answers + entries, update * candidate + (1.0 - update) * state, mask=inside)


def _sample(  # type: ignore[no-untyped-def]
    logits,
    draws,
    gradients,
    answers,
    num_rows,
    unimix,
    CLASSES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    BACKWARD: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < CLASSES)[None, :]
    at = rows[:, None] * CLASSES + columns[None, :]
    values = tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32)
    values = tl.where((rows < num_rows)[:, None], values, 0.0)
    shares = tl.exp(values - tl.max(values, 1)[:, None])
    shares = shares / tl.sum(shares, 1)[:, None]
    if BACKWARD:
        gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32) * (1.0 - unimix)
        mean = tl.sum(gradient * shares, 1)[:, None]
        tl.store(answers + at, shares * (gradient - mean), mask=inside)
    else:
        mixed = tl.where(inside, (1.0 - unimix) * shares + unimix / CLASSES, 0.0)
        draw = tl.load(draws + rows, mask=rows < num_rows, other=0.0)
        passed = (tl.cumsum(mixed, 1) <= draw[:, None]) & (columns < CLASSES)[None, :]
        chosen = tl.minimum(tl.sum(passed.to(tl.int32), 1), CLASSES - 1)
        tl.store(answers + at, (columns[None, :] == chosen[:, None]).to(tl.float32), mask=inside)


def _norm_silu(  # type: ignore[no-untyped-def]
    values,
    ahead,
    scales,
    normalized,
    roots,
    answers,
    eps,
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    HAS_AHEAD: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = row * SIZE + columns
    entries = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_AHEAD:
        entries += tl.load(ahead + at, mask=inside, other=0.0).to(tl.float32)
    root = 1.0 / tl.sqrt(tl.sum(entries * entries, 0) / SIZE + eps)
    kept = (entries * root).to(normalized.dtype.element_ty)
    tl.store(normalized + at, kept, mask=inside)
    tl.store(roots + row, root)
    scaled = kept.to(tl.float32) * tl.load(scales + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(answers + at, scaled * tl.sigmoid(scaled), mask=inside)


def _norm_silu_backward(  # type: ignore[no-untyped-def]
    gradients,
    scales,
    normalized,
    roots,
    scaled_gradients,
    answers,
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = row * SIZE + columns
    kept = tl.load(normalized + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scales + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(kept * scale)
    gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
    gradient = gradient * share * (1.0 + kept * scale * (1.0 - share))
    tl.store(scaled_gradients + at, gradient, mask=inside)
    gradient = gradient * scale
    mean = tl.sum(gradient * kept, 0) / SIZE
    tl.store(answers + at, tl.load(roots + row) * (gradient - kept * mean), mask=inside)


AVAILABLE = triton is not None
_KERNELS: dict[str, Any] = (
    {function.__name__: triton.jit(function) for function in (_gate, _sample, _norm_silu, _norm_silu_backward)}
    if AVAILABLE
    else {}
)
_BLOCK, _ROWS = 1024, 16


def gate(gates: Tensor, states: Tensor, width: int, update_bias: float) -> Tensor:
    """Return new states [..., D] from gates [..., 3 * D] that come in blocks of `width` entries."""
    answers = torch.empty_like(states)
    _launch_gate(gates, states, states, answers, gates, width, update_bias, backward=False)
    return answers


def gate_backward(
    gates: Tensor, states: Tensor, gradients: Tensor, width: int, update_bias: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gates and states."""
    of_gates, of_states = torch.empty_like(gates), torch.empty_like(states)
    _launch_gate(gates, states, gradients, of_states, of_gates, width, update_bias, backward=True)
    return of_gates, of_states


def _launch_gate(
    gates: Tensor,
    states: Tensor,
    gradients: Tensor,
    answers: Tensor,
    gate_gradients: Tensor,
    width: int,
    update_bias: float,
    *,
    backward: bool,
) -> None:
    grid = (triton.cdiv(states.numel(), _BLOCK),)
    _KERNELS["_gate"][grid](
        gates,
        states,
        gradients,
        answers,
        gate_gradients,
        states.numel(),
        update_bias,
        SIZE=states.shape[-1],
        WIDTH=width,
        BACKWARD=backward,
        BLOCK=_BLOCK,
    )


def sample(logits: Tensor, draws: Tensor, unimix: float) -> Tensor:
    """Return one-hot codes [R, classes] of logits [R, classes] and one number in [0, 1) for each row."""
    answers = torch.empty(logits.shape, device=logits.device)
    _launch_sample(logits, draws, logits, answers, unimix, backward=False)
    return answers


def sample_backward(logits: Tensor, gradients: Tensor, unimix: float) -> Tensor:
    """Return the gradient of the logits, as if the codes were the probabilities."""
    answers = torch.empty_like(logits)
    _launch_sample(logits, logits, gradients, answers, unimix, backward=True)
    return answers


def _launch_sample(
    logits: Tensor, draws: Tensor, gradients: Tensor, answers: Tensor, unimix: float, *, backward: bool
) -> None:
    num_rows, num_classes = logits.shape
    _KERNELS["_sample"][(triton.cdiv(num_rows, _ROWS),)](
        logits,
        draws,
        gradients,
        answers,
        num_rows,
        unimix,
        CLASSES=num_classes,
        BLOCK=triton.next_power_of_2(num_classes),
        BACKWARD=backward,
        ROWS=_ROWS,
    )


def norm_silu(values: Tensor, ahead: Tensor | None, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return SiLU of root-mean-square normalised rows [R, size], the normalised rows, and by what they were scaled."""
    num_rows, size = values.shape
    normalized, answers = torch.empty_like(values), torch.empty_like(values)
    roots = torch.empty(num_rows, device=values.device)
    _KERNELS["_norm_silu"][(num_rows,)](
        values,
        values if ahead is None else ahead,
        scale,
        normalized,
        roots,
        answers,
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        HAS_AHEAD=ahead is not None,
    )
    return answers, normalized, roots


def norm_silu_backward(gradients: Tensor, scale: Tensor, normalized: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of what went into SiLU and of what was normalised."""
    num_rows, size = normalized.shape
    scaled, answers = torch.empty_like(normalized), torch.empty_like(normalized)
    _KERNELS["_norm_silu_backward"][(num_rows,)](
        gradients,
        scale,
        normalized,
        roots,
        scaled,
        answers,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
    )
    return scaled, answers
