"""Dream: another workflow trained inside a learned model only, and judged in the world.

A phase says where it collects: `settings: {where: world}` steps the environment, for the model to learn from;
`settings: {where: dream}` steps the model, for the agent to learn from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.components.dynamics.dream import DreamEnvironment
from rl_lab.core.batch import Batch, Tree, replace_unchecked
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Phase
from rl_lab.core.ranges import Count, Positive
from rl_lab.core.workflow import Act, CollectResult, Metrics, Update, Workflow, WorkflowContext, declared_fields


@dataclass(eq=False)
class DreamWorkflow(Workflow):
    """Gives the agent the parts that its fields name, and lets it act in the model or in the world.

    The agent sees observations in deviations from what the model has seen: how near a dream is to straying then
    weighs as much in every entry, however little of it the world has shown.
    """

    dynamics: Any  # a learned model with heads for reward and end
    model_optimizer: Optimizer  # trains the dynamics
    generator: torch.Generator
    agent: Callable[..., Workflow] | None = None  # a partial node: the workflow that learns in the dream
    q_network: nn.Module | None = None
    actor: nn.Module | None = None
    critic: nn.Module | None = None
    critics: nn.Module | None = None
    temperature: nn.Module | None = None
    agent_optimizer: Optimizer | None = None  # the agent's, where it has one
    actor_optimizer: Optimizer | None = None
    critic_optimizer: Optimizer | None = None
    starts: str = "replay"  # the buffer of the world, whose observations dreams begin with
    max_dream_steps: Count = 50  # a dream is cut before the model's mistakes add up
    max_deviation: Positive = 5.0  # from what the model has seen
    strays_end: bool = True  # a dream that deviates further ends; otherwise it is cut

    known_settings = ("policy", "where")

    def __post_init__(self) -> None:
        if self.agent is None:
            raise ValueError("a dream needs an agent: a node of another workflow with _partial_: true")
        names = ("q_network", "actor", "critic", "critics", "temperature", "actor_optimizer", "critic_optimizer")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        given |= {"generator": self.generator, "optimizer": self.agent_optimizer}
        wanted = {entry.name for entry in declared_fields(self.agent.func)}
        self.learner = self.agent(**{name: part for name, part in given.items() if name in wanted})

    def initialize(self, context: WorkflowContext) -> None:
        """Make the dreams: as many as there are environments."""
        self.environment, self.source = context.train_environment, context.buffers[self.starts]
        self.device, self.num_envs = context.device, context.train_environment.num_envs
        limits = (self.max_dream_steps, context.device, self.max_deviation, self.strays_end)
        self.dream = DreamEnvironment(self.dynamics, self.num_envs, *limits)

    def act(
        self, observations: Tree, state: Tree = None, *, explore: bool = True, generator: torch.Generator | None = None
    ) -> Act:
        """Do what the agent says."""
        return self.learner.act(self.dynamics.standardized(observations), state, explore=explore, generator=generator)

    def value(self, observations: Tree) -> Tensor:
        """Return the agent's estimate."""
        return self.learner.value(self.dynamics.standardized(observations))  # type: ignore[attr-defined]

    def collect_step(self, step: int, *, phase: Phase) -> CollectResult:
        """Take one decision in every environment, or in every dream."""
        if phase.settings.get("where", "world") == "dream":
            batch = self.dream.collect(self.act, None, self._starts, self.generator)
            ended = int(batch.dones.sum())
            return CollectResult(self.num_envs, ended, trajectory=batch, extras={"env_steps": 0})
        seen = self.environment.observations.to(self.device)  # type: ignore[attr-defined]
        actions = self.act(seen, explore=True, generator=self.generator).actions
        if phase.settings.get("policy") == "random":
            actions = self._random_actions(actions)
        _, rewards, dones, infos = self.environment.step(actions)
        batch = Batch(
            observations=seen,
            actions=actions,
            rewards=rewards.to(self.device),
            terminated=torch.as_tensor(infos["terminated"], device=self.device),
            truncated=torch.as_tensor(infos["truncated"], device=self.device),
            next_observations=torch.as_tensor(infos["final_observation"], device=self.device),
        )
        return CollectResult(self.num_envs, int(dones.sum()), trajectory=batch.map(lambda leaf: leaf.unsqueeze(0)))

    def update_world_model(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Take one step on the dynamics and its heads."""
        return dict(self.model_optimizer.step(self.dynamics.losses(batch, self.generator)))

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics | Update:
        """Let an agent learn that has one hook for it."""
        return self.learner.update_controller(self._as_seen(batch), phase=phase)  # type: ignore[attr-defined]

    def update_agent(self, batch: Batch, *, phase: Phase) -> Metrics | Update:
        """Let an agent learn that updates its parts together."""
        return self.learner.update_agent(self._as_seen(batch), phase=phase)  # type: ignore[attr-defined]

    def update_critic(self, batch: Batch, *, phase: Phase) -> Metrics | Update:
        """Let the critic learn of an agent that has a hook for it."""
        return self.learner.update_critic(self._as_seen(batch), phase=phase)  # type: ignore[attr-defined]

    def update_actor(self, batch: Batch, *, phase: Phase) -> Metrics | Update:
        """Let the actor learn of an agent that has a hook for it."""
        return self.learner.update_actor(self._as_seen(batch), phase=phase)  # type: ignore[attr-defined]

    def advance_schedules(self, *, agent_steps: int, updates: int) -> None:
        """Bring the schedules to these counters, the agent's too."""
        super().advance_schedules(agent_steps=agent_steps, updates=updates)
        self.learner.advance_schedules(agent_steps=agent_steps, updates=updates)

    def get_state(self) -> dict[str, Any]:
        """Return the agent's state and the dreams."""
        return {"learner": self.learner.get_state(), "dream": self.dream.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore both."""
        self.learner.set_state(state["learner"])
        self.dream.set_state(state["dream"])

    def _as_seen(self, batch: Batch) -> Batch:
        following = batch.next_observations
        return replace_unchecked(
            batch,
            observations=self.dynamics.standardized(batch.observations),
            next_observations=None if following is None else self.dynamics.standardized(following),
        )

    def _starts(self) -> Tensor:
        return self.source.sample(self.num_envs).observations.to(self.device)

    def _random_actions(self, like: Tensor) -> Tensor:
        if like.is_floating_point():
            return torch.rand(like.shape, generator=self.generator, device=like.device) * 2.0 - 1.0
        count = self.environment.action_space.n  # type: ignore[attr-defined]
        return torch.randint(int(count), like.shape, generator=self.generator, device=like.device)
