"""LatentModel: the parts of a latent world model as one thing to plan and to imagine with; errors, targets, codes.

Discrete actions are relaxed: a planner proposes vectors in [-1, 1]^n, and a vector stands for its largest entry. The
model sees the one-hot code of that action, the environment gets its index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.distributions import one_hot
from rl_lab.components.planners.mppi import Plan
from rl_lab.components.planners.rollout import rollout_dynamics_multi_step
from rl_lab.components.returns import td_lambda
from rl_lab.core import noise
from rl_lab.core.batch import Batch
from rl_lab.core.workflow import check_horizon


@dataclass(eq=False)
class LatentModel:
    """What follows an action in latent space, what it brings and what it is worth."""

    dynamics: nn.Module
    reward: nn.Module
    policy: nn.Module
    critics: nn.Module
    twohot: nn.Module
    termination: nn.Module | None
    num_actions: int  # entries of an action vector

    pure = ("step", "rewards", "ended", "value")  # methods without chance, which may be compiled

    def codes(self, actions: Tensor) -> Tensor:
        """Return actions as the model sees them: discrete ones, vectors or indices, as one-hot codes."""
        if not self.policy.discrete:
            return actions
        return one_hot(self.executed(actions) if actions.is_floating_point() else actions, self.num_actions)

    def executed(self, actions: Tensor) -> Tensor:
        """Return what the environment gets of a vector."""
        return actions.argmax(-1) if self.policy.discrete else actions

    def step(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return the next latents."""
        return self.dynamics(latents, self.codes(actions))

    def rewards(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return the rewards of actions."""
        return self.twohot.mean(self.reward(latents, self.codes(actions)))

    def ended(self, latents: Tensor) -> Tensor:
        """Return the probability that the world has ended."""
        if self.termination is None:
            return torch.zeros(latents.shape[:-1], device=latents.device)
        return self.termination(latents).squeeze(-1).float().sigmoid()

    def value(self, latents: Tensor, draws: Tensor, pair: Tensor) -> Tensor:
        """Return the mean of two critics at the policy's actions for given draws."""
        actions = self.policy.actions(latents, draws)
        return self.twohot.mean(self.critics(latents, self.codes(actions), pair)).mean(0)

    def all_values(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return what every critic says: [members, ...]."""
        return self.twohot.mean(self.critics(latents, self.codes(actions)))

    def mean_value(self, latents: Tensor) -> Tensor:
        """Return the mean of all critics at the policy's own choice."""
        return self.all_values(latents, self.policy.mode(latents)).mean(0)

    def draws(self, latents: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw what makes actions of the policy vary: one for every latent."""
        return noise.normal((*latents.shape[:-1], self.num_actions), latents, generator)

    def pair(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw two critics."""
        return noise.permutation(self.critics.num_members, like, generator)[:2]

    def for_planning(self, discount: float, generator: torch.Generator | None) -> Mapping[str, Any]:
        """Return what a planner looks ahead with."""

        def draws(latents: Tensor) -> Tensor:
            return self.draws(latents, generator)

        return {
            "dynamics": self.step,
            "reward": self.rewards,
            "value": lambda latents: self.value(latents, draws(latents), self.pair(latents, generator)),
            "policy": lambda latents: self.policy.actions(latents, draws(latents)),
            "termination": None if self.termination is None else self.ended,
            "discount": discount,
        }

    def imagine(self, latents: Tensor, horizon: int, discount: float, generator: torch.Generator | None) -> Batch:
        """Let the policy act from latents [B, Z]: a [H, B] batch whose observations are latents."""
        check_horizon(horizon)
        steps, actions = [latents], []
        for _ in range(horizon):
            actions.append(self.policy.actions(steps[-1], self.draws(steps[-1], generator)))
            steps.append(self.step(steps[-1], actions[-1]))
        chosen = torch.stack(actions)
        rollout = rollout_dynamics_multi_step(latents, chosen, self.step, self.rewards, self.ended)
        reached = torch.stack(rollout.latents)
        ended, values = rollout.alive[1:] < rollout.alive[:-1], self.mean_value(reached)
        return Batch(
            observations=reached[:-1],
            actions=self.executed(chosen),
            rewards=rollout.rewards,
            terminated=ended,
            truncated=torch.zeros_like(ended),
            next_observations=reached[1:],
            extras={"discounts": discount * rollout.alive[1:], "next_values": values[1:], "values": values[:-1]},
        )

    def stats(self, latents: Tensor, chosen: Tensor, plan: Plan | None) -> dict[str, Tensor]:
        """Return the grounds of decisions [E, A]: latents, what the critics say and how far they differ, the plan."""
        values = self.all_values(latents, chosen)
        stats = {"latent": latents, "q_mean": values.mean(0), "q_spread": values.std(0)}
        stats["policy_value"] = self.mean_value(latents)
        if plan is not None:
            best, spread = plan.values.amax(1), plan.values.std(1)  # of the elites, as the model sees them
            stats |= {"plan_return": best, "plan_return_spread": spread, "plan_std": plan.std[:, 0]}
        return stats


def td_targets(batch: Batch, next_values: Tensor, gamma: float, trace: float) -> Tensor:
    """Return TD targets [H, B] of a window; with a trace above 0, TD(lambda) over the steps that follow in it.

    A terminated step has no successor to value; a truncated one is valued at its own successor.
    """
    discounts = gamma * (~batch.terminated).to(next_values.dtype)
    if trace == 0.0:
        return batch.rewards + discounts * next_values
    return td_lambda(batch.rewards, next_values, discounts, trace * (~batch.dones).to(next_values.dtype))


def counted_steps(dones: Tensor) -> Tensor:
    """Return 1 for the steps [H, B] of padded windows that happened, 0 for what follows an end."""
    before = torch.cat([torch.zeros_like(dones[:1]), dones[:-1]])
    return (before.to(torch.float32).cumsum(0) == 0).to(torch.float32)


def weigh(errors: Tensor, weights: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the mean of errors [H, B, ...] whose steps have weights of their own; all or some of them count."""
    if counted is not None:
        errors = errors * counted.view(*counted.shape, *[1] * (errors.dim() - 2))
    return (errors.flatten(1).mean(1) * weights[: len(errors)]).sum() / len(errors)


def termination_loss(
    logits: Tensor, terminated: Tensor, counted: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the cross-entropy of predicted ends, and how often they are wrong at a probability of one half.

    The errors are shares of all steps: of ends that were not foreseen, and of other steps taken for an end.
    """
    ended = terminated.to(logits.dtype)
    foreseen = (logits.detach() > 0).to(logits.dtype)
    counted = torch.ones_like(ended) if counted is None else counted
    share = counted / counted.sum()
    errors = {
        "termination_rate": (share * ended).sum(),
        "termination_missed": (share * ended * (1.0 - foreseen)).sum(),
        "termination_false": (share * (1.0 - ended) * foreseen).sum(),
    }
    return F.binary_cross_entropy_with_logits(logits, ended, share, reduction="sum"), errors
