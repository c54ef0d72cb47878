"""Atari: what is made of the frames of a game that is known; and real games, where they are installed."""

import sys
import types

import numpy as np
import pytest

from rl_lab.core.errors import UserError
from rl_lab.core.seeding import SeedTree
from rl_lab.data.collector import RolloutCollector
from rl_lab.envs import atari
from rl_lab.envs.make import describe_spaces, make_env
from tests.envs.restoring import assert_restored_exactly, random_act

ID = "ALE/SpaceWalk-v5"


class FakeALE:
    """A game that counts: its screen shows the number of the frame, lives are lost and games end at known frames.

    Odd frames light the left half, even ones the right half, as flickering sprites do.
    """

    deaths = (7,)
    length = 20
    made = []

    @staticmethod
    def setLoggerMode(mode):  # noqa: N802
        FakeALE.logger = mode

    def __init__(self):
        self.settings, self.loads, self.pressed = {}, 0, []
        FakeALE.made.append(self)

    def _set(self, name, value):
        self.settings[name] = value

    setInt = setBool = setFloat = _set  # noqa: N815

    def loadROM(self, path):  # noqa: N802
        assert path == "/roms/space_walk.bin"
        self.loads += 1
        self.frame = 0

    def reset_game(self):
        self.frame = 0

    def act(self, action):
        assert self.frame < self.length, "the game is over"
        self.frame += 1
        self.pressed.append(action)
        return {"noop": 0.0, "fire": 2.5, "left": -3.0}[action]

    def game_over(self, with_truncation=True):
        assert with_truncation is False
        return self.frame >= self.length

    def lives(self):
        return 3 - sum(self.frame >= death for death in self.deaths)

    def getScreenDims(self):  # noqa: N802
        return 4, 6

    def getMinimalActionSet(self):  # noqa: N802
        return ["noop", "fire"]

    def getLegalActionSet(self):  # noqa: N802
        return ["noop", "fire", "left"]

    def getScreenGrayscale(self, out):  # noqa: N802
        out[:] = 0
        half = slice(0, 3) if self.frame % 2 else slice(3, 6)
        out[:, half] = self.frame

    def getScreenRGB(self, out=None):  # noqa: N802
        out = np.zeros((4, 6, 3), np.uint8) if out is None else out
        self.getScreenGrayscale(out)
        return out


@pytest.fixture
def fake(monkeypatch):
    package, roms = types.ModuleType("ale_py"), types.ModuleType("ale_py.roms")
    package.ALEInterface, package.roms = FakeALE, roms
    package.LoggerMode = types.SimpleNamespace(Error="errors only")
    package.Action = types.SimpleNamespace(NOOP="noop")
    roms.get_all_rom_ids = lambda: ["space_walk", "pong"]
    roms.get_rom_path = lambda name: f"/roms/{name}.bin"
    monkeypatch.setitem(sys.modules, "ale_py", package)
    monkeypatch.setitem(sys.modules, "ale_py.roms", roms)
    monkeypatch.setattr(FakeALE, "made", [])
    return FakeALE.made


def game(**settings):
    return atari.AtariGame(ID, **({"max_noops": 0, "action_repeat": 4} | settings))


def test_everything_of_ale_is_set_explicitly(fake):
    game(repeat_action_probability=0.0).reset(seed=2**31 + 5)
    assert fake[0].settings == {
        "frame_skip": 1,
        "max_num_frames_per_episode": 0,
        "color_averaging": False,
        "repeat_action_probability": 0.0,
        "random_seed": 5,
    }
    assert fake[0].loads == 2  # a seed counts from the next loading on
    assert FakeALE.logger == "errors only"
    game()
    assert fake[1].settings["repeat_action_probability"] == 0.25  # what -v5 says


def test_the_last_two_frames_are_shown_as_one_and_rewards_add_up(fake):
    env = game()
    seen, _ = env.reset(seed=0)
    assert seen.shape == (4, 6, 3)
    assert not seen.any()
    seen, reward, terminated, truncated, info = env.step(1)
    assert (seen[:, :3] == 3).all()
    assert (seen[:, 3:] == 4).all()
    assert (reward, terminated, truncated, info) == (10.0, False, False, {"frames": 4})
    assert fake[0].pressed == ["fire"] * 4
    again, *_ = env.step(0)
    assert (again[:, :3] == 7).all()
    assert (seen[:, :3] == 3).all()  # what was shown before is not painted over
    env.step(0)
    assert (again[:, :3] == 7).all()


