"""What happens to a run before it starts: functions that the warm process calls in the child."""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np

from rl_lab.data.replay import Ring
from rl_lab.orchestration import checkpoint
from rl_lab.orchestration.files import Files
from rl_lab.orchestration.orchestrator import Orchestrator
from tests.reliability.store import restart, save_all


def stop_at(action: int, name: str) -> None:
    """Send this process a signal once it has finished so many hooks."""
    consume = Orchestrator._consume

    def consume_and_stop(self, event):
        consume(self, event)
        if self.counters.actions == action:
            os.kill(os.getpid(), signal.Signals[name])

    Orchestrator._consume = consume_and_stop


def note_progress(path: str) -> None:
    """Keep the agent steps that were collected so far in a file, whenever a hook has finished."""
    consume, note = Orchestrator._consume, os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)

    def consume_and_note(self, event):
        os.pwrite(note, f"{self.counters.agent_steps + event.steps:10d}".encode(), 0)
        consume(self, event)

    Orchestrator._consume = consume_and_note


def small_segments(size: int) -> None:
    """Cut replay into segments of so many bytes."""
    Ring.segment_bytes = size


def store_killed_at(folder: str, position: int) -> None:
    """Save to a checkpoint store and die at a call of the file layer; the finished saves are noted."""
    path = Path(folder)
    path.mkdir()
    note = os.open(path / "finished", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    kill_at_call(position)

    def done(what: str, number: int) -> None:
        if what == "checkpoint":
            os.write(note, f"{number}\n".encode())

    save_all(restart(Files(), path), done)


def kill_at_call(position: int) -> None:
    """Die inside the call of the file layer with this number, before, within or after what it does."""
    calls = itertools.count(1)

    def deadly(method):
        def call(self, path, *rest):
            if next(calls) != position:
                return method(self, path, *rest)
            if position % 2:
                if method.__name__ == "write":
                    method(self, path, rest[0][: len(rest[0]) // 2])
                else:
                    method(self, path, *rest)
            os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in ("make_folder", "write", "sync", "rename", "remove"):
        setattr(Files, name, deadly(getattr(Files, name)))


def slow_hooks(seconds: float) -> None:
    """Let every hook take long."""
    consume = Orchestrator._consume

    def consume_slowly(self, event):
        time.sleep(seconds)
        consume(self, event)

    Orchestrator._consume = consume_slowly


def signal_while_printing() -> None:
    """Send SIGTERM while a line is on its way to standard output."""

    class Raw(io.RawIOBase):
        sent = False

        def writable(self):
            return True

        def write(self, data):
            if b"evaluation" in bytes(data) and not Raw.sent:
                Raw.sent = True
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)  # the handler runs here, inside the write
            return os.write(1, data)

    sys.stdout = io.TextIOWrapper(io.BufferedWriter(Raw()), encoding="utf-8")


def change_folder(path: str) -> None:
    """Stand somewhere else."""
    os.chdir(path)


def pretend_version(package: str, version: str) -> None:
    """Claim that another version of a package is installed."""
    checkpoint._versions.cache_clear()
    original = checkpoint._versions()
    checkpoint._versions = lambda: {**original, package: version}


def forgetful_world() -> None:
    """Let an environment start its episodes differently in every process, whatever its seed."""

    class Forgetful(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.place = np.full(4, os.getpid() % 1000 + self.np_random.random(), np.float32)
            self.age = 0
            return self.place, {}

        def step(self, action):
            self.age += 1
            return self.place + self.age, 1.0, self.age % 30 == 0, False, {}

    gymnasium.register("Forgetful-v0", Forgetful)
