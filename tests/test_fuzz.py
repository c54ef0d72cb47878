"""Three hundred mutated configurations: every one runs three actions, or gets an answer that names a key."""

import copy
import functools
import math
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from rl_lab.build import build_experiment
from rl_lab.composition import compose, config_hash, to_yaml
from rl_lab.core.errors import RunError, UserError
from rl_lab.orchestration.loop import training_loop

NUM_CONFIGURATIONS, NUM_GROUPS = 300, 6
SECONDS = 20  # for one of them
TOY = [
    *("experiment.device=cpu", "environment.num_envs=2", "environment.max_episode_steps=9", "evaluation.episodes=2"),
    *("training.total_timesteps=200", "training.phases.0.workflow_hooks.0.collect=8"),
]
REPLAY = ["buffer.capacity=64", "buffer.min_size=4", "buffer.batch_size=4", "components.q_network.hidden=[8]"]
PPO = ["workflow.num_epochs=2", "workflow.minibatch_size=8"]
SMALL = ["controllers.actor.network.hidden=[8]", "controllers.critic.network.hidden=[8]"]
BASES = {
    "dqn": ["experiment=dqn_cartpole", *TOY, *REPLAY],
    "prioritized": ["experiment=dqn_cartpole", "buffer=prioritized", *TOY, *REPLAY],
    "ppo": ["experiment=ppo_cartpole", *TOY, *PPO, *SMALL],
    "continuous": ["experiment=ppo_pointmass", *TOY, *PPO, *SMALL],
    "pixels": [
        *("experiment=ppo_cartpole", "environment=gridworld", "model=ppo_pixels", *TOY, *PPO, *SMALL),
        *("environment.resize=[8,8]", "controllers.actor.network.channels=[2]"),
    ],
}
# Keys whose value costs time or memory: large is not so large there. Absurd sizes are in test_wrong_input.
SIZES = {
    *("num_envs", "capacity", "batch_size", "hidden", "channels", "resize", "frame_stack", "action_repeat", "episodes"),
    *("collect", "times", "num_epochs", "max_episode_steps", "threads", "latent", "latent_dim", "inputs", "outputs"),
    *("window", "min_size", "action", "observation", "workers", "update_controller", "ratio"),
}
TEXTS = [
    *("online", "offline", "eval_only", "collect", "evaluate", "update_controller", "update_world_model", "replay"),
    *(
        "dqn",
        "cartpole",
        "running",
        "whole",
        "relu",
        "orthogonal",
        "agent_steps",
        "cuda",
        "cpu",
        "auto",
        "tiny/Pendulum",
    ),
    *("CartPole-v1", "tiny/GridWorld", "", " ", "é", "a" * 300, "null", "1", "random", "actor", "../x", "a:b"),
]
TARGETS = [
    *("rl_lab.components.nets.MLP", "rl_lab.components.nets.DuelingMLP", "rl_lab.components.nets.ConvNet"),
    *("rl_lab.components.controllers.actors.GaussianActor", "rl_lab.components.controllers.random.RandomPolicy"),
    *("rl_lab.components.controllers.critics.ValueCritic", "rl_lab.components.representation.identity.Identity"),
    *("rl_lab.data.sources.StreamSource", "rl_lab.data.sources.ReplaySource", "rl_lab.core.schedules.Cosine"),
    *("rl_lab.data.prioritized.PrioritizedReplaySource", "rl_lab.core.schedules.Exponential", "torch.nn.Linear"),
    *("torch.optim.SGD", "torch.optim.RMSprop", "torch.optim.LBFGS", "torch.optim.Adadelta", "torch.nn.ReLU"),
    *("rl_lab.workflows.dqn.DQNWorkflow", "rl_lab.workflows.ppo.PPOWorkflow", "rl_lab.components.returns.gae"),
    *("os.system", "torch.load", "rl_lab", "", "torch.nn.functional.relu", "rl_lab.components.nets.build_mlp"),
]
FAMILIES = [  # texts that can often stand for each other
    ["tanh", "relu", "elu", "silu", "gelu"],
    ["whole", "running"],
    ["agent_steps", "updates"],
    ["torch", "orthogonal"],
    ["cpu", "auto", "device"],
    ["stop", "skip", "rollback"],
    ["tiny/CartPole", "CartPole-v1", "tiny/CartPoleSwingUp", "tiny/PointMass", "Pendulum-v1", "probe/both"],
    [f"rl_lab.core.schedules.{name}" for name in ("Constant", "Linear", "Exponential", "Cosine")],
    [
        f"torch.optim.{name}"
        for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop")
    ],
    ["rl_lab.components.nets.MLP", "rl_lab.components.nets.DuelingMLP"],
    ["rl_lab.data.sources.ReplaySource", "rl_lab.data.prioritized.PrioritizedReplaySource"],
]
INTERPOLATIONS = [
    "${nothing}",
    "${",
    "${add:1,x}",
    "${training}",
    "${.}",
    "${add:1, 2}",
    "${_dims.action}",
    "$${x}",
    "${a:",
]
PHASES = [
    {"name": "more", "workflow_hooks": ["collect"], "duration_cycles": 1},
    {"name": "warm", "workflow_hooks": [{"collect": 4}], "duration_steps": 8, "settings": {"policy": "random"}},
    {"name": "off", "type": "offline", "workflow_hooks": ["update_controller"], "duration_updates": 2},
    {"name": "test", "type": "eval_only", "workflow_hooks": ["evaluate"]},
    {"name": "idle", "workflow_hooks": [{"update_controller": {"ratio": 0.5}}], "duration_cycles": 2},
    {"name": "long", "workflow_hooks": ["collect", {"update_controller": 3}, "evaluate"], "duration_updates": 4},
    {"workflow_hooks": []},
    "collect",
    None,
]


