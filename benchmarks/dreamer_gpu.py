"""Dreamer v3 on a GPU: first update, updates per second, decisions per second, device memory. Prints one table.

python benchmarks/dreamer_gpu.py [--observation vector] [--model dreamerv3_50m] [--compile parts] [--capture none]
                                 [--precision float32] [--profile] [--csv results/benchmarks/dreamer_gpu.csv]

The replay lies on the device and holds latents; a batch is 16 windows of 64 steps and one row of context.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gpu_table import Rows, episodes, per_second, report
from gymnasium import spaces

from rl_lab.build import build_experiment
from rl_lab.composition import load_experiment
from rl_lab.core.batch import Batch
from rl_lab.core.capture import HookCapture, device_stream
from rl_lab.core.phase import Hook, Phase
from rl_lab.envs import make, tiny
from rl_lab.experiment import Experiment
from rl_lab.orchestration.loop import advance_schedules, run_hook

SHAPES = {"image": (3, 64, 64), "vector": (24,)}
ACTION = 6
PHASE = Phase("benchmark", hooks=(Hook("collect"),), duration_steps=1)


def blank(kind: str) -> type[tiny.CartPoleSwingUp]:
    """Return a world of one shape of observation that costs next to nothing."""
    image = kind == "image"
    dtype = np.uint8 if image else np.float32

    class Blank(tiny.CartPoleSwingUp):
        def __init__(self, num_envs: int, *, max_episode_steps: int = 500) -> None:
            super().__init__(num_envs, max_episode_steps=max_episode_steps)
            low, high = (0, 255) if image else (-np.inf, np.inf)
            self.single_observation_space = spaces.Box(low, high, SHAPES[kind], dtype)
            self.single_action_space = spaces.Box(-1.0, 1.0, (ACTION,), np.float32)

        def _observe(self) -> np.ndarray:
            return np.zeros((self.num_envs, *SHAPES[kind]), dtype)

    return Blank


def synthetic(num_steps: int, num_envs: int, kind: str, extras: dict[str, torch.Tensor]) -> Batch:
    """Return decisions in episodes of 500 steps, with latents like the given ones."""
    generator = np.random.default_rng(0)
    shape = (num_steps + 1, num_envs, *SHAPES[kind])
    if kind == "image":
        seen = generator.integers(0, 256, shape, np.uint8)
    else:
        seen = generator.normal(size=shape).astype(np.float32)
    return episodes(seen, ACTION, generator, extras)


def build(arguments: argparse.Namespace) -> Experiment:
    """Build the experiment of the control suite around a blank world."""
    make.WORLDS = {**make.WORLDS, "tiny/CartPoleSwingUp": blank(arguments.observation)}
    changes = {
        "name": "benchmark",
        "device": arguments.device,
        "environment.id": "tiny/CartPoleSwingUp",
        "environment.action_repeat": 1,
        "buffer.capacity": arguments.capacity,
        "training.precision": arguments.precision,
        "training.compile": arguments.compile,
        "optimizers.model.learning_rate.start": 4e-5,
    }
    words = [f"model={arguments.model}", *(f"{key}={value}" for key, value in changes.items() if "." in key)]
    words += [f"experiment.name={changes['name']}", f"experiment.device={changes['device']}"]
    return build_experiment(load_experiment("dreamerv3_dmc", words), Path("unwritten"))


def measure(arguments: argparse.Namespace) -> Rows:
    """Measure one way of running."""
    begin = time.perf_counter()
    experiment = build(arguments)
    workflow, sources, collector = experiment.workflow, experiment.sources, experiment.collector
    capture = HookCapture(experiment.seeds.generators) if arguments.capture == "auto" else None
    rows: Rows = [("built after", f"{time.perf_counter() - begin:.1f} s")]

    def update(times: int) -> None:
        advance_schedules(workflow, sources, experiment.scheduler)
        hook = Hook("update_agent", times, source="replay")
        run_hook(hook, PHASE, workflow, collector, sources, capture=capture)

    num_envs = collector.num_envs
    seen = torch.from_numpy(collector.observations).to(experiment.device)
    said = workflow.act(seen, workflow.initial_state(num_envs), generator=collector.generator)
    for _ in range(4):
        sources["replay"].add(synthetic(500, num_envs, arguments.observation, dict(said.extras)))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for times, title in ((1, "first update"), (9, "ten updates")):
        update(times)
        torch.cuda.synchronize()
        rows.append((f"{title} after", f"{time.perf_counter() - begin:.1f} s"))
    rows.append(("updates per second", f"{10 * per_second(lambda: update(10), arguments.updates // 10):.1f}"))
    act, state = workflow.act if capture is None else capture.act(workflow.act), workflow.initial_state(num_envs)

    def decide() -> None:
        act(seen, state, explore=True, generator=collector.generator).actions.cpu()

    for _ in range(8):
        decide()
    rows.append((f"decisions per second, {num_envs} environments", f"{num_envs * per_second(decide, 200):.0f}"))
    parts = (*experiment.components.values(), *experiment.controllers.values())
    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    rows.append(("parameters", f"{sum(p.numel() for module in modules for p in module.parameters()):,}"))
    rows.append(("device memory", f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"))
    finite = all(bool(torch.isfinite(p).all()) for module in modules for p in module.parameters())
    rows.append(("weights finite", str(finite)))
    if arguments.profile:
        profile(update)
    return rows


def profile(update: Callable[[int], None]) -> None:
    """Print where the time of one update goes, by kernel."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        update(3)
        torch.cuda.synchronize()
    kernels = recorded.key_averages()
    total, count = sum(k.self_device_time_total for k in kernels) / 3e3, sum(k.count for k in kernels) / 3
    print(f"one update: {count:.0f} kernels, {total:.1f} ms of kernel time")
    for kernel in sorted(kernels, key=lambda k: -k.self_device_time_total)[:30]:
        print(f"{kernel.self_device_time_total / 3e3:8.3f} ms {kernel.count / 3:7.0f} x  {kernel.key[:110]}")


def main() -> None:
    """Measure, print the table, and append it to a CSV file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--observation", default="image", choices=sorted(SHAPES))
    parser.add_argument("--model", default="dreamerv3")
    parser.add_argument("--compile", default="none", choices=["none", "parts"])
    parser.add_argument("--capture", default="auto", choices=["auto", "none"])
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--capacity", type=int, default=100_000)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    with device_stream(arguments.device):
        rows = measure(arguments)
    how = f"{arguments.model}, {arguments.observation}, capture {arguments.capture}, compile {arguments.compile}"
    report("Dreamer", f"{how}, {arguments.precision}", rows, arguments.csv)


if __name__ == "__main__":
    main()
