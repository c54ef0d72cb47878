"""The composition root: a configuration in, a wired experiment out. A script may replace any of its steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from rl_lab.composition import config_hash, parse_config, resolve
from rl_lab.config import EnvironmentSection, RunConfig, parse
from rl_lab.core.batch import Tree, tree_map
from rl_lab.core.errors import UserError
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Phase
from rl_lab.core.schedules import Schedule
from rl_lab.core.seeding import SeedTree, seed_all
from rl_lab.core.workflow import ControllerManager, Workflow, WorkflowContext, WorldModelComponents, declared_fields
from rl_lab.data.collector import RolloutCollector, SteppedEnvironment
from rl_lab.data.sources import Source
from rl_lab.envs.make import describe_spaces, make_env
from rl_lab.instantiate import instantiate, resolve_target
from rl_lab.orchestration.checkpoint import CheckpointManager
from rl_lab.orchestration.dashboard import Dashboard
from rl_lab.orchestration.evaluation import Evaluator
from rl_lab.orchestration.loggers import MetricSums
from rl_lab.orchestration.orchestrator import Counters, Orchestrator, RunSettings, WorkflowLogger
from rl_lab.orchestration.phase_scheduler import PhaseScheduler

MAX_EVALUATION_ENVS = 10


@dataclass
class Experiment:
    """Everything that a run consists of, wired."""

    config: RunConfig
    composed: DictConfig  # as written: interpolations unresolved, dimensions filled in
    device: str
    seeds: SeedTree
    collector: RolloutCollector
    evaluator: Evaluator
    components: dict[str, Any]
    controllers: dict[str, Any]
    optimizers: dict[str, Optimizer]
    sources: dict[str, Source]
    workflow: Workflow
    scheduler: PhaseScheduler
    checkpoints: CheckpointManager
    counters: Counters = field(default_factory=Counters)
    sums: MetricSums = field(default_factory=MetricSums)

    def orchestrator(self, folder: Path, dashboard: Dashboard | None = None) -> Orchestrator:
        """Return what runs this experiment in a folder."""
        config = self.config
        return Orchestrator(
            settings=RunSettings(
                name=config.experiment.name,
                seed=config.experiment.seed,
                total_timesteps=config.training.total_timesteps,
                stop_at_return=config.training.stop_at_return,
                evaluate_every=config.evaluation.every,
                log_every=config.logging.every,
                tensorboard=config.logging.tensorboard,
                checkpoint_every_seconds=config.checkpoint.every_seconds,
                checkpoint_every_steps=config.checkpoint.every_steps,
                facts={"config_hash": config_hash(self.composed), "device": self.device},
            ),
            folder=folder,
            workflow=self.workflow,
            scheduler=self.scheduler,
            collector=self.collector,
            sources=self.sources,
            evaluator=self.evaluator,
            seeds=self.seeds,
            counters=self.counters,
            sums=self.sums,
            components=self.components,
            controllers=self.controllers,
            optimizers=self.optimizers,
            checkpoints=self.checkpoints,
            dashboard=dashboard,
        )

    def close(self) -> None:
        """Close the environments."""
        self.collector.environments.close()
        self.evaluator.collector.environments.close()


def build_experiment(
    composed: DictConfig, folder: Path, *, allow: Sequence[str] = (), render: bool = False
) -> Experiment:
    """Wire an experiment. Everything that can be known before the first step fails here."""
    composed = fill_dims(composed, allow)
    config = parse_config(composed)
    phases = config.phases()
    torch.set_num_threads(config.training.threads)
    device = choose_device(config.experiment.device)
    seeds = SeedTree(config.experiment.seed)
    seed_all(config.experiment.seed)
    components = build_parts(config.components, "components", seeds, device, allow)
    controllers = build_parts(config.controllers, "controllers", seeds, device, allow)
    optimizers = build_optimizers(config, components, controllers, allow)
    sources = build_sources(config, seeds, device, allow)
    phases = [check_phase(phase, i, sources) for i, phase in enumerate(phases)]
    workflow = build_workflow(config, {**components, **controllers}, optimizers, seeds, device, allow)
    for i, phase in enumerate(phases):
        check_hooks(phase, f"training.phases[{i}]", workflow)
    num_envs = config.environment.num_envs
    environments = build_environments(config.environment, num_envs, allow, render=render)
    collector = RolloutCollector(environments, seeds, device=device, initial_state=workflow.initial_state(num_envs))
    counters = Counters()
    evaluator = build_evaluator(config, workflow, seeds, device, counters, allow, render)
    check_actions(workflow, collector)
    experiment = Experiment(
        config=config,
        composed=composed,
        device=device,
        seeds=seeds,
        collector=collector,
        evaluator=evaluator,
        components=components,
        controllers=controllers,
        optimizers=optimizers,
        sources=sources,
        workflow=workflow,
        scheduler=PhaseScheduler(
            phases,
            total_timesteps=config.training.total_timesteps,
            ready=lambda name: name is None or sources[name].ready,
            needs_source=workflow.takes_batch,
        ),
        checkpoints=CheckpointManager(folder / "checkpoints", keep=config.checkpoint.keep),
        counters=counters,
    )
    workflow.initialize(context_of(experiment))
    return experiment


def choose_device(name: str) -> str:
    """Return the device to train on; `auto` takes cuda, then mps, then cpu."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device, there in available.items() if there)
    kind = name.split(":")[0]
    if kind not in available or not available[kind]:
        usable = ["auto", *(device for device, there in available.items() if there)]
        raise UserError("this device is not available here", key="experiment.device", value=name, valid=usable)
    return name


