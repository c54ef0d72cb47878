"""DQN: deep Q-learning (Mnih et al. 2015) with double targets (van Hasselt et al. 2016) and n-step returns.

A duelling network (Wang et al. 2016) and prioritised replay (Schaul et al. 2016) are choices of parts.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.returns import fold_window
from rl_lab.components.targets import move_target
from rl_lab.core.batch import Batch, Tree
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Phase
from rl_lab.core.ranges import Count, Unit
from rl_lab.core.schedules import Schedule, as_schedule
from rl_lab.core.workflow import Act, Metrics, Update, Workflow


@dataclass(eq=False)
class DQNWorkflow(Workflow):
    """Learns action values from windows [n, B] of replayed steps; n is the source's window."""

    q_network: nn.Module  # observations [..., O] to action values [..., A]
    optimizer: Optimizer  # trains the Q-network
    epsilon: Unit | Schedule = 0.05  # probability of a random action while exploring
    gamma: Unit = 0.99
    double: bool = True  # the online network chooses the action that the target network values
    target_rate: Unit = 1.0  # 1 copies the network (hard target), below 1 moves towards it (soft target)
    target_every: Count = 100  # updates between movements of the target

    checkpointed = ("target_network", "update_count")

    def __post_init__(self) -> None:
        self.epsilon = as_schedule(self.epsilon)
        self.target_network = copy.deepcopy(self.q_network).requires_grad_(False)
        self._online = list(self.q_network.parameters())
        self._target = list(self.target_network.parameters())
        device = self._online[0].device
        self.update_count = torch.zeros((), dtype=torch.int64, device=device)
        self.epsilon.to(device)

    @torch.no_grad()
    def act(
        self, observations: Tree, state: Tree = None, *, explore: bool = True, generator: torch.Generator | None = None
    ) -> Act:
        """Take the best action; while exploring, a random one with probability epsilon."""
        q_values = self.q_network(observations)
        if explore:
            num_envs, num_actions = q_values.shape
            draws = torch.rand((num_envs, 1 + num_actions), generator=generator, device=q_values.device)
            q_values = torch.where(draws[:, :1] < self.epsilon.value, draws[:, 1:], q_values)
        return Act(q_values.argmax(-1))

    def value(self, observations: Tree) -> Tensor:
        """Return the value of the best action."""
        return self.q_network(observations).amax(-1)

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics | Update:
        """Take one gradient step on the temporal-difference error, then move the target network."""
        observations, actions, returns, discounts, successors = fold_window(batch, self.gamma)
        targets = returns + discounts * self._value_after(successors)
        q_values = self.q_network(observations).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        weights = batch.extras.get("weights")
        if weights is None:
            loss = F.smooth_l1_loss(q_values, targets)
        else:
            loss = (F.smooth_l1_loss(q_values, targets, reduction="none") * weights).mean()
        metrics = self.optimizer.step({"td": loss})
        move_target(self._target, self._online, self.target_rate, self.update_count, self.target_every)
        metrics["q_mean"] = q_values.detach().mean()
        if weights is None:
            return metrics
        return Update(metrics, {"priority": (q_values.detach() - targets).abs()})

    @torch.no_grad()
    def _value_after(self, successors: Tree) -> Tensor:
        next_values = self.target_network(successors)
        if not self.double:
            return next_values.amax(-1)
        best = self.q_network(successors).argmax(-1, keepdim=True)
        return next_values.gather(-1, best).squeeze(-1)
