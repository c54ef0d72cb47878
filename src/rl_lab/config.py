"""The typed schema of a run, and its composition from YAML by Hydra."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from rl_lab.core.errors import UserError
from rl_lab.core.phase import Hook, Phase

PACKAGE_CONFIGS = Path(__file__).parent / "configs"
T = TypeVar("T")


@dataclass(frozen=True)
class ExperimentSection:
    """What the run is called and what its chance depends on."""

    name: str
    seed: int = 0
    device: str = "auto"  # auto takes cuda, then mps, then cpu


@dataclass(frozen=True)
class EnvironmentSection:
    """Where the agent acts."""

    id: str
    num_envs: int = 1
    action_repeat: int = 1
    frame_stack: int = 1
    resize: tuple[int, int] | None = None
    max_episode_steps: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PhaseSection:
    """One entry of training.phases."""

    name: str
    workflow_hooks: list[Any]
    type: str = "online"
    buffer: str | None = None
    duration_steps: int | None = None
    duration_updates: int | None = None
    duration_cycles: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingSection:
    """How long, in which phases."""

    phases: list[PhaseSection]
    total_timesteps: int | None = None  # caps collection, in agent steps
    stop_at_return: float | None = None  # end the run when an evaluation reaches this mean
    resume_path: str | None = None
    threads: int = 1


@dataclass(frozen=True)
class EvaluationSection:
    """How often and how well the agent is tested."""

    every: int | None = 10_000  # agent steps; null leaves it to the hook 'evaluate'
    episodes: int = 10
    num_envs: int | None = None  # by default one per episode, at most ten


@dataclass(frozen=True)
class LoggingSection:
    """What is written while training."""

    every: int = 1_000  # agent steps; updates in offline phases
    tensorboard: bool = True
    folder: str = "experiments"


@dataclass(frozen=True)
class CheckpointSection:
    """When the run is saved."""

    every_seconds: float | None = 60.0
    every_steps: int | None = None
    keep: int = 2


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

    @property
    def dims(self) -> dict[str, Any]:
        """The sizes that other nodes refer to."""
        return self._dims

    def phases(self) -> list[Phase]:
        """Return the curriculum; a mistake names `training.phases[i]`."""
        parsed = [parse_phase(entry, f"training.phases[{i}]") for i, entry in enumerate(self.training.phases)]
        if not parsed:
            raise UserError("training.phases is empty", key="training.phases", value=[], remedy="declare one phase")
        names = [phase.name for phase in parsed]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise UserError("two phases have one name", key=f"training.phases[{i}].name", value=name)
        return parsed


def parse_phase(section: PhaseSection, key: str) -> Phase:
    """Turn an entry of training.phases into a Phase."""
    hooks = tuple(_parse_hook(node, f"{key}.workflow_hooks[{i}]") for i, node in enumerate(section.workflow_hooks))
    values = {entry.name: getattr(section, entry.name) for entry in dataclasses.fields(section)}
    del values["workflow_hooks"]
    values["settings"] = types.MappingProxyType(dict(section.settings))
    try:
        return Phase(hooks=hooks, **values)
    except ValueError as error:
        valid = ("online", "offline", "eval_only") if "unknown type" in str(error) else ()
        value = section.type if valid else section.name
        raise UserError(str(error), key=key, value=value, valid=valid) from None


@dataclass(frozen=True)
class _HookSection:
    times: int = 1
    ratio: float | None = None
    source: str | None = None


def _parse_hook(node: Any, key: str) -> Hook:
    options = _HookSection()
    if isinstance(node, str):
        name = node
    elif isinstance(node, Mapping) and len(node) == 1:
        name, given = next(iter(node.items()))
        name = str(name)
        if isinstance(given, Mapping):
            options = parse(_HookSection, given, f"{key}.{name}")
            if options.ratio is not None and "times" in given:
                raise UserError("a hook takes times or ratio, not both", key=f"{key}.{name}", value=dict(given))
        else:
            options = _HookSection(times=parse(int, given, f"{key}.{name}"))
    else:
        raise UserError(
            "a hook is a name, or one name with its options",
            key=key,
            value=node,
            remedy="write 'collect', '{collect: 128}' or '{update_controller: {ratio: 0.5}}'",
        )
    try:
        return Hook(name, times=options.times, ratio=options.ratio, source=options.source)
    except ValueError as error:
        raise UserError(str(error), key=key, value=name) from None


def parse(kind: Any, value: Any, key: str) -> Any:
    """Turn plain data into a value of the annotated type; a mistake names the key, the value and what fits."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _parse_union(arguments, value, key)
    if dataclasses.is_dataclass(kind):
        return _parse_dataclass(typing.cast(type, kind), value, key)
    if origin is Literal:
        if value not in arguments:
            raise UserError("not one of the valid values", key=key, value=value, valid=arguments)
        return value
    if origin in (list, tuple, Sequence) or kind in (list, tuple):
        return _parse_sequence(kind, value, key)
    if origin in (dict, Mapping) or kind in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise UserError("a mapping is expected here", key=key, value=value)
        return {str(name): parse(arguments[1] if arguments else Any, v, f"{key}.{name}") for name, v in value.items()}
    return _parse_scalar(kind, value, key)


