"""Runs: how one starts, continues, begins with another's weights, and gives its agent."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from rl_lab.build import Experiment, build_experiment, fill_dims
from rl_lab.composition import load_experiment, override, parse_config, to_yaml
from rl_lab.config import RunConfig
from rl_lab.core.errors import UserError
from rl_lab.orchestration.checkpoint import Checkpoint, CheckpointError, CheckpointManager
from rl_lab.orchestration.dashboard import Dashboard
from rl_lab.run_folder import check_same_run, find_unfinished, new_folder, owned, read_summary, require_run
from rl_lab.trust import check_secrets, load_saved


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
    warm_start: bool = False,
    allow: Sequence[str] = (),
) -> Outcome:
    """Start a run, or continue the one that this configuration left unfinished."""
    check_secrets(composed)
    composed = fill_dims(composed, allow)
    config = parse_config(composed)
    start = _starting_point(config, warm_start)
    folder = run_dir
    if start is not None and start.continues_in_place:
        folder = start.run_folder
    if folder is None and start is None and not new:
        folder = find_unfinished(composed, config)
        if folder is not None and not quiet:
            print(f"continuing the unfinished run {folder} (--new starts afresh)", flush=True)
    if folder is None:
        folder = new_folder(config)
    elif (folder / "config.yaml").exists():
        check_same_run(composed, folder)
    if start is not None and not start.warm:
        check_same_run(composed, start.run_folder)
    experiment = build_experiment(composed, folder, allow=allow)
    try:
        with owned(folder):
            return _run(experiment, folder, quiet=quiet, start=start)
    finally:
        experiment.close()


def resume_run(
    folder: Path, overrides: Sequence[str] = (), *, quiet: bool = False, allow: Sequence[str] = ()
) -> Outcome:
    """Continue the run in a folder; overrides may only extend it."""
    composed = override(load_saved(require_run(folder)), ["training.resume_path=null", *overrides])
    return run_training(composed, run_dir=folder, quiet=quiet, allow=allow)


def load_agent(folder: Path, *, which: str = "best", allow: Sequence[str] = (), render: bool = False) -> Experiment:
    """Rebuild the experiment of a run with the weights of its best evaluation or its last checkpoint."""
    composed = load_saved(require_run(folder))
    experiment = build_experiment(composed, folder, allow=allow, render=render)
    try:
        set_weights(experiment.parts(), saved_weights(experiment.checkpoints, folder, which))
    except BaseException:
        experiment.close()
        raise
    return experiment


def saved_weights(checkpoints: CheckpointManager, folder: Path, which: str) -> Checkpoint:
    """Return the best agent of a run, or its last checkpoint where there is no best one yet."""
    best = folder / "best"
    if which == "best" and best.is_dir():
        try:
            return checkpoints.load(best)
        except CheckpointError as error:
            raise UserError(f"the best agent of this run is damaged: {error}", key=str(best)) from None
    found = checkpoints.load_latest()
    if found is None:
        raise UserError("this run has no good checkpoint", key=str(folder), remedy="train it first")
    return found


def set_weights(parts: Any, checkpoint: Checkpoint) -> None:
    """Load weights into parts; what does not fit is refused before anything is touched."""
    check_fits(parts.parameters(), checkpoint.state, str(checkpoint.path))
    parts.set_parameters(checkpoint.state)


def check_fits(expected: Any, given: Any, key: str) -> None:
    """Refuse a state whose names, shapes or types differ from what is expected."""
    if isinstance(expected, Mapping):
        if not isinstance(given, Mapping) or (missing := expected.keys() - given.keys()):
            missing = expected.keys() if not isinstance(given, Mapping) else missing
            raise UserError(f"the saved state lacks {', '.join(sorted(map(str, missing)))}", key=key)
        for name, value in expected.items():
            check_fits(value, given[name], f"{key}: {name}")
    elif isinstance(expected, torch.Tensor) and (
        not isinstance(given, torch.Tensor) or given.shape != expected.shape or given.dtype != expected.dtype
    ):
        found = f"{tuple(given.shape)} {given.dtype}" if isinstance(given, torch.Tensor) else type(given).__name__
        raise UserError(f"a tensor is {found}, but {tuple(expected.shape)} {expected.dtype} is needed", key=key)


@dataclass(frozen=True)
class StartingPoint:
    """What `training.resume_path` names: a run, or one checkpoint of it."""

    run_folder: Path
    checkpoint: Path | None
    warm: bool  # only the weights are taken over

    @property
    def continues_in_place(self) -> bool:
        """Whether the run itself goes on; from a chosen checkpoint a copy of it does."""
        return self.checkpoint is None and not self.warm


def _starting_point(config: RunConfig, warm: bool) -> StartingPoint | None:
    if config.training.resume_path is None:
        if warm:
            raise UserError("--warm-start needs a run to start from", remedy="add training.resume_path=RUN")
        return None
    path = Path(config.training.resume_path)
    if (path / "config.yaml").is_file():
        return StartingPoint(path, None, warm)
    if (path / "manifest.json").is_file():
        run_folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
        if (run_folder / "config.yaml").is_file():
            return StartingPoint(run_folder, path, warm)
    raise UserError(
        "there is no run and no checkpoint at this path",
        key="training.resume_path",
        value=str(path),
        remedy="name a run folder, or a folder below its checkpoints/; the path is taken from where you stand",
    )


def _run(experiment: Experiment, folder: Path, *, quiet: bool, start: StartingPoint | None) -> Outcome:
    experiment.commit = current_commit()
    experiment.checkpoints.say = lambda text: print(text, file=sys.stderr, flush=True)
    orchestrator = experiment.orchestrator(folder, None if quiet else Dashboard())
    found = experiment.checkpoints.load_latest(experiment.max_checkpoint_bytes())
    if found is None:
        for name in ("metrics.jsonl", "summary.json"):  # of a run that never got to a checkpoint
            (folder / name).unlink(missing_ok=True)
        if start is not None:
            found = _begin_from(start, experiment, folder)
    (folder / "config.yaml").write_text(to_yaml(experiment.composed))
    if found is None:
        (folder / "command.txt").write_text(shlex.join(sys.argv) + "\n")
    else:
        torch.set_num_threads(int(found.manifest.get("threads", torch.get_num_threads())))
        _tell_versions(found)
        orchestrator.restore(found)
        summary = read_summary(folder)
        if summary is not None and summary.get("finished") and orchestrator.is_finished():
            return Outcome(folder, 0, summary)
    code = orchestrator.run()
    return Outcome(folder, code, orchestrator.summary(finished=code == 0))


def _begin_from(start: StartingPoint, experiment: Experiment, folder: Path) -> Checkpoint | None:
    """Take over a checkpoint of another run: its weights only, or everything up to it."""
    source = CheckpointManager(start.run_folder)
    if start.warm:
        chosen = (
            saved_weights(source, start.run_folder, "last")
            if start.checkpoint is None
            else source.load(start.checkpoint)
        )
        set_weights(experiment.parts(), chosen)
        print(
            f"warm start from {chosen.path}: weights only. Not restored: optimisers, replay, counters, phase, "
            "random streams, environments, metrics.",
            file=sys.stderr,
        )
        return None
    assert start.checkpoint is not None
    try:
        chosen = source.load(start.checkpoint)
    except CheckpointError as error:
        raise UserError(
            f"this checkpoint is damaged: {error}", key="training.resume_path", value=str(start.checkpoint)
        ) from None
    log = start.run_folder / "metrics.jsonl"
    if log.exists():
        shutil.copyfile(log, folder / "metrics.jsonl")
    return chosen


def _tell_versions(checkpoint: Checkpoint) -> None:
    saved = checkpoint.manifest.get("versions", {})
    changed = [
        f"{name} {saved[name]} -> {version(name)}"
        for name in ("torch", "numpy")
        if name in saved and saved[name] != version(name)
    ]
    if changed:
        print(f"note: {', '.join(changed)}: the run goes on, but not bit for bit as it would have", file=sys.stderr)


def current_commit() -> str | None:
    """Return the commit of the working directory, if it is in a repository."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
        return answer.stdout.strip()
    return None
