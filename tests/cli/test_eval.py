"""rl-lab eval: planner on and off, what the model sees, pictures on demand, refusals."""

import json
import shutil
import statistics

import pytest
from PIL import Image

from rl_lab.cli import main
from rl_lab.components.drawings import CALIBRATION_SIDE
from tests.reliability.workloads import train
from tests.security.artefacts import seal

LONGER = ("environment.max_episode_steps=320", "workflow.gamma=0.8")  # so that values can be compared with returns


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    assert main(train("tdmpc2", folder / "tdmpc2", *LONGER)) == 0
    assert main(train("dqn", folder / "dqn")) == 0
    return folder


def evaluated(capsys, *words):
    capsys.readouterr()
    assert main(["eval", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_planner_on_off_and_both(runs, capsys):
    run = runs / "tdmpc2"
    on, off = (evaluated(capsys, run, "--episodes", 3, "--planner", way) for way in ("on", "off"))
    both = evaluated(capsys, run, "--episodes", 3, "--planner", "both")
    trained = evaluated(capsys, run, "--episodes", 3)
    assert on["returns"] == trained["returns"] == both["returns"] != off["returns"] == both["planner_off"]["returns"]
    differences = [left - right for left, right in zip(on["returns"], off["returns"], strict=True)]
    assert both["planner_difference"] == pytest.approx(statistics.fmean(differences))
    assert both["planner_difference_error"] == pytest.approx(statistics.stdev(differences) / 3**0.5)
    assert main(["eval", str(run), "--episodes", "3", "--planner", "both"]) == 0
    text = capsys.readouterr().out
    assert f"planner on: return {statistics.fmean(on['returns']):.2f}" in text
    assert f"planner off: return {statistics.fmean(off['returns']):.2f}" in text
    assert f"planning adds {statistics.fmean(differences):+.2f}" in text
    assert "consistency_error_3" in text


def test_what_the_model_sees_is_printed_and_drawn(runs, capsys):
    run = runs / "tdmpc2"
    seen = evaluated(capsys, run, "--episodes", 2, "--dream")["inspection"]
    assert {f"consistency_error_{k}" for k in (1, 2, 3)} < seen.keys()
    assert {"value_bias", "value_tail", "planner_improvement", "reward_error"} < seen.keys()
    with Image.open(run / "dream" / "value_calibration.png") as picture:
        assert min(picture.size) > CALIBRATION_SIDE  # and words around it


def manifest(path):
    return json.loads((path / "manifest.json").read_text())


def test_the_answer_says_which_checkpoint_it_is_about(runs, capsys):
    run = runs / "tdmpc2"
    for which, path in (("best", run / "best"), ("last", max((run / "checkpoints").iterdir()))):
        counters = manifest(path)["counters"]
        found = evaluated(capsys, run, "--episodes", 1, "--checkpoint", which)
        assert (found["checkpoint"], found["agent_steps"], found["updates"]) == (
            which,
            counters["agent_steps"],
            counters["updates"],
        )
        assert main(["eval", str(run), "--episodes", "1", "--checkpoint", which]) == 0
        told = f"{which} checkpoint: {counters['agent_steps']:,} agent steps, {counters['updates']:,} updates"
        assert capsys.readouterr().out.splitlines()[0].endswith(told)


def test_a_best_agent_that_has_learned_nothing_is_called_so(tmp_path, capsys):
    assert main(train("dqn", tmp_path / "run", "buffer.min_size=120", "training.total_timesteps=100")) == 0
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--episodes", "1"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert " 0 updates (nothing was learned before it; --checkpoint last takes the newest)" in line
    shutil.rmtree(tmp_path / "run" / "best")  # as before the first evaluation
    assert evaluated(capsys, tmp_path / "run", "--episodes", 1)["checkpoint"] == "last"


def test_counters_that_are_none_do_not_keep_an_agent_from_being_played(runs, tmp_path, capsys):
    shutil.copytree(runs / "dqn", tmp_path / "run")
    seal(tmp_path / "run" / "best", lambda facts: facts.update(counters="many"))
    assert main(["eval", str(tmp_path / "run"), "--episodes", "1"]) == 0
    assert "best checkpoint: agent steps not recorded, updates not recorded" in capsys.readouterr().out


def test_evaluations_of_training_log_it_and_keep_pictures(runs):
    run = runs / "tdmpc2"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {record["step"] for record in records if record["key"] == "eval/return_mean"}
    for key in ("eval/consistency_error_1", "eval/value_bias", "eval/planner_improvement"):
        assert {record["step"] for record in records if record["key"] == key} == steps
    names = {path.name for path in (run / "pictures").iterdir()}
    assert names == {f"{step:010d}_value_calibration.png" for step in steps}


def test_a_workflow_without_planner_or_model_is_told_so(runs, capsys):
    assert main(["eval", str(runs / "dqn"), "--planner", "off"]) == 2
    text = capsys.readouterr().err
    assert "DQNWorkflow has no planner" in text
    assert "remedy" in text
    assert main(["eval", str(runs / "dqn"), "--dream"]) == 2
    assert "DQNWorkflow has no model to look into" in capsys.readouterr().err
    assert "inspection" not in evaluated(capsys, runs / "dqn", "--episodes", 1)
    assert not (runs / "dqn" / "pictures").exists()


def test_a_run_may_evaluate_with_the_chance_of_training(tmp_path, capsys):
    for explore in ("true", "false"):
        assert main(train("dqn", tmp_path / explore, f"evaluation.explore={explore}")) == 0
    with_chance, without = (
        json.loads((tmp_path / explore / "summary.json").read_text())["last_evaluation"]["returns"]
        for explore in ("true", "false")
    )
    assert with_chance != without
    plain, explored = (evaluated(capsys, tmp_path / "false", *words)["returns"] for words in ((), ("--explore",)))
    assert plain != explored
    assert explored == evaluated(capsys, tmp_path / "true")["returns"]  # as the run itself does, without being asked
