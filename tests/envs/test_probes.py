"""The probes: their documented returns, for the best and for a random policy."""

import gymnasium
import numpy as np
import pytest

from rl_lab.core.errors import UserError
from rl_lab.envs.make import make_env


def play(id, continuous, policy, num_envs=2000):
    """Return the mean return of one episode per row, and the observations seen at each step."""
    env = make_env(id, num_envs, kwargs={"continuous": continuous})
    observations, _ = env.reset(seed=0)
    returns, seen = np.zeros(num_envs), [observations]
    while True:
        observations, rewards, terminated, truncated, _ = env.step(policy(observations))
        returns += rewards
        assert not truncated.any()
        assert terminated.all() or not terminated.any()
        if terminated.all():
            return returns.mean(), seen, env
        seen.append(observations)


def always(discrete, continuous):
    def policy(is_continuous):
        def act(observations):
            if is_continuous:
                return np.full((len(observations), 1), continuous, np.float32)
            return np.full(len(observations), discrete)

        return act

    return policy


def by_sign(is_continuous):
    def act(observations):
        return observations / 2 if is_continuous else (observations[:, 0] > 0).astype(np.int64)

    return act


def at_random(is_continuous):
    generator = np.random.default_rng(0)

    def act(observations):
        if is_continuous:
            return generator.uniform(-1, 1, observations.shape).astype(np.float32)
        return generator.integers(2, size=len(observations))

    return act


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize(
    ("id", "policy", "expected", "num_steps"),
    [
        ("probe/constant", always(0, 0.3), 1.0, 1),
        ("probe/observation", always(1, -0.3), 0.0, 1),
        ("probe/delayed", always(0, 0.3), 1.0, 2),
        ("probe/action", always(1, 0.5), 1.0, 1),
        ("probe/both", by_sign, 1.0, 1),
    ],
)
def test_optimal_returns(id, policy, expected, num_steps, continuous):
    mean, seen, env = play(id, continuous, policy(continuous))
    assert mean == pytest.approx(expected, abs=0.08 if id == "probe/observation" else 1e-6)
    assert env.unwrapped.optimal_return == expected
    assert len(seen) == num_steps
    assert isinstance(env.single_action_space, gymnasium.spaces.Box if continuous else gymnasium.spaces.Discrete)


@pytest.mark.parametrize("id", ["probe/action", "probe/both"])
def test_random_and_wrong_policies_get_less(id):
    assert play(id, False, at_random(False))[0] == pytest.approx(0.0, abs=0.08)
    assert play(id, True, at_random(True))[0] == pytest.approx(5 / 12, abs=0.05)
    mean, _, _ = play(id, False, always(0, -0.5)(False))
    assert mean == pytest.approx(-1.0 if id == "probe/action" else 0.0, abs=0.08)


@pytest.mark.parametrize("id", ["probe/observation", "probe/both"])
def test_observations_are_both_signs_and_reward_follows(id):
    env = make_env(id, 100)
    observations, _ = env.reset(seed=0)
    assert set(observations[:, 0].tolist()) == {-1.0, 1.0}
    successors, rewards, _, _, _ = env.step(np.ones(100, dtype=np.int64))
    np.testing.assert_array_equal(rewards, observations[:, 0])
    np.testing.assert_array_equal(successors, observations)


def test_delayed_reward_comes_second():
    env = make_env("probe/delayed", 2)
    observations, _ = env.reset(seed=0)
    assert observations.tolist() == [[0.0], [0.0]]
    observations, rewards, terminated, _, _ = env.step(np.array([0, 1]))
    assert (observations.tolist(), rewards.tolist(), terminated.any()) == ([[1.0], [1.0]], [0.0, 0.0], False)
    # Rows at different steps: row 0 starts over while row 1 ends.
    env.reset(seed=0, options={"reset_mask": np.array([True, False])})
    observations, rewards, terminated, _, _ = env.step(np.array([0, 1]))
    assert observations[0].tolist() == [1.0]
    assert (rewards.tolist(), terminated.tolist()) == ([0.0, 1.0], [False, True])


def test_probes_do_not_draw():
    with pytest.raises(UserError, match="nothing to draw"):
        make_env("probe/constant", 1).render_frames()
