"""The tiny worlds: equal to Gymnasium where they should be, and true to their docstrings elsewhere."""

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from rl_lab.core.errors import UserError
from rl_lab.envs.make import WORLDS
from rl_lab.envs.tiny import CartPole, CartPoleSwingUp, GridWorld, Pendulum, PointMass

TINY = [CartPole, Pendulum, PointMass, GridWorld, CartPoleSwingUp]


def random_actions(env, generator):
    space = env.single_action_space
    if isinstance(space, gymnasium.spaces.Discrete):
        return generator.integers(space.n, size=env.num_envs)
    return generator.uniform(-1.2, 1.2, size=(env.num_envs, *space.shape)).astype(np.float32)


def mean_return(world, policy):
    """Play one full-length episode per row."""
    observations, _ = world.reset(seed=0)
    returns, running = np.zeros(world.num_envs), np.ones(world.num_envs, dtype=bool)
    for _ in range(world.max_episode_steps):
        observations, rewards, terminated, _, _ = world.step(policy(observations))
        returns += rewards * running
        running &= ~terminated
    return returns.mean()


def play_beside(world, references, policy, to_reference, num_steps):
    """Step a world and Gymnasium environments with the same seeds and actions; count (terminated, truncated)."""
    ends = np.zeros(2, dtype=int)
    seeds = list(range(100, 100 + world.num_envs))
    observations, _ = world.reset(seed=seeds)
    for row, reference in enumerate(references):
        np.testing.assert_array_equal(observations[row], reference.reset(seed=seeds[row])[0])
    for step in range(num_steps):
        actions = policy(observations)
        observations, rewards, terminated, truncated, infos = world.step(actions)
        assert observations.dtype == rewards.dtype == np.float32
        assert infos == {}
        for row, reference in enumerate(references):
            successor, reward, ended, cut, _ = reference.step(to_reference(actions[row]))
            np.testing.assert_array_equal(observations[row], successor)
            assert rewards[row] == np.float32(reward)
            assert (terminated[row], truncated[row]) == (ended, cut)
        done = terminated | truncated
        ends += terminated.sum(), truncated.sum()
        if done.any():
            seeds = [1000 * step + row for row in range(world.num_envs)]
            final = observations.copy()
            fresh, _ = world.reset(seed=seeds, options={"reset_mask": done})
            np.testing.assert_array_equal(observations, final)  # what step returned is the caller's
            np.testing.assert_array_equal(fresh[~done], final[~done])
            for row in np.flatnonzero(done):
                np.testing.assert_array_equal(fresh[row], references[row].reset(seed=seeds[row])[0])
            observations = fresh
    return ends


def test_cart_pole_equals_gymnasium():
    generator = np.random.default_rng(0)
    references = [gymnasium.make("CartPole-v1") for _ in range(9)]

    def policy(observations):
        # A third acts at random, a third balances until the time is up, a third runs off the track.
        x, x_dot, theta, theta_dot = observations.T
        balance = (0.1 * x + 0.2 * x_dot + theta + 0.5 * theta_dot > 0).astype(np.int64)
        drift = (theta + 0.5 * theta_dot > 0.05).astype(np.int64)
        return np.concatenate([generator.integers(2, size=3), balance[3:6], drift[6:]])

    terminated, truncated = play_beside(CartPole(9), references, policy, int, 1300)
    assert terminated > 50
    assert truncated >= 6


def test_pendulum_equals_gymnasium():
    generator = np.random.default_rng(1)
    references = [gymnasium.make("Pendulum-v1") for _ in range(6)]
    world = Pendulum(6)

    def policy(observations):
        # Half acts at random, half pumps energy, so that the speed limit and turns beyond 180 degrees occur.
        actions = random_actions(world, generator)
        actions[:3, 0] = np.sign(observations[:3, 2])
        return actions

    assert tuple(play_beside(world, references, policy, lambda action: 2 * action, 900)) == (0, 24)


def test_unseeded_resets_follow_the_rows_generator_like_gymnasium():
    world, reference = CartPole(1), gymnasium.make("CartPole-v1")
    world.reset(seed=[5]), reference.reset(seed=5)
    for _ in range(3):
        np.testing.assert_array_equal(world.reset()[0][0], reference.reset()[0])


