"""Every algorithm reaches a stated return on a small task. One line per experiment; `make learn` runs them all."""

import pytest

from rl_lab import train

# experiment, return that its mean evaluation must reach within the budget of the experiment
GOALS = [
    ("dqn_cartpole", 475.0),
    ("ppo_cartpole", 475.0),
    ("ppo_pointmass", -12.0),
    ("ppo_pendulum", -250.0),
    ("sac_pendulum", -160.0),
    ("td3_pendulum", -160.0),
    ("mpc_cartpole", 500.0),
    ("mpc_swingup", 400.0),
    ("mbmpc_cartpole", 475.0),
    ("pets_swingup", 400.0),
    ("mcts_gridworld", 0.9),
    ("dqn_in_the_dream", 475.0),
    ("dreamer_cartpole", 475.0),
]


def reach(experiment, goal, folder, seed):
    outcome = train(experiment, run_dir=folder, seed=seed, training__stop_at_return=goal, logging__tensorboard=False)
    return outcome.summary["best_evaluation"]["return_mean"]


@pytest.mark.learning
@pytest.mark.parametrize("seed", [10, 11])
@pytest.mark.parametrize(("experiment", "goal"), GOALS)
def test_experiment_learns(experiment, goal, seed, tmp_path):
    assert reach(experiment, goal, tmp_path / "run", seed) >= goal


def test_the_fastest_experiment_learns(tmp_path):
    assert reach("ppo_cartpole", 475.0, tmp_path / "run", 12) >= 475.0
