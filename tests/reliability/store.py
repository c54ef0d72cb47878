"""A little run for the checkpoint store: states that say which save they belong to, and replay that grows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.orchestration.checkpoint import Checkpoint, CheckpointManager
from rl_lab.orchestration.files import Files

FOLDER = Path("/run")
LAST = 5
BEST = (2, 4)  # saves after which the agent is the best so far
LENGTH = 4  # rows of a segment


class Rows:
    """Replay history: two segments more at every save; four are living. One page stays, two change with every save."""

    def __init__(self, number: int) -> None:
        self.number = number

    def segments(self) -> list[tuple[int, int]]:
        stop = 2 * self.number * LENGTH
        return [(start, start + LENGTH) for start in range(max(0, stop - 4 * LENGTH), stop, LENGTH)]

    def read(self, start: int, stop: int) -> dict[str, Any]:
        return {"rewards": torch.arange(start, stop, dtype=torch.float32), "steps": np.arange(start, stop)}

    def pages(self) -> list[tuple[int, int]]:
        return [(start, start + LENGTH) for start in range(0, 3 * LENGTH, LENGTH)]

    def read_page(self, start: int, stop: int) -> dict[str, Any]:
        return {"written": {"latents": torch.arange(start, stop).bfloat16() + (self.number if start else 0)}}


def state(number: int) -> dict[str, Any]:
    """What save `number` holds."""
    weights = torch.full((40, 6), float(number))
    return {"components": {"net": {"weight": weights, "bias": weights[0]}}, "counters": {"actions": number}, "run": {}}


def facts(number: int) -> dict[str, Any]:
    """What its manifest says."""
    return {"counters": {"actions": number}}


Done = Callable[[str, int], None]


def save_all(manager: CheckpointManager, done: Done = lambda what, number: None, *, survive: bool = False) -> None:
    """Save, and save the best agent, as a run does; one that survives goes on when the disk refuses."""
    for number in range(1, LAST + 1):
        with contextlib.suppress(OSError if survive else ()):
            save(manager, number)
            done("checkpoint", number)
        if number in BEST:
            with contextlib.suppress(OSError if survive else ()):
                manager.save_best(state(number), facts(number))
                done("best", number)


def save(manager: CheckpointManager, number: int) -> None:
    """Make one save."""
    manager.save(number, state(number), facts(number), {"replay": Rows(number)})


def number_of(checkpoint: Checkpoint | None) -> int:
    """Return which save this is; everything in it must be of that save. 0: there is none."""
    if checkpoint is None:
        return 0
    number = checkpoint.state["counters"]["actions"]
    assert checkpoint.manifest["counters"] == {"actions": number}
    expected = state(number)["components"]["net"]
    for name, tensor in checkpoint.state["components"]["net"].items():
        assert torch.equal(tensor, expected[name]), f"{name} is not of save {number}"
    if checkpoint.histories:
        rows = Rows(number)
        found, pages = checkpoint.histories["replay"]
        assert sorted(found) == [start for start, _ in rows.segments()]
        assert sorted(pages) == [start for start, _ in rows.pages()]
        for start, stop in rows.pages():
            expected = rows.read_page(start, stop)["written"]["latents"]
            assert torch.equal(pages[start]["written"]["latents"], expected)
        for start, stop in rows.segments():
            assert torch.equal(found[start]["rewards"], rows.read(start, stop)["rewards"])
            assert np.array_equal(found[start]["steps"], rows.read(start, stop)["steps"])
    return number


def restart(files: Files, folder: Path = FOLDER, say: Callable[[str], None] | None = None) -> CheckpointManager:
    """Return the manager of a new process."""
    return CheckpointManager(folder, files=files, say=say or (lambda text: None))
