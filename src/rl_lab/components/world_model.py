"""A recurrent world model as its parts together, and the losses of what learns in its imagination."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_lab.components.representation.rssm import RSSM, Observed, State
from rl_lab.components.returns import td_lambda
from rl_lab.core.batch import Batch, Tree
from rl_lab.core.workflow import Metrics


class Seen(NamedTuple):
    """What the model made of arrivals [T, B]."""

    batch: Batch
    observed: Observed
    features: Tensor  # [T, B, F]


@dataclass
class WorldModel:
    """What sees and imagines. The parts belong to a workflow; this only says how they work together."""

    rssm: RSSM
    decoder: Any
    reward: Any
    continuation: Any  # None where nothing ends
    gamma: float
    precision: str

    def computing(self, device: torch.device) -> torch.autocast:
        """Return a context that computes in the chosen precision. It must not be nested: casts of weights are cached
        inside it, and one that was cached without gradients would hide the weight from later ones.
        """
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def initial(self, num_envs: int, device: torch.device) -> dict[str, Tensor]:
        """Return the states of episodes that begin, and the actions that led there: none."""
        action = torch.zeros(num_envs, self.rssm.cell.action, device=device)
        return {**self.rssm.initial(num_envs, device), "action": action}

    def look(
        self, observations: Tree, state: Mapping[str, Tensor] | None, generator: torch.Generator | None
    ) -> tuple[State, Tensor]:
        """Take in one observation [B]; `state` has the last `action` beside it. Without one, episodes begin."""
        embeddings = self.rssm.encode(observations)
        num_envs, device = len(embeddings), embeddings.device
        state = self.initial(num_envs, device) if state is None else state
        draws = self.rssm.variable.draw((num_envs,), state["deter"], generator)
        is_first = torch.zeros(num_envs, dtype=torch.bool, device=device)  # the state of a new episode is zero already
        return self.rssm.observe(state, state["action"], embeddings, is_first, draws)

    def see(self, batch: Batch, context: Mapping[str, Tensor], actions: Tensor, draws: Tensor) -> Seen:
        """Observe arrivals, starting from the states before the first of them."""
        with self.computing(draws.device):
            embeddings = self.rssm.encode(batch.observations)
            observed = self.rssm.observe_sequence(context, actions, embeddings, batch["is_first"], draws)
        return Seen(batch, observed, self.rssm.features(observed.states))

    def losses(self, seen: Seen, *, free_nats: float, free_average: bool) -> tuple[dict[str, Tensor], Metrics]:
        """Return the losses of the model by name, and what is worth watching."""
        batch, posterior, prior = seen.batch, seen.observed.posterior, seen.observed.prior
        dynamics, representation, divergence = divergences(
            self.rssm.variable, posterior, prior, free_nats=free_nats, average=free_average
        )
        with self.computing(seen.features.device):
            predictions, rewards = self.decoder(seen.features), self.reward(seen.features)
            continues = None if self.continuation is None else self.continuation(seen.features)
        losses = {
            "reconstruction": self.decoder.loss(predictions, batch.observations).mean(),
            "reward": self.reward.loss(rewards, batch.rewards).mean(),
            "dynamics": dynamics,
            "representation": representation,
        }
        if self.continuation is not None:  # the discount is part of what is predicted, and is applied nowhere else
            losses["continue"] = self.continuation.loss(continues, self.gamma * (~batch.terminated).float()).mean()
        with torch.no_grad():
            metrics = {
                "divergence": divergence,
                "posterior_entropy": self.rssm.variable.entropy(posterior).mean(),
                "prior_entropy": self.rssm.variable.entropy(prior).mean(),
            }
        return losses, metrics

    def imagine(self, actor: Any, critic: Any, states: Mapping[str, Tensor], draws: Tensor, choices: Tensor) -> Batch:
        """Let an actor act from states [B, ...] for as many steps as there is noise: a [H, B] batch of features.

        `weights` say how probable it is that a step is reached at all, the first one included: imagination from a
        state that ended counts for nothing.
        """
        features, actions = [self.rssm.features(states)], []
        with self.computing(draws.device):
            for draws_now, choices_now in zip(draws, choices, strict=True):
                actions.append(actor.policy.sample(actor(features[-1].detach()), choices_now))
                states = self.rssm.imagine_step(states, actions[-1], draws_now)
                features.append(self.rssm.features(states))
            joined = torch.stack(features)  # [H + 1, B, F]
            rewards, values = self.reward.mean(self.reward(joined[1:])), critic.mean(critic(joined))
            discounts = self._discounts(joined)
        ended = discounts[1:].detach() < 0.5 * self.gamma
        return Batch(
            observations=joined[:-1],
            actions=torch.stack(actions),
            rewards=rewards,
            terminated=ended,
            truncated=torch.zeros_like(ended),
            next_observations=joined[1:],
            extras={
                "discounts": discounts[1:],
                "values": values[:-1],
                "next_values": values[1:],
                "weights": discounts[:-1].detach().cumprod(0),
            },
        )

    def _discounts(self, features: Tensor) -> Tensor:
        if self.continuation is None:
            return torch.full(features.shape[:-1], self.gamma, device=features.device)
        return self.continuation.mean(self.continuation(features))


def divergences(
    variable: Any, posterior: Tensor, prior: Tensor, *, free_nats: float, average: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the divergence twice, as the loss of the prior and as that of the posterior, and its value.

    Below `free_nats` it costs nothing more: of each entry, or of their mean if `average` says so.
    """
    dynamics = variable.divergence(posterior.detach(), prior)
    representation = variable.divergence(posterior, prior.detach())
    value = dynamics.detach().mean()
    if average:
        return dynamics.mean().clamp(min=free_nats), representation.mean().clamp(min=free_nats), value
    return dynamics.clamp(min=free_nats).mean(), representation.clamp(min=free_nats).mean(), value


