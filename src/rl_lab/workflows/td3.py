"""TD3: twin delayed deep deterministic policy gradient (Fujimoto, van Hoof & Meger 2018).

The critics and the delayed actor are two hooks: `[{update_critic: 2}, update_actor]`, or by ratio, 1 and 0.5.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rl_lab.components.value_losses import climb, regress
from rl_lab.core import noise
from rl_lab.core.batch import Batch, Tree
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Phase
from rl_lab.core.ranges import NonNegative, Unit
from rl_lab.core.schedules import Schedule, as_schedule
from rl_lab.core.workflow import Act, Metrics, Workflow


@dataclass(eq=False)
class TD3Workflow(Workflow):
    """Learns from replayed transitions [B]; acts by a deterministic policy, with noise while exploring."""

    actor: nn.Module  # observations to actions in [-1, 1]
    critics: nn.Module  # [observation, action] to the value that each member gives it, [M, B, 1]
    actor_optimizer: Optimizer
    critic_optimizer: Optimizer
    generator: torch.Generator
    gamma: Unit = 0.99
    target_rate: Unit = 0.005
    exploration_noise: NonNegative | Schedule = 0.1  # deviation of the noise that is added to actions
    smoothing_noise: NonNegative = (
        0.2  # the same for the target policy's actions, so that values are smooth around them
    )
    smoothing_limit: NonNegative = 0.5  # how far that noise may reach

    checkpointed = ("target_actor", "target_critics")

    def __post_init__(self) -> None:
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self._online = [*self.actor.parameters(), *self.critics.parameters()]
        self._target = [*self.target_actor.parameters(), *self.target_critics.parameters()]
        self.exploration_noise = as_schedule(self.exploration_noise).to(self._online[0].device)

    @torch.no_grad()
    def act(
        self, observations: Tree, state: Tree = None, *, explore: bool = True, generator: torch.Generator | None = None
    ) -> Act:
        """Do what the policy says, with noise while exploring."""
        actions = self.actor(observations)
        if explore:
            draws = noise.normal(tuple(actions.shape), actions, generator)
            actions = (actions + self.exploration_noise.value * draws).clamp(-1.0, 1.0)
        return Act(actions)

    def value(self, observations: Tree) -> Tensor:
        """Return the least of the critics at the policy's action."""
        return self.critics(_join(observations, self.actor(observations))).squeeze(-1).amin(0)

    def update_critic(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Take one step on the critics."""
        loss, values = regress(self.critics, _join(batch.observations, batch.actions), self.targets(batch))
        metrics = self.critic_optimizer.step({"critic": loss}, backward=False)
        metrics["q_mean"] = values.mean()
        return metrics

    @torch.no_grad()
    def targets(self, batch: Batch) -> Tensor:
        """Return TD targets [B] at smoothed actions; a truncated step bootstraps, a terminated one does not."""
        actions = self.target_actor(batch.next_observations)
        draws = self.smoothing_noise * noise.normal(tuple(actions.shape), actions, self.generator)
        actions = (actions + draws.clamp(-self.smoothing_limit, self.smoothing_limit)).clamp(-1.0, 1.0)
        values = self.target_critics(_join(batch.next_observations, actions)).squeeze(-1).amin(0)
        return torch.add(batch.rewards, values.masked_fill_(batch.terminated, 0.0), alpha=self.gamma)

    def update_actor(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Take one step on the actor by the first critic, then move all targets."""
        loss = climb(self.actor, self.critics, batch.observations)
        metrics = self.actor_optimizer.step({"actor": loss}, backward=False)
        with torch.no_grad():
            torch._foreach_lerp_(self._target, self._online, self.target_rate)
        return metrics


def _join(observations: Tensor, actions: Tensor) -> Tensor:
    return torch.cat([observations, actions], -1)
