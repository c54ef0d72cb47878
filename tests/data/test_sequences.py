"""Sequences of any length from a replay: batch first, inside one episode, none where no episode is long enough."""

import numpy as np
import pytest
import torch

from rl_lab.data.prioritized import PrioritizedReplaySource
from rl_lab.data.sources import ReplaySource
from tests.data.tiny_world import World, successor


def replay(kind=ReplaySource, **knobs):
    knobs = {"capacity": 200, "batch_size": 8, "window": 2} | knobs
    return kind(2, np.random.default_rng(0), "cpu", **knobs)


@pytest.mark.parametrize("storage", ["cpu", "device"])
@pytest.mark.parametrize("kind", [ReplaySource, PrioritizedReplaySource])
def test_sequences_are_consecutive_decisions_of_one_episode(kind, storage):
    source, world = replay(kind, storage=storage), World(2, max_length=7)
    for _ in range(30):
        source.add(world.collect(9))  # more than it holds
    found = source.sample_sequences(500, 4)
    assert found.observations.shape == (500, 5, 4)
    assert found.actions.shape == (500, 4)
    assert found.rewards.shape == found.terminated.shape == (500, 4, 1)
    env, episode, step, state = found.observations.unbind(-1)
    assert (env == env[:, :1]).all()
    assert (episode == episode[:, :1]).all()
    assert (step.diff(dim=1) == 1).all()
    assert torch.equal(state[:, 1:], successor(env[:, 1:], state[:, :-1], found.actions))
    assert (found.rewards[:, :-1] == 0).all()  # an end is the last decision of a sequence, or none
    assert not found.terminated[:, :-1].any()
    ended = found.terminated[:, -1, 0]
    assert ended.any()
    assert (found.rewards[:, -1, 0][ended] > 0).all()
    assert len({tuple(row) for row in found.observations[:, 0].tolist()}) > 20  # they are drawn


def test_there_are_none_while_no_episode_is_long_enough():
    source, world = replay(), World(2, max_length=3)
    assert source.sample_sequences(4, 1) is None
    for _ in range(10):
        source.add(world.collect(6))
    assert source.sample_sequences(4, 3) is not None
    assert source.sample_sequences(4, 4) is None
    assert source.sample_sequences(4, 10**6) is None
    source.close_open()
    source.add(World(2, seed=1, never_ends=True).collect(4))
    assert source.sample_sequences(4, 4) is not None  # an episode that still runs will do


def test_they_come_from_the_generator_of_the_source_and_change_nothing_else():
    first, second = replay(), replay()
    for source in (first, second):
        source.add(World(2).collect(40))
    one, other = first.sample_sequences(16, 3), second.sample_sequences(16, 3)
    assert torch.equal(one.observations, other.observations)
    assert torch.equal(first.sample().observations, second.sample().observations)


def test_rows_lie_where_storage_says():
    assert replay(storage="cpu").buffer_device == torch.device("cpu")
    source = replay(storage="meta")
    assert (source.buffer_device, source.device) == (torch.device("meta"), torch.device("cpu"))
