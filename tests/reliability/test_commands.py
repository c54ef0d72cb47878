"""REL1: how a run is continued, extended, copied and warm-started, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from rl_lab.orchestration.checkpoint import CheckpointManager
from tests.reliability.compare import differences, flat, newest, records, rings, snapshot
from tests.reliability.workloads import WORKLOADS, train

STOP = ("stop_at", 41, "SIGTERM")


class Lab:
    """Runs commands and keeps what they say."""

    def __init__(self, warm, folder):
        self.warm, self.folder = warm, folder
        self.said = ""

    def __call__(self, words, *setup):
        log = self.folder / "log"
        log.write_text("")
        status = self.warm.run([word for word in words if word != "--quiet"], log, *setup)
        self.said = log.read_text()
        return status


@pytest.fixture
def lab(warm, folder):
    return Lab(warm, folder)


@pytest.fixture(scope="module")
def whole(warm, memory_folder):
    folder = memory_folder / "commands-whole"
    assert warm.run(train("dqn", folder), memory_folder / "commands.log") == 0
    return snapshot(folder)


@pytest.fixture
def stopped(lab, folder):
    run = folder / "stopped"
    assert lab(train("dqn", run), STOP) == 75, lab.said
    return run


def anywhere(folder, *more):
    """The words of a run whose folder the lab chooses."""
    return ["train", *WORKLOADS["dqn"], *more, f"logging.folder={folder}"]


def folders(folder):
    return sorted((folder / "dqn_cartpole").iterdir())


def test_the_same_command_again_continues_and_says_so(lab, folder, whole):
    assert lab(anywhere(folder), STOP) == 75
    assert "stopped; the same command continues it" in lab.said
    (first,) = folders(folder)
    assert lab(anywhere(folder)) == 0
    assert f"continuing the unfinished run {first} (--new starts afresh)" in lab.said
    assert folders(folder) == [first]
    assert differences(snapshot(first), whole) == []
    assert lab(anywhere(folder)) == 0  # it is finished: another one begins
    assert "continuing" not in lab.said
    assert len(folders(folder)) == 2


def test_new_starts_afresh(lab, folder, whole):
    assert lab(anywhere(folder), STOP) == 75
    assert lab([*anywhere(folder), "--new"]) == 0
    first, second = folders(folder)
    assert newest(first).manifest["counters"]["actions"] == 41
    assert differences(snapshot(second), whole) == []


def test_another_configuration_is_another_run(lab, folder):
    assert lab(anywhere(folder), STOP) == 75
    assert lab(anywhere(folder, "experiment.seed=7"), STOP) == 75
    assert "continuing" not in lab.said
    assert len(folders(folder)) == 2


def test_resume_continues(lab, stopped, whole):
    assert lab(["resume", str(stopped)]) == 0
    assert differences(snapshot(stopped), whole) == []


def test_a_finished_run_prints_its_summary_and_is_not_touched(lab, folder):
    run = folder / "run"
    # The last checkpoint of a cycle falls on the last cycle: the evaluation at the end comes after it.
    words = train("dqn", run, "checkpoint.every_steps=1", "evaluation.every=7000")
    assert lab(words) == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    assert any(record["key"] == "eval/return_mean" for record in records(run))
    assert lab(words) == 0
    assert "finished" in lab.said
    assert "320 agent steps" in lab.said
    assert {path: path.read_bytes() for path in before} == before


def test_a_finished_run_whose_summary_was_lost_is_only_summarised(lab, folder):
    run = folder / "run"
    assert lab(train("dqn", run)) == 0
    before = snapshot(run)
    (run / "summary.json").unlink()
    assert lab(train("dqn", run)) == 0
    assert differences(snapshot(run), before) == []


def test_a_run_that_reached_its_return_does_not_go_on(lab, folder):
    run, words = folder / "run", train("dqn", folder / "run", "training.stop_at_return=5")
    assert lab(words) == 0
    before = snapshot(run)
    assert before["summary agent_steps"] < 320
    (run / "summary.json").unlink()
    assert lab(words) == 0
    assert differences(snapshot(run), before) == []


@pytest.mark.parametrize("command", ["train", "resume"])
def test_more_steps_extend_a_finished_run(lab, folder, command):
    run, longer = folder / "run", "training.total_timesteps=480"
    assert lab(train("dqn", run)) == 0
    assert lab(train("dqn", run, longer) if command == "train" else ["resume", str(run), longer]) == 0
    assert lab(train("dqn", folder / "long", longer)) == 0
    extended, direct = newest(run), newest(folder / "long")
    for section in ("components", "optimizers", "workflow_custom", "collector", "phase_state"):
        assert differences(flat(extended.state[section]), flat(direct.state[section])) == []
    assert differences(flat(rings(extended)), flat(rings(direct))) == []
    last = [[r for r in records(folder_) if r["key"] == "eval/return_mean"][-1] for folder_ in (run, folder / "long")]
    assert last[0] == last[1]


def test_resume_path_of_a_run(lab, stopped, whole):
    words = ["train", *WORKLOADS["dqn"], f"training.resume_path={stopped}"]
    assert lab(words) == 0
    assert differences(snapshot(stopped), whole) == []


def test_resume_path_is_relative_to_where_the_user_stands(lab, folder, stopped, whole):
    words = ["train", *WORKLOADS["dqn"], "training.resume_path=stopped"]
    assert lab(words, ("change_folder", str(folder))) == 0
    assert differences(snapshot(stopped), whole) == []


def test_resume_path_of_a_run_with_another_folder_is_refused(lab, folder, stopped):
    assert lab(train("dqn", folder / "other", f"training.resume_path={stopped}")) == 2
    assert "--run-dir" in lab.said
    assert not (folder / "other").exists()


def test_resume_path_of_a_checkpoint_goes_on_from_it_elsewhere(lab, folder, stopped, whole):
    earlier = CheckpointManager(stopped).numbered()[0]
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    words = anywhere(folder / "copies", f"training.resume_path={earlier}")
    assert lab(words, ("stop_at", 60, "SIGTERM")) == 75
    assert lab(words) == 0
    assert "continuing the unfinished run" in lab.said
    (copy,) = folders(folder / "copies")
    assert differences(snapshot(copy), whole) == []
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("path", ["nowhere", "best", "damaged"])
def test_a_resume_path_without_a_run_is_an_error(lab, stopped, path):
    if path == "damaged":
        damaged = newest(stopped).path
        (damaged / "components.json").write_text("{}")
        path = damaged.relative_to(stopped)
    words = ["train", *WORKLOADS["dqn"], f"training.resume_path={stopped / path}"]
    assert lab(words) == 2
    assert str(stopped / path) in lab.said
    assert "remedy" in lab.said
    assert "Traceback" not in lab.said


def test_a_changed_configuration_is_refused_with_the_difference(lab, stopped):
    before = newest(stopped).path.name
    assert lab(train("dqn", stopped, "workflow.gamma=0.5", "buffer.batch_size=16")) == 2
    assert "workflow.gamma: 0.99 -> 0.5" in lab.said
    assert "buffer.batch_size: 8 -> 16" in lab.said
    assert newest(stopped).path.name == before
    assert lab(["resume", str(stopped), "workflow.gamma=0.5"]) == 2
    assert "workflow.gamma: 0.99 -> 0.5" in lab.said


def test_what_only_concerns_the_writing_may_change(lab, stopped, whole):
    assert lab(train("dqn", stopped, "checkpoint.every_steps=17", "logging.tensorboard=true")) == 0
    assert differences(snapshot(stopped), whole) == []
    assert list((stopped / "tensorboard").iterdir())


def test_a_warm_start_takes_the_weights_and_says_what_it_does_not(lab, folder, stopped):
    run = folder / "run"
    words = train("dqn", run, f"training.resume_path={stopped}", "workflow.gamma=0.5", "checkpoint.keep=100")
    assert lab([*words, "--warm-start"], ("stop_at", 30, "SIGTERM")) == 75
    for word in ("weights only", "optimisers", "replay", "counters", "phase", "random streams", "environments"):
        assert word in lab.said
    first, source = CheckpointManager(run).load(run / "checkpoints" / f"{0:010d}"), newest(stopped)
    for section in ("components", "controllers", "workflow_custom"):
        assert differences(flat(first.state[section]), flat(source.state[section])) == []
    assert first.state["counters"]["agent_steps"] == 0
    assert lab([*words, "--warm-start"]) == 0  # it continues, and does not start again
    assert "weights only" not in lab.said
    assert newest(run).manifest["counters"]["agent_steps"] == 320


def test_a_warm_start_needs_a_run_whose_weights_fit(lab, folder, stopped):
    assert lab([*train("dqn", folder / "a"), "--warm-start"]) == 2
    assert "training.resume_path" in lab.said
    words = train("dqn", folder / "b", f"training.resume_path={stopped}", "components.q_network.hidden=[9]")
    assert lab([*words, "--warm-start"]) == 2
    assert "q_network" in lab.said
    assert "Traceback" not in lab.said


def test_the_log_is_cut_back_to_the_checkpoint(lab, folder, whole):
    run = folder / "run"
    assert lab(train("dqn", run, "checkpoint.every_steps=150"), ("stop_at", 60, "SIGKILL")) == -9
    log = run / "metrics.jsonl"
    offset = newest(run).state["run"]["jsonl_offset"]
    assert log.stat().st_size > offset  # there is something to cut
    with open(log, "ab") as file:
        file.write(b'{"ts": 1.0, "step": 9, "key": "rub')
    assert lab(train("dqn", run)) == 0
    assert differences(snapshot(run), whole) == []


@pytest.mark.parametrize("rest", [0, 100])
def test_a_run_whose_log_was_shortened_goes_on_and_says_so(lab, stopped, rest):
    log = stopped / "metrics.jsonl"
    if rest:
        log.write_bytes(log.read_bytes()[:rest])
    else:
        log.unlink()
    assert lab(train("dqn", stopped)) == 0
    assert "records were lost" in lab.said
    assert records(stopped)


@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_another_version_resumes_and_says_that_it_is_not_exact(lab, folder, package):
    run = folder / "run"
    assert lab(train("dqn", run), STOP, ("pretend_version", package, "0.1")) == 75
    assert lab(train("dqn", run)) == 0
    assert f"{package} 0.1 -> " in lab.said
    assert "not bit for bit" in lab.said


def test_threads_come_from_the_manifest(lab, stopped):
    manifest = newest(stopped).manifest
    assert manifest["threads"] == 1
    assert {"torch", "numpy", "gymnasium", "rl-lab", "python"} <= manifest["versions"].keys()
    assert len(manifest["config_hash"]) == 64
    assert manifest["device"] == "cpu"


def test_an_environment_that_does_not_come_back_is_cut_openly(lab, folder):
    run, world = folder / "run", ("forgetful_world",)
    words = train("dqn_gymnasium", run, "environment.id=Forgetful-v0", "training.phases.0.workflow_hooks.0.collect=10")
    assert lab(words, world, ("stop_at", 5, "SIGTERM")) == 75
    running = newest(run).state["collector"]["running_lengths"]
    assert (running > 0).all()
    ring = rings(newest(run))["replay"]
    before = {name: column.copy() for name, column in ring["columns"].items()}
    assert lab(words, world, ("stop_at", 7, "SIGTERM")) == 75
    assert "2 environments did not come back the same: their episodes were cut there" in lab.said
    after = rings(newest(run))["replay"]["columns"]
    num_rows, num_envs = ring["shape"]
    for env, head in enumerate(ring["heads"]):
        last, final, next_first = ((position % num_rows) * num_envs + env for position in (head - 1, head, head + 1))
        assert not before["truncated"][last]
        assert after["truncated"][last]
        assert not after["terminated"][last]
        assert after["is_last"][final]
        assert (after["observations"][final] == before["observations"][final]).all()  # the one that was seen
        assert after["is_first"][next_first]
    assert lab(words, world) == 0


def test_a_checkpoint_has_the_keys_that_the_documents_name(stopped):
    found = newest(stopped)
    assert {"version", "meta", "global_step", "workflow_name", "replay_meta"} <= found.manifest.keys()
    assert {"created_at", "run_id"} <= found.manifest["meta"].keys()
    keys = {"phase_state", "components", "controllers", "optimizers", "workflow_custom", "rng_state"}
    assert keys <= found.state.keys()
    assert all(isinstance(name, str) for name in found.manifest["files"])


def test_a_run_folder_moves(lab, folder, stopped, whole):
    moved = Path(shutil.move(stopped, folder / "elsewhere"))
    assert lab(["resume", str(moved)]) == 0
    assert differences(snapshot(moved), whole) == []


def test_looking_at_an_agent_changes_nothing(lab, stopped):
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    assert lab(["eval", str(stopped), "--episodes=1", "--json"]) == 0
    assert json.loads(lab.said)["episodes"] == 1
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before
    assert torch.get_num_threads() == 1
