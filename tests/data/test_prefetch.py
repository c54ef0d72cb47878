"""Reading ahead changes nothing: the same rows, the same batches, also where updates rewrite columns."""

import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rl_lab.core.phase import Hook, Phase
from rl_lab.core.workflow import Update, Workflow
from rl_lab.data import sources
from rl_lab.data.prefetch import Prefetch
from rl_lab.data.sources import ReplaySource
from rl_lab.orchestration.loop import run_hook
from tests.data.tiny_world import World

PHASE = Phase("p", hooks=(Hook("collect"),), duration_steps=1)


@dataclass(eq=False)
class Rewriting(Workflow):
    """Rewrites a column with what it saw of it, so that a batch that was read too early is another one."""

    def __post_init__(self):
        self.seen = []

    def update_memory(self, batch, *, phase):
        self.seen.append({name: column.clone() for name, column in batch.extras.items()})
        self.seen[-1] |= {"observations": batch.observations.clone(), "rows": batch.rows.clone()}
        latents = batch["latents"] if "latents" in batch else torch.zeros(batch.shape)
        return Update({}, {"latents": latents + 1, "marks": batch["marks"] + 1})


def updates(tmp_path, *, ahead, storage="cpu", knobs=None, times=40):
    knobs = knobs or {"window": 6, "mode": "running", "online": True}
    replay = ReplaySource(
        2, np.random.default_rng(0), "cpu", capacity=120, batch_size=8, storage=storage, folder=str(tmp_path), **knobs
    )
    if not ahead:
        replay.prefetch = lambda rows: None
    world, workflow = World(2, seed=4), Rewriting()
    for _ in range(3):
        replay.add(world.collect(25))
        run_hook(Hook("update_memory", times, source="replay"), PHASE, workflow, None, {"replay": replay})
    return workflow.seen, replay


@pytest.fixture
def any_size(monkeypatch):
    """Read ahead however little it is, and count how often that is used."""
    monkeypatch.setattr(sources, "MIN_BYTES", 0)
    used = []
    result = Prefetch.result

    def counted(self, rows, version):
        staged = result(self, rows, version)
        used.append(staged is not None)
        return staged

    monkeypatch.setattr(Prefetch, "result", counted)
    return used


@pytest.mark.parametrize("storage", ["cpu", "disk"])
@pytest.mark.parametrize(
    "knobs",
    [{"window": 6, "mode": "running", "online": True}, {}, {"window": 3}, {"window": 3, "pad": True}],
)
def test_batches_are_the_same_with_and_without_reading_ahead(tmp_path, any_size, storage, knobs):
    expected, _ = updates(tmp_path, ahead=False, knobs=knobs)
    assert not any(any_size)
    given, replay = updates(tmp_path, ahead=True, storage=storage, knobs=knobs)
    assert sum(any_size) == 3 * 39  # all but the first of each hook
    assert len(given) == len(expected) == 120
    for one, other in zip(given, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name
    assert replay.ring.get_written()["written"]["latents"].max() > 3


def test_a_batch_that_was_read_too_early_would_be_another_one(tmp_path, any_size, monkeypatch):
    """The comparison above can fail: reading the rewritten columns ahead, too, gives other batches."""
    expected, _ = updates(tmp_path, ahead=False)
    gather, early = ReplaySource.gather, {}

    def hasty(self, rows):
        return early.pop(id(rows)) if id(rows) in early else gather(self, rows)

    monkeypatch.setattr(ReplaySource, "prefetch", lambda self, rows: early.update({id(rows): gather(self, rows)}))
    monkeypatch.setattr(ReplaySource, "gather", hasty)
    given, _ = updates(tmp_path, ahead=True)
    assert any(not torch.equal(one["marks"], other["marks"]) for one, other in zip(given, expected, strict=True))


def test_small_batches_are_not_worth_a_thread(tmp_path):
    before = {thread.name for thread in threading.enumerate()}
    updates(tmp_path, ahead=True, times=3)
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch") and t.name not in before]


def test_what_was_read_before_the_contents_changed_is_not_used(any_size):
    replay = ReplaySource(1, np.random.default_rng(0), "cpu", capacity=10, batch_size=4)
    world = World(1, never_ends=True)
    replay.add(world.collect(10))
    rows = replay.draw()[0]
    replay.prefetch(rows)
    replay.add(world.collect(10))
    batch = replay.gather(rows)
    assert any_size == [False]
    assert batch.observations[:, 2].min() >= 10  # the new rows


def test_other_rows_are_read_anew(any_size):
    replay = ReplaySource(1, np.random.default_rng(0), "cpu", capacity=10, batch_size=4)
    replay.add(World(1, never_ends=True).collect(10))
    one, other = replay.draw(2)
    replay.prefetch(one)
    np.testing.assert_array_equal(replay.gather(other).rows, other)
    np.testing.assert_array_equal(replay.gather(one).rows, one)
    assert any_size == [False, False]


def test_an_error_of_the_reader_is_raised_where_the_batch_is_wanted(any_size, monkeypatch):
    replay = ReplaySource(1, np.random.default_rng(0), "cpu", capacity=10, batch_size=4)
    replay.add(World(1, never_ends=True).collect(10))
    rows = replay.draw()[0]

    def broken(*arguments, **options):
        raise OSError("the disk is gone")

    monkeypatch.setattr(replay.ring, "stage", broken)
    replay.prefetch(rows)
    with pytest.raises(OSError, match="the disk is gone"):
        replay.gather(rows)
