"""rl-lab profile: the parts add up, a slow part is found, counts are right, and a run stays untouched."""

import functools
import json
import shutil
import time
from pathlib import Path

import gymnasium
import pytest
import torch
from torch import nn

from rl_lab.cli import main
from rl_lab.components.stacked import StackedMLP
from rl_lab.components.value_losses import regress
from rl_lab.composition import compose
from rl_lab.core.errors import UserError
from rl_lab.core.phase import Hook, Phase
from rl_lab.data.sources import ReplaySource
from rl_lab.envs.tiny import CartPole
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.recorder import Recorder
from rl_lab.orchestration.stopwatch import Stopwatch
from rl_lab.orchestration.update_cost import Arithmetic, peak_of
from rl_lab.profiling import choose_phase, profile_experiment, profile_run
from rl_lab.workflows.dqn import DQNWorkflow
from tests.reliability.workloads import WORKLOADS, train

SLEEP = 0.003


def words_of(name):
    return [f"experiment={WORKLOADS[name][0]}", *(word for word in WORKLOADS[name][1:] if not word.startswith("--"))]


def profiled(name, *more, cycles=12, **options):
    return profile_experiment(compose([*words_of(name), *more]), cycles=cycles, **options)


def seconds_of(profile, part):
    return sum(line.seconds for line in profile.lines if line.part == part)


@pytest.fixture
def own_experiments(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent / "reliability")


@pytest.mark.parametrize("name", ["dqn", "dqn_prioritized", "ppo_discrete", "ppo_continuous", "tdmpc2"])
def test_the_parts_add_up_to_the_time_that_passed(name):
    profile = profiled(name)
    assert profile.num_cycles == 12
    assert profile.agent_steps > 0
    assert profile.updates > 0
    assert sum(line.seconds for line in profile.lines) == pytest.approx(profile.seconds, rel=1e-6)
    assert profile.lines[-1].part == "other"
    assert all(line.seconds >= 0.0 for line in profile.lines)
    assert profile.lines[-1].seconds < 0.4 * profile.seconds
    assert {"environment", "act", "store", "draw", "gather", "update", "logging"} <= {
        line.part for line in profile.lines
    }
    (update,) = (line for line in profile.lines if line.part == "update")
    assert update.calls == profile.updates
    (cost,) = profile.costs
    assert cost.hook == update.hook
    assert sum(cost.operations.values()) > 1000
    assert 0.0 < cost.floor_seconds < update.seconds / update.calls
    assert profile.memory["host"] > 2**20


def slowed(monkeypatch, owner, method, sleep):
    original = getattr(owner, method)

    @functools.wraps(original)  # the loop reads a hook's signature, and remembers it
    def slow(*arguments, **options):
        time.sleep(sleep)
        return original(*arguments, **options)

    monkeypatch.setattr(owner, method, slow)


@pytest.mark.parametrize(
    ("owner", "method", "part", "sleep"),  # what runs once in a cycle sleeps longer
    [
        (CartPole, "step", "environment", 0.01),
        (DQNWorkflow, "act", "act", 0.01),
        (DQNWorkflow, "update_controller", "update", 0.01),
        (ReplaySource, "draw", "draw", 0.05),
        (ReplaySource, "gather", "gather", 0.02),
        (Recorder, "write", "logging", 0.05),
    ],
)
def test_a_slow_part_is_found(monkeypatch, owner, method, part, sleep):
    slowed(monkeypatch, owner, method, sleep)
    profile = profiled("dqn", "logging.every=1")
    calls = sum(line.calls for line in profile.lines if line.part == part)
    assert calls >= 12
    # Resets count as environment and sums as logging; neither is slow.
    num_slept = {"environment": profile.agent_steps, "logging": profile.num_cycles}.get(part, calls)
    assert seconds_of(profile, part) >= num_slept * sleep * 0.99
    slowest = max(profile.lines, key=lambda line: line.seconds)
    assert slowest.part == part
    assert slowest.seconds > 0.3 * profile.seconds


