"""Configuration: every shipped experiment and every group file composes, binds, dry-runs and runs."""

import functools
import inspect
import json
import re
import runpy
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf

import rl_lab
from rl_lab.build import build_experiment
from rl_lab.cli import main
from rl_lab.composition import as_overrides, compose, config_hash, load_experiment, override, parse_config, resolve
from rl_lab.config import PACKAGE_CONFIGS
from rl_lab.core.errors import UserError
from rl_lab.environment import fill_dims
from rl_lab.orchestration.loop import training_loop
from rl_lab.runs import resume_run, run_training
from rl_lab.targets import resolve_target

ROOT = Path(__file__).parents[1]
EXPERIMENTS = sorted(path.stem for path in (PACKAGE_CONFIGS / "experiment").glob("*.yaml"))
GROUP_FILES = sorted(
    path.relative_to(PACKAGE_CONFIGS).with_suffix("").as_posix()
    for path in PACKAGE_CONFIGS.rglob("*.yaml")
    if path.parent not in (PACKAGE_CONFIGS, PACKAGE_CONFIGS / "experiment")
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def filled_or_skip(composed: DictConfig) -> DictConfig:
    """Fill the dimensions in; skip where the environment needs an extra that is not here, and say which."""
    try:
        return fill_dims(composed)
    except UserError as error:
        if "pip install" not in str(error.remedy):
            raise
        pytest.skip(str(error.remedy))


@functools.cache
def shipped(name: str) -> DictConfig:
    """Compose a shipped experiment and fill it in, once for all tests that only read it."""
    filled = filled_or_skip(load_experiment(name))
    OmegaConf.set_readonly(filled, True)
    return filled


@pytest.fixture(params=EXPERIMENTS)
def name(request) -> str:
    """Return each experiment whose environment can be made here."""
    shipped(request.param)
    return request.param


def nodes(tree: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every mapping with a `_target_`, at any depth."""
    if isinstance(tree, Mapping):
        if "_target_" in tree:
            yield tree
        for value in tree.values():
            yield from nodes(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from nodes(value)


def toy(name: str, cycles: int = 3) -> DictConfig:
    """Compose an experiment at toy size: the same parts and hooks, small networks, few steps, a few cycles."""
    config = load_experiment(
        name, ["environment.num_envs=2", "evaluation.episodes=2", "environment.max_episode_steps=20"]
    )
    config.experiment.device = "cpu"
    for phase in config.training.phases:
        for duration in ("duration_steps", "duration_updates", "duration_cycles"):
            phase.pop(duration, None)
        phase.duration_cycles = cycles
        phase.workflow_hooks = [few_times(hook) for hook in phase.workflow_hooks]
    for node in nodes_of_config(config):
        for key in node:
            if str(key).endswith("hidden") and not OmegaConf.is_interpolation(node, key):
                node[key] = [16] * len(node[key])
        if "latent" in node:
            node.latent = 16
        if "deter" in node and "features" in node:
            sizes = {"deter": 16, "units": 8, "head_units": 8, "depth": 4, "stoch": 8, "variables": 2, "classes": 4}
            node.update({key: value for key, value in sizes.items() if key in node})
        if node.get("mode") == "running":
            node.window = 5
        if "planners" in str(node.get("_target_")):
            small = {"num_samples": 32, "num_elites": 4, "num_iterations": 1, "num_simulations": 4}
            known = inspect.signature(resolve_target({"_target_": node._target_}, "planner")).parameters
            node.update({key: value for key, value in small.items() if key in known})
        if "min_size" in node:
            node.min_size, node.capacity, node.batch_size = 4, 64, 4
    return config


def few_times(hook: str | Mapping[str, Any]) -> Any:
    """Return a hook that collects eight steps, or updates a few times in a row at most."""
    if isinstance(hook, str):
        return {"collect": 8} if hook == "collect" else hook
    return {key: 8 if key == "collect" else min(how, 5) if isinstance(how, int) else how for key, how in hook.items()}


def nodes_of_config(tree: Any) -> Iterator[DictConfig]:
    if isinstance(tree, DictConfig):
        yield tree
        for key in tree:
            if not OmegaConf.is_missing(tree, key) and not OmegaConf.is_interpolation(tree, key):
                yield from nodes_of_config(tree[key])


def test_there_is_something_to_test():
    assert {"dqn_cartpole", "ppo_cartpole", "ppo_pendulum"} <= set(EXPERIMENTS)
    assert {"workflow/dqn", "components/q_network/mlp", "buffer/replay", "model/ppo_pixels"} <= set(GROUP_FILES)


def test_experiment_composes_resolves_validates_and_binds(name):
    filled = shipped(name)
    config = parse_config(filled)
    assert config.experiment.name.partition("_")[0] == name.partition("_")[0]
    assert "???" not in yaml.safe_dump(resolve(filled))
    found = list(nodes(resolve(filled)))
    # a workflow, a network, an optimiser, a buffer; where nothing is learned: a workflow, a model, a planner
    assert len(found) >= (4 if resolve_target(config.workflow, "workflow").hooks() else 3)
    for node in found:
        target = resolve_target(node, "node")
        arguments = {key: value for key, value in node.items() if not key.startswith("_")}
        inspect.signature(target).bind_partial(**arguments)


def test_experiment_dry_runs_quickly(name, elsewhere, capsys):
    words = ["train", name, "training.total_timesteps=5000", "--dry-run"]
    ours = shipped(name).environment.id.startswith("tiny/")  # other worlds may take long to make
    if ours:
        main(words)  # whatever is slow once per process
    start = time.process_time()
    capsys.readouterr()
    assert main(words) == 0
    assert time.process_time() - start < (1.0 if ours else 10.0)
    text = capsys.readouterr().out
    assert "collect" in text
    assert re.search(r"in all [\d,]+ agent steps, [\d,]+ updates, [\d,]+ actions", text)
    # The simulator writes its own warnings there.
    assert [path for path in elsewhere.iterdir() if path.name != "MUJOCO_LOG.TXT"] == []


def test_experiment_runs_three_cycles(name, elsewhere):
    composed = toy(name)
    config = parse_config(fill_dims(composed))
    outcome = run_training(composed, run_dir=elsewhere / "run", quiet=True)
    assert outcome.code == 0
    summary = json.loads((elsewhere / "run" / "summary.json").read_text())
    assert summary["finished"]
    online = [phase for phase in config.phases() if phase.type == "online"]
    assert summary["agent_steps"] == 3 * 8 * 2 * len(online)
    assert len(summary["last_evaluation"]["returns"]) == 2
    if not resolve_target(config.workflow, "workflow").hooks():
        assert summary["updates"] == 0  # nothing is learned
        return
    assert summary["updates"] > 0
    metrics = [json.loads(line) for line in (elsewhere / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["value"] for record in metrics if record["key"].endswith("loss")]
    assert losses
    assert all(abs(loss) < 1e9 for loss in losses)


def test_experiment_says_what_it_is(name):
    lines = (PACKAGE_CONFIGS / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith("# ")


def test_off_policy_experiments_update_by_ratio(name):
    """So that the number of environments does not silently change the algorithm."""
    config = parse_config(shipped(name))
    phases = config.phases()
    workflow = resolve_target(config.workflow, "workflow")
    if workflow.hooks() and not workflow.on_policy:
        updates = [hook for phase in phases if phase.type == "online" for hook in phase.hooks if hook.is_update]
        assert updates
        assert all(hook.ratio is not None for hook in updates)
    if len(phases) == 1:
        assert phases[0].duration_steps == config.training.total_timesteps


DIMS = {"observation": 4, "action": 2, "latent": 6}
IMAGE = [3, 16, 16]


@pytest.mark.parametrize("path", [path for path in GROUP_FILES if not path.startswith("model/")])
def test_every_group_file_can_be_built(path):
    text = (PACKAGE_CONFIGS / f"{path}.yaml").read_text()
    node = OmegaConf.create({"node": yaml.safe_load(text), "environment": yaml.safe_load(text)})
    node._dims = DIMS | {"observation": IMAGE if "conv" in path else {"a": 3, "b": IMAGE} if "dict" in path else 4}
    node.algorithm = {"encoder_hidden": [8], "simplex": 3}
    plain = resolve(node)["node"]
    if path.startswith("environment/"):
        composed = compose(["experiment=ppo_cartpole", f"environment={path.partition('/')[2]}"])
        assert filled_or_skip(composed)._dims.observation
    elif path.startswith("workflow/"):
        assert issubclass(resolve_target(plain, "workflow"), rl_lab.Workflow)
    else:
        import numpy as np

        from rl_lab.instantiate import instantiate

        if "files" in plain:
            plain["files"] = "steps.npz"
            np.savez("steps.npz", **{name: np.zeros(3) for name in ("observations", "actions", "rewards", "dones")})
        given = {"num_envs": 2, "generator": np.random.default_rng(0), "device": "cpu"}
        built = instantiate(plain, "node", given=given)
        assert isinstance(built, torch.nn.Module) or any(hasattr(built, verb) for verb in ("gather", "plan", "step"))


@pytest.mark.parametrize(
    ("model", "environment"),
    [("ppo_discrete", "cartpole"), ("ppo_continuous", "pendulum"), ("ppo_pixels", "gridworld")],
)
def test_models_can_be_chosen(model, environment):
    composed = compose(["experiment=ppo_cartpole", f"model={model}", f"environment={environment}"])
    build_experiment(composed, Path("unwritten")).close()


def test_every_group_file_can_be_chosen_in_an_experiment():
    """Several at once, because composing takes a tenth of a second."""
    groups: dict[str, list[str]] = {}
    for path in GROUP_FILES:
        group, _, choice = path.rpartition("/")
        groups.setdefault(group, []).append(choice)
    for turn in range(max(map(len, groups.values()))):
        overrides = ["experiment=ppo_cartpole"]
        for group, choices in groups.items():
            key = {"controller": "+controller@controllers.x"}.get(group, f"+{group}" if "/" in group else group)
            if group == "components/encoder" and groups["model"][turn % len(groups["model"])].startswith("tdmpc2"):
                key = "components/encoder@components.encoder"  # these models have an encoder that is replaced
            overrides.append(f"{key}={choices[turn % len(choices)]}")
        composed = compose(overrides)
        assert composed.environment.id
        assert composed.controllers.x._target_
        assert composed.components.encoder._target_


def printed(words: list[str], capsys) -> dict[str, Any]:
    assert main(["train", *words]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_cfg_job_prints_what_was_composed(capsys, elsewhere):
    plain = printed(["+experiment=dqn_cartpole", "experiment.seed=7", "--cfg", "job"], capsys)
    assert plain["experiment"] == {"name": "dqn_cartpole", "seed": 7, "device": "auto"}
    assert plain["buffer"]["window"] == "${algorithm.n_step}"
    assert plain["_dims"]["observation"] == "???"
    assert "hydra" not in plain
    assert "defaults" not in plain
    assert list(elsewhere.iterdir()) == []


def test_cfg_job_of_a_package(capsys):
    whole = printed(["experiment=dqn_cartpole", "--cfg", "job"], capsys)
    assert printed(["experiment=dqn_cartpole", "--cfg", "job", "--package", "_global_"], capsys) == whole
    assert (
        printed(["experiment=dqn_cartpole", "--cfg", "job", "--package", "training.phases"], capsys)
        == (whole["training"]["phases"])
    )
    assert main(["train", "dqn_cartpole", "--cfg", "job", "--package", "trainin"]) == 2
    assert "nearest:  training" in capsys.readouterr().err


def test_cfg_job_resolved(capsys):
    plain = printed(["dqn_cartpole", "algorithm.n_step=5", "--cfg", "job", "--resolve"], capsys)
    assert plain["buffer"]["window"] == 5
    assert plain["_dims"] == {"observation": 4, "action": 2}
    assert plain["components"]["q_network"]["inputs"] == 4
    assert "${" not in yaml.safe_dump(plain)


def test_the_script_prints_configurations_too(elsewhere, capsys, monkeypatch):
    script = str(ROOT / "scripts" / "train.py")
    for words in (["--cfg", "job"], ["--cfg", "job", "--package", "_global_"], ["--cfg", "job", "--resolve"]):
        monkeypatch.setattr(sys, "argv", [script, "+experiment=ppo_cartpole", *words])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(script, run_name="__main__")
        assert left.value.code == 0
        assert yaml.safe_load(capsys.readouterr().out)["experiment"]["name"] == "ppo_cartpole"
    assert list(elsewhere.iterdir()) == []  # no outputs/, no change of directory


def test_the_plus_before_experiment_may_be_left_out():
    assert compose(["+experiment=ppo_cartpole"]) == compose(["experiment=ppo_cartpole"])


def test_the_experiment_beats_the_root_and_overrides_beat_the_experiment():
    assert compose(["experiment=dqn_cartpole"]).evaluation.every == 5000  # the root says 10000
    assert compose(["experiment=dqn_cartpole", "evaluation.every=7"]).evaluation.every == 7
    assert compose(["evaluation.every=7", "experiment=dqn_cartpole"]).evaluation.every == 7


def test_own_configs_are_searched_first(elsewhere, capsys):
    folder = elsewhere / "configs"
    (folder / "experiment").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n# Mine.\ndefaults:\n  - ppo_cartpole\n  - _self_\nexperiment:\n  name: mine\n"
    )
    (folder / "environment" / "cartpole.yaml").write_text("id: tiny/CartPole\nmax_episode_steps: 11\n")
    plain = printed(["mine", "--cfg", "job"], capsys)
    assert plain["experiment"]["name"] == "mine"
    assert plain["environment"]["max_episode_steps"] == 11  # hides the package's own
    assert plain["workflow"]["_target_"] == "rl_lab.workflows.ppo.PPOWorkflow"
    assert compose(["experiment=dqn_cartpole"]).environment.max_episode_steps == 11
    assert main(["train", "min", "--cfg", "job"]) == 2
    assert "mine" in capsys.readouterr().err


def test_a_broken_file_of_the_user_is_named(elsewhere):
    folder = elsewhere / "configs" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - nothing_such\n  - _self_\n")
    with pytest.raises(UserError, match="nothing_such") as caught:
        compose(["experiment=mine"])
    assert caught.value.key
    (folder / "mine.yaml").write_text("# @package _global_\nexperiment:\n  name: ${\n")
    with pytest.raises(UserError) as caught:
        compose(["experiment=mine"])
    assert caught.value.key
    assert caught.value.remedy
    (folder / "mine.yaml").write_text("a: [1\nb: 2")
    with pytest.raises(UserError, match=r"mine\.yaml") as caught:
        compose(["experiment=mine"])
    assert "line 2" in str(caught.value)


def test_add_takes_any_number_of_terms_and_spaces():
    config = OmegaConf.create({"x": 3, "a": "${add:1, 2}", "b": "${add:${x},${a} , 10}", "c": "${add: 0.5,1}"})
    assert resolve(config) == {"x": 3, "a": 3, "b": 16, "c": 1.5}


@pytest.mark.parametrize(
    ("environment", "observation", "action"),
    [
        ("tiny/CartPole", 4, 2),
        ("tiny/GridWorld", [3, 32, 32], 4),
        ("tiny/Pendulum", 3, 1),
        ("tiny/PointMass", 4, 2),
        ("FrozenLake-v1", 16, 4),
        ("Pendulum-v1", 3, 1),
    ],
)
def test_dims_are_filled_from_the_environment(environment, observation, action):
    filled = fill_dims(compose(["experiment=ppo_cartpole", f"environment.id={environment}"]))
    assert OmegaConf.to_container(filled._dims) == {"observation": observation, "action": action}
    assert OmegaConf.is_missing(compose(["experiment=ppo_cartpole"])._dims, "observation")


def test_dims_of_a_dict_and_of_wrappers(dict_environment):
    filled = fill_dims(compose(["experiment=ppo_cartpole", f"environment.id={dict_environment}"]))
    assert OmegaConf.to_container(filled._dims)["observation"] == {"camera": [3, 8, 8], "speed": 2}
    stacked = compose(["experiment=ppo_cartpole", "environment=gridworld", "environment.frame_stack=3"])
    assert list(fill_dims(stacked)._dims.observation) == [9, 32, 32]
    resized = compose(["experiment=ppo_cartpole", "environment=gridworld", "environment.resize=[12,10]"])
    assert list(fill_dims(resized)._dims.observation) == [3, 12, 10]


def test_a_dict_of_observations_runs(dict_environment, elsewhere):
    composed = compose(["experiment=dqn_cartpole", f"environment.id={dict_environment}"])
    composed.components.q_network = {
        "_target_": "rl_lab.components.representation.encoders.DictEncoder",
        "input_dim": "${_dims.observation}",
        "latent_dim": "${_dims.action}",
        "channels": [8, 8],
        "kernels": [3, 3],
    }
    composed.buffer.min_size = 4
    composed.training.total_timesteps = 128
    composed.evaluation.episodes = 1
    outcome = run_training(composed, run_dir=elsewhere / "run", quiet=True)
    assert outcome.summary["updates"] > 0


@pytest.fixture
def dict_environment():
    import gymnasium
    import numpy as np
    from gymnasium import spaces

    class Room(gymnasium.Env):
        observation_space = spaces.Dict(
            {"camera": spaces.Box(0, 255, (8, 8, 3), np.uint8), "speed": spaces.Box(-1.0, 1.0, (2,), np.float32)}
        )
        action_space = spaces.Discrete(3)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.time = 0
            return self._look(), {}

        def step(self, action):
            self.time += 1
            return self._look(), float(action == 1), self.time >= 7, False, {}

        def _look(self):
            return {
                "camera": self.np_random.integers(0, 255, (8, 8, 3), np.uint8),
                "speed": np.zeros(2, np.float32),
            }

    gymnasium.register("TestRoom-v0", entry_point=Room)
    yield "TestRoom-v0"
    del gymnasium.registry["TestRoom-v0"]


def test_a_stated_dimension_must_agree():
    agreeing = compose(["experiment=ppo_cartpole", "_dims.observation=4", "_dims.action=2"])
    assert fill_dims(agreeing)._dims.observation == 4
    with pytest.raises(UserError, match="has action 2, not 3") as caught:
        fill_dims(compose(["experiment=ppo_cartpole", "_dims.action=3"]))
    assert caught.value.key == "_dims.action"
    with pytest.raises(UserError, match=r"has observation \[3, 32, 32\], not 4"):
        fill_dims(compose(["experiment=ppo_cartpole", "environment=gridworld", "_dims.observation=4"]))


def test_integral_floats_are_integers():
    composed = compose(["experiment=dqn_cartpole", "training.total_timesteps=1e5", "buffer.capacity=2e4"])
    config = parse_config(fill_dims(composed))
    assert config.training.total_timesteps == 100_000
    assert isinstance(config.training.total_timesteps, int)
    experiment = build_experiment(composed, Path("unwritten"))
    experiment.close()
    assert experiment.sources["replay"].ring.capacity == 20_000
    with pytest.raises(UserError, match="a whole number"):
        parse_config(fill_dims(compose(["experiment=dqn_cartpole", "training.total_timesteps=1.5"])))


def test_algorithm_is_free_form():
    composed = compose(["experiment=dqn_cartpole", "algorithm.anything.at_all=[1,{a: b}]"])
    experiment = build_experiment(composed, Path("unwritten"))
    experiment.close()
    assert experiment.config.algorithm["anything"] == {"at_all": [1, {"a": "b"}]}


def test_load_experiment_takes_texts_or_a_mapping():
    texts = rl_lab.load_experiment("ppo_cartpole", ["experiment.seed=3", "workflow.gamma=0.5"])
    mapping = rl_lab.load_experiment("ppo_cartpole", {"seed": 3, "workflow.gamma": 0.5})
    assert texts == mapping == rl_lab.load_experiment("ppo_cartpole", {"seed": 3, "workflow__gamma": 0.5})


VALUES = [
    *(3, -2, 0.25, 1e-5, True, None, "plain", "two words", "a,b", "{x}", "it's", 'say "x"', "back\\slash", "end\\"),
    *('\\"', "null", "1e5", "true", "", "a=b", "[1", "${algorithm.x}", "a/b.c", "7", "nan"),
    *([1, "a b", [2.5, None]], {"a": 1, "b": ["x y", {"c": False}]}, [], {}),
]


def test_values_from_python_arrive_as_they_are():
    given = {f"algorithm.value_{i}": value for i, value in enumerate(VALUES)}
    composed = rl_lab.load_experiment("ppo_cartpole", {"algorithm.x": 1, **given})
    arrived = OmegaConf.to_container(composed.algorithm, resolve=False)
    for i, value in enumerate(VALUES):
        assert arrived[f"value_{i}"] == value
        assert type(arrived[f"value_{i}"]) is type(value)


def test_short_names_are_written_out():
    assert as_overrides({"seed": 1, "device": "cpu", "name": "x"}) == [
        *("experiment.seed=1", "experiment.device=cpu", "experiment.name=x"),
    ]


def test_train_from_python(elsewhere):
    outcome = rl_lab.train(
        "ppo_cartpole",
        seed=1,
        run_dir=elsewhere / "run",
        training__total_timesteps=600,
        evaluation__episodes=1,
        logging={"every": 200},
    )
    assert outcome.code == 0
    assert outcome.summary["seed"] == 1
    assert outcome.summary["agent_steps"] == 768  # three cycles of 8 x 32
    saved = yaml.safe_load((elsewhere / "run" / "config.yaml").read_text())
    assert saved["logging"]["every"] == 200


def test_python_may_allow_packages_of_its_own(elsewhere, monkeypatch):
    (elsewhere / "my_schedules.py").write_text(
        "from rl_lab.core.schedules import Linear\nclass Mine(Linear):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(elsewhere))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    few = {"training.total_timesteps": 64, "evaluation.episodes": 1, "buffer.min_size": 32}
    few["workflow.epsilon._target_"] = "my_schedules.Mine"
    with pytest.raises(UserError, match="may not be used"):
        rl_lab.train("dqn_cartpole", run_dir="run", **few)
    assert rl_lab.train("dqn_cartpole", run_dir="run", allow=["my_schedules"], **few).code == 0


def test_folders_may_be_texts_and_a_plus_before_a_key_is_allowed(elsewhere, capsys):
    changes = {"training.total_timesteps": 256, "evaluation.episodes": 1}
    rl_lab.train("ppo_cartpole", run_dir="run", **changes)
    assert main(["resume", "run", "+training.total_timesteps=512", "++logging.every=64", "--quiet"]) == 0
    assert resume_run("run", ["training.total_timesteps=768"], quiet=True).summary["agent_steps"] == 768
    experiment = rl_lab.load_agent("run", which="last")
    assert rl_lab.export_policy("run", "out")["name"] == "ppo_cartpole"
    assert rl_lab.load_policy("out").card["name"] == "ppo_cartpole"
    experiment.orchestrator("elsewhere").recorder.close()
    experiment.close()
    rl_lab.build_experiment(experiment.composed, "unwritten").close()
    assert main(["resume", "run", "+evaluation.every=100"]) == 2
    assert "evaluation.every: 10000 -> 100" in capsys.readouterr().err
    assert compose(["experiment=ppo_cartpole", "+evaluation.every=100"]).evaluation.every == 100


def test_parts_are_initialised_by_name_not_by_order():
    first = build_experiment(load_experiment("ppo_cartpole", {"seed": 1}), Path("unwritten"))
    again = build_experiment(load_experiment("ppo_cartpole", {"seed": 1, "environment.num_envs": 3}), Path("unwritten"))
    other = build_experiment(load_experiment("ppo_cartpole", {"seed": 2}), Path("unwritten"))
    weights = [e.controllers["critic"].network.layers[0].weight for e in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], first.controllers["actor"].network.layers[0].weight)  # of the same shape
    for experiment in (first, again, other):
        experiment.close()


def test_building_draws_nothing_from_the_streams_of_the_run():
    composed = load_experiment("dqn_cartpole")
    one, two = (build_experiment(composed, Path("unwritten")) for _ in range(2))
    fresh = rl_lab.SeedTree(0).generator("collect/act")
    assert torch.equal(one.collector.generator.get_state(), fresh.get_state())  # the rehearsal has its own
    events = [next(training_loop(e.workflow, e.scheduler, e.collector, e.sources)).metrics for e in (one, two)]
    assert events[0] == events[1]


def test_a_step_of_the_build_may_be_replaced(monkeypatch):
    """A script of one's own replaces one function of the composition root and keeps the others."""
    import rl_lab.build as build
    from rl_lab.core.optim import Optimizer

    def mine(config, components, controllers, allow):
        parameters = [p for part in {**components, **controllers}.values() for p in part.parameters()]
        return {"agent": Optimizer(parameters, torch.optim.SGD)}

    monkeypatch.setattr(build, "build_optimizers", mine)
    experiment = build.build_experiment(load_experiment("dqn_cartpole"), Path("unwritten"))
    experiment.close()
    assert isinstance(experiment.workflow.optimizer.torch_optimizer, torch.optim.SGD)


def test_config_hash_ignores_what_only_extends_a_run():
    base = load_experiment("dqn_cartpole")
    for word in ("training.total_timesteps=99", "training.stop_at_return=3", "logging.every=5", "checkpoint.keep=9"):
        assert config_hash(load_experiment("dqn_cartpole", [word])) == config_hash(base), word
    for word in ("experiment.seed=1", "workflow.gamma=0.5", "environment.num_envs=2", "algorithm.x=1"):
        assert config_hash(load_experiment("dqn_cartpole", [word])) != config_hash(base), word


def test_keys_may_be_written_as_errors_write_them():
    key, value = "training.phases[0].workflow_hooks[0].collect", "${algorithm.x[0]}"
    composed = compose(["experiment=dqn_cartpole", "algorithm.x=[3]", f"{key}={value}"])
    assert composed.training.phases[0].workflow_hooks[0] == {"collect": 3}
    assert override(composed, [f"{key}=5"]).training.phases[0].workflow_hooks[0].collect == 5
    assert compose(["experiment=dqn_cartpole", 'experiment.name="a[0]"']).experiment.name == "a[0]"
    with pytest.raises(UserError, match="no such entry"):
        override(composed, ["training.phases[7].name=x"])
    with pytest.raises(UserError, match="no such entry"):
        override(composed, ["training.phases.first.name=x"])


def test_override_of_a_saved_configuration():
    base = load_experiment("dqn_cartpole")
    changed = override(base, ["+training.total_timesteps=5", "training.phases.0.name=other", "logging.folder=x=y"])
    assert (changed.training.total_timesteps, changed.training.phases[0].name) == (5, "other")
    assert changed.logging.folder == "x=y"
    assert base.training.total_timesteps == 50_000
    for wrong in ("training", "=3", "training.total_timesteps={", "training.phases.9.name=x", "training.phases.x=3"):
        with pytest.raises(UserError) as caught:
            override(base, [wrong])
        assert caught.value.key


def test_weights_of_dreamer_v2_lose_a_millionth_at_every_update():
    """AdamW multiplies the decay by the rate: a millionth of a small rate would be nothing in float32."""
    optimizers = resolve(fill_dims(load_experiment("dreamerv2_gridworld")))["optimizers"]
    plain = OmegaConf.load(PACKAGE_CONFIGS / "model" / "dreamerv2.yaml").optimizers
    for section in (*optimizers.values(), *plain.values()):
        settings = {key: value for key, value in section["optimizer"].items() if key not in ("_target_", "_partial_")}
        weight = torch.nn.Parameter(torch.ones(()))
        optimizer = torch.optim.AdamW([weight], **settings)
        for _ in range(1000):
            weight.grad = torch.zeros(())
            optimizer.step()
        assert weight.item() == pytest.approx(1.0 - 1e-3, abs=1e-4)


@pytest.mark.parametrize("paper", ["dreamerv1", "dreamerv2"])
def test_actors_before_dreamer_v3_mix_nothing_in(paper):
    assert resolve(fill_dims(load_experiment(f"{paper}_gridworld")))["controllers"]["actor"]["policy"]["unimix"] == 0.0
