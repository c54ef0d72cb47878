"""The curves in results/ support what the README and the docs pages claim of them."""

import csv
from collections import defaultdict
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent.parent / "results"
# experiment, seeds, agent steps, the return that every seed must have reached within them, and the mean at the end
CLAIMS = [
    ("dqn_cartpole", 5, 50_100, 475.0, 475.0),
    ("ppo_cartpole", 5, 100_200, 475.0, 475.0),
    ("ppo_pointmass", 5, 100_400, -12.0, -12.0),
    ("ppo_pendulum", 5, 202_000, -250.0, -250.0),
    ("tdmpc2_swingup", 3, 10_000, 400.0, 400.0),
    ("tdmpc2_hopper", 2, 15_000, 280.0, 280.0),
    ("sac_pendulum", 5, 20_000, -160.0, -160.0),
    ("td3_pendulum", 5, 20_000, -165.0, -160.0),
    ("mbmpc_cartpole", 5, 20_100, 475.0, 475.0),
    ("mbmpc_advantage", 5, 20_100, 475.0, 475.0),
    ("pets_swingup", 5, 2_500, 430.0, 430.0),
    ("mcts_gridworld", 5, 6_016, 0.9, 0.9),
    ("dqn_in_the_dream", 5, 32_016, 475.0, 475.0),
    ("dreamerv1_gridworld", 3, 20_100, 0.9, 0.9),
    ("dreamerv2_gridworld", 3, 20_100, 0.9, 0.9),
    ("dreamerv3_gridworld", 3, 20_100, 0.9, 0.9),
    ("dreamerv3_minigrid", 3, 30_100, 0.96, 0.96),
    ("dreamer_cartpole", 5, 20_100, 475.0, 475.0),
]


def read(experiment):
    curves = defaultdict(list)
    with open(RESULTS / f"{experiment}.csv") as file:
        for row in csv.DictReader(file):
            curves[int(row["seed"])].append((int(row["agent_steps"]), float(row["return_mean"])))
    return curves


@pytest.mark.parametrize(("experiment", "num_seeds", "budget", "each", "mean"), CLAIMS)
def test_curves_reach_their_goal(experiment, num_seeds, budget, each, mean):
    curves = read(experiment)
    assert len(curves) == num_seeds
    for seed, points in curves.items():
        assert points == sorted(points), "steps must increase"
        assert max(steps for steps, _ in points) <= budget
        assert max(value for _, value in points) >= each, seed
    assert sum(points[-1][1] for points in curves.values()) / num_seeds >= mean


# Control suite at 100k steps of the simulator: means over the seeds, at least the published mean less two deviations.
SCORES = {
    "walker-walk": 922.0,
    "walker-run": 667.0,
    "cartpole-swingup": 769.0,
    "finger-spin": 892.0,
    "cheetah-run": 383.0,
    "cup-catch": 941.0,
}


def score(task, file="tdmpc2_dmc.csv"):
    """Return the mean over the seeds at 100k steps, and how many there are."""
    with open(RESULTS / file) as lines:
        rows = [row for row in csv.DictReader(lines) if row["experiment"] == f"tdmpc2_{task}"]
    last = {row.get("seed"): float(row["return_mean"]) for row in rows if int(row["env_steps"]) == 100_000}
    return sum(last.values()) / len(last), len(last)


@pytest.mark.parametrize("task", SCORES)
def test_tdmpc2_scores(task):
    mean, num_seeds = score(task)
    assert num_seeds >= 2
    assert mean >= SCORES[task]


def test_tdmpc2_scores_are_those_that_were_published():
    ratios = [score(task)[0] / score(task, "published/tdmpc2_dmc.csv")[0] for task in SCORES]
    assert sum(ratios) / len(ratios) >= 0.97


def training_score(file):
    """Return the mean over the seeds of the training returns in the last 10k decisions of a multiple of 50k.

    So many are the last 20k of 100k simulator steps with a repeat of two, and the last 40k of 400k frames of Atari.
    """
    curves = defaultdict(list)
    with open(RESULTS / file) as lines:
        for row in csv.DictReader(lines):
            curves[row["experiment"], row["seed"]].append(
                (int(row["agent_steps"]), float(row["collect/episode_return"]))
            )
    scores = defaultdict(list)
    for (experiment, _), points in curves.items():
        end = 50_000 * round(points[-1][0] / 50_000)
        last = [value for steps, value in points if steps > end - 10_000]
        scores[experiment].append(sum(last) / len(last))
    return {experiment: sum(values) / len(values) for experiment, values in scores.items()}


def test_dreamer_scores():
    assert training_score("dreamerv3_boxing_training.csv")["dreamerv3_Boxing"] >= 60.0
    control = training_score("dreamerv3_dmc_training.csv")
    assert control["dreamerv3_cartpole-swingup"] >= 500.0
    assert control["dreamerv3_2023_walker-walk"] >= 330.0
    # As the published curves were made: 50k decisions of one simulator step each.
    single = training_score("dreamerv3_dmc_single_steps.csv")
    assert single["dreamerv3_2023_finger-spin"] >= 700.0


def test_the_table_that_compares_algorithms():
    page = Path(__file__).parent.parent / "docs" / "algorithms" / "README.md"
    tasks = ("cartpole-swingup", "walker-walk", "finger-spin")
    rows = [row for row in page.read_text().splitlines() if row.startswith(tuple(f"| {task} |" for task in tasks))]
    table = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)}
    control = training_score("dreamerv3_dmc_training.csv")
    for task in tasks:
        found = (score(task)[0], control[f"dreamerv3_{task}"], control.get(f"dreamerv3_2023_{task}"))
        assert table[task] == ["" if mean is None else f"{mean:.0f}" for mean in found]
