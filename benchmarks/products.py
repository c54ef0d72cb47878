"""Products on one CPU core: MKL and oneDNN side by side, and what the lab's use of oneDNN saves in training.

    python benchmarks/products.py [--repeats 2]

`core/products.py` gives large products to oneDNN from a size on that was found with this table; on another core it
may lie elsewhere. Experiments are trained with and without it in turns, in one process with one thread; numbers are
CPU-seconds of the training alone. The tables are written to `results/benchmarks/products.md`.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from continuous_control import train_timed

from rl_lab.cli.doctor import processor_name
from rl_lab.core import products

RESULTS = Path(__file__).parent.parent / "results" / "benchmarks"
SIZES = [(256, 64, 64), (128, 128, 128), (64, 256, 256), (256, 128, 128), (256, 256, 256), (1024, 512, 512)]
WIDE_TDMPC2 = [
    *("_dims.latent=512", "algorithm.encoder_hidden=[256]", "algorithm.hidden=[512,512]", "algorithm.num_critics=5"),
    *("components.planner.num_samples=512", "components.planner.num_iterations=6"),
    *("training.phases.0.duration_steps=50", "training.phases.0.workflow_hooks.0.collect=50"),
]
TRAINED = {
    "tdmpc2_swingup, 512 units, 5 critics, 512 samples": ("tdmpc2_swingup", 80, WIDE_TDMPC2),
    "dreamerv3_gridworld": ("dreamerv3_gridworld", 2400, []),
    "pets_swingup": ("pets_swingup", 500, []),
    "sac_pendulum": ("sac_pendulum", 1000, []),
    "td3_pendulum": ("td3_pendulum", 2000, []),
}


def best_seconds(work: Callable[[], Any], repeats: int = 200) -> float:
    """Return the least time of many calls."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def table_of_products(routine: Any) -> list[str]:
    """Compare products of rows with the weight of a linear layer."""
    lines = ["| rows x inputs x outputs | multiplications | MKL, GFLOP/s | oneDNN, GFLOP/s |", "|---|---|---|---|"]
    for rows, inputs, outputs in SIZES:
        values, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        count = rows * inputs * outputs
        by_mkl = best_seconds(lambda values=values, weight=weight: torch.mm(values, weight.T))
        by_onednn = best_seconds(lambda values=values, weight=weight: routine(values, weight, None, "none", [], ""))
        rates = [f"{2e-9 * count / seconds:.0f}" for seconds in (by_mkl, by_onednn)]
        lines.append(f"| {rows} x {inputs} x {outputs} | {count:,} | {' | '.join(rates)} |")
    return lines


def table_of_training(routine: Any, repeats: int) -> list[str]:
    """Train with and without the routine, in turns."""
    lines = ["| experiment | decisions, updates | without, CPU-s | with, CPU-s |", "|---|---|---|---|"]
    for title, (name, steps, changes) in TRAINED.items():
        seconds: dict[bool, list[str]] = {False: [], True: []}
        for turn in range(2 * repeats):
            products.ONEDNN = routine if turn % 2 else None
            found = train_timed(name, [f"training.total_timesteps={steps}", *changes])
            seconds[bool(turn % 2)].append(f"{found['cpu_seconds']:.2f}")
        lines.append(
            f"| {title} | {steps:,}, {found['updates']:,} | {', '.join(seconds[False])} | {', '.join(seconds[True])} |"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="turns of each experiment")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if products.ONEDNN is None:
        raise SystemExit("oneDNN is not used on this core: no vectors of 512 bits, or torch without oneDNN")
    routine = products.ONEDNN
    lines = [
        "# Products on one CPU core\n",
        f"Written by `benchmarks/products.py`. {processor_name()}, torch {torch.__version__}, "
        f"Python {platform.python_version()}; best of 200 calls; single runs in turns.\n",
        *table_of_products(routine),
        "",
        *table_of_training(routine, arguments.repeats),
    ]
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "products.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
