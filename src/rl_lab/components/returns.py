"""Returns: pure functions of rewards, discounts and values, time first [T, ...]; they never see flags.

`discounts[t]` weighs the value of the successor of step t (gamma, or 0 where the world ended). `traces[t]` says how
far step t listens to step t + 1 (lambda inside an episode, 0 where it ended for any reason): a truncated step
bootstraps from the value of its own successor and never reads the next episode. `next_values[t]` is the value of the
true successor of step t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_lab.core.batch import Batch, Tree, tree_map


def gae(rewards: Tensor, values: Tensor, next_values: Tensor, discounts: Tensor, traces: Tensor) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016)."""
    deltas = rewards + discounts * next_values - values
    return _backward_sum(deltas, discounts * traces)


def td_lambda(rewards: Tensor, next_values: Tensor, discounts: Tensor, traces: Tensor) -> Tensor:
    """Lambda-returns: G[t] = r[t] + d[t] * ((1 - trace[t]) * V[t] + trace[t] * G[t + 1]), V after the last step."""
    traces = torch.cat([traces[:-1], torch.zeros_like(traces[-1:])])
    return _backward_sum(rewards + discounts * (1.0 - traces) * next_values, discounts * traces)


def discounted(rewards: Tensor, next_values: Tensor, discounts: Tensor, traces: Tensor) -> Tensor:
    """Monte Carlo returns, bootstrapped where an episode was cut; `traces` is 1 inside an episode."""
    return td_lambda(rewards, next_values, discounts, (traces > 0).to(rewards.dtype))


def n_step(rewards: Tensor, next_values: Tensor, discounts: Tensor, traces: Tensor, n: int) -> Tensor:
    """n-step returns, shorter where an episode or the data ends; `traces` is 1 inside an episode."""
    inside = torch.cat([(traces[:-1] > 0), torch.zeros_like(traces[-1:], dtype=torch.bool)])
    returns = rewards + discounts * next_values
    for _ in range(n - 1):
        following = torch.cat([returns[1:], next_values[-1:]])
        returns = rewards + discounts * torch.where(inside, following, next_values)
    return returns


def fold_n_step(rewards: Tensor, dones: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Fold windows [n, B] up to their first done: the reward sum, the discount and the index of the last step.

    Steps after a done are padding and do not count. The caller bootstraps from the successor of the last step.
    """
    live = torch.cat([torch.ones_like(dones[:1]), ~dones[:-1]]).to(rewards.dtype).cumprod(0)  # [n, B]
    length = live.sum(0)
    powers = gamma ** torch.arange(len(rewards), device=rewards.device, dtype=rewards.dtype)
    folded = (rewards * live * powers.unsqueeze(-1)).sum(0)
    return folded, gamma**length, length.long() - 1


def fold_window(batch: Batch, gamma: float) -> tuple[Tree, Tensor, Tensor, Tensor, Tree]:
    """Return observations, actions, returns, discounts and successors [B] of transitions [B] or windows [n, B].

    A truncated step bootstraps from its successor, a terminated one does not: its discount is zero.
    """
    if batch.rewards.dim() == 1:
        return batch.observations, batch.actions, batch.rewards, gamma * ~batch.terminated, batch.next_observations
    returns, discounts, last = fold_n_step(batch.rewards, batch.dones, gamma)
    columns = torch.arange(batch.shape[1], device=last.device)
    first = tree_map(lambda leaf: leaf[0], batch.observations)
    successors = tree_map(lambda leaf: leaf[last, columns], batch.next_observations)
    return first, batch.actions[0], returns, discounts * ~batch.terminated[last, columns], successors


def _backward_sum(terms: Tensor, weights: Tensor) -> Tensor:
    """Return s with s[t] = terms[t] + weights[t] * s[t + 1] and nothing after the last step."""
    sums = [terms[-1]]
    for term, weight in zip(terms[:-1].flip(0).unbind(), weights[:-1].flip(0).unbind(), strict=True):
        sums.append(torch.addcmul(term, weight, sums[-1]))
    return torch.stack(sums[::-1])
