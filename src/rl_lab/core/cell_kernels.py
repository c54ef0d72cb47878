"""GPU kernels of a recurrent step, in Triton, which comes with torch for GPUs.

Each does for all rows what would be a dozen operations, each of which takes as long as the whole kernel: the rows of a
scan are few, and what counts is the number of launches. `components/fused.py` uses gates and samples alone, with their
gradients; `components/representation/scan.py` uses all for the steps of a scan, where they also pass on what the next
step needs.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rl_lab.core.kernels import jit, tl, triton


@jit
def _gate_places(num_entries, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Return the entries of states that a program does, their rows, and where the first of their gates is in a row."""
    entries = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = entries % SIZE
    return entries, entries < num_entries, entries // SIZE, column // WIDTH * (3 * WIDTH) + column % WIDTH


@jit
def _gate_values(gates, biases, at, first, inside, update_bias, WIDTH: tl.constexpr, SCANNED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Return reset, candidate before reset, and update; they come block by block, in this order."""
    reset = tl.load(gates + at, mask=inside, other=0.0).to(tl.float32)
    raw = tl.load(gates + at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    update = tl.load(gates + at + 2 * WIDTH, mask=inside, other=0.0).to(tl.float32) + update_bias
    if SCANNED:
        reset += tl.load(biases + first, mask=inside, other=0.0).to(tl.float32)
        raw += tl.load(biases + first + WIDTH, mask=inside, other=0.0).to(tl.float32)
        update += tl.load(biases + first + 2 * WIDTH, mask=inside, other=0.0).to(tl.float32)
    return tl.sigmoid(reset), raw, tl.sigmoid(update)


@jit
def _shares(logits, at, inside, rows_inside):  # type: ignore[no-untyped-def]
    """Return the softmax of each row of logits."""
    values = tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32)
    values = tl.where(rows_inside[:, None], values, 0.0)
    shares = tl.exp(values - tl.max(values, 1)[:, None])
    return shares / tl.sum(shares, 1)[:, None]


@jit
def _gate(  # type: ignore[no-untyped-def]
    gates,
    biases,
    states,
    keeps,
    answers,
    copies,
    masked,
    next_keeps,
    num_entries,
    update_bias,
    SIZE: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    SCANNED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    entries, inside, row, first = _gate_places(num_entries, SIZE, WIDTH, BLOCK)
    at = row * (3 * SIZE) + first
    reset, raw, update = _gate_values(gates, biases, at, first, inside, update_bias, WIDTH, SCANNED)
    state = tl.load(states + entries, mask=inside, other=0.0).to(tl.float32)
    if SCANNED:
        state *= tl.load(keeps + row, mask=inside, other=0.0)
    candidate = 2.0 * tl.sigmoid(2.0 * reset * raw) - 1.0  # the hyperbolic tangent
    answer = update * candidate + (1.0 - update) * state
    tl.store(answers + entries, answer, mask=inside)
    if SCANNED:
        tl.store(copies + entries, answer, mask=inside)
        tl.store(masked + entries, answer * tl.load(next_keeps + row, mask=inside, other=0.0), mask=inside)


@jit
def _gate_backward(  # type: ignore[no-untyped-def]
    gates,
    biases,
    states,
    keeps,
    gradients,
    read,
    later,
    later_read,
    next_keeps,
    answers,
    gate_gradients,
    num_entries,
    update_bias,
    SIZE: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    SCANNED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    entries, inside, row, first = _gate_places(num_entries, SIZE, WIDTH, BLOCK)
    at = row * (3 * SIZE) + first
    reset, raw, update = _gate_values(gates, biases, at, first, inside, update_bias, WIDTH, SCANNED)
    state = tl.load(states + entries, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradients + entries, mask=inside, other=0.0).to(tl.float32)
    if SCANNED:
        state *= tl.load(keeps + row, mask=inside, other=0.0)
        passed = tl.load(later + entries, mask=inside, other=0.0)
        passed += tl.load(later_read + entries, mask=inside, other=0.0).to(tl.float32)
        gradient += passed * tl.load(next_keeps + row, mask=inside, other=0.0)
        gradient += tl.load(read + entries, mask=inside, other=0.0).to(tl.float32)
    candidate = 2.0 * tl.sigmoid(2.0 * reset * raw) - 1.0
    inner = gradient * update * (1.0 - candidate * candidate)
    tl.store(gate_gradients + at, inner * raw * reset * (1.0 - reset), mask=inside)
    tl.store(gate_gradients + at + WIDTH, inner * reset, mask=inside)
    of_update = gradient * (candidate - state) * update * (1.0 - update)
    tl.store(gate_gradients + at + 2 * WIDTH, of_update, mask=inside)
    tl.store(answers + entries, gradient * (1.0 - update), mask=inside)


@jit
def _sample(  # type: ignore[no-untyped-def]
    logits,
    draws,
    answers,
    masked,
    next_keeps,
    num_rows,
    unimix,
    CLASSES: tl.constexpr,  # noqa: N803
    VARIABLES: tl.constexpr,  # noqa: N803
    SCANNED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < CLASSES)[None, :]
    at = rows[:, None] * CLASSES + columns[None, :]
    shares = _shares(logits, at, inside, rows < num_rows)
    mixed = tl.where(inside, (1.0 - unimix) * shares + unimix / CLASSES, 0.0)
    draw = tl.load(draws + rows, mask=rows < num_rows, other=0.0)
    passed = (tl.cumsum(mixed, 1) <= draw[:, None]) & (columns < CLASSES)[None, :]
    chosen = tl.minimum(tl.sum(passed.to(tl.int32), 1), CLASSES - 1)
    code = (columns[None, :] == chosen[:, None]).to(tl.float32)
    tl.store(answers + at, code, mask=inside)
    if SCANNED:
        keep = tl.load(next_keeps + rows // VARIABLES, mask=rows < num_rows, other=0.0)
        tl.store(masked + at, code * keep[:, None], mask=inside)


@jit
def _sample_backward(  # type: ignore[no-untyped-def]
    logits,
    gradients,
    logit_gradients,
    later,
    next_keeps,
    answers,
    num_rows,
    unimix,
    CLASSES: tl.constexpr,  # noqa: N803
    VARIABLES: tl.constexpr,  # noqa: N803
    SCANNED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < CLASSES)[None, :]
    at = rows[:, None] * CLASSES + columns[None, :]
    shares = _shares(logits, at, inside, rows < num_rows)
    gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
    if SCANNED:
        keep = tl.load(next_keeps + rows // VARIABLES, mask=rows < num_rows, other=0.0)
        gradient += tl.load(later + at, mask=inside, other=0.0).to(tl.float32) * keep[:, None]
    gradient *= 1.0 - unimix
    answer = shares * (gradient - tl.sum(gradient * shares, 1)[:, None])
    if SCANNED:
        answer += tl.load(logit_gradients + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(answers + at, answer, mask=inside)


@jit
def _norm_silu(  # type: ignore[no-untyped-def]
    values,
    ahead,
    scales,
    normalized,
    roots,
    answers,
    ahead_row,
    ahead_group,
    groups,
    eps,
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    HAS_AHEAD: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = row * SIZE + columns
    group = row % groups
    entries = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_AHEAD:
        added = ahead + row * ahead_row + group * ahead_group + columns
        entries += tl.load(added, mask=inside, other=0.0).to(tl.float32)
    root = 1.0 / tl.sqrt(tl.sum(entries * entries, 0) / SIZE + eps)
    kept = (entries * root).to(normalized.dtype.element_ty)
    tl.store(normalized + at, kept, mask=inside)
    tl.store(roots + row, root)
    scaled = kept.to(tl.float32) * tl.load(scales + group * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(answers + at, scaled * tl.sigmoid(scaled), mask=inside)


@jit
def _norm_silu_backward(  # type: ignore[no-untyped-def]
    gradients,
    scales,
    normalized,
    roots,
    scaled_gradients,
    answers,
    groups,
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = row * SIZE + columns
    kept = tl.load(normalized + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scales + row % groups * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(kept * scale)
    gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
    gradient = gradient * share * (1.0 + kept * scale * (1.0 - share))
    tl.store(scaled_gradients + at, gradient, mask=inside)
    gradient = gradient * scale
    mean = tl.sum(gradient * kept, 0) / SIZE
    tl.store(answers + at, tl.load(roots + row) * (gradient - kept * mean), mask=inside)


_BLOCK, _ROWS = 1024, 16


class Step(NamedTuple):
    """What gates and samples know of a step of a scan [B], and of the one after it."""

    keeps: Tensor  # [B]: 0 where an episode begins and the state before is forgotten, else 1
    next_keeps: Tensor  # [B]: the same, of the next step
    biases: Tensor  # [3 * D]: of the gates


class PassedStates(NamedTuple):
    """Filled by the gate of a step of a scan with the states [B, D], in the type of the layers."""

    step: Step
    copies: Tensor  # as they are
    masked: Tensor  # as the next step sees them


class PassedCodes(NamedTuple):
    """Filled with the codes of a step of a scan, in the type of the layers."""

    step: Step
    masked: Tensor  # as the next step sees them


class StateGradients(NamedTuple):
    """What adds to the gradient of the state [B, D] after a step of a scan."""

    step: Step
    read: Tensor  # by what read the state
    later: Tensor  # by the gate of the next step
    later_read: Tensor  # by the layers of the next step


class CodeGradients(NamedTuple):
    """What adds to the gradient of the logits of a step of a scan, and to that of the codes."""

    step: Step
    logits: Tensor  # of losses
    later: Tensor  # of the codes, by the layers of the next step


def gate(
    gates: Tensor, states: Tensor, width: int, update_bias: float, answers: Tensor, passed: PassedStates | None = None
) -> None:
    """Fill `answers` with new states [..., D] from gates [..., 3 * D] that come in blocks of `width` entries."""
    step, copies, masked = passed or (Step(states, states, states), states, states)
    _gate[(triton.cdiv(states.numel(), _BLOCK),)](
        gates,
        step.biases,
        states,
        step.keeps,
        answers,
        copies,
        masked,
        step.next_keeps,
        states.numel(),
        update_bias,
        SIZE=states.shape[-1],
        WIDTH=width,
        SCANNED=passed is not None,
        BLOCK=_BLOCK,
    )


def gate_backward(
    gates: Tensor,
    states: Tensor,
    gradients: Tensor,
    width: int,
    update_bias: float,
    answers: tuple[Tensor, Tensor],
    more: StateGradients | None = None,
) -> None:
    """Fill `answers` with the gradients of gates and states; in a scan as if nothing had been forgotten."""
    step, read, later, later_read = more or (Step(states, states, states), states, states, states)
    of_gates, of_states = answers
    _gate_backward[(triton.cdiv(states.numel(), _BLOCK),)](
        gates,
        step.biases,
        states,
        step.keeps,
        gradients,
        read,
        later,
        later_read,
        step.next_keeps,
        of_states,
        of_gates,
        states.numel(),
        update_bias,
        SIZE=states.shape[-1],
        WIDTH=width,
        SCANNED=more is not None,
        BLOCK=_BLOCK,
    )


def sample(logits: Tensor, draws: Tensor, unimix: float, answers: Tensor, passed: PassedCodes | None = None) -> None:
    """Fill `answers` with one-hot codes of logits [R, classes], by one number in [0, 1) for each row."""
    num_rows, num_classes = logits.shape
    _sample[(triton.cdiv(num_rows, _ROWS),)](
        logits,
        draws,
        answers,
        answers if passed is None else passed.masked,
        answers if passed is None else passed.step.next_keeps,
        num_rows,
        unimix,
        CLASSES=num_classes,
        VARIABLES=1 if passed is None else num_rows // len(passed.step.keeps),
        SCANNED=passed is not None,
        BLOCK=triton.next_power_of_2(num_classes),
        ROWS=_ROWS,
    )


def sample_backward(
    logits: Tensor, gradients: Tensor, unimix: float, answers: Tensor, more: CodeGradients | None = None
) -> None:
    """Fill `answers` with the gradient of the logits, as if the codes were the probabilities."""
    num_rows, num_classes = logits.shape
    _sample_backward[(triton.cdiv(num_rows, _ROWS),)](
        logits,
        gradients,
        logits if more is None else more.logits,
        logits if more is None else more.later,
        logits if more is None else more.step.next_keeps,
        answers,
        num_rows,
        unimix,
        CLASSES=num_classes,
        VARIABLES=1 if more is None else num_rows // len(more.step.keeps),
        SCANNED=more is not None,
        BLOCK=triton.next_power_of_2(num_classes),
        ROWS=_ROWS,
    )


class Normed(NamedTuple):
    """Filled with what comes of rows [R, size] by a norm and SiLU."""

    answers: Tensor  # [R, size]
    normalized: Tensor  # [R, size]: before scale and SiLU
    roots: Tensor  # [R]: what the rows were scaled by


def norm_silu(values: Tensor, ahead: Tensor | None, scale: Tensor, eps: float, normed: Normed) -> None:
    """Fill `normed` with SiLU of root-mean-square normalised rows [R, size], and what the way back needs.

    Where `scale` is [groups, size], each group has its own and rows take turns. `ahead` is added to the rows: one for
    each [R, size], or one for each group.
    """
    num_rows, size = values.shape
    is_shared = ahead is not None and ahead.numel() < values.numel()
    _norm_silu[(num_rows,)](
        values,
        values if ahead is None else ahead,
        scale,
        normed.normalized,
        normed.roots,
        normed.answers,
        0 if is_shared else size,
        size if is_shared else 0,
        scale.numel() // size,
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        HAS_AHEAD=ahead is not None,
    )


def norm_silu_backward(
    gradients: Tensor, scale: Tensor, normalized: Tensor, roots: Tensor, answers: tuple[Tensor, Tensor]
) -> None:
    """Fill `answers` with the gradients of what went into SiLU and of what was normalised."""
    num_rows, size = normalized.shape
    _norm_silu_backward[(num_rows,)](
        gradients,
        scale,
        normalized,
        roots,
        *answers,
        scale.numel() // size,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
    )
