"""PPO: proximal policy optimisation (Schulman et al. 2017), discrete and continuous actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.returns import gae
from rl_lab.core.batch import Batch, Tree
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Phase
from rl_lab.core.ranges import Count, NonNegative, Positive, Unit
from rl_lab.core.schedules import Schedule, as_schedule
from rl_lab.core.workflow import Act, Metrics, Workflow
from rl_lab.data.pipeline import minibatches


@dataclass(eq=False)
class PPOWorkflow(Workflow):
    """Learns from the latest rollout [T, N] in several epochs of shuffled minibatches."""

    actor: nn.Module  # act(observations) and evaluate(observations, actions) -> log_probs, entropy
    critic: nn.Module  # observations to values
    optimizer: Optimizer  # trains both
    generator: torch.Generator  # shuffles the minibatches
    gamma: Unit = 0.99
    gae_lambda: Unit = 0.95
    clip_range: NonNegative | Schedule = 0.2
    value_clip_range: NonNegative | None = None
    value_weight: NonNegative = 0.5
    entropy_weight: NonNegative = 0.0
    num_epochs: Count = 4
    minibatch_size: Count = 256
    target_kl: Positive | None = None  # stop the epochs when the policy moved further than this
    normalize_advantages: bool = True
    extra_losses: Sequence[Callable[..., Tensor]] = ()  # loss(*, policy, obs, actions, rewards, values, advantages)

    on_policy = True

    def __post_init__(self) -> None:
        device = next(self.critic.parameters()).device
        self.clip_range = as_schedule(self.clip_range).to(device)

    @torch.no_grad()
    def act(
        self, observations: Tree, state: Tree = None, *, explore: bool = True, generator: torch.Generator | None = None
    ) -> Act:
        """Sample from the policy, or take its mode."""
        return Act(self.actor.act(observations, explore=explore, generator=generator))

    def value(self, observations: Tree) -> Tensor:
        """Return the critic's estimate."""
        return self.critic(observations)

    def update_controller(self, batch: Batch, *, phase: Phase) -> Metrics:
        """Fit policy and value to one rollout."""
        rollout = self.with_advantages(batch)
        collected: list[Metrics] = []
        for _ in range(self.num_epochs):
            epoch = [self._update(part) for part in minibatches(rollout, self.minibatch_size, self.generator)]
            collected += epoch
            # The one look per epoch that the algorithm needs; everything else stays on the device.
            if self.target_kl is not None and _mean(epoch, "approx_kl").item() > self.target_kl:
                break
        metrics = {name: _mean(collected, name) for name in collected[0]}
        residual = (rollout["returns"] - rollout["values"]).var(correction=0)
        metrics["explained_variance"] = 1.0 - residual / rollout["returns"].var(correction=0).clamp(min=1e-8)
        return metrics

    @torch.no_grad()
    def with_advantages(self, batch: Batch) -> Batch:
        """Flatten a rollout and add values, returns, advantages and log probabilities of the acting policy."""
        values = self.critic(batch.observations)
        next_values = self.critic(batch.next_observations)  # true successors: truncation bootstraps through them
        discounts = self.gamma * (~batch.terminated).float()
        advantages = gae(batch.rewards, values, next_values, discounts, self.gae_lambda * (~batch.dones).float())
        log_probs, _ = self.actor.evaluate(batch.observations, batch.actions)
        assert advantages.shape == log_probs.shape == batch.shape
        return batch.with_columns(
            next_observations=None,
            values=values,
            returns=advantages + values,
            advantages=advantages,
            log_probs=log_probs,
        ).flatten()

    def losses(self, batch: Batch) -> tuple[dict[str, Tensor], Metrics]:
        """Return the losses of one minibatch by name, and what is worth watching."""
        log_probs, entropy = self.actor.evaluate(batch.observations, batch.actions)
        values = self.critic(batch.observations)
        advantages = batch["advantages"]
        if self.normalize_advantages:
            # A last piece of one row has no spread.
            spread, center = torch.std_mean(advantages, correction=min(1, len(batch) - 1))
            advantages = (advantages - center) / (spread + 1e-8)
        log_ratio = log_probs - batch["log_probs"]
        ratio = log_ratio.exp()
        clip = self.clip_range.value
        clipped = ratio.clamp(1.0 - clip, 1.0 + clip)
        losses = {
            "policy": -torch.minimum(ratio * advantages, clipped * advantages).mean(),
            "value": self._value_loss(values, batch),
            "entropy": -entropy.mean(),
        }
        for loss in self.extra_losses:
            losses[loss.__name__.removesuffix("_loss")] = loss(
                policy=self,
                obs=batch.observations,
                actions=batch.actions,
                rewards=batch.rewards,
                values=values,
                advantages=advantages,
            )
        with torch.no_grad():
            watched = {
                "approx_kl": (ratio - 1.0 - log_ratio).mean(),
                "clip_fraction": (clipped != ratio).float().mean(),
            }
        return losses, watched

    def _update(self, batch: Batch) -> Metrics:
        losses, watched = self.losses(batch)
        weights = {"value": self.value_weight, "entropy": self.entropy_weight}
        return self.optimizer.step(losses, weights) | watched

    def _value_loss(self, values: Tensor, batch: Batch) -> Tensor:
        returns = batch["returns"]
        if self.value_clip_range is None:
            return F.mse_loss(values, returns)
        limit = self.value_clip_range
        clipped = batch["values"] + (values - batch["values"]).clamp(-limit, limit)
        return torch.maximum((values - returns).square(), (clipped - returns).square()).mean()


def _mean(collected: Sequence[Metrics], name: str) -> Tensor:
    return torch.stack([metrics[name] for metrics in collected]).mean()
