"""Show where the time of a run, or of an experiment, goes. Nothing is written.

A run is taken where its newest checkpoint left it, finished or not. An experiment starts with buffers that are filled
by random actions. key=value changes the configuration for the profile, such as experiment.device=cpu.

examples:
  rl-lab profile experiments/dqn_cartpole/RUN
  rl-lab profile ppo_cartpole
  rl-lab profile dqn_cartpole environment.num_envs=8 --cycles 500 --json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rl_lab.cli.arguments import add_allow, positive
from rl_lab.cli.groups import config_files
from rl_lab.cli.terminal import table
from rl_lab.cli.train import normalized
from rl_lab.core.errors import UserError

if TYPE_CHECKING:
    from rl_lab.orchestration.update_cost import UpdateCost
    from rl_lab.profiling import Profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rl-lab profile`."""
    parser.add_argument("target", metavar="RUN|EXPERIMENT", help="the folder of a run, or the name of an experiment")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="key=value of any configuration key")
    parser.add_argument("--cycles", type=positive, metavar="N", help="how many cycles to time; default: five seconds")
    parser.add_argument("--phase", metavar="NAME", help="which phase; default: the next one that learns")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_allow(parser)


def run(arguments: argparse.Namespace) -> int:
    """Profile."""
    folder = Path(arguments.target)
    options = {"phase": arguments.phase, "cycles": arguments.cycles, "allow": arguments.allow}
    if folder.is_dir():
        from rl_lab.profiling import profile_run

        for word in arguments.overrides:
            if "=" not in word:
                raise UserError(
                    f"rl-lab profile: '{word}' is no key=value",
                    value=word,
                    remedy="name one run, then key=value to change its configuration for the profile",
                )
        profile = profile_run(folder, arguments.overrides, **options)
    else:
        words = normalized([arguments.target, *arguments.overrides], config_files("experiment"), "profile")

        from rl_lab.cli.notes import tell_notes
        from rl_lab.composition import compose
        from rl_lab.profiling import profile_experiment

        composed = compose(words)
        tell_notes(words, composed)
        profile = profile_experiment(composed, **options)
    print(json.dumps(asdict(profile)) if arguments.json else "\n".join(report(profile)))
    return 0


def report(profile: Profile) -> list[str]:
    """Return the profile as lines of text."""
    steps, updates = profile.agent_steps, profile.updates
    rates = [f"{steps / profile.seconds:,.0f} agent steps/s"] if steps else []
    rates += [f"{updates / profile.seconds:,.0f} updates/s"] if updates else []
    how = f"{profile.device}, updates and decisions as graphs" if profile.captured else profile.device
    lines = [
        f"{profile.name}, phase '{profile.phase}' on {how}",
        f"{profile.num_cycles:,} cycles in {profile.seconds:.2f} s: {', '.join(rates) or 'no steps, no updates'}",
        "",
    ]
    header = ["hook", "part", "seconds", "share", "per agent step", "calls", "per call"]
    lines += table(header, _rows(profile), right={2, 3, 4, 5, 6})
    lines += ["", *(text for cost in profile.costs for text in _cost_lines(cost, profile))]
    lines.append("memory: " + ", ".join(f"{place} {size / 2**20:,.0f} MiB" for place, size in profile.memory.items()))
    if profile.captured:
        lines.append("What a graph contains (gathering, writing back) counts as its update.")
    return lines


def _rows(profile: Profile) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for line in profile.lines:
        rows.append(
            [
                line.hook or "-",
                line.part,
                f"{line.seconds:.3f}",
                f"{line.seconds / profile.seconds:.1%}",
                _duration(line.seconds / profile.agent_steps) if profile.agent_steps else "-",
                f"{line.calls:,}" if line.calls else "-",
                _duration(line.seconds / line.calls) if line.calls else "-",
            ]
        )
    per_step = _duration(profile.seconds / profile.agent_steps) if profile.agent_steps else "-"
    rows.append(["all", "", f"{profile.seconds:.3f}", "100.0%", per_step, "", ""])
    return rows


def _cost_lines(cost: UpdateCost, profile: Profile) -> list[str]:
    """Say what one update computes, and how long that would take at full speed."""
    total = sum(cost.operations.values())
    timed = [line for line in profile.lines if (line.hook, line.part) == (cost.hook, "update")]
    text = f"{cost.hook}: {_count(total)} floating-point operations a call"
    if total:
        kinds = ", ".join(f"{kind} at {_count(peak)}/s" for kind, peak in cost.peaks.items())
        text += f"; arithmetic floor {_duration(cost.floor_seconds)} ({kinds}, measured)"
    if timed and timed[0].calls:
        text += f"; took {_duration(timed[0].seconds / timed[0].calls)}"
    lines = [text]
    if cost.kernels is not None and cost.kernel_seconds is not None:
        lines.append(
            f"  {cost.kernels:,} kernels a call, which keep the device busy for {_duration(cost.kernel_seconds)}"
        )
    return lines


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g} "
