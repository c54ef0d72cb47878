"""make_env: ids, settings, limits, row resets of Gymnasium environments, and what it says when something is wrong."""

import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from rl_lab.core.errors import UserError
from rl_lab.envs.make import WORLDS, describe_spaces, known_ids, make_env

from .toys import ManyDiscrete, TextSeen, Toy, Unbounded


@pytest.mark.parametrize(
    ("id", "options", "observation", "action"),
    [
        ("tiny/CartPole", {}, 4, 2),
        ("tiny/Pendulum", {}, 3, 1),
        ("tiny/PointMass", {}, 4, 2),
        ("tiny/GridWorld", {}, [3, 32, 32], 4),
        ("tiny/GridWorld", {"resize": 16, "frame_stack": 2}, [6, 16, 16], 4),
        ("tiny/CartPoleSwingUp", {"frame_stack": 2}, 10, 1),
        ("probe/both", {"kwargs": {"continuous": True}}, 1, 1),
        ("CartPole-v1", {}, 4, 2),
        ("FrozenLake-v1", {}, 16, 4),
    ],
)
def test_describe_spaces(id, options, observation, action):
    assert describe_spaces(make_env(id, 2, **options)) == (observation, action)


def test_describe_dict_spaces(register):
    assert describe_spaces(make_env(register(Toy), 1)) == ({"camera": [3, 6, 4], "state": 2}, 2)


