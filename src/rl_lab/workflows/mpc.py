"""MPC: model-predictive control with known dynamics. Nothing is learned, nothing is updated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_lab.components.planners.slot import Lookahead
from rl_lab.core.batch import Tree
from rl_lab.core.ranges import Unit
from rl_lab.core.workflow import Act, ActFunction, Workflow


@dataclass(eq=False)
class MPCWorkflow(Workflow):
    """Plans from every observation in a model that is known, and does the first action of the plan."""

    dynamics: Any  # encode(observations), step(latents, actions), rewards(latents, actions), ended(latents)
    planner: Any
    generator: torch.Generator  # of the device that plans are made on
    critic: Callable[[Tensor], Tensor] | None = None  # what latents at the horizon are worth
    gamma: Unit = 0.99

    def __post_init__(self) -> None:
        self._looking = Lookahead(self.dynamics, self.planner.action, self.gamma, self.critic)
        self._like = torch.zeros(1, device=self.generator.device)

    def initial_state(self, num_envs: int) -> Tree:
        """Return the plan to start from: nothing."""
        return {"mean": self.planner.initial_mean(num_envs, self._like)}

    @torch.no_grad()
    def act(
        self, observations: Tree, state: Tree = None, *, explore: bool = True, generator: torch.Generator | None = None
    ) -> Act:
        """Plan, warm-started by the last plan. There is nothing to explore for."""
        latents = self.dynamics.encode(observations)
        said = self._looking.decide(self.planner, latents, state, explore=False, generator=generator)
        return Act(said.actions, said.state)

    def follow(
        self, act: ActFunction, observations: Tree, state: Tree, actions: Tensor, *, generator: torch.Generator | None
    ) -> Act:
        """Plan nothing while somebody else acts."""
        return Act(actions, self.initial_state(len(actions)))