class SlowWorld(gymnasium.Env):
    """A world of Gymnasium that takes its time."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample() * 0, {}

    def step(self, action):
        time.sleep(SLEEP)
        return self.observation_space.sample() * 0, 1.0, False, False, {}


def test_a_slow_gymnasium_environment_is_the_environments_share():
    gymnasium.register("ProfiledSlow-v0", SlowWorld, max_episode_steps=50)
    try:
        profile = profiled("dqn", "environment.id=ProfiledSlow-v0")
    finally:
        del gymnasium.registry["ProfiledSlow-v0"]
    environment = seconds_of(profile, "environment")
    assert environment >= profile.agent_steps * SLEEP
    assert environment > 0.5 * profile.seconds


def test_time_inside_another_part_counts_once():
    stopwatch = Stopwatch(lambda: "hook")
    inner = stopwatch.timed("inner", lambda: time.sleep(0.02))

    def work():
        time.sleep(0.01)
        inner()
        inner()

    stopwatch.timed("outer", work, "")()
    found = {(line.hook, line.part): line for line in stopwatch.lines()}
    assert found["hook", "inner"].calls == 2
    assert 0.04 <= found["hook", "inner"].seconds < 0.2
    assert 0.01 <= found["", "outer"].seconds < found["hook", "inner"].seconds
    assert sum(line.seconds for line in stopwatch.lines()) <= stopwatch.elapsed()
    with pytest.raises(ZeroDivisionError):
        stopwatch.timed("failing", lambda: 1 / 0)()
    assert stopwatch.calls("failing", "hook") == 1
    stopwatch.reset()
    assert stopwatch.lines() == []


def test_operations_are_those_of_the_formula():
    network = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    with Arithmetic() as counted:
        network(torch.ones(5, 6)).sum().backward()
    forward = 2 * 5 * (6 * 10 + 10 * 3)
    backward = 2 * 5 * (6 * 10 + 2 * 10 * 3)  # no gradient of the inputs is needed
    assert counted.operations == {"float32": forward + backward}
    weights = torch.ones(4, 6, 2, dtype=torch.float64)
    with Arithmetic() as counted:
        torch.baddbmm(torch.zeros(4, 1, 2, dtype=torch.float64), torch.ones(4, 5, 6, dtype=torch.float64), weights)
    assert counted.operations == {"float64": 2 * 4 * 5 * 6 * 2}
    assert peak_of("cpu", "float32", repeats=1) > 1e8


def test_large_products_count_whoever_makes_them():
    rows, critics = 512, StackedMLP(4, 1, (128, 128))
    inner = 4 * 128 + 128 * 128 + 128
    with Arithmetic() as counted:
        regress(critics, torch.ones(rows, 4), torch.zeros(rows))
    # Both members forth, to the weights and to the hidden rows; to those of the last layer with or without a product.
    assert counted.operations["float32"] in [2 * 2 * rows * (2 * inner + 128 * 128 + more) for more in (0, 128)]


def files_of(folder):
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "dqn"
    assert main(train("dqn", folder)) == 0
    return folder


def test_a_finished_run_is_profiled_and_not_touched(run):
    before = files_of(run)
    profile = profile_run(run, cycles=5)
    assert files_of(run) == before
    assert profile.num_cycles == 5
    assert profile.updates > 0
    assert profile.phase == "training"


def test_a_damaged_checkpoint_is_passed_over_and_left_there(run, tmp_path, capsys):
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    newest = sorted((copied / "checkpoints").iterdir())[-1]
    (newest / "components.safetensors").write_bytes(b"")
    before = files_of(copied)
    assert profile_run(copied, cycles=2).updates > 0
    assert files_of(copied) == before
    assert newest.name in capsys.readouterr().err
    shutil.rmtree(copied / "checkpoints")
    assert profile_run(copied, cycles=2).updates > 0  # as it began


def test_what_does_not_fit_is_refused(run):
    with pytest.raises(UserError, match=r"a tensor is"):
        profile_run(run, ["components.q_network.hidden=[9]"], cycles=2)


@pytest.mark.parametrize("name", ["recurrent", "stepping"])
def test_columns_of_act_and_loops_of_ones_own(own_experiments, name):
    profile = profiled(name, allow=["tests"])
    assert profile.updates > 0
    assert sum(line.seconds for line in profile.lines) == pytest.approx(profile.seconds, rel=1e-6)
    parts = {line.part for line in profile.lines}
    assert ("collect_step" if name == "stepping" else "write back") in parts
    assert "environment" in parts


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (None, ("offline", "update_controller")),
        ("random", ("random", "collect")),
        ("look", ("look", "evaluate")),
        ("online", ("online", "collect")),
    ],
)
def test_every_kind_of_phase(own_experiments, phase, expected):
    profile = profiled("curriculum", phase=phase, cycles=2)
    assert (profile.phase, profile.lines[0].hook) == expected
    assert any(line.part == "act" for line in profile.lines) == (expected[1] == "collect")
    assert sum(line.seconds for line in profile.lines) == pytest.approx(profile.seconds, rel=1e-6)


def test_the_phase_is_the_next_one_that_learns_or_the_last_that_did():
    phases = [
        Phase("random", hooks=(Hook("collect"),), duration_cycles=1),
        Phase("first", hooks=(Hook("collect"), Hook("update_a")), duration_cycles=1),
        Phase("second", hooks=(Hook("collect"), Hook("update_a")), duration_cycles=1),
        Phase("look", type="eval_only", hooks=(Hook("evaluate"),)),
    ]
    scheduler = PhaseScheduler(phases)
    found = []
    for index in range(5):
        scheduler.phase_index = index
        found.append(choose_phase(scheduler, None).name)
    assert found == ["first", "first", "second", "second", "second"]
    assert choose_phase(PhaseScheduler(phases[:1]), None).name == "random"
    with pytest.raises(UserError, match="no such phase") as caught:
        choose_phase(scheduler, "secnd")
    assert "second" in str(caught.value)


def test_the_command_prints_one_table_or_one_object(run, capsys):
    assert main(["profile", str(run), "--cycles", "3"]) == 0
    text = capsys.readouterr().out
    assert "phase 'training' on cpu" in text
    assert "3 cycles" in text
    for word in ("environment", "act", "draw", "gather", "update", "logging", "other", "arithmetic floor", "memory"):
        assert word in text
    assert main(["profile", *words_of("dqn")[:1], *words_of("dqn")[1:], "--cycles", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_cycles"] == 3
    assert {line["part"] for line in found["lines"]} >= {"environment", "update"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["dqn_cartpol"], "dqn_cartpole"),
        (["{run}", "gamma"], "is no key=value"),
        (["{empty}"], "this is not a run folder"),
        (["{run}", "--phase", "trainin"], "training"),
        (["{run}", "--cycles", "0"], "--cycles"),
        (["{run}", "workflow.gama=1"], "workflow.gama"),
    ],
)
def test_mistakes_are_told(run, tmp_path, words, text, capsys):
    assert main(["profile", *(word.format(run=run, empty=tmp_path) for word in words)]) == 2
    assert text in capsys.readouterr().err
