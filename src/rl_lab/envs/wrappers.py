"""Adapters between an environment and the seam: action repeat, standard actions and observations, resize, stacking.

This module does not import torch, so that a process that only steps environments stays light.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorActionWrapper, VectorEnv, VectorObservationWrapper, VectorWrapper
from gymnasium.vector.utils import batch_space

from rl_lab.core.errors import UserError
from rl_lab.envs.wire import leaf_spaces
from rl_lab.envs.world import Seeds, World, reset_rows, row_seeds

SUPPORTED_OBSERVATIONS = "supported: Box, Discrete, MultiBinary, and Dict of these"
SUPPORTED_ACTIONS = "supported: Discrete, and Box of floats with finite bounds"


def _map(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply a function to the corresponding leaves of spaces, arrays or mappings of them."""
    if isinstance(trees[0], Mapping):
        return {key: _map(function, *(tree[key] for tree in trees)) for key in trees[0]}
    return function(*trees)


def _map_space(function: Callable[[spaces.Space], spaces.Space], space: spaces.Space) -> spaces.Space:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _map_space(function, entry) for key, entry in space.items()})
    return function(space)


def is_image(space: spaces.Space) -> bool:
    """Whether a space of the seam holds pictures: uint8 [C, H, W]."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3


class ActionRepeat(gymnasium.Wrapper):
    """Repeat every action in one Gymnasium environment, adding the rewards up; stops where the episode ends.

    `info["frames"]` says how many steps were taken.
    """

    def __init__(self, env: gymnasium.Env, num_repeats: int) -> None:
        super().__init__(env)
        self._num_repeats = num_repeats

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step until the action was repeated or the episode ended."""
        total, frames, done = 0.0, 0, False
        while frames < self._num_repeats and not done:
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            frames += 1
            done = terminated or truncated
        return observation, total, terminated, truncated, {**info, "frames": frames}


class Layer(VectorWrapper):
    """A vector wrapper of the seam: everything that it does not change passes through, `render_frames` too."""

    def render_frames(self) -> np.ndarray:
        """Draw every row: uint8 [num_envs, H, W, 3]."""
        return self.env.render_frames()

    def _set_observation_space(self, space: spaces.Space) -> None:
        self.single_observation_space = space
        self.observation_space = batch_space(space, self.num_envs)

    def _set_action_space(self, space: spaces.Space) -> None:
        self.single_action_space = space
        self.action_space = batch_space(space, self.num_envs)


class WorldActionRepeat(Layer):
    """Repeat every action in our own worlds, as `ActionRepeat` does: a row whose episode ended is held as it is."""

    def __init__(self, env: World, num_repeats: int) -> None:
        super().__init__(env)
        self._num_repeats = num_repeats

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step every row until the action was repeated or its episode ended."""
        observations, rewards, terminated, truncated, _ = self.env.step(actions)
        frames = np.ones(self.num_envs, dtype=np.int64)
        for _ in range(self._num_repeats - 1):
            done = terminated | truncated
            if done.all():
                break
            before = self.env.get_state() if done.any() else None
            successors, more, ended, cut, _ = self.env.step(actions)
            if before is not None:
                self.env.set_state(before, rows=done)
                successors[done] = observations[done]
            observations = successors
            rewards += np.where(done, np.float32(0), more)
            terminated |= ended & ~done
            truncated |= cut & ~done
            frames += ~done
        return observations, rewards, terminated, truncated, {"frames": frames}


class GymnasiumRows(Layer):
    """Gymnasium's SyncVectorEnv with the manners of the seam: seeds and resets per row, float32 rewards."""

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the rows of `options["reset_mask"]`, all without it; the others keep their observation."""
        if options is not None:  # a copy, because SyncVectorEnv removes the mask from what it is given
            options = {**options, "reset_mask": reset_rows(options, self.num_envs)}
        return self.env.reset(seed=row_seeds(seed, self.num_envs), options=options)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step every row."""
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        infos.pop("_frames", None)  # Gymnasium's mask of the rows that report; all do
        return observations, rewards.astype(np.float32), terminated, truncated, infos

    def render_frames(self) -> np.ndarray:
        """Draw every row: uint8 [num_envs, H, W, 3]."""
        if self.render_mode != "rgb_array":
            raise UserError("this environment was made without rendering", remedy="make it with render=True")
        try:
            return np.stack([np.asarray(frame, dtype=np.uint8) for frame in self.env.render()])
        except Exception as error:
            raise UserError(
                f"this environment cannot render here: {error}",
                remedy="install what it names, or use a world of ours that draws itself, such as tiny/CartPole",
            ) from error


class StandardActions(Layer, VectorActionWrapper):
    """Continuous actions in [-1, 1], clipped and rescaled to the environment's Box; discrete ones counted from 0."""

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        space = env.single_action_space
        if isinstance(space, spaces.Discrete):
            self._start = int(space.start)
            self._set_action_space(spaces.Discrete(int(space.n)))
        elif isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and space.is_bounded():
            self._low, self._high = space.low, space.high
            # center + half * action keeps 2 * action exact where the bounds are -2 and 2.
            self._center, self._half = space.high / 2 + space.low / 2, space.high / 2 - space.low / 2
            self._set_action_space(spaces.Box(-1.0, 1.0, (int(np.prod(space.shape)),), dtype=np.float32))
        else:
            raise UserError(f"the action space {space} is not supported", remedy=SUPPORTED_ACTIONS)

    def actions(self, actions: np.ndarray) -> np.ndarray:
        """Return the environment's own actions."""
        if isinstance(self.single_action_space, spaces.Discrete):
            return actions + self._start
        unit = np.clip(actions, -1.0, 1.0).reshape(self.num_envs, *self._low.shape)
        return np.clip(self._center + self._half * unit, self._low, self._high).astype(self._low.dtype)


