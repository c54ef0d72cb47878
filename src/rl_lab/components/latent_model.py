"""Pure functions around a latent model: what enters it, how its errors are weighed, what it imagined as a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.components.planners.rollout import Rollout
from rl_lab.core.batch import Batch


def join(latents: Tensor, actions: Tensor) -> Tensor:
    """Put latents and actions side by side."""
    return torch.cat([latents, actions], -1)


def join_codes(latents: Tensor, actions: Tensor, num_actions: int) -> Tensor:
    """Put latents and the codes of discrete actions side by side."""
    return torch.cat([latents, one_hot_code(actions, num_actions)], -1)


def one_hot_code(actions: Tensor, num_actions: int) -> Tensor:
    """Return the one-hot code of indices [...], or of the largest entry of vectors [..., num_actions].

    Gradients pass to a vector as if it were its code.
    """
    relaxed = actions.is_floating_point()
    index = (actions.argmax(-1) if relaxed else actions).unsqueeze(-1)
    dtype = actions.dtype if relaxed else torch.get_default_dtype()
    code = torch.zeros(*index.shape[:-1], num_actions, dtype=dtype, device=actions.device).scatter_(-1, index, 1.0)
    return code + (actions - actions.detach()) if relaxed and actions.requires_grad else code


def weigh(errors: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of errors [H, B, ...] whose steps have weights of their own."""
    return (errors.flatten(1).mean(1) * weights[: len(errors)]).sum() / len(errors)


def termination_loss(logits: Tensor, terminated: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the cross-entropy of predicted ends, and how often they are wrong at a probability of one half.

    `missed` is the share of ends that were not foreseen, `false` that of other steps taken for an end.
    """
    ended = terminated.to(logits.dtype)
    foreseen = (logits.detach() > 0).to(logits.dtype)
    num_ended, num_going = ended.sum(), (1.0 - ended).sum()
    errors = {
        "termination_rate": ended.mean(),
        "termination_missed": (ended * (1.0 - foreseen)).sum() / num_ended.clamp(min=1.0),
        "termination_false": ((1.0 - ended) * foreseen).sum() / num_going.clamp(min=1.0),
    }
    return F.binary_cross_entropy_with_logits(logits, ended), errors


def imagined_batch(rollout: Rollout, actions: Tensor, values: Tensor, discount: float) -> Batch:
    """Return a rollout as a [H, B] batch whose observations are latents; `values` [H + 1, B] are of all of them."""
    ended = rollout.alive[1:] < rollout.alive[:-1]
    return Batch(
        observations=rollout.latents[:-1],
        actions=actions,
        rewards=rollout.rewards,
        terminated=ended,
        truncated=torch.zeros_like(ended),
        next_observations=rollout.latents[1:],
        extras={"discounts": discount * rollout.alive[1:], "next_values": values[1:], "values": values[:-1]},
    )
