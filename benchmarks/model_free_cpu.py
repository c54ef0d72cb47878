"""PPO and DQN on cart-pole against stable-baselines3: speed, time to a return of 475, the Orchestrator's share.

    python benchmarks/model_free_cpu.py [throughput] [ppo_time] [dqn_time] [overhead] [profile] [--repeats 5] [--more]

Every run is a process of its own with one thread; the contenders take turns, so that a busy machine slows all of them.
Numbers are CPU-seconds of the training alone (`time.process_time`: no start-up, no imports, no evaluation, no
checkpoints). Raw numbers go to `results/benchmarks/*.csv`, the tables to `results/benchmarks/model_free_cpu.md`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from model_free_jobs import JOBS, SB3, Job

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "benchmarks"
PEER = ROOT / ".peers" / "sb3"
REPEATS = {"throughput": 5, "ppo_time": 25, "dqn_time": 5, "overhead": 9, "profile": 3}  # seeds differ a lot in time
PEER_PACKAGES = ["torch==2.13.0", "stable-baselines3==2.9.2"]


def run_in_process(job: Job) -> dict[str, Any]:
    """Run a job in a process of its own, with one thread, and return what it measured."""
    script = "peers/sb3_model_free.py" if job["variant"] == SB3 else f"model_free_{job.get('script', 'jobs')}.py"
    python = PEER / "bin" / "python" if job["variant"] == SB3 else sys.executable
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    load = os.getloadavg()[0]
    done = subprocess.run(
        [str(python), f"benchmarks/{script}", json.dumps(job)],
        cwd=ROOT,
        env=os.environ | dict.fromkeys(names, "1"),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{job['variant']} failed on {job['algorithm']}:\n{done.stdout[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]) | {"load": load}


def make_peer() -> None:
    """Install the peer in an environment of its own, once."""
    if not (PEER / "bin" / "python").exists():
        print(f"installing {' and '.join(PEER_PACKAGES)} in {PEER.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(PEER)], check=True)
        install = [str(PEER / "bin" / "python"), "-m", "pip", "install", "--quiet", *PEER_PACKAGES]
        subprocess.run(install, check=True)


COLUMNS = [
    *("algorithm", "variant", "repeat", "steps", "gradient_steps", "cpu_seconds", "wall_seconds", "reached_at"),
    *("loop_cpu_seconds", "save_cpu_seconds", "save_wall_seconds", "part", "load"),
]


def measure(section: str, repeats: int, *, more: bool) -> None:
    """Run the jobs of a section in turns and write their raw numbers; with `more`, go on after those there are."""
    jobs = list(JOBS[section]())
    path = RESULTS / f"model_free_cpu_{section}.csv"
    rows: list[dict[str, Any]] = []
    if more and path.exists():
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    for repeat in range(len({row["repeat"] for row in rows}), repeats):
        turn = []
        for job in jobs:
            result = run_in_process(job | {"seed": repeat})
            row = {"algorithm": job["algorithm"], "variant": job["variant"], "repeat": repeat} | result
            turn += [
                row | {"part": name, "cpu_seconds": cpu}
                for name, cpu in row.get("parts", {"": row["cpu_seconds"]}).items()
            ]
            reached = f", reached {job['target']:.0f} at {result['reached_at']}" if "target" in job else ""
            cpu, wall = result["cpu_seconds"], result["wall_seconds"]
            print(
                f"{section} {repeat + 1}/{repeats}  {job['algorithm']:4}{job['variant']:29}{cpu:8.2f} CPU-s "
                f"{wall:8.2f} s {result['steps'] / cpu:9,.0f} steps/CPU-s{reached}",
                flush=True,
            )
        rows += [{name: _rounded(row.get(name, "")) for name in COLUMNS} for row in turn]
        RESULTS.mkdir(parents=True, exist_ok=True)
        with open(path, "w", newline="") as file:  # after every turn, so that an interrupted call loses only one
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


Section = dict[tuple[str, str], list[dict[str, Any]]]  # the rows of each algorithm and variant


def read(section: str) -> Section:
    """Return the raw numbers of a section; nothing if it was never run."""
    path = RESULTS / f"model_free_cpu_{section}.csv"
    found: Section = {}
    if path.exists():
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                key = row.pop("algorithm"), row.pop("variant")
                part = row.pop("part", "")
                found.setdefault(key, []).append(
                    {name: float(v) if v else None for name, v in row.items()} | {"part": part}
                )
    return found


def median(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def spread(rows: list[dict[str, Any]], name: str) -> str:
    return f"{min(row[name] for row in rows):.2f}-{max(row[name] for row in rows):.2f}"


def tables() -> str:
    """Write the raw numbers of all sections as tables."""
    parts = [
        "# Model-free algorithms on one CPU core, against stable-baselines3 2.9.2\n\n"
        f"Written by `benchmarks/model_free_cpu.py` on {platform.machine()} with {os.cpu_count()} cores, Python "
        f"{platform.python_version()}.\nCPU-seconds of the training alone, medians; one process and one thread each, "
        "in turns."
    ]
    if throughput := read("throughput"):
        parts.append(throughput_table(throughput))
    if times := read("ppo_time") | read("dqn_time"):
        parts.append(time_table(times))
    if overhead := read("overhead"):
        parts.append(overhead_table(overhead))
    if profile := read("profile"):
        parts.append(profile_table(profile))
    return "\n\n".join(parts) + "\n"


def throughput_table(section: Section) -> str:
    lines = [
        "## Throughput",
        "",
        f"Load {loads(section)}.",
        "",
        "| algorithm | contender | steps | gradient steps | CPU-s | range | wall s | steps per CPU-s | against SB3 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (algorithm, variant), rows in section.items():
        cpu, steps = median(rows, "cpu_seconds"), median(rows, "steps")
        lines.append(
            f"| {algorithm.upper()} | {variant} | {steps:,.0f} | {median(rows, 'gradient_steps'):,.0f} | {cpu:.2f} "
            f"| {spread(rows, 'cpu_seconds')} | {median(rows, 'wall_seconds'):.2f} | {steps / cpu:,.0f} "
            f"| {median(section[algorithm, SB3], 'cpu_seconds') / cpu:.2f}x |"
        )
    return "\n".join(lines)


def time_table(section: Section) -> str:
    lines = [
        "## Time to a return of 475",
        "",
        f"The mean of ten greedy episodes, looked at every 2,048 steps. Load {loads(section)}.",
        "",
        "| algorithm | contender | seeds that reached it | steps | CPU-s | range | against SB3 |",
        "|---|---|---|---|---|---|---|",
    ]
    for (algorithm, variant), rows in section.items():
        cpu = median(rows, "cpu_seconds")
        reached = sum(row["reached_at"] is not None for row in rows)
        lines.append(
            f"| {algorithm.upper()} | {variant} | {reached} of {len(rows)} | {median(rows, 'steps'):,.0f} | {cpu:.2f} "
            f"| {spread(rows, 'cpu_seconds')} | {median(section[algorithm, SB3], 'cpu_seconds') / cpu:.2f}x |"
        )
    return "\n".join(lines)


def overhead_table(section: Section) -> str:
    bare, full = section["ppo", "bare loop"], section["ppo", "Orchestrator"]
    outside = [1.0 - row["loop_cpu_seconds"] / row["cpu_seconds"] for row in full]
    more = median(full, "cpu_seconds") / median(bare, "cpu_seconds") - 1.0
    share = f"{statistics.median(outside):.2%} ({min(outside):.2%}-{max(outside):.2%})"
    return "\n".join(
        [
            "## What the Orchestrator adds",
            "",
            f"PPO as above, with JSON lines, TensorBoard and plain dashboard. Load {loads(section)}.",
            "",
            f"| what | median of {len(full)} |",
            "|---|---|",
            f"| bare `training_loop`, CPU-s | {median(bare, 'cpu_seconds'):.3f} ({spread(bare, 'cpu_seconds')}) |",
            f"| through the Orchestrator, CPU-s | {median(full, 'cpu_seconds'):.3f} ({spread(full, 'cpu_seconds')}) |",
            f"| difference of these medians | {more:+.2%} |",
            f"| share of CPU time outside the loop, in the same run | {share} |",
            f"| one checkpoint (a run has two at least), CPU-ms | {500 * median(full, 'save_cpu_seconds'):.1f} |",
            f"| one checkpoint, wall ms (waits for the disk) | {500 * median(full, 'save_wall_seconds'):.1f} |",
        ]
    )


def profile_table(section: Section) -> str:
    lines = ["## Where the rest goes", "", f"The runs above as a bare loop. Load {loads(section)}."]
    for (algorithm, _), rows in section.items():
        lines += ["", f"| {algorithm.upper()} | share of CPU time | CPU-µs per step |", "|---|---|---|"]
        names = list(dict.fromkeys(row["part"] for row in rows))
        seconds = {name: median([row for row in rows if row["part"] == name], "cpu_seconds") for name in names}
        total, steps = sum(seconds.values()), median(rows, "steps")
        for name in sorted(names, key=lambda name: -seconds[name]):
            lines.append(f"| {name} | {seconds[name] / total:.1%} | {1e6 * seconds[name] / steps:.1f} |")
        lines.append(f"| all | 100% | {1e6 * total / steps:.1f} |")
    return "\n".join(lines)


def loads(section: Section) -> str:
    values = [row["load"] for rows in section.values() for row in rows]
    return f"of the machine before each run: median {statistics.median(values):.1f}, highest {max(values):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"some of {', '.join(JOBS)}, or tables to only write those")
    parser.add_argument("--repeats", type=int, help=f"turns of each section (default: {REPEATS})")
    parser.add_argument("--more", action="store_true", help="go on after the repeats that were measured already")
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - {*JOBS, "tables"}:
        parser.error(f"unknown sections {sorted(unknown)}: choose from {', '.join(JOBS)}, tables")
    sections = [section for section in arguments.sections or JOBS if section != "tables"]
    if sections:
        make_peer()
    for section in sections:
        measure(section, arguments.repeats or REPEATS[section], more=arguments.more)
    (RESULTS / "model_free_cpu.md").write_text(tables())
    print(tables())


if __name__ == "__main__":
    main()
