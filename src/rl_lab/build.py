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
