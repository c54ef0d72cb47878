"""Write the agent of a run as a folder that others can load: weights, configuration and a card.

examples:
  rl-lab export experiments/ppo_cartpole/RUN my_agent
  python -c "import rl_lab; print(rl_lab.load_policy('my_agent').card)"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_lab.cli.arguments import add_allow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rl-lab export`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of the run")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument(
        "--checkpoint", choices=["best", "last"], default="best", help="weights of the best evaluation, or the last"
    )
    add_allow(parser)


def run(arguments: argparse.Namespace) -> int:
    """Export."""
    from rl_lab.policies import export_policy

    card = export_policy(arguments.run, arguments.out, which=arguments.checkpoint, allow=arguments.allow)
    print(f"wrote {arguments.out}: {card['workflow']} on {card['environment']}")
    print(f'  policy = rl_lab.load_policy("{arguments.out}"); policy.act(observations)')
    return 0