def test_a_single_frame_is_shown_as_it_is(fake):
    env = game(action_repeat=1)
    env.reset(seed=0)
    seen, _, _, _, info = env.step(0)
    assert info == {"frames": 1}
    assert (seen[:, :3] == 1).all()
    assert not seen[:, 3:].any()
    assert (env.step(0)[0][:, 3:] == 2).all()


@pytest.mark.parametrize("grayscale", [True, False])
def test_pictures_of_both_kinds(fake, grayscale):
    env = game(grayscale=grayscale)
    assert env.observation_space.shape == ((4, 6) if grayscale else (4, 6, 3))
    for seen in (env.reset(seed=0)[0], env.step(0)[0]):
        assert env.observation_space.contains(seen)


def test_actions_are_the_needed_ones_or_all(fake):
    assert game().action_space.n == 2
    env = game(full_action_space=True, clip_rewards=True)
    assert env.action_space.n == 3
    env.reset(seed=0)
    assert [env.step(action)[1] for action in (2, 0, 1)] == [-1.0, 0.0, 1.0]


def test_the_game_ends_within_a_repeat(fake):
    env = game(action_repeat=3, max_episode_steps=1000)
    env.reset(seed=0)
    results = [env.step(1) for _ in range(7)]
    assert [result[2] for result in results] == [False] * 6 + [True]
    assert [result[4]["frames"] for result in results] == [3] * 6 + [2]
    assert results[-1][1] == 5.0
    assert (results[-1][0][:, 3:] == 20).all()  # the last frame


@pytest.mark.parametrize("life_loss", ["ignore", "end"])
def test_a_lost_life(fake, life_loss):
    env = game(life_loss=life_loss)
    env.reset(seed=0)
    ended = [env.step(0)[2] for _ in range(2)]
    assert ended == [False, life_loss == "end"]
    if life_loss == "end":
        env.reset(seed=1)
        assert fake[0].frame == 0  # a game begun anew
        assert [env.step(0)[2] for _ in range(2)] == [False, True]


def test_episodes_are_cut_after_so_many_frames(fake):
    env = game(max_episode_steps=10)
    env.reset(seed=0)
    results = [env.step(0) for _ in range(3)]
    assert [result[3] for result in results] == [False, False, True]
    assert [result[4]["frames"] for result in results] == [4, 4, 2]
    assert not any(result[2] for result in results)
    env.reset(seed=0)
    assert not env.step(0)[3]


def test_a_game_that_is_over_at_the_limit_has_terminated(fake):
    env = game(max_episode_steps=20)
    env.reset(seed=0)
    assert [env.step(0)[2:4] for _ in range(5)][-1] == (True, False)


def test_games_begin_with_as_many_noops_as_the_seed_says(fake):
    env = game(max_noops=5)
    counts = []
    for seed in [*range(60), 7]:
        fake[0].pressed.clear()
        env.reset(seed=seed)
        assert set(fake[0].pressed) <= {"noop"}
        counts.append(len(fake[0].pressed))
    assert set(counts) == set(range(6))
    assert counts[7] == counts[-1]


def test_noops_that_end_the_game_begin_another(fake):
    env = game(max_noops=300)
    for seed in range(5):
        env.reset(seed=seed)
        assert fake[0].frame < FakeALE.length


def test_the_lab_gives_repeat_and_limit_to_the_game(fake):
    env = make_env(ID, 2, action_repeat=4, max_episode_steps=8, kwargs={"max_noops": 0})
    env.reset(seed=[0, 1])
    _, _, _, truncated, infos = env.step(np.array([0, 1]))
    assert infos["frames"].tolist() == [4, 4]
    observations, rewards, _, truncated, infos = env.step(np.array([0, 1]))
    assert truncated.tolist() == [True, True]
    assert rewards.tolist() == [0.0, 10.0]
    assert observations.shape == (2, 3, 4, 6)
    assert (observations[:, :, :, :3] == 7).all()
    assert describe_spaces(env) == ([3, 4, 6], 2)
    assert describe_spaces(make_env(ID, 1, kwargs={"grayscale": True})) == ([1, 4, 6], 2)


