"""The command line: one file per command, imported only when its command is given."""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from rl_lab.core.errors import RunError, UserError, is_out_of_memory

COMMANDS = {
    "demo": "train, see a curve and an agent within a minute",
    "train": "train an experiment, or continue its unfinished run",
    "resume": "continue the run in a folder",
    "eval": "play episodes with a trained agent",
    "profile": "show where the time of a run or an experiment goes",
    "export": "write the agent of a run as a folder that others can load",
    "list": "show experiments, parts, environments and runs",
    "curves": "learning curves of runs as CSV, or drawn in the terminal",
    "check-env": "test an environment: interface, determinism, replay",
    "doctor": "report versions, threads, GPU and which environments work here",
}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_EXAMPLES = """\
examples:
  rl-lab list
  rl-lab train dqn_cartpole
  rl-lab train experiment=dqn_cartpole experiment.seed=1
  rl-lab COMMAND --help
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are user errors that name the nearest valid flag."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving the process."""
        raise UserError(f"{self.prog}: {message}", remedy=f"{self.prog} --help")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse words in which flags and positional arguments may be mixed."""
        arguments, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            flag = unknown[0].split("=")[0]
            kind = "flag" if flag.startswith("-") else "argument"
            raise UserError(
                f"{self.prog}: unknown {kind} '{unknown[0]}'",
                value=flag,
                valid=(name for name in self._option_string_actions if name.startswith("--")),
                remedy=f"{self.prog} --help",
            )
        return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 done, 1 a fault, 2 the user's mistake, 75 stopped and saved."""
    for variable in _THREAD_VARIABLES:  # must be there before NumPy is imported; more threads are slower here
        os.environ.setdefault(variable, "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # even an ASCII terminal gets to see what is wrong
    try:
        return _run([*(sys.argv[1:] if argv is None else argv)])  # `list` is a module of ours here
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if is_out_of_memory(error):
            print(f"error: memory is used up: {str(error).partition(chr(10))[0]}", file=sys.stderr)
            print(
                "  remedy:   a smaller buffer.batch_size, buffer.window or model. What was saved is intact.",
                file=sys.stderr,
            )
            return 1
        traceback.print_exc()
        print(f"fault: {type(error).__name__}: {error}", file=sys.stderr)
        print("  This is a defect, not a mistake of yours; above is where. What was saved is intact.", file=sys.stderr)
        return 1


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        print(f"rl-lab {_version()}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, "--version", "--help"], n=1, cutoff=0.4)
        raise UserError(
            f"rl-lab: unknown command '{name}'",
            value=name,
            valid=COMMANDS,
            remedy=f"rl-lab {near[0]}" if near else "rl-lab --help",
        )
    command = importlib.import_module(f"rl_lab.cli.{name.replace('-', '_')}")
    parser = Parser(
        prog=f"rl-lab {name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    try:
        arguments = parser.parse(words[1:])
    except SystemExit as leave:  # --help
        return int(leave.code or 0)
    if getattr(arguments, "allow", None):
        sys.path.append(os.getcwd())  # the packages that the user allows may lie in the working directory
    status = command.run(arguments)
    sys.stdout.flush()  # so that a reader that has gone is noticed here
    return int(status)


def _help() -> str:
    commands = "\n".join(f"  {name:<11}{text}" for name, text in COMMANDS.items())
    return (
        f"usage: rl-lab [--help] [--version] COMMAND ...\n\nA laboratory for world models.\n\n{commands}\n\n{_EXAMPLES}"
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rl-lab")
    except PackageNotFoundError:
        return "(not installed)"
