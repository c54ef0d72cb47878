"""Continue the run in a folder from its newest good checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_lab.cli.arguments import add_allow, add_quiet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rl-lab resume`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of the run")
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="keys that extend a run, e.g. training.total_timesteps=200000"
    )
    add_allow(parser)
    add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    """Resume."""
    from rl_lab.cli import running

    return running.resume(arguments)
