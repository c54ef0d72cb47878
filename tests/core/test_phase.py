"""Hook and Phase: what is refused at build, with which words, and how a phase reads."""

import dataclasses

import pytest

from rl_lab.core.phase import Hook, Phase, PhaseConfig, PhaseDefinition

COLLECT, EVALUATE, UPDATE = Hook("collect"), Hook("evaluate"), Hook("update_agent")
RATIO = Hook("update_agent", ratio=0.5)


@pytest.mark.parametrize("name", ["collect", "evaluate", "update_agent", "update_world_model", "update_controller"])
def test_the_verbs(name):
    assert Hook(name).is_update == name.startswith("update_")
    assert Hook(name).times == 1


@pytest.mark.parametrize("name", ["train", "Collect", "update", "updates_agent", "", "evaluate_agent"])
def test_other_verbs_are_refused_with_the_valid_ones(name):
    with pytest.raises(ValueError, match=rf"unknown hook '{name}'.*collect, evaluate, .*update_\*"):
        Hook(name)


@pytest.mark.parametrize("times", [0, -3])
def test_times_below_one_are_refused(times):
    with pytest.raises(ValueError, match=rf"'update_agent' has times: {times}.*at least 1"):
        Hook("update_agent", times=times)


@pytest.mark.parametrize("ratio", [0, 0.0, -0.5, float("nan"), float("inf")])
def test_a_ratio_must_be_a_number_above_zero(ratio):
    with pytest.raises(ValueError, match=rf"'update_agent' has ratio: {ratio}.*above 0"):
        Hook("update_agent", ratio=ratio)


@pytest.mark.parametrize("name", ["collect", "evaluate"])
def test_only_updates_take_a_ratio(name):
    with pytest.raises(ValueError, match=rf"'{name}' takes no ratio.*update_\*"):
        Hook(name, ratio=0.5)


def test_times_and_ratio_together_are_refused():
    with pytest.raises(ValueError, match=r"times: 4 and ratio: 0.5.*keep one"):
        Hook("update_agent", times=4, ratio=0.5)