@pytest.mark.parametrize("id", WORLDS)
def test_seam(id):
    world = WORLDS[id](4)
    generator = np.random.default_rng(2)
    assert world.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    observations, infos = world.reset(seed=3)
    assert infos == {}
    space = world.single_observation_space
    for _ in range(30):
        assert observations.shape == (4, *space.shape)
        assert all(space.contains(row) for row in observations)
        kept, before = observations, observations.copy()
        observations, rewards, terminated, truncated, infos = world.step(random_actions(world, generator))
        np.testing.assert_array_equal(kept, before)
        assert observations.flags.writeable
        assert observations.flags.c_contiguous
        assert (rewards.dtype, terminated.dtype, truncated.dtype, infos) == (np.float32, bool, bool, {})
        done = terminated | truncated
        if done.any():
            observations, _ = world.reset(seed=7, options={"reset_mask": done})


@pytest.mark.parametrize("id", WORLDS)
def test_int_seed_counts_up_and_same_seed_repeats(id):
    listed, _ = WORLDS[id](3).reset(seed=[8, 9, 10])
    counted, _ = WORLDS[id](3).reset(seed=8)
    alone, _ = WORLDS[id](1).reset(seed=[9])
    np.testing.assert_array_equal(listed, counted)
    np.testing.assert_array_equal(listed[1], alone[0])


@pytest.mark.parametrize("world_class", TINY)
def test_state_round_trip(world_class):
    generator = np.random.default_rng(4)
    world, other = world_class(3, max_episode_steps=20), world_class(3, max_episode_steps=20)
    world.reset(seed=1)
    for _ in range(6):
        world.step(random_actions(world, generator))
    state = world.get_state()
    actions = [random_actions(world, generator) for _ in range(14)]
    first = [world.step(action) for action in actions]
    other.set_state(state)
    second = [other.step(action) for action in actions]
    for ours, theirs in zip(first, second, strict=True):
        for left, right in zip(ours[:4], theirs[:4], strict=True):
            np.testing.assert_array_equal(left, right)
    assert first[-1][3].all()  # the step count came along
    assert not first[-2][3].any()


def test_set_state_of_some_rows():
    world = PointMass(3)
    world.reset(seed=1)
    before = world.get_state()
    world.step(np.ones((3, 2), np.float32))
    world.set_state(before, rows=np.array([True, False, True]))
    after = world.get_state()
    assert after["elapsed"].tolist() == [0, 1, 0]
    np.testing.assert_array_equal(after["state"][:, [0, 2]], before["state"][:, [0, 2]])
    assert (after["state"][:, 1] != before["state"][:, 1]).all()


@pytest.mark.parametrize("mask", [np.array([True]), np.array([1, 0]), np.array([False, False])])
def test_bad_masks_are_refused(mask):
    with pytest.raises(ValueError, match="reset_mask"):
        CartPole(2).reset(seed=0, options={"reset_mask": mask})


def test_point_mass_is_solved_by_its_controller_only():
    generator = np.random.default_rng(0)
    good = mean_return(PointMass(100), lambda seen: -4 * seen[:, :2] - seen[:, 2:])
    assert -8 < good < -6
    idle = mean_return(PointMass(100), lambda seen: generator.uniform(-1, 1, (100, 2)).astype(np.float32))
    assert idle < -60 < PointMass.solved_return < good


def test_point_mass_stops_at_walls():
    world = PointMass(1)
    world.reset(seed=0)
    for _ in range(60):
        observations, _, terminated, _, _ = world.step(np.array([[1.0, 9.0]], np.float32))
    np.testing.assert_array_equal(observations[0], [1.5, 1.5, 0.0, 0.0])
    assert not terminated.any()


def swing_up(observations):
    """Pump energy until the pole is nearly upright, then balance it."""
    x, x_dot, cos, sin, theta_dot = observations.T
    energy = theta_dot**2 / 3 + 9.8 * (cos - 1)
    pump = np.clip(0.5 * energy * theta_dot * cos, -1, 1) - 0.6 * x - 0.3 * x_dot
    balance = 0.1 * x + 0.25 * x_dot + 3 * np.arctan2(sin, cos) + 0.7 * theta_dot
    return np.where((cos > 0.85) & (abs(theta_dot) < 3.5), balance, pump)[:, None]


