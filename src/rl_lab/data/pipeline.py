"""Pipeline: pure functions from steps to batches: pack, minibatches, arrivals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rl_lab.core.batch import Batch, Tree, replace_unchecked, tree_leaves, tree_map


def pack(steps: Sequence[Batch]) -> Batch:
    """Stack steps [N] into a trajectory [T, N]; all must have the same columns and shapes."""
    if not steps:
        raise ValueError("cannot pack an empty list of steps")
    expected = _layout(steps[0])
    if steps[0].rewards.dim() != 1:
        raise ValueError(f"a step is [N], one entry per environment; its rewards are {list(steps[0].shape)}")
    for t, step in enumerate(steps):
        if _layout(step) != expected:
            raise ValueError(f"step {t} has the columns {_layout(step)}, step 0 has {expected}")
    return Batch.stack(steps)


def minibatches(batch: Batch, size: int, generator: torch.Generator) -> Iterator[Batch]:
    """Yield a flat batch in shuffled pieces, every row once; the last may be smaller, a single one is not shuffled."""
    if batch.rewards.dim() != 1:
        raise ValueError(f"minibatches are taken from a flat batch, not from {list(batch.shape)}: flatten() it first")
    if size < 1:
        raise ValueError(f"a minibatch needs at least one row, not {size}")
    if size >= len(batch):  # one piece: its order does not matter
        yield replace_unchecked(batch, infos=())
        return
    order = torch.randperm(len(batch), generator=generator, device=generator.device).to(batch.rewards.device)
    # One gather per column, then views: cheaper than a gather per piece.
    shuffled = replace_unchecked(batch, infos=()).map(lambda leaf: leaf.index_select(0, order))
    for start in range(0, len(batch), size):
        yield shuffled.map(lambda leaf, start=start: leaf[start : start + size])  # type: ignore[misc]


def arrivals(batch: Batch) -> Batch:
    """View running windows [L, B] as a world model reads them: each observation with what brought it there.

    Entry t has the observation of row t + 1 and the action, reward and flags of row t before it, zero where an episode
    begins. The first row serves as context only: [L - 1, B]. Extras and rows are those of the observation.
    """
    first = batch["is_first"][1:]

    def brought(column: Tensor) -> Tensor:
        mask = first.reshape(*first.shape, *[1] * (column.dim() - 2))
        return column[:-1].masked_fill(mask, 0)

    def reached(column: Tree) -> Tree:
        return tree_map(lambda leaf: leaf[1:], column)

    return Batch._unchecked(
        observations=reached(batch.observations),
        actions=brought(batch.actions),
        rewards=brought(batch.rewards),
        terminated=brought(batch.terminated),
        truncated=brought(batch.truncated),
        next_observations=None,
        infos=(),
        extras=reached(batch.extras),
        rows=None if batch.rows is None else batch.rows[1:],
    )


def _layout(step: Batch) -> dict[str, list[tuple[tuple[int, ...], torch.dtype]]]:
    """Return shapes and types of all leaves, by column."""
    names = ("observations", "actions", "rewards", "terminated", "truncated")
    columns = {name: getattr(step, name) for name in names} | step.extras
    # Steps without successors may be among steps with them: `has_next` tells them apart.
    columns["next_observations"] = step.observations if step.next_observations is None else step.next_observations
    return {name: [(tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves(tree)] for name, tree in columns.items()}
