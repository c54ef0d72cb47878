"""What happens to a run before it starts: functions that the warm process calls in the child."""

from __future__ import annotations

import io
import itertools
import os
import resource
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import torch

from rl_lab.core.optim import Optimizer
from rl_lab.data.collector import RolloutCollector, SteppedEnvironment
from rl_lab.data.replay import Ring
from rl_lab.orchestration import checkpoint, loggers
from rl_lab.orchestration.files import Files
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.run_folder import owned
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


def disk_refuses(method: str, number: int, first: int, last: int, skip: int) -> None:
    """Let a call of the file layer fail in the saves from `first` to `last`, after `skip` calls of it in each."""
    save, original = checkpoint.CheckpointManager.save, getattr(Files, method)
    saves, calls = itertools.count(1), itertools.count()
    failing = False

    def counted_save(self, *arguments):
        nonlocal failing, calls
        failing, calls = first <= next(saves) <= last, itertools.count()
        try:
            return save(self, *arguments)
        finally:
            failing = False

    def refuse(self, path, *rest):
        if not failing or next(calls) < skip:
            return original(self, path, *rest)
        if method == "write":
            original(self, path, rest[0][: len(rest[0]) // 2])
        raise OSError(number, os.strerror(number), str(path))

    checkpoint.CheckpointManager.save = counted_save
    setattr(Files, method, refuse)


def disk_is_full(from_save: int, to_save: int) -> None:
    """Let the disk have no room in these saves."""
    asked = itertools.count(1)
    Files.free_bytes = lambda self, path: 10 if from_save <= next(asked) <= to_save else 10**12


def log_refuses(number: int, first: int, last: int, cutting_fails: bool) -> None:
    """Let writes to the log fail half-way, and perhaps also the attempt to cut off what they left."""
    writes = itertools.count(1)
    state = SimpleNamespace(broken=False, cuts_to_fail=2 if cutting_fails else 0)

    class Broken:
        def __getattr__(self, name):
            return getattr(os, name)

        def write(self, descriptor, data):
            state.broken = first <= next(writes) <= last
            if state.broken:
                os.write(descriptor, data[: len(data) // 2])
                raise OSError(number, os.strerror(number))
            return os.write(descriptor, data)

        def ftruncate(self, descriptor, size):
            if state.broken and state.cuts_to_fail:
                state.cuts_to_fail -= 1
                raise OSError(number, os.strerror(number))
            os.ftruncate(descriptor, size)

    loggers.os = Broken()


def limit_file_size(size: int) -> None:
    """Let the kernel refuse what goes beyond a size: a real write that fails half-way."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def best_and_summary_refused(number: int) -> None:
    """Let everything fail but the checkpoints."""

    def refuse(self, *arguments):
        raise OSError(number, os.strerror(number))

    checkpoint.CheckpointManager.save_best = refuse
    replace = Files.replace
    Files.replace = lambda self, path, data: (refuse if path.name == "summary.json" else replace)(self, path, data)


def poison(kind: str, value: str, after: int, note: str, always: bool = False) -> None:
    """Put a number that is not finite into a run, once or from then on, after so many chances to do so.

    `note` gets a line when that happens, and one for every hook that is finished afterwards.
    """
    number, file = float(value), os.open(note, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    state = SimpleNamespace(running=False, chances=0, done=False)

    def is_due() -> bool:
        state.chances += state.running
        due = state.running and state.chances > after and (always or not state.done)
        if due:
            state.done = True
            os.write(file, b"poisoned\n")
        return due

    run, consume = Orchestrator._run_to_end, Orchestrator._consume

    def run_and_count(self):
        state.running = True
        return run(self)

    def consume_and_note(self, event):
        if state.done:
            os.write(file, f"{event.hook}\n".encode())
        consume(self, event)
        if kind in ("weight", "target") and is_due():
            modules = [*self.parts.components.values(), *self.parts.controllers.values()]
            parameters = [p for m in modules if isinstance(m, torch.nn.Module) for p in m.parameters()]
            if kind == "target":
                parameters = list(self.parts.workflow.target_network.parameters())
            with torch.no_grad():
                parameters[after % len(parameters)].view(-1)[0] = number

    Orchestrator._run_to_end, Orchestrator._consume = run_and_count, consume_and_note
    if kind in ("reward", "observation"):
        _poison_worlds(kind, number, is_due)
    elif kind in ("loss", "gradient"):
        _poison_steps(kind, number, is_due)


def _poison_worlds(kind, number, is_due):
    construct = RolloutCollector.__init__

    class Poisoned:
        def __init__(self, environments):
            self._environments = environments

        def __getattr__(self, name):
            return getattr(self._environments, name)

        def step(self, actions):
            observations, rewards, *rest = self._environments.step(actions)
            if is_due():
                (rewards if kind == "reward" else observations)[0] = number
            return observations, rewards, *rest

    def construct_poisoned(self, environments, seeds, *, stream="collect", **options):
        given = Poisoned(environments) if stream == "collect" else environments
        construct(self, given, seeds, stream=stream, **options)

    RolloutCollector.__init__ = construct_poisoned


def _poison_steps(kind, number, is_due):
    step, norm = Optimizer.step, Optimizer._norm

    def poisoned_step(self, losses=None, *rest):
        if kind == "loss" and is_due():
            losses = {name: loss * number for name, loss in losses.items()}
        return step(self, losses, *rest)

    def poisoned_norm(self, *rest):
        if kind == "gradient" and is_due():
            next(p.grad for p in self.parameters if p.grad is not None).view(-1)[0] = number
        return norm(self, *rest)

    Optimizer.step, Optimizer._norm = poisoned_step, poisoned_norm


def large_numbers() -> None:
    """Let rewards be as large as numbers can be: their sum is not finite, but they are."""
    step = SteppedEnvironment.step

    def large_step(self, actions):
        observations, rewards, dones, infos = step(self, actions)
        return observations, torch.full_like(rewards, 3e38), dones, infos

    SteppedEnvironment.step = large_step


def spin() -> None:
    """Keep a core busy until killed."""
    while True:
        pass


def own(folder: str) -> None:
    """Own a run folder until killed."""
    with owned(Path(folder)):
        while True:
            time.sleep(60)
