"""The planner's slot: what every planner gets and gives, so that one takes the place of another by configuration.

A planner has `initial_mean(num_envs, like)`, where the plan of a new episode starts from, and
`plan(latents, previous_mean, *, dynamics, reward, value, policy, discount, termination, explore, generator)`, which
returns a `Plan`. `Plan.mean[:, 0]` is what the planner thinks of the present action: a vector, or the weights of
discrete actions. Actions are vectors in [-1, 1]; discrete ones stand for their largest entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_lab.components.distributions import one_hot
from rl_lab.components.dynamics.analytic import index_of
from rl_lab.core import noise
from rl_lab.core.workflow import Act


@dataclass(frozen=True, eq=False)
class Lookahead:
    """A model, what its states are worth and who proposes actions in it: what a planner looks ahead with.

    `dynamics` has `step`, `rewards` and `ended`; one with particles also `propagate`. `policy` has `actions` and
    `forward`; `reward` replaces the rewards of the dynamics, and is asked about the state that was reached if it has
    `of_arrival`. `disagreement_weight` adds the spread of the particles to the reward.
    """

    dynamics: Any
    num_actions: int
    discount: float
    value: Callable[[Tensor], Tensor] | None = None
    policy: Any = None
    reward: Any = None
    disagreement_weight: float = 0.0

    def start(self, latents: Tensor) -> Tensor:
        """Return the latents [E, Z] as a planner sees them: with particles, all of them in a row."""
        count = self.dynamics.num_particles
        return latents if count == 1 else latents.repeat(*[1] * (latents.dim() - 1), count)

    def functions(self, generator: torch.Generator | None) -> Mapping[str, Any]:
        """Return the arguments of `plan`."""
        many, dynamics = self.dynamics.num_particles > 1, self.dynamics

        def states(latents: Tensor) -> Tensor:
            return latents.unflatten(-1, (dynamics.num_particles, -1)) if many else latents

        def mean(values: Tensor) -> Tensor:
            return values.mean(-1) if many else values

        def step(latents: Tensor, actions: Tensor) -> Tensor:
            if not many:
                return dynamics.step(latents, actions)
            return dynamics.propagate(states(latents), actions, generator).flatten(-2)

        def rewards(latents: Tensor, actions: Tensor) -> Tensor:
            seen = states(latents)
            chosen = actions.unsqueeze(-2).expand(*seen.shape[:-1], -1) if many else actions
            brought = mean((dynamics.rewards if self.reward is None else self.reward)(seen, chosen))
            return brought + self.disagreement_weight * seen.std(-2).mean(-1) if self._explores else brought

        def value(latents: Tensor) -> Tensor:
            seen = states(latents)
            worth = seen.new_zeros(seen.shape[:-1]) if self.value is None else self.value(seen)
            if self.reward is not None and self.reward.of_arrival:
                worth = self.reward(seen, None) + self.discount * worth
            return mean(worth)

        return {
            "dynamics": step,
            "reward": rewards,
            "value": value,
            "policy": None if self.policy is None else Proposals(self.policy, self.num_actions, states, generator),
            "termination": lambda latents: mean(dynamics.ended(states(latents))),
            "discount": self.discount,
        }

    @property
    def _explores(self) -> bool:
        return self.disagreement_weight > 0 and self.dynamics.num_particles > 1

    def decide(
        self, planner: Any, latents: Tensor, state: Mapping[str, Tensor], *, explore: bool, generator: Any
    ) -> Act:
        """Plan from latents [E, Z]: actions, where the next plan starts from, and the column `plan` to learn from."""
        plan = planner.plan(
            self.start(latents), state["mean"], explore=explore, generator=generator, **self.functions(generator)
        )
        if not self.dynamics.discrete:
            return Act(plan.actions, {"mean": plan.mean}, {"plan": plan.mean[:, 0]})
        return Act(index_of(plan.actions), {"mean": plan.mean}, {"plan": _weights(plan.mean[:, 0])})


def _weights(vectors: Tensor) -> Tensor:
    """Return weights of discrete actions; vectors that are none stand for their largest entry."""
    are_weights = (vectors >= 0.0).all(-1) & ((vectors.sum(-1) - 1.0).abs() < 1e-3)
    return torch.where(are_weights.unsqueeze(-1), vectors, one_hot(vectors.argmax(-1), vectors.shape[-1]))


class Proposals:
    """A policy that acts in the model: called with latents it draws actions, `logits` are those of discrete ones."""

    def __init__(
        self,
        policy: Any,
        num_actions: int,
        states: Callable[[Tensor], Tensor],
        generator: torch.Generator | None,
    ) -> None:
        self.policy, self.num_actions, self.states, self.generator = policy, num_actions, states, generator

    def __call__(self, latents: Tensor) -> Tensor:
        """Draw one action for every state; particles are seen as their mean."""
        seen = self._seen(latents)
        return self.policy.actions(seen, noise.normal((*seen.shape[:-1], self.num_actions), seen, self.generator))

    def logits(self, latents: Tensor) -> Tensor:
        """Return log-probabilities of discrete actions."""
        return self.policy(self._seen(latents))

    def _seen(self, latents: Tensor) -> Tensor:
        seen = self.states(latents)
        return seen if seen.dim() == latents.dim() else seen.mean(-2)


def returns_of(latents: Tensor, actions: Tensor, *, dynamics: Callable[..., Tensor], **model: Any) -> Tensor:
    """Return what the model expects of action sequences [E, H, N, A] from latents [E, Z]: [E, N]."""
    steps = [latents.unsqueeze(1).expand(-1, actions.shape[2], -1)]
    for step in actions.unbind(1):
        steps.append(dynamics(steps[-1], step))
    return returns_along(torch.stack(steps), actions.transpose(0, 1), **model)


def returns_along(
    latents: Tensor,
    actions: Tensor,
    *,
    reward: Callable[..., Tensor],
    value: Callable[[Tensor], Tensor],
    discount: float,
    termination: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Return the returns [E, N] of trajectories [H + 1, E, N, Z] and their actions [H, E, N, A].

    A sequence whose return is not a number is never preferred.
    """
    rewards, last_values = reward(latents[:-1], actions), value(latents[-1])
    alive = torch.ones(latents.shape[:-1], dtype=rewards.dtype, device=rewards.device)
    if termination is not None:
        alive[1:] = (termination(latents[1:]) <= 0.5).to(rewards.dtype).cumprod(0)
    factors = discount ** torch.arange(len(rewards), device=rewards.device, dtype=rewards.dtype)
    gathered = (factors[:, None, None] * alive[:-1] * rewards).sum(0)
    returns = gathered + discount ** len(rewards) * alive[-1] * last_values
    return returns.masked_fill(~returns.isfinite(), -torch.inf)


def moved_on(plan: Tensor) -> Tensor:
    """Return plans [E, H, ...] one step later; the last step repeats."""
    return torch.cat([plan[:, 1:], plan[:, -1:]], 1)
