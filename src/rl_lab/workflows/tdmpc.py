"""TD-MPC2: planning in a decoder-free latent model whose value is learned by TD (Hansen, Su & Wang 2024)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.components.controllers.squashed import Expectation
from rl_lab.components.inspection import inspect_latent_model
from rl_lab.components.latent_model import LatentModel, counted_steps, td_targets, termination_loss, weigh
from rl_lab.components.planners.mppi import MPPI, Plan
from rl_lab.core.batch import Batch, Tree, tree_map
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Phase
from rl_lab.core.precision import as_computed
from rl_lab.core.ranges import NonNegative, Unit
from rl_lab.core.workflow import Act, ActFunction, Inspection, Metrics, Workflow


@dataclass(eq=False)
class TDMPCWorkflow(Workflow):
    """Learns from windows [H, B] inside one episode; acts by MPPI with the policy as a prior."""

    encoder: nn.Module  # observations to latents [..., Z]
    dynamics: nn.Module  # latents and actions to the next latents
    reward: nn.Module  # latents and actions to two-hot logits
    policy: nn.Module  # a squashed Gaussian, or one-hot codes where actions are discrete
    critics: nn.Module  # latents and actions to two-hot logits of every member
    twohot: nn.Module  # what the logits mean
    scale: nn.Module  # running range of the values
    planner: MPPI
    model_optimizer: Optimizer  # trains encoder, dynamics, reward, critics (and termination)
    policy_optimizer: Optimizer  # trains the policy
    generator: torch.Generator
    termination: nn.Module | None = None  # latents to a logit; episodic tasks need it
    augmentation: nn.Module | None = None  # sample(observations, generator): what the encoder sees instead
    gamma: Unit = 0.99
    td_lambda: Unit = 0.0  # how far targets look along the window before they trust the critics
    rho: Unit = 0.5  # weight of a step ahead against the one before
    target_rate: Unit = 0.01
    entropy_weight: NonNegative = 1e-4
    consistency_weight: NonNegative = 20.0
    reward_weight: NonNegative = 0.1
    value_weight: NonNegative = 0.1
    termination_weight: NonNegative = 1.0
    plan: bool = True  # act by planning; otherwise by the policy alone
    padded: bool = False  # windows may end with their episode; what follows an end then counts for nothing

    checkpointed = ("target_critics",)
    window_mode = "whole"
    pure = ("_model_losses", "_target_values", "_policy_values")  # methods without chance, which may be compiled

    def __post_init__(self) -> None:
        parts = (self.dynamics, self.reward, self.policy, self.critics, self.twohot, self.termination)
        self.model = LatentModel(*parts, num_actions=self.planner.action)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self._online, self._target = list(self.critics.parameters()), list(self.target_critics.parameters())
        device = self._online[0].device
        self._rhos = self.rho ** torch.arange(self.planner.horizon + 1, device=device)

    def initial_state(self, num_envs: int) -> Tree:
        """Return the plan to start from: nothing."""
        return {"mean": self.planner.initial_mean(num_envs, self._rhos)} if self.plan else None

    @torch.no_grad()
    def act(
        self, observations: Tree, state: Tree = None, *, explore: bool = True, generator: torch.Generator | None = None
    ) -> Act:
        """Plan from the encoded observation, warm-started by the last plan."""
        return self._decide(observations, state, explore, generator)[0]

    def follow(
        self, act: ActFunction, observations: Tree, state: Tree, actions: Tensor, *, generator: torch.Generator | None
    ) -> Act:
        """Plan nothing while somebody else acts."""
        return Act(actions, self.initial_state(len(actions)))

    @torch.no_grad()
    def act_with_stats(
        self, observations: Tree, state: Tree = None, *, explore: bool = True, generator: torch.Generator | None = None
    ) -> Act:
        """Decide as `act` does; the extras, [num_envs, ...], say on what grounds."""
        said, latents, chosen, plan = self._decide(observations, state, explore, generator)
        return said._replace(extras=self.model.stats(latents, chosen, plan))

    def _decide(
        self, observations: Tree, state: Tree, explore: bool, generator: torch.Generator | None
    ) -> tuple[Act, Tensor, Tensor, Plan | None]:
        latents = self._encode(observations, generator)
        if not self.plan:
            draws = self.model.draws(latents, generator)
            chosen = self.policy.actions(latents, draws) if explore else self.policy.mode(latents)
            return Act(self.model.executed(chosen)), latents, chosen, None
        model = self.model.for_planning(self.gamma, generator)
        starts = as_computed(latents, self.dynamics)
        plan = self.planner.plan(starts, state["mean"], explore=explore, generator=generator, **model)
        return Act(self.model.executed(plan.actions), {"mean": plan.mean}), latents, plan.actions, plan

    def _encode(self, observations: Tree, generator: torch.Generator | None) -> Tensor:
        seen = observations if self.augmentation is None else self.augmentation.sample(observations, generator)
        return self.encoder(seen)

    def value(self, observations: Tree) -> Tensor:
        """Return the mean of all critics at the policy's own choice."""
        return self.model.mean_value(self.encoder(observations))

    def update_agent(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Take one step on the model, one on the policy, and move the target critics."""
        counted = counted_steps(batch.dones) if self.padded else None  # [H, B]
        latents, metrics = self._update_model(batch, counted)
        metrics |= self._update_policy(latents, counted)
        with torch.no_grad():
            torch._foreach_lerp_(self._target, self._online, self.target_rate)
        return metrics

    def _update_model(self, batch: Batch, counted: Tensor | None) -> tuple[Tensor, Metrics]:
        first = tree_map(lambda leaf: leaf[0], batch.observations)
        with torch.no_grad():
            next_latents = self._encode(batch.next_observations, self.generator)  # [H, B, Z]: of the true successors
            draws, pair = self.model.draws(next_latents, self.generator), self.model.pair(next_latents, self.generator)
            targets = td_targets(batch, self._target_values(next_latents, draws, pair), self.gamma, self.td_lambda)
        start = self._encode(first, self.generator)
        dropout = self.critics.dropout_noise(next_latents, self.generator)
        happened = batch.actions, batch.rewards, batch.terminated
        latents, losses, errors = self._model_losses(start, next_latents, targets, happened, dropout, counted)
        weights = {name: getattr(self, f"{name}_weight") for name in losses}
        return latents.detach(), {**self.model_optimizer.step(losses, weights), **errors}

    def _model_losses(
        self,
        start: Tensor,
        next_latents: Tensor,
        targets: Tensor,
        happened: tuple[Tensor, ...],
        dropout: Tensor | None,
        counted: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor], Metrics]:
        """Unroll the model along the actions and compare it with what happened."""
        actions, rewards, terminated = happened
        steps = [start]
        for taken in actions:
            steps.append(self.model.step(steps[-1], taken))
        latents = torch.stack(steps)  # [H + 1, B, Z]
        inputs = latents[:-1], self.model.codes(actions)
        logits = self.critics(*inputs, dropout=dropout)
        value_errors = self.twohot.loss(logits, targets.expand(len(logits), -1, -1)).mean(0)
        losses = {
            "consistency": weigh((latents[1:] - next_latents).square(), self._rhos, counted),
            "reward": weigh(self.twohot.loss(self.reward(*inputs), rewards), self._rhos, counted),
            "value": weigh(value_errors, self._rhos, counted),
        }
        errors: Metrics = {}
        if self.termination is not None:
            ends = self.termination(latents[1:]).squeeze(-1)
            losses["termination"], errors = termination_loss(ends, terminated, counted)
        return latents, losses, errors

    def _target_values(self, latents: Tensor, draws: Tensor, pair: Tensor) -> Tensor:
        """Return the lesser of two target critics at the policy's actions."""
        actions = self.policy.actions(latents, draws)
        return self.twohot.mean(self.target_critics(latents, self.model.codes(actions), pair)).amin(0)

    def _policy_values(self, latents: Tensor, draws: Tensor, pair: Tensor, dropout: Tensor | None) -> Expectation:
        """Return what two critics expect of the policy; they are not trained by it."""

        def value(actions: Tensor) -> Tensor:
            logits = self.critics(latents, self.model.codes(actions), pair, dropout, frozen=True)
            return self.twohot.mean(logits).mean(0)

        return self.policy.expect(latents, draws, value)

    def _update_policy(self, latents: Tensor, counted: Tensor | None) -> Metrics:
        draws, pair = self.model.draws(latents, self.generator), self.model.pair(latents, self.generator)
        dropout = self.critics.dropout_noise(latents, self.generator, len(pair))
        expected = self._policy_values(latents, draws, pair, dropout)  # [H + 1, B]
        self.scale.update(expected.values[0])
        objective = self.entropy_weight * expected.bonus + expected.values / self.scale.value
        reached = None if counted is None else torch.cat([torch.ones_like(counted[:1]), counted])  # [H + 1, B]
        metrics = self.policy_optimizer.step({"policy": -weigh(objective, self._rhos, reached)})
        return {
            "policy_loss": metrics["policy_loss"],
            "policy_grad_norm": metrics["grad_norm"],
            "policy_entropy": expected.entropy.detach().mean(),
            "value_scale": self.scale.value.clone(),
            "q_mean": expected.values.detach().mean(),
        }

    def imagine(self, *, horizon: int, **kwargs: Any) -> Batch:
        """Let the policy act in the model from `latents` [B, Z]: a [H, B] batch of latents."""
        return self.model.imagine(kwargs["latents"], horizon, self.gamma, self.generator)

    def inspect(self, trajectory: Batch, *, generator: torch.Generator) -> Inspection:
        """Look at evaluation episodes: how far predictions hold, what values are worth, what planning adds."""
        model = self.model.for_planning(self.gamma, generator)
        parts = {"encode": self.encoder, "action_values": self.model.all_values, "planner": self.planner}
        return inspect_latent_model(trajectory, **parts, **model, generator=generator)
