"""SAC: soft actor-critic with a learned temperature (Haarnoja et al. 2018, "Algorithms and Applications")."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rl_lab.components.value_losses import regress
from rl_lab.core import noise
from rl_lab.core.batch import Batch, Tree
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Phase
from rl_lab.core.ranges import Unit
from rl_lab.core.workflow import Act, Metrics, Workflow


@dataclass(eq=False)
class SACWorkflow(Workflow):
    """Learns from replayed transitions [B]; acts by sampling a squashed Gaussian."""

    actor: nn.Module  # sample(observations, generator): a squashed Gaussian
    critics: nn.Module  # [observation, action] to the value that each member gives it, [M, B, 1]
    temperature: nn.Module  # what entropy is worth
    actor_optimizer: Optimizer  # trains actor and temperature
    critic_optimizer: Optimizer  # trains the critics
    generator: torch.Generator
    gamma: Unit = 0.99
    target_rate: Unit = 0.005
    use_targets: bool = True  # otherwise the critics themselves value the successor, as in CrossQ

    checkpointed = ("target_critics",)

    def __post_init__(self) -> None:
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False) if self.use_targets else self.critics
        self._online, self._target = list(self.critics.parameters()), list(self.target_critics.parameters())

    @torch.no_grad()
    def act(
        self, observations: Tree, state: Tree = None, *, explore: bool = True, generator: torch.Generator | None = None
    ) -> Act:
        """Sample from the policy, or take its mode."""
        mean, log_std = self.actor(observations)
        if explore:
            mean = mean + log_std.exp() * noise.normal(tuple(mean.shape), mean, generator)
        return Act(mean.tanh())

    def value(self, observations: Tree) -> Tensor:
        """Return the least of the critics at the policy's mode."""
        mean, _ = self.actor(observations)
        return self.critics(_join(observations, mean.tanh())).squeeze(-1).amin(0)

    def update_agent(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Take one step on the critics, one on actor and temperature, and move the target critics."""
        metrics = self._update_critics(batch) | self._update_actor(batch)
        if self.use_targets:
            with torch.no_grad():
                torch._foreach_lerp_(self._target, self._online, self.target_rate)
        return metrics

    def _update_critics(self, batch: Batch) -> Metrics:
        loss, values = regress(self.critics, _join(batch.observations, batch.actions), self.targets(batch))
        metrics = self.critic_optimizer.step({"critic": loss}, backward=False)
        return {"critic_loss": loss, "critic_grad_norm": metrics["grad_norm"], "q_mean": values.mean()}

    @torch.no_grad()
    def targets(self, batch: Batch) -> Tensor:
        """Return soft TD targets [B]; a truncated step bootstraps, a terminated one does not."""
        said = self.actor.sample(batch.next_observations, self.generator)
        values = self.target_critics(_join(batch.next_observations, said.actions)).squeeze(-1).amin(0)
        soft = values - self.temperature() * said.log_probs
        return torch.add(batch.rewards, soft.masked_fill_(batch.terminated, 0.0), alpha=self.gamma)

    def _update_actor(self, batch: Batch) -> Metrics:
        said = self.actor.sample(batch.observations, self.generator)
        values = self.critics(_join(batch.observations, said.actions), frozen=True).squeeze(-1).amin(0)
        temperature = self.temperature()
        losses = {
            "actor": (temperature * said.log_probs - values).mean(),
            "temperature": self.temperature.loss(said.log_probs),
        }
        metrics = self.actor_optimizer.step(losses)
        return {
            "actor_loss": metrics["actor_loss"],
            "actor_grad_norm": metrics["grad_norm"],
            "entropy": -said.log_probs.detach().mean(),
            "temperature": temperature,
        }


def _join(observations: Tensor, actions: Tensor) -> Tensor:
    return torch.cat([observations, actions], -1)
