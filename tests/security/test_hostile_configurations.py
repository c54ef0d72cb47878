"""SEC2: hostile configurations, from a run, an export or a file of one's own, build nothing that could do harm."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import yaml

import rl_lab
from rl_lab import cli
from rl_lab.core.errors import UserError
from rl_lab.targets import ALLOWED_PACKAGES
from tests.security import artefacts
from tests.security.corpus import in_turn, make_victim, run_cases
from tests.security.hostile_configurations import (
    ABSENT,
    EVIL,
    EXPERIMENT_PLACES,
    HARMLESS,
    HARMLESS_SEARCH,
    PLACES,
    RESOLVERS,
    SCHEMA,
    SEARCH,
    TARGETS,
    YAML,
    Edit,
    network,
    write,
)
from tests.security.sandbox import Job, Report

CANARY = "canary-3f9a7c1e55d2"
OWN = "own file"
DOORS = ["load_policy", "eval", "load_policy", "export", "load_policy", "resume"]
AT_TARGETS = {target: network(target, **arguments) for target, arguments in TARGETS.items()}
SHIPPED = Path(rl_lab.__file__).parent / "configs" / "experiment" / "dqn_cartpole.yaml"


def enter(
    cases: Sequence[tuple[str, str]],
    corpus: Mapping[str, Edit],
    check: Callable[[Report], str | None],
    lab: Path,
    tmp_path: Path,
) -> None:
    """Load changed configurations through doors, where Python would find an evil module."""
    good = yaml.safe_load((lab / "dqn" / "config.yaml").read_text())
    jobs = {}
    for i, (case, door) in enumerate(cases):
        written = write(corpus[case], good)
        jobs[f"{case[:100]} at {door}"] = job(door, written, lab, tmp_path / str(i))
    run(jobs, check)


def job(door: str, written: str, lab: Path, folder: Path) -> Job:
    victim, evil = make_victim(folder), folder / f"{EVIL}.py"
    evil.write_text("open('MARK', 'w')\n")
    copied, out = folder / "artefact", folder / "out"
    calls = {
        "load_policy": partial(load_policy, copied),
        "eval": partial(cli.main, ["eval", str(copied), "--episodes", "1"]),
        "export": partial(cli.main, ["export", str(copied), str(out)]),
        "resume": partial(cli.main, ["resume", str(copied), "--quiet"]),
        OWN: partial(cli.main, ["train", "experiment=hostile", "--dry-run"]),
    }
    if door == OWN:
        own = folder / "configs" / "experiment" / "hostile.yaml"
        own.parent.mkdir(parents=True)
        own.write_text("# @package _global_\n" + written)
    else:
        artefacts.copy(lab / ("dqn_export" if door == "load_policy" else "dqn"), copied)
        artefacts.set_config(copied, written)
    return Job(partial(beside_own_modules, calls[door]), folder, [copied, out], untouchable=[victim, evil])


def run(jobs: Mapping[str, Job], check: Callable[[Report], str | None]) -> None:
    def unmarked(name: str, report: Report) -> str | None:
        leaks = CANARY in report.output or "\x1b" in report.output
        return f"it shows what it should not: {report.output!r}" if leaks else check(report)

    run_cases(jobs, unmarked, environment={"CANARY": CANARY})


def beside_own_modules(call: Callable[[], int]) -> int:
    """Let Python find modules in the working directory, as in a notebook."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        return call()
    finally:
        sys.path[:] = before


def load_policy(folder: Path) -> int:
    try:
        rl_lab.load_policy(folder)
    except UserError as error:
        print(f"error: {error}")
        return 2
    return 0


def refused(report: Report) -> str | None:
    return report.problem(2)


def refused_with_list(report: Report) -> str | None:
    listed = all(package in report.output for package in ALLOWED_PACKAGES)
    return report.problem(2) if listed else f"the packages are not listed: {report.output}"


def loaded(report: Report) -> str | None:
    return report.problem(0)


