"""Swapping network, buffer, schedule, optimiser or environment is a change of configuration only."""

import itertools
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch

from rl_lab.build import build_experiment
from rl_lab.cli import main
from rl_lab.composition import compose
from rl_lab.orchestration.loop import training_loop

SCHEDULE = "{{_target_: rl_lab.core.schedules.{0}, start: {1}, end: {2}, steps: 100, of: {3}}}"
OPTIMIZERS = {
    "adam": "{_target_: torch.optim.Adam, lr: 1e-3}",
    "adamw": "{_target_: torch.optim.AdamW, lr: 1e-3, weight_decay: 0.1}",
    "sgd": "{_target_: torch.optim.SGD, lr: 1e-3, momentum: 0.9}",
    "rmsprop": "{_target_: torch.optim.RMSprop, lr: 1e-3}",
}
TOY = [
    *("experiment.device=cpu", "environment.num_envs=2", "environment.max_episode_steps=12"),
    *("evaluation.episodes=2", "training.phases.0.workflow_hooks.0.collect=8"),
]

Factors = Mapping[str, Mapping[str, Sequence[str]]]

DQN: Factors = {
    "network": {
        "mlp": ["components.q_network.hidden=[16]"],
        "dueling": ["components/q_network=dueling", "components.q_network.hidden=[16]"],
        "conv": [
            *("environment=gridworld", "environment.resize=[8,8]", "components/q_network=conv"),
            *("components.q_network.hidden=[16]", "components.q_network.channels=[4]"),
        ],
    },
    "buffer": {"replay": [], "prioritized": ["buffer=prioritized"]},
    "n_step": {"one": ["algorithm.n_step=1"], "three": ["algorithm.n_step=3"]},
    "epsilon": {
        "constant": ["~workflow.epsilon", "+workflow.epsilon=0.2"],
        "linear": ["workflow.epsilon=" + SCHEDULE.format("Linear", 1.0, 0.1, "agent_steps")],
        "cosine": ["workflow.epsilon=" + SCHEDULE.format("Cosine", 1.0, 0.1, "updates")],
        "exponential": ["workflow.epsilon=" + SCHEDULE.format("Exponential", 1.0, 0.1, "agent_steps")],
    },
    "optimizer": {name: [f"+optimizers.agent.optimizer={node}"] for name, node in OPTIMIZERS.items()},
    "rate": {
        "fixed": [],
        "linear": ["+optimizers.agent.learning_rate=" + SCHEDULE.format("Linear", 1e-3, 0.0, "updates")],
    },
    "target": {
        "hard": ["workflow.target_rate=1", "workflow.target_every=3"],
        "soft": [],
        "single": ["workflow.double=false"],
    },
}
PPO: Factors = {
    "actions": {
        "discrete": [],
        "continuous": ["environment=pendulum", "model=ppo_continuous"],
        "pixels": ["environment=gridworld", "environment.resize=[8,8]", "model=ppo_pixels"],
    },
    "clip": {
        "constant": ["~workflow.clip_range", "+workflow.clip_range=0.1"],
        "linear": ["workflow.clip_range=" + SCHEDULE.format("Linear", 0.2, 0.0, "agent_steps")],
        "cosine": ["workflow.clip_range=" + SCHEDULE.format("Cosine", 0.2, 0.05, "updates")],
    },
    "optimizer": DQN["optimizer"],
    "rate": DQN["rate"],
    "value": {"free": [], "clipped": ["workflow.value_clip_range=0.2"]},
    "epochs": {"all": [], "target": ["workflow.target_kl=0.01"]},
    "advantages": {"normalized": [], "raw": ["workflow.normalize_advantages=false", "workflow.entropy_weight=0.01"]},
    "minibatch": {"even": ["workflow.minibatch_size=8"], "one left over": ["workflow.minibatch_size=5"]},
}


def pairwise(factors: Factors) -> list[dict[str, str]]:
    """Choose few combinations such that every two choices of different factors meet in one of them."""
    names = list(factors)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}
    chosen: list[dict[str, str]] = []
    while missing:
        row: dict[str, str] = dict(min(missing))
        for name in names:
            if name not in row:
                row[name] = max(factors[name], key=lambda choice, n=name: _meets(row | {n: choice}, missing))
        missing -= {pair for pair in missing if all(row[name] == choice for name, choice in pair)}
        chosen.append({name: row[name] for name in names})
    return chosen


