"""Proportional prioritised replay (Schaul et al., "Prioritized Experience Replay", ICLR 2016, arXiv:1511.05952)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_lab.core.batch import Batch, Tree, replace_unchecked
from rl_lab.core.errors import UserError
from rl_lab.core.ranges import Positive, Unit
from rl_lab.core.schedules import Schedule, as_schedule
from rl_lab.data.replay import Ring
from rl_lab.data.sources import ReplaySource
from rl_lab.data.storage import Rows, last_of_equal

_FANOUT = 32  # children of a node: few levels, each one vectorised step over a batch
_MAX_TOP = 4096  # this many sums are searched at once


class SumTree:
    """Masses of leaves and the sums above them. A node is always the sum of its children: nothing drifts."""

    def __init__(self, size: int) -> None:
        self.levels: list[NDArray[np.float64]] = []  # [num_nodes, _FANOUT], leaves first
        while size > _MAX_TOP or not self.levels:
            size = -(-size // _FANOUT)
            self.levels.append(np.zeros((size, _FANOUT)))
        self.top = np.zeros(size)  # the sums of the last level's nodes
        self.leaves = self.levels[0].reshape(-1)

    def set(self, leaves: NDArray[np.int64], masses: NDArray[np.float64]) -> None:
        """Give leaves new masses; where one is repeated, its masses must be equal."""
        self.leaves[leaves] = masses
        everything = len(leaves) * _FANOUT > self.leaves.size  # then siblings would be summed again and again
        for level, above in zip(self.levels, [*self.levels[1:], self.top], strict=True):
            if everything:
                above.reshape(-1)[: len(level)] = level.sum(axis=1)
            else:
                leaves = leaves // _FANOUT
                above.reshape(-1)[leaves] = level[leaves].sum(axis=1)

    def find(self, fractions: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the leaves at which the running sum of masses passes these fractions [n] of the total."""
        sums = self.top.cumsum()
        targets = _below(fractions * sums[-1], sums[-1])
        nodes = np.searchsorted(sums, targets, side="right")
        targets = targets - np.where(nodes > 0, sums[nodes - 1], 0.0)
        for level in reversed(self.levels):
            sums = level[nodes].cumsum(axis=1)
            targets = _below(targets, sums[:, -1])
            children = (sums <= targets[:, None]).sum(axis=1)
            targets = targets - np.where(children > 0, sums[np.arange(len(children)), children - 1], 0.0)
            nodes = nodes * _FANOUT + children
        return nodes


