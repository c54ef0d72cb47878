"""World: the base of our natively batched environments. It owns seeds, row resets, step counts and truncation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rl_lab.core.errors import UserError

Seeds = int | Sequence[int | None] | None


def row_seeds(seed: Seeds, num_envs: int) -> list[int | None]:
    """Return one seed per row: an int counts up from row 0, as in Gymnasium; None leaves a row's generator as it is."""
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + row for row in range(num_envs)]
    if len(seed) != num_envs:
        raise ValueError(f"reset got {len(seed)} seeds for {num_envs} environments")
    return [None if entry is None else int(entry) for entry in seed]


def reset_rows(options: Mapping[str, Any] | None, num_envs: int) -> np.ndarray:
    """Return which rows a reset is about, bool [num_envs]: all of them unless `options` has a `reset_mask`."""
    if not options or "reset_mask" not in options:
        return np.ones(num_envs, dtype=bool)
    mask = np.asarray(options["reset_mask"])
    if mask.dtype != bool or mask.shape != (num_envs,) or not mask.any():
        raise ValueError(f"reset_mask must be bool [{num_envs}] with a row to reset; got {mask!r}")
    return mask


class World(VectorEnv):
    """`num_envs` copies of one world whose rows advance together in a few NumPy operations.

    A subclass keeps everything that changes in `_state` [variables, num_envs] and defines `_initial`, `_advance` and
    `_observe`. Autoreset is disabled: what `step` returns is the true successor, and a row that is done must be reset
    before the next step. Arrays that are returned are fresh; the caller may keep them.
    """

    metadata: ClassVar[dict[str, Any]] = {
        "autoreset_mode": AutoresetMode.DISABLED,
        "render_modes": ["rgb_array"],
        "render_fps": 50,
    }
    render_mode = "rgb_array"

    def __init__(
        self,
        num_envs: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        *,
        num_variables: int,
        max_episode_steps: int,
        dtype: type = np.float64,
    ) -> None:
        self.num_envs = num_envs
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)
        self.max_episode_steps = max_episode_steps
        self._state = np.zeros((num_variables, num_envs), dtype=dtype)
        self._elapsed = np.zeros(num_envs, dtype=np.int64)
        # 0-d arrays: with them an operation on a short array takes half the time that it takes with a Python number.
        self._one = np.array(1)
        self._limit = np.array(max_episode_steps)
        self._generators: list[np.random.Generator | None] = [None] * num_envs

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start new episodes in the rows of `options["reset_mask"]` (all without it); return all observations.

        A row that gets a seed starts as a Gymnasium environment reset with this seed would.
        """
        seeds = row_seeds(seed, self.num_envs)
        mask = reset_rows(options, self.num_envs)
        for row in np.flatnonzero(mask).tolist():
            generator = self._generators[row]
            if seeds[row] is not None or generator is None:
                generator, _ = seeding.np_random(seeds[row])
                self._generators[row] = generator
            self._state[:, row] = self._initial(generator)
        self._elapsed[mask] = 0
        return self._observe(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Advance every row by one action."""
        rewards, terminated = self._advance(actions)
        np.add(self._elapsed, self._one, self._elapsed)
        return self._observe(), rewards, terminated, self._elapsed >= self._limit, {}

    def get_state(self) -> dict[str, np.ndarray]:
        """Return copies of what `step` reads: `state` [variables, num_envs] and `elapsed` [num_envs]."""
        return {"state": self._state.copy(), "elapsed": self._elapsed.copy()}

    def set_state(self, state: Mapping[str, np.ndarray], rows: Any = slice(None)) -> None:
        """Put the rows (all unless told) back to what `get_state` returned."""
        self._state[:, rows] = state["state"][:, rows]
        self._elapsed[rows] = state["elapsed"][rows]

    def render_frames(self) -> np.ndarray:
        """Draw every row: uint8 [num_envs, H, W, 3]."""
        raise UserError(
            f"{type(self).__name__} has nothing to draw", remedy="use a world that renders, such as tiny/CartPole"
        )

    def render(self) -> tuple[np.ndarray, ...]:
        """Draw every row, as Gymnasium's vector environments return it."""
        return tuple(self.render_frames())

    def _initial(self, generator: np.random.Generator) -> np.ndarray:
        """Draw the variables of one row at the start of an episode."""
        raise NotImplementedError

    def _advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Change `_state` in place; return rewards float32 [num_envs] and terminated bool [num_envs]."""
        raise NotImplementedError

    def _observe(self) -> np.ndarray:
        """Return fresh observations of the present state."""
        raise NotImplementedError
