"""Show what there is: experiments (the default), workflows, components, environments, buffers, or runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rl_lab.cli.groups import config_files
from rl_lab.cli.runs import Run, find_runs
from rl_lab.cli.terminal import table
from rl_lab.core.errors import UserError, shown

_GROUPS = {
    "experiments": ("experiment",),
    "workflows": ("workflow",),
    "components": ("components", "controller", "model"),
    "environments": ("environment",),
    "buffers": ("buffer",),
}
_KINDS = (*_GROUPS, "runs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rl-lab list`."""
    parser.add_argument("kind", nargs="?", default="experiments", metavar="KIND", help=", ".join(_KINDS))
    parser.add_argument(
        "--root", type=Path, default=Path("experiments"), metavar="DIR", help="where runs are (default experiments)"
    )


def run(arguments: argparse.Namespace) -> int:
    """List."""
    kind = arguments.kind if arguments.kind in _KINDS else f"{arguments.kind}s"
    if kind not in _KINDS:
        raise UserError(f"rl-lab list: nothing is called '{arguments.kind}'", value=arguments.kind, valid=_KINDS)
    print("\n".join(_run_lines(arguments.root) if kind == "runs" else _group_lines(kind)))
    return 0


def _group_lines(kind: str) -> list[str]:
    rows = []
    for group in _GROUPS[kind]:
        for file in config_files(group).values():
            # A nested group is chosen by its path: components/representation=identity.
            choice = "=".join(f"{group}/{file.name}".rsplit("/", 1)) if kind != "experiments" else file.name
            rows.append([choice, file.description + (" (yours)" if file.user else "")])
    if not rows:
        return [f"no {kind} found"]
    lines = table([kind.removesuffix("s"), "what it is"], rows)
    if kind == "experiments":
        others = ", ".join(name for name in _KINDS if name != "experiments")
        lines += ["", "start one:  rl-lab train NAME", f"more:       rl-lab list KIND, where KIND is one of {others}"]
    else:
        lines += ["", "choose one: rl-lab train NAME GROUP=CHOICE, as written in the first column"]
    return lines


def _run_lines(root: Path) -> list[str]:
    runs = find_runs(root)
    if not runs:
        return [f"no runs under {root}/", "", "start one:  rl-lab train NAME  (rl-lab list shows the names)"]
    header = ["experiment", "seed", "agent_steps", "last", "best", "finished", "folder"]
    return table(header, [_run_row(entry) for entry in runs], right={1, 2, 3, 4})


def _run_row(entry: Run) -> Sequence[str]:
    summary = entry.summary
    steps = summary.get("agent_steps")
    return [
        shown(entry.name),
        "?" if entry.seed is None else shown(str(entry.seed)),
        f"{steps:,}" if isinstance(steps, int) else "-",
        _mean_return(summary.get("last_evaluation")),
        _mean_return(summary.get("best_evaluation")),
        "yes" if summary.get("finished") else "no",
        entry.folder.as_posix(),
    ]


def _mean_return(evaluation: object) -> str:
    value = evaluation.get("return_mean") if isinstance(evaluation, dict) else None
    return f"{value:.1f}" if isinstance(value, (int, float)) else "-"
