"""A run learns from the replay of another one, or from files; stopped and resumed it ends the same."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from rl_lab.build import build_experiment
from rl_lab.checks import check_data_sets
from rl_lab.composition import load_experiment
from rl_lab.core.errors import UserError
from rl_lab.curriculum import Stock
from rl_lab.data.offline import OfflineSource
from rl_lab.envs.make import make_env
from tests.reliability.compare import differences, newest, snapshot
from tests.reliability.workloads import TOY


@pytest.fixture(scope="module")
def collected(reference):
    """A run whose replay is to be learned from."""
    return reference("recurrent")[0]


def tree_digest(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def offline_words(collected, folder):
    return ["train", "data_set", f"buffer.run={collected}", *TOY, f"--run-dir={folder}"]


def test_stopped_and_resumed_in_an_offline_phase(warm, collected, folder):
    before = tree_digest(collected)
    log = folder / "log"
    assert warm.run(offline_words(collected, folder / "whole"), log) == 0, log.read_text()
    for point, signal in ((4, "SIGTERM"), (9, "SIGKILL")):
        words = offline_words(collected, folder / "parts")
        assert warm.run(words, log, ("stop_at", point, signal)) == (75 if signal == "SIGTERM" else -9), log.read_text()
    assert warm.run(offline_words(collected, folder / "parts"), log) == 0, log.read_text()
    assert differences(snapshot(folder / "parts"), snapshot(folder / "whole")) == []
    saved = newest(folder / "whole").state["sources"]["replay"]["written"]
    assert saved["written"].keys() == {"surprise"}
    assert saved["rewritten"].keys() == {"hidden", "half"}
    assert not (folder / "whole" / "replay").exists()  # the data are not copied into the run
    assert tree_digest(collected) == before  # and nobody touches where they come from


def test_the_replay_of_a_run_is_what_it_had_stored(collected):
    composed = composed_with(run=str(collected), batch_size=512, columns=["age"])
    experiment = build_experiment(composed, Path("unwritten"), allow=["tests"])
    data, saved = experiment.sources["data"], newest(collected).state["sources"]["replay"]["ring"]
    experiment.close()
    assert len(data) == saved["size"]
    assert data.num_envs == 3
    batch = data.sample()
    assert batch.extras.keys() == {"age"}
    tail = saved["tail"]
    known = {tuple(row) for row in np.asarray(tail["observations"]).reshape(-1, 4).tolist()}
    assert known & {tuple(row) for row in batch.observations.tolist()}
    one = newest(collected).path
    single = build_experiment(composed_with(run=str(one), batch_size=4), Path("unwritten"), allow=["tests"])
    single.close()
    assert single.sources["data"].digest == data.digest
    assert single.sources["data"].sample().extras == {}
    assert Stock(single.sources).ready("data")  # so that a dry run goes on


def composed_with(environment="tiny/CartPole", hooks=None, kind="offline", **source):
    target = "rl_lab.data.offline.OfflineSource"
    composed = load_experiment("dqn_cartpole", [f"environment.id={environment}"])
    OmegaConf.set_struct(composed, False)
    composed.buffer = None
    composed.buffers = {"data": {"_target_": target, **source}}
    composed.training.phases = [
        {
            "name": "learn",
            "type": kind,
            "buffer": "data",
            "duration_updates": 4,
            "workflow_hooks": hooks or [{"update_controller": 2}],
        }
    ]
    return composed


@pytest.fixture
def file(tmp_path):
    steps = {"observations": np.zeros((9, 4)), "actions": np.zeros(9, int), "rewards": np.ones(9)}
    np.savez(tmp_path / "steps.npz", terminated=np.zeros(9, bool), **steps)
    return str(tmp_path / "steps.npz")


@pytest.mark.parametrize(
    ("changes", "key", "told"),
    [
        ({"environment": "tiny/Pendulum"}, "buffers.data", "observations"),
        ({"environment": "FrozenLake-v1"}, "buffers.data", r"float32 \[16\]"),
        ({"kind": "online", "hooks": ["collect", {"update_controller": 1}]}, "training.phases", "takes nothing in"),
        ({"window": 99}, "buffers.data.window", "window"),
        ({"files": "absent.npz"}, "buffers.data.files", "no such file"),
        ({"columns": ["latents"]}, "buffers.data.files", "lacks 'latents'"),
        ({"capacity": 100}, "buffers.data.capacity", "no argument 'capacity'"),
        ({"files": [], "run": "absent"}, "buffers.data.run", "no checkpoint"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_step(file, changes, key, told):
    composed = composed_with(**{"files": file, "batch_size": 4} | changes)
    with pytest.raises(UserError, match=told) as caught:
        build_experiment(composed, Path("unwritten"))
    assert caught.value.key.startswith(key)


@pytest.mark.parametrize(
    ("shape", "kind", "remedies"),
    [
        ((8, 8, 3), np.uint8, ["move channels first (np.moveaxis"]),
        ((3, 8, 8), np.float64, ["write pictures as uint8 0-255"]),
        ((8, 8, 3), np.float32, ["move channels first", "write pictures as uint8 0-255"]),
        ((3, 9, 9), np.uint8, ["take the environment that the data come from"]),
    ],
)
def test_pictures_that_are_written_otherwise_get_their_remedy(tmp_path, shape, kind, remedies):
    steps = {"observations": np.zeros((9, *shape), kind), "actions": np.zeros(9, int), "rewards": np.ones(9)}
    np.savez(tmp_path / "steps.npz", terminated=np.zeros(9, bool), **steps)
    source = OfflineSource(1, np.random.default_rng(0), "cpu", files=str(tmp_path / "steps.npz"), batch_size=4)
    environments = make_env("tiny/GridWorld", 1)
    with pytest.raises(UserError, match="observations of the data set") as caught:
        check_data_sets({"data": source}, environments, np.zeros((1, 3, 8, 8), np.uint8))
    assert all(remedy in caught.value.remedy for remedy in remedies)


def test_a_damaged_checkpoint_is_left_alone_and_an_older_one_taken(collected, tmp_path):
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(collected, copy)
    checkpoints = sorted((copy / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    sources = checkpoints[-1] / "sources.safetensors"
    sources.write_bytes(sources.read_bytes()[:-1] + b"x")
    before = tree_digest(copy)
    experiment = build_experiment(composed_with(run=str(copy), batch_size=4), Path("unwritten"), allow=["tests"])
    experiment.close()
    assert tree_digest(copy) == before
    with pytest.raises(UserError, match="does not match its digest"):
        build_experiment(composed_with(run=str(checkpoints[-1]), batch_size=4), Path("unwritten"))


def test_a_buffer_of_the_run_is_named_where_there_are_none_of_that_name(collected):
    with pytest.raises(UserError, match="no replay of this name") as caught:
        build_experiment(composed_with(run=str(collected), run_buffer="replya", batch_size=4), Path("unwritten"))
    assert caught.value.key == "buffers.data.run_buffer"
    assert "replay" in str(caught.value)
