"""TD-MPC2: planning in a decoder-free latent model whose value is learned by TD (Hansen, Su & Wang 2024)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.components.latent_model import imagined_batch, join, termination_loss, weigh
from rl_lab.components.planners.mppi import MPPI
from rl_lab.components.planners.rollout import rollout_dynamics_multi_step
from rl_lab.core import noise
from rl_lab.core.batch import Batch, Tree, tree_map
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Phase
from rl_lab.core.ranges import NonNegative, Unit
from rl_lab.core.workflow import Act, Metrics, Workflow


@dataclass(eq=False)
class TDMPCWorkflow(Workflow):
    """Learns from windows [H, B] inside one episode; acts by MPPI with the policy as a prior."""

    encoder: nn.Module  # observations to latents [..., Z]
    dynamics: nn.Module  # [latent, action] to the next latent
    reward: nn.Module  # [latent, action] to two-hot logits
    policy: nn.Module  # sample(latents, generator): a squashed Gaussian
    critics: nn.Module  # [latent, action] to two-hot logits of every member
    twohot: nn.Module  # what the logits mean
    scale: nn.Module  # running range of the values
    planner: MPPI
    model_optimizer: Optimizer  # trains encoder, dynamics, reward, critics (and termination)
    policy_optimizer: Optimizer  # trains the policy
    generator: torch.Generator
    termination: nn.Module | None = None  # latents to a logit; episodic tasks need it
    gamma: Unit = 0.99
    rho: Unit = 0.5  # weight of a step ahead against the one before
    target_rate: Unit = 0.01
    entropy_weight: NonNegative = 1e-4
    consistency_weight: NonNegative = 20.0
    reward_weight: NonNegative = 0.1
    value_weight: NonNegative = 0.1
    termination_weight: NonNegative = 1.0
    plan: bool = True  # act by planning; otherwise by the policy alone

    checkpointed = ("target_critics",)

    def __post_init__(self) -> None:
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
        latents = self.encoder(observations)
        if not self.plan:
            said = self.policy.sample(latents, generator)
            return Act(said.actions if explore else said.mean)
        plan = self.planner.plan(latents, state["mean"], explore=explore, generator=generator, **self._model(generator))
        return Act(plan.actions, {"mean": plan.mean})

    def value(self, observations: Tree) -> Tensor:
        """Return the mean of all critics at the policy's mean action."""
        return self._mean_value(self.encoder(observations))

    def update_agent(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Take one step on the model, one on the policy, and move the target critics."""
        latents, metrics = self._update_model(batch)
        metrics |= self._update_policy(latents)
        with torch.no_grad():
            torch._foreach_lerp_(self._target, self._online, self.target_rate)
        return metrics

    def _update_model(self, batch: Batch) -> tuple[Tensor, Metrics]:
        first = tree_map(lambda leaf: leaf[0], batch.observations)
        with torch.no_grad():
            next_latents = self.encoder(batch.next_observations)  # [H, B, Z]: of the true successors
            targets = self._targets(next_latents, batch)
        steps = [self.encoder(first)]
        for actions in batch.actions:
            steps.append(self._step(steps[-1], actions))
        latents = torch.stack(steps)  # [H + 1, B, Z]
        inputs = join(latents[:-1], batch.actions)
        logits = self.critics(inputs, dropout=self.critics.dropout_noise(inputs, self.generator))
        value_errors = self.twohot.loss(logits, targets.expand(len(logits), -1, -1)).mean(0)
        losses = {
            "consistency": weigh((latents[1:] - next_latents).square(), self._rhos),
            "reward": weigh(self.twohot.loss(self.reward(inputs), batch.rewards), self._rhos),
            "value": weigh(value_errors, self._rhos),
        }
        weights = {"consistency": self.consistency_weight, "reward": self.reward_weight, "value": self.value_weight}
        errors: Metrics = {}
        if self.termination is not None:
            logits = self.termination(latents[1:]).squeeze(-1)
            losses["termination"], errors = termination_loss(logits, batch.terminated)
            weights["termination"] = self.termination_weight
        return latents.detach(), {**self.model_optimizer.step(losses, weights), **errors}

    @torch.no_grad()
    def _targets(self, next_latents: Tensor, batch: Batch) -> Tensor:
        """Return TD targets [H, B]: the lesser of two random target critics, nothing after a termination."""
        actions = self.policy.sample(next_latents, self.generator).actions
        pair = self._pair(next_latents, self.generator)
        values = self.twohot.decode(self.target_critics(join(next_latents, actions), pair)).amin(0)
        return batch.rewards + self.gamma * (~batch.terminated).to(values.dtype) * values

    def _update_policy(self, latents: Tensor) -> Metrics:
        said = self.policy.sample(latents, self.generator)
        inputs = join(latents, said.actions)
        pair = self._pair(latents, self.generator)
        dropout = self.critics.dropout_noise(inputs, self.generator, len(pair))
        values = self.twohot.decode(self.critics(inputs, pair, dropout, frozen=True)).mean(0)  # [H + 1, B]
        self.scale.update(values[0])
        # Entropy before the squash, times the number of action dimensions, as the authors' code has it.
        entropy = -said.actions.shape[-1] * said.gaussian_log_probs
        objective = self.entropy_weight * entropy + values / self.scale.value
        losses = {"policy": -(objective.mean(1) * self._rhos[: len(latents)]).mean()}
        metrics = self.policy_optimizer.step(losses)
        return {
            "policy_loss": metrics["policy_loss"],
            "policy_grad_norm": metrics["grad_norm"],
            "policy_entropy": -said.log_probs.detach().mean(),
            "value_scale": self.scale.value.clone(),
            "q_mean": values.detach().mean(),
        }

    def imagine(self, *, horizon: int, **kwargs: Any) -> Batch:
        """Let the policy act in the model from `latents` [B, Z]: a [H, B] batch of latents."""
        steps, actions = [kwargs["latents"]], []
        for _ in range(horizon):
            actions.append(self.policy.sample(steps[-1], self.generator).actions)
            steps.append(self._step(steps[-1], actions[-1]))
        chosen = torch.stack(actions)
        rollout = rollout_dynamics_multi_step(steps[0], chosen, self._step, self._reward, self._ended)
        return imagined_batch(rollout, chosen, self._mean_value(rollout.latents), self.gamma)

    def _mean_value(self, latents: Tensor) -> Tensor:
        return self.twohot.decode(self.critics(join(latents, self.policy(latents)[0].tanh()))).mean(0)

    def _model(self, generator: torch.Generator | None) -> Mapping[str, Any]:
        """Return what the planner looks ahead with."""

        def value(latents: Tensor) -> Tensor:
            actions = self.policy.sample(latents, generator).actions
            return self.twohot.decode(self.critics(join(latents, actions), self._pair(latents, generator))).mean(0)

        return {
            "dynamics": self._step,
            "reward": self._reward,
            "value": value,
            "policy": lambda latents: self.policy.sample(latents, generator).actions,
            "termination": None if self.termination is None else self._ended,
            "discount": self.gamma,
        }

    def _step(self, latents: Tensor, actions: Tensor) -> Tensor:
        return self.dynamics(join(latents, actions))

    def _reward(self, latents: Tensor, actions: Tensor) -> Tensor:
        return self.twohot.decode(self.reward(join(latents, actions)))

    def _ended(self, latents: Tensor) -> Tensor:
        if self.termination is None:
            return torch.zeros(latents.shape[:-1], dtype=latents.dtype, device=latents.device)
        return self.termination(latents).squeeze(-1).sigmoid()

    def _pair(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        return noise.permutation(self.critics.num_members, like, generator)[:2]
