"""The DeepMind Control Suite as Gymnasium environments: `dmc/walker-walk`, `dmc/cartpole-swingup`, ..."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.core.errors import UserError

PREFIX = "dmc/"
ALIASES = {"cup": "ball_in_cup"}  # the names that papers print


class ControlSuite(gymnasium.Env):
    """One task of the suite. Observations are its entries, in the suite's order, as one vector.

    The suite ends an episode after 1,000 steps (fewer for some tasks) by time, which truncates; few tasks terminate.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}

    def __init__(self, task: str, render_mode: str | None = None, height: int = 240, width: int = 320) -> None:
        self._domain, self._task = split_task(task)
        self._environment = self._load(0)
        self.render_mode, self._size = render_mode, (height, width)
        action = self._environment.action_spec()
        self.action_space = spaces.Box(action.minimum.astype(np.float32), action.maximum.astype(np.float32))
        length = sum(int(np.prod(spec.shape)) for spec in self._environment.observation_spec().values())
        self.observation_space = spaces.Box(-np.inf, np.inf, (length,), dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode; a seed decides everything in it."""
        super().reset(seed=seed)
        if seed is not None:
            # The task draws from a generator that it holds; a fresh one makes the episode repeatable.
            self._environment.task._random = np.random.RandomState(seed % 2**32)
        return _vector(self._environment.reset().observation), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Advance by one control step."""
        moment = self._environment.step(action)
        ended = moment.last()
        terminated = bool(ended and moment.discount == 0.0)
        return _vector(moment.observation), float(moment.reward or 0.0), terminated, bool(ended and not terminated), {}

    def render(self) -> np.ndarray:
        """Draw the scene; needs a GL back-end (MUJOCO_GL=egl or osmesa)."""
        height, width = self._size
        return self._environment.physics.render(height=height, width=width, camera_id=0)

    def _load(self, seed: int) -> Any:
        try:
            from dm_control import suite
        except ImportError:
            raise UserError(
                "the DeepMind Control Suite is not installed",
                key="environment.id",
                value=f"{PREFIX}{self._domain}-{self._task}",
                remedy='pip install "rl-lab[dmc]"',
            ) from None
        known = {f"{domain}-{task}" for domain, task in suite.ALL_TASKS}
        if f"{self._domain}-{self._task}" not in known:
            raise UserError(
                "the suite has no such task",
                key="environment.id",
                value=f"{PREFIX}{self._domain}-{self._task}",
                valid=[f"{PREFIX}{name}" for name in known],
                remedy="take one of these",
            )
        return suite.load(self._domain, self._task, task_kwargs={"random": seed})


def split_task(name: str) -> tuple[str, str]:
    """Split `walker-walk` into domain and task."""
    domain, dash, task = name.removeprefix(PREFIX).partition("-")
    if not dash or not task:
        raise UserError(
            "a task of the suite is DOMAIN-TASK", key="environment.id", value=name, remedy="e.g. dmc/walker-walk"
        )
    return ALIASES.get(domain, domain), task.replace("-", "_")


def _vector(observation: Any) -> np.ndarray:
    return np.concatenate([np.asarray(entry, np.float32).reshape(-1) for entry in observation.values()])