def imagined_returns(dream: Batch, trace: float) -> Tensor:
    """Return the lambda-returns [H, B] of an imagined batch."""
    traces = torch.full_like(dream.rewards, trace)
    return td_lambda(dream.rewards, dream["next_values"], dream["discounts"], traces)


def replay_returns(batch: Batch, bootstrap: Tensor, gamma: float, trace: float) -> Tensor:
    """Return the lambda-returns [T - 1, B] of arrivals [T, B], bootstrapped by what was imagined from each of them."""
    discounts = gamma * (~batch.terminated[1:]).float()
    traces = trace * (~batch["is_last"][1:]).float()
    return td_lambda(batch.rewards[1:], bootstrap[1:], discounts, traces)


def actor_loss(objective: Tensor, entropy: Tensor, weights: Tensor, entropy_weight: float) -> Tensor:
    """Return minus the weighed mean of an objective [H, B] and the entropy."""
    return -(weights * (objective + entropy_weight * entropy)).mean()


def critic_loss(
    critic: Any, outputs: Tensor, returns: Tensor, weights: Tensor, slow_values: Tensor | None, slow_weight: float
) -> Tensor:
    """Return the weighed mean loss of values against returns, and against those of a slow copy if there are any."""
    loss = critic.loss(outputs, returns.detach())
    if slow_values is not None:
        loss = loss + slow_weight * critic.loss(outputs, slow_values)
    return (weights * loss).mean()


def watch_dream(dream: Batch, returns: Tensor, entropy: Tensor, scale: Tensor) -> Metrics:
    """Return what is worth watching of an imagined batch."""
    return {
        "imagined_reward": dream.rewards.detach().mean(),
        "imagined_return": returns.detach().mean(),
        "imagined_value": dream["values"].detach().mean(),
        "imagined_discount": dream["discounts"].detach().mean(),
        "return_scale": scale,
        "actor_entropy": entropy.detach().mean(),
    }


def refreshed(batch: Batch, packed: Mapping[str, Tensor]) -> Tree:
    """Return new latents [L - 1, B] for all rows [L, B] of a batch; the first row keeps what it has."""
    before = {name: batch[name][:1] if name in batch else torch.zeros_like(new[:1]) for name, new in packed.items()}
    return {name: torch.cat([before[name], new]) for name, new in packed.items()}


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
