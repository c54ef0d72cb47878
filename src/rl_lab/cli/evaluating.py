"""What `rl-lab eval` does once its arguments are known."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.build import Experiment
from rl_lab.cli.gif import write_gif
from rl_lab.core.batch import tree_map
from rl_lab.core.capture import CapturedAct, device_stream
from rl_lab.core.errors import UserError
from rl_lab.core.workflow import Inspection
from rl_lab.orchestration.checkpoint import BEST, Checkpoint
from rl_lab.orchestration.evaluation import play_and_inspect
from rl_lab.orchestration.files import Files
from rl_lab.orchestration.pictures import png
from rl_lab.runs import restore_agent

_PLANNER = {None: (None,), "on": (True,), "off": (False,), "both": (True, False)}
_WAYS = {None: "", True: "planner on", False: "planner off"}
_COUNTS = {"agent_steps": "agent steps", "updates": "updates"}


def evaluate(arguments: argparse.Namespace) -> int:
    """Play episodes with the agent of a run and print their returns."""
    ways = _PLANNER[arguments.planner]
    played = [_play(arguments, plan, first=plan is ways[0]) for plan in ways]
    results, inspection = [result for result, _ in played], played[0][1]
    pictures = _write_pictures(arguments.run / "dream", inspection) if arguments.dream else []
    result = {"run": str(arguments.run), **results[0]}
    if inspection.metrics:
        result["inspection"] = {name: float(value) for name, value in inspection.metrics.items()}
    if len(results) == 2:
        result["planner_off"] = results[1]
        result["planner_difference"], result["planner_difference_error"] = difference(*results)
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"{len(results[0]['returns'])} episodes of {results[0]['name']}, {_told(result)}")
    for plan, entry in zip(ways, results, strict=True):
        way = f"{_WAYS[plan]}: " if _WAYS[plan] else ""
        print(f"{way}return {entry['return_mean']:.2f} ± {entry['return_std']:.2f}, length {entry['length_mean']:.1f}")
        print(f"{way}returns: " + " ".join(f"{value:.1f}" for value in entry["returns"]))
    if len(results) == 2:
        print(
            f"planning adds {result['planner_difference']:+.2f} ± {result['planner_difference_error']:.2f} "
            "(mean over the same episodes and its standard error)"
        )
    for name, value in result.get("inspection", {}).items():
        print(f"  {name:<24} {value:12.6g}")
    for path in (*pictures, *([arguments.gif] if arguments.gif is not None else [])):
        print(f"wrote {path}")
    return 0


def _play(arguments: argparse.Namespace, plan: bool | None, *, first: bool) -> tuple[dict[str, Any], Inspection]:
    """Play with one way to act; only the first is looked into and filmed."""
    gif = arguments.gif if first else None
    experiment, checkpoint = restore_agent(
        arguments.run, which=arguments.checkpoint, allow=arguments.allow, render=gif is not None, plan=plan
    )
    workflow = experiment.workflow
    try:
        if not workflow.acts:
            raise UserError(
                f"{type(workflow).__name__} defines no act, so it cannot be evaluated",
                key="RUN",
                value=str(arguments.run),
                remedy="define act(observations, state, ...) in the workflow",
            )
        if arguments.dream and not workflow.inspects:
            raise UserError(
                f"{type(workflow).__name__} has no model to look into",
                key="--dream",
                remedy="drop --dream; a workflow that defines inspect(trajectory, ...) can draw what it sees",
            )
        collector = experiment.evaluator.collector
        if arguments.seed is not None:
            collector.seeds.run_seed = arguments.seed
        inspect = workflow.inspect if first and workflow.inspects else None
        with device_stream(experiment.device):
            act = CapturedAct(workflow.act) if experiment.captures else workflow.act
            returns, lengths, inspection = play_and_inspect(
                collector, act, arguments.episodes, inspect, explore=arguments.explore or experiment.evaluator.explore
            )
            if gif is not None:
                write_gif(gif, record_episode(experiment))
    finally:
        experiment.close()
    result: dict[str, Any] = {
        "name": experiment.config.experiment.name,
        **_found(checkpoint),
        "learns": bool(workflow.optimizers()),
        "episodes": len(returns),
        "return_mean": statistics.fmean(returns),
        "return_std": statistics.pstdev(returns),
        "length_mean": statistics.fmean(lengths),
        "returns": returns,
    }
    return result, inspection


def _found(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return which checkpoint this is and what it had counted; None where its manifest tells no number."""
    counters = checkpoint.manifest.get("counters")
    counts = {name: counters.get(name) if isinstance(counters, Mapping) else None for name in _COUNTS}
    which = "best" if checkpoint.path.name in BEST else "last"
    return {"checkpoint": which} | {name: count if type(count) is int else None for name, count in counts.items()}


def _told(result: Mapping[str, Any]) -> str:
    """Say in words what `_found` found."""
    counts = ", ".join(
        f"{word} not recorded" if result[name] is None else f"{result[name]:,} {word}" for name, word in _COUNTS.items()
    )
    early = result["checkpoint"] == "best" and result["updates"] == 0 and result["learns"]
    remark = " (nothing was learned before it; --checkpoint last takes the newest)" if early else ""
    return f"{result['checkpoint']} checkpoint: {counts}{remark}"


def difference(on: Mapping[str, Any], off: Mapping[str, Any]) -> tuple[float, float]:
    """Return the mean difference of returns of the same episodes, and its standard error (zero for a single one)."""
    differences = [left - right for left, right in zip(on["returns"], off["returns"], strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return statistics.fmean(differences), error


def _write_pictures(folder: Path, inspection: Inspection) -> list[Path]:
    files, written = Files(), []
    if not inspection.pictures:
        print("note: the agent's model had nothing to draw in these episodes", file=sys.stderr)
        return written
    try:
        files.make_folder(folder)
        for name, pixels in inspection.pictures.items():
            written.append(folder / f"{name}.png")
            files.replace(written[-1], png(pixels))
    except OSError as error:
        raise UserError(
            f"the pictures cannot be written: {error.strerror}",
            key="--dream",
            value=str(folder),
            remedy="make the run folder writable",
        ) from None
    return written


def record_episode(experiment: Experiment, max_frames: int = 500) -> list[np.ndarray]:
    """Play one episode without exploration and return what it looks like."""
    collector = experiment.evaluator.collector
    collector.episode_index[:] = 0
    collector.reset()
    frames = [collector.environments.render_frames()[0]]
    for _ in range(max_frames):
        seen = tree_map(lambda leaf: torch.from_numpy(leaf).to(collector.device), collector.observations)
        said = experiment.workflow.act(seen, collector.state, explore=False, generator=collector.generator)
        if said.state is not None:
            collector.state = said.state
        _, _, terminated, truncated, _ = collector.step(said.actions.cpu().numpy())
        if terminated[0] or truncated[0]:
            break
        frames.append(collector.environments.render_frames()[0])
    return frames
