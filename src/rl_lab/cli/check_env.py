"""Test an environment: does it keep the interface, is it deterministic, do its episodes replay.

examples:
  rl-lab check-env tiny/CartPole
  rl-lab check-env my_package:MyEnv-v0 --allow my_package
"""

from __future__ import annotations

import argparse

from rl_lab.cli.arguments import add_allow
from rl_lab.cli.terminal import shows_unicode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rl-lab check-env`."""
    parser.add_argument("id", metavar="ID", help="the environment's id, as in environment.id")
    add_allow(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check; an id that cannot be made is the user's mistake, a failed check is status 1."""
    from rl_lab.envs.checks import check_environment

    good, bad = ("✓", "✗") if shows_unicode() else ("ok  ", "FAIL")
    findings = check_environment(arguments.id, allow=tuple(arguments.allow))
    for finding in findings:
        print(f"{good if finding.ok else bad} {finding.name}{f': {finding.detail}' if finding.detail else ''}")
    num_failed = sum(not finding.ok for finding in findings)
    print(f"\n{arguments.id}: " + (f"{num_failed} of {len(findings)} checks failed" if num_failed else "all is well"))
    return 1 if num_failed else 0
