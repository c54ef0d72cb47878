"""make_env: an environment's id in, a vector environment of the seam out."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from rl_lab.core.errors import UserError
from rl_lab.envs import atari, dmc, minigrid, probes, tiny
from rl_lab.envs.pool import WorkerPool
from rl_lab.envs.world import World
from rl_lab.envs.wrappers import (
    SUPPORTED_ACTIONS,
    SUPPORTED_OBSERVATIONS,
    ActionRepeat,
    FrameStack,
    GymnasiumRows,
    ResizeImages,
    StandardActions,
    StandardObservations,
    WorldActionRepeat,
    is_image,
)

WORLDS: Mapping[str, Callable[..., World]] = {
    "tiny/CartPole": tiny.CartPole,
    "tiny/Pendulum": tiny.Pendulum,
    "tiny/PointMass": tiny.PointMass,
    "tiny/GridWorld": tiny.GridWorld,
    "tiny/CartPoleSwingUp": tiny.CartPoleSwingUp,
    "probe/constant": probes.constant,
    "probe/observation": probes.observation,
    "probe/delayed": probes.delayed,
    "probe/action": probes.action,
    "probe/both": probes.both,
}

# Ids that exist only after a package was installed and imported: prefix, package, what pip installs.
_PACKAGES = (("dm_control/", "shimmy", "shimmy[dm-control]"),)

# Registered by Gymnasium, but made of parts that an extra brings: where the entry point is, what pip installs.
_EXTRAS = {
    "gymnasium.envs.mujoco": "rl-lab[mujoco]",
    "gymnasium.envs.box2d": "gymnasium[box2d]",
    "gymnasium.envs.phys2d": "gymnasium[jax]",
    "gymnasium.envs.tabular": "gymnasium[jax]",
}


def make_env(
    id: str,
    num_envs: int,
    *,
    action_repeat: int = 1,
    resize: int | Sequence[int] | None = None,
    frame_stack: int = 1,
    max_episode_steps: int | None = None,
    render: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    allow: Collection[str] = (),
    workers: int = 0,
    worker_timeout: float = 60.0,
) -> VectorEnv:
    """Make `num_envs` environments that are stepped together, without autoreset.

    Observations are float32 vectors, uint8 [C, H, W] pictures or dicts of these; actions int64, or float32 in [-1, 1].
    `max_episode_steps` replaces the environment's own limit, counts its steps (repeated ones too) and truncates; that
    of the control suite it can only shorten.
    `resize` is a side or (height, width). `render` is for Gymnasium environments; our worlds always draw.
    An id with a colon imports a module, whose top package must be in `allow`.
    `workers` processes step the environments (0: this one), for such as need more than 200 microseconds a step; one
    that gives no answer for `worker_timeout` seconds is replaced.
    """
    if not isinstance(id, str):
        raise UserError(
            "an environment's id is a text",
            key="environment.id",
            value=id,
            remedy="register a class of your own with gymnasium.register(id='mine/World-v0', entry_point=...), "
            "then give that id",
        )
    _check_count("num_envs", num_envs)
    _check_count("action_repeat", action_repeat)
    _check_count("frame_stack", frame_stack)
    if max_episode_steps is not None:
        _check_count("max_episode_steps", max_episode_steps)
    size = None if resize is None else _check_size(resize)
    if workers:
        _check_count("workers", workers)
        if isinstance(worker_timeout, bool) or not isinstance(worker_timeout, (int, float)) or not worker_timeout > 0:
            raise UserError(
                "worker_timeout must be a number of seconds above 0",
                key="environment.worker_timeout",
                value=worker_timeout,
            )
        settings = {
            "action_repeat": action_repeat,
            "resize": None if size is None else list(size),
            "frame_stack": frame_stack,
            "max_episode_steps": max_episode_steps,
            "render": render,
            "kwargs": dict(kwargs or {}),
            "allow": list(allow),
        }
        return WorkerPool(id, num_envs, workers=workers, timeout=float(worker_timeout), settings=settings)
    limit = {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}
    if id in WORLDS:
        env = _make_world(id, num_envs, dict(kwargs or {}), limit)
        if action_repeat > 1:
            env = WorldActionRepeat(env, action_repeat)
    else:
        mode = {"render_mode": "rgb_array"} if render else {}
        env = _make_gymnasium(id, num_envs, {**mode, **(kwargs or {})}, limit, action_repeat, allow)
    try:
        if size is not None:
            env = ResizeImages(env, *size)
        return FrameStack(env, frame_stack) if frame_stack > 1 else env
    except UserError:
        env.close()
        raise


def known_ids() -> list[str]:
    """Return the ids that can be made: our worlds, and what is registered with Gymnasium."""
    registered = [
        name
        for name, spec in gymnasium.registry.items()
        # Those that moved elsewhere are registered with a function of Gymnasium's that says so.
        if not (callable(spec.entry_point) and spec.entry_point.__module__.startswith("gymnasium."))
    ]
    return sorted([*WORLDS, *registered])


def describe_spaces(env: VectorEnv) -> tuple[Any, int]:
    """Return the dimensions of observations (length, [C, H, W], or a dict of these) and actions (number, or length)."""
    return _observation_dims(env.single_observation_space), _action_dims(env.single_action_space)


def _observation_dims(space: spaces.Space) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _observation_dims(entry) for key, entry in space.items()}
    if is_image(space):
        return list(space.shape)
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return space.shape[0]
    raise UserError(f"the observation space {space} is not supported", remedy=SUPPORTED_OBSERVATIONS)


def _action_dims(space: spaces.Space) -> int:
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        return space.shape[0]
    raise UserError(f"the action space {space} is not supported", remedy=SUPPORTED_ACTIONS)


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name} must be a whole number of at least 1", key=f"environment.{name}", value=value)


def _check_size(resize: Any) -> tuple[int, int]:
    sides = (resize, resize) if isinstance(resize, int) else tuple(resize) if isinstance(resize, Sequence) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side is not True and side >= 1 for side in sides):
        raise UserError("resize must be a side or [height, width]", key="environment.resize", value=resize)
    return sides


def _make_world(id: str, num_envs: int, kwargs: dict[str, Any], limit: dict[str, int]) -> World:
    parameters = dict(inspect.signature(WORLDS[id], eval_str=True).parameters)
    for own in ("num_envs", "max_episode_steps"):
        del parameters[own]
    for name, value in kwargs.items():
        key = f"environment.kwargs.{name}"
        if name not in parameters:
            raise UserError(
                f"{id} has no such setting", key=key, value=name, valid=parameters, remedy="correct the name"
            )
        wanted = parameters[name].annotation
        fits = isinstance(value, (int, float) if wanted is float else wanted)
        if not fits or (isinstance(value, bool) and wanted is not bool):
            raise UserError(f"{name} must be of type {wanted.__name__}", key=key, value=value, remedy="correct it")
    return WORLDS[id](num_envs, **kwargs, **limit)


def _make_gymnasium(
    id: str,
    num_envs: int,
    kwargs: dict[str, Any],
    limit: dict[str, int],
    action_repeat: int,
    allow: Collection[str],
) -> VectorEnv:
    name = _import_module_of(id, allow)
    if not name.startswith((atari.PREFIX, dmc.PREFIX, minigrid.PREFIX)) and name not in known_ids():
        _raise_unknown(id, name)

    def make_one() -> gymnasium.Env:
        if name.startswith(atari.PREFIX):  # repeats actions itself: it shows two frames as one
            return atari.AtariGame(name, action_repeat=action_repeat, **limit, **kwargs)
        if name.startswith(dmc.PREFIX):
            env: gymnasium.Env = dmc.ControlSuite(name, **kwargs)
            env = gymnasium.wrappers.TimeLimit(env, limit["max_episode_steps"]) if limit else env
        elif name.startswith(minigrid.PREFIX):
            env = minigrid.GridPixels(name, **limit, **kwargs)
        else:
            env = gymnasium.make(name, disable_env_checker=True, **limit, **kwargs)
        return ActionRepeat(env, action_repeat) if action_repeat > 1 else env

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = SyncVectorEnv([make_one] * num_envs, autoreset_mode=AutoresetMode.DISABLED)
    except UserError:
        raise
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        entry = str(gymnasium.registry[name].entry_point)
        extra = next((extra for module, extra in _EXTRAS.items() if entry.startswith(module)), None)
        raise UserError(
            f"this environment needs a package that is not installed: {error}",
            key="environment.id",
            value=id,
            remedy=f'pip install "{extra}"' if extra else "install what the message names",
        ) from error
    except Exception as error:
        raise UserError(
            f"the environment could not be made: {type(error).__name__}: {error}",
            key="environment.kwargs" if kwargs else "environment.id",
            value=kwargs or id,
            remedy="see the environment's documentation for its settings; rl-lab check-env tests your own",
        ) from error
    try:
        return StandardObservations(StandardActions(GymnasiumRows(rows)))
    except UserError as error:
        rows.close()
        raise UserError(error.problem, key="environment.id", value=id, remedy=error.remedy) from error


def _import_module_of(id: str, allow: Collection[str]) -> str:
    """Import the module before an id's colon, where that is allowed; return what is behind it."""
    module, colon, name = id.partition(":")
    if not colon:
        return id
    package = module.split(".")[0]
    if package not in allow:
        raise UserError(
            f"an id with a colon imports the module '{module}', which is refused unless its package is allowed",
            key="environment.id",
            value=id,
            remedy=f"if you trust it, say --allow {package}",
        )
    try:
        importlib.import_module(module)
    except Exception as error:
        raise UserError(
            f"the module '{module}' could not be imported: {type(error).__name__}: {error}",
            key="environment.id",
            value=id,
            remedy=f"install it, or run where Python finds it: python -c 'import {module}' must work",
        ) from error
    return name


def _raise_unknown(id: str, name: str) -> None:
    valid = list(WORLDS) if name.startswith(("tiny/", "probe/")) else known_ids()
    remedy = "take one of these, or MODULE:ID with --allow PACKAGE for an environment of your own"
    for prefix, package, installs in _PACKAGES:
        if name.startswith(prefix):
            valid, remedy = [], f'pip install "{installs}", then use the id {package}:{name} with --allow {package}'
    raise UserError("there is no environment of this name", key="environment.id", value=id, valid=valid, remedy=remedy)