@pytest.mark.parametrize(
    ("id", "settings", "key"),
    [
        (ID, {"life_loss": "reset"}, "environment.kwargs.life_loss"),
        (ID, {"max_noops": -1}, "environment.kwargs.max_noops"),
        (ID, {"max_noops": 2.5}, "environment.kwargs.max_noops"),
        (ID, {"repeat_action_probability": 1.5}, "environment.kwargs.repeat_action_probability"),
        (ID, {"repeat_action_probability": "often"}, "environment.kwargs.repeat_action_probability"),
        (ID, {"repeat_action_probability": True}, "environment.kwargs.repeat_action_probability"),
        (ID, {"grayscale": "no"}, "environment.kwargs.grayscale"),
        (ID, {"clip_rewards": "off"}, "environment.kwargs.clip_rewards"),
        (ID, {"full_action_space": 0}, "environment.kwargs.full_action_space"),
        (ID, {"frameskip": 4}, "environment.kwargs"),
        ("ALE/Pong-v4", {}, "environment.id"),
        ("ALE/Pog-v5", {}, "environment.id"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(fake, id, settings, key):
    with pytest.raises(UserError) as caught:
        make_env(id, 1, kwargs=settings)
    assert caught.value.key == key
    if key == "environment.id":
        assert "ALE/Pong-v5" in str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"repeat_action_probability": 0.25, "life_loss": "end"}])
def test_a_known_game_is_restored_exactly(fake, settings):
    env = make_env(ID, 2, action_repeat=2, kwargs=settings)
    assert_restored_exactly(env, make_env(ID, 2, action_repeat=2, kwargs=settings), num_steps=45)


class TestReal:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("ale_py")

    def test_the_100k_protocol(self):
        env = make_env("ALE/Boxing-v5", 1, action_repeat=4, resize=64, kwargs={"repeat_action_probability": 0.0})
        assert describe_spaces(env) == ([3, 64, 64], 18)  # the fewest that Boxing needs
        pong = make_env("ALE/Pong-v5", 1, action_repeat=4, resize=64, kwargs={"grayscale": True})
        assert describe_spaces(pong) == ([1, 64, 64], 6)
        assert describe_spaces(make_env("ALE/Pong-v5", 1, kwargs={"full_action_space": True})) == ([3, 210, 160], 18)
        seen, _ = env.reset(seed=[0])
        assert seen.dtype == np.uint8
        assert 20 < seen.mean() < 235
        assert seen.std() > 5

    @pytest.mark.parametrize(
        ("id", "settings"),
        [
            ("ALE/Boxing-v5", {"repeat_action_probability": 0.0}),
            ("ALE/Boxing-v5", {"repeat_action_probability": 0.25}),
            ("ALE/Breakout-v5", {"life_loss": "end", "grayscale": True}),
        ],
    )
    def test_restored_exactly(self, id, settings):
        envs = [make_env(id, 2, action_repeat=4, resize=32, kwargs=settings) for _ in range(2)]
        assert_restored_exactly(*envs, num_steps=60)

    def test_seeds_decide_and_differ(self):
        env = make_env("ALE/Pong-v5", 3, action_repeat=4, resize=32)
        env.reset(seed=[5, 5, 6])
        for _ in range(25):
            seen, *_ = env.step(np.array([2, 2, 2]))
        np.testing.assert_array_equal(seen[0], seen[1])
        assert (seen[0] != seen[2]).any()

    def test_collecting_counts_frames(self):
        env = make_env("ALE/Boxing-v5", 1, action_repeat=4, resize=32, max_episode_steps=90)
        collector = RolloutCollector(env, SeedTree(0))
        result = collector.collect(random_act(18), 40)
        assert result.extras["env_steps"] == 22 * 4 + 2 + 17 * 4
        assert result.episodes == 1
        assert result.trajectory.truncated[22].item()

    def test_it_says_nothing(self, capfd):
        make_env("ALE/Boxing-v5", 1).reset(seed=[0])
        assert capfd.readouterr() == ("", "")
