"""RL Lab: a laboratory for world models and model-based reinforcement learning."""

from __future__ import annotations

import importlib
from typing import Any

# Resolved on first use, so that `import rl_lab` (and `rl-lab --help`) need not wait for torch.
_PUBLIC = {
    "Batch": "rl_lab.core.batch",
    "Hook": "rl_lab.core.phase",
    "Phase": "rl_lab.core.phase",
    "PhaseConfig": "rl_lab.core.phase",
    "PhaseDefinition": "rl_lab.core.phase",
    "Act": "rl_lab.core.workflow",
    "CollectResult": "rl_lab.core.workflow",
    "ControllerManager": "rl_lab.core.workflow",
    "Event": "rl_lab.core.workflow",
    "Metrics": "rl_lab.core.workflow",
    "RLModule": "rl_lab.core.workflow",
    "ReplayBuffer": "rl_lab.core.workflow",
    "Trainer": "rl_lab.core.workflow",
    "Update": "rl_lab.core.workflow",
    "Workflow": "rl_lab.core.workflow",
    "WorkflowContext": "rl_lab.core.workflow",
    "WorldModelComponents": "rl_lab.core.workflow",
    "WorldModelWorkflow": "rl_lab.core.workflow",
    "as_module": "rl_lab.core.workflow",
    "Optimizer": "rl_lab.core.optim",
    "log_architecture": "rl_lab.core.architecture",
    "SeedTree": "rl_lab.core.seeding",
    "seed_all": "rl_lab.core.seeding",
    "UserError": "rl_lab.core.errors",
    "RolloutCollector": "rl_lab.data.collector",
    "ReplaySource": "rl_lab.data.sources",
    "StreamSource": "rl_lab.data.sources",
    "make_env": "rl_lab.envs.make",
    "Orchestrator": "rl_lab.orchestration.orchestrator",
    "PhaseScheduler": "rl_lab.orchestration.phase_scheduler",
    "training_loop": "rl_lab.orchestration.loop",
    "build_experiment": "rl_lab.build",
    "load_experiment": "rl_lab.composition",
    "train": "rl_lab.runs",
    "load_agent": "rl_lab.runs",
    "export_policy": "rl_lab.policies",
    "load_policy": "rl_lab.policies",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rl_lab' has no attribute '{name}'")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
