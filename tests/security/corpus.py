"""Corpora: cases in turn at doors, several to a child."""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.security.sandbox import Job, Report, run_guarded

CASES_PER_CHILD = 12
Check = Callable[[str, Report], str | None]  # case and report to what is wrong


def in_turn(cases: Iterable[str], doors: Sequence[str]) -> list:
    """Give each case to one of the doors, and some of these pairs to each test: behind all doors is one store."""
    pairs = list(zip(cases, itertools.cycle(doors), strict=False))
    lots = [pairs[i::count] for count in [-(-len(pairs) // CASES_PER_CHILD)] for i in range(count)]
    return [pytest.param(lot, id=str(i)) for i, lot in enumerate(lots)]


def run_cases(jobs: Mapping[str, Job], check: Check, environment: Mapping[str, str] | None = None) -> None:
    """Run jobs in one child; afterwards nothing outside may have changed, and no mark may be left."""
    before = {name: digests(job.cwd / "victim") for name, job in jobs.items()}
    reports = run_guarded(list(jobs.values()), environment)
    problems = {}
    for (name, job), report in zip(jobs.items(), reports, strict=True):
        problem = check(name, report)
        if list(job.cwd.rglob("MARK")) or digests(job.cwd / "victim") != before[name]:
            problem = "something outside was touched"
        if problem is not None:
            problems[name] = problem
    assert not problems, "\n\n".join(f"{name}: {problem}" for name, problem in problems.items())


def make_victim(folder: Path) -> Path:
    """Make a folder with somebody's files, outside every run."""
    (folder / "victim").mkdir(parents=True)
    for name in ("diary.txt", "000000000000-0123456789ab.safetensors"):
        (folder / "victim" / name).write_text("mine\n")
    return folder / "victim"


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
