"""SEC1: hostile checkpoints, exports and run folders are refused: nothing runs, nothing outside is touched."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import rl_lab
from rl_lab import cli
from rl_lab.core.errors import UserError
from tests.security import artefacts
from tests.security.artefacts import newest
from tests.security.hostile_checkpoints import HARMLESS, RUNS, STATES, WEIGHTS
from tests.security.sandbox import Report, run_guarded

AGAIN = ("train", *artefacts.DQN, f"training.total_timesteps={artefacts.STEPS}", "--quiet", "--run-dir", "again")


@dataclass(frozen=True)
class Door:
    """A way to load a checkpoint: what is tampered with, and the call."""

    artefact: str
    place: Callable[[Path], Path]
    words: tuple[str, ...]  # RUN and CHECKPOINT stand for paths
    falls_back: bool = False  # to the checkpoint before


def best(run: Path) -> Path:
    return run / "best"


def agent(export: Path) -> Path:
    return export / "agent"


DOORS = {
    "resume": Door("dqn", newest, ("resume", "RUN", "--quiet"), falls_back=True),
    "eval": Door("dqn", best, ("eval", "RUN", "--episodes", "1")),
    "eval the last": Door("dqn", newest, ("eval", "RUN", "--episodes", "1", "--checkpoint", "last"), falls_back=True),
    "export": Door("dqn", best, ("export", "RUN", "out")),
    "export the last": Door("dqn", newest, ("export", "RUN", "out", "--checkpoint", "last"), falls_back=True),
    "resume_path": Door("dqn", newest, (*AGAIN, "training.resume_path=CHECKPOINT")),
    "warm start": Door("dqn", newest, (*AGAIN, "training.resume_path=CHECKPOINT", "--warm-start")),
    "warm start from best": Door("dqn", best, (*AGAIN, "training.resume_path=CHECKPOINT", "--warm-start")),
    "load_policy": Door("dqn_export", agent, ("load_policy", "RUN")),
}
OTHERS = [name for name in DOORS if name != "load_policy"]


def spread(names: list[str]) -> list[tuple[str, str]]:
    """Give every case to `load_policy` and, in turn, to one of the other doors."""
    turns = [(name, OTHERS[i % len(OTHERS)]) for i, name in enumerate(names)]
    return [pair for name, other in turns for pair in ((name, "load_policy"), (name, other))]


def load_policy(folder: str) -> int:
    try:
        rl_lab.load_policy(folder)
    except UserError as error:
        print(f"error: {error}")
        return 2
    return 0


def enter(door: Door, tamper: Callable[[Path], None], lab: Path, tmp_path: Path, *, at_run: bool = False) -> Report:
    """Tamper with a copy, go through the door, and make sure that nothing outside has changed."""
    copied = artefacts.copy(lab / door.artefact, tmp_path / "artefact")
    checkpoint = door.place(copied)
    tamper(copied if at_run else checkpoint)
    words = [word.replace("RUN", str(copied)).replace("CHECKPOINT", str(checkpoint)) for word in door.words]
    victim = tmp_path / "victim"
    before = digests(victim)
    report = run_guarded(
        lambda: load_policy(words[1]) if words[0] == "load_policy" else cli.main(words),
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
    enter(DOORS[name], lambda folder: None, lab, tmp_path).check(0)


@pytest.mark.parametrize("name", DOORS)
def test_every_door_opens_for_one_that_is_sealed_again(name, lab, tmp_path, victim):
    report = enter(DOORS[name], artefacts.seal, lab, tmp_path)
    report.check(0)
    assert "set aside" not in report.output


@pytest.mark.parametrize(("case", "door"), spread(list(WEIGHTS)))
def test_weights(case, door, lab, tmp_path, victim):
    check_refused(enter(DOORS[door], WEIGHTS[case], lab, tmp_path), DOORS[door])


@pytest.mark.parametrize("case", STATES)
def test_states(case, lab, tmp_path, victim):
    door = DOORS["resume_path" if len(case) % 4 == 0 else "resume"]
    check_refused(enter(door, STATES[case], lab, tmp_path), door)


@pytest.mark.parametrize("case", RUNS)
def test_run_folders(case, lab, tmp_path, victim):
    check_refused(enter(DOORS["resume"], RUNS[case], lab, tmp_path, at_run=True), DOORS["resume"])


@pytest.mark.parametrize("door", ["eval", "export the last", "resume_path", "warm start"])
@pytest.mark.parametrize("case", [case for case in RUNS if "link" in case or "pipe" in case])
def test_run_folders_at_other_doors(case, door, lab, tmp_path, victim):
    if door == "eval" or "configuration" in case:
        check_refused(enter(DOORS[door], RUNS[case], lab, tmp_path, at_run=True), DOORS[door])


@pytest.mark.parametrize("door", ["resume", "export"])
@pytest.mark.parametrize("case", HARMLESS)
def test_odd_and_harmless(case, door, lab, tmp_path, victim):
    enter(DOORS[door], HARMLESS[case], lab, tmp_path, at_run=True).check(0)


def test_the_corpus_is_large():
    assert len(WEIGHTS) + len(STATES) + len(RUNS) >= 180