def _meets(row: Mapping[str, str], missing: set) -> int:
    return sum(all(row.get(name) == choice for name, choice in pair) for pair in missing)


def trained(names: str) -> list[str]:
    """Make room for an optimiser: a node is replaced as a whole, or arguments of the old one would stay."""
    return ["~optimizers.agent", f"+optimizers.agent={{trains: [{names}], max_grad_norm: 10.0}}"]


def words(factors: Factors, row: Mapping[str, str]) -> list[str]:
    return [word for name, choice in row.items() for word in factors[name][choice]]


def run(overrides: Sequence[str], num_actions: int = 6) -> list:
    """Run a few actions and see that every loss is finite and that the parameters moved."""
    experiment = build_experiment(compose(overrides), Path("unwritten"))
    (optimizer,) = experiment.optimizers.values()
    before = [parameter.detach().clone() for parameter in optimizer.parameters]
    loop = training_loop(experiment.workflow, experiment.scheduler, experiment.collector, experiment.sources)
    events = list(islice(loop, num_actions))
    experiment.close()
    losses = [float(v) for event in events for k, v in event.metrics.items() if k.endswith("loss")]
    assert losses
    assert all(torch.isfinite(torch.tensor(losses)))
    assert any(not torch.equal(a, b) for a, b in zip(before, optimizer.parameters, strict=True))
    assert all(torch.isfinite(parameter).all() for parameter in optimizer.parameters)
    return events


def label(row: Mapping[str, str]) -> str:
    return "-".join(row.values())


def test_every_two_choices_meet():
    for factors in (DQN, PPO):
        rows = pairwise(factors)
        for a, b in itertools.combinations(factors, 2):
            assert {(row[a], row[b]) for row in rows} == set(itertools.product(factors[a], factors[b]))
        assert len(rows) < 30


@pytest.mark.parametrize("row", pairwise(DQN), ids=label)
def test_dqn(row):
    toy = [*TOY, "buffer.capacity=64", "buffer.min_size=8", "buffer.batch_size=8"]
    events = run(["experiment=dqn_cartpole", *trained("q_network"), *words(DQN, row), *toy])
    assert {event.hook for event in events} == {"collect", "update_controller"}


@pytest.mark.parametrize("row", pairwise(PPO), ids=label)
def test_ppo(row):
    hidden = [f"controllers.{role}.network.hidden=[16]" for role in ("actor", "critic")]
    events = run(
        ["experiment=ppo_cartpole", *trained("actor,critic"), *words(PPO, row), *TOY, *hidden, "workflow.num_epochs=2"]
    )
    assert events[1].metrics["approx_kl"] < 10.0


@pytest.mark.parametrize("experiment", ["dqn_cartpole", "ppo_cartpole"])
@pytest.mark.parametrize("environment", ["CartPole-v1", "MountainCar-v0", "probe/both", "Acrobot-v1"])
def test_the_environment_is_swapped_by_its_id(experiment, environment):
    small = ["buffer.min_size=8"] if experiment == "dqn_cartpole" else []
    run([f"experiment={experiment}", f"environment.id={environment}", *TOY, *small])


def test_gymnasiums_cart_pole_is_ours():
    """The same run on Gymnasium's cart-pole and on ours, step for step the same world, sees the same episodes."""
    lengths = []
    for environment in ("tiny/CartPole", "CartPole-v1"):
        composed = compose(["experiment=ppo_cartpole", f"environment.id={environment}", "environment.num_envs=2"])
        experiment = build_experiment(composed, Path("unwritten"))
        result = experiment.collector.collect(experiment.workflow.act, 200)
        lengths.append(result.extras["episode_lengths"])
        experiment.close()
    assert lengths[0] == lengths[1]
    assert len(lengths[0]) > 5


def test_a_swap_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = [
        *(
            "dqn_cartpole",
            "components/q_network=dueling",
            "buffer=prioritized",
            "algorithm.n_step=2",
            "environment.id=CartPole-v1",
        ),
        *trained("q_network"),
        *("+optimizers.agent.optimizer={_target_: torch.optim.SGD, lr: 0.01}", "buffer.min_size=64"),
        *("training.total_timesteps=200", "evaluation.episodes=1", "--run-dir", "run", "--quiet"),
    ]
    assert main(["train", *overrides]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["finished"]
    assert summary["updates"] > 0
