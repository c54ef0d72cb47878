"""Looking at a latent model with real episodes: how far predictions hold, what values are worth, what planning adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_lab.components.drawings import calibration_picture
from rl_lab.components.planners.rollout import Dynamics, Reward, Termination, rollout_dynamics_multi_step
from rl_lab.core.batch import Batch, Tree, tree_map
from rl_lab.core.workflow import Inspection, Metrics

NUM_STARTS = 512  # of windows and of values, spread over all episodes; the same number at every call
NUM_PLANS = 32
NUM_POLICY_ROLLOUTS = 8  # from each start
MAX_TAIL = 0.5  # largest share of a return-to-go that may be the model's own guess

Encode = Callable[[Tree], Tensor]  # observations -> latents
Value = Callable[[Tensor], Tensor]  # latents -> values
ActionValues = Callable[[Tensor, Tensor], Tensor]  # latents, actions -> what every critic says: [members, ...]
Policy = Callable[[Tensor], Tensor]  # latents -> sampled actions


def inspect_latent_model(
    trajectory: Batch,
    *,
    encode: Encode,
    action_values: ActionValues,
    planner: Any,
    dynamics: Dynamics,
    reward: Reward,
    value: Value,
    policy: Policy,
    discount: float,
    termination: Termination | None,
    generator: torch.Generator,
) -> Inspection:
    """Return what a decoder-free latent model with a planner makes of evaluation episodes [T, E]."""
    valid = trajectory["valid"]
    rows, columns = spread_starts(valid, NUM_STARTS)
    first = encode(tree_map(lambda leaf: leaf[rows, columns], trajectory.observations))  # [S, Z]
    metrics = prediction_errors(trajectory, rows, columns, first, planner.horizon, encode, dynamics, reward)
    chosen = torch.arange(0, NUM_STARTS, NUM_STARTS // NUM_PLANS, device=rows.device)
    metrics["planner_improvement"] = planner_improvement(
        planner,
        first[chosen],
        dynamics=dynamics,
        reward=reward,
        value=value,
        policy=policy,
        discount=discount,
        termination=termination,
        generator=generator,
    )
    if termination is not None:
        metrics |= termination_errors(trajectory, rows, columns, encode, dynamics, termination)
    last, episodes = last_rows(valid)
    last_values = value(encode(tree_map(lambda leaf: leaf[last, episodes], trajectory.next_observations)))
    returns, tails = returns_to_go(trajectory.rewards, trajectory.terminated, valid, last_values, discount)
    known = valid & (tails <= MAX_TAIL)
    if not known.any():
        return Inspection(metrics)
    rows, columns = spread_starts(known, NUM_STARTS)
    latents = encode(tree_map(lambda leaf: leaf[rows, columns], trajectory.observations))
    predicted = action_values(latents, trajectory.actions[rows, columns]).mean(0)
    observed = returns[rows, columns]
    metrics |= calibration("value", predicted, observed)
    metrics["value_tail"] = tails[rows, columns].mean().item()
    return Inspection(metrics, {"value_calibration": calibration_picture(predicted, observed, "return")})


def spread_starts(mask: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return rows and columns of `num` true entries of [T, E], evenly over all of them; few are taken repeatedly."""
    columns, rows = mask.T.nonzero(as_tuple=True)  # episode by episode
    chosen = torch.arange(num, device=mask.device) * len(rows) // num
    return rows[chosen], columns[chosen]


