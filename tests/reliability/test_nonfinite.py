"""REL11: a reward, observation, loss, gradient or weight that is not finite is caught within one update."""

import math
import random

import pytest
import torch
from safetensors.torch import load_file

from rl_lab.orchestration.checkpoint import CheckpointManager
from tests.reliability.compare import differences, records, snapshot
from tests.reliability.workloads import train

KINDS = ("reward", "observation", "loss", "gradient", "weight")
VALUES = ("nan", "inf", "-inf")
NAMES = ("dqn", "dqn_prioritized", "ppo_discrete", "ppo_continuous", "stepping")


@pytest.fixture(scope="module")
def whole(warm, memory_folder):
    found = {}

    def run(name):
        if name not in found:
            folder = memory_folder / f"nonfinite-{name}"
            assert warm.run(train(name, folder), memory_folder / "nonfinite.log") == 0
            found[name] = snapshot(folder)
        return found[name]

    return run


def finite(tree):
    if isinstance(tree, dict):
        return all(finite(value) for value in tree.values())
    return not isinstance(tree, torch.Tensor) or bool(torch.isfinite(tree).all())


def assert_checkpoints_finite(run):
    manager = CheckpointManager(run)
    assert manager.numbered()
    for path in manager.numbered():
        state = manager.load(path).state
        for section in ("components", "controllers", "workflow_custom", "optimizers"):
            assert finite(state[section]), f"{path.name}: {section}"


class Poisoned:
    """A run with one bad number in it."""

    def __init__(self, warm, folder, rng, policy, *, name=None, kind=None, always=False):
        self.name, self.kind = name or rng.choice(NAMES), kind or rng.choice(KINDS)
        self.value, after = rng.choice(VALUES), rng.randrange(3, 12)
        self.run, self.log, self.note = folder / "run", folder / "log", folder / "note"
        self.words = [*train(self.name, self.run, f"training.nonfinite={policy}")]
        fault = ("poison", self.kind, self.value, after, str(self.note), always)
        self.status = warm.run(self.words, self.log, fault)
        self.said = self.log.read_text()
        assert "Traceback" not in self.said, self.said
        happened = self.note.read_text().split()
        assert happened[0] == "poisoned"
        self.hooks_after = [hook for hook in happened if hook != "poisoned"]

    def __str__(self):
        return f"{self.value} in a {self.kind} of {self.name}: {self.said}"


def check_stop(warm, folder, whole, rng, **given):
    poisoned = Poisoned(warm, folder, rng, "stop", **given)
    assert poisoned.status == 1, poisoned
    assert not [hook for hook in poisoned.hooks_after if hook.startswith("update_")], poisoned
    (line,) = [line for line in poisoned.said.splitlines() if line.startswith("error: ")]  # NumPy may warn before it
    assert "not finite" in line
    assert_checkpoints_finite(poisoned.run)
    batches = list((poisoned.run / "nonfinite").glob("*.safetensors"))
    if "Its batch is in" in line:
        assert str(batches[0]) in line
        kept = load_file(batches[0])
        assert "/rewards" in kept
        if poisoned.kind in ("reward", "observation"):
            assert not all(finite(tensor) for tensor in kept.values())
    else:
        assert poisoned.kind == "weight"  # found when the run was to be saved
    words = train(poisoned.name, poisoned.run, "training.nonfinite=stop")
    assert warm.run(words, poisoned.log) == 0
    assert differences(snapshot(poisoned.run), whole(poisoned.name)) == []


def check_skip(warm, folder, rng, **given):
    poisoned = Poisoned(warm, folder, rng, "skip", **given)
    assert_checkpoints_finite(poisoned.run)
    if poisoned.kind == "weight":  # no step mends it
        assert poisoned.status == 1, poisoned
        assert "is not finite; the last good checkpoint is intact" in poisoned.said
        return
    assert poisoned.status == 0, poisoned
    assert poisoned.said.count("; skipped") == 1, poisoned
    assert sum(hook.startswith("update_") for hook in poisoned.hooks_after) > 2
    # What was skipped is in no mean; but a toy logs the angle that it sees.
    own = ["workflow/angle"] if poisoned.kind == "observation" else []
    others = [record for record in records(poisoned.run) if not record["key"].startswith("time/")]
    unknown = [record["key"] for record in others if record["value"] is None]
    assert unknown in ([], own), unknown


