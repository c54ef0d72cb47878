"""Train PPO on cart-pole until it balances, then show the curve and the agent. Needs no display and no network."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

TARGET = 475.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rl-lab demo`."""
    parser.add_argument("--gif", type=Path, default=Path("demo.gif"), metavar="FILE", help="default demo.gif")


def run(arguments: argparse.Namespace) -> int:
    """Train, draw, animate, and say what to try next."""
    from rl_lab.cli.evaluating import record_episode
    from rl_lab.cli.gif import write_gif
    from rl_lab.cli.running import curve_of
    from rl_lab.cli.terminal import draw_curve
    from rl_lab.composition import load_experiment
    from rl_lab.runs import load_agent, run_training

    composed = load_experiment("ppo_cartpole", {"evaluation.every": 5000, "training.stop_at_return": TARGET})
    outcome = run_training(composed, new=True)
    if outcome.code:
        return outcome.code
    print(draw_curve(curve_of(outcome.folder), title="evaluation return over environment steps", target=TARGET))
    experiment = load_agent(outcome.folder, render=True)
    try:
        write_gif(arguments.gif, record_episode(experiment))
    finally:
        experiment.close()
    last = outcome.summary["last_evaluation"]
    reached = "reached" if last["return_mean"] >= TARGET else "did not reach"
    print(f"\nThe agent {reached} {TARGET:g} in {outcome.summary['wall_seconds']:.0f} s: its return is now", end=" ")
    print(f"{last['return_mean']:.0f} of 500. {arguments.gif} shows an episode.\n\nTry next:")
    command = "rl-lab" if shutil.which("rl-lab") else os.path.relpath(sys.argv[0])
    for text, purpose in (
        (f"resume {outcome.folder} training.stop_at_return=null", "train on"),
        (f"eval {outcome.folder} --episodes 20", "test the agent"),
        ("train dqn_cartpole", f"another experiment; `{command} list` shows all"),
    ):
        print(f"  {command} {text:<86} # {purpose}")
    return 0 if last["return_mean"] >= TARGET else 1
