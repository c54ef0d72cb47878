"""The table of an agent's parts: every algorithm has one, and its numbers are those of the networks."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

import rl_lab
from rl_lab.build import build_experiment
from rl_lab.composition import load_experiment
from rl_lab.core.architecture import PartSize, log_architecture, part_sizes
from rl_lab.runs import run_training


def test_parts_are_counted_once_and_targets_are_told_apart():
    network, target = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)
    agent = SimpleNamespace(network=network, again=network, target=target, scale=nn.Identity(), gamma=0.9)
    assert part_sizes(agent) == [PartSize("network", "Linear", 8, 8), PartSize("target", "Linear", 8, 0)]
    written = []
    text = log_architecture(agent, written.append)
    assert written == [text]
    assert text.splitlines() == [
        "network  Linear  8",
        "target   Linear  8  not trained",
        "in all           8  trained",
    ]
    assert part_sizes({"a": network}) == [PartSize("a", "Linear", 8, 8)]
    assert "in_features=3" in log_architecture(agent, written.append, layers=True)


@pytest.mark.parametrize("name", ["dqn_cartpole", "ppo_cartpole", "tdmpc2_swingup", "tdmpc2_pixels"])
def test_every_algorithm_has_a_table(name, capsys):
    experiment = build_experiment(load_experiment(name, {"device": "cpu"}), Path("unwritten"))
    trained = sum(p.numel() for optimizer in experiment.optimizers.values() for p in optimizer.parameters)
    text = rl_lab.log_architecture(experiment.workflow)
    experiment.close()
    assert capsys.readouterr().out == text + "\n"
    assert f"{trained:,}" in text.splitlines()[-1]
    assert all(part in text for part in experiment.controllers)


def test_a_run_begins_with_the_table_unless_it_is_quiet(tmp_path, capsys):
    changes = {"training.total_timesteps": 64, "evaluation.episodes": 1, "logging.tensorboard": False}
    composed = load_experiment("dqn_cartpole", {"device": "cpu", "buffer.min_size": 10, **changes})
    run_training(composed, run_dir=tmp_path / "loud")
    assert "q_network" in capsys.readouterr().out
    run_training(composed, run_dir=tmp_path / "quiet", quiet=True)
    assert "q_network" not in capsys.readouterr().out
