import copy

import numpy as np
import pytest
import torch
from torch import nn

from rl_lab.components.nets import ACTIVATIONS, MLP, SMALL_BATCH, ConvNet, DuelingMLP, build_mlp
from rl_lab.core.errors import UserError

WITH_NUMPY = [name for name, (_, function) in ACTIVATIONS.items() if function is not None]


def inputs(rows: int, width: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def assert_numpy_equals_torch(network: MLP, rows: int = 3) -> None:
    """Compare acting (no gradients, few rows) with the layers themselves, and see that NumPy really computed it."""
    x = inputs(rows)
    with torch.no_grad():
        acted = network(x)
        expected = network.layers(x)
    torch.testing.assert_close(acted, expected, rtol=1e-5, atol=1e-6)
    assert len(network._views) == len(network._linears)


@pytest.mark.parametrize("activation", WITH_NUMPY)
@pytest.mark.parametrize("hidden", [(), (7,), (7, 6, 4)])
@pytest.mark.parametrize("rows", [1, 2, SMALL_BATCH])
def test_numpy_path_equals_torch_path(activation, hidden, rows):
    assert_numpy_equals_torch(MLP(5, 3, hidden, activation), rows)


def test_numpy_path_is_taken_only_where_it_may_be(monkeypatch):
    network = MLP(5, 3)
    taken = []
    monkeypatch.setattr(network, "_forward_numpy", lambda x: taken.append(len(x)) or network.layers(x))
    network(inputs(2))  # with gradients
    with torch.no_grad():
        network(inputs(SMALL_BATCH + 1))
        network(inputs(2)[None])
        assert taken == []
        network(inputs(2))
        network(inputs(SMALL_BATCH))
    assert taken == [2, SMALL_BATCH]
    wide = MLP(5, 3, (256, 256))  # many rows through a wide layer are torch's
    monkeypatch.setattr(wide, "_forward_numpy", lambda x: taken.append(len(x)) or wide.layers(x))
    with torch.no_grad():
        wide(inputs(4))
        wide(inputs(5))
    assert taken == [2, SMALL_BATCH, 4]
    smooth = MLP(5, 3, activation="silu")
    monkeypatch.setattr(smooth, "_forward_numpy", lambda x: pytest.fail("there is no NumPy function for silu"))
    with torch.no_grad():
        smooth(inputs(2))


def test_numpy_path_leaves_its_inputs_alone_and_returns_fresh_memory():
    network = MLP(5, 5, (), "relu")
    x = inputs(2)
    before = x.clone()
    with torch.no_grad():
        first = network(x)
        kept = first.clone()
        network(inputs(2, seed=1))
    assert torch.equal(x, before)
    assert torch.equal(first, kept)


def test_numpy_path_follows_an_update_in_place():
    network = MLP(5, 3)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    assert_numpy_equals_torch(network)
    with torch.no_grad():
        before = network(inputs(3))
    network(inputs(3)).square().mean().backward()
    optimizer.step()
    assert_numpy_equals_torch(network)
    with torch.no_grad():
        assert not torch.equal(network(inputs(3)), before)


@pytest.mark.parametrize("assign", [False, True])
def test_numpy_path_follows_load_state_dict(assign):
    network, other = MLP(5, 3), MLP(5, 3)
    assert_numpy_equals_torch(network)
    network.load_state_dict(other.state_dict(), assign=assign)
    assert_numpy_equals_torch(network)
    with torch.no_grad():
        assert torch.equal(network(inputs(3)), other(inputs(3)))


def test_numpy_path_follows_a_replaced_bias():
    network = MLP(5, 3)
    assert_numpy_equals_torch(network)
    network.layers[0].bias = nn.Parameter(torch.full_like(network.layers[0].bias, 3.0))
    assert_numpy_equals_torch(network)


def test_a_copy_has_memory_of_its_own():
    network = MLP(5, 3)
    assert_numpy_equals_torch(network)
    copied = copy.deepcopy(network)
    assert copied._views == []  # what it looks at is its own
    with torch.no_grad():
        before = network(inputs(3))
        for parameter in copied.parameters():
            parameter.add_(1.0)
        assert torch.equal(network(inputs(3)), before)
        assert not torch.equal(copied(inputs(3)), before)
    assert_numpy_equals_torch(network)
    assert_numpy_equals_torch(copied)


def test_numpy_path_survives_another_precision_and_back():
    network = MLP(5, 3)
    assert_numpy_equals_torch(network)
    network.to(torch.float64)
    with torch.no_grad():
        wide = network(inputs(3).double())
        assert wide.dtype == torch.float64
        with pytest.raises(RuntimeError):
            network(inputs(3))  # as torch would say
        for parameter in network.parameters():
            parameter.mul_(2.0)
    network.to(torch.float32)
    assert_numpy_equals_torch(network)


def test_state_dict_knows_nothing_of_the_views():
    network = MLP(5, 3, (4,))
    assert_numpy_equals_torch(network)
    assert set(network.state_dict()) == {f"layers.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}


def test_build_mlp_has_the_stated_layers():
    network = build_mlp(5, 2, (8, 6), activation="elu")
    assert [type(layer) for layer in network] == [nn.Linear, nn.ELU, nn.Linear, nn.ELU, nn.Linear]
    assert [(layer.in_features, layer.out_features) for layer in network if isinstance(layer, nn.Linear)] == [
        *((5, 8), (8, 6), (6, 2)),
    ]


def test_orthogonal_initialisation_has_its_gains():
    network = build_mlp(4, 2, (4,), initialization="orthogonal", output_gain=0.01)
    hidden, output = network[0].weight, network[2].weight
    torch.testing.assert_close(hidden @ hidden.T, 2.0 * torch.eye(4), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output @ output.T, 1e-4 * torch.eye(2), rtol=1e-4, atol=1e-8)
    assert network[0].bias.abs().max() == network[2].bias.abs().max() == 0.0


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"'swish'.*silu"):
        build_mlp(4, 2, activation="swish")
    with pytest.raises(ValueError, match=r"'xavier'.*orthogonal"):
        build_mlp(4, 2, initialization="xavier")


def test_dueling_is_value_plus_centred_advantages():
    network = DuelingMLP(5, 3, (8, 6), "tanh")
    x = inputs(4)
    streams = network.heads(torch.tanh(network.trunk(x)))
    expected = streams[:, :1] + streams[:, 1:] - streams[:, 1:].mean(1, keepdim=True)
    torch.testing.assert_close(network(x), expected)
    torch.testing.assert_close(network(x).mean(1), streams[:, 0])  # the mean over actions is the value
    with torch.no_grad():
        torch.testing.assert_close(network(x), expected.detach(), rtol=1e-5, atol=1e-6)


def test_dueling_needs_a_hidden_layer():
    with pytest.raises(UserError, match="hidden"):
        DuelingMLP(5, 3, ())


@pytest.mark.parametrize("leading", [(), (4,), (3, 4)])
def test_conv_net_takes_any_leading_shape(leading):
    network = ConvNet((3, 8, 10), 5, channels=(4, 6), hidden=(7,))
    images = torch.randint(256, (*leading, 3, 8, 10), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    outputs = network(images)
    assert outputs.shape == (*leading, 5)
    one = images.reshape(-1, 3, 8, 10)[-1]
    torch.testing.assert_close(outputs.reshape(-1, 5)[-1], network(one), rtol=1e-4, atol=1e-6)


def test_conv_net_scales_pixels_to_one():
    network = ConvNet((1, 8, 8), 2, channels=(3,), hidden=())
    white = torch.full((1, 1, 8, 8), 255, dtype=torch.uint8)
    expected = network.head(network.convolutions(torch.ones(1, 1, 8, 8)))
    torch.testing.assert_close(network(white), expected)


def test_conv_net_wants_images():
    with pytest.raises(UserError, match=r"\[C, H, W\]"):
        ConvNet((4,), 2)


def test_views_are_of_the_parameters_themselves():
    network = MLP(5, 3, (4,))
    with torch.no_grad():
        network(inputs(1))
    weight, bias = network._views[0]
    assert np.shares_memory(weight, network.layers[0].weight.detach().numpy())
    assert np.shares_memory(bias, network.layers[0].bias.detach().numpy())


@pytest.mark.parametrize("hidden", [(), (16,), (16, 8), (64, 64)])
def test_a_rectified_network_has_the_gradients_of_its_layers(hidden):
    torch.manual_seed(0)
    network = MLP(5, 3, hidden, "relu")
    inputs, upstream = torch.randn(40, 5, requires_grad=True), torch.randn(40, 3)
    found = []
    for apply in (network, network.layers):
        outputs = apply(inputs)
        assert ("Rectified" in str(outputs.grad_fn)) == (apply is network)
        found.append([outputs, *torch.autograd.grad((outputs * upstream).sum(), [inputs, *network.parameters()])])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain)
        assert ours.is_contiguous()  # as the kernels of optimisers take for granted
    with torch.no_grad():
        kept = inputs.detach().clone()
        torch.testing.assert_close(network(inputs), found[1][0])
        assert torch.equal(inputs, kept)


def test_a_rectified_network_with_frozen_parameters_passes_gradients_on():
    torch.manual_seed(0)
    network = MLP(5, 3, (16,), "relu")
    network.layers[0].requires_grad_(False)
    inputs = torch.randn(40, 5, requires_grad=True)
    network(inputs).sum().backward()
    assert inputs.grad.abs().sum() > 0
    assert network.layers[2].weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in network.layers[0].parameters())