def test_swing_up():
    generator = np.random.default_rng(0)
    world = CartPoleSwingUp(20)
    observations, _ = world.reset(seed=0)
    assert (observations[:, 2] < -0.99).all()
    assert mean_return(CartPoleSwingUp(20), swing_up) > CartPoleSwingUp.solved_return
    assert mean_return(CartPoleSwingUp(20), lambda seen: np.zeros((20, 1), np.float32)) < 1  # no energy from nowhere
    assert mean_return(CartPoleSwingUp(20), lambda seen: generator.uniform(-1, 1, (20, 1)).astype(np.float32)) < 100


def test_swing_up_walls_hold_the_cart():
    world = CartPoleSwingUp(1)
    world.reset(seed=0)
    for step in range(500):
        observations, rewards, terminated, truncated, _ = world.step(np.ones((1, 1), np.float32))
        assert observations[0, 0] <= np.float32(2.4)
        assert 0 <= rewards[0] <= 1
        assert not terminated[0]
        assert truncated[0] == (step == 499)
    np.testing.assert_array_equal(observations[0, :2], np.array([2.4, 0.0], np.float32))


def place(world, agent, goal):
    """Put the agent and the goal of a grid of one row."""
    world.set_state({"state": np.array([[*agent, *goal]]).T, "elapsed": np.zeros(1, dtype=np.int64)})


def test_grid_moves_goal_and_penalty():
    world = GridWorld(1, size=4, step_penalty=0.25)
    world.reset(seed=0)
    place(world, (2, 3), (3, 3))
    for action, cell in [(0, (1, 3)), (1, (1, 3)), (3, (1, 2)), (2, (2, 2)), (2, (3, 2))]:
        observations, rewards, terminated, _, _ = world.step(np.array([action]))
        assert rewards[0] == -0.25
        assert not terminated[0]
        red = np.argwhere(observations[0, 0] == 230)
        np.testing.assert_array_equal(np.unique(red // 8, axis=0), [cell])
        assert len(red) == 64
    observations, rewards, terminated, truncated, _ = world.step(np.array([1]))
    assert (rewards[0], terminated[0], truncated[0]) == (1.0, True, False)


def test_grid_walls_block_and_the_gap_does_not():
    world = GridWorld(1, size=6, walls=True)
    world.reset(seed=0)
    place(world, (0, 2), (5, 5))
    world.step(np.array([1]))
    assert world.get_state()["state"][1, 0] == 2
    place(world, (3, 2), (5, 5))
    world.step(np.array([1]))
    assert world.get_state()["state"][1, 0] == 3


@pytest.mark.parametrize("size", [2, 3, 7, 8, 32])
def test_grid_pictures_fit_and_starts_are_free(size):
    world = GridWorld(50, size=size, walls=size > 2, random_goal=True)
    observations, _ = world.reset(seed=0)
    assert observations.shape[1] == 3
    assert observations.shape[2] == observations.shape[3] <= 32
    state = world.get_state()["state"]
    assert (state[:2] != state[2:]).any(axis=0).all()
    walls = world._walls
    assert not walls[state[0], state[1]].any()
    assert not walls[state[2], state[3]].any()
    assert len(np.unique(state[2:], axis=1).T) > 1


def test_grid_truncates():
    world = GridWorld(2, max_episode_steps=3)
    world.reset(seed=0)
    flags = [world.step(np.array([0, 0]))[2:4] for _ in range(3)]
    assert [truncated.tolist() for _, truncated in flags] == [[False, False], [False, False], [True, True]]
    assert not any(terminated.any() for terminated, _ in flags)


def test_grid_size_is_checked():
    with pytest.raises(UserError, match="2 to 32 cells"):
        GridWorld(1, size=33)


@pytest.mark.parametrize("world_class", TINY)
def test_rendering_shows_the_rows(world_class):
    world = world_class(3)
    world.reset(seed=5)
    frames = world.render_frames()
    height_width = (200, 200) if world_class is GridWorld else (200, 300)
    assert frames.shape == (3, *height_width, 3)
    assert frames.dtype == np.uint8
    assert frames.std() > 5
    assert (frames[0] != frames[1]).any()
    assert len(world.render()) == 3
    generator = np.random.default_rng(0)
    for _ in range(10):
        world.step(random_actions(world, generator))
    assert (world.render_frames() != frames).any()
