"""REL1: a run that was stopped and resumed equals the one that never was, in every bit that is not wall time."""

import random

import pytest

from tests.reliability.compare import differences, newest, snapshot
from tests.reliability.workloads import SEGMENTS, WORKLOADS, train


def stop_points(name, folder, count=3):
    total = newest(folder).manifest["counters"]["actions"]
    return sorted(random.Random(name).sample(range(1, total - 1), count))


@pytest.mark.parametrize("name", WORKLOADS)
def test_stopped_three_times_equals_uninterrupted(warm, reference, folder, name):
    original, expected = reference(name)
    log = folder / "log"
    for point, signal in zip(stop_points(name, original), ("SIGTERM", "SIGKILL", "SIGTERM"), strict=True):
        status = warm.run(train(name, folder / "run"), log, SEGMENTS, ("stop_at", point, signal))
        assert status == (75 if signal == "SIGTERM" else -9), log.read_text()
    assert warm.run(train(name, folder / "run"), log, SEGMENTS) == 0, log.read_text()
    assert differences(snapshot(folder / "run"), expected) == []
