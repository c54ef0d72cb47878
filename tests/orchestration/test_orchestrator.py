"""Orchestrator: what a small run leaves in its folder: evaluations, records, the best agent."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from rl_lab.build import build_experiment, fill_dims
from rl_lab.composition import load_experiment
from rl_lab.orchestration import evaluation
from rl_lab.orchestration.checkpoint import CheckpointManager
from rl_lab.orchestration.orchestrator import FINISHED, Orchestrator
from rl_lab.runs import run_training
from rl_lab.workflows.dqn import DQNWorkflow
from tests.orchestration.test_loggers import events_of
from tests.reliability.compare import records

SMALL = (
    "training.total_timesteps=128",
    "environment.num_envs=2",
    "evaluation.every=null",
    "evaluation.episodes=1",
    "logging.tensorboard=false",
    "buffer.min_size=16",
    "buffer.batch_size=8",
    "components.q_network.hidden=[8]",
)


def phase(name, hooks, kind="online", **duration):
    (key, value), *_ = duration.items()
    return f"{{name: {name}, type: {kind}, buffer: replay, {key}: {value}, workflow_hooks: [{hooks}]}}"


def configured(phases, *choices):
    return load_experiment("dqn_cartpole", [*SMALL, f"training.phases=[{', '.join(phases)}]", *choices])


def train(folder, phases, *choices):
    """Run a small agent through phases; return its summary."""
    return run_training(configured(phases, *choices), run_dir=folder, quiet=True).summary


def found(folder, key):
    return [record for record in records(folder) if record["key"] == key]


def test_the_last_agent_is_evaluated_when_a_curriculum_ends_with_updates(tmp_path):
    """Of an offline phase only the updates make another agent."""
    phases = [
        phase("online", "{collect: 16}", duration_steps=64),
        phase("offline", "{update_controller: 4}", "offline", duration_updates=8),
    ]
    train(tmp_path / "run", phases, "evaluation.every=32")
    stands = [(r["tags"]["agent_steps"], r["tags"]["updates"]) for r in found(tmp_path / "run", "eval/return_mean")]
    assert stands == [(32, 0), (64, 0), (64, 8)]
    ended = CheckpointManager(tmp_path / "run").load_latest()
    assert (ended.state["run"]["evaluated_steps"], ended.state["run"]["evaluated_updates"]) == (64, 8)


def test_an_agent_that_was_evaluated_last_is_not_evaluated_again(tmp_path):
    train(tmp_path / "run", [phase("p", "{collect: 16}, update_controller, evaluate", duration_steps=32)])
    assert len(found(tmp_path / "run", "eval/return_mean")) == 1


@pytest.fixture
def chance_decides(monkeypatch):
    """Let every return depend on the generator that is seeded by the number of the evaluation."""
    play = evaluation.play_and_inspect

    def played(collector, *given, **options):
        returns, lengths, inspection = play(collector, *given, **options)
        shift = float(torch.rand((), generator=collector.generator))
        return [value + 1000 * shift for value in returns], lengths, inspection

    monkeypatch.setattr(evaluation, "play_and_inspect", played)


def test_each_of_several_evaluations_is_recorded_and_the_best_agent_is_kept(tmp_path, chance_decides):
    train(tmp_path / "run", [phase("p", "{collect: 16}, update_controller, {evaluate: 4}", duration_steps=96)])
    manager = CheckpointManager(tmp_path / "run")
    history = manager.load_latest().state["evaluation"]["returns"].mean(1).tolist()
    assert len(history) == 12
    assert [record["value"] for record in found(tmp_path / "run", "eval/return_mean")] == history
    best = json.loads((tmp_path / "run/best/manifest.json").read_text())
    assert best["evaluation"]["return_mean"] == max(history)
    assert history.index(max(history)) % 4 < 3  # not the last of its hook
    assert best["counters"]["agent_steps"] == 32 * (1 + history.index(max(history)) // 4)


PHASES = [
    phase("fill", "{collect: 16}", duration_steps=32),
    phase("first", "{update_controller: 2}", "offline", duration_updates=4),
    phase("second", "{update_controller: 2}", "offline", duration_updates=6),
    phase("last", "{collect: 16}, update_controller", duration_steps=64),
]


def losses(folder):
    """Say of every record of the loss: its phase, its step, its counters and its value."""
    return [
        (*[record["tags"][name] for name in ("phase", "agent_steps", "updates")], record["step"], record["value"])
        for record in found(folder, "controller/loss")
    ]


def test_the_metrics_of_a_phase_are_written_under_its_name_when_it_ends(tmp_path):
    train(tmp_path / "rare", PHASES)
    train(tmp_path / "often", PHASES, "logging.every=1")
    rare, often = losses(tmp_path / "rare"), losses(tmp_path / "often")
    assert [entry[:4] for entry in rare] == [("first", 32, 4, 32), ("second", 32, 10, 32), ("last", 96, 12, 96)]
    for name, *_, mean in rare:
        values = [entry[-1] for entry in often if entry[0] == name]
        assert mean == pytest.approx(sum(values) / len(values), rel=1e-6)


def test_a_save_at_every_action_changes_no_record_of_a_phase(tmp_path, monkeypatch):
    train(tmp_path / "whole", PHASES)
    consume = Orchestrator._consume

    def consume_one(self, event):
        consume(self, event)
        self.stop()

    monkeypatch.setattr(Orchestrator, "_consume", consume_one)
    while not train(tmp_path / "stopped", PHASES)["finished"]:
        pass
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def shown(folder, key):
    """Return the steps that TensorBoard shows of a key: a session that starts takes back what came from its step on."""
    (path,) = (folder / "tensorboard").iterdir()
    steps = []
    for event in events_of(path):
        if event.HasField("session_log"):
            steps = [step for step in steps if step < event.step]
        steps += [event.step for value in event.summary.value if value.tag == key]
    return steps


def test_tensorboard_forgets_what_a_rollback_takes_back(tmp_path, monkeypatch):
    update, calls = DQNWorkflow.update_controller, 0

    def broken(self, batch, *, phase):
        nonlocal calls
        calls += 1
        if calls == 7:
            batch.rewards.fill_(float("nan"))
        return update(self, batch, phase=phase)

    monkeypatch.setattr(DQNWorkflow, "update_controller", broken)
    phases = [phase("p", "{collect: 8}, update_controller", duration_steps=160)]
    often = ("logging.every=16", "logging.tensorboard=true", "checkpoint.every_steps=64")
    train(tmp_path, phases, *often, "checkpoint.every_seconds=null", "training.nonfinite=rollback")
    assert calls > 10
    steps = [record["step"] for record in found(tmp_path, "controller/loss")]
    assert steps == sorted(set(steps))
    assert shown(tmp_path, "controller/loss") == steps


@pytest.mark.parametrize(
    "phases",
    [[phase("p", "{collect: 8}", duration_steps=16)], [phase("p", "evaluate", "eval_only", duration_cycles=1)]],
)
def test_a_worker_of_the_evaluation_that_is_lost_is_told(tmp_path, phases):
    """Also when the evaluation is the last thing that a run does."""
    config = configured(phases, "environment.workers=1")
    experiment = build_experiment(fill_dims(config, ()), tmp_path)
    try:
        os.kill(experiment.evaluator.collector.environments.pids[0], signal.SIGKILL)
        orchestrator = experiment.orchestrator(tmp_path)
        assert orchestrator.run() == FINISHED
        (told,) = orchestrator.recorder.warnings
        assert "worker 0" in told
    finally:
        experiment.close()


def test_every_bad_batch_of_a_hook_is_kept(tmp_path, monkeypatch):
    update, calls = DQNWorkflow.update_controller, 0

    def broken(self, batch, *, phase):
        nonlocal calls
        calls += 1
        if calls in (2, 3, 4, 7):
            batch.rewards.fill_(float("nan")).view(-1)[0] = calls
        return update(self, batch, phase=phase)

    monkeypatch.setattr(DQNWorkflow, "update_controller", broken)
    phases = [phase("p", "{collect: 16}, {update_controller: 5}", duration_steps=64)]
    train(tmp_path / "run", phases, "training.nonfinite=skip")
    kept = [float(load_file(path)["/rewards"].flatten()[0]) for path in (tmp_path / "run/nonfinite").iterdir()]
    assert sorted(kept) == [2, 3, 4, 7]
