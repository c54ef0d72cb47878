"""Stacked perceptrons: each member is the network that it would be alone; frozen weights get no gradient."""

import copy

import pytest
import torch
from torch import nn

from rl_lab.components.stacked import StackedMLP


def alone(stacked, member):
    """The same member as layers of torch's own."""
    layers = []
    for i, (weight, bias) in enumerate(zip(stacked.weights, stacked.biases, strict=True)):
        linear = nn.Linear(weight.shape[1], weight.shape[2])
        linear.weight.data, linear.bias.data = weight[member].T.clone(), bias[member, 0].clone()
        layers.append(linear)
        if i < len(stacked.weights) - 1:
            if stacked.layer_norm:
                norm = nn.LayerNorm(weight.shape[2])
                norm.weight.data, norm.bias.data = (
                    stacked.gains[i][member, 0].clone(),
                    stacked.shifts[i][member, 0].clone(),
                )
                layers.append(norm)
            layers.append(type(stacked.activation)())
    return nn.Sequential(*layers)


def build(**changes):
    torch.manual_seed(0)
    stacked = StackedMLP(**{"inputs": 5, "outputs": 2, "hidden": (16, 8), "num_members": 3} | changes)
    for parameter in (*stacked.gains, *stacked.shifts):
        nn.init.normal_(parameter)
    return stacked


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_members_are_networks_of_their_own(activation, layer_norm):
    stacked = build(activation=activation, layer_norm=layer_norm)
    shared, own = torch.randn(4, 7, 5), torch.randn(3, 6, 5)
    outputs, each = stacked(shared), stacked.each(own)
    assert tuple(outputs.shape) == (3, 4, 7, 2)
    for member in range(3):
        network = alone(stacked, member)
        torch.testing.assert_close(outputs[member], network(shared))
        torch.testing.assert_close(each[member], network(own[member]))


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_gradients_of_members_are_those_of_networks_of_their_own(activation, outputs):
    stacked = build(activation=activation, outputs=outputs)
    values = torch.randn(9, 5, requires_grad=True)
    stacked(values).square().sum().backward()
    apart, networks = values.detach().clone().requires_grad_(), [alone(stacked, member) for member in range(3)]
    sum(network(apart).square().sum() for network in networks).backward()
    torch.testing.assert_close(values.grad, apart.grad)
    for member, network in enumerate(networks):
        linears = [layer for layer in network if isinstance(layer, nn.Linear)]
        for i, linear in enumerate(linears):
            torch.testing.assert_close(stacked.weights[i].grad[member], linear.weight.grad.T)
            torch.testing.assert_close(stacked.biases[i].grad[member, 0], linear.bias.grad)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_frozen_weights_let_gradients_pass_to_the_inputs_only(layer_norm):
    stacked = build(layer_norm=layer_norm)
    values = torch.randn(9, 5, requires_grad=True)
    (plain,) = torch.autograd.grad(stacked(values).sum(), values)
    stacked(values, frozen=True).sum().backward()
    torch.testing.assert_close(values.grad, plain)
    assert all(parameter.grad is None for parameter in stacked.parameters())


def test_some_parameters_may_be_frozen():
    stacked, values = build(), torch.randn(9, 5)
    stacked(values).square().sum().backward()
    expected = stacked.weights[1].grad.clone()
    stacked.zero_grad()
    stacked.weights[0].requires_grad_(False)
    stacked(values).square().sum().backward()
    torch.testing.assert_close(stacked.weights[1].grad, expected)
    assert stacked.weights[0].grad is None


def test_weights_start_like_those_of_linear_layers():
    stacked = build(inputs=64, hidden=(400,))
    for weight, bias in zip(stacked.weights, stacked.biases, strict=True):
        bound = weight.shape[1] ** -0.5
        assert weight.abs().max() <= bound
        assert bias.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert not torch.equal(stacked.weights[0][0], stacked.weights[0][1])


def test_the_first_members_alone():
    stacked = build(layer_norm=True)
    values = torch.randn(4, 5)
    for frozen in (False, True):
        torch.testing.assert_close(stacked(values, frozen=frozen, num_members=2), stacked(values)[:2])


def test_a_copy_has_weights_of_its_own():
    stacked = build()
    twin = copy.deepcopy(stacked)
    values = torch.randn(4, 5)
    expected = stacked(values)
    with torch.no_grad():
        for parameter in stacked.parameters():
            parameter.zero_()
    torch.testing.assert_close(twin(values), expected)
    assert not stacked(values).any()