def fill_dims(composed: DictConfig, allow: Sequence[str] = ()) -> DictConfig:
    """Return the configuration with `_dims.observation` and `_dims.action` taken from the environment."""
    node = OmegaConf.select(composed, "environment")
    if not isinstance(node, DictConfig) or OmegaConf.is_missing(node, "id"):
        resolve(composed)  # says what is missing
        raise UserError(
            "no environment is chosen", key="environment.id", remedy="set environment=NAME or environment.id=ID"
        )
    section: EnvironmentSection = parse(EnvironmentSection, resolve(node), "environment")
    environment = build_environments(section, 1, allow)
    try:
        observation, action = describe_spaces(environment)
    finally:
        environment.close()
    filled = composed.copy()
    dims = OmegaConf.select(filled, "_dims")
    if not isinstance(dims, DictConfig):
        raise UserError("a mapping is expected here", key="_dims", value=dims)
    for name, actual in (("observation", observation), ("action", action)):
        stated = (
            None if name not in dims or OmegaConf.is_missing(dims, name) else OmegaConf.select(filled, f"_dims.{name}")
        )
        plain = OmegaConf.to_container(stated) if OmegaConf.is_config(stated) else stated
        if plain is not None and plain != actual:
            raise UserError(
                f"the environment '{section.id}' has {name} {actual}, not {plain}",
                key=f"_dims.{name}",
                value=plain,
                remedy=f"remove it (it is filled in), or write {actual}",
            )
        dims[name] = actual
    return filled


def build_environments(
    section: EnvironmentSection, num_envs: int, allow: Sequence[str], *, render: bool = False
) -> Any:
    """Make vector environments."""
    return make_env(
        section.id,
        num_envs,
        action_repeat=section.action_repeat,
        resize=section.resize,
        frame_stack=section.frame_stack,
        max_episode_steps=section.max_episode_steps,
        kwargs=section.kwargs,
        render=render,
        allow=allow,
    )


def build_parts(
    nodes: Mapping[str, Any], section: str, seeds: SeedTree, device: str, allow: Sequence[str]
) -> dict[str, Any]:
    """Build components or controllers, each under its own seed."""
    parts = {}
    for name, node in nodes.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.seed(f"init/{name}"))
            part = instantiate(node, f"{section}.{name}", allow=allow)
        parts[name] = part.to(device) if isinstance(part, nn.Module) else part
    return parts


