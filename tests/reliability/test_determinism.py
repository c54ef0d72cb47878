"""REL12: the same configuration and seed give the same bits, whatever else the machine does.

REL13, that 1,000 streams are independent, is in tests/core/test_seeding.py.
"""

import contextlib
import os
import signal

import pytest

from tests.reliability.compare import differences, snapshot
from tests.reliability.workloads import train

NAMES = ("dqn", "ppo_continuous", "recurrent")


@contextlib.contextmanager
def busy_machine(warm, folder, num_processes=3):
    children = [warm.start(["list"], folder / "busy", ("spin",)) for _ in range(num_processes)]
    try:
        yield
    finally:
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()


def repeat(warm, folder, name, times):
    first = None
    for number in range(times):
        words, log = train(name, folder / str(number)), folder / "log"
        if number % 2:
            with busy_machine(warm, folder):
                assert warm.run(words, log) == 0, log.read_text()
        else:
            assert warm.run(words, log) == 0, log.read_text()
        found = snapshot(folder / str(number))
        first = first or found
        assert differences(found, first) == []


@pytest.mark.parametrize("name", NAMES)
def test_three_times_the_same(warm, folder, name):
    repeat(warm, folder, name, 3)


@pytest.mark.chaos
@pytest.mark.parametrize("name", NAMES)
def test_ten_times_the_same(warm, folder, name):
    repeat(warm, folder, name, 10)


def test_another_seed_is_another_run(warm, folder):
    for seed in (0, 1):
        assert warm.run(train("dqn", folder / str(seed), f"experiment.seed={seed}"), folder / "log") == 0
    assert len(differences(snapshot(folder / "0"), snapshot(folder / "1"))) > 20


@pytest.mark.parametrize("name", ["dqn_gymnasium", "ppo_continuous"])
def test_worker_processes_make_no_difference(warm, folder, name):
    log = folder / "log"
    assert warm.run(train(name, folder / "serial"), log) == 0, log.read_text()
    words = train(name, folder / "process", "environment.workers=2")
    assert warm.run(words, log) == 0, log.read_text()
    assert differences(snapshot(folder / "process"), snapshot(folder / "serial")) == []


def test_runs_in_worker_processes_resume_exactly(warm, folder):
    log, words = folder / "log", train("dqn_gymnasium", folder / "run", "environment.workers=2")
    assert warm.run(train("dqn_gymnasium", folder / "whole"), log) == 0
    assert warm.run(words, log, ("stop_at", 4, "SIGKILL")) == -signal.SIGKILL
    assert warm.run(words, log, ("stop_at", 6, "SIGTERM")) == 75, log.read_text()
    assert warm.run(words, log) == 0, log.read_text()
    assert differences(snapshot(folder / "run"), snapshot(folder / "whole")) == []
