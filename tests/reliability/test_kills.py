"""REL2 and REL19: `kill -9` at any instant, also while saving. Nothing is lost but the last interval."""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from rl_lab.orchestration.checkpoint import CheckpointManager
from tests.reliability.compare import differences, newest, records, snapshot
from tests.reliability.warm import ROOT
from tests.reliability.workloads import SEGMENTS, train

INTERVAL = 40  # agent steps between two checkpoints of a workload
LONGEST_CYCLE = 70  # agent steps that a cycle of a workload collects, at most
NAMES = ("dqn", "ppo_discrete", "curriculum", "recurrent", "dqn_prioritized")


def check_remains(run, progress):
    """What a kill left: whole lines, and a checkpoint that is at most an interval old."""
    log = run / "metrics.jsonl"
    if log.exists():
        *lines, _ = log.read_bytes().split(b"\n")
        for line in lines:
            json.loads(line)
    if CheckpointManager(run).numbered():
        done = int(progress.read_text() or 0) if progress.exists() else 0
        lost = done - newest(run).manifest["counters"]["agent_steps"]
        assert lost < INTERVAL + LONGEST_CYCLE


def assert_sound(run):
    """Counters never go back, and no record is there twice."""
    found = records(run)
    for name in ("agent_steps", "updates", "episodes"):
        values = [record["tags"][name] for record in found]
        assert values == sorted(values)
    texts = [json.dumps(record) for record in found if not record["key"].startswith("eval/")]
    assert len(set(texts)) == len(texts)


def kill_until_finished(warm, folder, name, rng, max_kills):
    """Run a workload, killing it at random instants; return how often that was."""
    folder.mkdir()
    run, progress, log = folder / "run", folder / "progress", folder / "log"
    words, note = train(name, run), ("note_progress", str(progress))
    for kills in range(max_kills):
        if rng.random() < 0.5:  # inside a call of the file layer, so while something is saved
            status = warm.run(words, log, SEGMENTS, note, ("kill_at_call", rng.randrange(1, 120)))
        else:
            child = warm.start(words, log, SEGMENTS, note)
            time.sleep(rng.uniform(0.0, 0.4))
            child.signal(signal.SIGKILL)
            status = child.wait()
        if status == 0:
            return kills
        assert status == -signal.SIGKILL, log.read_text()
        check_remains(run, progress)
    assert warm.run(words, log, SEGMENTS) == 0, log.read_text()
    return max_kills


@pytest.mark.parametrize("block", range(10))
def test_ten_kills_of_forked_runs(warm, reference, folder, block):
    rng, name = random.Random(block), NAMES[block % len(NAMES)]
    _, expected = reference(name)
    kills = 0
    for attempt in itertools.count():
        kills += kill_until_finished(warm, folder / str(attempt), name, rng, 10 - kills)
        run = folder / str(attempt) / "run"
        assert_sound(run)
        assert differences(snapshot(run), expected) == []
        if kills == 10:
            break


def kill_command(warm, folder, num_kills, seed):
    rng, run = random.Random(seed), folder / "run"
    name = rng.choice(["dqn", "ppo_discrete"])
    longer = "training.total_timesteps=1500"
    assert warm.run(train(name, folder / "whole", longer), folder / "log") == 0
    expected = snapshot(folder / "whole")
    command = [sys.executable, "-m", "rl_lab", *train(name, run, longer)]
    with open(folder / "said", "wb") as said:
        for _ in range(num_kills):
            before = set(CheckpointManager(run).numbered())
            process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said)
            with contextlib.suppress(subprocess.TimeoutExpired):
                while not set(CheckpointManager(run).numbered()) - before and process.poll() is None:
                    time.sleep(0.002)
                process.wait(rng.uniform(0.0, 0.3))
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            assert process.wait() in (0, -signal.SIGKILL), (folder / "said").read_text()
            newest(run)
        assert subprocess.run(command, cwd=ROOT, stdout=said, stderr=said).returncode == 0, (
            folder / "said"
        ).read_text()
    assert_sound(run)
    assert differences(snapshot(run), expected) == []


@pytest.mark.parametrize("block", range(2))
def test_two_kills_of_the_real_command(warm, folder, block):
    kill_command(warm, folder, 2, block)


@pytest.mark.chaos
@pytest.mark.parametrize("block", range(20))
def test_five_kills_of_the_real_command(warm, tmp_path, block):
    kill_command(warm, tmp_path, 5, f"chaos {block}")
