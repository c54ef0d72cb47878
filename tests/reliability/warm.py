"""A process that has imported everything and forks: a run then costs a fraction of a second, not a cold start.

`Warm` is the side of the tests; the module run as a script is the process. Children are ordinary runs: they go through
the command line's `main` and end with its exit status, or by whatever signal a test sends them.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent  # the `configs` here are the tests' own experiments
Setup = tuple[Any, ...]  # the name of a function in `faults`, and its arguments


class Child:
    """A forked run."""

    def __init__(self, warm: Warm, pid: int, log: Path) -> None:
        self.warm, self.pid, self.log = warm, pid, log

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, timeout: float = 120.0) -> int:
        """Return its exit status, negative if a signal ended it."""
        status = self.warm.ask(wait=self.pid, timeout=timeout)["status"]
        if status is None:
            raise TimeoutError(f"the run has not ended after {timeout} s; it said:\n{self.said()}")
        return int(status)

    def said(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")


class Warm:
    """Starts runs in the warm process."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.reliability.warm"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send a question and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, words: Sequence[str], log: Path, *setup: Setup) -> Child:
        """Start `rl-lab WORDS`, after the functions of `faults` that are named."""
        words = [str(word) for word in words]
        answer = self.ask(words=words, log=str(log), setup=setup)
        return Child(self, answer["pid"], log)

    def run(self, words: Sequence[str], log: Path, *setup: Setup) -> int:
        """Start a run and wait for its end."""
        return self.start(words, log, *setup).wait()

    def close(self) -> None:
        """End the process; it ends what it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class _Server:
    def __init__(self) -> None:
        import gymnasium
        import torch

        from rl_lab.cli import running, train
        from rl_lab.composition import compose

        torch.set_num_threads(1)
        torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # imports half of torch
        gymnasium.make("CartPole-v1").close()
        self.composed = functools.cache(compose)  # composing takes longer than many of our runs
        self.running, self.train = running, train
        self.alive: set[int] = set()

    def serve(self) -> None:
        for line in sys.stdin:
            question = json.loads(line)
            answer = self.wait(**question) if "wait" in question else {"pid": self.fork(**question)}
            print(json.dumps(answer), flush=True)
        for pid in self.alive:
            os.kill(pid, signal.SIGKILL)

    def wait(self, wait: int, timeout: float) -> dict[str, int | None]:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            pid, status = os.waitpid(wait, os.WNOHANG)
            if pid:
                self.alive.discard(pid)
                return {"status": os.waitstatus_to_exitcode(status)}
            time.sleep(0.001)
        return {"status": None}

    def fork(self, words: list[str], log: str, setup: list[list[Any]]) -> int:
        os.chdir(HERE)
        if words[0] == "train":
            self._compose_ahead(words[1:])
        pid = os.fork()
        if pid == 0:
            self._become(words, log, setup)
        self.alive.add(pid)
        return pid

    def _compose_ahead(self, words: list[str]) -> None:
        from rl_lab.cli.groups import config_files
        from rl_lab.core.errors import UserError

        try:
            names = [word for word in words if not word.startswith("--")]
            self.composed(tuple(self.train.normalized(names, config_files("experiment"))))
        except UserError:
            pass  # the run will say so

    def _become(self, words: list[str], log: str, setup: list[list[Any]]) -> NoReturn:
        status = 70
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            self.running.compose = lambda overrides: self.composed(tuple(overrides)).copy()
            faults = importlib.import_module("tests.reliability.faults")
            for name, *arguments in setup:
                getattr(faults, name)(*arguments)
            sys.argv = ["rl-lab", *words]
            from rl_lab.cli import main

            status = main(words)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


if __name__ == "__main__":
    _Server().serve()
    os._exit(0)
