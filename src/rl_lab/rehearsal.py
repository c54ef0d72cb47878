"""Rehearsal: a few decisions before the first step, so that networks and spaces that do not fit are found at once."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_lab.core.batch import Tree, tree_map
from rl_lab.core.errors import UserError
from rl_lab.core.workflow import Act, Workflow, declared_fields
from rl_lab.data.collector import RolloutCollector

NUM_DECISIONS = 32
NETWORKS = "check that the networks take ${_dims.observation} and suit this kind of observation"
FOLLOW = (
    "define follow(act, observations, state, actions, *, generator) and return Act(actions, state, columns): "
    "the actions given, state and columns like those of act"
)


def check_decisions(workflow: Workflow, collector: RolloutCollector, section: str) -> None:
    """Ask for a few decisions and values; `section` is where the configuration declares the networks."""
    name = type(workflow).__name__
    if not workflow.acts:
        if not workflow.collects:
            raise UserError(
                f"{name} defines neither act nor collect_step",
                key="workflow._target_",
                value=name,
                remedy="define act(observations, state, *, explore, generator)",
            )
        return
    space = collector.environments.single_action_space
    # Two environments show what fits; a workflow that reads the context may know how many there are.
    few = bool(declared_fields(type(workflow))) and not hasattr(space, "n")
    num_rows = min(2, collector.num_envs) if few else collector.num_envs
    # Copies: what an act changes in place is the beginning of the first episodes.
    observations = tree_map(lambda leaf: torch.tensor(leaf[:num_rows], device=collector.device), collector.observations)
    state = tree_map(lambda leaf: leaf[:num_rows].clone(), collector.state)
    expected = _kinds(state)
    shapes = tree_map(lambda leaf: list(leaf.shape[1:]), observations)
    generator = torch.Generator(collector.device)
    generator.manual_seed(0)  # nobody's stream
    # One wrong index among many is found only by looking at several decisions.
    repeats = -(-NUM_DECISIONS // collector.num_envs) if hasattr(space, "n") else 1
    for explore in (False, *[True] * repeats):
        act = partial(workflow.act, observations, state, explore=explore, generator=generator)
        said = _attempt(act, f"{name} cannot act on observations of shape {shapes}", section, shapes)
        if said.state is not None and state is None:
            raise UserError(
                f"{name} keeps a state between decisions, but says not how an episode begins",
                key="workflow._target_",
                value=name,
                remedy="define initial_state(num_envs) and return what act gets as state at the first step",
            )
        if said.state is not None and (found := _kinds(said.state)) != expected:
            raise UserError(
                f"the state that {name}.act returns is not like the one of initial_state",
                key="workflow._target_",
                value=found,
                valid=[str(expected)],
                remedy="give both the same names, types and shapes: the run could not continue from a checkpoint",
            )
        _check_actions(said.actions, (num_rows, *space.shape), getattr(space, "n", None), name, section)
    if type(workflow).follow is not Workflow.follow:
        follow = partial(workflow.follow, workflow.act, observations, state, said.actions, generator=generator)
        _check_follow(follow, said, name, shapes)
    if callable(value := getattr(workflow, "value", None)):  # optional: only RLModule needs it
        problem = f"{name} cannot estimate the value of observations of shape {shapes}"
        values = _attempt(partial(value, observations), problem, section, shapes)
        if tuple(values.shape) != (num_rows,):
            raise UserError(
                f"{name} gives every observation {list(values.shape[1:])} values instead of one",
                key=section,
                value=list(values.shape),
                remedy="let the network that estimates values have one output",
            )


def _check_follow(follow: Callable[[], Act], said: Act, workflow: str, shapes: Tree) -> None:
    problem, section = f"{workflow} cannot follow actions that somebody else chose", "workflow._target_"
    followed, expected = _layout(_attempt(follow, problem, section, shapes, FOLLOW)), _layout(said)
    if followed != expected:
        raise UserError(
            f"what {workflow}.follow returns is not like what {workflow}.act returns",
            key=section,
            value=followed,
            valid=[str(expected)],
            remedy=FOLLOW,
        )


def _kinds(state: Tree) -> Tree:
    return tree_map(lambda leaf: f"{leaf.dtype} {list(leaf.shape)}", state)


def _layout(said: Act) -> Tree:
    whole = {"actions": said.actions, "state": said.state, "columns": dict(said.extras)}
    return tree_map(lambda leaf: list(leaf.shape), whole)


def _attempt(call: Callable[[], Any], problem: str, section: str, shapes: Tree, remedy: str = NETWORKS) -> Any:
    try:
        with torch.no_grad():
            return call()
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError) as error:
        raise UserError(
            f"{problem}: {_told(error)}",
            key=section,
            value=shapes,
            remedy=remedy,
        ) from error


def _told(error: Exception) -> str:
    """Say what went wrong and on which line of code that is not torch's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}{where}"


def _check_actions(
    actions: Tensor, shape: tuple[int, ...], num_actions: int | None, workflow: str, section: str
) -> None:
    discrete = num_actions is not None
    if tuple(actions.shape) != shape or actions.dtype.is_floating_point == discrete:
        raise UserError(
            f"{workflow} gives actions of shape {list(actions.shape)} and {actions.dtype}, "
            f"but the environment wants {'indices' if discrete else 'real numbers'} of shape {list(shape)}",
            key=section,
            value=list(actions.shape),
            remedy="discrete actions need an actor such as categorical, or the policy OneHot; "
            "continuous ones gaussian, or the policy BoundedNormal; each has the size ${_dims.action}",
        )
    if discrete and not ((actions >= 0) & (actions < num_actions)).all():
        raise UserError(
            f"{workflow} chose action {int(actions.max())}, but the environment has only {num_actions}",
            key=section,
            value=int(actions.max()),
            remedy="let the network have ${_dims.action} outputs",
        )