def build_optimizers(
    config: RunConfig, components: Mapping[str, Any], controllers: Mapping[str, Any], allow: Sequence[str]
) -> dict[str, Optimizer]:
    """Build optimisers; every trainable parameter belongs to exactly one of them."""
    both = components.keys() & controllers.keys()
    if both:
        raise UserError("a component and a controller share a name", key="components", value=sorted(both)[0])
    parts = {**components, **controllers}
    nodes = dict(config.optimizers)
    declares = declared_fields(_workflow_class(config, allow))
    if not nodes and not declares and any(list(_trainable(part)) for part in components.values()):
        # A workflow that reads the context, without a word about optimisers: Adam for all components.
        rate = {"lr": config.algorithm["learning_rate"]} if "learning_rate" in config.algorithm else {}
        nodes = {"world_model": {"_target_": "torch.optim.Adam", "_partial_": True, **rate}}
    built: dict[str, Optimizer] = {}
    owner: dict[int, str] = {}
    for name, node in nodes.items():
        key = f"optimizers.{name}"
        trains = _trains(name, node, key, components, controllers)
        for part in trains:
            for parameter in _trainable(parts[part]):
                if id(parameter) in owner:
                    raise UserError(
                        f"'{part}' is trained by two optimisers, '{owner[id(parameter)]}' and '{name}'",
                        key=f"{key}.trains",
                        value=list(trains),
                        remedy="list each component in one optimiser only",
                    )
                owner[id(parameter)] = name
        built[name] = _build_optimizer(node, key, [p for part in trains for p in _trainable(parts[part])], allow)
    for name, part in parts.items():
        if any(id(parameter) not in owner for parameter in _trainable(part)):
            raise UserError(
                f"the parameters of '{name}' belong to no optimiser and would never learn",
                key="optimizers",
                value=name,
                valid=nodes,
                remedy=f"add '{name}' to the list `trains` of one of them",
            )
    return built


@dataclass(frozen=True)
class _OptimizerSection:
    trains: list[str]
    optimizer: dict[str, Any]
    max_grad_norm: float | None = None
    learning_rate: dict[str, Any] | float | None = None


def _trains(
    name: str, node: Any, key: str, components: Mapping[str, Any], controllers: Mapping[str, Any]
) -> Sequence[str]:
    if isinstance(node, Mapping) and "_target_" in node:  # the bare form: named by what it trains
        if name == "world_model":
            return list(components)
        if name not in controllers:
            raise UserError("no controller has this name", key=key, value=name, valid=["world_model", *controllers])
        return [name]
    section: _OptimizerSection = parse(_OptimizerSection, node, key)
    for part in section.trains:
        if part not in components and part not in controllers:
            raise UserError(
                "no component or controller has this name",
                key=f"{key}.trains",
                value=part,
                valid=[*components, *controllers],
            )
    return section.trains


def _build_optimizer(node: Any, key: str, parameters: list[nn.Parameter], allow: Sequence[str]) -> Optimizer:
    if not parameters:
        raise UserError("this optimiser has nothing to train", key=key, value=node)
    bare = "_target_" in node
    section = _OptimizerSection([], dict(node)) if bare else parse(_OptimizerSection, node, key)
    place = key if bare else f"{key}.optimizer"
    schedule = section.learning_rate
    if isinstance(schedule, dict):
        schedule = instantiate(schedule, f"{key}.learning_rate", allow=allow, kind=Schedule)
    elif schedule is not None:
        schedule = Schedule(schedule)
    make = instantiate({**section.optimizer, "_partial_": True}, place, allow=allow)
    if not (inspect.isclass(make.func) and issubclass(make.func, torch.optim.Optimizer)):
        raise UserError("an optimiser is expected here", key=f"{place}._target_", value=section.optimizer["_target_"])
    if section.max_grad_norm is not None and section.max_grad_norm <= 0:
        raise UserError("a number above 0 is expected here", key=f"{key}.max_grad_norm", value=section.max_grad_norm)
    try:
        return Optimizer(parameters, make, max_grad_norm=section.max_grad_norm, learning_rate=schedule)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"the optimiser cannot be built: {error}", key=place, value=section.optimizer) from None


def _trainable(part: Any) -> list[nn.Parameter]:
    return [p for p in part.parameters() if p.requires_grad] if isinstance(part, nn.Module) else []


