"""Five tiny worlds, each testing one thing, after "Debugging RL, Without the Agonizing Pain" (Andy Jones, 2021).

Each asks for a single ability more than the one before, so the first that fails says where to look. Observations are
float32 [1]; actions are Discrete(2), or Box(-1, 1, [1]) with `continuous=True`. Every episode terminates by itself, and
its last successor looks like the observation before it, so bootstrapping through a termination shows in the value.
V is the optimal value of an observation, gamma the discount.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gymnasium import spaces

from rl_lab.envs.world import World


class Probe(World):
    """Episodes of `num_steps` steps of which only the last is rewarded, by `rule(observations, actions)`.

    The observation is a coin, 1 or -1, or else 0 at the first step and 1 at the second.
    """

    def __init__(
        self,
        num_envs: int,
        rule: Callable[[np.ndarray, np.ndarray], np.ndarray],
        *,
        optimal_return: float = 1.0,
        coin: bool = False,
        num_steps: int = 1,
        continuous: bool = False,
        max_episode_steps: int = 100,
    ) -> None:
        super().__init__(
            num_envs,
            spaces.Box(-1.0, 1.0, (1,), dtype=np.float32),
            spaces.Box(-1.0, 1.0, (1,), dtype=np.float32) if continuous else spaces.Discrete(2),
            num_variables=1,
            max_episode_steps=max_episode_steps,
        )
        self.optimal_return = optimal_return
        self._rule, self._coin, self._num_steps = rule, coin, num_steps

    def _initial(self, generator: np.random.Generator) -> np.ndarray:
        return np.array([generator.choice([-1.0, 1.0]) if self._coin else 0.0])

    def _advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        last = self._elapsed == self._num_steps - 1
        rewards = np.where(last, self._rule(self._state[0], actions), 0.0)
        self._state[0, ~last] = 1.0
        return rewards.astype(np.float32), last

    def _observe(self) -> np.ndarray:
        return self._state.T.astype(np.float32, order="C")


def _agreement(wanted: np.ndarray | float, actions: np.ndarray) -> np.ndarray:
    """Reward actions for agreeing with `wanted`, 1 or -1, by at most 1."""
    if actions.ndim == 2:
        return 1.0 - np.square(np.clip(actions[:, 0], -1.0, 1.0) - 0.5 * wanted)
    return np.where(actions == np.greater(wanted, 0), 1.0, -1.0)


def constant(num_envs: int, *, continuous: bool = False, max_episode_steps: int = 100) -> Probe:
    """One step, observation 0, reward 1 whatever is done: V = 1, return 1. Tests the value loss."""
    return Probe(num_envs, lambda _, __: 1.0, continuous=continuous, max_episode_steps=max_episode_steps)


def observation(num_envs: int, *, continuous: bool = False, max_episode_steps: int = 100) -> Probe:
    """One step, the reward is the observation, 1 or -1: V = observation, mean return 0 whatever is done.

    Tests that the value depends on what is seen.
    """
    return Probe(
        num_envs,
        lambda seen, _: seen,
        optimal_return=0.0,
        coin=True,
        continuous=continuous,
        max_episode_steps=max_episode_steps,
    )


def delayed(num_envs: int, *, continuous: bool = False, max_episode_steps: int = 100) -> Probe:
    """Two steps: observation 0 and reward 0, then observation 1 and reward 1, whatever is done: return 1.

    V(0) = gamma, V(1) = 1. Tests bootstrapping and the discount.
    """
    return Probe(num_envs, lambda _, __: 1.0, num_steps=2, continuous=continuous, max_episode_steps=max_episode_steps)


def action(num_envs: int, *, continuous: bool = False, max_episode_steps: int = 100) -> Probe:
    """One step, observation 0; action 1 brings 1, action 0 brings -1: V = 1, return 1, a random policy gets 0.

    Continuous: the reward is 1 - (action - 0.5)^2, and a random policy gets 5/12. Tests the policy loss.
    """
    return Probe(
        num_envs,
        lambda _, actions: _agreement(1.0, actions),
        continuous=continuous,
        max_episode_steps=max_episode_steps,
    )


def both(num_envs: int, *, continuous: bool = False, max_episode_steps: int = 100) -> Probe:
    """One step, observation 1 or -1; action 1 is right at 1, action 0 at -1; right brings 1, wrong -1: V = 1, return 1.

    A random policy gets 0. Continuous: the reward is 1 - (action - observation / 2)^2, and a random policy gets 5/12.
    Tests that the policy depends on what is seen.
    """
    return Probe(num_envs, _agreement, coin=True, continuous=continuous, max_episode_steps=max_episode_steps)
