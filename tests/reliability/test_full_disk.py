"""REL10: a disk that is full, read-only or forbidden: training goes on; the third failure in a row stops it cleanly."""

import errno
import os
import random

import pytest

from rl_lab.orchestration.checkpoint import CheckpointManager
from tests.reliability.compare import differences, newest, snapshot
from tests.reliability.workloads import SEGMENTS, train

ERRORS = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO)
METHODS = ("make_folder", "write", "sync", "rename", "names", "remove")
NAMES = ("dqn", "ppo_discrete", "recurrent")


@pytest.fixture(scope="module")
def whole(reference):
    return {name: reference(name)[1] for name in NAMES}


def one_error(said):
    """The only line that is not a warning."""
    (line,) = [line for line in said.splitlines() if not line.startswith("warning: ")]
    assert line.startswith("error: ")
    return line


def refuse_some_saves(warm, folder, whole, rng):
    name, method, number = rng.choice(NAMES), rng.choice(METHODS), rng.choice(ERRORS)
    first, failures, skip = rng.randrange(1, 6), rng.choice([1, 2, 3]), rng.randrange(3)
    run, log = folder / "run", folder / "log"
    fault = ("disk_refuses", method, number, first, first + failures - 1, skip)
    status = warm.run(train(name, run), log, SEGMENTS, fault)
    said = log.read_text()
    assert "Traceback" not in said
    happened = said.count(f"could not be written: {os.strerror(number)}")
    assert happened <= failures  # some saves make no such call, or so few of them
    if happened < 3:
        assert status == 0, said
        assert said.count("training goes on") == happened
    else:
        assert status == 1, said
        assert "failure 3 in a row; the last good checkpoint is intact" in one_error(said)
        if first > 1:
            newest(run)
        for path in CheckpointManager(run).numbered():
            CheckpointManager(run).load(path)
        assert warm.run(train(name, run), log, SEGMENTS) == 0
    assert differences(snapshot(run), whole[name]) == []
    return happened


@pytest.mark.parametrize("block", range(3))
def test_a_disk_that_refuses_some_saves(warm, folder, whole, block):
    rng, happened = random.Random(block), 0
    for attempt in range(7):
        (folder / str(attempt)).mkdir()
        happened += refuse_some_saves(warm, folder / str(attempt), whole, rng)
    assert happened >= 5


@pytest.mark.chaos
@pytest.mark.parametrize("block", range(10))
def test_a_disk_that_refuses_more_saves(warm, folder, whole, block):
    rng = random.Random(f"chaos {block}")
    for attempt in range(10):
        (folder / str(attempt)).mkdir()
        refuse_some_saves(warm, folder / str(attempt), whole, rng)


@pytest.mark.parametrize("cutting_fails", [False, True])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_log_that_cannot_be_written_loses_no_record(warm, folder, whole, number, cutting_fails):
    log = folder / "log"
    status = warm.run(train("dqn", folder / "run"), log, SEGMENTS, ("log_refuses", number, 2, 3, cutting_fails))
    assert status == 0, log.read_text()
    assert f"metrics.jsonl cannot be written: {os.strerror(number)}" in log.read_text()
    assert differences(snapshot(folder / "run"), whole["dqn"]) == []


def test_a_log_that_stays_unwritable_stops_the_run(warm, folder, whole):
    log = folder / "log"
    status = warm.run(train("dqn", folder / "run"), log, SEGMENTS, ("log_refuses", errno.ENOSPC, 3, 10**6, True))
    assert status == 1
    assert os.strerror(errno.ENOSPC) in one_error(log.read_text())
    assert warm.run(train("dqn", folder / "run"), log, SEGMENTS) == 0
    assert differences(snapshot(folder / "run"), whole["dqn"]) == []


def test_too_little_room_is_noticed_before_anything_is_written(warm, folder, whole):
    log = folder / "log"
    assert warm.run(train("dqn", folder / "run"), log, SEGMENTS, ("disk_is_full", 3, 4)) == 0
    assert log.read_text().count("only 10 bytes are free") == 2
    assert differences(snapshot(folder / "run"), whole["dqn"]) == []
    status = warm.run(train("dqn", folder / "other"), log, SEGMENTS, ("disk_is_full", 3, 10))
    assert status == 1
    assert newest(folder / "other").manifest["counters"]["agent_steps"] > 0


@pytest.mark.parametrize("size", [300, 3_000, 20_000])
def test_real_writes_that_fail_half_way(warm, folder, whole, size):
    log, words = folder / "log", train("dqn", folder / "run", "logging.tensorboard=true")
    assert warm.run(words, log, SEGMENTS, ("limit_file_size", size)) in (0, 1)
    assert "Traceback" not in log.read_text()
    assert warm.run(words, log, SEGMENTS) == 0, log.read_text()
    assert differences(snapshot(folder / "run"), whole["dqn"]) == []


def test_the_best_agent_and_the_summary_are_not_worth_stopping_for(warm, folder, whole):
    log = folder / "log"
    status = warm.run(train("dqn", folder / "run"), log, SEGMENTS, ("best_and_summary_refused", errno.ENOSPC))
    assert status == 0, log.read_text()
    assert "the best agent could not be written: No space left on device; training goes on" in log.read_text()
    assert "summary.json could not be written" in log.read_text()
    expected = {key: value for key, value in whole["dqn"].items() if not key.startswith(("best", "summary"))}
    assert warm.run(train("dqn", folder / "run"), log, SEGMENTS) == 0  # writes the summary
    found = {k: v for k, v in snapshot(folder / "run").items() if not k.startswith(("best", "summary"))}
    assert differences(found, expected) == []