def build_sources(config: RunConfig, seeds: SeedTree, device: str, allow: Sequence[str]) -> dict[str, Source]:
    """Build the named buffers; a single `buffer` is the one named 'replay'."""
    nodes = dict(config.buffers)
    if config.buffer is not None:
        if "replay" in nodes:
            raise UserError("'buffer' and 'buffers.replay' name one buffer twice", key="buffer", remedy="keep one")
        nodes["replay"] = config.buffer
    sources: dict[str, Source] = {}
    for name, node in nodes.items():
        key = f"buffers.{name}" if name in config.buffers else "buffer"
        given = {"num_envs": config.environment.num_envs, "generator": seeds.numpy(f"source/{name}"), "device": device}
        node = dict(node) if isinstance(node, Mapping) else node
        shares = node.pop("shares", None) if isinstance(node, dict) else None
        if shares is not None:
            if shares not in sources:
                raise UserError("no earlier buffer has this name", key=f"{key}.shares", value=shares, valid=sources)
            given["ring"] = sources[shares].ring
        sources[name] = instantiate(node, key, given=given, allow=allow, kind=Source)
    return sources


def _workflow_class(config: RunConfig, allow: Sequence[str]) -> type[Workflow]:
    target = resolve_target(config.workflow, "workflow", allow)
    if not (inspect.isclass(target) and issubclass(target, Workflow)):
        raise UserError(
            "a subclass of Workflow is expected here", key="workflow._target_", value=config.workflow["_target_"]
        )
    return target


def build_workflow(
    config: RunConfig,
    parts: Mapping[str, Any],
    optimizers: Mapping[str, Optimizer],
    seeds: SeedTree,
    device: str,
    allow: Sequence[str],
) -> Workflow:
    """Construct the workflow with the parts whose names match its fields."""
    workflow_class = _workflow_class(config, allow)
    names = [entry.name for entry in declared_fields(workflow_class)]
    if not names:
        return instantiate(config.workflow, "workflow", allow=allow, kind=Workflow)
    given: dict[str, Any] = {name: part for name, part in parts.items() if name in names}
    unused = [name for name in parts if name not in names]
    for name, optimizer in optimizers.items():
        place = f"{name}_optimizer"
        if place not in names and len(optimizers) == 1 and "optimizer" in names:
            place = "optimizer"
        if place in names:
            given[place] = optimizer
        else:
            unused.append(f"{name} (optimiser)")
    if "generator" in names:
        given["generator"] = seeds.generator("workflow", device)
    knobs = {name for name in config.workflow if name not in ("_target_", "_partial_")}
    required = [
        entry.name
        for entry in declared_fields(workflow_class)
        if inspect.signature(workflow_class).parameters[entry.name].default is inspect.Parameter.empty
    ]
    missing = [name for name in required if name not in given and name not in knobs]
    if missing or unused:
        listed = "; ".join(
            text
            for text in (
                f"it needs {', '.join(missing)}" if missing else "",
                f"it does not use {', '.join(unused)}" if unused else "",
            )
            if text
        )
        raise UserError(
            f"{workflow_class.__name__} does not fit the parts: {listed}",
            key="components" if missing else "workflow",
            value=(missing or unused)[0],
            valid=[*required, *parts],
            remedy="declare the missing parts under components, controllers or optimizers; remove the unused ones",
        )
    return instantiate(config.workflow, "workflow", given=given, allow=allow, kind=Workflow)


def check_phase(phase: Phase, index: int, sources: Mapping[str, Any]) -> Phase:
    """Return the phase with its buffer; a name that no source has is refused."""
    key = f"training.phases[{index}]"
    needs = any(hook.name == "collect" or hook.is_update for hook in phase.hooks)
    if phase.buffer is None and needs and len(sources) == 1:
        phase = Phase(
            **{name: getattr(phase, name) for name in Phase.__slots__ if name != "buffer"}, buffer=next(iter(sources))
        )
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
    return phase


