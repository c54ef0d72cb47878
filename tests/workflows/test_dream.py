"""Dreams: a model as an environment, and agents that learn in it alone."""

import functools

import pytest
import torch
import torch.nn.functional as F

from rl_lab.components.dynamics.deterministic import DeterministicDynamics
from rl_lab.components.dynamics.dream import DreamEnvironment
from rl_lab.components.nets import MLP
from rl_lab.core.batch import Batch
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Hook, Phase
from rl_lab.core.workflow import Act
from rl_lab.workflows.dqn import DQNWorkflow
from rl_lab.workflows.dream import DreamWorkflow
from rl_lab.workflows.sac import SACWorkflow
from tests.workflows.test_sac import build as build_sac


class Counting:
    """A model whose state grows by one; it ends at five, the reward is the state before."""

    def rewards(self, latents, actions):
        return latents[..., 0]

    def step(self, latents, actions):
        return latents + 1.0

    def ended(self, latents):
        return (latents[..., 0] >= 5.0).float()

    def deviation(self, latents):
        return latents.abs().amax(-1)


def dream(**changes):
    settings = {"num_envs": 2, "max_episode_steps": 3, "device": "cpu", "max_deviation": 100.0} | changes
    return DreamEnvironment(Counting(), **settings)


def test_dreams_step_end_and_are_cut():
    environment = dream()
    environment.reset(torch.tensor([[3.0], [0.0]]))
    seen = []
    for _ in range(3):
        following, rewards, terminated, truncated, _ = environment.step(torch.zeros(2), torch.Generator())
        seen.append((following[:, 0].tolist(), rewards.tolist(), terminated.tolist(), truncated.tolist()))
    assert seen[0] == ([4.0, 1.0], [3.0, 0.0], [False, False], [False, False])
    assert seen[1] == ([5.0, 2.0], [4.0, 1.0], [True, False], [False, False])
    assert seen[2][3] == [True, True]


def test_only_the_rows_of_the_mask_begin_anew():
    environment = dream(max_episode_steps=10)
    environment.reset(torch.tensor([[1.0], [2.0]]))
    environment.step(torch.zeros(2), torch.Generator())
    seen = environment.reset(torch.tensor([[7.0], [8.0]]), torch.tensor([False, True]))
    assert seen[:, 0].tolist() == [2.0, 8.0]
    assert environment.elapsed.tolist() == [1, 0]


@pytest.mark.parametrize("strays_end", [True, False])
def test_a_dream_that_strays_ends_or_is_cut(strays_end):
    environment = dream(max_deviation=1.5, strays_end=strays_end)
    environment.reset(torch.tensor([[0.0], [1.0]]))
    _, _, terminated, truncated, _ = environment.step(torch.zeros(2), torch.Generator())
    assert terminated.tolist() == [False, strays_end]
    assert truncated.tolist() == [False, not strays_end]


def test_collecting_is_a_trajectory_whose_finished_rows_begin_anew():
    environment = dream(max_episode_steps=2)
    starts = iter([torch.zeros(2, 1), torch.full((2, 1), 3.0), torch.full((2, 1), 9.0)])

    def act(observations, state, *, explore, generator):
        return Act(torch.zeros(2, dtype=torch.int64))

    first = environment.collect(act, None, lambda: next(starts), torch.Generator())
    second = environment.collect(act, None, lambda: next(starts), torch.Generator())
    assert tuple(first.shape) == (1, 2)
    assert first.next_observations.flatten().tolist() == second.observations.flatten().tolist() == [1.0, 1.0]
    assert second.truncated.all()
    assert second.next_observations.flatten().tolist() == [2.0, 2.0]  # the true successor
    assert environment.latents.flatten().tolist() == [9.0, 9.0]


def test_a_dream_goes_on_from_its_state():
    environment, other = dream(), dream()
    environment.reset(torch.tensor([[1.0], [2.0]]))
    environment.step(torch.zeros(2), torch.Generator())
    other.set_state(environment.get_state())
    assert torch.equal(environment.latents, other.latents)
    assert torch.equal(environment.elapsed, other.elapsed)


def test_an_agent_gets_the_parts_that_its_fields_name():
    torch.manual_seed(0)
    network, dynamics = MLP(4, 2, (8,)), DeterministicDynamics(4, 2, (8,), discrete=True, done=True)
    adam = functools.partial(torch.optim.Adam, lr=1e-3)
    workflow = DreamWorkflow(
        dynamics,
        Optimizer(dynamics.parameters(), adam),
        torch.Generator(),
        agent=functools.partial(DQNWorkflow, epsilon=0.2),
        q_network=network,
        agent_optimizer=Optimizer(network.parameters(), adam),
    )
    assert isinstance(workflow.learner, DQNWorkflow)
    assert workflow.learner.q_network is network
    assert set(workflow.learner.get_state()) == {"target_network", "update_count"}
    sac = build_sac(optimizer=adam)
    workflow = DreamWorkflow(
        dynamics,
        Optimizer(dynamics.parameters(), adam),
        torch.Generator(),
        agent=functools.partial(SACWorkflow, gamma=0.9),
        actor=sac.actor,
        critics=sac.critics,
        temperature=sac.temperature,
        actor_optimizer=sac.actor_optimizer,
        critic_optimizer=sac.critic_optimizer,
    )
    assert workflow.learner.critics is sac.critics
    assert workflow.learner.gamma == 0.9
    with pytest.raises(ValueError, match="agent"):
        DreamWorkflow(dynamics, Optimizer(dynamics.parameters(), adam), torch.Generator())


def test_the_agent_sees_observations_in_deviations_of_what_the_model_has_seen():
    torch.manual_seed(0)
    dynamics = DeterministicDynamics(2, 2, (8,), discrete=True, done=True)
    network, adam = MLP(2, 2, (8,)), functools.partial(torch.optim.SGD, lr=0.1)
    workflow = DreamWorkflow(
        dynamics,
        Optimizer(dynamics.parameters(), adam),
        torch.Generator(),
        agent=functools.partial(DQNWorkflow, gamma=0.9),
        q_network=network,
        agent_optimizer=Optimizer(network.parameters(), adam),
    )
    observations = torch.tensor([[3.0, 0.01], [5.0, 0.03]])
    batch = Batch(
        observations=observations,
        actions=torch.tensor([0, 1]),
        rewards=torch.ones(2),
        terminated=torch.tensor([True, False]),
        truncated=torch.zeros(2, dtype=torch.bool),
        next_observations=observations.flip(0),
    )
    dynamics.observe(batch)
    seen = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
    q_values = network(seen)
    torch.testing.assert_close(workflow.value(observations), q_values.amax(-1))
    assert torch.equal(workflow.act(observations, explore=False).actions, q_values.argmax(-1))
    targets = 1.0 + 0.9 * torch.tensor([0.0, 1.0]) * q_values.amax(-1).flip(0)
    errors = q_values.gather(-1, batch.actions.unsqueeze(-1)).squeeze(-1) - targets.detach()
    told = workflow.update_controller(batch, phase=Phase("dream", hooks=(Hook("collect"),), duration_steps=1))
    torch.testing.assert_close(told["td_loss"], F.smooth_l1_loss(errors, torch.zeros(2)).detach())
