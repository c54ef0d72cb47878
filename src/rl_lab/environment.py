"""The environment of a configuration: made from its section, its dimensions filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl_lab.composition import part, resolve
from rl_lab.config import EnvironmentSection
from rl_lab.core.errors import UserError
from rl_lab.envs.make import describe_spaces, make_env
from rl_lab.parsing import parse


def build_environments(
    section: EnvironmentSection, num_envs: int, allow: Sequence[str], *, render: bool = False
) -> Any:
    """Make vector environments."""
    try:
        return make_env(
            section.id,
            num_envs,
            action_repeat=section.action_repeat,
            resize=section.resize,
            frame_stack=section.frame_stack,
            max_episode_steps=section.max_episode_steps,
            workers=section.workers,
            worker_timeout=section.worker_timeout,
            kwargs=section.kwargs,
            render=render,
            allow=allow,
        )
    except UserError as error:
        if error.key is not None:
            raise
        raise UserError(error.problem, key="environment.id", value=section.id, remedy=error.remedy) from error


def fill_dims(composed: DictConfig, allow: Sequence[str] = ()) -> DictConfig:
    """Return the configuration with `_dims.observation` and `_dims.action` taken from the environment."""
    node = part(composed, "environment")
    if not isinstance(node, DictConfig) or OmegaConf.is_missing(node, "id") or "id" not in node:
        resolve(composed)  # says what else is missing: most often the experiment
        raise UserError(
            "no environment is chosen", key="environment.id", remedy="set environment=NAME or environment.id=ID"
        )
    section: EnvironmentSection = parse(EnvironmentSection, resolve(node), "environment")
    environment = build_environments(replace(section, workers=0), 1, allow)  # one is enough to look at
    try:
        observation, action = describe_spaces(environment)
    finally:
        environment.close()
    filled = composed.copy()
    dims = part(filled, "_dims")
    if not isinstance(dims, DictConfig):
        raise UserError("a mapping is expected here", key="_dims", value=dims, remedy="leave it out: it is filled in")
    for name, actual in (("observation", observation), ("action", action)):
        stated = part(filled, f"_dims.{name}")
        stated = OmegaConf.to_container(stated) if OmegaConf.is_config(stated) else stated
        if stated is not None and stated != actual:
            raise UserError(
                f"the environment '{section.id}' has {name} {actual}, not {stated}",
                key=f"_dims.{name}",
                value=stated,
                remedy=f"remove it (it is filled in), or write {actual}",
            )
        dims[name] = actual
    return filled


def explain_dims(error: UserError, dims: Mapping[str, Any]) -> UserError:
    """Where a part cannot take what the environment shows, say which kind of part can."""
    seen = dims.get("observation")
    said_by_part = error.__cause__ is not None  # which knows more
    if said_by_part or not error.key or error.value is None or error.value != seen:
        return error
    kinds = {int: ("vectors", "mlp"), list: ("images", "conv"), dict: ("dicts of vectors and images", "dict")}
    what, choice = kinds[type(seen)]
    return UserError(
        f"this part does not take what the environment shows: {what} ({seen})",
        key=error.key,
        value=seen,
        remedy=f"choose a part for {what}, such as {choice}, or another environment",
    )
