"""Agents leave the lab: an export acts as the run's own agent does, alone, and any change in it is noticed."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import rl_lab
from rl_lab.core.errors import UserError
from rl_lab.core.workflow import Act, Workflow
from rl_lab.data.replay import Ring
from rl_lab.policies import Policy, export_policy
from rl_lab.runs import load_agent
from tests.security.artefacts import copy
from tests.security.sandbox import run_one


def observations(count: int = 64) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)


def acts_as_the_run(run: Path, export: Path, which: str) -> int:
    """Compare actions with those of the run's own agent; both sample from generators in the same state."""
    experiment = load_agent(run, which=which)
    policy = rl_lab.load_policy(export)
    seen = torch.from_numpy(observations())
    for explore in (False, True):
        own = experiment.workflow.act(seen, None, explore=explore, generator=torch.Generator().manual_seed(0)).actions
        assert np.array_equal(policy.act(observations(), explore=explore), own.numpy())
    experiment.close()
    return 0


@pytest.mark.parametrize("which", ["best", "last"])
@pytest.mark.parametrize("name", ["dqn", "ppo"])
def test_an_export_acts_as_the_run_does(name, which, lab, tmp_path):
    def check() -> int:
        export_policy(lab / name, tmp_path / "out", which=which)
        return acts_as_the_run(lab / name, tmp_path / "out", which)

    report = run_one(check, tmp_path)
    assert report.code == 0, report.output


def test_an_export_needs_nothing_of_the_run(lab, tmp_path):
    """It is loaded elsewhere, without the run, an environment or a buffer."""
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(lab / "dqn_export", elsewhere)

    def check() -> int:
        def refuse(*arguments, **settings):
            raise AssertionError("nothing of this is needed to act")

        Ring.__init__ = refuse
        rl_lab.envs.make.make_env = rl_lab.environment.make_env = refuse
        policy = rl_lab.load_policy(elsewhere)
        return 0 if policy.act(observations(3)).shape == (3,) else 1

    report = run_one(check, tmp_path, untouchable=[lab])
    assert report.problem(0) is None, report
    assert report.megabytes < 60


def test_three_lines(lab, tmp_path):
    """The lines of the docstring, as they stand there."""
    shutil.copytree(lab / "ppo_export", tmp_path / "my_agent")
    text = rl_lab.load_policy.__doc__.split("```python")[1].split("```")[0]
    lines = [line.strip() for line in text.strip().splitlines()]
    assert len(lines) <= 3

    def check() -> int:
        names = {"rl_lab": rl_lab, "observations": observations(5)}
        exec("\n".join(lines), names)
        return 0 if names["actions"].shape == (5,) else 1

    report = run_one(check, tmp_path)
    assert report.code == 0, report.output


def test_the_card_says_where_it_comes_from(lab):
    card = json.loads((lab / "dqn_export" / "card.json").read_text())
    assert rl_lab.load_policy(lab / "dqn_export").card == card
    assert (card["name"], card["seed"], card["environment"]) == ("dqn_cartpole", 0, "tiny/CartPole")
    assert card["workflow"] == "DQNWorkflow"
    assert card["evaluation"]["return_mean"] == pytest.approx(np.mean(card["evaluation"]["returns"]))
    summary = json.loads((lab / "dqn" / "summary.json").read_text())
    assert card["last_evaluation"] == summary["last_evaluation"]
    assert card["counters"]["agent_steps"] > 0
    assert card["versions"]["torch"] == torch.__version__
    assert "commit" in card


FILES = (
    *("config.yaml", "card.json", "agent/manifest.json", "agent/components.json", "agent/components.safetensors"),
    *("agent/workflow_custom.safetensors", "agent/controllers.json"),
)


@pytest.mark.parametrize("change", ["flipped", "cut", "longer", "missing", "empty"])
@pytest.mark.parametrize("name", FILES)
def test_any_change_is_noticed(name, change, lab, tmp_path):
    path = copy(lab / "dqn_export", tmp_path / "out") / name
    data = path.read_bytes()
    if change == "missing":
        path.unlink()
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        path.write_bytes({"flipped": flipped, "cut": data[:-1], "longer": data + b" ", "empty": b""}[change])
    with pytest.raises(UserError):
        rl_lab.load_policy(tmp_path / "out")


def test_files_of_two_exports_cannot_be_mixed(lab, tmp_path):
    out = copy(lab / "dqn_export", tmp_path / "out")
    shutil.copy(lab / "ppo_export" / "config.yaml", out / "config.yaml")
    with pytest.raises(UserError):
        rl_lab.load_policy(out)


