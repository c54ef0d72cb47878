"""Runs: how one starts, continues, begins with another's weights, and gives its agent."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from rl_lab.build import Experiment, build_experiment, fill_dims, workflow_class
from rl_lab.composition import load_experiment, override, parse_config, to_yaml
from rl_lab.config import RunConfig
from rl_lab.core.architecture import log_architecture
from rl_lab.core.errors import RunError, UserError
from rl_lab.curriculum import tell_what_never_runs
from rl_lab.orchestration.checkpoint import Checkpoint, CheckpointError, CheckpointManager
from rl_lab.orchestration.dashboard import Dashboard
from rl_lab.orchestration.files import Files
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.orchestration.run_parts import WEIGHTS
from rl_lab.orchestration.signals import stop_on_signal
from rl_lab.orchestration.state_checks import check_state
from rl_lab.run_folder import check_free, check_same_run, find_unfinished, new_folder, owned, read_summary, require_run
from rl_lab.trust import check_folder, check_secrets, load_saved


@dataclass
class Outcome:
    """How a run ended: its folder, its exit code (0 finished, 75 stopped and saved) and its summary."""

    folder: Path
    code: int
    summary: dict[str, Any]


def train(
    name: str,
    *,
    run_dir: str | Path | None = None,
    quiet: bool = True,
    allow: Sequence[str] = (),
    **overrides: Any,
) -> Outcome:
    """Train an experiment from Python: `rl_lab.train("ppo_cartpole", seed=1, training__total_timesteps=50_000)`.

    `allow` names packages of your own, as `--allow` does.
    """
    composed = load_experiment(name, overrides)
    return run_training(composed, run_dir=run_dir, new=True, quiet=quiet, allow=allow)


def run_training(
    composed: DictConfig,
    *,
    run_dir: str | Path | None = None,
    new: bool = False,
    quiet: bool = False,
    warm_start: bool = False,
    allow: Sequence[str] = (),
) -> Outcome:
    """Start a run, or continue the one that this configuration left unfinished."""
    with _prepared(composed, run_dir, new=new, quiet=quiet, warm_start=warm_start, allow=allow) as run:
        return run(Dashboard() if not quiet else None)


def run_together(
    composeds: Sequence[DictConfig],
    run_dirs: Sequence[str | Path | None],
    *,
    new: bool = False,
    quiet: bool = False,
    allow: Sequence[str] = (),
) -> list[Outcome]:
    """Run several configurations at once in this process, each with its own folder, streams and generators.

    On a GPU their work overlaps; on a CPU each gives the same bits as alone.
    """
    outcomes: list[Outcome | BaseException] = []
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(_prepared(composed, folder, new=new, quiet=quiet, allow=allow))
            for composed, folder in zip(composeds, run_dirs, strict=True)
        ]
        outcomes = [RuntimeError("not run")] * len(runs)

        def work(index: int) -> None:
            try:
                outcomes[index] = runs[index](None)
            except BaseException as error:
                outcomes[index] = error

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(runs))]
        with stop_on_signal([run.stop for run in runs]), _quick_switching():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, Outcome)]


@contextlib.contextmanager
def _quick_switching() -> Iterator[None]:
    """Let a thread that waited for its device go on at once, not after the five milliseconds that Python allows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


class _PreparedRun:
    """A run whose folder is owned and whose parts are built."""

    def __init__(self, experiment: Experiment, folder: Path, start: StartingPoint | None) -> None:
        self.experiment, self.folder, self._start = experiment, folder, start
        self._orchestrator: Orchestrator | None = None

    def __call__(self, dashboard: Dashboard | None) -> Outcome:
        """Run it to its end, or to a signal."""
        self.experiment.commit = current_commit()
        if dashboard is not None:
            parts = {**self.experiment.components, **self.experiment.controllers}
            log_architecture({**parts, **vars(self.experiment.workflow)})
        self._orchestrator = self.experiment.orchestrator(self.folder, dashboard)
        return _run(self.experiment, self._orchestrator, self.folder, start=self._start)

    def stop(self) -> None:
        """Ask it to save and stop at the next action."""
        if self._orchestrator is not None:
            self._orchestrator.stop()