def last_rows(valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row of the last step of every episode, and the episodes."""
    return valid.sum(0) - 1, torch.arange(valid.shape[1], device=valid.device)


def prediction_errors(
    trajectory: Batch,
    rows: Tensor,
    columns: Tensor,
    first: Tensor,
    horizon: int,
    encode: Encode,
    dynamics: Dynamics,
    reward: Reward,
) -> Metrics:
    """Compare open-loop predictions from the latents `first` with what the episodes brought, k = 1 .. horizon.

    `consistency_error_k` is the mean square error of the latent k steps ahead, `unchanged_error_k` that of a model in
    which nothing happens. Steps beyond an episode's end do not count.
    """
    ahead = rows + torch.arange(horizon, device=rows.device)[:, None]  # [H, S]
    at = ahead.clamp(max=len(trajectory) - 1)
    inside = (ahead < len(trajectory)) & trajectory["valid"][at, columns]
    actions = trajectory.actions[at, columns]
    true = encode(tree_map(lambda leaf: leaf[at, columns], trajectory.next_observations))  # [H, S, Z]
    rollout = rollout_dynamics_multi_step(first, actions, dynamics, reward)
    errors = (torch.stack(rollout.latents[1:]) - true).square().mean(-1)
    unchanged = (first - true).square().mean(-1)
    metrics = {}
    for name, found in (("consistency_error", errors), ("unchanged_error", unchanged)):
        for k in range(horizon):
            if inside[k].any():
                metrics[f"{name}_{k + 1}"] = found[k][inside[k]].mean().item()
    metrics["reward_error"] = (rollout.rewards - trajectory.rewards[at, columns])[inside].abs().mean().item()
    return metrics


def planner_improvement(
    planner: Any,
    latents: Tensor,
    *,
    dynamics: Dynamics,
    reward: Reward,
    value: Value,
    policy: Policy,
    discount: float,
    termination: Termination | None,
    generator: torch.Generator,
) -> float:
    """Return how much better the model finds the mean plan than what the policy does by itself from there."""
    plan = planner.plan(
        latents,
        planner.initial_mean(len(latents), latents),
        dynamics=dynamics,
        reward=reward,
        value=value,
        policy=policy,
        discount=discount,
        termination=termination,
        generator=generator,
    )

    def worth(starts: Tensor, actions: Tensor) -> Tensor:
        rollout = rollout_dynamics_multi_step(starts, actions, dynamics, reward, termination)
        return planner.returns(rollout.rewards, rollout.alive, value(rollout.latents[-1]), discount)

    starts = latents.unsqueeze(1).expand(-1, NUM_POLICY_ROLLOUTS, -1)  # [P, R, Z]
    actions, state = [], starts
    for _ in range(planner.horizon):
        actions.append(policy(state))
        state = dynamics(state, actions[-1])
    planned = worth(latents.unsqueeze(1), plan.mean.transpose(0, 1).unsqueeze(2))
    return (planned.mean() - worth(starts, torch.stack(actions)).mean()).item()


def termination_errors(
    trajectory: Batch, rows: Tensor, columns: Tensor, encode: Encode, dynamics: Dynamics, termination: Termination
) -> Metrics:
    """Return the share of ends that the model does not foresee one step ahead, and of other steps taken for an end."""

    def foreseen(rows: Tensor, columns: Tensor) -> Tensor:
        latents = encode(tree_map(lambda leaf: leaf[rows, columns], trajectory.observations))
        return termination(dynamics(latents, trajectory.actions[rows, columns])) > 0.5

    last, episodes = last_rows(trajectory["valid"])
    ended, going = trajectory.terminated[last, episodes], ~trajectory.terminated[rows, columns]
    metrics = {}
    if ended.any():
        metrics["termination_missed"] = 1.0 - foreseen(last, episodes)[ended].float().mean().item()
    if going.any():
        metrics["termination_false"] = foreseen(rows, columns)[going].float().mean().item()
    return metrics


def returns_to_go(
    rewards: Tensor, terminated: Tensor, valid: Tensor, last_values: Tensor, discount: float
) -> tuple[Tensor, Tensor]:
    """Return discounted returns [T, E] from every step on, and which share of a value at the end they contain.

    An episode that did not terminate goes on as `last_values` [E] say; the second answer is that guess's factor.
    """
    returns, tails = torch.zeros_like(rewards), torch.zeros_like(rewards)
    following, tail = last_values, torch.ones_like(last_values)
    for t in reversed(range(len(rewards))):
        going = (~terminated[t]).to(rewards.dtype)
        following = torch.where(valid[t], rewards[t] + discount * going * following, following)
        tail = torch.where(valid[t], discount * going * tail, tail)
        returns[t], tails[t] = following, tail
    return returns, tails


def calibration(name: str, predicted: Tensor, observed: Tensor) -> Metrics:
    """Return the mean of predicted minus observed numbers beside the latter, and their correlation where both vary."""
    metrics = {f"{name}_bias": (predicted - observed).mean().item(), f"{name}_observed": observed.mean().item()}
    left, right = (numbers.double() - numbers.double().mean() for numbers in (predicted, observed))
    scale = left.norm() * right.norm()
    if scale > 1e-9:
        metrics[f"{name}_correlation"] = ((left * right).sum() / scale).item()
    return metrics
