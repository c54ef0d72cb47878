"""A run that is stopped in the middle of episodes and continued elsewhere sees the same pictures, to the last bit."""

import numpy as np
import torch

from rl_lab.core.seeding import SeedTree
from rl_lab.core.workflow import Act


def random_act(num_actions):
    """Return an act that draws from the generator of its caller."""

    def act(observations, state=None, *, explore=True, generator=None):
        return Act(torch.randint(num_actions, (len(observations),), generator=generator))

    return act


def assert_restored_exactly(env, fresh, num_steps):
    """Play on in one environment, and in another one that was brought to the same moment by seeds and actions."""
    from rl_lab.data.collector import RolloutCollector

    act = random_act(env.single_action_space.n)
    collector = RolloutCollector(env, SeedTree(3))
    before = collector.collect(act, num_steps).trajectory
    assert (before.observations[0] != before.observations[-1]).any(), "nothing moved"
    state, noise = collector.get_state(), collector.generator.get_state()
    expected = collector.collect(act, num_steps).trajectory
    other = RolloutCollector(fresh, SeedTree(3))
    other.collect(random_act(2), 7)  # it was elsewhere
    assert other.set_state(state)
    other.generator.set_state(noise)
    restored = other.collect(act, num_steps).trajectory
    for name in ("observations", "actions", "rewards", "terminated", "truncated", "next_observations"):
        np.testing.assert_array_equal(getattr(restored, name), getattr(expected, name), err_msg=name)
