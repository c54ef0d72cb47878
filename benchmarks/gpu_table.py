"""What the benchmarks of updates on a GPU share: made-up episodes, rates, and the table that they print."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from rl_lab.core.batch import Batch

Rows = list[tuple[str, str]]


def episodes(
    seen: np.ndarray, action: int, generator: np.random.Generator, extras: Mapping[str, torch.Tensor] | None = None
) -> Batch:
    """Return decisions between observations [T + 1, N, ...] in episodes of 500 steps, with the first row of extras."""
    num_steps, num_envs = len(seen) - 1, seen.shape[1]
    ended = np.zeros((num_steps, num_envs), bool)
    ended[499::500] = True
    given = extras or {}
    columns = {name: leaf.cpu()[:1].expand(num_steps, num_envs, *leaf.shape[1:]) for name, leaf in given.items()}
    return Batch(
        observations=torch.from_numpy(seen[:-1]),
        actions=torch.from_numpy(generator.uniform(-1, 1, (num_steps, num_envs, action)).astype(np.float32)),
        rewards=torch.from_numpy(generator.uniform(0, 1, (num_steps, num_envs)).astype(np.float32)),
        terminated=torch.zeros(num_steps, num_envs, dtype=torch.bool),
        truncated=torch.from_numpy(ended),
        next_observations=torch.from_numpy(seen[1:]),
        extras=columns,
    )


def per_second(function: Callable[[], object], calls: int) -> float:
    """Return how often a function runs in a second, the device's work included."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    torch.cuda.synchronize()
    return calls / (time.perf_counter() - begin)


def report(title: str, how: str, rows: Rows, path: Path | None) -> None:
    """Print the table, and append it to a CSV file if one is given."""
    print(f"{title}, {how}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for name, value in rows:
        print(f"| {name:<44} | {value:<24} |")
    if path is not None:
        with open(path, "a", newline="") as file:
            csv.writer(file).writerows((how, name, value) for name, value in rows)
