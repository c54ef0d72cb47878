"""A deterministic integer world and a slow, list-based replay: what the ring is compared with."""

from dataclasses import dataclass, field

import numpy as np
import torch

from rl_lab.core.batch import Batch


def successor(env, state, action):
    """The whole physics."""
    return (state * 5 + action * 3 + env * 7 + 1) % 9973


class World:
    """Environments whose observation says where it belongs: [env, episode, step, state].

    Episodes last 1 to `max_length` steps; the only reward is on the last one, after which they terminate or truncate.
    """

    def __init__(self, num_envs, seed=0, max_length=6, never_ends=False):
        self.rng = np.random.default_rng(seed)
        self.num_envs, self.max_length, self.never_ends = num_envs, max_length, never_ends
        self.episode = [-1] * num_envs
        self.begin = [self._begin(env) for env in range(num_envs)]

    def _begin(self, env):
        self.episode[env] += 1
        length = int(self.rng.integers(1, self.max_length + 1))
        return {"t": 0, "state": env * 100 + self.episode[env], "length": length}

    def observe(self, env):
        now = self.begin[env]
        return [env, self.episode[env], now["t"], now["state"]]

    def collect(self, num_steps):
        """Return [T, N] decisions, with true successors and an extra column."""
        shape = (num_steps, self.num_envs)
        observations, successors = np.zeros((*shape, 4), np.int64), np.zeros((*shape, 4), np.int64)
        actions, rewards = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        terminated, truncated = np.zeros(shape, bool), np.zeros(shape, bool)
        for t in range(num_steps):
            for env in range(self.num_envs):
                now = self.begin[env]
                observations[t, env] = self.observe(env)
                actions[t, env] = action = int(self.rng.integers(1, 5))
                now["state"] = successor(env, now["state"], action)
                now["t"] += 1
                successors[t, env] = self.observe(env)
                if now["t"] == now["length"] and not self.never_ends:
                    rewards[t, env] = 1 + self.episode[env]
                    terminated[t, env] = self.rng.random() < 0.5
                    truncated[t, env] = not terminated[t, env]
                    self.begin[env] = self._begin(env)
        return Batch(
            observations=torch.from_numpy(observations),
            actions=torch.from_numpy(actions),
            rewards=torch.from_numpy(rewards),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            next_observations=torch.from_numpy(successors),
            extras={"marks": torch.from_numpy(observations.sum(-1).astype(np.int32))},
        )

    def restart(self, env):
        """Begin a new episode although the last one has not ended."""
        self.begin[env] = self._begin(env)


@dataclass
class Row:
    """One row of the reference: a decision, or the final observation of an episode."""

    observation: tuple
    action: int = 0
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    is_first: bool = False
    is_last: bool = False
    mark: int = 0


@dataclass
class ReferenceReplay:
    """Rows in lists, cut to length; starts by trying all of them."""

    num_envs: int
    capacity: int
    rows: list = field(default_factory=list)
    latest: list = field(default_factory=list)  # the observation of the open row, None if unknown
    fresh: list = field(default_factory=list)

    def __post_init__(self):
        self.limit = -(-self.capacity // self.num_envs)
        self.rows = [[] for _ in range(self.num_envs)]
        self.latest = [None] * self.num_envs
        self.fresh = [True] * self.num_envs

    def add(self, batch, with_successors=True):
        for t in range(len(batch)):
            for env in range(self.num_envs):
                seen = tuple(batch.observations[t, env].tolist())
                then = tuple(batch.next_observations[t, env].tolist()) if with_successors else None
                self.rows[env].append(
                    Row(
                        seen,
                        int(batch.actions[t, env]),
                        float(batch.rewards[t, env]),
                        bool(batch.terminated[t, env]),
                        bool(batch.truncated[t, env]),
                        self.fresh[env],
                        False,
                        int(batch.extras["marks"][t, env]),
                    )
                )
                self.fresh[env] = bool(batch.dones[t, env])
                self.latest[env] = None if self.fresh[env] else then
                if self.fresh[env]:
                    self.rows[env].append(Row(then or seen, is_last=True))
                del self.rows[env][: -self.limit]

    def close_open(self, env):
        if not self.fresh[env]:
            last = self.rows[env][-1]
            last.truncated = True
            self.rows[env].append(Row(self.latest[env] or last.observation, is_last=True))
            self.fresh[env], self.latest[env] = True, None
            del self.rows[env][: -self.limit]

    def __len__(self):
        return sum(not row.is_last for rows in self.rows for row in rows)

    def _readable(self, env, i):
        """The observation of row i, the open row included; None if there is none."""
        if i < len(self.rows[env]):
            return self.rows[env][i].observation
        return self.latest[env] if i == len(self.rows[env]) else None

    def whole(self, length, pad=False):
        """Return all windows inside one episode: lists of (row, successor)."""
        windows = []
        for env, rows in enumerate(self.rows):
            for start in range(len(rows)):
                window = []
                for i in range(start, len(rows)):
                    if rows[i].is_last or self._readable(env, i + 1) is None or len(window) == length:
                        break
                    window.append((rows[i], self._readable(env, i + 1)))
                ended = window and (window[-1][0].terminated or window[-1][0].truncated)
                if pad and ended:
                    window += [window[-1]] * (length - len(window))
                if len(window) == length:
                    windows.append(window)
        return windows

    def running(self, length):
        """Return all windows of completed rows."""
        return [
            [(row, None) for row in rows[start : start + length]]
            for rows in self.rows
            for start in range(len(rows) - length + 1)
        ]


def read(batch, running=False):
    """Return the windows of a [L, B] batch as lists of (Row, successor), as the reference gives them."""
    windows = []
    for b in range(batch.shape[1]):
        window = []
        for t in range(batch.shape[0]):
            row = Row(
                tuple(batch.observations[t, b].tolist()),
                int(batch.actions[t, b]),
                float(batch.rewards[t, b]),
                bool(batch.terminated[t, b]),
                bool(batch.truncated[t, b]),
                bool(batch.extras["is_first"][t, b]) if running else False,
                bool(batch.extras["is_last"][t, b]) if running else False,
                int(batch.extras["marks"][t, b]),
            )
            window.append((row, None if running else tuple(batch.next_observations[t, b].tolist())))
        windows.append(window)
    return windows


def canonical(windows, running=False):
    """Return windows as sortable values; whole windows do not say which row was first."""
    return sorted(
        tuple(
            (r.observation, r.action, r.reward, r.terminated, r.truncated, r.mark, then)
            + ((r.is_first, r.is_last) if running else ())
            for r, then in window
        )
        for window in windows
    )
