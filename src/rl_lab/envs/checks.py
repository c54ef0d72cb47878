"""check_environment: does an environment keep the promises that training, replay and resume rest on?"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, VectorEnv

from rl_lab.core.errors import UserError
from rl_lab.envs.make import describe_spaces, make_env
from rl_lab.envs.world import World

_NUM_ROWS = 3
_ALL = slice(None)


class Finding(NamedTuple):
    """The outcome of one check."""

    name: str
    ok: bool
    detail: str


class _Trace(NamedTuple):
    """What a fixed sequence of actions brought; every entry leads with [steps]."""

    observations: list[Any]  # [steps + 1]: successors, after the observation of the first reset
    starts: list[Any]  # [steps + 1]: observations to act on, after resets
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    seconds_per_step: float


def check_environment(
    id: str, allow: Collection[str] = (), steps: int = 200, kwargs: Mapping[str, Any] | None = None
) -> list[Finding]:
    """Make an environment and test it with random actions for some steps in each of three rows.

    Raises UserError where it cannot be made at all; everything else is a finding.
    """

    def make(num_envs: int, max_episode_steps: int | None = None) -> VectorEnv:
        return make_env(id, num_envs, max_episode_steps=max_episode_steps, kwargs=kwargs, allow=allow)

    env = make(_NUM_ROWS)
    try:
        observation_dims, action_dims = describe_spaces(env)
        findings = [
            Finding("spaces", True, f"observation {observation_dims}, action {action_dims}, {env.single_action_space}")
        ]
        actions = _random_actions(env.single_action_space, steps)
        try:
            trace = _run(env, actions)
        except Exception as error:
            return [*findings, Finding("stepping", False, _told(error))]
        checks: dict[str, Callable[[], str | None]] = {
            "interface": lambda: _check_interface(env, trace),
            "observations": lambda: _check_observations(env.single_observation_space, trace),
            "rewards": lambda: _check_rewards(trace),
            "determinism": lambda: _check_determinism(make, actions, trace),
            "replay": lambda: _check_replay(env, actions, trace),
            "reset of one row": lambda: _check_row_reset(env, actions, trace),
            "row alone": lambda: _check_row_alone(make, actions, trace),
            "step limit": lambda: _check_step_limit(make, actions),
        }
        if not isinstance(env.unwrapped, World):
            checks["gymnasium"] = lambda: _check_gymnasium(env)  # last, because it leaves the row where it likes
        for name, check in checks.items():
            try:
                problem = check()
            except Exception as error:
                problem = _told(error)
            findings.append(Finding(name, problem is None, problem or _PASSED[name]))
        return [*findings, _episodes(trace), _speed(trace), _rendering(id, allow, kwargs)]
    finally:
        env.close()


_PASSED = {
    "interface": "autoreset is disabled, arrays are fresh and of the right types",
    "observations": "inside the observation space, finite",
    "rewards": "finite",
    "determinism": "two environments, the same seeds and actions: the same trajectory",
    "replay": "seeded again, the same actions bring the same trajectory back, as resume needs it",
    "reset of one row": "the other rows neither see nor feel it",
    "row alone": "row i alone behaves as row i among others",
    "step limit": "max_episode_steps truncates",
    "gymnasium": "Gymnasium's own checker agrees",
}


def _told(error: Exception) -> str:
    return f"raised {type(error).__name__}: {error}"


def _random_actions(space: spaces.Space, steps: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    if isinstance(space, spaces.Discrete):
        return generator.integers(space.n, size=(steps, _NUM_ROWS))
    return generator.uniform(-1.0, 1.0, size=(steps, _NUM_ROWS, *space.shape)).astype(np.float32)


def _seed(row: int, episode: int) -> int:
    return 1000 * row + episode


def _run(env: VectorEnv, actions: np.ndarray, first_row: int = 0, extra_reset_at: int | None = None) -> _Trace:
    """Play the actions from fresh episodes; row r is seeded as row `first_row` + r of a larger environment.

    After `extra_reset_at` steps row 0 is reset in the middle of its episode.
    """
    rows = range(first_row, first_row + env.num_envs)
    episodes = [0] * env.num_envs
    start, _ = env.reset(seed=[_seed(row, 0) for row in rows])
    observations, starts, results, seconds = [start], [start], [], 0.0
    for action in actions:
        before = time.perf_counter()
        successor, reward, terminated, truncated, _ = env.step(action)
        seconds += time.perf_counter() - before
        observations.append(successor)
        results.append((reward, terminated, truncated))
        done = terminated | truncated
        done[0] |= len(results) == extra_reset_at
        if done.any():
            for row in np.flatnonzero(done):
                episodes[row] += 1
            seeds = [_seed(row, episode) for row, episode in zip(rows, episodes, strict=True)]
            successor, _ = env.reset(seed=seeds, options={"reset_mask": done})
        starts.append(successor)
    rewards, terminated, truncated = (np.stack(column) for column in zip(*results, strict=True))
    return _Trace(observations, starts, rewards, terminated, truncated, seconds / len(actions))


def _leaves(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, Mapping):
        return {name: leaf for key in tree for name, leaf in _leaves(tree[key], f"{path}.{key}").items()}
    return {path: tree}


def _same(left: Any, right: Any) -> bool:
    ours, theirs = _leaves(left), _leaves(right)
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[k], theirs[k], equal_nan=True) for k in ours)


def _rows(tree: Any, rows: Any) -> Any:
    return {path: leaf[rows] for path, leaf in _leaves(tree).items()}


def _difference(left: _Trace, right: _Trace, rows: slice = _ALL, right_rows: slice = _ALL) -> str | None:
    """Say where some rows of one trace and some of another part."""
    pairs = zip(left.observations, left.starts, right.observations, right.starts, strict=True)
    for step, (successor, start, other_successor, other_start) in enumerate(pairs):
        if not _same(_rows(successor, rows), _rows(other_successor, right_rows)):
            return f"observations differ after {step} steps"
        if not _same(_rows(start, rows), _rows(other_start, right_rows)):
            return f"the observation of a reset after {step} steps differs"
        for name in ("rewards", "terminated", "truncated") if step else ():
            ours, theirs = getattr(left, name)[step - 1, rows], getattr(right, name)[step - 1, right_rows]
            if not np.array_equal(ours, theirs, equal_nan=True):
                return f"{name} differ after {step} steps"
    return None


def _check_interface(env: VectorEnv, trace: _Trace) -> str | None:
    if env.metadata.get("autoreset_mode") is not AutoresetMode.DISABLED:
        return f"autoreset_mode is {env.metadata.get('autoreset_mode')}, not DISABLED"
    for name, dtype in (("rewards", np.float32), ("terminated", np.bool_), ("truncated", np.bool_)):
        column = getattr(trace, name)
        if column.dtype != dtype or column.shape[1:] != (env.num_envs,):
            return f"{name} are {column.dtype} {list(column.shape[1:])}, not {np.dtype(dtype)} [{env.num_envs}]"
    for first, second in zip(trace.observations, trace.observations[1:], strict=False):
        for path, leaf in _leaves(first).items():
            if np.shares_memory(leaf, _leaves(second)[path]):
                return "two steps returned the same array"
    return None


def _check_observations(space: spaces.Space, trace: _Trace) -> str | None:
    boxes = _leaves(space)
    for step, tree in enumerate([*trace.observations, *trace.starts]):
        step %= len(trace.observations)
        for path, leaf in _leaves(tree).items():
            box, where = boxes[path], f"the observation{path} after {step} steps"
            if leaf.dtype != box.dtype or leaf.shape[1:] != box.shape:
                return f"{where} is {leaf.dtype} {list(leaf.shape[1:])}, the space says {box.dtype} {list(box.shape)}"
            if not np.isfinite(leaf).all():
                return f"{where} is not finite"
            slack = 1e-5 * np.maximum(1.0, np.abs(leaf)) if leaf.dtype == np.float32 else 0
            if (leaf < box.low - slack).any() or (leaf > box.high + slack).any():
                return f"{where} lies outside the space: {leaf.min()} to {leaf.max()}"
    return None


def _check_rewards(trace: _Trace) -> str | None:
    bad = np.argwhere(~np.isfinite(trace.rewards))
    return f"not finite after {bad[0][0] + 1} steps" if len(bad) else None


def _check_determinism(make: Callable[..., VectorEnv], actions: np.ndarray, trace: _Trace) -> str | None:
    other = make(_NUM_ROWS)
    try:
        return _difference(trace, _run(other, actions))
    finally:
        other.close()


def _check_replay(env: VectorEnv, actions: np.ndarray, trace: _Trace) -> str | None:
    return _difference(trace, _run(env, actions))


def _check_row_reset(env: VectorEnv, actions: np.ndarray, trace: _Trace) -> str | None:
    others = slice(1, None)
    disturbed = _run(env, actions, extra_reset_at=min(5, len(actions) // 2))
    return _difference(trace, disturbed, others, others)


def _check_row_alone(make: Callable[..., VectorEnv], actions: np.ndarray, trace: _Trace) -> str | None:
    alone = make(1)
    try:
        row = _NUM_ROWS - 1
        return _difference(trace, _run(alone, actions[:, row:], first_row=row), rows=slice(row, None))
    finally:
        alone.close()


def _check_step_limit(make: Callable[..., VectorEnv], actions: np.ndarray) -> str | None:
    limited = make(_NUM_ROWS, max_episode_steps=2)
    try:
        trace = _run(limited, actions[:2])
        late = ~(trace.terminated[0] | trace.truncated[0] | trace.truncated[1])
        return "an episode ran past max_episode_steps=2 without being truncated" if late.any() else None
    finally:
        limited.close()


def _check_gymnasium(env: VectorEnv) -> str | None:
    """Run Gymnasium's own checker on one row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(env.unwrapped.envs[0].unwrapped, skip_render_check=True, skip_close_check=True)
    return None


def _episodes(trace: _Trace) -> Finding:
    terminated, truncated = int(trace.terminated.sum()), int(trace.truncated.sum())
    detail = f"{terminated} terminated, {truncated} truncated in {len(trace.rewards)} steps of {_NUM_ROWS} rows"
    if not terminated + truncated:
        detail += "; if episodes never end by themselves, set environment.max_episode_steps"
    return Finding("episodes", True, detail)


def _speed(trace: _Trace) -> Finding:
    return Finding("speed", True, f"{1e6 * trace.seconds_per_step / _NUM_ROWS:.0f} microseconds per step and row")


def _rendering(id: str, allow: Collection[str], kwargs: Mapping[str, Any] | None) -> Finding:
    """Say whether it renders; one that does not is none the worse for training."""
    try:
        env = make_env(id, 1, render=True, kwargs=kwargs, allow=allow)
        try:
            env.reset(seed=0)
            return Finding("rendering", True, f"yes: {list(env.render_frames().shape[1:])}")
        finally:
            env.close()
    except Exception as error:
        return Finding("rendering", True, f"no: {error.problem if isinstance(error, UserError) else error}")
