"""Runs: folders, owners, and how a run starts, continues and is evaluated."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rl_lab.build import Experiment, build_experiment, fill_dims
from rl_lab.composition import comparable, config_hash, load_experiment, load_saved, override, parse_config, to_yaml
from rl_lab.core.errors import UserError
from rl_lab.orchestration.checkpoint import Checkpoint, CheckpointError
from rl_lab.orchestration.dashboard import Dashboard


@dataclass
class Outcome:
    """How a run ended: its folder, its exit code (0 finished, 75 stopped and saved) and its summary."""

    folder: Path
    code: int
    summary: dict[str, Any]


def train(name: str, *, run_dir: str | Path | None = None, quiet: bool = True, **overrides: Any) -> Outcome:
    """Train an experiment from Python: `rl_lab.train("ppo_cartpole", seed=1, training__total_timesteps=50_000)`."""
    composed = load_experiment(name, overrides)
    return run_training(composed, run_dir=None if run_dir is None else Path(run_dir), new=True, quiet=quiet)


def run_training(
    composed: DictConfig,
    *,
    run_dir: Path | None = None,
    new: bool = False,
    quiet: bool = False,
    allow: Sequence[str] = (),
) -> Outcome:
    """Start a run, or continue the one that this configuration left unfinished."""
    composed = fill_dims(composed, allow)
    config = parse_config(composed)
    folder = run_dir
    if folder is None and not new:
        folder = find_unfinished(composed, Path(config.logging.folder) / config.experiment.name)
        if folder is not None and not quiet:
            print(f"continuing the unfinished run {folder} (--new starts afresh)", flush=True)
    if folder is None:
        stamp = f"{datetime.now():%Y%m%d-%H%M%S}-seed{config.experiment.seed}"
        folder = _unused(Path(config.logging.folder) / config.experiment.name / stamp)
    elif (folder / "config.yaml").exists():
        check_same_run(composed, folder)
    experiment = build_experiment(composed, folder, allow=allow)
    try:
        with owned(folder):
            return _run(experiment, folder, quiet)
    finally:
        experiment.close()


def resume_run(
    folder: Path, overrides: Sequence[str] = (), *, quiet: bool = False, allow: Sequence[str] = ()
) -> Outcome:
    """Continue the run in a folder; overrides may only extend it."""
    composed = override(load_saved(_run_file(folder, "config.yaml")), overrides)
    return run_training(composed, run_dir=folder, quiet=quiet, allow=allow)


def load_agent(folder: Path, *, which: str = "best", allow: Sequence[str] = (), render: bool = False) -> Experiment:
    """Rebuild the experiment of a run with the weights of its best evaluation or its last checkpoint."""
    composed = load_saved(_run_file(folder, "config.yaml"))
    experiment = build_experiment(composed, folder, allow=allow, render=render)
    best = folder / "best"
    if which == "best" and best.is_dir():
        try:
            found: Checkpoint | None = experiment.checkpoints.load(best)
        except CheckpointError as error:
            raise UserError(f"the best agent of this run is damaged: {error}", key=str(best)) from None
    else:
        found = experiment.checkpoints.load_latest()
    if found is None:
        raise UserError("this run has no good checkpoint", key=str(folder), remedy="train it first")
    experiment.orchestrator(folder).set_parameters(found.state)
    return experiment


def find_unfinished(composed: DictConfig, parent: Path) -> Path | None:
    """Return the newest run of this configuration that was not finished and has no owner now."""
    if not parent.is_dir():
        return None
    wanted = config_hash(composed)
    for folder in sorted(parent.iterdir(), key=lambda path: path.name, reverse=True):
        if not (folder / "config.yaml").is_file() or _is_finished(folder) or is_owned(folder):
            continue
        if config_hash(load_saved(folder / "config.yaml")) == wanted:
            return folder
    return None


def check_same_run(composed: DictConfig, folder: Path) -> None:
    """Refuse to continue a run under another configuration, and show the difference."""
    before = _flat(comparable(load_saved(folder / "config.yaml")))
    now = _flat(comparable(composed))
    different = [
        f"{key}: {before.get(key, '(absent)')} -> {now.get(key, '(absent)')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key, _ABSENT) != now.get(key, _ABSENT)
    ]
    if different:
        shown = "\n    ".join(different[:12])
        raise UserError(
            f"the run in this folder has another configuration:\n    {shown}",
            key="--run-dir",
            value=str(folder),
            remedy="choose another folder, or undo the change",
        )


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Own a run folder: the lock is the kernel's, so it goes with the process however that ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a+")  # noqa: SIM115
    except OSError as error:
        raise UserError(
            f"the run folder cannot be written: {error.strerror}",
            key="--run-dir",
            value=str(folder),
            remedy="choose another folder with --run-dir DIR or logging.folder=DIR",
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise UserError(
                f"another process owns this run: {file.read().strip() or 'unknown'}",
                key="--run-dir",
                value=str(folder),
                remedy="wait for it, stop it, or choose another folder",
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def is_owned(folder: Path) -> bool:
    """Whether a living process owns a run folder."""
    path = folder / ".lock"
    if not path.exists():
        return False
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _run(experiment: Experiment, folder: Path, quiet: bool) -> Outcome:
    orchestrator = experiment.orchestrator(folder, None if quiet else Dashboard())
    found = experiment.checkpoints.load_latest()
    if found is not None:
        orchestrator.restore(found)
    else:
        _begin(folder)
    if not (folder / "config.yaml").exists() or found is not None:
        (folder / "config.yaml").write_text(to_yaml(experiment.composed))
    if found is None:
        (folder / "command.txt").write_text(shlex.join(sys.argv) + "\n")
    if found is not None and orchestrator.is_finished():
        return Outcome(folder, 0, json.loads((folder / "summary.json").read_text()))
    code = orchestrator.run()
    return Outcome(folder, code, json.loads((folder / "summary.json").read_text()))


def _begin(folder: Path) -> None:
    """Clear what a run without a good checkpoint left behind."""
    for name in ("metrics.jsonl", "summary.json"):
        (folder / name).unlink(missing_ok=True)


def _is_finished(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "summary.json").read_text())["finished"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _run_file(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        parent = folder.parent if folder.parent.is_dir() else Path("experiments")
        near = [str(entry) for entry in parent.iterdir() if (entry / name).is_file()] if parent.is_dir() else []
        raise UserError(
            "this is not a run folder", key="RUN", value=str(folder), valid=near, remedy="see `rl-lab list runs`"
        )
    return path


def _unused(path: Path) -> Path:
    candidate, number = path, 2
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate


_ABSENT = object()


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, Mapping) and tree:
        return {
            k: v for key, value in tree.items() for k, v in _flat(value, f"{prefix}.{key}" if prefix else key).items()
        }
    if isinstance(tree, list) and tree:
        return {k: v for i, value in enumerate(tree) for k, v in _flat(value, f"{prefix}[{i}]").items()}
    return {prefix: tree}
