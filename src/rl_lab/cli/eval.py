"""Play episodes with the agent of a run, print their returns and what the agent's model makes of them.

examples:
  rl-lab eval experiments/ppo_cartpole/RUN --episodes 20
  rl-lab eval experiments/ppo_cartpole/RUN --gif agent.gif
  rl-lab eval experiments/tdmpc2_swingup/RUN --planner both
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_lab.cli.arguments import add_allow, natural, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rl-lab eval`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of the run")
    parser.add_argument("--episodes", type=positive, default=10, metavar="N", help="how many (default 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--gif", type=Path, metavar="FILE", help="write the first episode as an animation")
    parser.add_argument("--seed", type=natural, metavar="S", help="seed of the episodes; default: the run's own")
    parser.add_argument(
        "--checkpoint", choices=["best", "last"], default="best", help="weights of the best evaluation, or the last"
    )
    parser.add_argument(
        "--explore",
        action="store_true",
        help="act with the chance of training, as runs with evaluation.explore=true do",
    )
    parser.add_argument(
        "--planner", choices=["on", "off", "both"], help="act with or without planning, or compare them"
    )
    parser.add_argument("--dream", action="store_true", help="write what the agent's model sees to RUN/dream/*.png")
    add_allow(parser)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate."""
    from rl_lab.cli import evaluating

    return evaluating.evaluate(arguments)
