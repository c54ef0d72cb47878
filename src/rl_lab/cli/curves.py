"""Print the learning curves of runs as CSV, or draw them.

examples:
  rl-lab curves experiments/dqn_cartpole > results/dqn_cartpole.csv
  rl-lab curves experiments/dqn_cartpole experiments/ppo_cartpole --plot
  rl-lab curves results/dqn_cartpole.csv --svg dqn_cartpole.svg
  rl-lab curves RUN --key train/loss

Runs of one experiment are its seeds. Where they differ in more, their names say in what: ppo [workflow.gamma=0.9].
"""

from __future__ import annotations

import argparse
import bisect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rl_lab.cli.chart import Panel, Published, chart
from rl_lab.cli.curve_files import DEFAULT_KEY, DEFAULT_SPREAD, Curve, Row, print_csv, read_csv, read_published
from rl_lab.cli.runs import Run, find_runs
from rl_lab.cli.terminal import Point, draw_curve, short, table
from rl_lab.cli.variants import experiment_of, variant_names
from rl_lab.core.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rl-lab curves`."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders, folders that hold them, or CSV files of curves"
    )
    parser.add_argument("--key", default=DEFAULT_KEY, help=f"which metric (default {DEFAULT_KEY})")
    parser.add_argument(
        "--plot", action="store_true", help="draw the mean over seeds in the terminal instead of printing CSV"
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="write a picture, a panel for each experiment, instead of CSV"
    )
    parser.add_argument(
        "--published",
        type=Path,
        metavar="CSV",
        help="scores to show in it: experiment, env_steps, return_mean, return_std, source",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print or draw."""
    if arguments.published is not None and arguments.svg is None:
        raise UserError("published scores are shown in a picture", key="--published", remedy="add --svg FILE")
    curves = read_curves(arguments.runs, arguments.key)
    if arguments.svg is not None:
        published = {} if arguments.published is None else read_published(arguments.published)
        arguments.svg.parent.mkdir(parents=True, exist_ok=True)
        arguments.svg.write_text(chart(_panels(curves, published), arguments.key))
        print(f"{arguments.svg}: {len({curve.name for curve in curves})} experiments, {len(curves)} runs")
    if arguments.plot:
        print("\n".join(_drawn(curves, arguments.key)))
    elif arguments.svg is None:
        print_csv(curves, arguments.key)
    return 0


def read_curves(folders: Sequence[Path], key: str = DEFAULT_KEY) -> list[Curve]:
    """Read one metric of all runs in these folders, ordered by experiment, variant and seed."""
    runs: dict[Path, Run] = {}
    curves = [curve for file in folders if file.suffix == ".csv" for curve in read_csv(file, key)]
    for folder in (folder for folder in folders if folder.suffix != ".csv"):
        found = find_runs(folder)
        if not found:
            raise UserError(
                f"no run in {folder}", remedy="give a run folder or a folder of runs; see `rl-lab list runs`"
            )
        runs |= {entry.folder.resolve(): entry for entry in found}
    names = variant_names(list(runs.values()))
    for entry in runs.values():
        curve = _read(entry, names[entry.folder], key)
        if curve.rows:
            curves.append(curve)
        else:
            print(f"{entry.folder}: no records of '{key}' yet", file=sys.stderr)
    if not curves:
        keys = {record["key"] for entry in runs.values() if _has_log(entry) for record in entry.records()}
        raise UserError(f"no run has records of '{key}'", key="--key", value=key, valid=keys)
    return sorted(curves, key=lambda curve: (curve.name, -1 if curve.seed is None else curve.seed))


def mean_curve(curves: Sequence[Curve]) -> list[tuple[float, float, float, float]]:
    """Return x, mean, minimum and maximum over curves, at the x of any of them that all of them cover."""
    points = _points(curves)
    first, last = max(line[0][0] for line in points), min(line[-1][0] for line in points)
    if first > last:
        return []
    grid = sorted({first, last, *(x for line in points for x, _ in line if first <= x <= last)})
    merged = []
    for x in grid:
        values = [_interpolated(line, x) for line in points]
        merged.append((x, sum(values) / len(values), min(values), max(values)))
    return merged


def axis_of(curves: Sequence[Curve]) -> str:
    """Return over what curves of one experiment are drawn: where nothing is collected, only the updates move on."""
    collected = any(row.env_steps != curve.rows[0].env_steps for curve in curves for row in curve.rows)
    known = all(row.updates is not None for curve in curves for row in curve.rows)
    learned = any(row.updates != curve.rows[0].updates for curve in curves for row in curve.rows)
    return "updates" if known and learned and not collected else "env_steps"


def _points(curves: Sequence[Curve]) -> list[list[Point]]:
    axis = axis_of(curves)
    return [[(getattr(row, axis), row.value) for row in curve.rows] for curve in curves]


def _read(entry: Run, name: str, key: str) -> Curve:
    means: dict[tuple[int, int | None], tuple[int | None, int | None, float]] = {}
    spread: dict[tuple[int, int | None], float] = {}
    wanted = (key, DEFAULT_SPREAD) if key == DEFAULT_KEY else (key,)
    for record in entry.records(*wanted) if _has_log(entry) else ():
        value, tags = record["value"], record["tags"]
        if isinstance(value, list):
            raise UserError(f"'{key}' holds lists, not numbers", key="--key", value=key)
        value = float("nan") if value is None else value
        moment = (record["step"], tags.get("updates"))  # offline, only the updates move on
        if record["key"] == key:
            means[moment] = (tags.get("agent_steps"), tags.get("updates"), value)
        else:
            spread[moment] = value
    rows = [Row(step, *found, spread.get((step, updates))) for (step, updates), found in means.items()]
    return Curve(name, entry.seed, rows)


def _panels(curves: Sequence[Curve], published: Mapping[str, Sequence[Published]]) -> list[Panel]:
    panels = []
    for name, own in _by_experiment(curves):
        merged = mean_curve(own) if own else []
        if not merged:
            continue
        panels.append(
            Panel(
                f"{name} ({len(own)} run{'' if len(own) == 1 else 's'})",
                [(x, mean) for x, mean, _, _ in merged],
                [(x, low, high) for x, _, low, high in merged] if len(own) > 1 else [],
                _points(own) if len(own) > 1 else [],
                published.get(experiment_of(name), ()) if axis_of(own) == "env_steps" else (),
                axis_of(own),
            )
        )
    return panels


def _by_experiment(curves: Sequence[Curve]) -> Iterator[tuple[str, list[Curve]]]:
    """Yield the names and the curves of each, without numbers that are not finite."""
    for name in dict.fromkeys(curve.name for curve in curves):
        finite = [
            Curve(c.name, c.seed, [row for row in c.rows if row.value == row.value]) for c in curves if c.name == name
        ]
        yield name, [curve for curve in finite if curve.rows]


def _has_log(entry: Run) -> bool:
    return (entry.folder / "metrics.jsonl").exists()


def _drawn(curves: Sequence[Curve], key: str) -> list[str]:
    lines, rows, axes = [], [], set()
    for name, finite in _by_experiment(curves):
        merged = mean_curve(finite) if finite else []
        axis = axis_of(finite)
        title = f"{name}: {key} over {axis}, mean and range of {len(finite)} run{'' if len(finite) == 1 else 's'}"
        band = [(x, low, high) for x, _, low, high in merged] if len(finite) > 1 else []
        lines += [draw_curve([(x, mean) for x, mean, _, _ in merged], title=title, band=band), ""]
        if merged:
            axes.add(axis)
            x, mean, low, high = merged[-1]
            highest = max(entry[1] for entry in merged)
            rows.append([name, str(len(finite)), short(x), *map(_number, (mean, low, high, highest))])
    header = ["experiment", "runs", " or ".join(sorted(axes)) or "env_steps", "last mean", "min", "max", "highest mean"]
    return lines + table(header, rows, right=range(1, 7))


def _number(value: float) -> str:
    """Return a number with one decimal, or four significant digits where that is more."""
    return f"{value:.1f}" if abs(value) >= 100.0 else f"{value:.4g}"


def _interpolated(line: Sequence[Point], x: float) -> float:
    i = bisect.bisect_right(line, (x, float("inf")))
    if i and line[i - 1][0] == x:
        return line[i - 1][1]  # of several evaluations at one x, the last
    (x0, y0), (x1, y1) = line[i - 1], line[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
