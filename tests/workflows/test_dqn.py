"""DQN's targets against a loop over rows, and its exploration."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from rl_lab.components.nets import MLP
from rl_lab.core.batch import Batch
from rl_lab.core.optim import Optimizer
from rl_lab.workflows.dqn import DQNWorkflow

GAMMA = 0.9


def workflow(**knobs):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = MLP(3, 4, (16,), "relu")
    return DQNWorkflow(network, Optimizer(network.parameters(), partial(torch.optim.SGD, lr=0.1)), gamma=GAMMA, **knobs)


def windows(n, size=50):
    """Windows [n, B] in which an episode may terminate or be truncated at every step."""
    generator = torch.Generator().manual_seed(n)
    return Batch(
        observations=torch.randn((n, size, 3), generator=generator),
        actions=torch.randint(4, (n, size), generator=generator),
        rewards=torch.randn((n, size), generator=generator),
        terminated=torch.rand((n, size), generator=generator) < 0.2,
        truncated=torch.rand((n, size), generator=generator) < 0.2,
        next_observations=torch.randn((n, size, 3), generator=generator),
    )


def expected_loss(agent, batch):
    """The loss of a batch, row by row."""
    losses = []
    for b in range(batch.shape[1]):
        target, factor = 0.0, 1.0
        for t in range(len(batch)):
            target += factor * batch.rewards[t, b].item()
            factor *= GAMMA
            if batch.dones[t, b]:
                break
        if not batch.terminated[t, b]:
            after = batch.next_observations[t, b]
            values = agent.target_network.layers(after)
            best = (agent.q_network if agent.double else agent.target_network).layers(after).argmax()
            target += factor * values[best].item()
        value = agent.q_network.layers(batch.observations[0, b])[batch.actions[0, b]]
        losses.append(F.smooth_l1_loss(value, torch.tensor(target)).item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_the_loss_against_a_loop_over_rows(n, double):
    agent = workflow(double=double, target_every=1000)
    for _ in range(3):  # so that the networks differ
        agent.update_controller(windows(2), phase=None)
    batch = windows(n)
    expected = expected_loss(agent, batch)
    assert agent.update_controller(batch, phase=None)["td_loss"].item() == pytest.approx(expected, rel=1e-5)


def test_transitions_are_windows_of_one_step():
    flat, windowed = workflow(), workflow()
    batch = windows(1)
    flat.update_controller(batch.flatten(), phase=None)
    windowed.update_controller(batch, phase=None)
    for a, b in zip(flat.q_network.parameters(), windowed.q_network.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_exploration_is_uniform_with_probability_epsilon():
    seen = torch.zeros(20_000, 3)
    greedy = workflow().act(seen[:1], explore=False).actions.item()
    said = workflow(epsilon=0.4).act(seen, generator=torch.Generator().manual_seed(0)).actions
    shares = torch.bincount(said, minlength=4) / len(seen)
    expected = torch.full((4,), 0.1)
    expected[greedy] += 0.6
    torch.testing.assert_close(shares, expected, atol=0.012, rtol=0.0)
    always = workflow(epsilon=0.0).act(seen, generator=torch.Generator().manual_seed(0)).actions
    assert (always == greedy).all()
