"""Experiment: everything that a run consists of, wired."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import nn

from rl_lab.composition import config_hash
from rl_lab.config import RunConfig
from rl_lab.core.batch import tree_leaves
from rl_lab.core.optim import Optimizer
from rl_lab.core.seeding import SeedTree
from rl_lab.core.workflow import Workflow
from rl_lab.data.collector import RolloutCollector
from rl_lab.data.sources import ReplaySource, Source
from rl_lab.envs.pool import WorkerPool
from rl_lab.orchestration.checkpoint import CheckpointManager
from rl_lab.orchestration.dashboard import Dashboard
from rl_lab.orchestration.evaluation import Evaluator
from rl_lab.orchestration.loggers import MetricSums
from rl_lab.orchestration.orchestrator import Orchestrator, RunSettings
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.run_parts import Counters, RunParts


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
    commit: str | None = None  # of the repository that the run was started in
    counters: Counters = field(default_factory=Counters)
    sums: MetricSums = field(default_factory=MetricSums)

    def orchestrator(self, folder: str | Path, dashboard: Dashboard | None = None) -> Orchestrator:
        """Return what runs this experiment in a folder."""
        config = self.config
        return Orchestrator(
            self.parts(),
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
                captures=self.captures,
                nonfinite=config.training.nonfinite,
                facts={"config_hash": config_hash(self.composed), "device": self.device, "commit": self.commit},
            ),
            folder=folder,
            checkpoints=self.checkpoints,
            dashboard=dashboard,
        )

    @property
    def captures(self) -> bool:
        """Whether updates and decisions become CUDA graphs."""
        return self.device.startswith("cuda") and self.config.training.capture == "auto"

    def parts(self) -> RunParts:
        """Return what the loop works with."""
        pools = (self.collector.environments, self.evaluator.collector.environments)
        return RunParts(
            workflow=self.workflow,
            scheduler=self.scheduler,
            collector=self.collector,
            sources=self.sources,
            evaluator=self.evaluator,
            seeds=self.seeds,
            components=self.components,
            controllers=self.controllers,
            optimizers=self.optimizers,
            counters=self.counters,
            sums=self.sums,
            incidents=[pool.incidents for pool in pools if isinstance(pool, WorkerPool)],
        )

    def max_checkpoint_bytes(self) -> int:
        """Return a generous bound of what a checkpoint of this run can need, so that a hostile one is not read."""
        modules = [
            part for part in (*self.components.values(), *self.controllers.values()) if isinstance(part, nn.Module)
        ]
        weights = sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
        observation = sum(leaf.nbytes for leaf in tree_leaves(self.collector.observations)) // self.collector.num_envs
        hooks = [hook for phase in self.scheduler.phases for hook in phase.hooks if hook.name == "collect"]
        rollout = max((hook.times for hook in hooks), default=0) * self.collector.num_envs
        rings = {id(source.ring): source.ring for source in self.sources.values() if isinstance(source, ReplaySource)}
        rows = sum(ring.size for ring in rings.values())
        latents = sum(leaf.nbytes for leaf in tree_leaves(self.collector.state)) // self.collector.num_envs
        return 64 * 2**20 + 16 * weights + (2 * rollout + rows) * 2 * (observation + latents + 4096)

    def close(self) -> None:
        """Close the environments."""
        self.collector.environments.close()
        self.evaluator.collector.environments.close()