def check_rollback(warm, folder, rng, **given):
    poisoned = Poisoned(warm, folder, rng, "rollback", **given)
    assert poisoned.status == 0, poisoned
    assert "rolled back to" in poisoned.said
    assert_checkpoints_finite(poisoned.run)
    found = records(poisoned.run)
    steps = [record["tags"]["agent_steps"] for record in found]
    assert steps == sorted(steps)
    assert all(record["key"].startswith("time/") or record["value"] is not None for record in found)


CHECKS = {"stop": check_stop, "skip": check_skip, "rollback": check_rollback}


def check(warm, folder, whole, rng, policy, **given):
    whole = (whole,) if policy == "stop" else ()
    CHECKS[policy](warm, folder, *whole, rng, **given)


@pytest.mark.parametrize("policy", CHECKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dqn", "ppo_discrete"])
def test_every_kind_and_policy(warm, folder, whole, name, kind, policy):
    check(warm, folder, whole, random.Random(f"{name} {kind} {policy}"), policy, name=name, kind=kind)


@pytest.mark.chaos
@pytest.mark.parametrize("block", range(10))
def test_more_of_them(warm, folder, whole, block):
    rng = random.Random(f"chaos {block}")
    for attempt in range(10):
        (folder / str(attempt)).mkdir()
        check(warm, folder / str(attempt), whole, rng, rng.choice([*CHECKS]))


def test_prioritised_replay_never_gets_a_bad_priority(warm, folder, whole):
    check_stop(warm, folder, whole, random.Random(0), name="dqn_prioritized", kind="loss")


def test_a_workflow_that_collects_itself_is_looked_at_too(warm, folder, whole):
    check_stop(warm, folder, whole, random.Random(0), name="stepping", kind="reward")


@pytest.mark.parametrize("seed", [7, 11])  # which put it where loss and gradients stay finite
def test_an_infinite_weight_behind_a_tanh_is_found_after_the_update(warm, folder, whole, seed):
    check_stop(warm, folder, whole, random.Random(seed), name="ppo_continuous", kind="weight")


def test_a_target_network_is_looked_at_too(warm, folder, whole):
    poisoned = Poisoned(warm, folder, random.Random(0), "stop", name="dqn", kind="target")
    assert poisoned.status == 1
    assert_checkpoints_finite(poisoned.run)


def test_a_fault_that_stays_ends_the_rollbacks(warm, folder):
    poisoned = Poisoned(warm, folder, random.Random(0), "rollback", name="dqn", kind="loss", always=True)
    assert poisoned.status == 1
    assert poisoned.said.count("rolled back") >= 1
    assert "not finite" in poisoned.said.splitlines()[-1]
    assert_checkpoints_finite(poisoned.run)


def test_a_fault_that_stays_does_not_fill_the_disk_when_skipped(warm, folder):
    poisoned = Poisoned(warm, folder, random.Random(0), "skip", name="dqn", kind="loss", always=True)
    assert poisoned.status == 0, poisoned
    assert len(list((poisoned.run / "nonfinite").iterdir())) == 10


def test_large_but_finite_numbers_are_no_fault(warm, folder):
    log = folder / "log"
    status = warm.run(train("stepping", folder / "run"), log, ("large_numbers",))
    assert status == 0, log.read_text()
    assert math.isfinite(3e38)


def test_skipping_a_rollout_does_not_learn_twice_from_the_last(warm, folder):
    poisoned = Poisoned(warm, folder, random.Random(3), "skip", name="ppo_discrete", kind="observation")
    place = poisoned.note.read_text().split().index("poisoned")
    after = poisoned.note.read_text().split()[place + 1 : place + 4]
    assert after == ["collect", "collect", "update_controller"]
