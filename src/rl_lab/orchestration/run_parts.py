"""RunParts: everything that decides how a run goes on, and its state as one tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rl_lab.core.optim import Optimizer
from rl_lab.core.seeding import SeedTree, global_states, restore_global_states
from rl_lab.core.workflow import Workflow
from rl_lab.data.collector import RolloutCollector
from rl_lab.orchestration.evaluation import Evaluator
from rl_lab.orchestration.loggers import MetricSums
from rl_lab.orchestration.loop import all_finite
from rl_lab.orchestration.phase_scheduler import PhaseScheduler

WEIGHTS = ("components", "controllers", "workflow_custom")  # the sections that acting needs


@dataclass
class Counters:
    """The four counters of a run, and the finished hooks that number its checkpoints."""

    env_steps: int = 0
    agent_steps: int = 0
    updates: int = 0
    episodes: int = 0
    actions: int = 0


@dataclass
class AgentParts:
    """What acting needs: the workflow and the parts whose weights it uses."""

    workflow: Workflow
    components: Mapping[str, Any]
    controllers: Mapping[str, Any]

    @property
    def max_bytes(self) -> int:
        """A generous bound of what the weights can need on disk, so that a hostile file is not read."""
        parts = (*self.components.values(), *self.controllers.values())
        tensors = (t for part in parts if isinstance(part, nn.Module) for t in part.state_dict().values())
        return 16 * 2**20 + 8 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def parameters(self) -> dict[str, Any]:
        """Return what acting needs: the weights of components, controllers and workflow."""
        return {
            "components": _module_states(self.components),
            "controllers": _module_states(self.controllers),
            "workflow_custom": self.workflow.get_state(),
        }

    def set_parameters(self, state: Mapping[str, Any]) -> None:
        """Load what `parameters` returned."""
        for modules, states in ((self.components, state["components"]), (self.controllers, state["controllers"])):
            for name, module in modules.items():
                if isinstance(module, nn.Module):
                    module.load_state_dict(states[name])
        self.workflow.set_state(state["workflow_custom"])

    def nonfinite_part(self) -> str | None:
        """Return the name of a part, target networks included, with a weight or a statistic that is not finite."""
        own = {name: getattr(self.workflow, name) for name in self.workflow.checkpointed}
        for name, module in {**self.components, **self.controllers, **own}.items():
            if not isinstance(module, nn.Module):
                continue
            statistics = (buffer for buffer in module.buffers() if buffer.is_floating_point())
            # A mask may be infinite and right; no statistic is ever rightly not a number.
            if not all_finite(module.parameters()) or any(bool(buffer.isnan().any()) for buffer in statistics):
                return name
        return None

    def any_weight_overflows(self) -> bool:
        """Return whether the norm of what an optimiser trains is not finite: quick, but large weights are no fault.

        A GPU is not asked: it would have to be waited for.
        """
        on_cpu = (optimizer for optimizer in self.workflow.optimizers() if optimizer.nonfinite.is_cpu)
        return any(not optimizer.weights_norm().isfinite() for optimizer in on_cpu)


@dataclass
class RunParts(AgentParts):
    """What the loop works with. Whatever joins a run joins this state."""

    scheduler: PhaseScheduler
    collector: RolloutCollector
    sources: Mapping[str, Any]
    evaluator: Evaluator
    seeds: SeedTree
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    sums: MetricSums = field(default_factory=MetricSums)
    incidents: Sequence[Sequence[str]] = ()  # of each pool; grows when a worker process had to be replaced

    def get_state(self) -> dict[str, Any]:
        """Return everything, except the replay history that is saved in segments."""
        return {
            **self.parameters(),
            "optimizers": {name: optimizer.get_state() for name, optimizer in self.optimizers.items()},
            "phase_state": self.scheduler.get_state(),
            "collector": self.collector.get_state(),
            "sources": {name: source.get_state() for name, source in self.sources.items()},
            "evaluation": self.evaluator.get_state(),
            "generators": self.seeds.get_state(),
            "rng_state": global_states(),
            "counters": vars(self.counters).copy(),
            "sums": self.sums.get_state(),
        }

    def set_state(self, state: Mapping[str, Any], histories: Mapping[str, Any]) -> int:
        """Restore everything in place; return how many environments did not come back the same."""
        self.set_parameters(state)
        for name, optimizer in self.optimizers.items():
            optimizer.set_state(state["optimizers"][name])
        for name, source in self.sources.items():
            source.set_state(state["sources"][name], *histories.get(name, ()))
        self.scheduler.set_state(state["phase_state"])
        self.evaluator.set_state(state["evaluation"])
        self.seeds.set_state(state["generators"])
        restore_global_states(state["rng_state"])
        for name, value in state["counters"].items():
            setattr(self.counters, name, value)
        self.sums.set_state(state["sums"])
        if self.collector.set_state(state["collector"]):
            return 0
        lost = self.collector.replaced_rows
        for source in self.sources.values():
            source.close_open(lost)
        return int(lost.sum())


def _module_states(modules: Mapping[str, Any]) -> dict[str, Any]:
    return {name: module.state_dict() for name, module in modules.items() if isinstance(module, nn.Module)}
