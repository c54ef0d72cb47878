"""Dreamer on a CPU core: what an update takes, in the shipped experiments and beside the author's code of 2023.

    python benchmarks/dreamer_cpu.py [--updates 40] [--repeats 3] [--peer .peers/dreamer/bin/python]

One thread. Batches come from a replay of real decisions; numbers are CPU-milliseconds, the least of the repeats, which
take turns. The peer (benchmarks/peers/dreamer_2023.py says how to install it) has the same sizes, batch and task as the
row `2023` here; its number is the median of its updates. Rows are appended to `results/benchmarks/dreamer_cpu.csv`;
with `PYTHONPATH` at the `src` of another checkout they are those of its commit.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import rl_lab
from rl_lab.build import build_experiment
from rl_lab.cli.doctor import processor_name
from rl_lab.composition import load_experiment
from rl_lab.core.phase import Hook, Phase
from rl_lab.orchestration.loop import advance_schedules, run_hook

ROOT = Path(__file__).parent.parent
PHASE = Phase("benchmark", hooks=(Hook("collect"),), duration_steps=1)
SIZES = {"deter": 256, "units": 128, "observation_units": 128, "variables": 16, "classes": 8, "stoch": 128}
EXPERIMENTS = {
    "dreamerv1_gridworld": ("dreamerv1_gridworld", []),
    "dreamerv2_gridworld": ("dreamerv2_gridworld", []),
    "dreamerv3_gridworld": ("dreamerv3_gridworld", []),
    "dreamer_cartpole": ("dreamer_cartpole", []),
    "dreamerv3_dmc_small": ("dreamerv3_dmc_small", []),
    "2023": (
        "dreamerv3_dmc_2023",
        [
            *(f"_dims.{name}={size}" for name, size in SIZES.items()),
            *(f"components.{part}.vector.num_layers=3" for part in ("rssm.encoder", "decoder")),
            *("buffer.window=17", "training.precision=float32"),
        ],
    ),
}
THE_SAME = "--rssm.deter 256 --rssm.stoch 16 --rssm.classes 8 --.*\\.units 128 --.*\\.mlp_units 128 --.*\\.mlp_layers 3"
PEER_WORDS = f"walker-walk 0 3000 {THE_SAME} --batch_size 16 --batch_length 16 --run.train_ratio 64"


def prepare(name: str, changes: list[str]) -> Callable[[int], None]:
    """Build an experiment, fill its replay, and return what makes a number of updates."""
    experiment = build_experiment(load_experiment(name, [*changes, "experiment.device=cpu"]), Path("unwritten"))
    workflow, sources, collector = experiment.workflow, experiment.sources, experiment.collector

    def call(hook: str, times: int) -> None:
        advance_schedules(workflow, sources, experiment.scheduler)
        run_hook(Hook(hook, times, source="replay"), PHASE, workflow, collector, sources, capture=None)

    while not sources["replay"].ready:
        call("collect", 64)
    return lambda times: call("update_agent", times)


def measure_peer(python: Path) -> float:
    """Return the CPU-milliseconds of an update of the author's code, on one core."""
    script = ROOT / "benchmarks" / "peers" / "dreamer_2023.py"
    with tempfile.TemporaryDirectory() as folder:
        words = [str(python), str(script), f"{folder}/episodes.csv", *PEER_WORDS.split()]
        environment = os.environ | {"MUJOCO_GL": "disabled", "OMP_NUM_THREADS": "1"}
        core = min(os.sched_getaffinity(0))
        done = subprocess.run(
            ["taskset", "-c", str(core), *words], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    return float(re.findall(r"CPU-milliseconds of one: ([0-9.]+)", done.stdout)[-1])


def main() -> None:
    """Measure, print a table, and append it to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", type=Path, help="the Python of an environment that has the author's code")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("MUJOCO_GL", "disabled")
    prepared = {title: prepare(*experiment) for title, experiment in EXPERIMENTS.items()}
    least = dict.fromkeys(prepared, float("inf"))
    for update in prepared.values():
        update(2)
    for _ in range(arguments.repeats):
        for title, update in prepared.items():
            begin = time.process_time()
            update(arguments.updates)
            least[title] = min(least[title], 1e3 * (time.process_time() - begin) / arguments.updates)
    rows = {title: f"{milliseconds:.1f}" for title, milliseconds in least.items()}
    if arguments.peer is not None:
        rows["2023, the author's code (dreamerv3 1.5.0, jax)"] = f"{measure_peer(arguments.peer):.1f}"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(rl_lab.__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()
    path = ROOT / "results" / "benchmarks" / "dreamer_cpu.csv"
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(["commit", "processor", "torch", "experiment", "cpu_milliseconds_per_update"])
        for title, milliseconds in rows.items():
            writer.writerow([commit, processor_name(), torch.__version__, title, milliseconds])
            print(f"{title:55s} {milliseconds:>8s}")


if __name__ == "__main__":
    main()