def check_hooks(phase: Phase, key: str, workflow: Workflow) -> None:
    """Refuse hooks that the workflow does not have and settings that it does not know."""
    for i, hook in enumerate(phase.hooks):
        if hook.is_update and hook.name not in workflow.hooks():
            raise UserError(
                f"{type(workflow).__name__} has no hook '{hook.name}'",
                key=f"{key}.workflow_hooks[{i}]",
                value=hook.name,
                valid=["collect", "evaluate", *workflow.hooks()],
            )
        if hook.is_update and workflow.takes_batch(hook.name) and (hook.source or phase.buffer) is None:
            raise UserError(
                "this hook needs a buffer to draw from", key=f"{key}.buffer", remedy="name one: buffer: replay"
            )
    for name, value in phase.settings.items():
        if name not in workflow.known_settings:
            raise UserError(
                f"{type(workflow).__name__} knows no setting '{name}'",
                key=f"{key}.settings.{name}",
                value=name,
                valid=workflow.known_settings,
            )
        if name == "policy" and value not in ("random", "agent"):
            raise UserError("unknown policy", key=f"{key}.settings.policy", value=value, valid=["random", "agent"])


def build_evaluator(
    config: RunConfig,
    workflow: Workflow,
    seeds: SeedTree,
    device: str,
    counters: Counters,
    allow: Sequence[str],
    render: bool = False,
) -> Evaluator:
    """Make environments and an act state of evaluation's own."""
    section = config.evaluation
    num_envs = section.num_envs or min(section.episodes, MAX_EVALUATION_ENVS)
    environments = build_environments(config.environment, num_envs, allow, render=render)
    collector = RolloutCollector(
        environments, seeds, stream="evaluate", device=device, initial_state=workflow.initial_state(num_envs)
    )
    return Evaluator(
        collector, workflow.act, section.episodes, counters=lambda: (counters.env_steps, counters.agent_steps)
    )


def check_actions(workflow: Workflow, collector: RolloutCollector) -> None:
    """Ask for one decision, so that networks and spaces that do not fit are found before the first step."""
    if type(workflow).act is Workflow.act:
        if not workflow.collects:
            raise UserError(f"{type(workflow).__name__} defines neither act nor collect_step", key="workflow")
        return
    observations = tree_map(lambda leaf: torch.from_numpy(leaf).to(collector.device), collector.observations)
    shapes = tree_map(lambda leaf: tuple(leaf.shape[1:]), observations)
    try:
        said = workflow.act(observations, collector.state, explore=False)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise UserError(
            f"{type(workflow).__name__} cannot act on observations of shape {shapes}: {str(error).splitlines()[0]}",
            key="components",
            remedy="check that the networks take ${_dims.observation} and suit this kind of observation",
        ) from error
    space = collector.environments.single_action_space
    discrete = hasattr(space, "n")
    expected = (collector.num_envs,) if discrete else (collector.num_envs, *space.shape)
    fits = tuple(said.actions.shape) == expected and said.actions.dtype.is_floating_point != discrete
    if not fits:
        raise UserError(
            f"{type(workflow).__name__} gives actions of shape {tuple(said.actions.shape)} and {said.actions.dtype}, "
            f"but the environment wants {'indices' if discrete else 'real numbers'} of shape {expected}",
            key="controllers",
            remedy="discrete actions need an actor such as categorical, continuous ones one such as gaussian",
        )


def context_of(experiment: Experiment) -> WorkflowContext:
    """Bundle what exists at run time for `Workflow.initialize`."""
    collector = experiment.collector
    train = SteppedEnvironment(collector)
    return WorkflowContext(
        config=MappingProxyType(resolve(experiment.composed)),
        device=experiment.device,
        train_environment=train,
        eval_environment=SteppedEnvironment(experiment.evaluator.collector),
        components=WorldModelComponents(**experiment.components),
        buffers=MappingProxyType(experiment.sources),
        optimizers=MappingProxyType(experiment.optimizers),
        controller_manager=ControllerManager(experiment.controllers),
        checkpoint_manager=experiment.checkpoints,
        experiment_logger=WorkflowLogger(experiment.sums),
        initial_observation=_as_tensors(collector.observations),
        initial_dones=torch.zeros(collector.num_envs, dtype=torch.bool),
        global_step=experiment.counters.agent_steps,
    )


def _as_tensors(tree: Tree) -> Tree:
    convert: Callable[[Any], torch.Tensor] = torch.from_numpy
    return tree_map(convert, tree)
