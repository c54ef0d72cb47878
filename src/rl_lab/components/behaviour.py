"""Behaviour learned in the imagination of a world model: an actor, a critic, and their losses (Hafner et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.components.returns import td_lambda
from rl_lab.components.world_model import Dream, Seen, WorldModel
from rl_lab.core.batch import Batch, tree_map
from rl_lab.core.errors import UserError
from rl_lab.core.workflow import Metrics, check_horizon


@dataclass
class Behaviour:
    """An actor and a critic in a model. The parts belong to a workflow; this only says how they learn together."""

    pure = ("returns", "replay_returns", "actor_loss")  # methods without chance, which may be compiled

    model: WorldModel
    actor: Any
    critic: Any
    slow_critic: Any
    return_scale: Any  # None: returns as they are
    horizon: int
    trace: float
    through_model: bool  # whether the actor follows the gradient of the returns through the model, or REINFORCE
    entropy_weight: float
    slow_weight: float
    slow_targets: bool
    learn_replay: bool  # whether the critic learns from replayed steps, too
    dream_rows: int | None  # rows at the end of each window to learn from; None: all of them

    def __post_init__(self) -> None:
        if self.dream_rows == 1 and self.learn_replay:
            raise UserError(
                "a critic that learns from replayed steps, too, needs dream_rows of at least 2",
                key="dream_rows",
                value=1,
                remedy="set it to 2 or more, or replay_value_weight to 0",
            )

    def imagine(self, states: Mapping[str, Tensor], horizon: int, generator: torch.Generator | None) -> Dream:
        """Let the actor act in the model from states [B, ...]."""
        check_horizon(horizon)
        shape, like = (horizon, len(states["deter"])), states["deter"]
        draws = self.model.rssm.variable.draw(shape, like, generator)
        return self.model.imagine(self.actor, states, draws, self.actor.policy.draw(shape, like, generator))

    def values(self, features: Tensor) -> Tensor:
        """Return the values that returns bootstrap from."""
        critic = self.slow_critic if self.slow_targets else self.critic
        with self.model.computing(features.device):
            return critic.mean(critic(features))

    def losses(self, seen: Seen, generator: torch.Generator) -> tuple[dict[str, Tensor], Metrics]:
        """Return the losses of actor and critic by name, and what is worth watching."""
        seen = seen if self.dream_rows is None else seen.last(self.dream_rows)
        start = tree_map(lambda leaf: leaf.detach().flatten(0, 1), seen.observed.states)
        with torch.set_grad_enabled(self.through_model), frozen(*self._passed_through()):
            dream = self.imagine(start, self.horizon, generator)
            values = self.values(dream.features) if self.through_model or self.slow_targets else None
        features = dream.features[:-1].detach()
        outputs = self._ask_critic(features)
        if values is None:  # what the critic learns from has all values but the last
            with torch.no_grad():
                values = torch.cat([self.critic.mean(outputs), self.values(dream.features[-1:])])
        returns = self.returns(dream.rewards, dream.discounts, values)
        if self.return_scale is not None:
            self.return_scale.update(returns)
        scale = torch.ones_like(returns[0, 0]) if self.return_scale is None else self.return_scale.value.clone()
        with self.model.computing(features.device):
            parameters = self.actor(features)
        actor_loss, entropy = self.actor_loss(parameters, dream.actions, returns, values, scale, dream.weights)
        losses = {"actor": actor_loss, "critic": self._critic_loss(features, outputs, returns, dream.weights)}
        if self.learn_replay:
            batch = seen.batch
            bootstrap = returns[0].view(batch.shape)
            targets = self.replay_returns(batch.rewards, batch.terminated, batch["is_last"], bootstrap)
            features, weights = seen.features[:-1], (~batch["is_last"][:-1]).float()
            losses["replay_value"] = self._critic_loss(features, self._ask_critic(features), targets, weights)
        watched = {"reward": dream.rewards, "return": returns, "value": values, "discount": dream.discounts}
        metrics = {f"imagined_{name}": numbers.detach().mean() for name, numbers in watched.items()}
        return losses, metrics | {"actor_entropy": entropy.detach().mean(), "return_scale": scale}

    def returns(self, rewards: Tensor, discounts: Tensor, values: Tensor) -> Tensor:
        """Return the lambda-returns [H, B] of an imagined trajectory with discounts and values [H + 1, B]."""
        return td_lambda(rewards, values[1:], discounts[1:], torch.full_like(rewards, self.trace))

    def replay_returns(self, rewards: Tensor, terminated: Tensor, is_last: Tensor, bootstrap: Tensor) -> Tensor:
        """Return the lambda-returns [T - 1, B] of arrivals, bootstrapped by what was imagined from each of them."""
        discounts = self.model.gamma * (~terminated[1:]).float()
        return td_lambda(rewards[1:], bootstrap[1:], discounts, self.trace * (~is_last[1:]).float())

    def actor_loss(
        self, parameters: Tensor, actions: Tensor, returns: Tensor, values: Tensor, scale: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of the actor, and the entropy [H, B] of its policy."""
        policy = self.actor.policy
        entropy, advantages = policy.entropy(parameters), (returns - values[:-1]) / scale
        if not self.through_model:
            objective = policy.log_prob(parameters, actions) * advantages
        else:  # where returns have a scale, what the critic knows already counts once, not at every step before it
            objective = returns if self.return_scale is None else advantages
        return -(weights * (objective + self.entropy_weight * entropy)).mean(), entropy

    def _ask_critic(self, features: Tensor) -> Tensor:
        with self.model.computing(features.device):
            outputs: Tensor = self.critic(features)
        return outputs

    def _critic_loss(self, features: Tensor, outputs: Tensor, returns: Tensor, weights: Tensor) -> Tensor:
        """Return the weighed mean loss of values against returns, and against those of the slow critic."""
        loss = self.critic.loss(outputs, returns.detach())
        if self.slow_weight:
            with torch.no_grad(), self.model.computing(features.device):
                slow = self.slow_critic.mean(self.slow_critic(features))
            loss = loss + self.slow_weight * self.critic.loss(outputs, slow)
        return (weights * loss).mean()

    def _passed_through(self) -> tuple[nn.Module | None, ...]:
        return (self.model.reward, self.model.continuation, self.critic) if self.through_model else ()


def as_batch(dream: Dream, values: Tensor, gamma: float) -> Batch:
    """Return an imagined trajectory and its values [H + 1, B] as a [H, B] batch whose observations are features."""
    ended, features = dream.discounts[1:].detach() < 0.5 * gamma, dream.features.float()
    return Batch(
        observations=features[:-1],
        actions=dream.actions,
        rewards=dream.rewards,
        terminated=ended,
        truncated=torch.zeros_like(ended),
        next_observations=features[1:],
        extras={
            "discounts": dream.discounts[1:],
            "values": values[:-1],
            "next_values": values[1:],
            "weights": dream.weights,
        },
    )


@contextmanager
def frozen(*modules: nn.Module | None) -> Iterator[None]:
    """Let gradients pass through modules without reaching their parameters."""
    trained = [p for module in modules if module is not None for p in module.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
