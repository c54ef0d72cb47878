"""Workflow: what an algorithm is to the rest of the lab, and the types it exchanges with it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rl_lab.core.batch import Batch, Tree
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Phase
from rl_lab.core.schedules import Schedule

Metrics = dict[str, Any]  # bare names to floats or 0-d tensors; tensors stay on the device until they are logged


class Act(NamedTuple):
    """What a policy says."""

    actions: Tensor
    state: Tree = None  # recurrent or planner state; every leaf leads with num_envs
    extras: Mapping[str, Tensor] = MappingProxyType({})  # columns to keep beside the transition


ActFunction = Callable[..., Act]  # like Workflow.act


class Update(NamedTuple):
    """What a hook may return instead of bare metrics."""

    metrics: Metrics
    columns: Mapping[str, Tensor]  # written back to batch.rows of the source: latents, "priority"


@dataclass
class CollectResult:
    """What a collection brought."""

    steps: int  # decisions over all environments
    episodes: int = 0
    metrics: Metrics = field(default_factory=dict)
    trajectory: Batch | Mapping[str, Any] | None = None
    extras: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Inspection:
    """What a workflow sees when it looks at evaluation episodes with its model."""

    metrics: Metrics = field(default_factory=dict)  # bare names, logged under `eval/`
    pictures: Mapping[str, Any] = field(default_factory=dict)  # name to uint8 [H, W, 3], a tensor or an array


@dataclass(frozen=True)
class Event:
    """What the loop yields after every hook."""

    hook: str
    phase: str
    steps: int = 0  # agent steps
    updates: int = 0
    episodes: int = 0
    metrics: Metrics = field(default_factory=dict)
    env_steps: int = 0  # frames of the simulator, action repeat included


def check_horizon(horizon: int) -> None:
    """Refuse to imagine nothing: every `imagine` asks this first."""
    if horizon < 1:
        raise ValueError(f"the horizon of imagination must be at least 1, not {horizon}")


class WorldModelComponents(SimpleNamespace):
    """The components by name: `context.components.encoder`."""


class ControllerManager(dict):
    """A mapping role -> controller."""

    def act(self, role: str, *args: Any, **kwargs: Any) -> Any:
        """Ask the controller in a role to act."""
        if role not in self:
            raise KeyError(f"no controller in the role '{role}'; there are {sorted(self)}")
        return self[role].act(*args, **kwargs)


@runtime_checkable
class Environment(Protocol):
    """The training environment as a workflow that steps it itself sees it."""

    num_envs: int

    def reset(self) -> Tree:
        """Start new episodes everywhere."""
        ...

    def step(self, actions: Any) -> tuple[Tree, Tensor, Tensor, Any]:
        """Return observations (of the next episode where one ended), rewards, dones and infos."""
        ...


@runtime_checkable
class Logger(Protocol):
    """Where a workflow may write numbers of its own; they appear under `workflow/`."""

    def log(self, key: str, value: Any) -> None:
        """Record a value at the current step."""
        ...


@dataclass(frozen=True)
class WorkflowContext:
    """What exists only at run time, given once to `Workflow.initialize`."""

    config: Mapping[str, Any]
    device: str
    train_environment: Environment
    eval_environment: Environment
    components: WorldModelComponents
    buffers: Mapping[str, Any]
    optimizers: Mapping[str, Any]
    controller_manager: ControllerManager
    checkpoint_manager: Any
    experiment_logger: Logger
    initial_observation: Tree
    initial_dones: Any
    global_step: int


class Workflow:
    """An algorithm: a dataclass of its parts and knobs, with `act` and methods named `update_*`.

    Subclasses that declare fields get the components of those names; others read them from the context.
    """

    checkpointed: ClassVar[Sequence[str]] = ()  # attributes saved besides components and optimisers
    known_settings: ClassVar[Sequence[str]] = ("policy",)  # keys that this workflow reads in phase.settings
    on_policy: ClassVar[bool] = False  # learns from the latest rollout only: its buffer must be a stream
    window_mode: ClassVar[Literal["running", "whole"] | None] = None  # of the windows of replay that it must have

    @property
    def shortest_window(self) -> int:
        """How many rows a window must have where `window_mode` is set."""
        return 1

    def initialize(self, context: WorkflowContext) -> None:
        """Prepare what exists only at run time."""

    def initial_state(self, num_envs: int) -> Tree:
        """Return the act state at the start of an episode."""
        return None

    def act(
        self, observations: Tree, state: Tree = None, *, explore: bool = True, generator: torch.Generator | None = None
    ) -> Act:
        """Decide one action per environment. The caller owns the generator."""
        raise NotImplementedError(f"{type(self).__name__} does not define act(observations, state, ...)")

    def follow(
        self, act: ActFunction, observations: Tree, state: Tree, actions: Tensor, *, generator: torch.Generator | None
    ) -> Act:
        """Take in what is seen while somebody else does these actions; state and columns are like those of `act`.

        The caller's `act` is this workflow's own, perhaps recorded as a graph.
        """
        said = act(observations, state, explore=True, generator=generator)
        return Act(actions, said.state, said.extras)

    def collect_step(self, step: int, *, phase: Phase) -> CollectResult | None:
        """Define this to replace the Collector's own loop (populations, custom rollouts)."""
        raise NotImplementedError

    def imagine(self, *, horizon: int, **kwargs: Any) -> Batch:
        """Roll the world model out: a [H, B] batch, so that returns and losses cannot tell."""
        raise NotImplementedError(f"{type(self).__name__} has no world model to imagine with")

    def inspect(self, trajectory: Batch, *, generator: torch.Generator) -> Inspection:
        """Define this to look at evaluation episodes with the model; it is called without gradients.

        `trajectory` is [T, E] on the agent's device: one column for each episode, from its first step.
        `trajectory["valid"]` is False after an episode's end; where neither flag is set at the last valid row, the
        recording was cut there. All chance comes from `generator`, and nothing that training uses may change.
        """
        raise NotImplementedError(f"{type(self).__name__} has nothing to inspect")

    @property
    def acts(self) -> bool:
        """Whether this workflow decides actions, and so can be evaluated."""
        return type(self).act is not Workflow.act

    @property
    def inspects(self) -> bool:
        """Whether this workflow looks at evaluation episodes; otherwise they are not kept."""
        return type(self).inspect is not Workflow.inspect

    @classmethod
    def has_planner(cls) -> bool:
        """Whether planning can be switched on and off: such a workflow declares a field `plan: bool`."""
        return any(entry.name == "plan" for entry in declared_fields(cls))

    @property
    def collects(self) -> bool:
        """Whether this workflow replaces the Collector's loop."""
        return type(self).collect_step is not Workflow.collect_step

    @classmethod
    def hooks(cls) -> tuple[str, ...]:
        """Return the names of the update hooks."""
        return tuple(name for name in dir(cls) if name.startswith("update_") and callable(getattr(cls, name)))

    @classmethod
    @functools.cache
    def takes_batch(cls, hook: str) -> bool:
        """Whether an update hook wants a batch."""
        return "batch" in inspect.signature(getattr(cls, hook)).parameters

    def optimizers(self) -> Iterator[Optimizer]:
        """Yield the optimisers among the attributes."""
        yield from (value for value in vars(self).values() if isinstance(value, Optimizer))

    def advance_schedules(self, *, agent_steps: int, updates: int) -> None:
        """Bring every schedule to these counters; the loop calls it before each hook."""
        for value in vars(self).values():
            if isinstance(value, (Schedule, Optimizer)):
                value.advance(agent_steps=agent_steps, updates=updates)

    def get_state(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides components and optimisers: the names in `checkpointed`."""
        values = {name: getattr(self, name) for name in self.checkpointed}
        return {name: v.state_dict() if isinstance(v, nn.Module) else v for name, v in values.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore in place what `get_state` returned."""
        for name in self.checkpointed:
            current = getattr(self, name)
            if isinstance(current, nn.Module):
                current.load_state_dict(state[name])
            elif isinstance(current, Tensor):
                with torch.no_grad():
                    current.copy_(state[name])
            else:
                setattr(self, name, state[name])

    # Episode tracking for workflows that step the environment themselves.

    def _reset_episode_tracking(self, num_envs: int, clear_history: bool = False) -> None:
        self._running_returns = torch.zeros(num_envs)
        self._running_lengths = torch.zeros(num_envs, dtype=torch.int64)
        if clear_history or not hasattr(self, "episode_returns"):
            self.episode_returns: list[float] = []
            self.episode_lengths: list[int] = []

    def _update_episode_stats(self, rewards: Any, dones: Any, infos: Any = None) -> int:
        """Add one step; return how many episodes ended with it."""
        self._running_returns += torch.as_tensor(rewards, dtype=torch.float32).reshape(-1).cpu()
        self._running_lengths += 1
        ended = torch.as_tensor(dones).reshape(-1).bool().cpu()
        self.episode_returns += self._running_returns[ended].tolist()
        self.episode_lengths += self._running_lengths[ended].tolist()
        self._running_returns[ended] = 0.0
        self._running_lengths[ended] = 0
        return int(ended.sum())

    def _snapshot_episode_tracking(self) -> dict[str, Any]:
        return {
            "running_returns": self._running_returns.clone(),
            "running_lengths": self._running_lengths.clone(),
            "episode_returns": list(self.episode_returns),
            "episode_lengths": list(self.episode_lengths),
        }

    def _restore_episode_tracking(self, snapshot: Mapping[str, Any]) -> None:
        self._running_returns = snapshot["running_returns"].clone()
        self._running_lengths = snapshot["running_lengths"].clone()
        self.episode_returns = list(snapshot["episode_returns"])
        self.episode_lengths = list(snapshot["episode_lengths"])

    def _reset_rollout_state(self, initial_obs: Tree, initial_dones: Any) -> None:
        self.current_obs = initial_obs
        self.current_dones = initial_dones


WorldModelWorkflow = Workflow


def declared_fields(workflow_class: type) -> tuple[dataclasses.Field, ...]:
    """Return the constructor fields of a workflow; none for one that reads the context instead."""
    if not dataclasses.is_dataclass(workflow_class):
        return ()
    return tuple(entry for entry in dataclasses.fields(workflow_class) if entry.init)


@runtime_checkable
class RLModule(Protocol):
    """A policy as pure compute on batches."""

    def act(self, batch: Batch) -> Batch:
        """Return the batch with actions (and log_probs) added."""
        ...

    def value(self, batch: Batch) -> Batch:
        """Return the batch with value estimates added."""
        ...


@runtime_checkable
class ReplayBuffer(Protocol):
    """What every source offers."""

    def add(self, batch: Batch) -> None:
        """Store transitions."""
        ...

    def sample(self, batch_size: int) -> Batch:
        """Return stored transitions."""
        ...

    def __len__(self) -> int: ...


@runtime_checkable
class Trainer(Protocol):
    """A run seen from outside: one scheduler cycle, one evaluation."""

    def train_step(self) -> dict[str, float]:
        """Run one cycle."""
        ...

    def eval_step(self) -> dict[str, float]:
        """Run one evaluation."""
        ...


class _WorkflowModule:
    """An RLModule on a workflow's `act` and `value`."""

    def __init__(self, workflow: Any, explore: bool, generator: torch.Generator | None) -> None:
        self._workflow, self._explore, self._generator = workflow, explore, generator

    def act(self, batch: Batch) -> Batch:
        said = self._workflow.act(batch.observations, explore=self._explore, generator=self._generator)
        return batch.with_columns(actions=said.actions, **said.extras)

    def value(self, batch: Batch) -> Batch:
        with torch.no_grad():
            return batch.with_columns(values=self._workflow.value(batch.observations))


def as_module(workflow: Any, *, explore: bool = False, generator: torch.Generator | None = None) -> RLModule:
    """View a workflow as an RLModule: `act(batch)` adds actions and extras, `value(batch)` adds values."""
    return _WorkflowModule(workflow, explore, generator)