class StandardObservations(Layer, VectorObservationWrapper):
    """Pictures uint8 [C, H, W], everything else a float32 vector; Discrete observations become one-hot."""

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self._raw_space = env.single_observation_space
        self._set_observation_space(_map_space(_standard_space, self._raw_space))

    def observations(self, observations: Any) -> Any:
        """Convert observations of all rows."""
        return _map(_standard, self._raw_space, observations)


def _is_picture(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)


def _channels_last(shape: tuple[int, ...]) -> bool:
    """Whether [H, W, C] rather than [C, H, W]: channels are the smaller of the outer dimensions."""
    return shape[-1] <= shape[0]


def _standard_space(space: spaces.Space) -> spaces.Space:
    if _is_picture(space):
        shape = space.shape if len(space.shape) == 3 else (1, *space.shape)
        if len(space.shape) == 3 and _channels_last(shape):
            shape = (shape[2], shape[0], shape[1])
        return spaces.Box(0, 255, shape, dtype=np.uint8)
    if isinstance(space, spaces.Box):
        with np.errstate(over="ignore"):  # bounds beyond float32 become infinite
            low, high = (bound.astype(np.float32).reshape(-1) for bound in (space.low, space.high))
        return spaces.Box(low, high, dtype=np.float32)
    if isinstance(space, (spaces.Discrete, spaces.MultiBinary)):
        return spaces.Box(0.0, 1.0, (int(np.prod(space.n)),), dtype=np.float32)
    raise UserError(f"the observation space {space} is not supported", remedy=SUPPORTED_OBSERVATIONS)


def _standard(space: spaces.Space, observations: np.ndarray) -> np.ndarray:
    num_envs = len(observations)
    if isinstance(space, spaces.Discrete):
        return np.eye(int(space.n), dtype=np.float32)[observations - space.start]
    if not _is_picture(space):
        return observations.reshape(num_envs, -1).astype(np.float32, copy=False)
    if len(space.shape) == 2:
        return observations[:, None]
    return np.ascontiguousarray(observations.transpose(0, 3, 1, 2)) if _channels_last(space.shape) else observations


class ResizeImages(Layer, VectorObservationWrapper):
    """Pictures of another height and width, averaged by Pillow's bilinear filter; other observations as they are."""

    def __init__(self, env: VectorEnv, height: int, width: int) -> None:
        super().__init__(env)
        self._size = (height, width)
        self._raw_space = env.single_observation_space
        if not any(is_image(leaf) for leaf in leaf_spaces(self._raw_space)):
            raise UserError(
                f"there is no picture to resize in the observation space {self._raw_space}",
                key="environment.resize",
                value=[height, width],
                remedy="leave resize out",
            )
        self._set_observation_space(_map_space(self._resized_space, self._raw_space))

    def _resized_space(self, space: spaces.Space) -> spaces.Space:
        return spaces.Box(0, 255, (space.shape[0], *self._size), dtype=np.uint8) if is_image(space) else space

    def observations(self, observations: Any) -> Any:
        """Resize the pictures of all rows."""
        return _map(self._resize, self._raw_space, observations)

    def _resize(self, space: spaces.Space, observations: np.ndarray) -> np.ndarray:
        if not is_image(space) or observations.shape[-2:] == self._size:
            return observations
        from PIL import Image

        height, width = self._size
        planes = observations.reshape(-1, *observations.shape[-2:])
        resized = [Image.fromarray(plane).resize((width, height), Image.Resampling.BILINEAR) for plane in planes]
        return np.stack([np.asarray(plane) for plane in resized]).reshape(*observations.shape[:2], height, width)


class FrameStack(Layer):
    """The last `num_frames` observations as one, oldest first: along channels for pictures, along the vector else.

    An episode's first observation fills the stack.
    """

    def __init__(self, env: VectorEnv, num_frames: int) -> None:
        super().__init__(env)
        self._num_frames = num_frames
        self._frames: deque[Any] = deque(maxlen=num_frames)
        self._set_observation_space(_map_space(self._stacked_space, env.single_observation_space))

    def _stacked_space(self, space: spaces.Space) -> spaces.Space:
        low, high = (np.concatenate([bound] * self._num_frames) for bound in (space.low, space.high))
        return spaces.Box(low, high, dtype=space.dtype)

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset and fill the stacks of the rows that were reset."""
        mask = reset_rows(options, self.num_envs)
        observations, infos = self.env.reset(seed=seed, options=options)
        if not self._frames:
            self._frames.extend([observations] * self._num_frames)
        self._frames.extend(
            [_map(lambda old, new: _take_rows(old, new, mask), frame, observations) for frame in self._frames]
        )
        return self._stacked(), infos

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step and push what is seen onto the stacks."""
        observations, *rest = self.env.step(actions)
        self._frames.append(observations)
        return self._stacked(), *rest

    def _stacked(self) -> Any:
        return _map(lambda *frames: np.concatenate(frames, axis=1), *self._frames)


def _take_rows(old: np.ndarray, new: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return `old` with the masked rows of `new`, as a new array."""
    return np.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old)