REFUSED = {
    "an unknown type": (
        {"type": "onlin", "hooks": (COLLECT,), "duration_steps": 1},
        r"unknown type 'onlin'; valid types are online, offline, eval_only",
    ),
    "no hooks": ({"hooks": (), "duration_steps": 1}, r"workflow_hooks is empty.*collect, evaluate, update_\*"),
    "no duration": (
        {"hooks": (COLLECT,)},
        r"no duration: give exactly one of duration_steps, duration_updates, duration_cycles",
    ),
    "no duration offline": ({"type": "offline", "hooks": (UPDATE,)}, r"no duration"),
    "two durations": (
        {"hooks": (COLLECT, UPDATE), "duration_steps": 1, "duration_updates": 1},
        r"duration_steps and duration_updates are both given: keep exactly one",
    ),
    "two durations of an evaluation": (
        {"type": "eval_only", "hooks": (EVALUATE,), "duration_cycles": 1, "duration_updates": 2},
        r"duration_updates and duration_cycles",
    ),
    "a duration of zero": ({"hooks": (COLLECT,), "duration_cycles": 0}, r"duration_cycles is 0; it must be at least 1"),
    "a negative duration": ({"hooks": (COLLECT,), "duration_steps": -5}, r"duration_steps is -5"),
    "collect offline": (
        {"type": "offline", "hooks": (COLLECT, UPDATE), "duration_updates": 1},
        r"'collect' does not belong in a phase of type 'offline'; make it online",
    ),
    "collect in an evaluation": (
        {"type": "eval_only", "hooks": (COLLECT, EVALUATE), "duration_cycles": 1},
        r"'collect' does not belong in a phase of type 'eval_only'",
    ),
    "duration_steps offline": (
        {"type": "offline", "hooks": (UPDATE,), "duration_steps": 1},
        r"duration_steps does not fit type 'offline'",
    ),
    "duration_steps in an evaluation": (
        {"type": "eval_only", "hooks": (EVALUATE,), "duration_steps": 1},
        r"duration_steps does not fit type 'eval_only'",
    ),
    "an update in an evaluation": (
        {"type": "eval_only", "hooks": (EVALUATE, UPDATE), "duration_cycles": 1},
        r"eval_only phase may only list 'evaluate', not \['update_agent'\]",
    ),
    "duration_updates without an update": (
        {"hooks": (COLLECT, EVALUATE), "duration_updates": 1},
        r"duration_updates needs an update_\* hook",
    ),
    "duration_updates in an evaluation": (
        {"type": "eval_only", "hooks": (EVALUATE,), "duration_updates": 1},
        r"duration_updates needs an update_\* hook",
    ),
    "duration_steps without collect": (
        {"hooks": (UPDATE,), "duration_steps": 1},
        r"duration_steps needs the hook 'collect'",
    ),
    "a ratio without collect": ({"hooks": (RATIO,), "duration_updates": 1}, r"a ratio .*needs the hook 'collect'"),
    "a ratio offline": ({"type": "offline", "hooks": (RATIO,), "duration_updates": 1}, r"a ratio .*'collect'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_at_build(case):
    keywords, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        Phase("warm-up", **keywords)


@pytest.mark.parametrize(
    "keywords",
    [
        {"hooks": (COLLECT,), "duration_steps": 1},
        {"hooks": (COLLECT, UPDATE, EVALUATE), "buffer": "replay", "duration_updates": 3},
        {"hooks": (COLLECT, RATIO), "duration_cycles": 3},
        {"hooks": (UPDATE,), "duration_updates": 3},
        {"type": "offline", "hooks": (UPDATE, EVALUATE), "duration_updates": 3},
        {"type": "offline", "hooks": (Hook("update_memory", source="sequences"),), "duration_cycles": 3},
        {"type": "eval_only", "hooks": (EVALUATE,)},
        {"type": "eval_only", "hooks": (EVALUATE, EVALUATE), "duration_cycles": 2},
    ],
)
def test_is_accepted(keywords):
    phase = Phase("warm-up", **keywords)
    assert phase.hooks == keywords["hooks"]
    assert phase.type == keywords.get("type", "online")


def test_reads_as_object_and_as_mapping():
    phase = Phase("joint", hooks=(COLLECT,), duration_steps=10, settings={"policy": "random"})
    seen = phase.at(progress=0.25, times=4)
    assert seen["name"] == seen.name == "joint"
    assert seen["type"] == seen.type == "online"
    assert seen["progress"] == seen.progress == 0.25
    assert seen["times"] == seen.times == 4
    assert seen["settings"]["policy"] == "random"
    assert seen.get("name") == "joint"
    assert seen.get("absent") is None
    assert seen.get("absent", 3) == 3
    assert "name" in seen
    assert "absent" not in seen
    assert {"name", "type", "progress", "settings", "times"} <= set(seen)
    assert dict(seen)["duration_steps"] == 10
    assert {**seen}["name"] == "joint"
    assert phase.progress == 0.0


def test_an_unknown_key_is_answered_with_the_valid_ones():
    phase = Phase("joint", hooks=(COLLECT,), duration_steps=10)
    for key in ("progres", "at", "keys"):
        with pytest.raises(KeyError, match=rf"no '{key}'.*name, type, hooks.*progress"):
            phase[key]


def test_is_frozen():
    phase = Phase("joint", hooks=(COLLECT,), duration_steps=10)
    with pytest.raises(dataclasses.FrozenInstanceError):
        phase.progress = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        phase.hooks[0].times = 2
    with pytest.raises(TypeError):
        phase.settings["policy"] = "random"


def test_the_names_of_the_seed():
    assert PhaseConfig is Phase
    assert PhaseDefinition is Phase
