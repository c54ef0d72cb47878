"""Train an experiment. The same command again continues its unfinished run.

examples:
  rl-lab train dqn_cartpole
  rl-lab train experiment=dqn_cartpole experiment.seed=1 --run-dir runs/one
  rl-lab train ppo_cartpole --seeds 0-4
  rl-lab train ppo_cartpole --cfg job --resolve
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from rl_lab.cli.arguments import add_allow, add_quiet
from rl_lab.cli.groups import config_files
from rl_lab.core.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rl-lab train`."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="the name of an experiment (see `rl-lab list`), or key=value of any configuration key",
    )
    parser.add_argument("--cfg", choices=["job"], help="print the composed configuration and stop")
    parser.add_argument("--package", metavar="PKG", help="with --cfg: print this part only, e.g. training.phases")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: replace ${...} by values")
    parser.add_argument("--dry-run", action="store_true", help="build everything, print the sequence of actions, stop")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where to write; default experiments/NAME/TIME")
    parser.add_argument("--new", action="store_true", help="start afresh even if an unfinished run could be continued")
    parser.add_argument("--seeds", type=seeds, metavar="0-4", help="one run for each seed: 0-4 or 0,2,5")
    parser.add_argument("--together", action="store_true", help="with --seeds: run all of them at once in this process")
    parser.add_argument(
        "--warm-start", action="store_true", help="take over only the weights of the run at training.resume_path"
    )
    add_allow(parser)
    add_quiet(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train."""
    arguments.overrides = normalized(arguments.overrides, config_files("experiment"))
    if not arguments.cfg:
        for flag, given in (("--package", arguments.package is not None), ("--resolve", arguments.resolve)):
            if given:
                raise UserError(f"{flag} says how to print the configuration", remedy=f"add --cfg job, or drop {flag}")
    if arguments.together and arguments.seeds is None:
        raise UserError("--together runs several seeds at once", remedy="add --seeds 0-3")
    if arguments.seeds is not None and any(word.startswith("experiment.seed=") for word in arguments.overrides):
        raise UserError("--seeds and experiment.seed are both given", remedy="keep one of them")

    from rl_lab.cli import running

    return running.train(arguments)


def seeds(text: str) -> list[int]:
    """Read a list of seeds: `0-4`, `0,2,5`, `0-2,7`."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of seeds; write 0-4 or 0,2,5")
        low, high = int(first), int(last or first)
        if high < low or high - low >= 1000:
            raise argparse.ArgumentTypeError(f"{part!r} is no range of seeds; write the smaller first, at most 1000")
        found += [seed for seed in range(low, high + 1) if seed not in found]
    return found


def normalized(words: Sequence[str], experiments: Iterable[str], command: str = "train") -> list[str]:
    """Turn what a person types into Hydra overrides: a bare name is an experiment, `+experiment=` needs no plus."""
    names = sorted(experiments)
    if not words:
        raise UserError(
            f"rl-lab {command}: which experiment?", valid=names, remedy=f"rl-lab {command} NAME; see `rl-lab list`"
        )
    overrides = []
    for word in words:
        if word.lstrip("+").startswith("experiment="):
            overrides.append(word.lstrip("+"))
        elif "=" in word or word.startswith("~"):
            overrides.append(word)
        elif word in names:
            overrides.append(f"experiment={word}")
        else:
            raise UserError(
                f"rl-lab {command}: '{word}' is no experiment and no key=value",
                key="experiment",
                value=word,
                valid=names,
                remedy="see `rl-lab list`",
            )
    chosen = [word for word in overrides if word.startswith("experiment=")]
    if len(chosen) > 1:
        raise UserError(
            f"rl-lab {command}: several experiments are given: {', '.join(chosen)}", remedy="keep one of them"
        )
    return overrides
