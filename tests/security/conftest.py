import importlib
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

import rl_lab
from rl_lab import cli
from rl_lab.composition import load_experiment
from tests.security.artefacts import make_runs
from tests.security.sandbox import run_one


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Path:
    """Return a folder with a good run of DQN and of PPO, and an export of each.

    They are made in children; this process, where others are tested too, only imports what those imported. So what a
    hostile file imports later is code that no good file needs.
    """
    folder = tmp_path_factory.mktemp("lab")
    for work in (make_runs, use_every_door):
        done = run_one(partial(with_modules, work, folder), folder)
        assert done.code == 0, done.output
        for name in (folder / "modules.txt").read_text().splitlines():
            try:
                importlib.import_module(name)
            except ImportError:
                continue  # not a module of its own
    load_experiment("dqn_cartpole")  # Hydra loads its plug-ins once in a process
    return folder


def with_modules(work, folder: Path) -> int:
    status = work(folder)
    (folder / "modules.txt").write_text("\n".join(name for name in sys.modules if name != "__main__"))
    return status


def use_every_door(folder: Path) -> int:
    """Load good files, and fail to load one that is not there."""
    run, scratch = folder / "dqn", folder / "scratch"
    for arguments in (
        ["resume", run, "--quiet"],
        ["eval", run, "--episodes", "1"],
        ["export", run, scratch],
        ["list", "runs", "--root", folder],
        ["train", "dqn_cartpole", "--dry-run"],
        ["train", "dqn_cartpole", "environment.id=CartPole-v1", "--dry-run"],
    ):
        if status := cli.main([str(word) for word in arguments]):
            return status
    rl_lab.load_policy(scratch)
    shutil.rmtree(scratch)
    return 0 if cli.main(["eval", str(folder / "nothing")]) == 2 else 1
