"""A recurrent world model as its parts together: what sees, what predicts, what imagines, and its losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_lab.components.representation.rssm import RSSM, Observed, State
from rl_lab.components.representation.variables import detached
from rl_lab.core.batch import Batch, Tree
from rl_lab.core.workflow import Metrics


class Seen(NamedTuple):
    """What the model made of arrivals [T, B]."""

    batch: Batch
    observed: Observed
    features: Tensor  # [T, B, F]

    def last(self, num_rows: int) -> Seen:
        """Return what it made of the last rows."""
        rows = slice(-num_rows, None)
        states = {name: leaf[rows] for name, leaf in self.observed.states.items()}
        observed = Observed(states, self.observed.posterior[rows], self.observed.prior[rows])
        return Seen(self.batch.select(rows), observed, self.features[rows])


class Dream(NamedTuple):
    """A trajectory that the model imagined: states 0 .. H, and what happened between them."""

    features: Tensor  # [H + 1, B, F], in the type that the model computes in
    actions: Tensor  # [H, B, A]
    rewards: Tensor  # [H, B]: brought by the actions
    discounts: Tensor  # [H + 1, B]: of each state

    @property
    def weights(self) -> Tensor:
        """How probable it is that a step is reached [H, B]: imagination from a state that ended counts for nothing."""
        return self.discounts[:-1].detach().cumprod(0)


@dataclass
class WorldModel:
    """What sees and imagines. The parts belong to a workflow; this only says how they work together."""

    pure = ("divergences",)  # methods without chance, which may be compiled

    rssm: RSSM
    decoder: Any
    reward: Any
    continuation: Any  # None where nothing ends
    gamma: float
    dtype: torch.dtype  # to compute in
    free_nats: float = 1.0  # divergences below this cost nothing
    free_average: bool = False  # whether the mean divergence is free, or each

    def computing(self, device: torch.device) -> torch.autocast:
        """Return a context that computes in the chosen type; never nest it.

        Casts of weights are kept inside it, and one that was made without gradients would hide the weight from later
        users.
        """
        return torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def initial(self, num_envs: int, device: torch.device) -> State:
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

    def losses(self, seen: Seen) -> tuple[dict[str, Tensor], Metrics]:
        """Return the losses of the model by name, and what is worth watching."""
        batch, posterior, prior = seen.batch, seen.observed.posterior, seen.observed.prior
        dynamics, representation, metrics = self.divergences(posterior, prior)
        with self.computing(seen.features.device):
            predictions, rewards = self.decoder(seen.features), self.reward(seen.features)
            continues = None if self.continuation is None else self.continuation(seen.features)
        losses = {
            "reconstruction": self.decoder.loss(predictions, batch.observations).mean(),
            "reward": self.reward.loss(rewards, batch.rewards).mean(),
            "dynamics": dynamics,
            "representation": representation,
        }
        if self.continuation is not None:  # the discount is part of what is predicted: dreams apply it nowhere else
            losses["continue"] = self.continuation.loss(continues, self.gamma * (~batch.terminated).float()).mean()
        return losses, metrics

    def divergences(self, posterior: Tensor, prior: Tensor) -> tuple[Tensor, Tensor, Metrics]:
        """Return the divergence twice, as the loss of the prior and as that of the posterior, and what to watch."""
        variable = self.rssm.variable
        seen, foreseen = variable.distribution(posterior), variable.distribution(prior)
        fixed_seen, fixed_foreseen = detached(seen), detached(foreseen)
        both = [variable.divergence(fixed_seen, foreseen), variable.divergence(seen, fixed_foreseen)]
        metrics = {
            "divergence": both[0].detach().mean(),
            "posterior_entropy": variable.entropy(fixed_seen).mean(),
            "prior_entropy": variable.entropy(fixed_foreseen).mean(),
        }
        if self.free_average:
            dynamics, representation = (divergence.mean().clamp(min=self.free_nats) for divergence in both)
        else:
            dynamics, representation = (divergence.clamp(min=self.free_nats).mean() for divergence in both)
        return dynamics, representation, metrics

    def imagine(self, actor: Any, states: Mapping[str, Tensor], draws: Tensor, choices: Tensor) -> Dream:
        """Let an actor act from states [B, ...] for as many steps as there is noise.

        Gradients, where they are enabled, pass through actions and states, and reach the actor, not the model.
        """
        features, actions = [self._read(states)], []
        weights = self.rssm.constants(self.dtype)  # cast once, not at every step
        actor_weights = None if torch.is_grad_enabled() else actor.constants(self.dtype)
        with self.computing(draws.device):  # one for all steps: an actor that learns casts its weights once, too
            for draws_now, choices_now in zip(draws, choices, strict=True):
                actions.append(actor.policy.sample(actor(features[-1].detach(), actor_weights), choices_now))
                states = self.rssm.imagine_step(states, actions[-1], draws_now, weights)
                features.append(self._read(states))
            joined = torch.stack(features)
            rewards, discounts = self.reward.mean(self.reward(joined[1:])), self._discounts(joined)
        return Dream(joined, torch.stack(actions), rewards, discounts)

    def _read(self, states: Mapping[str, Tensor]) -> Tensor:
        """Return features in the type to compute in: once, not by each of those who read them."""
        return self.rssm.features(states).to(self.dtype)

    def _discounts(self, features: Tensor) -> Tensor:
        if self.continuation is None:
            return torch.full(features.shape[:-1], self.gamma, device=features.device)
        return self.continuation.mean(self.continuation(features))


def refreshed(batch: Batch, packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return new latents [L - 1, B] for all rows [L, B] of a batch; the first row keeps what it has."""
    before = {name: batch[name][:1] if name in batch else torch.zeros_like(new[:1]) for name, new in packed.items()}
    return {name: torch.cat([before[name], new]) for name, new in packed.items()}
