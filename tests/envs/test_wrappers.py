"""The adapters between an environment and the seam."""

import numpy as np
import pytest
from PIL import Image

from rl_lab.core.errors import UserError
from rl_lab.envs.make import make_env

from .toys import Toy, Vector


def alternate(step, num_envs):
    """Actions that topple cart-poles of different rows at different times."""
    return np.array([(step + row) % (row + 2) > 0 for row in range(num_envs)], dtype=np.int64)


@pytest.mark.parametrize("num_repeats", [2, 3, 5])
@pytest.mark.parametrize("id", ["tiny/CartPole", "CartPole-v1"])
def test_action_repeat_is_stepping_by_hand(id, num_repeats):
    repeated, single = (
        make_env(id, 4, action_repeat=num_repeats, max_episode_steps=13),
        [make_env(id, 1, max_episode_steps=13) for _ in range(4)],
    )
    repeated.reset(seed=[10, 11, 12, 13])
    for row, env in enumerate(single):
        env.reset(seed=[10 + row])
    ends, shortened = np.zeros(2, dtype=int), 0
    for step in range(40):
        actions = alternate(step, 4)
        observations, rewards, terminated, truncated, infos = repeated.step(actions)
        assert rewards.dtype == np.float32
        assert infos["frames"].dtype == np.int64
        assert set(infos) == {"frames"}
        for row, env in enumerate(single):
            total, frames, done = 0.0, 0, False
            while frames < num_repeats and not done:
                successor, reward, ended, cut, _ = env.step(actions[row : row + 1])
                total, frames, done = total + reward[0], frames + 1, ended[0] or cut[0]
            np.testing.assert_array_equal(observations[row], successor[0])
            assert (rewards[row], infos["frames"][row]) == (total, frames)
            assert (terminated[row], truncated[row]) == (ended[0], cut[0])
            shortened += frames < num_repeats
        done = terminated | truncated
        ends += terminated.sum(), truncated.sum()
        if done.any():
            seeds = [100 * step + row for row in range(4)]
            repeated.reset(seed=seeds, options={"reset_mask": done})
            for row in np.flatnonzero(done):
                single[row].reset(seed=[seeds[row]])
    assert ends.min() > 0
    assert shortened > 0


def test_a_world_row_that_ended_is_held():
    env = make_env("tiny/GridWorld", 2, action_repeat=4)
    env.reset(seed=0)
    elapsed = np.zeros(2, dtype=np.int64)
    env.unwrapped.set_state({"state": np.array([[7, 6, 7, 7], [7, 0, 7, 7]]).T, "elapsed": elapsed})
    observations, rewards, terminated, _, infos = env.step(np.array([1, 1]))
    assert terminated.tolist() == [True, False]
    assert infos["frames"].tolist() == [1, 4]
    np.testing.assert_allclose(rewards, [1.0, -0.04])
    state = env.unwrapped.get_state()
    assert state["elapsed"].tolist() == [1, 4]
    assert state["state"][:2].T.tolist() == [[7, 7], [7, 4]]
    np.testing.assert_array_equal(observations, env.unwrapped._observe())


def test_frames_are_absent_without_repeat():
    for id in ("tiny/CartPole", "CartPole-v1"):
        env = make_env(id, 2)
        env.reset(seed=0)
        assert env.step(np.array([0, 1]))[4] == {}


@pytest.mark.parametrize("id", ["tiny/PointMass", "Pendulum-v1"])
def test_frame_stack_of_vectors_across_resets(id):
    plain, stacked = make_env(id, 3), make_env(id, 3, frame_stack=3)
    width = plain.single_observation_space.shape[0]
    assert stacked.single_observation_space.shape == (3 * width,)
    first, _ = plain.reset(seed=[1, 2, 3])
    history = [first, first, first]
    observations, _ = stacked.reset(seed=[1, 2, 3])
    np.testing.assert_array_equal(observations, np.concatenate(history, axis=1))
    generator = np.random.default_rng(0)
    for step in range(8):
        actions = generator.uniform(-1, 1, (3, *plain.single_action_space.shape)).astype(np.float32)
        observations, *_ = stacked.step(actions)
        kept = observations.copy()
        history = [*history[1:], plain.step(actions)[0]]
        np.testing.assert_array_equal(observations, np.concatenate(history, axis=1))
        if step in (3, 4):
            mask, seeds = np.array([False, True, step == 4]), [None, 50 + step, 60]
            start, _ = plain.reset(seed=seeds, options={"reset_mask": mask})
            history = [np.where(mask[:, None], start, frame) for frame in history]
            after, _ = stacked.reset(seed=seeds, options={"reset_mask": mask})
            np.testing.assert_array_equal(after, np.concatenate(history, axis=1))
            np.testing.assert_array_equal(observations, kept)  # returned arrays are not touched
            np.testing.assert_array_equal(after[0], kept[0])


