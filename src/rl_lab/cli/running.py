"""What the commands train and resume do once their arguments are known."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rl_lab.build import Experiment, build_experiment, fill_dims
from rl_lab.cli.notes import tell_notes
from rl_lab.composition import compose, select, to_yaml
from rl_lab.curriculum import Stock, tell_what_never_runs
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.runs import Outcome, resume_run, run_together, run_training

MAX_DRY_RUN_LINES = 40


def train(arguments: argparse.Namespace) -> int:
    """Train, or show what would be trained."""
    composed = compose(arguments.overrides)
    tell_notes(arguments.overrides, composed)
    if arguments.cfg:
        return _print_config(arguments, composed)
    if arguments.dry_run:
        return _dry_run(build_experiment(composed, Path("unwritten"), allow=arguments.allow))
    if arguments.seeds is None:
        outcome = run_training(
            composed,
            run_dir=arguments.run_dir,
            new=arguments.new,
            quiet=arguments.quiet,
            warm_start=arguments.warm_start,
            allow=arguments.allow,
        )
        return _report(outcome, quiet=arguments.quiet)
    seeded_runs = [compose([*arguments.overrides, f"experiment.seed={seed}"]) for seed in arguments.seeds]
    folders = [None if arguments.run_dir is None else arguments.run_dir / f"seed{seed}" for seed in arguments.seeds]
    if arguments.together:
        outcomes = run_together(seeded_runs, folders, new=arguments.new, quiet=arguments.quiet, allow=arguments.allow)
        return max(_report(outcome, quiet=arguments.quiet) for outcome in outcomes)
    code = 0
    for seeded, folder in zip(seeded_runs, folders, strict=True):
        outcome = run_training(seeded, run_dir=folder, new=arguments.new, quiet=arguments.quiet, allow=arguments.allow)
        _report(outcome, quiet=arguments.quiet)
        code = code or outcome.code
        if outcome.code:
            break
    return code


def resume(arguments: argparse.Namespace) -> int:
    """Continue a run."""
    outcome = resume_run(arguments.run, arguments.overrides, quiet=arguments.quiet, allow=arguments.allow)
    return _report(outcome, quiet=arguments.quiet)


def _report(outcome: Outcome, *, quiet: bool) -> int:
    if quiet:
        return outcome.code
    summary = outcome.summary
    state = "finished" if summary["finished"] else "stopped; the same command continues it"
    print(f"\n{summary['name']} (seed {summary['seed']}): {state}")
    print(
        f"  {summary['agent_steps']:,} agent steps, {summary['updates']:,} updates, {summary['episodes']:,} episodes, "
        f"{summary['wall_seconds']:.1f} s, {summary['steps_per_second']:,.0f} steps/s"
    )
    if summary["best_evaluation"] is not None:
        last, best = summary["last_evaluation"], summary["best_evaluation"]
        print(
            f"  return: last {last['return_mean']:.1f}, best {best['return_mean']:.1f} at {best['env_steps']:,} steps"
        )
    print(f"  {outcome.folder}")
    return outcome.code


def curve_of(folder: Path) -> list[tuple[float, float]]:
    """Return the evaluations of a run as (env_steps, mean return)."""
    points = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["key"] == "eval/return_mean":
            points.append((float(record["step"]), float(record["value"])))
    return points


def _print_config(arguments: argparse.Namespace, composed: Any) -> int:
    if arguments.resolve:
        composed = fill_dims(composed, arguments.allow)
    package = arguments.package
    if package is not None and package != "_global_":
        composed = select(composed, package)
    print(to_yaml(composed, resolved=arguments.resolve), end="")
    return 0


def _dry_run(experiment: Experiment) -> int:
    """Print the action sequence of the phases without taking a step."""
    try:
        config = experiment.config
        num_envs = config.environment.num_envs
        workflow, sources, phases = experiment.workflow, experiment.sources, experiment.scheduler.phases
        total = config.training.total_timesteps
        tell_what_never_runs(phases, sources, workflow.takes_batch, total_timesteps=total, num_envs=num_envs)
        stock = Stock(sources)
        scheduler = PhaseScheduler(phases, total_timesteps=total, ready=stock.ready, needs_source=workflow.takes_batch)
        lines: list[list[Any]] = []  # phase, hook, calls, repeats
        while (hook := scheduler.next_action()) is not None:
            phase = scheduler.current_phase()
            steps = hook.times * num_envs if hook.name == "collect" else 0
            if steps and hook.source is not None:
                stock.add(hook.source, steps)
            lines.append([phase.name, hook.name, hook.times])
            scheduler.advance(hook.name, steps=steps)
        print(f"{config.experiment.name}: {type(workflow).__name__} on {config.environment.id}")
        for text in _folded(lines)[:MAX_DRY_RUN_LINES]:
            print(f"  {text}")
        print(f"in all {scheduler.agent_steps:,} agent steps, {scheduler.updates:,} updates, {len(lines):,} actions")
    finally:
        experiment.close()
    return 0


def _folded(actions: list[list[Any]]) -> list[str]:
    """Write repeated cycles once, with how often they come."""
    texts = [f"{phase}: {name}" + (f" x {times}" if times > 1 else "") for phase, name, times in actions]
    folded: list[str] = []
    i = 0
    while i < len(texts):
        for width in range(1, 5):
            block = texts[i : i + width]
            repeats = 1
            while texts[i + repeats * width : i + (repeats + 1) * width] == block:
                repeats += 1
            if repeats > 1:
                break
        else:
            width, repeats = 1, 1
        parts = [text.split(": ", 1) for text in texts[i : i + width]]
        cycle = ", ".join(part[1] for part in parts)
        folded.append(f"{parts[0][0]}: {cycle}" + (f"   ({repeats:,} times)" if repeats > 1 else ""))
        i += width * repeats
    if len(folded) > MAX_DRY_RUN_LINES:
        hidden = len(folded) - MAX_DRY_RUN_LINES + 1
        folded = [*folded[: MAX_DRY_RUN_LINES - 1], f"… and {hidden:,} more lines"]
    return folded
