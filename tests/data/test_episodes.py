"""Recorded episodes against a slow loop: one column each, cut at their ends, within their bounds."""

import numpy as np
import pytest
import torch

from rl_lab.core.seeding import SeedTree
from rl_lab.core.workflow import Act
from rl_lab.data.collector import RolloutCollector
from rl_lab.data.episodes import EpisodeRecord
from rl_lab.envs.make import make_env


def random_act(observations, state=None, *, explore=True, generator=None):
    return Act(torch.randint(2, (len(observations),), generator=generator))


def recorded(num_envs, num_episodes, **bounds):
    collector = RolloutCollector(make_env("tiny/CartPole", num_envs), SeedTree(5), stream="evaluate")
    record = EpisodeRecord(num_episodes, **bounds)
    returns, lengths = collector.collect_episodes(random_act, num_episodes, record=record)
    return record.trajectory(), returns, lengths


@pytest.mark.parametrize(("num_envs", "num_episodes"), [(1, 3), (3, 3), (3, 7), (4, 2)])
def test_columns_are_the_counted_episodes_from_their_first_step(num_envs, num_episodes):
    trajectory, returns, lengths = recorded(num_envs, num_episodes)
    valid = trajectory["valid"]
    assert valid.shape == (max(lengths), num_episodes)
    assert valid.sum(0).tolist() == lengths
    assert (trajectory.rewards * valid).sum(0).tolist() == returns
    for episode, length in enumerate(lengths):
        env = make_env("tiny/CartPole", 1)
        seed = SeedTree(5).seed("evaluate/environment", episode % num_envs, episode // num_envs)
        observation, _ = env.reset(seed=[seed])
        for t in range(length):
            assert torch.equal(trajectory.observations[t, episode], torch.from_numpy(observation[0]))
            action = trajectory.actions[t, episode : episode + 1].numpy()
            observation, reward, terminated, truncated, _ = env.step(action)
            assert torch.equal(trajectory.next_observations[t, episode], torch.from_numpy(observation[0]))
            assert trajectory.rewards[t, episode] == reward[0]
            assert bool(trajectory.terminated[t, episode]) == terminated[0]
            assert bool(trajectory.truncated[t, episode]) == truncated[0]
        assert trajectory.dones[:, episode].nonzero().tolist() == [[length - 1]]
        assert not trajectory.observations[length + 1 :, episode].any()


def test_bounds_cut_episodes_and_leave_episodes_out():
    trajectory, _, lengths = recorded(2, 6, max_episodes=4, max_steps=10)
    assert trajectory.shape == (10, 4)
    assert trajectory["valid"].sum(0).tolist() == [min(length, 10) for length in lengths[:4]]
    assert any(length > 10 for length in lengths[:4])
    cut = [i for i, length in enumerate(lengths[:4]) if length > 10]
    assert not trajectory.dones[:, cut].any()
    # 4 numbers of 4 bytes, 11 rows for each episode: room for two of them
    trajectory, _, _ = recorded(2, 6, max_episodes=4, max_steps=10, max_bytes=2 * 11 * 16)
    assert trajectory.shape[1] == 2
    trajectory, _, _ = recorded(2, 6, max_steps=10, max_bytes=6 * 16)
    assert trajectory.shape == (5, 1)


def test_dict_and_image_observations_keep_their_types():
    record = EpisodeRecord(2)
    seen = {"image": np.full((2, 3, 4, 4), 7, np.uint8), "speed": np.ones((2, 1), np.float32)}
    then = {"image": np.full((2, 3, 4, 4), 9, np.uint8), "speed": np.zeros((2, 1), np.float32)}
    ended, going = np.array([True, False]), np.array([False, False])
    record.add(np.array([0, 1]), seen, np.zeros((2, 1), np.float32), np.ones(2), ended, going, then)
    trajectory = record.trajectory()
    assert trajectory.observations["image"].dtype == torch.uint8
    assert trajectory.observations["image"].shape == (1, 2, 3, 4, 4)
    assert (trajectory.next_observations["image"] == 9).all()
    assert trajectory.terminated.tolist() == [[True, False]]


def test_recording_changes_nothing_that_is_played():
    outcomes = []
    for record in (None, EpisodeRecord(5)):
        collector = RolloutCollector(make_env("tiny/CartPole", 2), SeedTree(1), stream="evaluate")
        played = collector.collect_episodes(random_act, 5, record=record)
        outcomes.append((played, collector.generator.get_state().tolist()))
    assert outcomes[0] == outcomes[1]