@pytest.mark.parametrize("door", [*dict.fromkeys(DOORS), OWN])
def test_every_door_opens_for_a_good_one(door, lab, tmp_path):
    enter([("good", door)], {"good": lambda config: None}, loaded, lab, tmp_path)


@pytest.mark.parametrize("cases", in_turn(TARGETS, DOORS))
def test_targets(cases, lab, tmp_path):
    enter(cases, AT_TARGETS, refused_with_list, lab, tmp_path)


@pytest.mark.parametrize("cases", in_turn(list(TARGETS)[::8], [OWN]))
def test_targets_in_own_files(cases, lab, tmp_path):
    enter(cases, AT_TARGETS, refused_with_list, lab, tmp_path)


@pytest.mark.parametrize("cases", in_turn(ABSENT, ["load_policy"]))
def test_names_that_are_absent(cases, lab, tmp_path):
    enter(cases, {name: network(name) for name in ABSENT}, refused, lab, tmp_path)


@pytest.mark.parametrize("cases", in_turn(PLACES, ["load_policy", "load_policy", "eval", OWN]))
def test_places(cases, lab, tmp_path):
    enter(cases, PLACES, refused, lab, tmp_path)


@pytest.mark.parametrize("cases", in_turn(EXPERIMENT_PLACES, ["eval", "resume", OWN]))
def test_places_in_an_experiment(cases, lab, tmp_path):
    enter(cases, EXPERIMENT_PLACES, refused, lab, tmp_path)


@pytest.mark.parametrize("cases", in_turn(SCHEMA, ["eval", "export", "resume"]))
def test_schema(cases, lab, tmp_path):
    enter(cases, SCHEMA, refused, lab, tmp_path)


@pytest.mark.parametrize("cases", in_turn(RESOLVERS, DOORS))
def test_resolvers(cases, lab, tmp_path):
    enter(cases, RESOLVERS, refused, lab, tmp_path)


@pytest.mark.parametrize("cases", in_turn(YAML, DOORS))
def test_yaml(cases, lab, tmp_path):
    enter(cases, YAML, refused, lab, tmp_path)


OBJECTS = [case for case in YAML if "!!python/object" in case and "pathlib" not in case]


@pytest.mark.parametrize("cases", in_turn(OBJECTS, [OWN]))
def test_objects_in_own_files(cases, lab, tmp_path):
    enter(cases, YAML, refused, lab, tmp_path)


def test_search(lab, tmp_path):
    jobs = {}
    for i, (case, (file, written)) in enumerate(SEARCH.items()):
        folder = tmp_path / str(i)
        (make_victim(folder) / "other.yaml").write_text("algorithm: {stolen: true}\n")
        (folder / EVIL).mkdir()
        (folder / EVIL / "__init__.py").write_text("open('MARK', 'w')\n")
        path = folder / "configs" / file
        path.parent.mkdir(parents=True)
        path.write_text("# @package _global_\n" + written)
        call = partial(cli.main, ["train", "experiment=x", "--cfg", "job", "--resolve"])
        untouchable = [folder / "victim", folder / EVIL]
        jobs[case] = Job(partial(beside_own_modules, call), folder, untouchable=untouchable)
    run(jobs, refused)


def test_what_hydra_would_do_is_not_done(lab, tmp_path):
    jobs = {
        case: job(OWN, SHIPPED.read_text() + addition, lab, tmp_path / str(i))
        for i, (case, addition) in enumerate(HARMLESS_SEARCH.items())
    }
    run(jobs, loaded)


@pytest.mark.parametrize("cases", in_turn(HARMLESS, ["load_policy", "eval"]))
def test_odd_and_harmless(cases, lab, tmp_path):
    enter(cases, HARMLESS, loaded, lab, tmp_path)


def test_the_corpus_is_large():
    assert len(TARGETS) + len(PLACES) + len(EXPERIMENT_PLACES) + len(SCHEMA) + len(RESOLVERS) + len(YAML) >= 200
