"""Losses of critics, and of the actors that climb them, with their gradients left in the parameters.

Where a CPU trains plain networks autograd is not asked: its bookkeeping takes a tenth of TD3's updates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.controllers.deterministic import DeterministicActor
from rl_lab.components.nets import MLP
from rl_lab.components.rectified import Pass, StackedPass
from rl_lab.components.stacked import StackedMLP


def regress(critics: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean squared errors of critics at inputs [B, ...] against targets [B], summed, and the values [M, B].

    Afterwards the gradients of the loss are in the parameters of the critics.
    """
    with torch.no_grad():
        seen = _critics_pass(critics, inputs)
        if seen is not None:
            values = seen.outputs.squeeze(-1)
            errors = values - targets
            seen.to_parameters((errors * (2.0 / len(targets))).unsqueeze(-1))
            return errors.square_().mean(-1).sum(), values
    values = critics(inputs).squeeze(-1)
    loss = F.mse_loss(values, targets.expand_as(values)) * len(values)
    _differentiate(loss, critics)
    return loss.detach(), values.detach()


def climb(actor: nn.Module, critics: nn.Module, observations: Tensor) -> Tensor:
    """Return the mean of what the first critic thinks of an actor's actions at observations [B, ...], negated.

    Afterwards the gradients of the loss are in the parameters of the actor, and in no others.
    """
    with torch.no_grad():
        acted = _actor_pass(actor, observations)
        inputs = None if acted is None else torch.cat([observations, acted.outputs.tanh_()], -1)
        seen = None if inputs is None else _critics_pass(critics, inputs, 1)
        if acted is not None and seen is not None:
            to_inputs = seen.to_rows(torch.full_like(seen.outputs, -1.0 / len(observations)))
            to_actions = to_inputs[0, :, observations.shape[-1] :]
            acted.to_parameters(to_actions * (1.0 - acted.outputs.square()))
            return -seen.outputs.mean()
    values = critics(torch.cat([observations, actor(observations)], -1), frozen=True, num_members=1)
    loss = -values.mean()
    _differentiate(loss, actor)
    return loss.detach()


def _critics_pass(critics: nn.Module, inputs: Tensor, num_members: int | None = None) -> Pass | StackedPass | None:
    return critics.written(inputs, num_members) if type(critics) is StackedMLP else None


def _actor_pass(actor: nn.Module, observations: Tensor) -> Pass | None:
    plain = type(actor) is DeterministicActor and type(actor.network) is MLP
    return actor.network.written(observations) if plain else None


def _differentiate(loss: Tensor, module: nn.Module) -> None:
    module.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
