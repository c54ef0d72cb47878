"""PPO and DQN on cart-pole against stable-baselines3: speed, time to a return of 475, the Orchestrator's share.

    python benchmarks/model_free_cpu.py [throughput] [time] [overhead] [--repeats 5] [--more]

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
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "benchmarks"
PEER = ROOT / ".peers" / "sb3"
PEER_PACKAGES = ["torch==2.13.0", "stable-baselines3==2.9.2"]
SECTIONS = ("throughput", "time", "overhead")

PPO = {
    "num_envs": 8,
    "num_steps": 128,
    "batch_size": 256,
    "num_epochs": 4,
    "hidden": [64, 64],
    "learning_rate": 3e-4,
    "clip_range": 0.2,
    "linear": False,  # whether learning rate and clip range go down to zero over the run
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "value_weight": 0.5,
    "entropy_weight": 0.0,
    "max_grad_norm": 0.5,
}
PPO_TO_LEARN = PPO | {  # of the shipped experiment ppo_cartpole
    "num_steps": 32,
    "num_epochs": 10,
    "learning_rate": 1e-3,
    "linear": True,
    "gamma": 0.98,
    "gae_lambda": 0.8,
}
DQN = {  # of rl-baselines3-zoo
    "num_envs": 1,
    "train_every": 256,
    "num_updates": 128,
    "batch_size": 64,
    "hidden": [256, 256],
    "learning_rate": 2.3e-3,
    "capacity": 100_000,
    "learning_starts": 1000,
    "target_interval": 10,  # environment steps
    "gamma": 0.99,
    "exploration_fraction": 0.16,
    "final_epsilon": 0.04,
    "max_grad_norm": 10.0,
}
OURS, GYM, DOUBLE, SHIPPED, SB3 = "ours", "ours, Gymnasium's cart-pole", "ours, double", "ours, as shipped", "SB3"
TARGET = {"target": 475.0, "episodes": 10}


def jobs_of_throughput() -> Iterator[dict[str, Any]]:
    """PPO and DQN for a fixed number of steps."""
    for algorithm, knobs, steps in (("ppo", PPO, 65_536), ("dqn", DQN, 12_288)):
        extra = [] if algorithm == "ppo" else [DOUBLE]
        for variant in [SB3, OURS, *extra, GYM]:
            yield {"algorithm": algorithm, "variant": variant, "knobs": knobs, "steps": steps}


def jobs_of_time() -> Iterator[dict[str, Any]]:
    """Training until an evaluation reaches 475."""
    ppo = {"algorithm": "ppo", "knobs": PPO_TO_LEARN, "steps": 100_000, "evaluate_every": 2048}
    dqn = {"algorithm": "dqn", "knobs": DQN, "steps": 50_000, "evaluate_every": 2048}
    for job in (ppo | {"variant": SB3}, ppo | {"variant": OURS}, dqn | {"variant": SB3}, dqn | {"variant": OURS}):
        yield job | TARGET
    yield dqn | TARGET | {"variant": SHIPPED}


def jobs_of_overhead() -> Iterator[dict[str, Any]]:
    """The same PPO run through the Orchestrator and as a bare loop."""
    for variant in ("bare loop", "Orchestrator"):
        yield {"algorithm": "ppo", "variant": variant, "knobs": PPO, "steps": 65_536}


def overrides(job: dict[str, Any]) -> list[str]:
    """Express a job's hyper-parameters as overrides of the shipped experiment."""
    steps = job["steps"]
    common = [
        f"experiment.seed={job['seed']}",
        "experiment.device=cpu",
        f"training.total_timesteps={steps}",
        f"training.stop_at_return={job.get('target', 'null')}",
        f"evaluation.every={job.get('evaluate_every', 'null')}",
        f"evaluation.episodes={job.get('episodes', 1)}",
        "checkpoint.every_seconds=null",
    ]
    if job["variant"] == GYM:
        common.append("environment.id=CartPole-v1")
    if job["variant"] == SHIPPED:
        return common
    knobs = job["knobs"]
    linear = "{{_target_: rl_lab.core.schedules.Linear, start: {}, end: {}, steps: {}}}".format
    if job["algorithm"] == "ppo":
        rate, clip = knobs["learning_rate"], knobs["clip_range"]
        cycle = f"[{{collect: {knobs['num_steps']}}}, update_controller]"
        own = [
            f"environment.num_envs={knobs['num_envs']}",
            f"controllers.actor.network.hidden={knobs['hidden']}",
            f"controllers.critic.network.hidden={knobs['hidden']}",
            f"workflow.num_epochs={knobs['num_epochs']}",
            f"workflow.minibatch_size={knobs['batch_size']}",
            f"workflow.gamma={knobs['gamma']}",
            f"workflow.gae_lambda={knobs['gae_lambda']}",
            f"workflow.value_weight={knobs['value_weight']}",
            f"workflow.entropy_weight={knobs['entropy_weight']}",
            f"workflow.clip_range={linear(clip, 0.0, steps) if knobs['linear'] else clip}",
            f"optimizers.agent.learning_rate={linear(rate, 0.0, steps) if knobs['linear'] else rate}",
        ]
    else:
        # SB3 moves the target while it collects, every 10 steps; the network changes only in the 128 updates after
        # every 256 steps. So the target is the network before those updates: as a copy after every 128 updates.
        every, updates = knobs["train_every"], knobs["num_updates"]
        cycle = f"[{{collect: {every}}}, {{update_controller: {{ratio: {updates / every}}}}}]"
        first = -(-knobs["learning_starts"] // every) * every  # steps before SB3's first updates
        own = [
            "algorithm.n_step=1",
            "buffer.window=null",
            "buffer.pad=false",
            f"buffer.capacity={knobs['capacity']}",
            f"buffer.batch_size={knobs['batch_size']}",
            f"buffer.min_size={first - every}",
            f"components.q_network.hidden={knobs['hidden']}",
            f"optimizers.agent.optimizer.lr={knobs['learning_rate']}",
            f"workflow.epsilon={linear(1.0, knobs['final_epsilon'], int(knobs['exploration_fraction'] * steps))}",
            f"workflow.gamma={knobs['gamma']}",
            "workflow.target_rate=1.0",
            f"workflow.target_every={updates}",
            f"workflow.double={job['variant'] == DOUBLE}",
        ]
    phase = f"{{name: training, buffer: replay, duration_steps: {steps}, workflow_hooks: {cycle}}}"
    return [
        *common,
        *own,
        f"optimizers.agent.max_grad_norm={knobs['max_grad_norm']}",
        f"training.phases=[{phase}]",
    ]


class Stopwatch:
    """CPU and wall seconds, without the calls that are left out."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0

    def start(self) -> None:
        """Begin to count."""
        self.cpu -= time.process_time()
        self.wall -= time.perf_counter()

    def stop(self) -> None:
        """Stop counting."""
        self.cpu += time.process_time()
        self.wall += time.perf_counter()

    def leave_out(self, owner: Any, name: str) -> Stopwatch:
        """Stop while a method runs, and count that in a stopwatch of its own."""
        method, own = getattr(owner, name), Stopwatch()

        def call(*args: Any, **kwargs: Any) -> Any:
            self.stop()
            own.start()
            try:
                return method(*args, **kwargs)
            finally:
                own.stop()
                self.start()

        setattr(owner, name, call)
        return own


def run_ours(job: dict[str, Any]) -> dict[str, Any]:
    """Train as the command line does, with its records and a plain dashboard, and measure it."""
    import torch

    from rl_lab.build import build_experiment
    from rl_lab.composition import load_experiment
    from rl_lab.orchestration.dashboard import Dashboard
    from rl_lab.orchestration.loop import training_loop

    composed = load_experiment(f"{job['algorithm']}_cartpole", overrides(job))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        experiment = build_experiment(composed, folder)
        watch = Stopwatch()
        if job["variant"] == "bare loop":
            parts = experiment.parts()
            watch.start()
            for _ in training_loop(parts.workflow, parts.scheduler, parts.collector, parts.sources):
                pass
            watch.stop()
            result = {}
        else:
            orchestrator = experiment.orchestrator(folder, Dashboard(console=False))
            saving = watch.leave_out(orchestrator, "save")
            watch.leave_out(orchestrator.checkpoints, "save_best")
            watch.leave_out(experiment.evaluator.collector, "collect_episodes")
            inside = Stopwatch()
            orchestrator._events = _counted(orchestrator._events, inside)
            watch.start()
            orchestrator.run()
            watch.stop()
            result = {"loop_cpu_seconds": inside.cpu, "save_cpu_seconds": saving.cpu, "save_wall_seconds": saving.wall}
        history = experiment.evaluator.history
        if "target" in job:
            reached = history[-1].return_mean >= job["target"]
            result["reached_at"] = history[-1].env_steps if reached else None
            result["returns"] = [evaluation.return_mean for evaluation in history]
        steps, updates = experiment.scheduler.agent_steps, experiment.scheduler.updates
        if job["algorithm"] == "ppo":
            knobs = job["knobs"]
            rows = knobs["num_envs"] * knobs["num_steps"]
            updates *= knobs["num_epochs"] * -(-rows // knobs["batch_size"])
        experiment.close()
    counts = {"steps": steps, "gradient_steps": updates, "version": torch.__version__}
    return result | counts | {"cpu_seconds": watch.cpu, "wall_seconds": watch.wall}


def _counted(events: Iterator[Any], watch: Stopwatch) -> Iterator[Any]:
    """Yield the events of a loop and count the time in which it makes them."""
    while True:
        watch.start()
        event = next(events, None)
        watch.stop()
        if event is None:
            return
        yield event


def run_in_process(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a process of its own, with one thread, and return what it measured."""
    script = ["benchmarks/peers/sb3_model_free.py"] if job["variant"] == SB3 else [__file__, "--job"]
    python = PEER / "bin" / "python" if job["variant"] == SB3 else sys.executable
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    load = os.getloadavg()[0]
    done = subprocess.run(
        [str(python), *script, json.dumps(job)],
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
    *("loop_cpu_seconds", "save_cpu_seconds", "save_wall_seconds", "load"),
]


def measure(section: str, repeats: int, *, more: bool) -> None:
    """Run the jobs of a section in turns and write their raw numbers; with `more`, go on after those there are."""
    jobs = list({"throughput": jobs_of_throughput, "time": jobs_of_time, "overhead": jobs_of_overhead}[section]())
    path = RESULTS / f"model_free_cpu_{section}.csv"
    rows: list[dict[str, Any]] = []
    if more and path.exists():
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    for repeat in range(len(rows) // len(jobs), repeats):
        turn = []
        for job in jobs:
            result = run_in_process(job | {"seed": repeat})
            turn.append({"algorithm": job["algorithm"], "variant": job["variant"], "repeat": repeat} | result)
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
                found.setdefault(key, []).append({name: float(v) if v else None for name, v in row.items()})
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
        f"{platform.python_version()}.\nCPU-seconds of the training alone, medians; one process and one thread each, in "
        "turns."
    ]
    if throughput := read("throughput"):
        parts.append(throughput_table(throughput))
    if times := read("time"):
        parts.append(time_table(times))
    if overhead := read("overhead"):
        parts.append(overhead_table(overhead))
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


def loads(section: Section) -> str:
    values = [row["load"] for rows in section.values() for row in rows]
    return f"of the machine before each run: median {statistics.median(values):.1f}, highest {max(values):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"some of {', '.join(SECTIONS)}, or tables to only write those")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--more", action="store_true", help="go on after the repeats that were measured already")
    parser.add_argument("--job", help="run one job, given as JSON, in this process")
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(run_ours(json.loads(arguments.job))))
        return
    if unknown := set(arguments.sections) - {*SECTIONS, "tables"}:
        parser.error(f"unknown sections {sorted(unknown)}: choose from {', '.join(SECTIONS)}, tables")
    sections = [section for section in arguments.sections or SECTIONS if section != "tables"]
    if sections:
        make_peer()
    for section in sections:
        repeats = max(arguments.repeats, 7) if section == "overhead" else arguments.repeats
        measure(section, repeats, more=arguments.more)
    (RESULTS / "model_free_cpu.md").write_text(tables())
    print(tables())


if __name__ == "__main__":
    main()
