"""The curves in results/ support what the README and the docs pages claim of them."""

import csv
from collections import defaultdict
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent.parent / "results"
# experiment, seeds, agent steps within which every seed must have reached the return, and the mean at the end
CLAIMS = [
    ("dqn_cartpole", 5, 50_100, 475.0),
    ("ppo_cartpole", 5, 100_200, 475.0),
    ("ppo_pointmass", 5, 100_400, -12.0),
    ("ppo_pendulum", 5, 202_000, -250.0),
    ("tdmpc2_swingup", 3, 10_000, 400.0),
]


def read(experiment):
    curves = defaultdict(list)
    with open(RESULTS / f"{experiment}.csv") as file:
        for row in csv.DictReader(file):
            curves[int(row["seed"])].append((int(row["agent_steps"]), float(row["return_mean"])))
    return curves


@pytest.mark.parametrize(("experiment", "num_seeds", "budget", "goal"), CLAIMS)
def test_curves_reach_their_goal(experiment, num_seeds, budget, goal):
    curves = read(experiment)
    assert len(curves) == num_seeds
    for seed, points in curves.items():
        assert points == sorted(points), "steps must increase"
        assert max(steps for steps, _ in points) <= budget
        assert max(value for _, value in points) >= goal, seed
    assert sum(points[-1][1] for points in curves.values()) / num_seeds >= goal
