"""OnlineQueue: new experience first, as DreamerV3 draws it (Hafner et al., arXiv:2301.04104).

Each environment's rows are cut into consecutive windows that do not overlap; every one of them is served once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_lab.data.replay import Ring


class OnlineQueue:
    """The complete windows that were not served yet, oldest first; what the ring has overwritten is gone."""

    def __init__(self, ring: Ring, length: int) -> None:
        self.ring, self.length = ring, length
        self.served = np.zeros(ring.num_envs, np.int64)  # windows of each environment that need not be served any more

    def __len__(self) -> int:
        """Return how many windows wait."""
        first, end = self._waiting()
        return int((end - first).sum())

    def take(self, count: int) -> NDArray[np.int64]:
        """Return the rows at which the next windows begin, at most `count`."""
        first, end = self._waiting()
        num_waiting = end - first
        total = int(num_waiting.sum())
        if not total:
            return np.empty(0, np.int64)
        env = np.repeat(np.arange(self.ring.num_envs), num_waiting)
        before = np.cumsum(num_waiting) - num_waiting
        number = np.arange(total) - before[env] + first[env]
        oldest = np.lexsort((env, number))[:count]
        self.served = first + np.bincount(env[oldest], minlength=self.ring.num_envs)
        return self.ring.rows(number[oldest] * self.length, env[oldest])

    def get_state(self) -> dict[str, Any]:
        """Return how far each environment was served."""
        return {"served": self.served.copy()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        served = np.array(state["served"], np.int64)
        if served.shape != self.served.shape:
            raise ValueError(f"the online queue was saved for {served.size} environments, not {self.served.size}")
        self.served = served

    def _waiting(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numbers of each environment's first window that waits, and of the first that is not complete."""
        heads = self.ring.heads
        stored = -(-np.maximum(heads - self.ring.num_rows + 1, 0) // self.length)
        end = heads // self.length
        return np.minimum(np.maximum(self.served, stored), end), end
