"""What is seen in episodes, against slow loops; nothing after an episode's end may be looked at."""

import math

import pytest
import torch

from rl_lab.components import inspection
from rl_lab.components.inspection import (
    calibration,
    inspect_latent_model,
    planner_improvement,
    prediction_errors,
    returns_to_go,
    spread_starts,
    termination_errors,
)
from rl_lab.components.planners.mppi import MPPI
from rl_lab.core.batch import Batch

LENGTHS = [7, 1, 4, 12]
ENDS = ["terminated", "terminated", "truncated", "cut"]
DISCOUNT = 0.6


def episodes(seed=0):
    """Random walks z' = z + a, reward 2z; rows after an end are nan, so that whoever looks there is found out."""
    random = torch.Generator().manual_seed(seed)
    num_rows = max(LENGTHS)
    actions = torch.rand(num_rows, len(LENGTHS), 1, generator=random) - 0.5
    states = torch.cat([torch.rand(1, len(LENGTHS), 1, generator=random), actions]).cumsum(0)
    valid = torch.arange(num_rows)[:, None] < torch.tensor(LENGTHS)
    flags = {name: torch.zeros_like(valid) for name in ("terminated", "truncated")}
    for episode, (length, end) in enumerate(zip(LENGTHS, ENDS, strict=True)):
        if end in flags:
            flags[end][length - 1, episode] = True
    nan = torch.tensor(math.nan)
    return Batch(
        observations=torch.where(valid[..., None], states[:-1], nan),
        actions=torch.where(valid[..., None], actions, nan),
        rewards=torch.where(valid, 2.0 * states[:-1, :, 0], nan),
        next_observations=torch.where(valid[..., None], states[1:], nan),
        extras={"valid": valid},
        **flags,
    )


def all_steps(trajectory):
    return [(t, e) for e, length in enumerate(LENGTHS) for t in range(length)]