@contextlib.contextmanager
def _prepared(
    composed: DictConfig,
    run_dir: str | Path | None,
    *,
    new: bool,
    quiet: bool,
    warm_start: bool = False,
    allow: Sequence[str] = (),
) -> Iterator[_PreparedRun]:
    check_secrets(composed)
    composed = fill_dims(composed, allow)
    config = parse_config(composed)
    start = _starting_point(config, warm_start)
    folder = None if run_dir is None else Path(run_dir)
    if start is not None and start.continues_in_place:
        if folder is not None and folder.resolve() != start.run_folder.resolve():
            raise UserError(
                "a run continues in its own folder",
                key="--run-dir",
                value=str(folder),
                remedy="drop --run-dir, or name one of its checkpoints: a copy of the run goes on from there",
            )
        folder, start = start.run_folder, None
        composed = override(composed, ["training.resume_path=null"])
    if folder is None and not new:
        folder = find_unfinished(composed, config)
        if folder is not None and not quiet:
            print(f"continuing the unfinished run {folder} (--new starts afresh)", flush=True)
    if folder is None:
        folder = new_folder(config)
    elif folder.exists():
        check_free(folder)
        check_folder(folder)
        if (folder / "config.yaml").exists():
            check_same_run(composed, folder)
    if start is not None and not start.warm:
        check_same_run(composed, start.run_folder)
    experiment = build_experiment(composed, folder, allow=allow)
    try:
        with owned(folder):
            tell_what_never_runs(
                experiment.scheduler.phases,
                experiment.sources,
                experiment.workflow.takes_batch,
                total_timesteps=config.training.total_timesteps,
                num_envs=config.environment.num_envs,
            )
            yield _PreparedRun(experiment, folder, start)
    finally:
        experiment.close()


def resume_run(
    folder: str | Path, overrides: Sequence[str] = (), *, quiet: bool = False, allow: Sequence[str] = ()
) -> Outcome:
    """Continue the run in a folder; overrides may only extend it."""
    composed = override(load_saved(require_run(Path(folder)), allow), ["training.resume_path=null", *overrides])
    return run_training(composed, run_dir=folder, quiet=quiet, allow=allow)


def load_agent(
    folder: str | Path,
    *,
    which: str = "best",
    allow: Sequence[str] = (),
    render: bool = False,
    plan: bool | None = None,
) -> Experiment:
    """Rebuild the experiment of a run with the weights of its best evaluation or its last checkpoint.

    `plan` makes an agent that has a planner use it or not; by default it acts as it was trained to.
    """
    return restore_agent(Path(folder), which=which, allow=allow, render=render, plan=plan)[0]


def restore_agent(
    folder: Path, *, which: str, allow: Sequence[str], render: bool, plan: bool | None
) -> tuple[Experiment, Checkpoint]:
    """Do what `load_agent` does, and return the checkpoint, too: there may be no best one yet."""
    composed = load_saved(require_run(folder), allow)
    if plan is not None:
        workflow = workflow_class(parse_config(composed), allow)
        if not workflow.has_planner():
            raise UserError(
                f"{workflow.__name__} has no planner that can be switched on or off",
                key="--planner",
                value="on" if plan else "off",
                remedy="drop --planner; a workflow that plans declares a field plan: bool",
            )
        composed = override(composed, [f"workflow.plan={str(plan).lower()}"])
    experiment = build_experiment(composed, folder, allow=allow, render=render, learns=False)
    try:
        parts = experiment.parts()
        chosen = saved_weights(experiment.checkpoints, folder, which, parts.max_bytes)
        set_weights(parts, chosen)
    except BaseException:
        experiment.close()
        raise
    return experiment, chosen


def load_run(folder: Path, work: Path, overrides: Sequence[str] = (), *, allow: Sequence[str] = ()) -> Experiment:
    """Rebuild a run as its newest good checkpoint left it, for one who only looks: its folder is not written to.

    What the experiment writes goes to `work`. A run without a good checkpoint is as it began.
    """
    composed = override(load_saved(require_run(folder), allow), ["training.resume_path=null", *overrides])
    experiment = build_experiment(composed, work, allow=allow)
    try:
        manager, parts = CheckpointManager(folder), experiment.parts()
        for path in reversed(manager.numbered()):
            try:
                found = manager.load(path, experiment.max_checkpoint_bytes())
            except CheckpointError as error:
                print(f"note: checkpoint {path.name} cannot be used: {error}", file=sys.stderr)
                continue
            with _must_fit(path):
                check_fits(parts.parameters(), found.state, str(path))
                check_state(parts, experiment.orchestrator(work).get_state(), found.state, found.histories)
                parts.set_state(found.state, found.histories)
            break
    except BaseException:
        experiment.close()
        raise
    return experiment


def saved_weights(checkpoints: CheckpointManager, folder: Path, which: str, max_bytes: int) -> Checkpoint:
    """Return the weights of the best agent of a run, or of its last checkpoint where there is no best one yet."""
    found = None
    if which == "best":
        try:
            found = checkpoints.load_best(max_bytes, WEIGHTS)
        except CheckpointError as error:
            raise _damaged(error, folder / "best") from None
    found = found or checkpoints.load_latest(max_bytes, WEIGHTS)
    if found is None:
        raise UserError("this run has no good checkpoint", key=str(folder), remedy="train it first")
    return found


def _load(checkpoints: CheckpointManager, path: Path, max_bytes: int, sections: Sequence[str] | None) -> Checkpoint:
    try:
        return checkpoints.load(path, max_bytes, sections)
    except CheckpointError as error:
        raise _damaged(error, path) from None


