"""Windows: which rows of a ring may start a window, kept up to date as rows arrive, and drawn uniformly."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_lab.data.replay import Ring

_MAX_ROUNDS = 8  # of rejection, before the valid starts are listed


class Changes(NamedTuple):
    """What a synchronisation found: rows looked at, and what they were and are as starts."""

    rows: NDArray[np.int64]
    were: NDArray[np.bool_]
    are: NDArray[np.bool_]
    new: NDArray[np.bool_]  # written since the last time


class Windows:
    """The valid starts of windows of one length.

    *Whole* windows lie inside one episode and have a readable successor at every step; padded ones may also end
    with the episode, and then repeat its last decision. *Running* windows cross episodes and show the final rows.
    None crosses the write head.
    """

    def __init__(self, ring: Ring, length: int, *, running: bool = False, padded: bool = False) -> None:
        self.ring, self.length, self.running, self.padded = ring, length, running, padded
        self.valid = np.zeros(ring.size, np.bool_)
        self.count = 0
        self._version, self._restored = -1, -1
        self._heads = np.zeros(ring.num_envs, np.int64)
        self._saved_heads: NDArray[np.int64] | None = None
        self._offsets = np.arange(length) * ring.num_envs

    def sync(self) -> Changes | None:
        """Follow the ring; None if nothing changed since the last call."""
        ring = self.ring
        if self._version == ring.version:
            return None
        if self._restored != ring.restored:  # the rows are other ones, whatever the heads say
            self._restored, depth = ring.restored, ring.num_rows
            self._heads = ring.heads.copy() if self._saved_heads is None else self._saved_heads
            self._saved_heads = None
        else:  # starts whose windows were not complete, and all rows since
            depth = min(int((ring.heads - self._heads).max()) + self.length + 1, ring.num_rows)
        positions = ring.heads - np.arange(depth)[:, None]  # [depth, num_envs]
        rows = ring.rows(positions)
        were, are = self.valid[rows], self._check(positions, rows).reshape(-1)
        new = (positions >= self._heads).reshape(-1)
        self.valid[rows] = are
        self.count += int(np.count_nonzero(are)) - int(np.count_nonzero(were))
        self._heads, self._version = ring.heads.copy(), ring.version
        return Changes(rows, were, are, new)

    def restore(self, valid: NDArray[np.bool_], heads: NDArray[np.int64]) -> None:
        """Take the starts from a saved source; the next synchronisation compares them with the restored ring.

        `heads` were the ring's then: what is added before that synchronisation is new, also where it overwrites.
        """
        self.valid, self._saved_heads = valid, heads
        self.count = int(np.count_nonzero(valid))
        self._version = self._restored = -1

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Draw starts uniformly, with replacement, in time that does not depend on the size of the ring."""
        if not self.count:
            raise ValueError("no window is stored: draw only while the source is ready")
        total = self.ring.num_filled * self.ring.num_envs
        parts: list[NDArray[np.int64]] = []
        missing = count
        for _ in range(_MAX_ROUNDS):
            num_proposals = int(1.1 * missing * total / self.count) + 8
            if num_proposals > total:
                break
            proposals = generator.integers(total, size=num_proposals)
            accepted = proposals[self.valid[proposals]][:missing]
            missing -= len(accepted)
            parts.append(accepted)
            if not missing:
                return accepted if len(parts) == 1 else np.concatenate(parts)
        starts = np.flatnonzero(self.valid[:total])
        return np.concatenate([*parts, starts[generator.integers(len(starts), size=missing)]])

    def expand(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of windows: [..., B] becomes [..., length, B]."""
        rows = (starts[..., None, :] + self._offsets[:, None]) % self.ring.size
        if not self.padded or self.length == 1:
            return rows
        ended = np.logical_or.accumulate(self.ring.last[rows[..., 1:, :]], axis=-2)
        advances = np.cumsum(~ended, axis=-2) * self.ring.num_envs
        rows[..., 1:, :] = (starts[..., None, :] + advances) % self.ring.size
        return rows

    def _check(self, positions: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        ring = self.ring
        exists = positions >= np.maximum(ring.heads - ring.num_rows + 1, 0)
        if self.running:
            return exists & (positions + self.length <= ring.heads)
        complete = self._reaches(positions, rows, self.length)
        if self.padded:
            for length in range(1, self.length):
                final = ring.last[ring.rows(positions + length)].reshape(positions.shape)
                complete |= final & self._reaches(positions, rows, length)
        return exists & complete

    def _reaches(self, positions: NDArray[np.int64], rows: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
        """Whether the row after `length` decisions is readable and of the same episode: steps count without a gap."""
        ring = self.ring
        ends = positions + length
        apart = ring.steps[ring.rows(ends)] - ring.steps[rows]
        return (apart == length).reshape(positions.shape) & (ends < ring.heads + ring.opened)