def _below(targets: NDArray[np.float64], total: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bring targets that rounding carried past a node's sum back, or a child without mass would be found."""
    return np.minimum(targets, np.nextafter(total, 0.0))


class PrioritizedReplaySource(ReplaySource):
    """A window starts at row i with probability p_i^alpha / sum p^alpha, where p = |priority| + epsilon.

    New windows have the greatest priority seen so far. `extras["weights"]` undoes the bias to the power beta,
    (N P(i))^-beta, divided by the greatest weight of the batch. Updates return `columns={"priority": ...}`: [B], or
    [L, B] of which the first step counts.
    """

    draw_ahead = False  # the next draw depends on what this update writes

    def __init__(
        self,
        num_envs: int,
        generator: np.random.Generator,
        device: str,
        *,
        capacity: int | None = None,
        batch_size: int,
        min_size: int = 1,
        window: int | None = None,
        mode: str = "whole",
        pad: bool = False,
        storage: str = "cpu",
        folder: str | None = None,
        ring: Ring | None = None,
        alpha: Unit = 0.6,
        beta: Unit | Schedule = 0.4,
        epsilon: Positive = 1e-6,
    ) -> None:
        super().__init__(
            num_envs,
            generator,
            device,
            capacity=capacity,
            batch_size=batch_size,
            min_size=min_size,
            window=window,
            mode=mode,
            pad=pad,
            storage=storage,
            folder=folder,
            ring=ring,
        )
        self.captures = False  # masses are looked up on the host
        if alpha < 0:
            raise UserError("alpha must not be negative", key="alpha", value=alpha, remedy="0.6 is usual")
        if not epsilon > 0:
            raise UserError(
                "epsilon must be above 0: no window may become undrawable",
                key="epsilon",
                value=epsilon,
                remedy="1e-6 is usual",
            )
        self.alpha, self.epsilon = alpha, epsilon
        self.schedule = as_schedule(beta)
        self.beta = self.schedule.at(0)
        self.tree = SumTree(self.ring.size)
        self.max_priority = 1.0

    def gather(self, rows: Rows) -> Batch:
        """Read the rows of one batch and weigh them."""
        self._sync()
        batch = super().gather(rows)
        masses = self.tree.leaves[self._starts(rows)]
        least = masses.min()
        if not least > 0:
            raise ValueError("rows were overwritten after they were drawn: gather before adding more")
        weights = torch.from_numpy(((least / masses) ** self.beta).astype(np.float32)).to(self.device)
        if self.window is not None:
            weights = weights.expand(self.window, -1)
        return replace_unchecked(batch, extras=batch.extras | {"weights": weights})

    def write(self, rows: Rows, columns: Mapping[str, Tree]) -> None:
        """Write columns back; `priority` sets how likely the windows are drawn again."""
        if "priority" in columns:
            self._prioritize(self._starts(rows), columns["priority"].numpy(force=True))
        super().write(rows, columns)

    def advance(self, *, agent_steps: int, updates: int) -> None:
        """Follow the schedule of beta."""
        self.beta = self.schedule.at(agent_steps if self.schedule.of == "agent_steps" else updates)

    def get_state(self) -> dict[str, Any]:
        """Return ring, masses, greatest priority and beta."""
        self._sync()
        own = {"masses": self.tree.leaves[: self.ring.size].copy(), "heads": self.ring.heads.copy()}
        return super().get_state() | own | {"max_priority": self.max_priority, "beta": self.beta}

    def set_state(
        self,
        state: Mapping[str, Any],
        segments: Mapping[int, Any] | None = None,
        pages: Mapping[int, Any] | None = None,
    ) -> None:
        """Restore what `get_state` returned."""
        super().set_state(state, segments, pages)
        masses = np.asarray(state["masses"])
        self.tree.set(np.arange(self.ring.size), masses)
        self.windows.restore(masses > 0, np.array(state["heads"], np.int64))
        self.max_priority, self.beta = float(state["max_priority"]), float(state["beta"])

    def _prioritize(self, starts: NDArray[np.int64], values: NDArray[Any]) -> None:
        priorities = (values if values.ndim == 1 else values[0]).astype(np.float64)
        if priorities.shape != starts.shape:
            raise ValueError(f"{len(starts)} windows were given priorities of shape {values.shape}")
        sound = np.isfinite(priorities) & (priorities >= 0)
        if not sound.all():
            raise ValueError(
                f"priorities must be finite and not negative, such as |td|; among them are {priorities[~sound][:4]}"
            )
        self._sync()
        priorities = priorities[last_of_equal(starts)] + self.epsilon
        self.max_priority = max(self.max_priority, float(priorities.max()))
        self.tree.set(starts, np.where(self.windows.valid[starts], priorities**self.alpha, 0.0))

    def _sync(self) -> None:
        changes = self.windows.sync()
        if changes is not None:
            rows, were, are, new = changes
            changed = (were != are) | (new & are)
            self.tree.set(rows[changed], np.where(are[changed], self.max_priority**self.alpha, 0.0))

    def _draw_starts(self, k: int, batch_size: int) -> NDArray[np.int64]:
        """Draw one start from each of `batch_size` equal parts of the total mass, k times."""
        if not self.windows.count:
            raise ValueError("no window is stored: draw only while the source is ready")
        parts = (np.arange(batch_size) + self.generator.random((k, batch_size))) / batch_size
        return self.tree.find(parts.reshape(-1)).reshape(k, batch_size)

    def _starts(self, rows: Rows) -> NDArray[np.int64]:
        starts = rows.numpy(force=True) if isinstance(rows, Tensor) else rows
        return starts if starts.ndim == 1 else starts[0]
