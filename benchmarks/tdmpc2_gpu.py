"""TD-MPC2 on a GPU: first update, updates and plans per second, device memory. Prints one table.

python benchmarks/tdmpc2_gpu.py [--compile parts] [--capture none]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from rl_lab.build import build_experiment
from rl_lab.composition import load_experiment
from rl_lab.core.batch import Batch
from rl_lab.core.capture import HookCapture, device_stream
from rl_lab.core.phase import Hook, Phase
from rl_lab.orchestration.loop import run_hook


def synthetic(num_steps: int, num_envs: int, observation: int, action: int) -> Batch:
    generator = np.random.default_rng(0)
    seen = generator.normal(size=(num_steps + 1, num_envs, observation)).astype(np.float32)
    ended = np.zeros((num_steps, num_envs), bool)
    ended[499::500] = True
    return Batch(
        observations=torch.from_numpy(seen[:-1]),
        actions=torch.from_numpy(generator.uniform(-1, 1, (num_steps, num_envs, action)).astype(np.float32)),
        rewards=torch.from_numpy(generator.uniform(0, 1, (num_steps, num_envs)).astype(np.float32)),
        terminated=torch.zeros(num_steps, num_envs, dtype=torch.bool),
        truncated=torch.from_numpy(ended),
        next_observations=torch.from_numpy(seen[1:]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", default="none", choices=["none", "parts"])
    parser.add_argument("--capture", default="auto", choices=["auto", "none"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--plans", type=int, default=300)
    parser.add_argument("--capacity", type=int, default=1_000_000)
    arguments = parser.parse_args()
    started = time.perf_counter()
    composed = load_experiment(
        "tdmpc2_dmc",
        {
            "device": arguments.device,
            "training.compile": arguments.compile,
            "environment.id": "tiny/CartPoleSwingUp",
            "environment.action_repeat": 1,
            "buffer.capacity": arguments.capacity,
            "name": "benchmark",
        },
    )
    # The shape of walker-walk without its simulator: 24 observations, 6 actions.
    from rl_lab.envs import tiny

    class Blank(tiny.CartPoleSwingUp):
        def __init__(self, num_envs: int, *, max_episode_steps: int = 500) -> None:
            super().__init__(num_envs, max_episode_steps=max_episode_steps)
            from gymnasium import spaces

            self.single_observation_space = spaces.Box(-np.inf, np.inf, (24,), np.float32)
            self.single_action_space = spaces.Box(-1.0, 1.0, (6,), np.float32)

        def _observe(self) -> np.ndarray:
            return np.zeros((self.num_envs, 24), np.float32)

    from rl_lab.envs import make

    make.WORLDS = {**make.WORLDS, "tiny/CartPoleSwingUp": Blank}
    experiment = build_experiment(composed, Path("unwritten"))
    workflow, source = experiment.workflow, experiment.sources["replay"]
    parameters = sum(
        p.numel()
        for part in experiment.parts().components.values()
        if hasattr(part, "parameters")
        for p in part.parameters()
    ) + sum(p.numel() for p in workflow.policy.parameters())
    rows = []
    with device_stream(experiment.device):
        source.add(synthetic(min(100_000, arguments.capacity // 2), 1, 24, 6))
        capture = HookCapture(experiment.seeds.generators) if arguments.capture == "auto" else None
        hook, phase = Hook("update_agent", 50, source="replay"), Phase("p", hooks=(Hook("collect"),), duration_steps=1)
        built = time.perf_counter()
        run_hook(Hook("update_agent", 1, source="replay"), phase, workflow, None, experiment.sources, capture=capture)
        torch.cuda.synchronize()
        first = time.perf_counter()
        rows.append(("built after", f"{built - started:.1f} s"))
        rows.append(("first update after building", f"{first - built:.2f} s"))
        for _ in range(4):
            run_hook(hook, phase, workflow, None, experiment.sources, capture=capture)
        torch.cuda.synchronize()
        rows.append(("200 updates after building", f"{time.perf_counter() - built:.1f} s"))
        begin = time.perf_counter()
        for _ in range(arguments.updates // 50):
            event = run_hook(hook, phase, workflow, None, experiment.sources, capture=capture)
        torch.cuda.synchronize()
        rate = arguments.updates / (time.perf_counter() - begin)
        rows.append(("updates per second", f"{rate:.0f}"))
        act = workflow.act if capture is None else capture.act(workflow.act)
        for num_envs in (1, 8, 64):
            state = workflow.initial_state(num_envs)
            seen = np.random.default_rng(0).normal(size=(num_envs, 24)).astype(np.float32)
            generator = experiment.collector.generator
            for i in range(10 + arguments.plans):
                if i == 10:
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                said = act(torch.from_numpy(seen).to(experiment.device), state, explore=True, generator=generator)
                state = said.state
                said.actions.cpu().numpy()
            rate = arguments.plans / (time.perf_counter() - begin)
            rows.append((f"plans per second, {num_envs} environments", f"{rate:.0f} ({rate * num_envs:.0f} decisions)"))
        memory = torch.cuda.max_memory_allocated() / 2**30
    rows.append(("parameters", f"{parameters:,}"))
    rows.append(("device memory", f"{memory:.2f} GiB"))
    rows.append(("losses finite", str(all(bool(torch.isfinite(v)) for v in event.metrics.values()))))
    print(f"TD-MPC2, capture {arguments.capture}, compile {arguments.compile}, torch {torch.__version__}")
    for name, value in rows:
        print(f"| {name:<36} | {value:<24} |")


if __name__ == "__main__":
    main()
