"""Atari games (Bellemare et al., "The Arcade Learning Environment", arXiv:1207.4708): `ALE/Boxing-v5`, ...

One action lasts `action_repeat` frames, of which the last two are shown as one picture, the brighter of both at every
point: sprites that flicker do not vanish. Nothing is left to ALE's own frame skip.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.core.errors import UserError

PREFIX = "ALE/"
VERSION = "-v5"
LIFE_LOSS = ("ignore", "end")


class AtariGame(gymnasium.Env):
    """One game. Pictures are [210, 160, 3], or [210, 160] if `grayscale`.

    An episode begins with 0 to `max_noops` frames of no action, as its seed says, and is truncated after
    `max_episode_steps` frames. With `life_loss: end` every life is an episode of its own, in a game begun anew; going
    on in the same game would leave episodes that their seed does not bring back.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60}

    def __init__(
        self,
        id: str,
        *,
        action_repeat: int = 1,
        max_episode_steps: int = 108_000,
        grayscale: bool = False,
        full_action_space: bool = False,
        repeat_action_probability: float = 0.25,
        max_noops: int = 30,
        life_loss: str = "ignore",
        clip_rewards: bool = False,
        mode: int | None = None,
        difficulty: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        if life_loss not in LIFE_LOSS:
            raise UserError(
                "unknown handling of a lost life",
                key="environment.kwargs.life_loss",
                value=life_loss,
                valid=LIFE_LOSS,
                remedy="ignore goes on, end makes every life an episode",
            )
        flags = {"grayscale": grayscale, "full_action_space": full_action_space, "clip_rewards": clip_rewards}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise UserError(
                    f"{name} must be true or false",
                    key=f"environment.kwargs.{name}",
                    value=value,
                    remedy="write true or false",
                )
        if isinstance(max_noops, bool) or not isinstance(max_noops, int) or max_noops < 0:
            raise UserError(
                "max_noops must be a whole number of at least 0", key="environment.kwargs.max_noops", value=max_noops
            )
        chance = repeat_action_probability
        if isinstance(chance, bool) or not isinstance(chance, (int, float)) or not 0.0 <= chance <= 1.0:
            raise UserError(
                "repeat_action_probability must be from 0 to 1",
                key="environment.kwargs.repeat_action_probability",
                value=repeat_action_probability,
                remedy="0 for the 100k protocol, 0.25 for sticky actions",
            )
        ale_py = _package(id)
        self._rom = _rom_path(ale_py, id)
        self._num_repeats, self._max_frames, self._max_noops = action_repeat, max_episode_steps, max_noops
        self._ends_with_life, self._clips, self._gray = life_loss == "end", clip_rewards, grayscale
        self._mode, self._difficulty = mode, difficulty
        self.render_mode = render_mode
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self._ale = ale_py.ALEInterface()
        self._ale.setInt("frame_skip", 1)
        self._ale.setInt("max_num_frames_per_episode", 0)
        self._ale.setBool("color_averaging", False)
        self._ale.setFloat("repeat_action_probability", float(repeat_action_probability))
        self._load(0)
        self._noop = ale_py.Action.NOOP
        self._actions = self._ale.getLegalActionSet() if full_action_space else self._ale.getMinimalActionSet()
        self.action_space = spaces.Discrete(len(self._actions))
        shape = self._ale.getScreenDims() if grayscale else (*self._ale.getScreenDims(), 3)
        self.observation_space = spaces.Box(0, 255, shape, dtype=np.uint8)
        self._latest, self._previous = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
        self._frames = self._lives = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin a game; a seed decides everything in it."""
        super().reset(seed=seed)
        if seed is not None:
            self._load(seed)
        self._ale.reset_game()
        for _ in range(int(self.np_random.integers(self._max_noops + 1))):
            self._ale.act(self._noop)
            if self._ale.game_over(with_truncation=False):
                self._ale.reset_game()
        self._frames, self._lives = 0, self._ale.lives()
        self._look()
        return self._latest.copy(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Hold a button for some frames, or until the episode ends."""
        total, frames, num_seen, terminated, truncated = 0.0, 0, 0, False, False
        while frames < self._num_repeats and not (terminated or truncated):
            total += self._ale.act(self._actions[int(action)])
            frames += 1
            self._frames += 1
            lives = self._ale.lives()
            terminated = self._ale.game_over(with_truncation=False) or (self._ends_with_life and lives < self._lives)
            truncated = not terminated and self._frames >= self._max_frames
            self._lives = lives
            if frames >= self._num_repeats - 1 or terminated or truncated:
                self._look()
                num_seen += 1
        shown = np.maximum(self._latest, self._previous) if num_seen == 2 else self._latest.copy()
        reward = float(np.sign(total)) if self._clips else float(total)
        return shown, reward, bool(terminated), bool(truncated), {"frames": frames}

    def render(self) -> np.ndarray:
        """Show the screen as it is."""
        return self._ale.getScreenRGB()

    def _load(self, seed: int) -> None:
        # ALE seeds its own generator, which sticky actions draw from, when a game is loaded.
        self._ale.setInt("random_seed", seed % 2**31)
        self._ale.loadROM(self._rom)
        if self._mode is not None:
            self._ale.setMode(self._mode)
        if self._difficulty is not None:
            self._ale.setDifficulty(self._difficulty)

    def _look(self) -> None:
        self._latest, self._previous = self._previous, self._latest
        if self._gray:
            self._ale.getScreenGrayscale(self._latest)
        else:
            self._ale.getScreenRGB(self._latest)


def _package(id: str) -> types.ModuleType:
    try:
        import ale_py
        import ale_py.roms
    except ImportError:
        raise UserError(
            "Atari games are not installed", key="environment.id", value=id, remedy='pip install "rl-lab[atari]"'
        ) from None
    return ale_py


def _rom_path(ale_py: types.ModuleType, id: str) -> Any:
    names = _games(ale_py)
    if id not in names:
        raise UserError(
            "there is no such game", key="environment.id", value=id, valid=names, remedy="take one of these"
        )
    return ale_py.roms.get_rom_path(names[id])


@functools.cache
def _games(ale_py: types.ModuleType) -> dict[str, str]:
    """Return the games by the ids that Gymnasium gives them."""
    return {f"{PREFIX}{game.title().replace('_', '')}{VERSION}": game for game in ale_py.roms.get_all_rom_ids()}
