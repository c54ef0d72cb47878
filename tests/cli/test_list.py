import json

import pytest

from rl_lab.cli import groups, main


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A package's and a user's config folder."""
    package, user = tmp_path / "package", tmp_path / "work"
    files = {
        package / "experiment/dqn_cartpole.yaml": "# @package _global_\n# DQN balances a pole.\n# More.\nx: 1\n",
        package / "experiment/ppo_cartpole.yaml": "# @package _global_\n\n#   PPO balances a pole.\n",
        package / "experiment/silent.yaml": "# @package _global_\nx: 1\n# not a description\n",
        package / "components/encoder/mlp.yaml": "# A small network.\n",
        package / "controller/actor.yaml": "actor:\n  _target_: my.Actor\n",
        package / "buffer/replay.yaml": "# Keeps transitions.\n",
        user / "configs/experiment/dqn_cartpole.yaml": "# @package _global_\n# My own DQN.\n",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(groups, "PACKAGE_CONFIGS", package)
    monkeypatch.chdir(user)
    return user


def rows(capsys):
    return [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line]


def test_experiments_with_their_first_comment_and_the_users_first(folders, capsys):
    assert main(["list"]) == 0
    found = rows(capsys)
    assert found[2:5] == [
        ["dqn_cartpole", "My own DQN. (yours)"],
        ["ppo_cartpole", "PPO balances a pole."],
        ["silent"],
    ]


def test_other_groups_show_how_to_choose_them(folders, capsys):
    assert main(["list", "components"]) == 0
    assert rows(capsys)[2:4] == [["components/encoder=mlp", "A small network."], ["controller=actor", "my.Actor"]]
    assert main(["list", "buffer"]) == 0
    assert rows(capsys)[2] == ["buffer=replay", "Keeps transitions."]
    assert main(["list", "workflows"]) == 0
    assert capsys.readouterr().out == "no workflows found\n"


def test_an_unknown_kind_gets_the_nearest(capsys):
    assert main(["list", "experimets"]) == 2
    assert "experiments" in capsys.readouterr().err


def test_shipped_experiments_all_have_a_description():
    experiments = groups.config_files("experiment")
    for file in experiments.values():
        assert file.user or file.description, f"{file.path}: say in a first comment what the experiment is"


def test_runs_show_their_summary(folders, capsys):
    finished = folders / "experiments/dqn_cartpole/1"
    running = folders / "experiments/ppo_cartpole/2/seed_3"
    broken = folders / "experiments/other/3"
    for folder in (finished, running, broken):
        folder.mkdir(parents=True)
    summary = {"name": "dqn_cartpole", "seed": 4, "agent_steps": 50_000, "finished": True}
    summary |= {"last_evaluation": {"return_mean": 480.25}, "best_evaluation": {"return_mean": 500.0}}
    (finished / "summary.json").write_text(json.dumps(summary))
    (finished / "checkpoints/0000000001").mkdir(parents=True)
    (running / "config.yaml").write_text("experiment: {name: ppo_cartpole, seed: 3}\n")
    (running / "metrics.jsonl").write_text("")
    (broken / "summary.json").write_text("{torn")
    assert main(["list", "runs"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["experiment", "seed", "agent_steps", "last", "best", "finished", "folder"]
    assert lines[2] == ["dqn_cartpole", "4", "50,000", "480.2", "500.0", "yes", "experiments/dqn_cartpole/1"]
    assert lines[3] == ["3", "?", "-", "-", "-", "no", "experiments/other/3"]
    assert lines[4] == ["ppo_cartpole", "3", "-", "-", "-", "no", "experiments/ppo_cartpole/2/seed_3"]
    assert len(lines) == 5


def test_no_runs_says_how_to_start_one(folders, capsys):
    assert main(["list", "runs", "--root", "nowhere"]) == 0
    assert "rl-lab train" in capsys.readouterr().out
