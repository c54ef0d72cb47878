"""MPPI on a world whose best plan is known; batching, warm starts, ends, determinism."""

import pytest
import torch

from rl_lab.components.planners import rollout as rollout_module
from rl_lab.components.planners.mppi import MPPI
from rl_lab.components.planners.rollout import rollout_dynamics_multi_step


def model(**changes):
    """A point on a line: the action moves it, the reward is minus the squared distance to the origin."""
    return {
        "dynamics": lambda latents, actions: latents + 0.5 * actions,
        "reward": lambda latents, actions: -(latents + 0.5 * actions).square().sum(-1),
        "value": lambda latents: torch.zeros(latents.shape[:-1]),
        "policy": lambda latents: torch.zeros_like(latents),
        "discount": 1.0,
        **changes,
    }


def plan(planner, latents, mean=None, explore=False, seed=0, **changes):
    start = planner.initial_mean(len(latents), latents) if mean is None else mean
    generator = torch.Generator().manual_seed(seed)
    return planner.plan(latents, start, explore=explore, generator=generator, **model(**changes))


def test_finds_the_way_to_the_origin():
    planner = MPPI(1, horizon=3, num_samples=256, num_policy_samples=8, num_elites=16, num_iterations=8, select="mean")
    latents = torch.tensor([[1.0], [-1.0], [0.2], [0.0]])
    decided = plan(planner, latents)
    torch.testing.assert_close(decided.actions, torch.tensor([[-1.0], [1.0], [-0.4], [0.0]]), rtol=0, atol=0.12)


def test_environments_do_not_influence_each_other():
    planner = MPPI(1, horizon=3, num_samples=64, num_policy_samples=4, num_elites=8, num_iterations=3, select="mean")
    many = plan(planner, torch.tensor([[0.7], [-0.4], [0.1]]))
    other = plan(planner, torch.tensor([[0.7], [5.0], [-5.0]]))
    torch.testing.assert_close(many.actions[0], other.actions[0])
    torch.testing.assert_close(many.mean[0], other.mean[0])


def test_warm_start_moves_on_by_one_step():
    seen = []
    planner = MPPI(
        1, horizon=3, num_samples=4, num_policy_samples=0, num_elites=2, num_iterations=1, min_std=1e-6, max_std=1e-6
    )

    def reward(latents, actions):
        seen.append(actions.clone())
        return torch.zeros(latents.shape[:-1])

    plan(planner, torch.zeros(1, 1), mean=torch.tensor([[[0.1], [0.2], [0.3]]]), reward=reward)
    assert [round(float(actions[0, 0, 0]), 4) for actions in seen[0]] == [0.2, 0.3, 0.0]  # of all steps at once


def test_policy_sequences_compete_in_every_iteration():
    # Free samples are confined far from the goal; only the policy's own sequence reaches it.
    planner = MPPI(
        1, horizon=2, num_samples=8, num_policy_samples=1, num_elites=1, num_iterations=4, max_std=1e-6, min_std=1e-6
    )
    decided = plan(planner, torch.tensor([[0.5]]), policy=lambda latents: (-2.0 * latents).clamp(-1, 1))
    torch.testing.assert_close(decided.actions, torch.tensor([[-1.0]]))


@pytest.mark.parametrize("many", [1, 1000])  # many rows are looked at step by step, few at once
def test_nothing_counts_after_a_predicted_end(monkeypatch, many):
    monkeypatch.setattr(rollout_module, "MANY_ROWS", many)
    rollout = rollout_dynamics_multi_step(
        torch.tensor([[0.0], [-5.0]]),
        torch.ones(3, 2, 1),
        lambda latents, actions: latents + actions,
        lambda latents, actions: torch.ones(latents.shape[:-1]),
        lambda latents: (latents.squeeze(-1) >= 2.0).float(),
    )
    assert tuple(rollout.rewards.shape) == (3, 2)
    assert rollout.alive.tolist() == [[1, 1], [1, 1], [0, 1], [0, 1]]
    returns = MPPI.returns(rollout.rewards, rollout.alive, torch.tensor([100.0, 100.0]), 1.0)
    assert returns.tolist() == [2.0, 103.0]


def test_mean_selection_needs_no_chance_and_exploration_adds_noise():
    planner = MPPI(2, num_samples=32, num_policy_samples=4, num_elites=8, num_iterations=2, select="mean")
    latents = torch.zeros(1, 2)
    assert torch.equal(plan(planner, latents).actions, plan(planner, latents).actions)
    noisy = {tuple(plan(planner, latents, explore=True, seed=seed).actions[0].tolist()) for seed in range(4)}
    assert len(noisy) == 4


def test_a_plan_that_is_not_finite_counts_as_zero():
    returns = MPPI.returns(torch.tensor([[[float("nan"), 1.0]]]), torch.ones(2, 1, 2), torch.zeros(1, 2), 1.0)
    assert returns.tolist() == [[0.0, 1.0]]
