"""Run folders: where a run lives, who owns it, whether it is the same run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any

from omegaconf import DictConfig

from rl_lab.composition import comparable, config_hash, part
from rl_lab.config import RunConfig
from rl_lab.core.errors import UserError, shown
from rl_lab.run_paths import is_run, run_paths
from rl_lab.trust import read_saved, read_text

MAX_SUMMARY_BYTES = 2**24  # a million returns of an evaluation
_EARLY_MARKS = ("config.yaml", ".lock")  # of a run that was stopped before it wrote what marks one
_NUM_PROPOSED = 4
_MAX_LOOKED_AT = 1000  # runs, where somebody names a folder that has many
_ABSENT = object()


def new_folder(config: RunConfig) -> Path:
    """Return an unused folder: <logging.folder>/<name>/<time>-seed<seed>."""
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}-seed{config.experiment.seed}"
    path = Path(config.logging.folder) / config.experiment.name / stamp
    candidate, number = path, 2
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate


def find_unfinished(composed: DictConfig, config: RunConfig) -> Path | None:
    """Return the newest run of this name, configuration and beginning that is not finished and has no owner now."""
    parent = Path(config.logging.folder) / config.experiment.name
    wanted = config_hash(composed), config.training.resume_path
    for folder in sorted(parent.iterdir(), key=lambda path: path.name, reverse=True) if parent.is_dir() else ():
        if not (folder / "config.yaml").is_file():
            continue
        try:
            saved = read_saved(folder / "config.yaml")
            same = (config_hash(saved), part(saved, "training.resume_path")) == wanted
        except UserError:
            continue  # somebody else's, or damaged: not ours to continue
        if same and not is_owned(folder) and not _is_finished(folder, config):
            return folder
    return None


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return summary.json, or None if there is no readable one."""
    try:
        summary = json.loads(read_text(folder / "summary.json", MAX_SUMMARY_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return summary if isinstance(summary, dict) else None


def _is_finished(folder: Path, config: RunConfig) -> bool:
    summary = read_summary(folder)
    if summary is None or not summary.get("finished"):
        return False
    total, before = config.training.total_timesteps, summary.get("total_timesteps")
    return not (isinstance(total, int) and isinstance(before, int) and total > before)


def require_run(folder: Path) -> Path:
    """Return the config.yaml of a run folder, or say which runs there are."""
    path = folder / "config.yaml"
    if _is_export(folder):
        raise UserError(
            "this is an exported agent, not a run",
            key="RUN",
            value=str(folder),
            remedy=f"play it with rl_lab.load_policy({str(folder)!r}), or name the run that it was exported from",
        )
    if path.is_file():
        return path
    if runs := _newest_runs(folder):
        problem, remedy = "this is a folder of runs, not a run", "name one of them"
    else:
        problem, remedy = "this is not a run folder", "name one that is"
        parent = folder.parent if folder.parent.is_dir() else Path("experiments")
        runs = _newest_runs(parent)
    newest = ", ".join(str(run) for run in runs[:_NUM_PROPOSED])
    raise UserError(
        problem,
        key="RUN",
        value=str(folder),
        valid=[] if folder.is_dir() else runs,  # of a name that is misspelled the nearest one is wanted
        remedy=f"{remedy}, such as the newest: {newest}" if newest else "see `rl-lab list runs`",
    )


def _is_export(folder: Path) -> bool:
    return (folder / "card.json").is_file() and (folder / "agent").is_dir()


def _newest_runs(folder: Path) -> list[Path]:
    """Return the runs in and below a folder that have something to look at, the newest first."""
    found = islice(run_paths(folder, max_depth=3), _MAX_LOOKED_AT)
    runs = [run for run in found if (run / "checkpoints").is_dir() and (run / "config.yaml").is_file()]
    return sorted(runs, key=lambda run: ((run / "config.yaml").stat().st_mtime, run), reverse=True)


def check_free(folder: Path) -> None:
    """Refuse to begin a run among files that are not a run's; what is hidden does not count."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return  # who wants to own it says why that cannot be
    others = [name for name in names if not name.startswith(".")]
    if others and not is_run(folder) and not any(mark in names for mark in _EARLY_MARKS):
        more = "" if len(others) <= _NUM_PROPOSED else f" and {len(others) - _NUM_PROPOSED} more"
        raise UserError(
            f"this folder is no run, and not empty: it has {', '.join(others[:_NUM_PROPOSED])}{more}",
            key="--run-dir",
            value=str(folder),
            remedy="name an empty or a new folder, or drop --run-dir",
        )


def check_same_run(composed: DictConfig, folder: Path) -> None:
    """Refuse to continue a run under another configuration, and show the difference."""
    before = flat(comparable(read_saved(folder / "config.yaml")))
    now = flat(comparable(composed))
    different = [
        f"{key}: {before.get(key, '(absent)')} -> {now.get(key, '(absent)')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key, _ABSENT) != now.get(key, _ABSENT)
    ]
    if different:
        shown = "\n    ".join(different[:12])
        raise UserError(
            f"the run in this folder has another configuration:\n    {shown}",
            key="run folder",
            value=str(folder),
            remedy="choose another folder, undo the change, or take only its weights over with --warm-start",
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
        if (owner := _lock(file)) is not None:
            raise UserError(
                f"another process owns this run: {owner}",
                key="--run-dir",
                value=str(folder),
                remedy="wait for it, stop it, or choose another folder",
            )
        try:
            with contextlib.suppress(OSError):  # on a full disk the run has no name, but an owner
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            yield
        finally:
            os.ftruncate(file.fileno(), 0)  # this process may live on, and the next owner be asked for its name


def _lock(file: IO[str], patience: float = 1.0) -> str | None:
    """Lock a file and return None, or return the owner that it names.

    One who only asks whether a run is owned holds the lock for a moment, and a new owner needs one to write its name:
    as long as the name is not that of a living process, ask again.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except OSError:
            file.seek(0)
            owner = file.read(1000)
        if _is_alive(owner) or time.monotonic() > deadline:
            return shown(owner.strip()) or "unknown"
        time.sleep(0.01)


def _is_alive(owner: str) -> bool:
    match = re.fullmatch(r"process (\d{1,9}) on (.*)\n", owner)
    if match is None:
        return False
    if match.group(2) != socket.gethostname():
        return True  # nobody here can tell
    try:
        os.kill(int(match.group(1)), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by their dotted keys."""
    entries: Iterator[tuple[str, Any]]
    if isinstance(tree, Mapping) and tree:
        entries = ((f"{prefix}.{key}" if prefix else str(key), value) for key, value in tree.items())
    elif isinstance(tree, list) and tree:
        entries = ((f"{prefix}[{i}]", value) for i, value in enumerate(tree))
    else:
        return {prefix: tree}
    return {key: leaf for name, value in entries for key, leaf in flat(value, name).items()}
