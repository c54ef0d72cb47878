"""The composition root: a configuration in, a wired experiment out. A script may replace any of its steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from rl_lab.buffers import build_sources
from rl_lab.checks import (
    check_data_sets,
    check_hooks,
    check_parts,
    check_phase,
    check_room,
    check_windows,
    optimizer_field,
)
from rl_lab.composition import parse_config, resolve
from rl_lab.config import RunConfig
from rl_lab.core.batch import Tree, tree_map
from rl_lab.core.capture import compile_parts
from rl_lab.core.errors import UserError
from rl_lab.core.optim import Optimizer
from rl_lab.core.precision import compute_in_bfloat16
from rl_lab.core.seeding import SeedTree, seed_all
from rl_lab.core.workflow import ControllerManager, Workflow, WorkflowContext, WorldModelComponents, declared_fields
from rl_lab.data.collector import RolloutCollector, SteppedEnvironment
from rl_lab.environment import build_environments, explain_dims, fill_dims
from rl_lab.experiment import Experiment
from rl_lab.instantiate import instantiate
from rl_lab.optimizers import build_optimizers
from rl_lab.orchestration.checkpoint import CheckpointManager
from rl_lab.orchestration.evaluation import Evaluator
from rl_lab.orchestration.orchestrator import WorkflowLogger
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.run_parts import AgentParts, Counters
from rl_lab.overrides import group_options
from rl_lab.rehearsal import check_decisions
from rl_lab.targets import resolve_target

__all__ = ["Experiment", "build_experiment", "fill_dims"]

MAX_EVALUATION_ENVS = 10


def build_experiment(
    composed: DictConfig, folder: str | Path, *, allow: Sequence[str] = (), render: bool = False, learns: bool = True
) -> Experiment:
    """Wire an experiment. Everything that can be known before the first step fails here.

    One that only plays needs no room for its replay, nor windows to learn from.
    """
    folder = Path(folder)
    composed = fill_dims(composed, allow)
    config = parse_config(composed)
    torch.set_num_threads(config.training.threads)
    torch.set_flush_denormal(True)  # moments of idle units decay into denormal numbers: Adam on them is twice as slow
    device = choose_device(config.experiment.device)
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")  # TF32: several times faster, and enough for learning
    seeds = SeedTree(config.experiment.seed)
    seed_all(config.experiment.seed)
    num_envs = config.environment.num_envs
    check_parts(config, workflow_class(config, allow))
    components = build_parts(config, "components", seeds, device, allow)
    controllers = build_parts(config, "controllers", seeds, device, allow)
    optimizers = build_optimizers(config, components, controllers, allow)
    sources = build_sources(config, seeds, device, folder, allow)
    phases = [check_phase(phase, i, sources, num_envs) for i, phase in enumerate(config.phases())]
    workflow = build_workflow(config, {**components, **controllers}, optimizers, seeds, device, allow)
    for i, phase in enumerate(phases):
        check_hooks(phase, i, workflow, sources)
    if learns:
        check_windows(config, phases, workflow, sources)
    with ExitStack() as opened:
        environments = build_environments(config.environment, num_envs, allow, render=render)
        opened.callback(environments.close)
        collector = RolloutCollector(environments, seeds, device=device, initial_state=workflow.initial_state(num_envs))
        check_data_sets(sources, environments, collector.observations)
        if learns:
            check_room(config, sources, environments, collector.observations)
        counters = Counters()
        evaluator = build_evaluator(config, workflow, seeds, device, counters, allow, render)
        opened.callback(evaluator.collector.environments.close)
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
            checkpoints=CheckpointManager(folder, keep=config.checkpoint.keep),
            counters=counters,
        )
        workflow.initialize(context_of(experiment))
        if config.training.compile == "parts":
            compile_parts([*vars(workflow).values(), workflow])
        check_decisions(workflow, collector, "controllers" if controllers else "components")
        experiment.scheduler.next_action()  # a curriculum that cannot begin is refused before a folder is made
        opened.pop_all()
    return experiment


def build_agent(composed: DictConfig, device: str, *, allow: Sequence[str] = ()) -> AgentParts:
    """Build what acting needs, without environments and buffers; the dimensions must be filled in."""
    config = parse_config(composed)
    seeds = SeedTree(config.experiment.seed)
    check_parts(config, workflow_class(config, allow))
    components = build_parts(config, "components", seeds, device, allow)
    controllers = build_parts(config, "controllers", seeds, device, allow)
    optimizers = build_optimizers(config, components, controllers, allow)
    workflow = build_workflow(config, {**components, **controllers}, optimizers, seeds, device, allow)
    return AgentParts(workflow, components, controllers)


def choose_device(name: str) -> str:
    """Return the device to train on; `auto` takes cuda, then mps, then cpu."""
    numbers = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    usable = [kind for kind, number in numbers.items() if number]
    if name == "auto":
        return usable[0]
    kind, colon, index = name.partition(":")
    fits = kind in usable and (not colon or (index.isdecimal() and int(index) < numbers[kind]))
    if not fits:
        raise UserError(
            "this device is not available here",
            key="experiment.device",
            value=name,
            valid=["auto", *usable, *(f"cuda:{i}" for i in range(numbers["cuda"]))],
            remedy="let auto choose, or see `rl-lab doctor`",
        )
    return name


def build_parts(config: RunConfig, section: str, seeds: SeedTree, device: str, allow: Sequence[str]) -> dict[str, Any]:
    """Build the components or the controllers, each under its own seed."""
    parts = {}
    for name, node in getattr(config, section).items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.seed(f"init/{name}"))
            try:
                part = instantiate(node, f"{section}.{name}", allow=allow)
            except UserError as error:
                raise explain_dims(error, config.dims) from error
        parts[name] = part.to(device) if isinstance(part, nn.Module) else part
    if config.training.precision == "bfloat16" and not computes_itself(workflow_class(config, allow)):
        compute_in_bfloat16(parts.values(), device)
    return parts


def computes_itself(workflow: type[Workflow]) -> bool:
    """Return whether a workflow takes a `precision` to compute in; for others the networks are converted."""
    return "precision" in {entry.name for entry in declared_fields(workflow)}


def workflow_class(config: RunConfig, allow: Sequence[str]) -> type[Workflow]:
    """Return the class that the configuration names."""
    target = resolve_target(config.workflow, "workflow", allow)
    if not (inspect.isclass(target) and issubclass(target, Workflow)):
        raise UserError(
            "a subclass of Workflow is expected here",
            key="workflow._target_",
            value=config.workflow["_target_"],
            valid=[f"workflow={name}" for name in group_options("workflow")],
            remedy="choose a workflow by workflow=NAME",
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
    fields = declared_fields(workflow_class(config, allow))
    if not fields:
        return instantiate(config.workflow, "workflow", allow=allow, kind=Workflow)
    names = [entry.name for entry in fields]
    given: dict[str, Any] = {name: part for name, part in parts.items() if name in names}
    given |= {optimizer_field(name, names, len(optimizers)): optimizer for name, optimizer in optimizers.items()}
    if "generator" in names:
        given["generator"] = seeds.generator("workflow", device)
    if "precision" in names:
        given["precision"] = config.training.precision
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
        collector,
        workflow.act,
        section.episodes,
        counters=lambda: (counters.env_steps, counters.agent_steps),
        inspect=workflow.inspect if section.inspect and workflow.inspects else None,
        explore=section.explore,
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