def _parse_union(kinds: tuple[Any, ...], value: Any, key: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    errors = []
    for kind in kinds:
        try:
            return parse(kind, value, key)
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _parse_dataclass(kind: type, value: Any, key: str) -> Any:
    if not isinstance(value, Mapping):
        raise UserError("a mapping is expected here", key=key, value=value)
    entries = {entry.name: entry for entry in dataclasses.fields(kind)}
    for name in value:
        if name not in entries:
            raise UserError(
                f"unknown key '{name}'",
                key=f"{key}.{name}" if key else str(name),
                value=name,
                valid=entries,
                remedy="correct the name, or remove it",
            )
    hints = typing.get_type_hints(kind)
    values = {}
    for name, entry in entries.items():
        place = f"{key}.{name}" if key else name
        if name in value:
            values[name] = parse(hints[name], value[name], place)
        elif entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
            raise UserError(f"'{name}' is missing", key=place, remedy=f"set {place}=...")
    return kind(**values)


def _parse_sequence(kind: Any, value: Any, key: str) -> Any:
    if isinstance(value, str) or not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise UserError("a list is expected here", key=key, value=value)
    arguments = [argument for argument in typing.get_args(kind) if argument is not Ellipsis]
    entries = list(value)
    if typing.get_origin(kind) is tuple and Ellipsis not in typing.get_args(kind):
        if len(entries) != len(arguments):
            raise UserError(f"a list of {len(arguments)} entries is expected", key=key, value=value)
        return tuple(parse(k, v, f"{key}[{i}]") for i, (k, v) in enumerate(zip(arguments, entries, strict=True)))
    parsed = [parse(arguments[0] if arguments else Any, entry, f"{key}[{i}]") for i, entry in enumerate(entries)]
    return tuple(parsed) if typing.get_origin(kind) is tuple else parsed


def _parse_scalar(kind: Any, value: Any, key: str) -> Any:
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isnan(value):
            raise UserError("a number is expected here", key=key, value=value)
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 1e5 is a float to YAML and an integer to people
    if isinstance(kind, type) and isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
        return value
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    expected = names.get(kind, getattr(kind, "__name__", str(kind)))
    raise UserError(f"{expected} is expected here", key=key, value=value)


POSITIVE = (
    "environment.num_envs",
    "environment.action_repeat",
    "environment.frame_stack",
    "environment.max_episode_steps",
    "training.total_timesteps",
    "training.threads",
    "evaluation.every",
    "evaluation.episodes",
    "evaluation.num_envs",
    "logging.every",
    "checkpoint.every_seconds",
    "checkpoint.every_steps",
    "checkpoint.keep",
)


def parse_run(plain: Mapping[str, Any]) -> RunConfig:
    """Validate a composed, resolved configuration."""
    config: RunConfig = parse(RunConfig, plain, "")
    for key in POSITIVE:
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value is not None and value <= 0:
            raise UserError("a number above 0 is expected here", key=key, value=value)
    if config.experiment.seed < 0:
        raise UserError("a seed is 0 or above", key="experiment.seed", value=config.experiment.seed)
    if config.environment.resize is not None and min(config.environment.resize) < 1:
        raise UserError("sizes above 0 are expected", key="environment.resize", value=config.environment.resize)
    if not config.experiment.name or set(config.experiment.name) & set("/\\:\0") or config.experiment.name[0] == ".":
        raise UserError("a name that can be a folder is expected", key="experiment.name", value=config.experiment.name)
    config.phases()
    return config
