"""MiniGrid from pixels: the package's own pictures, its limits and rewards, restored exactly."""

import sys
import types

import gymnasium
import numpy as np
import pytest

from rl_lab.core.errors import UserError
from rl_lab.envs.make import describe_spaces, make_env
from tests.envs.restoring import assert_restored_exactly

DOOR = "MiniGrid-DoorKey-5x5-v0"


class FakeWorld(gymnasium.Env):
    """A grid of two by three that counts its steps; the goal is wherever action 2 is taken."""

    agent_view_size, height, width = 5, 2, 3

    def __init__(self, max_steps=10, hard=False):
        self.max_steps, self.hard, self.action_space = max_steps, hard, gymnasium.spaces.Discrete(3)
        self.observation_space = gymnasium.spaces.Dict({})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.place = 0, int(self.np_random.integers(200))
        return {}, {}

    def step(self, action):
        self.count += 1
        self.place = (self.place + 1 + action) % 256
        return {}, 1 - 0.9 * self.count / self.max_steps, action == 2, self.count >= self.max_steps, {}

    def get_pov_render(self, tile_size):
        return np.full((5 * tile_size, 5 * tile_size, 3), self.place, np.uint8)

    def get_full_render(self, highlight, tile_size):
        return np.full((2 * tile_size, 3 * tile_size, 3), self.place, np.uint8)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setitem(sys.modules, "minigrid", types.ModuleType("minigrid"))
    gymnasium.register("MiniGrid-Fake-v0", entry_point=FakeWorld)
    yield "MiniGrid-Fake-v0"
    del gymnasium.registry["MiniGrid-Fake-v0"]


def test_views_and_tiles(fake):
    assert describe_spaces(make_env(fake, 1)) == ([3, 45, 45], 3)
    assert describe_spaces(make_env(fake, 1, kwargs={"tile_size": 4})) == ([3, 20, 20], 3)
    assert describe_spaces(make_env(fake, 1, kwargs={"tile_size": 4, "view": "full"})) == ([3, 8, 12], 3)
    assert describe_spaces(make_env(fake, 1, resize=64)) == ([3, 64, 64], 3)


def test_the_limit_is_the_worlds_own_so_that_rewards_are_measured_by_it(fake):
    env = make_env(fake, 1, max_episode_steps=4)
    env.reset(seed=[0])
    results = [env.step(np.array([0])) for _ in range(4)]
    assert [bool(result[3][0]) for result in results] == [False, False, False, True]
    assert results[1][1][0] == np.float32(1 - 0.9 * 2 / 4)
    longer = make_env(fake, 1, max_episode_steps=40)
    longer.reset(seed=[0])
    assert not any(longer.step(np.array([0]))[3][0] for _ in range(39))


def test_settings_reach_the_world(fake):
    assert make_env(fake, 1, kwargs={"hard": True}).unwrapped.envs[0]._world.hard
    with pytest.raises(UserError) as caught:
        make_env(fake, 1, kwargs={"easy": True})
    assert caught.value.key == "environment.kwargs"


@pytest.mark.parametrize(
    ("id", "settings", "key"),
    [
        ("MiniGrid-Fake-v0", {"view": "above"}, "environment.kwargs.view"),
        ("MiniGrid-Fake-v0", {"tile_size": 0}, "environment.kwargs.tile_size"),
        ("MiniGrid-Fake-v0", {"tile_size": 1.5}, "environment.kwargs.tile_size"),
        ("MiniGrid-Fak-v0", {}, "environment.id"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(fake, id, settings, key):
    with pytest.raises(UserError) as caught:
        make_env(id, 1, kwargs=settings)
    assert caught.value.key == key
    if key == "environment.id":
        assert "MiniGrid-Fake-v0" in str(caught.value)


def test_a_known_world_is_restored_exactly(fake):
    assert_restored_exactly(make_env(fake, 2), make_env(fake, 2), num_steps=33)


class TestReal:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("minigrid")

    @pytest.mark.parametrize("view", ["partial", "full"])
    def test_pictures_are_those_of_the_package(self, view):
        from minigrid.wrappers import RGBImgObsWrapper, RGBImgPartialObsWrapper

        wrapper = RGBImgPartialObsWrapper if view == "partial" else RGBImgObsWrapper
        reference = wrapper(gymnasium.make(DOOR), tile_size=9)
        env = make_env(DOOR, 1, kwargs={"view": view})
        seen, (expected, _) = env.reset(seed=[4])[0], reference.reset(seed=4)
        for action in (None, 0, 2, 2, 1, 2, 3, 5, 2):
            if action is not None:
                seen, reward, *_ = env.step(np.array([action]))
                expected, wanted, *_ = reference.step(action)
                assert reward[0] == np.float32(wanted)
            np.testing.assert_array_equal(seen[0], expected["image"].transpose(2, 0, 1))

    @pytest.mark.parametrize("view", ["partial", "full"])
    def test_restored_exactly(self, view):
        envs = [make_env(DOOR, 2, max_episode_steps=30, kwargs={"view": view}) for _ in range(2)]
        assert_restored_exactly(*envs, num_steps=50)

    def test_it_draws_and_says_nothing(self, capfd):
        env = make_env(DOOR, 2, render=True)
        env.reset(seed=[0, 1])
        assert env.render_frames().shape == (2, 160, 160, 3)
        assert capfd.readouterr() == ("", "")