def test_a_note_beside_the_export_is_no_change(lab, tmp_path):
    out = copy(lab / "dqn_export", tmp_path / "out")
    (out / "README.md").write_text("my agent")
    assert rl_lab.load_policy(out).act(observations(1)).shape == (1,)


@pytest.mark.parametrize("place", ["nothing", "file", "empty", "run"])
def test_what_is_no_export_is_told(place, lab, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    copy(lab / "dqn", tmp_path / "run")
    with pytest.raises(UserError, match="not an exported agent"):
        rl_lab.load_policy(tmp_path / place)


def test_nothing_is_overwritten(lab, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    report = run_one(partial(export, lab / "dqn", tmp_path), tmp_path)
    assert report.problem(2) is None, report
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def export(run: Path, out: Path) -> int:
    try:
        export_policy(run, out)
    except UserError as error:
        print(error)
        return 2
    return 0


@pytest.mark.parametrize(
    "seen",
    [
        observations(7),
        observations(7).astype(np.float64),  # as some environments show it
        torch.from_numpy(observations(7)),
        torch.from_numpy(observations(7)).double(),
        observations(7).tolist(),
    ],
    ids=["float32", "float64", "tensor", "double tensor", "list"],
)
def test_observations_of_any_kind(seen, lab):
    policy = rl_lab.load_policy(lab / "ppo_export")
    expected = policy.act(observations(7))
    assert isinstance(expected, np.ndarray)
    assert np.array_equal(policy.act(seen), expected)


def test_the_shape_that_an_agent_was_made_for_comes_with_it(lab):
    policy = rl_lab.load_policy(lab / "dqn_export")
    with pytest.raises(UserError, match=r"made for \[N, 4\], real numbers") as caught:
        policy.act(observations()[0])
    assert caught.value.remedy == "add a leading dimension: observations[None]"


PICTURE, BOTH = [3, 8, 9], {"image": [3, 8, 9], "vector": 3}


@pytest.mark.parametrize(
    ("shape", "given", "key", "remedy"),
    [
        (4, np.zeros((2, 5)), "observations", "make_env"),
        (4, [[1.0, 2.0], [3.0]], "observations", "make_env"),
        (4, {"vector": np.zeros((2, 4))}, "observations", "make_env"),
        (PICTURE, np.zeros((2, 8, 9, 3), np.uint8), "observations", "np.moveaxis(observations, -1, 1)"),
        (PICTURE, np.zeros((8, 9, 3), np.uint8), "observations", "np.moveaxis(observations, -1, 0)[None]"),
        (PICTURE, np.zeros((3, 8, 9), np.uint8), "observations", "add a leading dimension"),
        (PICTURE, np.zeros((2, 3, 8, 9), np.float32), "observations", "uint8 from 0 to 255"),
        (BOTH, np.zeros((2, 3)), "observations.image", "give a dict"),
        (BOTH, {"image": np.zeros((2, 3, 8, 9), np.uint8)}, "observations.vector", "all of these parts"),
        (
            BOTH,
            {"image": np.zeros((2, 3, 8, 9)), "vector": np.zeros((2, 3))},
            "observations.image",
            "uint8 from 0 to 255",
        ),
        (BOTH, {"image": np.zeros((2, 3, 8, 9), np.uint8), "vector": np.zeros((1, 3))}, "observations", "N rows"),
    ],
)
def test_observations_of_another_kind_are_refused(shape, given, key, remedy):
    with pytest.raises(UserError) as caught:
        Policy(Counting(), "cpu", {}, shape=shape).act(given)
    assert caught.value.key == key
    assert remedy in caught.value.remedy
    assert len(str(caught.value).splitlines()) <= 5


class Counting(Workflow):
    """Remembers how many decisions it took in each environment, and looks at a dict of observations."""

    def initial_state(self, num_envs):
        return {"count": torch.zeros(num_envs)}

    def act(self, observations, state=None, *, explore=True, generator=None):
        assert observations["vector"].dtype == torch.float32
        assert observations["image"].dtype == torch.uint8
        count = state["count"] + 1
        return Act(count + observations["vector"][:, 0], {"count": count})


def test_dicts_and_recurrent_state():
    policy = Policy(Counting(), "cpu", {}, shape={"image": [3, 8, 8], "vector": 3})
    seen = {"vector": np.zeros((2, 3)), "image": np.zeros((2, 3, 8, 8), np.uint8)}
    assert [policy.act(seen).tolist() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    policy.reset()
    assert policy.act(seen).tolist() == [1, 1]
    more = {"vector": torch.ones(4, 3), "image": torch.zeros(4, 3, 8, 8, dtype=torch.uint8)}
    assert policy.act(more).tolist() == [2, 2, 2, 2]  # other environments: their episodes begin
    assert policy.act(more).tolist() == [3, 3, 3, 3]
