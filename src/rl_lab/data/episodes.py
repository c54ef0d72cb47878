"""EpisodeRecord: whole episodes as they are played, one column each, within a fixed amount of memory."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_lab.core.batch import Batch, Tree, tree_leaves, tree_map, tree_zip

MAX_EPISODES = 16
MAX_STEPS = 1000  # of each episode; what comes after them is not kept
MAX_BYTES = 256 * 2**20  # of observations, so that images keep fewer episodes


class EpisodeRecord:
    """The first steps of the first episodes, from their beginning: [T, E].

    Observations are kept once: row t + 1 of an episode is the successor of row t.
    """

    def __init__(
        self,
        num_episodes: int,
        *,
        max_episodes: int = MAX_EPISODES,
        max_steps: int = MAX_STEPS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.num_episodes, self.max_steps = min(num_episodes, max_episodes), max_steps
        self._max_bytes = max_bytes
        self._observations: Tree = None  # [rows, E, ...]
        self._actions: NDArray | None = None
        self.lengths = np.zeros(self.num_episodes, np.int64)

    def add(
        self,
        episodes: NDArray[np.int64],
        observations: Tree,
        actions: NDArray,
        rewards: NDArray,
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        successors: Tree,
    ) -> None:
        """Take one step of every environment; `episodes` says which episode each plays, -1 for one that is not kept."""
        if self._actions is None:
            self._allocate(observations, actions)
        kept = (episodes >= 0) & (episodes < self.num_episodes)
        kept[kept] = self.lengths[episodes[kept]] < self.max_steps
        if not kept.any():
            return
        columns = episodes[kept]
        rows = self.lengths[columns]

        def store(column: NDArray, values: NDArray, at: NDArray[np.int64]) -> None:
            column[at, columns] = values[kept]

        tree_zip(lambda column, values: store(column, values, rows), self._observations, observations)
        tree_zip(lambda column, values: store(column, values, rows + 1), self._observations, successors)
        assert self._actions is not None
        store(self._actions, actions, rows)
        store(self._rewards, rewards, rows)
        store(self._terminated, terminated, rows)
        store(self._truncated, truncated, rows)
        self.lengths[columns] += 1

    def trajectory(self, device: str = "cpu") -> Batch:
        """Return [T, E]: T is the longest episode, and `valid` is False where a shorter one is over."""
        if self._actions is None:
            raise ValueError("no step was recorded")
        num_rows = int(self.lengths.max())

        def tensor(column: NDArray) -> Tensor:
            return torch.from_numpy(column).to(device)

        observations = tree_map(lambda column: tensor(column[: num_rows + 1]), self._observations)
        return Batch(
            observations=tree_map(lambda column: column[:-1], observations),
            actions=tensor(self._actions[:num_rows]),
            rewards=tensor(self._rewards[:num_rows]),
            terminated=tensor(self._terminated[:num_rows]),
            truncated=tensor(self._truncated[:num_rows]),
            next_observations=tree_map(lambda column: column[1:], observations),
            extras={"valid": tensor(np.arange(num_rows)[:, None] < self.lengths)},
        )

    def _allocate(self, observations: Tree, actions: NDArray) -> None:
        step_bytes = sum(leaf[0].nbytes for leaf in tree_leaves(observations))
        fitting = self._max_bytes // max(step_bytes * (self.max_steps + 1), 1)
        self.num_episodes = max(1, min(self.num_episodes, fitting))
        self.lengths = self.lengths[: self.num_episodes]
        # A single episode that is too large is cut.
        self.max_steps = max(1, min(self.max_steps, self._max_bytes // max(step_bytes, 1) - 1))
        shape = (self.max_steps + 1, self.num_episodes)  # of zeros: memory is used when a row is written
        self._observations = tree_map(lambda leaf: np.zeros((*shape, *leaf.shape[1:]), leaf.dtype), observations)
        self._actions = np.zeros((*shape, *actions.shape[1:]), actions.dtype)
        self._rewards = np.zeros(shape, np.float32)
        self._terminated, self._truncated = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
