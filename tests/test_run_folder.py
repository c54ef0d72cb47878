"""Run folders: what is none is answered with the runs that there are, the newest first."""

import os

import pytest

from rl_lab.core.errors import UserError
from rl_lab.run_folder import require_run


@pytest.fixture
def experiments(tmp_path):
    for age, name in enumerate(("ppo/c", "dqn/a", "ppo/b")):
        (tmp_path / "experiments" / name / "checkpoints").mkdir(parents=True)
        config = tmp_path / "experiments" / name / "config.yaml"
        config.touch()
        os.utime(config, (1e9 - age, 1e9 - age))
    export = tmp_path / "experiments" / "my_agent"
    (export / "agent").mkdir(parents=True)
    for name in ("config.yaml", "card.json"):
        (export / name).touch()
    return tmp_path / "experiments"


def refusal(folder):
    with pytest.raises(UserError) as caught:
        require_run(folder)
    return caught.value


def test_a_run_is_taken(experiments):
    assert require_run(experiments / "dqn" / "a") == experiments / "dqn" / "a" / "config.yaml"


def test_a_folder_of_runs_is_answered_with_the_newest_of_them(experiments):
    told = refusal(experiments)
    assert told.problem == "this is a folder of runs, not a run"
    assert told.remedy.endswith(": " + ", ".join(str(experiments / name) for name in ("ppo/c", "dqn/a", "ppo/b")))
    assert refusal(experiments / "ppo").remedy.endswith(f": {experiments / 'ppo/c'}, {experiments / 'ppo/b'}")


def test_a_misspelled_name_is_answered_with_its_neighbour(experiments):
    text = str(refusal(experiments / "ppo" / "bb"))
    assert f"nearest:  {experiments / 'ppo/b'}" in text
    (experiments / "empty").mkdir()
    assert "dqn/a" in refusal(experiments / "empty").remedy
    assert refusal(experiments / "dqn" / "a" / "checkpoints" / "x").remedy == "see `rl-lab list runs`"


def test_an_exported_agent_is_called_so(experiments):
    told = refusal(experiments / "my_agent")
    assert told.problem == "this is an exported agent, not a run"
    assert "rl_lab.load_policy(" in told.remedy
    assert "my_agent" not in str(refusal(experiments))
