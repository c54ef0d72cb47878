"""SEC1: hostile checkpoints, exports and run folders are refused: nothing runs, nothing outside is touched."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from omegaconf import DictConfig

import rl_lab
from rl_lab import cli
from rl_lab.composition import compose
from rl_lab.core.errors import UserError
from rl_lab.runs import run_training
from tests.security import artefacts
from tests.security.artefacts import newest
from tests.security.corpus import in_turn, make_victim, run_cases
from tests.security.hostile_checkpoints import HARMLESS, RUNS, STATES, WEIGHTS, Tamper
from tests.security.sandbox import Job, Report, run_one


@dataclass(frozen=True)
class Door:
    """A way to load a checkpoint: what is tampered with, and the call on the tampered run and its checkpoint."""

    artefact: str
    place: Callable[[Path], Path]
    call: Callable[[Path, Path], int]
    falls_back: bool = False  # to the checkpoint before


def best(run: Path) -> Path:
    return run / "best"


def agent(export: Path) -> Path:
    return export / "agent"


def command(*words: str) -> Callable[[Path, Path], int]:
    return lambda run, checkpoint: cli.main([word.replace("RUN", str(run)) for word in words])


def start_from(*, warm: bool) -> Callable[[Path, Path], int]:
    """What `rl-lab train ... training.resume_path=CHECKPOINT --run-dir again` does once it is composed."""

    def call(run: Path, checkpoint: Path) -> int:
        composed = again().copy()
        composed.training.resume_path = str(checkpoint)
        with told():
            return run_training(composed, run_dir=Path("again"), quiet=True, warm_start=warm).code
        return 2

    return call


@functools.cache
def again() -> DictConfig:
    return compose(
        [f"experiment={artefacts.DQN[0]}", *artefacts.DQN[1:], f"training.total_timesteps={artefacts.STEPS}"]
    )


def load_policy(folder: Path, checkpoint: Path) -> int:
    with told():
        return 0 if rl_lab.load_policy(folder) else 1
    return 2


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Print a user's mistake, as the command line does."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}")


DOORS = {
    "load_policy": Door("dqn_export", agent, load_policy),
    "resume": Door("dqn", newest, command("resume", "RUN", "--quiet"), falls_back=True),
    "eval": Door("dqn", best, command("eval", "RUN", "--episodes", "1")),
    "export the last": Door("dqn", newest, command("export", "RUN", "out", "--checkpoint", "last"), falls_back=True),
    "resume_path": Door("dqn", newest, start_from(warm=False)),
    "eval the last": Door(
        "dqn", newest, command("eval", "RUN", "--episodes", "1", "--checkpoint", "last"), falls_back=True
    ),
    "warm start": Door("dqn", newest, start_from(warm=True)),
    "export": Door("dqn", best, command("export", "RUN", "out")),
    "warm start from best": Door("dqn", best, start_from(warm=True)),
}


def enter(
    cases: Sequence[tuple[str, str]],
    corpus: Mapping[str, Tamper],
    check: Callable[[Door, Report], str | None],
    lab: Path,
    tmp_path: Path,
    *,
    at_run: bool = False,
) -> None:
    """Tamper with copies and go through the doors."""
    again()  # composed once, here, for all children
    jobs, doors = {}, {}
    for i, (case, name) in enumerate(cases):
        folder, door = tmp_path / str(i), DOORS[name]
        victim = make_victim(folder)
        copied = artefacts.copy(lab / door.artefact, folder / "artefact")
        checkpoint = door.place(copied)
        corpus[case](copied if at_run else checkpoint)
        writable = [copied, folder / "again", folder / "out"]
        key = f"{case} at {name}"
        jobs[key] = Job(partial(door.call, copied, checkpoint), folder, writable, untouchable=[victim])
        doors[key] = door
    run_cases(jobs, lambda key, report: check(doors[key], report))


def refused(door: Door, report: Report) -> str | None:
    if report.code == 0 and "set aside" not in report.output:
        return f"it was loaded: {report.output}"
    return report.problem(2, 0) if door.falls_back else report.problem(2)


def loaded(door: Door, report: Report) -> str | None:
    return "it was set aside" if "set aside" in report.output else report.problem(0)


@pytest.mark.parametrize("door", DOORS)
def test_every_door_opens_for_a_good_one(door, lab, tmp_path):
    enter([("good", door)], {"good": artefacts.seal}, loaded, lab, tmp_path)


@pytest.mark.parametrize("cases", in_turn(WEIGHTS, list(DOORS)))
def test_weights(cases, lab, tmp_path):
    enter(cases, WEIGHTS, refused, lab, tmp_path)


@pytest.mark.parametrize("cases", in_turn(STATES, ["resume", "resume_path"]))
def test_states(cases, lab, tmp_path):
    enter(cases, STATES, refused, lab, tmp_path)


@pytest.mark.parametrize("cases", in_turn(RUNS, ["resume"]))
def test_run_folders(cases, lab, tmp_path):
    enter(cases, RUNS, refused, lab, tmp_path, at_run=True)


LINKS = [case for case in RUNS if "behind" in case or "pipe" in case]


@pytest.mark.parametrize("cases", in_turn(LINKS, ["eval", "export", "warm start", "resume_path"]))
def test_links_at_other_doors(cases, lab, tmp_path):
    enter(cases, RUNS, refused, lab, tmp_path, at_run=True)


@pytest.mark.parametrize("cases", in_turn(HARMLESS, ["resume", "export the last"]))
def test_odd_and_harmless(cases, lab, tmp_path):
    enter(cases, HARMLESS, loaded, lab, tmp_path, at_run=True)


@pytest.mark.parametrize("buffer", ["../../victim", "..", "/"])
def test_an_older_checkpoint_does_not_decide_what_is_removed(buffer, lab, tmp_path):
    """Saving removes segments that no kept checkpoint lists, in the folders that their manifests name."""
    make_victim(tmp_path)
    run = artefacts.copy(lab / "dqn", tmp_path / "artefact")
    oldest = min((run / "checkpoints").glob("0*"))
    artefacts.seal(oldest, lambda manifest: manifest.update(segments={"replay": [], buffer: []}))
    words = ["resume", str(run), "training.total_timesteps=192", "checkpoint.keep=5", "--quiet"]
    job = Job(partial(cli.main, words), tmp_path, [run], untouchable=[tmp_path / "victim"])
    run_cases({buffer: job}, lambda name, report: report.problem(0))
    assert len(list((run / "checkpoints").glob("0*"))) > 2


SUMMARIES = [case for case in (*RUNS, *HARMLESS) if "summary" in case or "configuration" in case]


@pytest.mark.parametrize("case", SUMMARIES)
def test_lists_of_runs(case, lab, tmp_path):
    """`rl-lab list` shows what is below a folder, whoever wrote it."""
    make_victim(tmp_path)
    run = artefacts.copy(lab / "dqn", tmp_path / "artefact")
    {**RUNS, **HARMLESS}[case](run)
    report = run_one(partial(cli.main, ["list", "runs", "--root", "."]), tmp_path, untouchable=[tmp_path / "victim"])
    assert report.problem(0) is None, report
    assert "\x1b" not in report.output


def test_the_corpus_is_large():
    assert len(WEIGHTS) + len(STATES) + len(RUNS) >= 180
