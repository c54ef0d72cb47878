"""What two runs have in common: every tensor, replay byte, generator and record; not the time they took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.data.replay import Ring
from rl_lab.orchestration.checkpoint import Checkpoint, CheckpointManager

WALL_TIME = ("run/wall_seconds", "run/jsonl_offset")  # the log holds times, so its length depends on them


def newest(folder: Path) -> Checkpoint:
    """Return the newest checkpoint, which must be good."""
    manager = CheckpointManager(folder)
    return manager.load(manager.numbered()[-1])


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Return path -> value, tensors and arrays as type, shape and bytes."""
    if isinstance(tree, dict):
        return {key: leaf for name, value in tree.items() for key, leaf in flat(value, f"{path}/{name}").items()}
    if isinstance(tree, (list, tuple)):
        return {key: leaf for i, value in enumerate(tree) for key, leaf in flat(value, f"{path}/{i}").items()}
    if isinstance(tree, (torch.Tensor, np.ndarray)):
        tree = tree.view(torch.int16) if isinstance(tree, torch.Tensor) and tree.dtype == torch.bfloat16 else tree
        array = np.asarray(tree)
        return {path[1:]: (str(array.dtype), array.shape, array.tobytes())}
    return {path[1:]: tree}


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the log without wall time; every line must be one."""
    lines = (folder / "metrics.jsonl").read_text().split("\n")
    assert lines.pop() == "", "the last line is torn"
    found = [json.loads(line) for line in lines]
    for record in found:
        assert record.keys() == {"ts", "step", "key", "value", "tags"}
        del record["ts"]
        if record["key"].startswith("time/"):
            record["value"] = None
    return found


def rings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the replay as a run gets it back, from segments and tail."""
    found = {}
    for name, state in checkpoint.state["sources"].items():
        if "ring" in state:
            num_rows, num_envs = state["ring"]["shape"]
            ring = Ring(num_envs, (num_rows - 1) * num_envs)
            ring.set_state(state["ring"], *checkpoint.histories.get(name, ()))
            found[name] = {**ring.get_state(), "steps": ring.steps, "last": ring.last, "columns": ring.columns}
    return found


def snapshot(folder: Path) -> dict[str, Any]:
    """Return everything that must not depend on how often a run was stopped."""
    checkpoint = newest(folder)
    state = {name: value for name, value in checkpoint.state.items() if name != "sources"}
    sources = {
        name: {key: value for key, value in state.items() if key != "ring"}
        for name, state in checkpoint.state["sources"].items()
    }
    found = flat({**state, "sources": sources, "rings": rings(checkpoint)})
    for name in WALL_TIME:
        del found[name]
    found["number"] = checkpoint.path.name
    best = CheckpointManager(folder).load_best()
    found |= flat({"best": None if best is None else {**best.state, "counters": best.manifest["counters"]}})
    for place, record in enumerate(records(folder)):
        found[f"record {place}"] = json.dumps(record, sort_keys=True)
    summary = json.loads((folder / "summary.json").read_text())
    return found | {
        f"summary {key}": value for key, value in summary.items() if key not in ("wall_seconds", "steps_per_second")
    }


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Return where two snapshots differ."""
    absent = object()
    return [name for name in sorted(left.keys() | right.keys()) if left.get(name, absent) != right.get(name, absent)]
