"""Checks of what was wired: parts against the fields of the workflow, phases against buffers and hooks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rl_lab.config import RunConfig
from rl_lab.core.batch import Tree, tree_leaves, tree_map
from rl_lab.core.errors import UserError
from rl_lab.core.phase import Phase
from rl_lab.core.workflow import Workflow, declared_fields
from rl_lab.data.disk import DiskStorage
from rl_lab.data.offline import OfflineSource
from rl_lab.data.sources import ReplaySource, Source, StreamSource
from rl_lab.data.storage import HostStorage

ANOTHER = "take the environment that the data come from"
MAX_COLLECTED = 10**8  # decisions in one collection, which is held in memory as a whole


def check_parts(config: RunConfig, workflow: type[Workflow]) -> None:
    """Refuse parts that a workflow needs and does not get, and parts that it has no use for; by name alone.

    A workflow without fields reads its parts from the context: nobody knows which.
    """
    fields = declared_fields(workflow)
    if not fields:
        return
    names = [entry.name for entry in fields]
    required = [entry.name for entry in fields if entry.default is entry.default_factory is dataclasses.MISSING]
    knobs = {name for name, value in config.workflow.items() if not _is_node(value)}
    needed = [name for name in required if name not in knobs and name != "generator"]
    parts, optimizers = [*config.components, *config.controllers], [*config.optimizers]
    if "optimizer" in needed and len(optimizers) > 1:
        raise UserError(
            f"{workflow.__name__} takes a single optimiser",
            key="optimizers",
            value=optimizers,
            remedy="keep one that trains all parts",
        )
    places = [optimizer_field(name, names, len(optimizers)) for name in optimizers]
    spare = [name for name in parts if name not in names]
    for name in needed:
        if name not in (*parts, *places):
            group = "optimizers" if name.endswith("optimizer") else "components or controllers"
            raise UserError(
                f"{workflow.__name__} needs {', '.join(needed)}, but '{name}' is missing",
                key=f"workflow.{name}" if name in config.workflow else f"{group.partition(' ')[0]}.{name}",
                value=name,
                valid=optimizers if name.endswith("optimizer") else spare,
                remedy=f"declare it under {group}",
            )
    for group, name in [
        *(("components" if name in config.components else "controllers", name) for name in spare),
        *(("optimizers", name) for name, place in zip(optimizers, places, strict=True) if place not in names),
    ]:
        raise UserError(
            f"{workflow.__name__} does not use '{name}', only {', '.join(needed)}",
            key=f"{group}.{name}",
            value=f"{name}_optimizer" if group == "optimizers" else name,
            valid=needed,
            remedy="remove it, or give it one of these names",
        )


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value


def optimizer_field(name: str, fields: Sequence[str], num_optimizers: int) -> str:
    """Return the field that an optimiser fills: `model` fills `model_optimizer`, a single one also `optimizer`."""
    own = f"{name}_optimizer"
    return "optimizer" if own not in fields and num_optimizers == 1 else own


def check_phase(phase: Phase, index: int, sources: Mapping[str, Any], num_envs: int) -> Phase:
    """Return the phase with its buffer; a name that no source has is refused."""
    key = f"training.phases[{index}]"
    needs = any(hook.name == "collect" or hook.is_update for hook in phase.hooks)
    if phase.buffer is None and needs and len(sources) == 1:
        phase = replace(phase, buffer=next(iter(sources)))
    used = [(f"{key}.buffer", phase.buffer)] if phase.buffer is not None else []
    used += [(f"{key}.workflow_hooks[{i}].source", hook.source) for i, hook in enumerate(phase.hooks) if hook.source]
    for place, name in used:
        if name not in sources:
            raise UserError(
                "no buffer has this name",
                key=place,
                value=name,
                valid=sources,
                remedy="declare it under buffers; a single `/buffer: x` is named 'replay'",
            )
    for i, hook in enumerate(phase.hooks):
        taking = hook.source or phase.buffer
        if hook.name == "collect" and taking is not None and isinstance(sources[taking], OfflineSource):
            raise UserError(
                "a data set takes nothing in",
                key=f"{key}.workflow_hooks[{i}]",
                value=hook.name,
                remedy="make this an offline phase, or collect into another buffer",
            )
    for i, hook in enumerate(phase.hooks):
        if hook.name == "collect" and hook.times * num_envs > MAX_COLLECTED:
            raise UserError(
                f"one collection may have at most {MAX_COLLECTED:,} decisions, not {hook.times * num_envs:,}",
                key=f"{key}.workflow_hooks[{i}].collect",
                value=hook.times,
                remedy="collect less per cycle; the phase's duration says how often",
            )
    return phase


def check_data_sets(sources: Mapping[str, Source], environments: Any, observations: Tree) -> None:
    """Refuse a data set whose observations or actions are not those of the environment."""
    space = environments.single_action_space
    expected = {
        "observations": tree_map(lambda leaf: _row(leaf.shape[1:], leaf.dtype), observations),
        "actions": _row((), "int64") if hasattr(space, "n") else _row(space.shape, "float32"),
    }
    for name, source in sources.items():
        for column in expected if isinstance(source, OfflineSource) else ():
            found = tree_map(lambda leaf: _row(leaf.shape[1:], leaf.dtype), source.ring.columns[column])
            if found != expected[column]:
                raise UserError(
                    f"the {column} of the data set are {found}, those of the environment {expected[column]}",
                    key=f"buffers.{name}",
                    value=column,
                    remedy=_mend(source.ring.columns[column], observations) if column == "observations" else ANOTHER,
                )


def _mend(stored: Tree, observations: Tree) -> str:
    """Return what to do about a data set whose observations are not those of the environment."""
    remedies = []
    for found, expected in zip(tree_leaves(stored), tree_leaves(observations), strict=False):
        if _is_picture(expected) and found.ndim == 4:
            height, width, channels = found.shape[1:]
            moved = (channels, height, width) == expected.shape[1:] != found.shape[1:]
            remedies += ["move channels first (np.moveaxis(pictures, -1, -3))"] if moved else []
            remedies += [] if _is_picture(found) else ["write pictures as uint8 0-255"]
    return " and ".join(dict.fromkeys(remedies)) or ANOTHER


def _is_picture(leaf: Any) -> bool:
    return leaf.ndim == 4 and str(leaf.dtype).endswith("uint8")


def check_room(config: RunConfig, sources: Mapping[str, Source], environments: Any, observations: Tree) -> None:
    """Refuse replays that memory has no room for, were they only of what the environment says, and bad folders."""
    seen = sum(leaf.nbytes // len(leaf) for leaf in tree_leaves(observations))
    row_bytes = seen + 4 * math.prod(environments.single_action_space.shape) + 8  # and a reward and four flags
    for name, source in sources.items():
        ring = source.ring
        if ring is None or ring.columns:
            continue
        try:
            if type(ring.storage) is HostStorage:
                ring.zeros(torch.empty(1, row_bytes, dtype=torch.uint8), 1)  # memory is taken only where one writes
            elif isinstance(ring.storage, DiskStorage) and "folder" in (
                config.buffers.get(name) or config.buffer or {}
            ):
                ring.storage.new_file().close()  # the user's own folder: that of the run is made later
        except UserError as error:
            raise error.under(config.buffer_key(name)) from error


def _row(shape: Sequence[int], kind: Any) -> str:
    return f"{str(kind).removeprefix('torch.')} {list(shape)}"


def check_hooks(phase: Phase, index: int, workflow: Workflow, sources: Mapping[str, Any]) -> None:
    """Refuse hooks that the workflow does not have, or that cannot learn from their buffer, and unknown settings."""
    key = f"training.phases[{index}]"
    name = type(workflow).__name__
    for i, hook in enumerate(phase.hooks):
        place = f"{key}.workflow_hooks[{i}]"
        if hook.name == "evaluate" and not workflow.acts:
            raise UserError(
                f"{name} defines no act, so it cannot be evaluated",
                key=place,
                value=hook.name,
                remedy="define act(observations, state, ...), or remove the hook",
            )
        if not hook.is_update:
            continue
        if hook.name not in workflow.hooks():
            raise UserError(
                f"{name} has no hook '{hook.name}'",
                key=place,
                value=hook.name,
                valid=["collect", "evaluate", *workflow.hooks()],
                remedy="correct the name, or define the method in the workflow",
            )
        if not workflow.takes_batch(hook.name):
            continue
        source = hook.source or phase.buffer
        if source is None:
            raise UserError(
                f"'{hook.name}' needs a buffer to draw from",
                key=f"{key}.buffer",
                value=None,
                valid=sources,
                remedy="name one: buffer: replay",
            )
        if workflow.on_policy and not isinstance(sources[source], StreamSource):
            raise UserError(
                f"{name} learns from the latest rollout, which a {type(sources[source]).__name__} does not keep",
                key=f"{key}.buffer" if hook.source is None else f"{place}.source",
                value=source,
                remedy="use buffer=stream",
            )
    _check_settings(phase, key, workflow)


def check_windows(config: RunConfig, phases: Sequence[Phase], workflow: Workflow, sources: Mapping[str, Any]) -> None:
    """Refuse buffers whose windows are not of the kind, or shorter than, the workflow learns from."""
    mode, shortest = workflow.window_mode, workflow.shortest_window
    if mode is None:
        return
    learning = [
        (hook.source or phase.buffer)
        for phase in phases
        for hook in phase.hooks
        if hook.is_update and workflow.takes_batch(hook.name)
    ]
    for name in dict.fromkeys(learning):
        source = sources[name]
        key = config.buffer_key(name)
        cause = f"{type(workflow).__name__} learns from {mode} windows of at least {shortest} rows"
        if isinstance(source, StreamSource):
            raise UserError(f"{cause}, which a stream does not have", key=key, value=name, remedy="use a replay")
        if not isinstance(source, ReplaySource):
            continue  # a user's own, which knows what it draws
        if source.running != (mode == "running"):
            found = "running" if source.running else "whole"
            raise UserError(cause, key=f"{key}.mode", value=found, valid=[mode], remedy=f"set it to {mode}")
        if source.window is None or source.window < shortest:
            raise UserError(cause, key=f"{key}.window", value=source.window, remedy=f"set it to {shortest} or more")


def _check_settings(phase: Phase, key: str, workflow: Workflow) -> None:
    for name, value in phase.settings.items():
        if name not in workflow.known_settings:
            raise UserError(
                f"{type(workflow).__name__} knows no setting '{name}'",
                key=f"{key}.settings.{name}",
                value=name,
                valid=workflow.known_settings,
                remedy="correct the name, or remove it",
            )
        if name == "policy" and value not in ("random", "agent"):
            raise UserError(
                "unknown policy",
                key=f"{key}.settings.policy",
                value=value,
                valid=["random", "agent"],
                remedy="choose one of them",
            )
