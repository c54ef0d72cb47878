"""TD-MPC2 on a GPU: first update, updates and plans per second, the whole loop, device memory. Prints one table.

python benchmarks/tdmpc2_gpu.py [--compile parts] [--capture none] [--precision bfloat16] [--task walker-walk]
"""

from __future__ import annotations

import argparse
import time
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
from rl_lab.orchestration.loop import run_hook

OBSERVATION, ACTION = 24, 6  # the shape of walker-walk
PHASE = Phase("benchmark", hooks=(Hook("collect"),), duration_steps=1)


class Blank(tiny.CartPoleSwingUp):
    """A world of the shape of walker-walk that costs next to nothing."""

    def __init__(self, num_envs: int, *, max_episode_steps: int = 500) -> None:
        super().__init__(num_envs, max_episode_steps=max_episode_steps)
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (OBSERVATION,), np.float32)
        self.single_action_space = spaces.Box(-1.0, 1.0, (ACTION,), np.float32)

    def _observe(self) -> np.ndarray:
        return np.zeros((self.num_envs, OBSERVATION), np.float32)


def synthetic(num_steps: int, num_envs: int, observation: int, action: int) -> Batch:
    """Return decisions in episodes of 500 steps."""
    generator = np.random.default_rng(0)
    seen = generator.normal(size=(num_steps + 1, num_envs, observation)).astype(np.float32)
    return episodes(seen, action, generator)


def built(arguments: argparse.Namespace) -> Experiment:
    """Return the experiment in a blank world, with a replay in device memory that is a tenth full."""
    make.WORLDS = {**make.WORLDS, "tiny/CartPoleSwingUp": Blank}
    changes = {
        "device": arguments.device,
        "training.compile": arguments.compile,
        "training.precision": arguments.precision,
        "environment.id": "tiny/CartPoleSwingUp",
        "environment.action_repeat": 1,
        "buffer.capacity": arguments.capacity,
        "name": "benchmark",
    }
    if arguments.task is not None:
        changes |= {"environment.id": f"dmc/{arguments.task}", "environment.action_repeat": 2}
    return build_experiment(load_experiment("tdmpc2_dmc", changes), Path("unwritten"))


def measure(arguments: argparse.Namespace) -> Rows:
    """Return the rows of the table."""
    started = time.perf_counter()
    experiment = built(arguments)
    workflow, sources, collector = experiment.workflow, experiment.sources, experiment.collector
    capture = HookCapture(experiment.seeds.generators, deferred=True) if arguments.capture == "auto" else None

    def run(hook: str, times: int) -> None:
        run_hook(Hook(hook, times, source="replay"), PHASE, workflow, collector, sources, capture=capture)

    begin = time.perf_counter()
    rows = [("built after", f"{begin - started:.1f} s")]
    shape = collector.environments.single_observation_space.shape, collector.environments.single_action_space.shape
    sources["replay"].add(synthetic(arguments.capacity // 10, 1, shape[0][0], shape[1][0]))
    sources["replay"].close_open()
    for calls, title in ((1, "first update after building"), (199, "200 updates after building")):
        run("update_agent", calls)
        torch.cuda.synchronize()
        rows.append((title, f"{time.perf_counter() - begin:.1f} s"))
    rows.append(
        ("updates per second", f"{50 * per_second(lambda: run('update_agent', 50), arguments.updates // 50):.0f}")
    )

    def step() -> None:
        run("collect", 1)
        run("update_agent", 1)

    for _ in range(10):
        step()
    rate = per_second(step, arguments.plans) * experiment.config.environment.action_repeat
    rows.append((f"environment steps per second, {arguments.task or 'blank world'}", f"{rate:.0f}"))
    act = workflow.act if capture is None else capture.act(workflow.act)
    for num_envs in arguments.environments:
        state = workflow.initial_state(num_envs)
        seen = torch.from_numpy(np.random.default_rng(0).normal(size=(num_envs, *shape[0])).astype(np.float32))

        def decide(seen: torch.Tensor = seen, state: object = state) -> None:
            act(seen.to(experiment.device), state, explore=True, generator=collector.generator).actions.cpu().numpy()

        begin = time.perf_counter()
        for _ in range(10):
            decide()
        first = time.perf_counter() - begin
        rate = per_second(decide, arguments.plans)
        rows.append((f"plans per second, {num_envs} environments", f"{rate:.0f} (ten after {first:.1f} s)"))
        rows.append((f"decisions per second, {num_envs} environments", f"{rate * num_envs:.0f}"))
    parts = [
        part for group in (experiment.parts().components, experiment.parts().controllers) for part in group.values()
    ]
    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    rows.append(("parameters", f"{sum(p.numel() for module in modules for p in module.parameters()):,}"))
    rows.append(("device memory", f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"))
    if capture is not None:
        finite = all(bool(torch.isfinite(v)) for _, metrics, _ in capture.drain() for v in metrics.values())
        rows.append(("losses finite", str(finite)))
    return rows


def main() -> None:
    """Measure, print the table, and append it to a CSV file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", default="none", choices=["none", "parts"])
    parser.add_argument("--capture", default="auto", choices=["auto", "none"])
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--task", help="a task of the control suite instead of a blank world, such as walker-walk")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--environments", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    with device_stream(arguments.device):
        rows = measure(arguments)
    how = f"capture {arguments.capture}, compile {arguments.compile}, {arguments.precision}"
    report("TD-MPC2", how, rows, arguments.csv)


if __name__ == "__main__":
    main()
