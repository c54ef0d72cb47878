"""Files of curves: CSV as `rl-lab curves` writes it and reads it again, and scores that others published."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rl_lab.cli.chart import Published
from rl_lab.core.errors import UserError

DEFAULT_KEY, DEFAULT_SPREAD = "eval/return_mean", "eval/return_std"


class Row(NamedTuple):
    """One record of a metric."""

    env_steps: int
    agent_steps: int | None
    updates: int | None
    value: float
    spread: float | None = None  # standard deviation


@dataclass
class Curve:
    """One metric of one run."""

    name: str  # of the experiment, and of the variant where runs of it differ in more than their seeds
    seed: int | None
    rows: list[Row]


def print_csv(curves: Sequence[Curve], key: str) -> None:
    """Write curves to standard output."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    columns = _columns(key)
    writer.writerow(["experiment", "seed", "env_steps", "agent_steps", "updates", *columns])
    for curve in curves:
        for row in curve.rows:
            writer.writerow([curve.name, curve.seed, *row[: 3 + len(columns)]])


def read_csv(file: Path, key: str) -> list[Curve]:
    """Read what `print_csv` wrote; files without updates are those of earlier versions."""
    column = _columns(key)[0]
    curves: dict[tuple[str, int | None], Curve] = {}
    wanted = ["experiment", "seed", "env_steps", "agent_steps", column]
    for line, row in _numbered_rows(file, wanted):
        try:
            name, seed = row["experiment"], int(row["seed"]) if row["seed"] else None
            agent_steps = int(row["agent_steps"]) if row["agent_steps"] else None
            updates = int(row["updates"]) if row.get("updates") else None
            spread = float(row["return_std"]) if row.get("return_std") else None
            numbers = Row(int(row["env_steps"]), agent_steps, updates, float(row[column]), spread)
        except ValueError as error:
            raise UserError(f"{file}, line {line}: {error}", remedy="steps and seeds are whole numbers") from None
        curves.setdefault((name, seed), Curve(name, seed, [])).rows.append(numbers)
    return list(curves.values())


def read_published(file: Path) -> dict[str, list[Published]]:
    """Read scores by the experiment that they belong to."""
    scores: dict[str, list[Published]] = {}
    for line, row in _numbered_rows(file, ["experiment", "env_steps", "return_mean", "return_std", "source"]):
        try:
            numbers = [float(row[name]) for name in ("env_steps", "return_mean", "return_std")]
        except ValueError as error:
            raise UserError(f"{file}, line {line}: {error}", remedy="steps, mean and deviation are numbers") from None
        scores.setdefault(row["experiment"], []).append(Published(*numbers, row["source"]))
    return scores


def _numbered_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with open(file, newline="") as lines:
            reader = csv.DictReader(lines)
            rows = list(reader)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{file} cannot be read: {error}", remedy="give a CSV file that `rl-lab curves` wrote"
        ) from None
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise UserError(
            f"{file} has no column '{missing[0]}'", valid=reader.fieldnames or (), remedy="see `rl-lab curves --help`"
        )
    return enumerate(rows, 2)


def _columns(key: str) -> list[str]:
    return ["return_mean", "return_std"] if key == DEFAULT_KEY else [key]