@pytest.mark.parametrize("id", ["CartPole-v1", "tiny/CartPole"])
def test_row_resets(id):
    env = make_env(id, 3)
    assert env.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    env.reset(seed=[1, 2, 3])
    for _ in range(4):
        observations, *_ = env.step(np.array([0, 1, 1]))
    options = {"reset_mask": np.array([False, True, False])}
    after, _ = env.reset(seed=[None, 77, None], options=options)
    assert list(options) == ["reset_mask"]
    np.testing.assert_array_equal(after[[0, 2]], observations[[0, 2]])
    np.testing.assert_array_equal(after[1], gymnasium.make("CartPole-v1").reset(seed=77)[0])
    # The others go on as if nothing had happened.
    other = make_env(id, 3)
    other.reset(seed=[1, 2, 3])
    for _ in range(5):
        expected, *_ = other.step(np.array([0, 1, 1]))
    observations, *_ = env.step(np.array([0, 1, 1]))
    np.testing.assert_array_equal(observations[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("id", ["CartPole-v1", "tiny/CartPole"])
def test_final_observation_is_the_true_successor(id):
    env, reference = make_env(id, 1), gymnasium.make("CartPole-v1")
    env.reset(seed=[3]), reference.reset(seed=3)
    terminated = [False]
    while not terminated[0]:
        observations, _, terminated, _, _ = env.step(np.array([1]))
        successor, *_ = reference.step(1)
        np.testing.assert_array_equal(observations[0], successor)
    assert abs(observations[0, 2]) > 12 * np.pi / 180


@pytest.mark.parametrize("id", ["Pendulum-v1", "tiny/Pendulum", "MountainCarContinuous-v0"])
def test_max_episode_steps_truncates(id):
    env = make_env(id, 2, max_episode_steps=5)
    env.reset(seed=0)
    for step in range(5):
        _, _, terminated, truncated, _ = env.step(np.zeros((2, 1), np.float32))
        assert not terminated.any()
        assert truncated.tolist() == [step == 4] * 2
    env.reset(seed=1, options={"reset_mask": np.array([True, True])})
    assert not env.step(np.zeros((2, 1), np.float32))[3].any()


@pytest.mark.parametrize("id", ["Pendulum-v1", "tiny/Pendulum"])
def test_max_episode_steps_replaces_a_shorter_limit(id):
    env = make_env(id, 1, max_episode_steps=210)
    env.reset(seed=0)
    truncated = [env.step(np.zeros((1, 1), np.float32))[3][0] for _ in range(210)]
    assert truncated.index(True) == 209


def test_limit_counts_repeated_steps():
    for id in ("Pendulum-v1", "tiny/Pendulum"):
        env = make_env(id, 1, max_episode_steps=10, action_repeat=4)
        env.reset(seed=0)
        results = [env.step(np.zeros((1, 1), np.float32)) for _ in range(3)]
        assert [result[4]["frames"][0] for result in results] == [4, 4, 2]
        assert [result[3][0] for result in results] == [False, False, True]


@pytest.mark.parametrize(
    ("id", "near"),
    [
        ("tiny/Cartpole", "tiny/CartPole"),
        ("probe/observations", "probe/observation"),
        ("CartPole", "CartPole-v1"),
        ("CartPole-v7", "CartPole-v1"),
        ("Pendulm-v1", "Pendulum-v1"),
        ("Hopper-v2", "Hopper-v5"),
    ],
)
def test_unknown_ids_get_the_nearest_names(id, near):
    with pytest.raises(UserError) as caught:
        make_env(id, 1)
    assert caught.value.key == "environment.id"
    nearest = next(line for line in str(caught.value).splitlines() if "nearest" in line)
    assert near in nearest


def test_known_ids():
    assert {*WORLDS, "CartPole-v1", "Pendulum-v1"} <= set(known_ids())
    assert "GymV26Environment-v0" not in known_ids()


def test_families_say_what_to_install():
    with pytest.raises(UserError) as caught:
        make_env("dm_control/cartpole-balance-v0", 1)
    assert 'pip install "shimmy[dm-control]"' in caught.value.remedy
    assert "--allow" in caught.value.remedy


@pytest.mark.parametrize(
    ("id", "extra"), [("HalfCheetah-v5", "rl-lab[mujoco]"), ("LunarLander-v3", "gymnasium[box2d]")]
)
def test_missing_extra(id, extra, monkeypatch):
    for module in ("mujoco", "Box2D"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in [name for name in sys.modules if name.startswith(("gymnasium.envs.mujoco", "gymnasium.envs.box2d"))]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(UserError) as caught:
        make_env(id, 1)
    assert caught.value.remedy == f'pip install "{extra}"'


@pytest.mark.parametrize(
    ("id", "module", "extra"),
    [("ALE/Pong-v5", "ale_py", "atari"), ("MiniGrid-Empty-5x5-v0", "minigrid", "minigrid")],
)
def test_a_family_of_ours_names_its_extra(id, module, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError) as caught:
        make_env(id, 1)
    assert (caught.value.key, caught.value.value) == ("environment.id", id)
    assert caught.value.remedy == f'pip install "rl-lab[{extra}]"'


MODULE = """
import gymnasium, numpy as np
class Own(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(3)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}
    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}
gymnasium.register(id="Own-v0", entry_point=Own)
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "rl_lab_test_own.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "rl_lab_test_own"
    sys.modules.pop("rl_lab_test_own", None)
    gymnasium.registry.pop("Own-v0", None)


def test_a_colon_imports_only_what_is_allowed(own_module):
    id = f"{own_module}:Own-v0"
    for allow in ((), ("something_else", "rl_lab")):
        with pytest.raises(UserError, match=f"--allow {own_module}"):
            make_env(id, 1, allow=allow)
    assert own_module not in sys.modules
    env = make_env(id, 2, allow=[own_module], max_episode_steps=3)
    assert describe_spaces(env) == (2, 3)
    with pytest.raises(UserError, match="no environment of this name"):
        make_env(f"{own_module}:Owned-v0", 1, allow=[own_module])


@pytest.mark.parametrize("id", ["rl_lab_test_absent:X-v0", "rl_lab_test_absent.part:X-v0"])
def test_an_allowed_module_that_is_not_there(id):
    with pytest.raises(UserError, match="could not be imported"):
        make_env(id, 1, allow=["rl_lab_test_absent"])


@pytest.mark.parametrize(
    ("env_class", "named"), [(Unbounded, "action space Box"), (ManyDiscrete, "MultiDiscrete"), (TextSeen, "Text")]
)
def test_unsupported_spaces(env_class, named, register):
    with pytest.raises(UserError, match="supported: ") as caught:
        make_env(register(env_class), 1)
    assert named in caught.value.problem


def test_tuple_observations_are_refused():
    with pytest.raises(UserError, match="Tuple"):
        make_env("Blackjack-v1", 1)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"id": 3}, "environment.id"),
        ({"id": ["tiny/CartPole"]}, "environment.id"),
        ({"id": ""}, "environment.id"),
        ({"num_envs": 0}, "environment.num_envs"),
        ({"num_envs": True}, "environment.num_envs"),
        ({"action_repeat": -1}, "environment.action_repeat"),
        ({"frame_stack": 1.5}, "environment.frame_stack"),
        ({"max_episode_steps": 0}, "environment.max_episode_steps"),
        ({"resize": 0}, "environment.resize"),
        ({"resize": "big"}, "environment.resize"),
        ({"resize": [8, 8, 8]}, "environment.resize"),
        ({"kwargs": {"sise": 4}}, "environment.kwargs.sise"),
        ({"kwargs": {"size": "four"}}, "environment.kwargs.size"),
        ({"kwargs": {"size": True}}, "environment.kwargs.size"),
        ({"kwargs": {"walls": 1}}, "environment.kwargs.walls"),
        ({"kwargs": {"size": 99}}, "environment.kwargs.size"),
        ({"kwargs": {"max_episode_steps": 4}}, "environment.kwargs.max_episode_steps"),
        ({"id": "CartPole-v1", "kwargs": {"gravitas": 1}}, "environment.kwargs"),
    ],
)
def test_wrong_settings_name_their_key(arguments, key):
    given = {"id": "tiny/GridWorld", "num_envs": 1} | arguments
    with pytest.raises(UserError) as caught:
        make_env(given.pop("id"), given.pop("num_envs"), **given)
    assert caught.value.key == key


def test_a_class_in_place_of_an_id_is_told_what_to_do():
    with pytest.raises(UserError, match="is a text") as caught:
        make_env(gymnasium.Env, 2)
    assert "gymnasium.register(" in caught.value.remedy


def test_gymnasium_is_quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = make_env("CartPole-v0", 2)
        env.reset(seed=0)
        env.step(np.array([0, 1]))
        env.close()


def test_environments_import_neither_torch_nor_pillow():
    code = (
        "import sys; from rl_lab.envs.make import make_env; make_env('tiny/CartPole', 1).reset(seed=0); "
        "sys.exit('torch' in sys.modules or 'PIL' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