@pytest.mark.parametrize("num", [1, 5, 24, 100])
def test_starts_are_spread_over_all_valid_steps(num):
    trajectory = episodes()
    rows, columns = spread_starts(trajectory["valid"], num)
    chosen = list(zip(rows.tolist(), columns.tolist(), strict=True))
    every = all_steps(trajectory)
    assert chosen == [every[i * len(every) // num] for i in range(num)]
    if num >= len(every):
        assert set(chosen) == set(every)


@pytest.mark.parametrize("drift", [0.0, 0.1])
def test_prediction_errors_against_a_slow_loop(drift):
    trajectory, horizon = episodes(), 3
    rows, columns = (torch.tensor(index) for index in zip(*all_steps(trajectory), strict=True))

    def dynamics(latents, actions):
        return latents + actions + drift

    def reward(latents, actions):
        return latents[..., 0]

    first = trajectory.observations[rows, columns]
    found = prediction_errors(trajectory, rows, columns, first, horizon, lambda seen: seen, dynamics, reward)
    errors = {k: [] for k in range(1, horizon + 1)}
    unchanged = {k: [] for k in errors}
    rewards = []
    for t, e in all_steps(trajectory):
        state = start = trajectory.observations[t, e, 0].item()
        for k in errors:
            if t + k > LENGTHS[e]:
                break
            rewards.append(abs(state - trajectory.rewards[t + k - 1, e].item()))
            state += trajectory.actions[t + k - 1, e, 0].item() + drift
            true = trajectory.next_observations[t + k - 1, e, 0].item()
            errors[k].append((state - true) ** 2)
            unchanged[k].append((start - true) ** 2)
    for k in errors:
        assert found[f"consistency_error_{k}"] == pytest.approx(sum(errors[k]) / len(errors[k]), abs=1e-6)
        assert found[f"consistency_error_{k}"] == pytest.approx((k * drift) ** 2, abs=1e-6)
        assert found[f"unchanged_error_{k}"] == pytest.approx(sum(unchanged[k]) / len(unchanged[k]), abs=1e-6)
    assert found["reward_error"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-6)


def test_a_horizon_that_no_episode_reaches_is_left_out():
    trajectory = episodes().map(lambda leaf: leaf[:, 1:2])  # the episode of one step
    rows, columns = spread_starts(trajectory["valid"], 4)
    found = prediction_errors(
        trajectory,
        rows,
        columns,
        trajectory.observations[rows, columns],
        2,
        lambda seen: seen,
        lambda latents, actions: latents + actions,
        lambda latents, actions: 2.0 * latents[..., 0],
    )
    assert "consistency_error_2" not in found
    assert found["consistency_error_1"] == pytest.approx(0.0, abs=1e-6)
    assert found["reward_error"] == pytest.approx(0.0, abs=1e-6)


def test_returns_to_go_against_a_slow_loop():
    trajectory = episodes()
    last_values = torch.tensor([10.0, 20.0, 30.0, 40.0])
    found, tails = returns_to_go(trajectory.rewards, trajectory.terminated, trajectory["valid"], last_values, DISCOUNT)
    for t, e in all_steps(trajectory):
        left = range(t, LENGTHS[e])
        expected = sum(DISCOUNT ** (i - t) * trajectory.rewards[i, e].item() for i in left)
        tail = 0.0 if ENDS[e] == "terminated" else DISCOUNT ** len(left)
        assert found[t, e].item() == pytest.approx(expected + tail * last_values[e].item(), rel=1e-5)
        assert tails[t, e].item() == pytest.approx(tail, rel=1e-5)


def test_calibration_against_numpy_and_where_nothing_varies():
    random = torch.Generator().manual_seed(1)
    observed = torch.randn(200, generator=random)
    predicted = 3.0 * observed + torch.randn(200, generator=random) + 5.0
    found = calibration("value", predicted, observed)
    assert found["value_bias"] == pytest.approx((predicted - observed).mean().item())
    assert found["value_observed"] == pytest.approx(observed.mean().item())
    expected = torch.corrcoef(torch.stack([predicted, observed]))[0, 1].item()
    assert found["value_correlation"] == pytest.approx(expected, abs=1e-6)
    assert calibration("value", torch.ones(5), observed[:5]).keys() == {"value_bias", "value_observed"}


def model(termination=None):
    """A world where the action moves the state and the reward is large near one."""
    return {
        "dynamics": lambda latents, actions: latents + actions,
        "reward": lambda latents, actions: -(latents[..., 0] - 1.0).abs(),
        "value": lambda latents: -(latents[..., 0] - 1.0).abs(),
        "discount": DISCOUNT,
        "termination": termination,
    }


def planner(**options):
    return MPPI(1, horizon=2, num_samples=64, num_policy_samples=4, num_elites=8, num_iterations=4, **options)


def test_planning_improves_on_a_policy_that_stays_and_not_on_the_best_one():
    starts = torch.zeros(16, 1)
    generator = torch.Generator().manual_seed(0)
    idle = planner_improvement(
        planner(), starts, policy=lambda latents: torch.zeros_like(latents), generator=generator, **model()
    )
    # Staying brings -(1 + g + g^2); moving at once -(1 + 0 + 0).
    assert idle == pytest.approx(DISCOUNT + DISCOUNT**2, abs=0.05)
    best = planner_improvement(
        planner(), starts, policy=lambda latents: (1.0 - latents).clamp(-1.0, 1.0), generator=generator, **model()
    )
    assert -0.1 < best <= 0.001


def test_termination_errors_count_ends_and_other_steps_apart():
    trajectory = episodes()
    rows, columns = (torch.tensor(index) for index in zip(*all_steps(trajectory), strict=True))

    def errors(termination):
        return termination_errors(
            trajectory, rows, columns, lambda seen: seen, lambda latents, actions: latents + actions, termination
        )

    ends = trajectory.next_observations[trajectory.terminated].flatten()

    def knowing(latents):
        return torch.isclose(latents[..., 0, None], ends, atol=1e-5).any(-1).float()

    assert errors(knowing) == {"termination_missed": 0.0, "termination_false": 0.0}
    assert errors(lambda latents: torch.zeros_like(latents[..., 0]))["termination_missed"] == 1.0
    assert errors(lambda latents: torch.ones_like(latents[..., 0]))["termination_false"] == 1.0
    half = errors(lambda latents: torch.isclose(latents[..., 0], ends[0], atol=1e-5).float())
    assert half == {"termination_missed": 0.5, "termination_false": 0.0}


def test_the_whole_inspection_is_finite_and_only_where_it_can_be_known():
    trajectory = episodes()
    seen = inspect_latent_model(
        trajectory,
        encode=lambda observations: observations,
        action_values=lambda latents, actions: torch.stack([latents[..., 0] - 1.0, latents[..., 0] + 1.0]),
        planner=planner(),
        policy=lambda latents: torch.zeros_like(latents),
        generator=torch.Generator().manual_seed(0),
        **model(termination=lambda latents: torch.zeros_like(latents[..., 0])),
    )
    assert all(math.isfinite(value) for value in seen.metrics.values())
    assert {"value_bias", "value_tail", "planner_improvement", "termination_missed"} < seen.metrics.keys()
    assert 0.0 < seen.metrics["value_tail"] < inspection.MAX_TAIL
    assert seen.pictures.keys() == {"value_calibration"}
    # Without a termination and with a far horizon nothing is known of the values.
    endless = trajectory.with_columns(terminated=torch.zeros_like(trajectory.terminated))
    seen = inspect_latent_model(
        endless,
        encode=lambda observations: observations,
        action_values=lambda latents, actions: torch.stack([latents[..., 0] - 1.0, latents[..., 0] + 1.0]),
        planner=planner(),
        policy=lambda latents: torch.zeros_like(latents),
        generator=torch.Generator().manual_seed(0),
        **{**model(), "discount": 0.999},
    )
    assert not any(name.startswith("value") for name in seen.metrics)
    assert not seen.pictures


def test_the_value_of_the_true_model_is_calibrated():
    """In a world with a reward of one and no end, the value is 1 / (1 - discount), also where the record stops."""
    ones = torch.ones(30, 4)
    never = torch.zeros(30, 4, dtype=torch.bool)
    observations = torch.rand(31, 4, 1)
    trajectory = Batch(
        observations[:-1], torch.zeros(30, 4, 1), ones, never, never, observations[1:], extras={"valid": ~never}
    )
    worth = 1.0 / (1.0 - DISCOUNT)
    found = inspect_latent_model(
        trajectory,
        encode=lambda seen: seen,
        action_values=lambda latents, actions: torch.full_like(latents[..., 0], worth + 0.5).expand(2, -1),
        planner=planner(),
        policy=lambda latents: torch.zeros_like(latents),
        generator=torch.Generator().manual_seed(0),
        **{**model(), "value": lambda latents: torch.full_like(latents[..., 0], worth)},
    )
    assert found.metrics["value_bias"] == pytest.approx(0.5, abs=1e-4)
