"""REL3 and REL4: wherever a save is cut short, and whatever a power failure leaves, the store is the old or the new."""

import contextlib
import itertools
import random
import signal

import pytest

from tests.reliability.disk import Disk
from tests.reliability.store import BEST, FOLDER, LAST, number_of, restart, save, save_all


class Moment:
    """The disk before a step, and what was finished by then."""

    def __init__(self, disk, checkpoint, best, step):
        self.disk, self.checkpoint, self.best, self.step = disk, checkpoint, best, step

    def allowed(self):
        """The checkpoints and the best agents that may be found."""
        newer_best = [number for number in BEST if number > self.best][:1]
        return {self.checkpoint, self.checkpoint + 1}, {self.best, *newer_best}


@pytest.fixture(scope="module")
def moments():
    """Every step of several saves, with segments, garbage and the best agent."""
    disk, found, finished = Disk(), [], {"checkpoint": 0, "best": 0}
    disk.before_step = lambda step: found.append(Moment(disk.copy(), finished["checkpoint"], finished["best"], step))
    save_all(restart(disk), finished.__setitem__)
    found.append(Moment(disk.copy(), LAST, BEST[-1], "the end"))
    return found


def check(moment, disk):
    checkpoints, best = moment.allowed()
    said = []
    manager = restart(disk, say=said.append)
    number = number_of(manager.load_latest())
    assert number in checkpoints, f"{number} after {moment.checkpoint}, before: {moment.step}; {said}"
    found = number_of(manager.load_best())
    assert found in best, f"best {found} after {moment.best}, before: {moment.step}"
    return manager, number


def goes_on(manager, number):
    for following in (number + 1, number + 2):
        save(manager, following)
        manager.save_best({"components": {}, "counters": {}}, {"counters": {}})
    fresh = restart(manager.files)
    assert number_of(fresh.load_latest()) == number + 2
    assert fresh.load_best().state == {"components": {}, "counters": {}}
    assert not [name for name in manager.files.names(FOLDER) if "tmp" in name or "old" in name]
    assert len(manager.files.names(FOLDER / "checkpoints")) <= 2 + 1  # the last two, and what was set aside
    assert len(manager.files.names(FOLDER / "replay" / "replay")) <= 6 + 5  # segments and pages of two saves


def test_there_are_many_steps_of_every_kind(moments):
    kinds = {moment.step.split()[0] for moment in moments}
    assert kinds == {"make", "create", "write", "sync", "rename", "remove", "the"}
    assert len(moments) > 150


def test_a_process_that_stops_before_any_step_leaves_the_old_or_the_new(moments):
    for moment in moments:
        manager, number = check(moment, moment.disk.copy())
        goes_on(manager, number)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()], ids=["io", "interrupt"])
def test_an_error_at_any_step_leaves_the_old_or_the_new_and_the_process_may_go_on(moments, error):
    for position, planned in enumerate(moments[:-1]):
        disk, steps, finished = Disk(), itertools.count(), {"checkpoint": 0, "best": 0}
        survives = isinstance(error, OSError)

        def fail(step, position=position, steps=steps, disk=disk):
            if next(steps) == position:
                disk.before_step = lambda step: None
                raise error

        disk.before_step = fail
        with contextlib.suppress(KeyboardInterrupt):
            save_all(restart(disk), finished.__setitem__, survive=survives)
        manager, number = check(Moment(disk, finished["checkpoint"], finished["best"], planned.step), disk)
        if survives and planned.checkpoint < LAST - 1:
            assert (number, finished["checkpoint"]) == (LAST, LAST)
        if position % 3 == 0:
            goes_on(manager, number)


def test_a_disk_that_refuses_keeps_nothing_of_what_it_refused(moments):
    for position, planned in enumerate(moments[:-1]):
        if planned.step.split()[0] in ("make", "remove"):  # before there is anything; and leftovers of others
            continue
        disk, steps = Disk(), itertools.count()

        def fail(step, position=position, steps=steps, disk=disk):
            if next(steps) == position:
                disk.before_step = lambda step: None
                raise OSError(28, "No space left on device")

        disk.before_step = fail
        manager = restart(disk)
        with contextlib.suppress(OSError):
            save_all(manager)
        folders = (FOLDER / "checkpoints", FOLDER / "replay" / "replay")
        left = [name for folder in folders for name in disk.names(folder) if "tmp" in name]
        assert not left, f"{left} after a refused step: {planned.step}"


def power_failures(moments, schedules, seed):
    rng = random.Random(seed)
    for place in range(schedules):
        moment = moments[place % len(moments)]
        manager, number = check(moment, moment.disk.after_power_failure(rng))
        if place % 20 == 0:
            goes_on(manager, number)


@pytest.mark.parametrize("block", range(4))
def test_power_failures(moments, block):
    power_failures(moments, 1500, block)


def test_the_model_of_power_failures_finds_a_store_that_does_not_sync():
    class Careless(Disk):
        def sync(self, *paths):
            pass

    disk = Careless()
    save_all(restart(disk))
    rng, lost = random.Random(0), 0
    for _ in range(50):
        left = restart(disk.after_power_failure(rng))
        lost += number_of(left.load_latest()) < LAST
    assert lost > 25


@pytest.mark.chaos
@pytest.mark.parametrize("block", range(10))
def test_more_power_failures(moments, block):
    power_failures(moments, 10_000, f"chaos {block}")


@pytest.mark.chaos
def test_a_process_killed_at_any_call_leaves_the_old_or_the_new_on_a_real_disk(warm, tmp_path):
    for position in itertools.count(1):
        folder = tmp_path / str(position)
        status = warm.run(["list"], tmp_path / "log", ("store_killed_at", str(folder), position))
        if status != -signal.SIGKILL:
            assert status == 0, (tmp_path / "log").read_text()
            break
        finished = [int(line) for line in (folder / "finished").read_text().split()] if folder.exists() else []
        manager = restart(None, folder)
        last = finished[-1] if finished else 0
        number = number_of(manager.load_latest())
        assert number in (last, last + 1)
        save(manager, number + 1)
        assert number_of(restart(None, folder).load_latest()) == number + 1
    assert position > 100