@functools.cache
def base(name: str) -> dict[str, Any]:
    plain = OmegaConf.to_container(compose(BASES[name]), resolve=False)
    assert isinstance(plain, dict)
    return plain


def places(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of every value below the root."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


def at(tree: Any, path: tuple) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def large(path: tuple) -> int:
    return 40 if SIZES & {str(key) for key in path} else 10**12


def another_value(chance: random.Random, value: Any, path: tuple) -> Any:
    """Return something else in the place of a value: a wrong type, a wrong number, another text."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    choices: list[Any] = [None, True, "text", [], {}, [1, "a"], {"a": 1}, 0, -1, 0.5, *chance.sample(INTERPOLATIONS, 3)]
    if number:
        choices += [-value, value + 1, value / 3, large(path), -large(path), math.nan, math.inf, str(value), 1e-30, 2.0]
    if isinstance(value, str):
        choices += [value[:-1], value + "x", value.upper(), *chance.sample(TEXTS, 6)]
        choices += chance.sample(TARGETS, 8) if path[-1] == "_target_" else []
    if isinstance(value, list):
        choices += [value * 2, value[:-1], value[::-1], [value], {str(i): entry for i, entry in enumerate(value)}]
    if isinstance(value, dict):
        choices += [
            list(value),
            list(value.values()),
            {**value, "extra": 1},
            {**value, "_target_": chance.choice(TARGETS)},
        ]
    return copy.deepcopy(chance.choice(choices))


def nudged(chance: random.Random, value: Any, path: tuple) -> Any:
    """Return a value of the same kind that may well be right."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice([value + 1, max(value - 1, 0), min(value * 2, large(path)), value // 2, 1, float(value)])
    if isinstance(value, float):
        return chance.choice([value / 2, value * 2, 0.0, 1.0, 1e-3, 1.0 - value])
    if value is None:
        return chance.choice([1, 5, 0.5, 20.0])
    family = [texts for texts in FAMILIES if value in texts]
    return chance.choice(family[0]) if family else another_value(chance, value, path)


def mutate(chance: random.Random, tree: dict[str, Any]) -> str:
    """Change one thing in place and say what."""
    path = chance.choice(list(places(tree)))
    parent, key = at(tree, path[:-1]), path[-1]
    kind = chance.choice([*["nudge"] * 7, *["value"] * 3, "rename", "delete", "add", "swap", "phase", "copy"])
    if kind == "nudge":
        leaves = [place for place in places(tree) if not isinstance(at(tree, place), (dict, list))]
        path = chance.choice(leaves)
        at(tree, path[:-1])[path[-1]] = nudged(chance, at(tree, path), path)
        return f"{path} = {at(tree, path)!r}"
    if kind == "phase":
        phases = tree.get("training", {}).get("phases") if isinstance(tree.get("training"), dict) else None
        if isinstance(phases, list):
            phase = copy.deepcopy(chance.choice(PHASES))
            phases.insert(chance.randint(0, len(phases)), phase)
            return f"phase {phase}"
        kind = "value"
    if kind == "rename" and isinstance(parent, dict):
        text = str(key)
        cut = chance.randrange(len(text) or 1)
        name = chance.choice([text[:cut] + text[cut + 1 :], text + "_", text.upper(), "other"])
        parent[name] = parent.pop(key)
        return f"rename {path} to {name}"
    if kind == "delete":
        del parent[key]
        return f"delete {path}"
    if kind == "add" and isinstance(parent, dict):
        name = chance.choice(
            ["extra", "seed", "_target_", "name", "lr", "shares", "trains", "window", "_partial_", "1"]
        )
        parent[name] = another_value(chance, 1, (*path[:-1], name))
        return f"add {(*path[:-1], name)} = {parent[name]!r}"
    if kind in ("swap", "copy"):
        other = chance.choice(list(places(tree)))
        if other[: len(path)] != path and path[: len(other)] != other:
            values = at(tree, path), at(tree, other)
            sizes = {str(name) for name in (*path, *other)} & SIZES
            if not (sizes and any(isinstance(v, (int, float)) and v > 40 for v in values)):
                parent[key] = copy.deepcopy(values[1])
                if kind == "swap":
                    at(tree, other[:-1])[other[-1]] = values[0]
                return f"{kind} {path} and {other}"
    parent[key] = another_value(chance, at(tree, path), path)
    return f"{path} = {parent[key]!r}"


def mutated(seed: int) -> tuple[list[str], dict[str, Any]]:
    chance = random.Random(seed)
    tree = copy.deepcopy(base(list(BASES)[seed % len(BASES)]))
    steps = [list(BASES)[seed % len(BASES)]]
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        steps.append(mutate(chance, tree))
    return steps, tree


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def late(number, frame):
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(tree: dict[str, Any]) -> str:
    """Build and take three actions; return 'ran' or 'refused'. Any exception but the user's mistake passes through."""
    try:
        composed = OmegaConf.create(tree)
    except Exception:  # what YAML and Hydra would not have let through either
        return "unwritable"
    try:
        experiment = build_experiment(composed, Path("unwritten"))
        config_hash(composed)
        to_yaml(composed)
        try:
            loop = training_loop(
                experiment.workflow,
                experiment.scheduler,
                experiment.collector,
                experiment.sources,
                experiment.evaluator,
            )
            for event in islice(loop, 3):
                assert event.steps or event.updates or event.hook == "evaluate"
        finally:
            experiment.close()
    except UserError as error:
        refusal = error
    except RunError as error:  # numbers that blow up are found out by running, and named
        return "diverged" if "not finite" in str(error) else f"stopped: {error}"
    else:
        return "ran"
    finally:
        torch.set_num_threads(1)
    assert refusal.key, f"no key is named: {refusal}"
    assert refusal.key in str(refusal)
    assert refusal.remedy, f"no remedy is named: {refusal}"
    assert len(str(refusal)) < 3000, "that is more than one screen"
    return "refused"


@pytest.mark.parametrize("name", BASES)
def test_the_bases_run(name):
    assert outcome(copy.deepcopy(base(name))) == "ran"


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_mutated_configurations_run_or_are_refused(group, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    counts: dict[str, int] = {}
    wrong = []
    for seed in range(group, NUM_CONFIGURATIONS, NUM_GROUPS):
        steps, tree = mutated(seed)
        try:
            with limited(SECONDS):
                answer = outcome(tree)
        except Exception as error:
            wrong.append(f"seed {seed}: {steps}: {type(error).__name__}: {error}")
        else:
            counts[answer] = counts.get(answer, 0) + 1
    assert not wrong, "\n".join(wrong)
    assert counts["ran"] >= 10, counts  # the mutations are not all of one kind
    assert counts["refused"] >= 15, counts
    assert sum(counts.values()) - counts["ran"] - counts["refused"] <= 5, counts
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("name", ["dqn", "prioritized", "ppo"])
def test_numbers_that_blow_up_are_named(name):
    tree = copy.deepcopy(base(name))
    tree["optimizers"]["agent"]["learning_rate"] = 1e30
    tree["training"]["phases"][0]["workflow_hooks"] = [{"collect": 8}, {"update_controller": 30}]
    assert outcome(tree) == "diverged"


def test_mutations_are_the_same_every_time():
    assert mutated(7)[0] == mutated(7)[0]
    assert len({str(mutated(seed)) for seed in range(NUM_CONFIGURATIONS)}) > 0.95 * NUM_CONFIGURATIONS


def test_a_hang_would_be_noticed():
    with pytest.raises(TimeoutError), limited(0.01):
        signal.pause()
