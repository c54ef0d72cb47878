"""What checkpoints cost: the time of one save as a share of the default interval. Prints one table.

python benchmarks/checkpoint_cost.py [--transitions 1000000] [--saves 5]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from rl_lab.build import build_experiment
from rl_lab.composition import load_experiment
from rl_lab.core.batch import Batch
from rl_lab.data.sources import ReplaySource
from rl_lab.orchestration.checkpoint import CheckpointManager

INTERVAL = 60.0  # seconds, the default


def steps(count: int, observation: int = 24, action: int = 6) -> Batch:
    generator = np.random.default_rng(0)
    seen = generator.normal(size=(count + 1, 1, observation)).astype(np.float32)
    ends = torch.zeros(count, 1, dtype=torch.bool)
    ends[999::1000] = True
    return Batch(
        observations=torch.from_numpy(seen[:-1]),
        actions=torch.from_numpy(generator.uniform(-1, 1, (count, 1, action)).astype(np.float32)),
        rewards=torch.zeros(count, 1),
        terminated=torch.zeros(count, 1, dtype=torch.bool),
        truncated=ends,
        next_observations=torch.from_numpy(seen[1:]),
    )


def replay_saves(folder: Path, transitions: int, saves: int) -> tuple[float, list[float]]:
    """Return the seconds of the first save of a full replay, and of each later one after a minute's new data."""
    source = ReplaySource(1, np.random.default_rng(0), "cpu", capacity=transitions, batch_size=256)
    chunk = steps(100_000)
    for _ in range(transitions // 100_000):
        source.add(chunk)
    manager = CheckpointManager(folder)
    minute = steps(60_000)  # a thousand steps a second
    seconds = []
    for number in range(saves + 1):
        begin = time.perf_counter()
        manager.save(number, {"sources": {"replay": source.get_state()}}, {}, {"replay": source.ring})
        seconds.append(time.perf_counter() - begin)
        source.add(minute)
    return seconds[0], seconds[1:]


def ppo_saves(folder: Path, saves: int) -> list[float]:
    experiment = build_experiment(load_experiment("ppo_cartpole", {"logging.tensorboard": False}), folder)
    orchestrator = experiment.orchestrator(folder)
    folder.mkdir(parents=True, exist_ok=True)
    seconds = []
    for _ in range(saves):
        orchestrator.train_step()
        begin = time.perf_counter()
        orchestrator.save()
        seconds.append(time.perf_counter() - begin)
    experiment.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transitions", type=int, default=1_000_000)
    parser.add_argument("--saves", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    try:
        ppo = ppo_saves(folder / "ppo", arguments.saves)
        first, later = replay_saves(folder / "replay", arguments.transitions, arguments.saves)
    finally:
        shutil.rmtree(folder)
    print("| what | median s | worst s | share of 60 s |")
    print("|---|---|---|---|")
    for name, seconds in (
        ("PPO cart-pole", ppo),
        (f"replay of {arguments.transitions:,} transitions, a minute's 60,000 new ones", later),
        ("the same, its very first save", [first]),
    ):
        median = statistics.median(seconds)
        print(f"| {name} | {median:.3f} | {max(seconds):.3f} | {median / INTERVAL:.2%} |")


if __name__ == "__main__":
    main()
