"""What a curriculum comes to before it has begun: data sets are full, buffers fill, and what never runs is told."""

import numpy as np
import pytest

from rl_lab.cli import main
from rl_lab.composition import load_experiment
from rl_lab.runs import run_training

OFFLINE = "training.phases=[{name: offline, type: offline, duration_updates: 5, workflow_hooks: [update_controller]}]"


def dry_run(capsys, *words):
    assert main(["train", *words, "--dry-run"]) == 0
    return capsys.readouterr()


@pytest.fixture
def steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "steps.npz",
        observations=rng.random((100, 4)),
        actions=rng.integers(0, 2, 100),
        rewards=np.ones(100),
        terminated=np.arange(100) % 20 == 19,
    )
    return "steps.npz"


def test_a_dry_run_counts_a_data_set_as_full(steps, capsys):
    words = ["dqn_cartpole", "buffer=offline", f"buffer.files={steps}", "buffer.batch_size=8", OFFLINE]
    told = dry_run(capsys, *words)
    assert "in all 0 agent steps, 5 updates" in told.out
    assert told.err == ""


def test_a_dry_run_fills_the_rows_that_buffers_share(capsys):
    shares = "{_target_: rl_lab.data.sources.ReplaySource, shares: replay, batch_size: 8, window: 3, min_size: 64}"
    hooks = "[{collect: 64}, {update_controller: {ratio: 0.5, source: other}}]"
    phase = f"{{name: a, duration_steps: 128, buffer: replay, workflow_hooks: {hooks}}}"
    told = dry_run(capsys, "dqn_cartpole", f"+buffers.other={shares}", f"training.phases=[{phase}]")
    assert "128 agent steps, 32 updates" in told.out
    assert told.err == ""


@pytest.mark.parametrize(
    ("words", "hook", "held"),
    [
        (["dreamer_cartpole", "buffer.min_size=30000", "128"], "update_agent", "128 of min_size 30,000 steps"),
        (["dqn_cartpole", "+buffer.min_size=500", "512"], "update_controller", "448 of min_size 500 steps before"),
        (["dqn_cartpole", "+buffer.min_size=448", "512"], None, ""),
    ],
)
def test_an_update_that_never_runs_is_told(words, hook, held, capsys):
    told = dry_run(capsys, *words[:-1], f"training.total_timesteps={words[-1]}")
    if hook is None:
        assert told.err == ""
    else:
        assert f"warning: {hook} never runs in phase 'training': 'replay' will hold {held}" in told.err
    assert (" 0 updates" in told.out) == (hook is not None)


def test_a_run_begins_with_the_same_words(tmp_path, capsys):
    few = ["training.total_timesteps=64", "buffer.min_size=65", "evaluation.episodes=1", "environment.num_envs=4"]
    assert run_training(load_experiment("dreamer_cartpole", few), run_dir=tmp_path / "run").code == 0
    expected = "warning: update_agent never runs in phase 'training': 'replay' will hold 64 of min_size 65 steps\n"
    assert capsys.readouterr().err == expected
