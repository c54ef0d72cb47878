"""Losses of critics and of actors that climb them: the gradients that autograd finds, with and without its help."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.controllers.deterministic import DeterministicActor
from rl_lab.components.nets import MLP
from rl_lab.components.stacked import StackedMLP
from rl_lab.components.value_losses import climb, regress


def critics_of(kind, members=2):
    torch.manual_seed(0)
    options = {"written": {}, "smooth": {"activation": "silu"}, "normed": {"layer_norm": True}}[kind]
    return StackedMLP(5, 1, (16, 8), num_members=members, **options)


def actor_of(kind):
    torch.manual_seed(1)
    network = MLP(3, 2, (16, 8), "relu" if kind == "written" else "tanh")
    return DeterministicActor(network)


def gradients(module):
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("members", [1, 2, 5])
@pytest.mark.parametrize("kind", ["written", "smooth", "normed"])
def test_regression_leaves_the_gradients_of_squared_errors(kind, members):
    critics = critics_of(kind, members)
    inputs, targets = torch.randn(40, 5), torch.randn(40)
    assert (critics.written(inputs) is not None) == (kind == "written")
    assert critics.written(inputs.unsqueeze(0)) is None
    apart = copy.deepcopy(critics)
    alone = apart(inputs).squeeze(-1)
    summed = sum(F.mse_loss(values, targets) for values in alone)
    summed.backward()
    for parameter in critics.parameters():
        parameter.grad = torch.ones_like(parameter)  # what is left of an update before
    loss, values = regress(critics, inputs, targets)
    torch.testing.assert_close(loss, summed.detach())
    torch.testing.assert_close(values, alone.detach())
    assert not loss.requires_grad
    assert not values.requires_grad
    for ours, theirs in zip(gradients(critics), gradients(apart), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("critics", ["written", "normed"])
@pytest.mark.parametrize("actor", ["written", "smooth"])
def test_climbing_leaves_gradients_in_the_actor_alone(actor, critics):
    actor, critics = actor_of(actor), critics_of(critics)
    observations = torch.randn(40, 3)
    apart = copy.deepcopy(actor)
    plain = -critics(torch.cat([observations, apart(observations)], -1))[0].mean()
    plain.backward()
    critics.zero_grad()
    kept = observations.clone()
    for parameter in actor.parameters():
        parameter.grad = torch.ones_like(parameter)
    loss = climb(actor, critics, observations)
    torch.testing.assert_close(loss, plain.detach())
    assert not loss.requires_grad
    for ours, theirs in zip(gradients(actor), gradients(apart), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert gradients(critics) == [None] * len(list(critics.parameters()))
    assert torch.equal(observations, kept)


def test_what_does_not_learn_gets_no_gradient():
    critics, actor = critics_of("written"), actor_of("written")
    critics.weights[0].requires_grad_(False)
    actor.network.layers[0].weight.requires_grad_(False)
    regress(critics, torch.randn(40, 5), torch.randn(40))
    climb(actor, critics, torch.randn(40, 3))
    first = actor.network.layers[0]
    assert [entry.grad is None for entry in critics.weights] == [True, False, False]
    assert [entry.grad is None for entry in (first.weight, first.bias)] == [True, False]


def test_a_network_with_a_forward_of_its_own_is_asked_for_it():
    class Doubled(StackedMLP):
        def forward(self, *args, **kwargs):
            return 2.0 * super().forward(*args, **kwargs)

    class Cautious(DeterministicActor):
        def forward(self, observations):
            return 0.5 * super().forward(observations)

    torch.manual_seed(0)
    critics, actor, observations = Doubled(5, 1, (16,)), Cautious(MLP(3, 2, (16,), "relu")), torch.randn(40, 3)
    inputs = torch.cat([observations, actor(observations)], -1).detach()
    _, values = regress(critics, inputs, torch.randn(40))
    torch.testing.assert_close(values, critics(inputs).squeeze(-1).detach())
    torch.testing.assert_close(climb(actor, critics, observations), -values[0].mean())


def test_any_module_may_be_a_critic():
    class Quadratic(nn.Module):
        def __init__(self):
            super().__init__()
            self.height = nn.Parameter(torch.zeros(1))

        def forward(self, values, *, frozen=False, num_members=None):
            height = self.height.detach() if frozen else self.height
            return (height - values.square().sum(-1, keepdim=True)).unsqueeze(0)

    critic, actor, observations = Quadratic(), actor_of("written"), torch.randn(40, 3)
    loss, _ = regress(critic, torch.zeros(40, 5), torch.ones(40))
    assert loss == 1.0
    assert critic.height.grad == -2.0
    before = climb(actor, critic, observations)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter -= 0.1 * parameter.grad
    assert climb(actor, critic, observations) < before