def _damaged(error: CheckpointError, path: Path) -> UserError:
    return UserError(f"this checkpoint is damaged: {error}", key=str(path), remedy="take another one")


def set_weights(parts: Any, checkpoint: Checkpoint) -> None:
    """Load weights into parts; what does not fit is refused before anything is touched."""
    with _must_fit(checkpoint.path):
        check_fits(parts.parameters(), checkpoint.state, str(checkpoint.path))
        parts.set_parameters(checkpoint.state)


@contextlib.contextmanager
def _must_fit(path: Path) -> Iterator[None]:
    """Refuse a checkpoint that cannot be restored though its digests are right."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:  # whatever a state that was made up can make a part raise
        raise UserError(
            f"this checkpoint does not fit: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}",
            key=str(path),
            remedy="take another one; a run whose newest checkpoint is removed continues from the one before it",
        ) from error


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
        check_folder(path)
        return StartingPoint(path, None, warm)
    if (path / "manifest.json").is_file():
        run_folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
        if (run_folder / "config.yaml").is_file():
            check_folder(run_folder)
            return StartingPoint(run_folder, path, warm)
    raise UserError(
        "there is no run and no checkpoint at this path",
        key="training.resume_path",
        value=str(path),
        remedy="name a run folder, or a folder below its checkpoints/; the path is taken from where you stand",
    )


def _run(experiment: Experiment, orchestrator: Orchestrator, folder: Path, *, start: StartingPoint | None) -> Outcome:
    found = experiment.checkpoints.load_latest(experiment.max_checkpoint_bytes())
    try:
        if found is None:
            _clear(folder)
            if start is not None:
                found = _begin_from(start, experiment, folder)
        Files().replace(folder / "config.yaml", to_yaml(experiment.composed).encode())
        if found is None:
            (folder / "command.txt").write_text(shlex.join(sys.argv) + "\n")
    except OSError as error:
        raise RunError(f"the run folder {folder} cannot be written: {error.strerror}") from None
    if found is not None:
        torch.set_num_threads(found.manifest["threads"])
        _tell_versions(found)
        _restore(orchestrator, found)
        summary = read_summary(folder)
        if summary is not None and summary.get("finished") and orchestrator.is_finished():
            return Outcome(folder, 0, orchestrator.summary(finished=True))
    code = orchestrator.run()
    return Outcome(folder, code, orchestrator.summary(finished=code == 0))


def _restore(orchestrator: Orchestrator, checkpoint: Checkpoint) -> None:
    """Continue from a checkpoint, if it fits."""
    parts = orchestrator.parts
    with _must_fit(checkpoint.path):
        check_fits(parts.parameters(), checkpoint.state, str(checkpoint.path))
        check_state(parts, orchestrator.get_state(), checkpoint.state, checkpoint.histories)
        orchestrator.restore(checkpoint)


def _clear(folder: Path) -> None:
    """Make room for a run that begins in a folder where no good checkpoint is left."""
    (folder / "summary.json").unlink(missing_ok=True)
    log = folder / "metrics.jsonl"
    if log.exists() and list(folder.glob("checkpoints/*.corrupt")):
        kept = log.replace(log.with_name("metrics.old.jsonl"))
        print(
            f"warning: no good checkpoint is left in {folder}: the run starts over; its log is kept as {kept.name}",
            file=sys.stderr,
            flush=True,
        )
    log.unlink(missing_ok=True)


def _begin_from(start: StartingPoint, experiment: Experiment, folder: Path) -> Checkpoint | None:
    """Take over a checkpoint of another run: its weights only, or everything up to it."""
    source = CheckpointManager(start.run_folder)
    if start.warm:
        parts = experiment.parts()
        chosen = (
            saved_weights(source, start.run_folder, "last", parts.max_bytes)
            if start.checkpoint is None
            else _load(source, start.checkpoint, parts.max_bytes, WEIGHTS)
        )
        set_weights(parts, chosen)
        print(
            f"warm start from {chosen.path}: weights only. Not restored: optimisers, replay, counters, phase, "
            "random streams, environments, metrics.",
            file=sys.stderr,
        )
        return None
    assert start.checkpoint is not None
    chosen = _load(source, start.checkpoint, experiment.max_checkpoint_bytes(), None)
    if "run" not in chosen.state:
        raise UserError(
            "this holds an agent only, no run that could go on",
            key="training.resume_path",
            value=str(start.checkpoint),
            remedy="add --warm-start, or name a folder below checkpoints/",
        )
    with contextlib.suppress(CheckpointError, LookupError, TypeError):  # without a best agent it goes on, too
        best = source.load_best(experiment.max_checkpoint_bytes())
        if best is not None and best.manifest["counters"]["actions"] <= chosen.manifest["counters"]["actions"]:
            experiment.checkpoints.save_best(best.state, best.manifest)
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
