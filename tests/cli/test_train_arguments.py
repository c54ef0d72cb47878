import itertools
import sys
import types
from pathlib import Path

import pytest

import rl_lab.cli
from rl_lab.cli import main
from rl_lab.cli.train import normalized, seeds
from rl_lab.core.errors import UserError

NAMES = ["dqn_cartpole", "ppo_cartpole"]


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """Stand in for the side that runs; return what it was given."""
    found = []
    for module_name, names in (("running", ("train", "resume")), ("evaluating", ("evaluate",))):
        module = types.ModuleType(f"rl_lab.cli.{module_name}")
        for name in names:
            setattr(module, name, lambda arguments, name=name: found.append((name, arguments)) or 0)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(rl_lab.cli, module_name, module, raising=False)
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    (tmp_path / "configs" / "experiment" / "mine.yaml").write_text("# @package _global_\n# My own.\n")
    monkeypatch.chdir(tmp_path)
    return found


def test_overrides_become_what_hydra_wants():
    words = ["+experiment=dqn_cartpole", "experiment.seed=1", "+new.key=2", "~old", "++x=3"]
    expected = ["experiment=dqn_cartpole", "experiment.seed=1", "+new.key=2", "~old", "++x=3"]
    assert normalized(words, NAMES) == expected
    assert normalized(["x=1", "ppo_cartpole"], NAMES) == ["x=1", "experiment=ppo_cartpole"]
    assert normalized(["experiment=unknown"], NAMES) == ["experiment=unknown"]  # composing says what is wrong


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["dqn_cartpol"], "dqn_cartpole"),
        ([], "dqn_cartpole, ppo_cartpole"),
        (["dqn_cartpole", "experiment=ppo_cartpole"], "several experiments"),
    ],
)
def test_a_wrong_experiment_is_explained(words, text):
    with pytest.raises(UserError, match=text):
        normalized(words, NAMES)


@pytest.mark.parametrize(
    ("text", "expected"), [("0-4", [0, 1, 2, 3, 4]), ("0,2,5", [0, 2, 5]), ("7", [7]), ("0-2, 9,1", [0, 1, 2, 9])]
)
def test_seeds(text, expected):
    assert seeds(text) == expected


@pytest.mark.parametrize("text", ["", "a", "4-0", "-1", "1-", "0..4", "1,,2", "0-5000", "²"])
def test_wrong_seeds_are_explained(text, capsys):
    assert main(["train", "x=1", f"--seeds={text}"]) == 2
    assert "--seeds" in capsys.readouterr().err


def test_flags_and_overrides_mix_in_any_order(seen):
    pieces = [["mine"], ["experiment.seed=3"], ["--run-dir", "there"], ["--allow", "a"], ["--allow=b"]]
    for order in itertools.permutations(pieces):
        words = [word for piece in order for word in piece]
        assert main(["train", *words]) == 0, words
        name, arguments = seen[-1]
        assert name == "train"
        assert sorted(arguments.overrides) == ["experiment.seed=3", "experiment=mine"]
        assert arguments.run_dir == Path("there")
        assert sorted(arguments.allow) == ["a", "b"]


def test_flags_of_train_and_their_defaults(seen):
    main(["train", "mine"])
    assert vars(seen[-1][1]) == {
        "overrides": ["experiment=mine"],
        "cfg": None,
        "package": None,
        "resolve": False,
        "dry_run": False,
        "run_dir": None,
        "new": False,
        "seeds": None,
        "together": False,
        "warm_start": False,
        "allow": [],
        "quiet": False,
    }
    main(["train", "mine", "--cfg", "job", "--resolve", "--package", "_global_", "--dry-run", "--new", "--quiet"])
    given = seen[-1][1]
    assert (given.cfg, given.resolve, given.package, given.dry_run, given.new, given.quiet) == (
        *("job", True, "_global_", True, True, True),
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["mine", "--cfg", "jobs"], "--cfg"),
        (["mine", "--resolve"], "--cfg job"),
        (["mine", "--package", "x"], "--cfg job"),
        (["mine", "--seeds", "0-1", "experiment.seed=4"], "both given"),
        (["mine", "--sed", "0"], "--seeds"),
        (["mine", "--rundir=x"], "--run-dir"),
        (["min"], "mine"),
    ],
)
def test_mistakes_are_told_before_anything_is_built(seen, words, text, capsys):
    assert main(["train", *words]) == 2
    assert text in capsys.readouterr().err
    assert seen == []


def test_resume_and_eval_pass_their_arguments(seen):
    assert main(["resume", "runs/a", "--allow", "mine", "x=1", "--quiet", "y=2"]) == 0
    name, given = seen[-1]
    assert name == "resume"
    assert vars(given) == {"run": Path("runs/a"), "overrides": ["x=1", "y=2"], "allow": ["mine"], "quiet": True}
    assert main(["eval", "--episodes", "3", "runs/a", "--json", "--gif", "a.gif", "--seed", "0", "--explore"]) == 0
    name, given = seen[-1]
    assert name == "evaluate"
    assert vars(given) == {
        "run": Path("runs/a"),
        "episodes": 3,
        "json": True,
        "gif": Path("a.gif"),
        "seed": 0,
        "checkpoint": "best",
        "explore": True,
        "planner": None,
        "dream": False,
        "allow": [],
    }
    main(["eval", "runs/a"])
    given = seen[-1][1]
    assert (given.episodes, given.json, given.gif, given.seed, given.explore) == (10, False, None, None, False)


@pytest.mark.parametrize("words", [["--episodes", "0"], ["--episodes", "x"], ["--seed", "-1"], ["--planner", "of"]])
def test_wrong_numbers_are_refused(seen, words, capsys):
    assert main(["eval", "runs/a", *words]) == 2
    assert words[0] in capsys.readouterr().err
    assert seen == []
