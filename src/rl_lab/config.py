"""The typed schema of a run."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from rl_lab.core.errors import UserError
from rl_lab.core.phase import DURATIONS, Hook, Phase
from rl_lab.core.ranges import Count, Positive, Range
from rl_lab.parsing import parse

Pixels = Annotated[int, Range(1, 4_096)]
PACKAGE_CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class ExperimentSection:
    """What the run is called and what its chance depends on."""

    name: str
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    device: str = "auto"  # auto takes cuda, then mps, then cpu


@dataclass(frozen=True)
class EnvironmentSection:
    """Where the agent acts."""

    id: str
    task: str | None = None  # for ids that are written in terms of it: dmc/${environment.task}
    num_envs: Annotated[int, Range(1, 100_000)] = 1
    action_repeat: Annotated[int, Range(1, 1_000)] = 1
    frame_stack: Annotated[int, Range(1, 1_000)] = 1
    resize: tuple[Pixels, Pixels] | None = None
    max_episode_steps: Count | None = None
    workers: Annotated[int, Range(0, 1_024)] = 0  # processes that step the environments; 0: this one
    worker_timeout: Positive = 60.0  # seconds for one step, then the worker is restarted
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PhaseSection:
    """One entry of training.phases."""

    name: str
    workflow_hooks: list[Any]
    type: Literal["online", "offline", "eval_only"] = "online"
    buffer: str | None = None
    duration_steps: Count | None = None
    duration_updates: Count | None = None
    duration_cycles: Count | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """How long, in which phases."""

    total_timesteps: Count | None = None  # caps collection, in agent steps
    stop_at_return: float | None = None  # end the run when an evaluation reaches this mean
    resume_path: str | None = None
    threads: Annotated[int, Range(1, 1_024)] = 1
    capture: Literal["auto", "none"] = "auto"  # on a GPU, updates and decisions become CUDA graphs
    compile: Literal["none", "parts"] = "none"  # whether components are compiled first
    precision: Literal["float32", "bfloat16"] = "float32"  # of products inside networks; all else is float32
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"  # what a number that is not finite does
    phases: list[PhaseSection]  # last: they refer to the others, whose mistakes are told first


@dataclass(frozen=True)
class EvaluationSection:
    """How often and how well the agent is tested."""

    every: Count | None = 10_000  # agent steps; null leaves it to the hook 'evaluate'
    episodes: Annotated[int, Range(1, 1_000_000)] = 10
    num_envs: Annotated[int, Range(1, 100_000)] | None = None  # by default one per episode, at most ten
    explore: bool = False  # act with the chance of training, else as well as the agent can
    inspect: bool = True  # let a workflow that can look at the episodes with its model


@dataclass(frozen=True)
class LoggingSection:
    """What is written while training."""

    every: Count = 1_000  # agent steps; updates in offline phases
    tensorboard: bool = True
    folder: str = "experiments"


@dataclass(frozen=True)
class CheckpointSection:
    """When the run is saved."""

    every_seconds: Positive | None = 60.0
    every_steps: Count | None = None
    keep: Count = 2


@dataclass(frozen=True)
class RunConfig:
    """A whole run. Ours is typed; plug-ins are nodes with a `_target_` whose schema is the constructor."""

    experiment: ExperimentSection
    environment: EnvironmentSection
    workflow: dict[str, Any]
    training: TrainingSection
    evaluation: EvaluationSection = EvaluationSection()
    logging: LoggingSection = LoggingSection()
    checkpoint: CheckpointSection = CheckpointSection()
    components: dict[str, Any] = field(default_factory=dict)
    controllers: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)
    buffer: dict[str, Any] | None = None  # a single one: the buffer named 'replay'
    algorithm: dict[str, Any] = field(default_factory=dict)
    _dims: dict[str, Any] = field(default_factory=dict)

    def buffer_key(self, name: str) -> str:
        """Return where a buffer is declared: the single one is named 'replay'."""
        return f"buffers.{name}" if name in self.buffers else "buffer"

    @property
    def dims(self) -> dict[str, Any]:
        """The sizes that other nodes refer to."""
        return self._dims

    def phases(self) -> list[Phase]:
        """Return the curriculum; a mistake names `training.phases[i]`."""
        parsed = [parse_phase(entry, f"training.phases[{i}]") for i, entry in enumerate(self.training.phases)]
        if not parsed:
            raise UserError("there are no phases", key="training.phases", value=[], remedy="declare at least one")
        names = [phase.name for phase in parsed]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise UserError(
                    "two phases have one name",
                    key=f"training.phases[{i}].name",
                    value=name,
                    remedy="give every phase a name of its own",
                )
        return parsed


def parse_phase(section: PhaseSection, key: str) -> Phase:
    """Turn an entry of training.phases into a Phase."""
    hooks = tuple(_parse_hook(node, f"{key}.workflow_hooks[{i}]") for i, node in enumerate(section.workflow_hooks))
    values = {entry.name: getattr(section, entry.name) for entry in dataclasses.fields(section)}
    del values["workflow_hooks"]
    durations = {name: values[name] for name in DURATIONS if values[name] is not None}
    if len(durations) > 1:
        raise UserError("a phase has one duration only", key=key, value=durations, remedy="keep one of them")
    if not durations and section.type != "eval_only":
        raise UserError(
            "a phase needs a duration",
            key=key,
            value=section.name,
            valid=DURATIONS,
            remedy="add one of them, such as duration_steps: 10000",
        )
    values["settings"] = types.MappingProxyType(dict(section.settings))
    try:
        return Phase(hooks=hooks, **values)
    except ValueError as error:
        raise UserError(
            str(error),
            key=key,
            value={"type": section.type, "workflow_hooks": [hook.name for hook in hooks], **durations},
            remedy="let type, hooks and duration of the phase agree",
        ) from None


@dataclass(frozen=True)
class HookSection:
    """The options of one entry of workflow_hooks."""

    times: Count = 1
    ratio: Positive | None = None  # calls per agent step; replaces times
    source: str | None = None  # another buffer than the phase's


def _parse_hook(node: Any, key: str) -> Hook:
    options = HookSection()
    if isinstance(node, str):
        name = node
    elif isinstance(node, Mapping) and len(node) == 1:
        name, given = next(iter(node.items()))
        name = str(name)
        if isinstance(given, Mapping):
            options = parse(HookSection, given, f"{key}.{name}")
            if options.ratio is not None and "times" in given:
                raise UserError(
                    "a hook takes times or ratio, not both",
                    key=f"{key}.{name}",
                    value=dict(given),
                    remedy="keep one of them",
                )
        else:
            options = HookSection(times=parse(Count, given, f"{key}.{name}"))
    else:
        raise UserError(
            "a hook is a name, or one name with its options",
            key=key,
            value=node,
            remedy="write 'collect', '{collect: 128}' or '{update_controller: {ratio: 0.5}}'",
        )
    if name not in ("collect", "evaluate") and not name.startswith("update_"):
        raise UserError(
            "unknown hook",
            key=key,
            value=name,
            valid=("collect", "evaluate", "update_controller", "update_world_model"),
            remedy="use collect, evaluate, or a method of the workflow that is named update_*",
        )
    try:
        return Hook(name, times=options.times, ratio=options.ratio, source=options.source)
    except ValueError as error:
        raise UserError(str(error), key=key, value=node, remedy="see `Hook` for what a hook takes") from None


def parse_run(plain: Mapping[str, Any]) -> RunConfig:
    """Validate a composed, resolved configuration."""
    config: RunConfig = parse(RunConfig, plain, "")
    name = config.experiment.name
    if not name or len(name) > 100 or name[0] == "." or not name.isprintable() or set(name) & set("/\\:"):
        raise UserError(
            "a name that can be a folder is expected",
            key="experiment.name",
            value=name,
            remedy=f"use letters, digits, - and _, such as experiment.name={_as_folder(name)}",
        )
    config.phases()
    return config


def _as_folder(name: str) -> str:
    """Return the nearest name that a folder may have."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".-")[:100] or "my_run"
