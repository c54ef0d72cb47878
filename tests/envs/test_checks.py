"""check_environment: what is sound passes, and each broken promise is found under its name."""

import pytest

from rl_lab.core.errors import UserError
from rl_lab.envs.checks import check_environment
from rl_lab.envs.make import WORLDS

from . import toys


def failed(findings):
    return {finding.name for finding in findings if not finding.ok}


@pytest.mark.parametrize("id", [*WORLDS, "CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_sound_environments_pass(id):
    findings = check_environment(id, steps=120)
    assert failed(findings) == set()
    names = [finding.name for finding in findings]
    assert len(names) == len(set(names))
    assert {"spaces", "observations", "determinism", "replay", "row alone", "episodes", "speed", "rendering"} <= {
        *names
    }


@pytest.mark.parametrize("continuous", [False, True])
def test_settings_reach_the_environment(continuous):
    spaces = check_environment("probe/both", steps=5, kwargs={"continuous": continuous})[0]
    assert ("Box" in spaces.detail) == continuous


@pytest.mark.parametrize("env_class", [toys.Toy, toys.Vector])
def test_sound_environments_of_the_user_pass(env_class, register):
    assert failed(check_environment(register(env_class), steps=60)) == set()


@pytest.mark.parametrize(
    ("env_class", "name", "words"),
    [
        (toys.Unseeded, "determinism", "differ"),
        (toys.Unseeded, "replay", "differ"),
        (toys.NotFinite, "observations", "not finite"),
        (toys.Outside, "observations", "outside"),
        (toys.InfiniteReward, "rewards", "not finite"),
        (toys.Shared, "row alone", "differ"),
        (toys.Shared, "reset of one row", "differ"),
        (toys.Remembering, "replay", "rewards differ"),
        (toys.Raising, "stepping", "the motor is off"),
        (toys.WrongShape, "stepping", "raised"),
        (toys.WrongDtype, "gymnasium", "not within the observation space"),
    ],
)
def test_broken_promises_are_found(env_class, name, words, register):
    findings = check_environment(register(env_class), steps=60)
    assert name in failed(findings)
    assert words in next(finding.detail for finding in findings if finding.name == name)


def test_a_promise_kept_is_not_blamed(register):
    assert failed(check_environment(register(toys.InfiniteReward), steps=60)) == {"rewards"}
    assert failed(check_environment(register(toys.Remembering), steps=60)) == {
        "replay",
        "reset of one row",
        "gymnasium",
    }


def test_what_cannot_be_made_is_the_users_error():
    with pytest.raises(UserError, match="no environment of this name"):
        check_environment("tiny/Nothing")
    with pytest.raises(UserError, match="--allow os"):
        check_environment("os:Env-v0")


def test_rendering_is_only_told(register):
    findings = {finding.name: finding for finding in check_environment(register(toys.Vector), steps=5)}
    assert findings["rendering"].ok
    assert findings["rendering"].detail.startswith("no")
    findings = {finding.name: finding for finding in check_environment(register(toys.Toy), steps=5)}
    assert findings["rendering"].detail == "yes: [5, 7, 3]"
