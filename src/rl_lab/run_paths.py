"""Run paths: which folders are runs, and where they lie below another; nothing in them is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_MARKS = ("metrics.jsonl", "summary.json", "checkpoints", "command.txt")


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's."""
    return any((folder / mark).exists() for mark in _MARKS)


def run_paths(folder: Path, max_depth: int = 4) -> Iterator[Path]:
    """Yield this folder if it is a run's, or those below it, by path; what may not be looked into is passed over."""
    if is_run(folder):
        yield folder
    elif max_depth > 0:
        try:
            below = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir())
        except OSError:
            return
        for path in below:
            yield from run_paths(Path(path), max_depth - 1)
