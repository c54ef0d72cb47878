"""Dreamer: an actor and a critic learn in the imagination of a recurrent world model.

Version 1 (Hafner et al. 2020), 2 (2021) and 3 (2024) are choices of parts and knobs: see docs/algorithms/dreamer.md.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rl_lab.components.behaviour import Behaviour, as_batch
from rl_lab.components.dreams import inspect_world_model
from rl_lab.components.targets import move_target
from rl_lab.components.world_model import Seen, WorldModel, refreshed
from rl_lab.core.at_once import AtOnce
from rl_lab.core.batch import Batch, Tree, tree_map
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Phase
from rl_lab.core.ranges import Count, NonNegative, Unit
from rl_lab.core.schedules import Schedule, as_schedule
from rl_lab.core.workflow import Act, ActFunction, Inspection, Metrics, Update, Workflow
from rl_lab.data.pipeline import arrivals


@dataclass(eq=False)
class DreamerWorkflow(Workflow):
    """Learns from running windows [L, B] of replay, whose first row is context; acts from a recurrent state."""

    rssm: nn.Module  # encode, observe, observe_sequence, imagine_step, features, pack, unpack
    decoder: nn.Module  # features to predicted observations
    reward: nn.Module  # features to a prediction of the reward that came with them
    actor: nn.Module  # features to the parameters of its policy
    critic: nn.Module  # features to a prediction of the return
    model_optimizer: Optimizer  # trains rssm, decoder, reward, continuation, and what has no optimiser of its own
    generator: torch.Generator
    continuation: nn.Module | None = None  # features to the discount; without it nothing ends
    return_scale: nn.Module | None = None  # running range of the returns, which advantages are divided by
    actor_optimizer: Optimizer | None = None
    critic_optimizer: Optimizer | None = None
    gamma: Unit = 0.997
    trace: Unit = 0.95  # lambda
    horizon: Count = 15
    dream_rows: Count | None = None  # rows at the end of each window that actor and critic learn from; None: all
    free_nats: NonNegative = 1.0
    free_average: bool = False  # whether the mean divergence is free below `free_nats`, or each
    dynamics_weight: NonNegative = 1.0
    representation_weight: NonNegative = 0.1
    continue_weight: NonNegative = 1.0
    replay_value_weight: NonNegative = 0.3
    actor_gradient: Literal["reinforce", "dynamics"] = "reinforce"
    entropy_weight: NonNegative = 3e-4
    slow_rate: Unit = 0.02
    slow_every: Count = 1
    slow_weight: NonNegative = 1.0  # of the loss that keeps values near those of the slow critic
    slow_targets: bool = False  # whether returns bootstrap from the slow critic
    exploration: NonNegative | Schedule = 0.0  # deviation of noise added to actions, or the share of random ones
    stored_latents: bool = True  # start from the states that replay keeps, and refresh them
    precision: Literal["float32", "bfloat16"] = "float32"  # given by `training.precision`; a scan casts weights once

    checkpointed = ("slow_critic", "update_count")
    window_mode = "running"

    def __post_init__(self) -> None:
        if (self.actor_optimizer is None) != (self.critic_optimizer is None):
            raise ValueError("actor and critic have an optimiser each, or the one of the model trains both")
        self.slow_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self._online, self._slow = list(self.critic.parameters()), list(self.slow_critic.parameters())
        self._device = self._online[0].device
        self.update_count = torch.zeros((), dtype=torch.int64, device=self._device)
        self.exploration = as_schedule(self.exploration).to(self._device)
        self._explores = self.exploration.start > 0 or self.exploration.end > 0
        dtype, parts = getattr(torch, self.precision), (self.rssm, self.decoder, self.reward, self.continuation)
        self._model = WorldModel(*parts, self.gamma, dtype, self.free_nats, self.free_average)
        self._behaviour = Behaviour(
            self._model,
            self.actor,
            self.critic,
            self.slow_critic,
            self.return_scale,
            horizon=self.horizon,
            trace=self.trace,
            through_model=self.actor_gradient == "dynamics",
            entropy_weight=self.entropy_weight,
            slow_weight=self.slow_weight,
            slow_targets=self.slow_targets,
            learn_replay=self.replay_value_weight > 0,
            dream_rows=self.dream_rows,
        )
        self._at_once = AtOnce(self._device)
        weighed = ("dynamics", "representation", "continue", "replay_value")
        self._weights = {name: getattr(self, f"{name}_weight") for name in weighed}

    @property
    def shortest_window(self) -> int:
        """One row of context, one to learn from, and one more where the critic learns what a step brought."""
        return 3 if self.replay_value_weight else 2

    def initial_state(self, num_envs: int) -> Tree:
        """Return the latent state, and the last action, of an episode that begins."""
        return self._model.initial(num_envs, self._device)

    @torch.no_grad()
    def act(
        self, observations: Tree, state: Tree = None, *, explore: bool = True, generator: torch.Generator | None = None
    ) -> Act:
        """Take in the observations, then ask the actor."""
        with self._model.computing(self._device):
            latents, _ = self._model.look(observations, state, generator)
            features = self.rssm.features(latents)
            exploration = self.exploration.value if self._explores else None
            actions = self.actor.act(features, explore=explore, exploration=exploration, generator=generator)
        stored = self.rssm.pack(latents) if self.stored_latents else {}
        return Act(self.actor.policy.to_environment(actions), {**latents, "action": actions}, stored)

    def follow(
        self, act: ActFunction, observations: Tree, state: Tree, actions: Tensor, *, generator: torch.Generator | None
    ) -> Act:
        """Take in the observations, and remember the actions of somebody else."""
        said = super().follow(act, observations, state, actions, generator=generator)
        return said._replace(state={**said.state, "action": self.actor.policy.from_replay(actions)})

    @torch.no_grad()
    def value(self, observations: Tree, state: Tree = None) -> Tensor:
        """Return the critic's estimate at the most probable latents; without a state, of episodes that begin."""
        with self._model.computing(self._device):
            latents, parameters = self._model.look(observations, state, torch.Generator(self._device).manual_seed(0))
            features = self.rssm.features({**latents, "stoch": self.rssm.variable.mode(parameters)})
            return self.critic.mean(self.critic(features))

    def update_agent(self, batch: Batch, *, phase: Phase) -> Update:
        """Learn model and behaviour from one batch: in a single step where they share an optimiser."""
        seen = self._see(batch)
        if self.actor_optimizer is None:
            halves = (lambda: self._model.losses(seen), lambda: self._behaviour.losses(seen, self.generator))
            (losses, metrics), (behaviour, watched) = self._at_once(*halves)
            metrics |= watched | self._step(self.model_optimizer, losses | behaviour)
        else:
            losses, metrics = self._model.losses(seen)
            metrics |= self._step(self.model_optimizer, losses) | self._update_behaviour(seen)
        self._move_slow_critic()
        return Update(metrics, self._refreshed(batch, seen))

    def update_world_model(self, batch: Batch, *, phase: Phase) -> Update:
        """Learn the model."""
        seen = self._see(batch)
        losses, metrics = self._model.losses(seen)
        return Update(metrics | self._step(self.model_optimizer, losses), self._refreshed(batch, seen))

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Learn the behaviour, in imagination that starts from a batch."""
        with torch.no_grad():
            seen = self._see(batch)
        metrics = self._update_behaviour(seen)
        self._move_slow_critic()
        return metrics

    def imagine(self, *, horizon: int, **kwargs: Any) -> Batch:
        """Let the actor act in the model from `states` [B, ...]: a [H, B] batch whose observations are features."""
        dream = self._behaviour.imagine(kwargs["states"], horizon, kwargs.get("generator", self.generator))
        return as_batch(dream, self._behaviour.values(dream.features), self.gamma)

    @torch.no_grad()
    def inspect(self, trajectory: Batch, *, generator: torch.Generator) -> Inspection:
        """Look at evaluation episodes: see a little, dream on, compare."""
        reading = {"from_replay": self.actor.policy.from_replay, "value": self._behaviour.values}
        return inspect_world_model(trajectory, self._model, **reading, generator=generator)

    def _see(self, batch: Batch) -> Seen:
        """Let the model observe a batch, from stored latents or from nothing."""
        reached, is_stored = arrivals(batch), self.stored_latents and "deter" in batch
        stored = {name: batch[name][0] for name in ("deter", "stoch")} if is_stored else {}
        context = self.rssm.unpack(stored) if is_stored else self.rssm.initial(reached.shape[1], self._device)
        draws = self.rssm.variable.draw(tuple(reached.shape), reached.rewards, self.generator)
        return self._model.see(reached, context, self.actor.policy.from_replay(reached.actions), draws)

    def _update_behaviour(self, seen: Seen) -> Metrics:
        """Take one step on the actor and one on the critic, or a single one on both."""
        losses, metrics = self._behaviour.losses(seen._replace(features=seen.features.detach()), self.generator)
        if self.actor_optimizer is None or self.critic_optimizer is None:
            return metrics | self._step(self.model_optimizer, losses)
        actor = self.actor_optimizer.step({"actor": losses.pop("actor")})
        critic = self._step(self.critic_optimizer, losses)
        norms = {"actor_grad_norm": actor.pop("grad_norm"), "critic_grad_norm": critic.pop("grad_norm")}
        return metrics | norms | {name: value for name, value in (actor | critic).items() if name != "loss"}

    def _step(self, optimizer: Optimizer, losses: dict[str, Tensor]) -> Metrics:
        return dict(optimizer.step(losses, {name: self._weights[name] for name in self._weights if name in losses}))

    def _refreshed(self, batch: Batch, seen: Seen) -> Tree:
        states = tree_map(Tensor.detach, seen.observed.states)
        return refreshed(batch, self.rssm.pack(states)) if self.stored_latents else {}

    def _move_slow_critic(self) -> None:
        move_target(self._slow, self._online, self.slow_rate, self.update_count, self.slow_every)
