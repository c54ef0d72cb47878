"""SAC and TD3: CPU-seconds on Pendulum against stable-baselines3, and updates per second on a GPU.

    python benchmarks/continuous_control.py [--repeats 3] [--steps 3000]
    python benchmarks/continuous_control.py --gpu [--compile parts] [--capture none]

On the CPU every run is a process of its own with one thread; the contenders take turns, so that a busy machine slows
all of them, and numbers are CPU-seconds of the training alone (`time.process_time`: no start-up, no evaluation, no
checkpoints). The hyper-parameters are the same: one environment, one update per step (TD3: two after every two
steps), batches of 256, two hidden layers of 256. On the GPU the networks have the shape of HalfCheetah (17
observations, 6 actions). The tables are added to `results/benchmarks/continuous_control.md`.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from model_free_cpu import PEER, RESULTS, ROOT, make_peer
from model_free_jobs import SB3, Stopwatch

from rl_lab.cli.doctor import processor_name

OURS, GYM = "RL Lab", "RL Lab on Gymnasium's Pendulum"
COMMON = {
    "learning_rate": 1e-3,
    "capacity": 100_000,
    "learning_starts": 100,
    "batch_size": 256,
    "gamma": 0.99,
    "target_rate": 0.005,
    "hidden": [256, 256],
}
# TD3's own rhythm: two steps, two updates of the critics, one of the actor.
KNOBS = {"sac": COMMON | {"train_every": 1}, "td3": COMMON | {"train_every": 2}}
COLUMNS = ["algorithm", "variant", "repeat", "steps", "updates", "cpu_seconds", "wall_seconds", "load"]


def run_ours(job: dict[str, Any]) -> dict[str, Any]:
    """Train with the hyper-parameters of a job."""
    knobs = job["knobs"]
    overrides = [
        f"experiment.seed={job['seed']}",
        f"environment.id={'Pendulum-v1' if job['variant'] == GYM else 'tiny/Pendulum'}",
        f"training.total_timesteps={job['steps']}",
        f"training.phases.0.duration_steps={knobs['learning_starts']}",
        f"training.phases.0.workflow_hooks.0.collect={knobs['learning_starts']}",
        f"training.phases.1.workflow_hooks.0={{collect: {knobs['train_every']}}}",
        f"buffer.capacity={knobs['capacity']}",
        f"buffer.batch_size={knobs['batch_size']}",
        f"buffer.min_size={knobs['learning_starts']}",
        f"algorithm.hidden={knobs['hidden']}",
        f"workflow.gamma={knobs['gamma']}",
        f"workflow.target_rate={knobs['target_rate']}",
        *(f"optimizers.{name}.optimizer.lr={knobs['learning_rate']}" for name in ("actor", "critic")),
    ]
    return train_timed(f"{job['algorithm']}_pendulum", overrides)


def train_timed(name: str, overrides: list[str]) -> dict[str, Any]:
    """Train as the command line does, with its records, and measure it without checkpoints and evaluations."""
    import tensorboardX  # noqa: F401  (a run imports it when it begins; imports are not counted)

    from rl_lab.build import build_experiment
    from rl_lab.composition import load_experiment
    from rl_lab.orchestration.dashboard import Dashboard

    untimed = ["evaluation.every=null", "evaluation.episodes=1", "checkpoint.every_seconds=null"]
    composed = load_experiment(name, [*overrides, "experiment.device=cpu", *untimed])
    with tempfile.TemporaryDirectory() as folder:
        experiment = build_experiment(composed, Path(folder))
        orchestrator = experiment.orchestrator(Path(folder), Dashboard(console=False))
        watch = Stopwatch()
        watch.leave_out(orchestrator, "save")
        watch.leave_out(orchestrator.checkpoints, "save_best")
        watch.leave_out(experiment.evaluator.collector, "collect_episodes")
        watch.start()
        orchestrator.run()
        watch.stop()
        updates = experiment.scheduler.updates
        experiment.close()
    return {"cpu_seconds": watch.cpu, "wall_seconds": watch.wall, "updates": updates}


def run_in_process(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a process of its own, with one thread."""
    peer = job["variant"] == SB3
    python = PEER / "bin" / "python" if peer else sys.executable
    script = "benchmarks/peers/sb3_continuous.py" if peer else "benchmarks/continuous_control.py"
    words = [json.dumps(job)] if peer else ["--job", json.dumps(job)]
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    load = os.getloadavg()[0]
    done = subprocess.run(
        [str(python), script, *words],
        cwd=ROOT,
        env=os.environ | dict.fromkeys(names, "1"),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{job['variant']} failed on {job['algorithm']}:\n{done.stdout[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]) | {"load": load}


def read_rows() -> list[dict[str, Any]]:
    """Return the raw numbers of earlier measurements."""
    path = RESULTS / "continuous_control.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_rows(rows: list[dict[str, Any]]) -> None:
    """Write raw numbers."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(RESULTS / "continuous_control.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def measure_cpu(repeats: int, steps: int) -> str:
    """Let the contenders take turns; write the raw numbers and return the table."""
    make_peer()
    others = [row for row in read_rows() if int(row["steps"]) != steps]  # the table of another length stays, too
    rows: list[dict[str, Any]] = []
    for repeat in range(repeats):
        for algorithm in ("sac", "td3"):
            for variant in (SB3, OURS, GYM):
                job = {
                    "algorithm": algorithm,
                    "variant": variant,
                    "knobs": KNOBS[algorithm],
                    "steps": steps,
                    "seed": repeat,
                }
                row = {name: job[name] for name in ("algorithm", "variant", "steps")} | {"repeat": repeat}
                rows.append(row | run_in_process(job))
                print({name: rows[-1][name] for name in COLUMNS}, flush=True)
        write_rows([*others, *rows])
    loads = [row["load"] for row in rows]
    lines = [
        f"## One CPU core: Pendulum, {steps:,} steps\n",
        f"{processor_name()}, {os.cpu_count()} cores, Python {platform.python_version()}; medians of {repeats}; "
        f"load of the machine before each run: median {statistics.median(loads):.1f}, highest {max(loads):.1f}.\n",
        "| algorithm | contender | CPU-s | range | steps per CPU-s | against SB3 |",
        "|---|---|---|---|---|---|",
    ]
    for algorithm in ("sac", "td3"):
        for variant in (SB3, OURS, GYM):
            seconds = [_cpu(row) for row in rows if (row["algorithm"], row["variant"]) == (algorithm, variant)]
            peers = [_cpu(row) for row in rows if (row["algorithm"], row["variant"]) == (algorithm, SB3)]
            middle = statistics.median(seconds)
            lines.append(
                f"| {algorithm.upper()} | {variant} | {middle:.2f} | {min(seconds):.2f}-{max(seconds):.2f} "
                f"| {steps / middle:,.0f} | {statistics.median(peers) / middle:.2f}x |"
            )
    return "\n".join(lines) + "\n"


def _cpu(row: dict[str, Any]) -> float:
    return row["cpu_seconds"]


def measure_gpu(compile_parts: str, capture: str, updates: int) -> str:
    """Count updates per second on synthetic transitions that lie on the device."""
    import torch
    from tdmpc2_gpu import synthetic

    from rl_lab.build import build_experiment
    from rl_lab.composition import load_experiment
    from rl_lab.core.capture import HookCapture, device_stream
    from rl_lab.core.phase import Hook, Phase
    from rl_lab.orchestration.loop import run_hook

    lines = [
        f"## {torch.cuda.get_device_name()}: batch 256, capture {capture}, compile {compile_parts}\n",
        f"torch {torch.__version__}; each update is one replay, rows of 50 batches are drawn at a time.\n",
        "| algorithm | first updates | updates of the critics per second |",
        "|---|---|---|",
    ]
    for algorithm, cycle in (("sac", {"update_agent": 50}), ("td3", {"update_critic": 50, "update_actor": 25})):
        changes = {
            "device": "cuda",
            "training.compile": compile_parts,
            "buffer.capacity": 1_000_000,
            "buffer.storage": "device",
        }
        _shape_as_half_cheetah()
        experiment = build_experiment(load_experiment(f"{algorithm}_pendulum", changes), Path("unwritten"))
        graphs = HookCapture(experiment.seeds.generators) if capture == "auto" else None
        run = functools.partial(
            run_hook,
            phase=Phase("p", hooks=(Hook("collect"),), duration_steps=1),
            workflow=experiment.workflow,
            collector=None,
            sources=experiment.sources,
            capture=graphs,
        )
        with device_stream("cuda"):
            experiment.sources["replay"].add(synthetic(100_000, 1, 17, 6))
            begin = time.perf_counter()
            for name in cycle:
                run(Hook(name, source="replay"))
            torch.cuda.synchronize()
            first = time.perf_counter() - begin
            for turn in range(2 + updates // 50):
                if turn == 2:
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                for name, count in cycle.items():
                    run(Hook(name, count, source="replay"))
            torch.cuda.synchronize()
            rate = updates // 50 * 50 / (time.perf_counter() - begin)
        experiment.close()
        lines.append(f"| {algorithm.upper()} | {first:.2f} s | {rate:,.0f} |")
    return "\n".join(lines) + "\n"


def _shape_as_half_cheetah() -> None:
    """Give the environment the shape of HalfCheetah without its simulator."""
    import numpy as np
    from gymnasium import spaces

    from rl_lab.envs import make, tiny

    class Blank(tiny.Pendulum):
        def __init__(self, num_envs: int, *, max_episode_steps: int = 200) -> None:
            super().__init__(num_envs, max_episode_steps=max_episode_steps)
            self.single_observation_space = spaces.Box(-np.inf, np.inf, (17,), np.float32)
            self.single_action_space = spaces.Box(-1.0, 1.0, (6,), np.float32)

        def _observe(self) -> np.ndarray:
            return np.zeros((self.num_envs, 17), np.float32)

    make.WORLDS = {**make.WORLDS, "tiny/Pendulum": Blank}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="measure updates per second on a GPU")
    parser.add_argument("--repeats", type=int, default=3, help="turns on the CPU")
    parser.add_argument("--steps", type=int, default=3000, help="steps of a run on the CPU")
    parser.add_argument("--updates", type=int, default=20_000, help="updates on the GPU")
    parser.add_argument("--compile", default="none", choices=["none", "parts"])
    parser.add_argument("--capture", default="auto", choices=["auto", "none"])
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(run_ours(json.loads(arguments.job))))
        return
    if arguments.gpu:
        table = measure_gpu(arguments.compile, arguments.capture, arguments.updates)
    else:
        table = measure_cpu(arguments.repeats, arguments.steps)
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "continuous_control.md"
    kept = path.read_text() if path.exists() else "# SAC and TD3\n\nWritten by `benchmarks/continuous_control.py`.\n"
    sections = [part for part in kept.split("\n## ") if f"## {part}".split("\n")[0] != table.split("\n")[0]]
    path.write_text("\n## ".join([*(part.rstrip() + "\n" for part in sections), table.removeprefix("## ")]))
    print(table)


if __name__ == "__main__":
    main()
