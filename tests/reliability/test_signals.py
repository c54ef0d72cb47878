"""REL6: SIGTERM and Ctrl-C to a valid checkpoint and exit 75 within ten seconds; the second Ctrl-C aborts at once."""

import random
import signal
import subprocess
import sys
import time

import pytest

from tests.reliability.compare import differences, newest, snapshot
from tests.reliability.warm import ROOT
from tests.reliability.workloads import train

LIMIT = 10.0
NAMES = ("dqn", "ppo_continuous", "curriculum", "recurrent")


def wait_for_progress(path, steps=1):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and int(path.read_text() or 0) >= steps:
            return
        time.sleep(0.001)
    raise TimeoutError("the run did not begin")


def stop_and_resume(warm, folder, name, number, rng):
    assert warm.run(train(name, folder / "whole"), folder / "log") == 0
    progress, log = folder / "progress", folder / "log"
    child = warm.start(train(name, folder / "run"), log, ("note_progress", str(progress)))
    wait_for_progress(progress)
    time.sleep(rng.uniform(0.0, 0.2))
    sent = time.monotonic()
    child.signal(number)
    status = child.wait()
    assert time.monotonic() - sent < LIMIT
    assert status in (75, 0), log.read_text()  # 0: it finished before the signal came
    counters = newest(folder / "run").manifest["counters"]
    assert counters["agent_steps"] == int(progress.read_text())  # at the next action, not at the next interval
    assert warm.run(train(name, folder / "run"), log) == 0
    assert differences(snapshot(folder / "run"), snapshot(folder / "whole")) == []


@pytest.mark.parametrize("name", NAMES)
def test_sigterm(warm, folder, name):
    stop_and_resume(warm, folder, name, signal.SIGTERM, random.Random(name))


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(50))
def test_more_signals(warm, folder, seed):
    rng = random.Random(seed)
    stop_and_resume(warm, folder, rng.choice(NAMES), rng.choice([signal.SIGTERM, signal.SIGINT]), rng)


def test_the_real_command(tmp_path):
    run = tmp_path / "run"
    words = [word for word in train("ppo_discrete", run, "training.total_timesteps=1000000") if word != "--quiet"]
    command = [sys.executable, "-m", "rl_lab", *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert time.monotonic() - sent < LIMIT
    assert "stopping: the run is saved at the next action" in said
    assert "the same command continues it" in said
    assert newest(run).manifest["counters"]["actions"] > 0


def test_the_second_interrupt_aborts_at_once(warm, folder):
    progress, log = folder / "progress", folder / "log"
    setup = (("slow_hooks", 30.0), ("note_progress", str(progress)))
    child = warm.start(train("dqn", folder / "run"), log, *setup)
    wait_for_progress(progress)
    child.signal(signal.SIGINT)
    time.sleep(0.3)
    sent = time.monotonic()
    child.signal(signal.SIGINT)
    assert child.wait() == 130, log.read_text()
    assert time.monotonic() - sent < 5
    assert warm.run(train("dqn", folder / "run"), log) == 0
    assert warm.run(train("dqn", folder / "whole"), log) == 0
    assert differences(snapshot(folder / "run"), snapshot(folder / "whole")) == []


def test_a_signal_in_the_middle_of_a_line_does_not_matter(warm, folder):
    words = [word for word in train("dqn", folder / "run") if word != "--quiet"]
    status = warm.run(words, folder / "log", ("signal_while_printing",))
    assert status == 75, (folder / "log").read_text()
    assert warm.run(words, folder / "log") == 0


def test_a_second_sigterm_waits_like_the_first(warm, folder):
    log = folder / "log"
    assert warm.run(train("dqn", folder / "run"), log, ("stop_at", 20, "SIGTERM"), ("stop_at", 20, "SIGTERM")) == 75
    assert newest(folder / "run").manifest["counters"]["actions"] == 20