def test_frame_stack_of_pictures_puts_the_newest_last():
    env = make_env("tiny/GridWorld", 2, frame_stack=2)
    start, _ = env.reset(seed=0)
    assert start.shape == (2, 6, 32, 32)
    np.testing.assert_array_equal(start[:, :3], start[:, 3:])
    env.unwrapped.set_state({"state": np.array([[3, 3, 7, 7]] * 2).T, "elapsed": np.zeros(2, dtype=np.int64)})
    moved, *_ = env.step(np.array([0, 1]))
    np.testing.assert_array_equal(moved[:, :3], start[:, 3:])
    np.testing.assert_array_equal(moved[:, 3:], env.unwrapped._observe())
    assert env.single_observation_space.contains(moved[0])


def test_dict_observations_become_standard(register):
    env = make_env(register(Toy), 2)
    observations, _ = env.reset(seed=[0, 1])
    assert observations["camera"].dtype == np.uint8
    assert observations["camera"].shape == (2, 3, 6, 4)
    assert observations["camera"][0, :, 0, 1].tolist() == [10, 20, 30]
    assert observations["state"].dtype == np.float32
    assert env.single_observation_space.contains({key: value[0] for key, value in observations.items()})


def test_dict_observations_are_resized_and_stacked(register):
    env = make_env(register(Toy), 2, resize=(3, 2), frame_stack=2)
    start, _ = env.reset(seed=[0, 1])
    assert start["camera"].shape == (2, 6, 3, 2)
    assert start["state"].shape == (2, 4)
    after, *_ = env.step(np.zeros((2, 2), np.float32))
    np.testing.assert_array_equal(after["state"][:, :2], start["state"][:, 2:])
    # An action of 0 is the middle of the Box: 0 and 5.
    np.testing.assert_allclose(after["state"][:, 2], start["state"][:, 2] + 5, rtol=1e-6)


def test_actions_are_clipped_and_rescaled(register):
    env = make_env(register(Toy), 1)
    assert (env.single_action_space.low.tolist(), env.single_action_space.high.tolist()) == ([-1, -1], [1, 1])
    env.reset(seed=0)
    for action in ([-1, -1], [1, 1], [0, 0.5], [-7, 7]):
        env.step(np.array([action], np.float32))
    taken = env.unwrapped.envs[0].unwrapped.taken
    assert [action.tolist() for action in taken] == [[-2, 0], [2, 10], [0, 7.5], [-2, 10]]
    assert taken[0].dtype == np.float64


def test_pendulum_through_the_adapter_equals_ours():
    ours, theirs = make_env("tiny/Pendulum", 3), make_env("Pendulum-v1", 3)
    np.testing.assert_array_equal(ours.reset(seed=4)[0], theirs.reset(seed=4)[0])
    generator = np.random.default_rng(0)
    for _ in range(200):
        actions = generator.uniform(-1.3, 1.3, (3, 1)).astype(np.float32)
        for left, right in zip(ours.step(actions), theirs.step(actions), strict=True):
            np.testing.assert_array_equal(left, right)


def test_discrete_actions_count_from_zero(register):
    env = make_env(register(Vector), 2)
    env.reset(seed=0)
    observations, *_ = env.step(np.array([0, 1]))  # the environment asserts that it gets 3 and 4
    assert env.single_action_space.start == 0
    assert observations.shape == (2, 1)


def test_discrete_observations_become_one_hot():
    env = make_env("FrozenLake-v1", 3, kwargs={"is_slippery": False})
    observations, _ = env.reset(seed=0)
    np.testing.assert_array_equal(observations, np.eye(16, dtype=np.float32)[[0, 0, 0]])
    observations, *_ = env.step(np.array([1, 2, 0]))
    np.testing.assert_array_equal(observations, np.eye(16, dtype=np.float32)[[4, 1, 0]])


def test_resize_averages_like_pillow():
    plain, resized = make_env("tiny/GridWorld", 2), make_env("tiny/GridWorld", 2, resize=[12, 20])
    picture, _ = plain.reset(seed=1)
    small, _ = resized.reset(seed=1)
    assert small.shape == (2, 3, 12, 20)
    assert small.dtype == np.uint8
    expected = Image.fromarray(picture[1].transpose(1, 2, 0)).resize((20, 12), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(small[1].transpose(1, 2, 0), np.asarray(expected))
    small[:] = 0  # fresh and writable


def test_resize_without_a_picture_is_refused():
    with pytest.raises(UserError, match="no picture to resize"):
        make_env("tiny/CartPole", 1, resize=8)


def test_rendering_passes_through(register):
    frames = make_env("tiny/CartPole", 2, frame_stack=2, action_repeat=2).render_frames()
    assert frames.shape == (2, 200, 300, 3)
    name = register(Toy)
    env = make_env(name, 2, render=True, frame_stack=2)
    env.reset(seed=0)
    frames = env.render_frames()
    assert (frames.shape, frames.dtype, frames.max()) == ((2, 5, 7, 3), np.uint8, 9)
    with pytest.raises(UserError, match="render=True"):
        make_env(name, 2).render_frames()
