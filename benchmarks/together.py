"""Several runs of TD-MPC2 at once: decisions per second of all of them, in one process and in one process each.

python benchmarks/together.py [--runs 1 2 4 8] [--apart] [--compile parts] [--csv results/benchmarks/together.csv]

Whole runs of walker-walk (simulator, planning, updates, logging) in a folder that is thrown away. The rate is taken
from the logs between the moment when all runs have begun to train and the moment when the first one ends. `--apart`
starts a process for each run, which on a GPU take turns unless its multi-process service is on.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rl_lab.composition import load_experiment
from rl_lab.runs import run_together

SEED_STEPS = 500  # an episode of random actions before training


def overrides(arguments: argparse.Namespace) -> dict[str, object]:
    """Return a short run that does not evaluate and logs often."""
    return {
        "experiment.device": arguments.device,
        "environment.task": arguments.task,
        "training.compile": arguments.compile,
        "training.total_timesteps": SEED_STEPS + arguments.steps,
        "training.phases.0.duration_steps": SEED_STEPS,
        "training.phases.1.duration_updates": 100,
        "evaluation.every": "null",
        "logging.tensorboard": "false",
        "logging.every": 50,
    }


def train_in_one_process(arguments: argparse.Namespace, folders: list[Path]) -> None:
    """Run them interleaved."""
    words = [f"{key}={value}" for key, value in overrides(arguments).items()]
    composed = [load_experiment("tdmpc2_dmc", [*words, f"experiment.seed={seed}"]) for seed in range(len(folders))]
    run_together(composed, folders, new=True, quiet=True)


def train_apart(arguments: argparse.Namespace, folders: list[Path]) -> None:
    """Run them in processes of their own."""
    words = [f"{key}={value}" for key, value in overrides(arguments).items()]
    command = [sys.executable, "-m", "rl_lab", "train", "tdmpc2_dmc", *words, "--quiet"]
    started = [
        subprocess.Popen(
            [*command, f"experiment.seed={seed}", "--run-dir", str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for seed, folder in enumerate(folders)
    ]
    for process in started:
        if process.wait():
            raise SystemExit(f"a run failed: {process.args}")


def decisions_per_second(folders: list[Path]) -> float:
    """Return how many decisions all runs took in a second, while all of them trained."""
    logs = []
    for folder in folders:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = [row for row in rows if row["key"] == "time/steps_per_second" and row["tags"]["phase"] == "training"]
        logs.append([(row["ts"], row["tags"]["agent_steps"]) for row in rows][2:])  # the first ones record graphs
    begin, end = max(log[0][0] for log in logs), min(log[-1][0] for log in logs)
    total = 0.0
    for log in logs:
        inside = [entry for entry in log if begin <= entry[0] <= end]
        total += (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])
    return total


def main() -> None:
    """Measure every number of runs and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--apart", action="store_true", help="a process for each run")
    parser.add_argument("--compile", default="none", choices=["none", "parts"])
    parser.add_argument("--task", default="walker-walk")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    how = "one process each" if arguments.apart else "one process"
    for count in arguments.runs:
        with tempfile.TemporaryDirectory() as name:
            folders = [Path(name) / f"seed{seed}" for seed in range(count)]
            (train_apart if arguments.apart else train_in_one_process)(arguments, folders)
            rate = decisions_per_second(folders)
        print(f"| {how:<16} | compile {arguments.compile:<5} | {count} runs | {rate:7.0f} decisions/s |", flush=True)
        if arguments.csv is not None:
            with open(arguments.csv, "a", newline="") as file:
                csv.writer(file).writerow((how, arguments.compile, count, f"{rate:.1f}"))


if __name__ == "__main__":
    main()
