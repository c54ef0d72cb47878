"""MiniGrid worlds from pixels (Chevalier-Boisvert et al., arXiv:2306.13831): `MiniGrid-DoorKey-5x5-v0`, ..."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.core.errors import UserError

PREFIX = "MiniGrid-"
VIEWS = ("partial", "full")


class GridPixels(gymnasium.Env):
    """One world as pictures: what the agent sees before it (`partial`), or all of the grid (`full`).

    Tiles are `tile_size` points wide. The mission's text is not shown: in worlds where it changes, it cannot be known.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(
        self,
        id: str,
        *,
        view: str = "partial",
        tile_size: int = 9,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        if view not in VIEWS:
            raise UserError(
                "unknown view",
                key="environment.kwargs.view",
                value=view,
                valid=VIEWS,
                remedy="partial shows what is before the agent, full the whole grid",
            )
        if isinstance(tile_size, bool) or not isinstance(tile_size, int) or tile_size < 1:
            raise UserError(
                "tile_size must be a whole number of at least 1",
                key="environment.kwargs.tile_size",
                value=tile_size,
            )
        _import_package(id)
        if id not in gymnasium.registry:
            raise UserError(
                "there is no such world",
                key="environment.id",
                value=id,
                valid=[name for name in gymnasium.registry if name.startswith(PREFIX)],
                remedy="take one of these",
            )
        # The world's own limit, because the reward at the goal is measured by it.
        limit = {} if max_episode_steps is None else {"max_steps": max_episode_steps}
        self._world = gymnasium.make(id, disable_env_checker=True, **limit, **settings).unwrapped
        self._partial, self._tile_size, self.render_mode = view == "partial", tile_size, render_mode
        self.action_space = self._world.action_space
        side = (self._world.agent_view_size, self._world.agent_view_size)
        height, width = side if self._partial else (self._world.height, self._world.width)
        self.observation_space = spaces.Box(0, 255, (height * tile_size, width * tile_size, 3), dtype=np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode; a seed decides everything in it."""
        super().reset(seed=seed)
        self._world.reset(seed=seed)
        return self._picture(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Turn, move, or handle what is ahead."""
        _, reward, terminated, truncated, _ = self._world.step(int(action))
        return self._picture(), float(reward), bool(terminated), bool(truncated), {}

    def render(self) -> np.ndarray:
        """Draw the whole grid, and what the agent sees of it."""
        return self._world.get_full_render(highlight=True, tile_size=32)

    def close(self) -> None:
        """Close the world."""
        self._world.close()

    def _picture(self) -> np.ndarray:
        if self._partial:
            return self._world.get_pov_render(self._tile_size)
        return self._world.get_full_render(highlight=True, tile_size=self._tile_size)


def _import_package(id: str) -> None:
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # it would greet on standard output
    try:
        import minigrid  # noqa: F401
    except ImportError:
        raise UserError(
            "MiniGrid is not installed", key="environment.id", value=id, remedy='pip install "rl-lab[minigrid]"'
        ) from None
