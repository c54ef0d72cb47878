"""MBMPC: policy, dynamics and value learned together, and a planner that looks ahead with them.

Without policy and critic, with an ensemble and CEM, it is PETS (Chua et al. 2018). With known dynamics, tree search
and a policy that clones it, it is AlphaZero's idea (Silver et al. 2018).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.planners.slot import Lookahead
from rl_lab.components.policy_losses import advantage_weighted_loss, cloning_loss
from rl_lab.components.returns import fold_window
from rl_lab.core import noise
from rl_lab.core.batch import Batch, Tree
from rl_lab.core.errors import UserError
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Phase
from rl_lab.core.ranges import NonNegative, Positive, Unit
from rl_lab.core.workflow import Act, ActFunction, Metrics, Workflow, WorkflowContext, check_horizon

_CONTROLLER = ("policy", "critic", "policy_optimizer", "critic_optimizer")
NEEDED = {  # by the hooks
    "update_world_model": ("dynamics_optimizer",),
    "update_controller": _CONTROLLER,
    "update_agent": ("dynamics_optimizer", *_CONTROLLER),
}


@dataclass(eq=False)
class MBMPCWorkflow(Workflow):
    """Learns from replayed transitions [B] or windows [n, B]: the model, what is to come after it, and what to do."""

    dynamics: Any  # encode, step, rewards, ended; learned ones also losses(batch, generator)
    planner: Any
    generator: torch.Generator
    policy: nn.Module | None = None  # actions(latents, draws): proposes while planning, acts where `plan` is false
    critic: nn.Module | None = None  # latents to values [B]: what is to come after the horizon
    reward: Any = None  # a known reward instead of the dynamics' own
    dynamics_optimizer: Optimizer | None = None
    policy_optimizer: Optimizer | None = None
    critic_optimizer: Optimizer | None = None
    gamma: Unit = 0.99
    target_rate: Unit = 0.01
    policy_loss: Literal["cloning", "advantage"] = "cloning"  # of the planner's decisions, or of better actions
    temperature: Positive = 1.0  # of the advantages
    weight_limit: Positive = 20.0
    disagreement_weight: NonNegative = 0.0  # what the spread of an ensemble's particles is worth while exploring
    plan: bool = True  # act by planning; otherwise by the policy alone

    checkpointed = ("target_critic",)

    def __post_init__(self) -> None:
        self.target_critic = nn.Module() if self.critic is None else copy.deepcopy(self.critic).requires_grad_(False)
        self._online = [] if self.critic is None else list(self.critic.parameters())
        self._target = list(self.target_critic.parameters())
        parts = {"value": self.critic, "policy": self.policy, "reward": self.reward}
        self._looking = Lookahead(self.dynamics, self.planner.action, self.gamma, **parts)
        self._seeking = Lookahead(
            self.dynamics, self.planner.action, self.gamma, **parts, disagreement_weight=self.disagreement_weight
        )
        self._like = torch.zeros(1, device=self.generator.device)

    def initialize(self, context: WorkflowContext) -> None:
        """Refuse hooks that would train parts which are not there."""
        for i, phase in enumerate(context.config["training"]["phases"]):
            for hook in phase["workflow_hooks"]:
                name = hook if isinstance(hook, str) else next(iter(hook))
                missing = [part for part in NEEDED.get(name, ()) if getattr(self, part) is None]
                if missing:
                    raise UserError(
                        f"'{name}' trains what is not there: {', '.join(missing)} missing",
                        key=f"training.phases[{i}].workflow_hooks",
                        value=name,
                        remedy="remove the hook, or declare the parts and their optimisers",
                    )

    def initial_state(self, num_envs: int) -> Tree:
        """Return the plan to start from: nothing."""
        return {"mean": self.planner.initial_mean(num_envs, self._like)} if self.plan else None

    @torch.no_grad()
    def act(
        self, observations: Tree, state: Tree = None, *, explore: bool = True, generator: torch.Generator | None = None
    ) -> Act:
        """Plan, warm-started by the last plan, or ask the policy."""
        latents = self.dynamics.encode(observations)
        if self.plan:
            looking = self._seeking if explore else self._looking
            said = looking.decide(self.planner, latents, state, explore=explore, generator=generator)
            return said if self._clones else Act(said.actions, said.state)
        draws = noise.normal((len(latents), self.planner.action), latents, generator)
        vectors = self.policy.actions(latents, draws) if explore else self.policy.mode(latents)
        return Act(vectors.argmax(-1) if self.dynamics.discrete else vectors)

    def follow(
        self, act: ActFunction, observations: Tree, state: Tree, actions: Tensor, *, generator: torch.Generator | None
    ) -> Act:
        """Plan only for a policy that imitates plans while somebody else acts."""
        if self._clones:
            return super().follow(act, observations, state, actions, generator=generator)
        return Act(actions, self.initial_state(len(actions)))

    def value(self, observations: Tree) -> Tensor:
        """Return the critic's estimate; zero without one."""
        latents = self.dynamics.encode(observations)
        return latents.new_zeros(len(latents)) if self.critic is None else self.critic(latents)

    def update_world_model(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Take one step on the dynamics and its heads."""
        return dict(self.dynamics_optimizer.step(self.dynamics.losses(batch, self.generator)))

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Take one step on the critic, one on the policy, and move the target critic."""
        observations, actions, returns, discounts, successors = fold_window(batch, self.gamma)
        latents = self.dynamics.encode(observations)
        with torch.no_grad():
            targets = returns + discounts * self.target_critic(self.dynamics.encode(successors))
        advantages, metrics = self._update_critic(latents, targets)
        if self.policy_loss == "cloning":
            plans = batch["plan"] if batch.rewards.dim() == 1 else batch["plan"][0]
            loss = cloning_loss(self.policy, latents, plans)
        else:
            loss = advantage_weighted_loss(
                self.policy, latents, actions, advantages, self.temperature, self.weight_limit
            )
        told = self.policy_optimizer.step({"policy": loss})
        return metrics | {"policy_loss": told["policy_loss"], "policy_grad_norm": told["grad_norm"]}

    def update_agent(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Take one step on each of the three, from one batch."""
        return self.update_world_model(batch, phase=phase) | self.update_controller(batch, phase=phase)

    def _update_critic(self, latents: Tensor, targets: Tensor) -> tuple[Tensor, Metrics]:
        values = self.critic(latents)
        told = self.critic_optimizer.step({"critic": F.mse_loss(values, targets)})
        with torch.no_grad():
            torch._foreach_lerp_(self._target, self._online, self.target_rate)
        metrics = {"critic_loss": told["critic_loss"], "critic_grad_norm": told["grad_norm"]}
        return targets - values.detach(), metrics | {"value_mean": values.detach().mean()}

    def imagine(self, *, horizon: int, **kwargs: Any) -> Batch:
        """Let the policy act in the model from `latents` [B, Z]: a [H, B] batch of latents."""
        check_horizon(horizon)
        steps, actions = [kwargs["latents"]], []
        for _ in range(horizon):
            draws = noise.normal((len(steps[-1]), self.planner.action), steps[-1], self.generator)
            actions.append(self.policy.actions(steps[-1], draws))
            steps.append(self.dynamics.step(steps[-1], actions[-1]))
        latents, chosen = torch.stack(steps), torch.stack(actions)
        alive = torch.cat([torch.ones_like(latents[:1, :, 0]), (self.dynamics.ended(latents[1:]) <= 0.5).float()])
        ended = (alive[1:] == 0.0) & (alive[:-1].cumprod(0) > 0.0)
        values = self.critic(latents)
        return Batch(
            observations=latents[:-1],
            actions=chosen.argmax(-1) if self.dynamics.discrete else chosen,
            rewards=self.dynamics.rewards(latents[:-1], chosen),
            terminated=ended,
            truncated=torch.zeros_like(ended),
            next_observations=latents[1:],
            extras={
                "discounts": self.gamma * alive.cumprod(0)[1:],
                "values": values[:-1],
                "next_values": values[1:],
            },
        )

    @property
    def _clones(self) -> bool:
        return self.policy is not None and self.policy_loss == "cloning"
