"""SEC1: hostile checkpoints, exports and run folders are refused: nothing runs, nothing outside is touched."""

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
from tests.security.hostile_checkpoints import HARMLESS, RUNS, STATES, WEIGHTS
from tests.security.sandbox import Report, run_guarded


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


def in_turn(names: Iterable[str], doors: Iterable[str]) -> list[tuple[str, str]]:
    """Give each case to one of the doors: behind them is one store, and every door sees cases of every kind."""
    return list(zip(names, itertools.cycle(doors)))


def enter(door: Door, tamper: Callable[[Path], None], lab: Path, tmp_path: Path, *, at_run: bool = False) -> Report:
    """Tamper with a copy, go through the door, and make sure that nothing outside has changed."""
    copied = artefacts.copy(lab / door.artefact, tmp_path / "artefact")
    checkpoint = door.place(copied)
    tamper(copied if at_run else checkpoint)
    victim = tmp_path / "victim"
    before = digests(victim)
    again()  # composed once, here, for all children
    report = run_guarded(
        lambda: door.call(copied, checkpoint),
        cwd=tmp_path,
        writable=[copied, tmp_path / "again", tmp_path / "out"],
        untouchable=[victim],
    )
    assert not list(tmp_path.rglob("MARK"))
    assert digests(victim) == before
    return report


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def check_refused(report: Report, door: Door) -> None:
    report.check(2, *((0,) if door.falls_back else ()))
    if report.code == 0:
        assert "set aside" in report.output


@pytest.mark.parametrize("name", DOORS)
def test_every_door_opens_for_a_good_one(name, lab, tmp_path, victim):
    report = enter(DOORS[name], artefacts.seal, lab, tmp_path)
    report.check(0)
    assert "set aside" not in report.output


@pytest.mark.parametrize(("case", "door"), in_turn(WEIGHTS, DOORS))
def test_weights(case, door, lab, tmp_path, victim):
    check_refused(enter(DOORS[door], WEIGHTS[case], lab, tmp_path), DOORS[door])


@pytest.mark.parametrize(("case", "door"), in_turn(STATES, ("resume", "resume_path")))
def test_states(case, door, lab, tmp_path, victim):
    check_refused(enter(DOORS[door], STATES[case], lab, tmp_path), DOORS[door])


@pytest.mark.parametrize("case", RUNS)
def test_run_folders(case, lab, tmp_path, victim):
    check_refused(enter(DOORS["resume"], RUNS[case], lab, tmp_path, at_run=True), DOORS["resume"])


LINKS = [case for case in RUNS if "behind" in case or "pipe" in case]


@pytest.mark.parametrize(("case", "door"), in_turn(LINKS, ("eval", "export", "warm start", "resume_path")))
def test_links_at_other_doors(case, door, lab, tmp_path, victim):
    check_refused(enter(DOORS[door], RUNS[case], lab, tmp_path, at_run=True), DOORS[door])


@pytest.mark.parametrize(("case", "door"), in_turn(HARMLESS, ("resume", "export the last")))
def test_odd_and_harmless(case, door, lab, tmp_path, victim):
    enter(DOORS[door], HARMLESS[case], lab, tmp_path, at_run=True).check(0)


def test_the_corpus_is_large():
    assert len(WEIGHTS) + len(STATES) + len(RUNS) >= 180
