"""Planners with known dynamics: return against samples and time per plan; on a GPU, 64 environments against one.

    python benchmarks/planners.py [--episodes 3]
    python benchmarks/planners.py --gpu

Cart-pole (return of at most 500) and our swing-up (solved: 400), whole episodes, no exploration. Samples are sequences
tried for one decision. The tables go to `results/benchmarks/planners.md`.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path
from typing import Any

import torch

from rl_lab.components.dynamics.analytic import CartPoleModel, QuadraticValue, SwingUpModel
from rl_lab.components.planners.cem import CEM
from rl_lab.components.planners.icem import ICEM
from rl_lab.components.planners.mcts import GumbelSearch
from rl_lab.components.planners.mppi import MPPI
from rl_lab.components.planners.shooting import RandomShooting
from rl_lab.core.capture import CapturedAct, device_stream
from rl_lab.core.seeding import SeedTree
from rl_lab.data.collector import RolloutCollector
from rl_lab.envs.make import make_env
from rl_lab.workflows.mpc import MPCWorkflow

RESULTS = Path(__file__).resolve().parent.parent / "results" / "benchmarks"
HORIZON = 40  # steps of the swing-up
CART_POLE = [
    RandomShooting(2, 12, 128, discrete=True),
    CEM(2, 12, 64, 8, 3, discrete=True),
    ICEM(2, 12, 24, 6, 3),
    MPPI(2, 20, 128, 0, 16, 4, temperature=2.0),
    GumbelSearch(2, 32, max_depth=12),
]
SWING_UP = [
    RandomShooting(1, HORIZON, 1000),
    CEM(1, HORIZON, 15, 4, 4),
    CEM(1, HORIZON, 30, 5, 4),
    CEM(1, HORIZON, 60, 6, 4),
    ICEM(1, HORIZON, 10, 4, 2, decay=1.0, noise_exponent=3.0),
    ICEM(1, HORIZON, 10, 4, 4, decay=1.0, noise_exponent=3.0),
    ICEM(1, HORIZON, 20, 6, 4, decay=1.0, noise_exponent=3.0),
    MPPI(1, HORIZON, 64, 0, 8, 4, temperature=1.0, select="mean"),
]


def num_samples(planner: Any) -> int:
    """Return how many sequences a planner tries for one decision."""
    if isinstance(planner, ICEM):
        return sum(planner.sample_counts)
    if isinstance(planner, GumbelSearch):
        return planner.num_simulations
    return planner.num_samples * (planner.num_iterations if isinstance(planner, (CEM, MPPI)) else 1)


def play(id: str, model: Any, planner: Any, critic: Any, episodes: int) -> tuple[list[float], float]:
    """Return the returns of whole episodes, all at once, and milliseconds of CPU per plan of one environment."""
    workflow = MPCWorkflow(model, planner, torch.Generator().manual_seed(0), critic)
    collector = RolloutCollector(make_env(id, episodes), SeedTree(0), initial_state=workflow.initial_state(episodes))
    returns, _ = collector.collect_episodes(workflow.act, episodes)
    seen, state = torch.from_numpy(collector.observations[:1]), workflow.initial_state(1)
    begin = time.process_time()
    for _ in range(20):
        state = workflow.act(seen, state, generator=collector.generator).state
    return returns, (time.process_time() - begin) / 20 * 1e3


def tables(episodes: int) -> str:
    """Play both worlds with every planner."""
    torch.set_num_threads(1)
    lines = [f"## One CPU core, {episodes} episodes\n", f"{platform.machine()}, torch {torch.__version__}.\n"]
    critic = QuadraticValue([1.0, 0.3, 30.0, 1.0], best=100.0)
    for id, model, planners, value in (
        ("tiny/CartPole", CartPoleModel(), CART_POLE, critic),
        ("tiny/CartPoleSwingUp", SwingUpModel(), SWING_UP, None),
    ):
        lines += [f"### {id}\n", "| planner | samples per plan | horizon | mean return | least | ms per plan |"]
        lines.append("|---|---|---|---|---|---|")
        for planner in planners:
            returns, cost = play(id, model, planner, value, episodes)
            horizon = planner.max_depth if isinstance(planner, GumbelSearch) else planner.horizon
            mean = sum(returns) / len(returns)
            row = f"| {type(planner).__name__} | {num_samples(planner)} | {horizon} | {mean:.1f} | {min(returns):.1f} "
            lines.append(row + f"| {cost:.1f} |")
            print(lines[-1], flush=True)
        lines.append("")
    return "\n".join(lines)


def gpu_table() -> str:
    """Time captured plans on the swing-up for one environment and for 64."""
    lines = [
        f"## {torch.cuda.get_device_name()}: captured plans on the swing-up\n",
        f"torch {torch.__version__}; 500 samples, horizon 15 (tree search: cart-pole, 32 simulations).\n",
        "| planner | ms, 1 environment | ms, 64 environments | ratio |",
        "|---|---|---|---|",
    ]
    swing_up, cart_pole = SwingUpModel(), CartPoleModel()
    for planner, model, size in (
        (CEM(1, 15, 500, 50, 5), swing_up, 5),
        (ICEM(1, 15, 500, 50, 5), swing_up, 5),
        (MPPI(1, 15, 500, 0, 50, 5, select="mean"), swing_up, 5),
        (RandomShooting(1, 15, 500), swing_up, 5),
        (GumbelSearch(2, 32, max_depth=12), cart_pole, 4),
    ):
        costs = []
        with device_stream("cuda"):
            generator = torch.Generator("cuda").manual_seed(0)
            workflow = MPCWorkflow(model, planner, generator)
            act = CapturedAct(workflow.act)
            for num_envs in (1, 64):
                seen = 0.1 * torch.randn(num_envs, size, generator=generator, device="cuda")
                state = workflow.initial_state(num_envs)
                for i in range(110):
                    if i == 10:
                        torch.cuda.synchronize()
                        begin = time.perf_counter()
                    state = act(seen, state, explore=False, generator=generator).state
                torch.cuda.synchronize()
                costs.append((time.perf_counter() - begin) / 100 * 1e3)
        lines.append(f"| {type(planner).__name__} | {costs[0]:.2f} | {costs[1]:.2f} | {costs[1] / costs[0]:.2f} |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=3, help="episodes of each planner on the CPU")
    parser.add_argument("--gpu", action="store_true", help="time captured plans on a GPU")
    arguments = parser.parse_args()
    table = gpu_table() if arguments.gpu else tables(arguments.episodes)
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "planners.md"
    kept = (
        path.read_text()
        if path.exists()
        else "# Planners with known dynamics\n\nWritten by `benchmarks/planners.py`.\n"
    )
    title = table.split("\n")[0].removeprefix("## ")
    sections = [part.rstrip() + "\n" for part in kept.split("\n## ") if part.split("\n")[0] != title]
    path.write_text("\n## ".join([*sections, table.removeprefix("## ")]))
    print(table)


if __name__ == "__main__":
    main()
