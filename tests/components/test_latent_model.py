"""Parts of TD-MPC2 against slow references: simplices, ensembles, two-hot codes, running scale, squashed policy."""

import math

import pytest
import torch
import torch.nn.functional as F

from rl_lab.components.controllers.one_hot import OneHotActor
from rl_lab.components.controllers.squashed import SquashedGaussianActor
from rl_lab.components.normalizers import PercentileScale
from rl_lab.components.normed import NormedEnsemble, NormedMLP, simplex
from rl_lab.components.twohot import TwoHot, symexp, symlog


def test_simplex_is_a_softmax_per_group():
    values = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([values[:, i : i + 4].softmax(-1) for i in (0, 4, 8)], -1)
    torch.testing.assert_close(simplex(values, 4), expected)


def test_only_output_layers_start_at_zero():
    torch.manual_seed(0)
    critics = NormedEnsemble(6, 11, [16, 16], actions=2, num_members=3)
    assert critics.weights[-1].abs().max() == 0
    for weight in (*critics.weights[:-1], critics.action_weight):
        assert 0.01 < weight.std() < 0.03
        assert not torch.equal(weight[0], weight[1])  # members differ
    reward = NormedMLP(6, 11, [16], zero_output=True)
    assert reward.linears[-1].weight.abs().max() == 0
    assert reward.linears[0].weight.std() > 0.01


def test_actions_beside_the_inputs_are_inputs():
    torch.manual_seed(3)
    network, joined = NormedMLP(5, 8, [6, 6], actions=2, simplex=4), NormedMLP(7, 8, [6, 6], simplex=4)
    state = network.state_dict()
    first = torch.cat([state["linears.0.weight"], state.pop("action_weight").T], 1)
    joined.load_state_dict({**state, "linears.0.weight": first})
    inputs, actions = torch.randn(3, 5), torch.randn(3, 4, 2)
    repeated = inputs.unsqueeze(1).expand(-1, 4, -1)
    expected = joined(torch.cat([repeated, actions], -1))
    torch.testing.assert_close(network(repeated, actions), expected)
    torch.testing.assert_close(network(repeated.contiguous(), actions), expected)


def test_ensemble_equals_its_members_one_by_one():
    torch.manual_seed(1)
    ensemble = NormedEnsemble(5, 7, [8, 9], actions=2, num_members=4, dropout=0.5)
    for parameter in ensemble.parameters():
        parameter.data.normal_()
    inputs, actions = torch.randn(2, 3, 5), torch.randn(2, 3, 2)
    noise = ensemble.dropout_noise(inputs, torch.Generator().manual_seed(2))
    for dropout in (None, noise):
        together = ensemble(inputs, actions, dropout=dropout)
        assert together.shape == (4, 2, 3, 7)
        for member in range(4):
            values = inputs.reshape(6, 5)
            for i in range(3):
                values = values @ ensemble.weights[i][member] + ensemble.biases[i][member]
                if i == 0:
                    values = values + actions.reshape(6, 2) @ ensemble.action_weight[member]
                if i == 2:
                    break
                if i == 0 and dropout is not None:
                    values = torch.where(dropout[member] >= 0.5, values * 2.0, torch.zeros(()))
                values = F.layer_norm(
                    values, values.shape[-1:], ensemble.gains[i][member, 0], ensemble.shifts[i][member, 0]
                )
                values = F.mish(values)
            torch.testing.assert_close(together[member].reshape(6, 7), values, rtol=1e-4, atol=1e-5)
    members = torch.tensor([2, 0])
    torch.testing.assert_close(ensemble(inputs, actions, members), ensemble(inputs, actions)[members])


def test_frozen_critics_pass_gradients_but_keep_none():
    ensemble = NormedEnsemble(3, 2, [4], actions=1, num_members=2)
    for parameter in ensemble.parameters():
        parameter.data.normal_()
    inputs = torch.randn(5, 3, requires_grad=True)
    actions = torch.randn(5, 1, requires_grad=True)
    ensemble(inputs, actions, frozen=True).sum().backward()
    assert inputs.grad.abs().sum() > 0
    assert actions.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in ensemble.parameters())


def test_twohot_against_a_loop():
    code = TwoHot(101, -10.0, 10.0)
    values = torch.tensor([0.0, 1.0, -3.3, 250.0, symexp(torch.tensor(10.0)).item(), 1e9, -1e9, 0.05])
    weights = code.encode(values)
    torch.testing.assert_close(weights.sum(-1), torch.ones(8))
    for value, row in zip(values, weights, strict=True):
        position = (max(-10.0, min(10.0, symlog(value).item())) + 10.0) / 0.2
        lower = min(math.floor(position), 99)
        expected = torch.zeros(101)
        expected[lower], expected[lower + 1] = 1.0 - (position - lower), position - lower
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-3)
    assert weights[5, 0] == 0  # the last bin does not wrap to the first
    within = values[:5]
    torch.testing.assert_close(code.mean((code.encode(within) + 1e-12).log()), within, rtol=1e-2, atol=1e-3)
    assert code.mean(torch.zeros(3, 101)).abs().max() < 1e-5
    logits = torch.randn(8, 101)
    expected = torch.stack([-(row * logit.log_softmax(-1)).sum() for row, logit in zip(weights, logits, strict=True)])
    torch.testing.assert_close(code.loss(logits, values), expected)


@pytest.mark.parametrize("floor_first", [True, False])
def test_percentile_scale(floor_first):
    scale = PercentileScale(rate=0.25, floor_first=floor_first)
    average = 1.0 if floor_first else 0.0
    for spread in (0.1, 40.0, 3.0):
        values = torch.linspace(0.0, spread, 101)
        scale.update(values)
        reach = 0.9 * spread
        average += 0.25 * ((max(reach, 1.0) if floor_first else reach) - average)
        assert scale.average.item() == pytest.approx(average, rel=1e-4)
        assert scale.value.item() == pytest.approx(max(average, 1.0), rel=1e-4)
    scale.update(torch.tensor([0.0, float("nan"), 1.0]))  # a step that is skipped leaves nothing behind
    scale.update(torch.tensor([0.0, float("inf"), float("-inf")]))
    assert scale.average.item() == pytest.approx(average, rel=1e-4)
    assert "average" in scale.state_dict()


def test_squashed_policy_against_torch_distributions():
    torch.manual_seed(3)
    actor = SquashedGaussianActor(NormedMLP(4, 6, [8]))
    features = torch.randn(100, 4)
    said = actor.sample(features, torch.Generator().manual_seed(0))
    mean, log_std = actor(features)
    assert log_std.min() >= -10
    assert log_std.max() <= 2
    gaussian = torch.distributions.Normal(mean, log_std.exp())
    squashed = torch.distributions.TransformedDistribution(gaussian, torch.distributions.TanhTransform(cache_size=1))
    raw = torch.atanh(said.actions.double().clamp(-1 + 1e-12, 1 - 1e-12)).float()
    safe = said.actions.abs().amax(-1) < 0.99
    assert safe.sum() > 20
    torch.testing.assert_close(
        said.gaussian_log_probs[safe], gaussian.log_prob(raw).sum(-1)[safe], rtol=1e-2, atol=1e-2
    )
    torch.testing.assert_close(
        said.log_probs[safe], squashed.log_prob(said.actions).sum(-1)[safe], rtol=1e-2, atol=1e-2
    )


def test_one_hot_policy_draws_codes_by_their_probabilities():
    torch.manual_seed(4)
    actor = OneHotActor(NormedMLP(3, 5, [8]))
    torch.nn.init.normal_(actor.network.linears[-1].weight)
    features = torch.randn(1, 3)
    draws = torch.randn(40_000, 5, generator=torch.Generator().manual_seed(0))
    codes = actor.actions(features.expand(40_000, 3), draws)
    assert ((codes == 1).sum(-1) == 1).all()
    assert ((codes == 0).sum(-1) == 4).all()
    probs = actor.network(features).softmax(-1)[0]
    torch.testing.assert_close(codes.mean(0), probs, rtol=0, atol=0.01)
    assert probs.max() - probs.min() > 0.1  # it does prefer some
    assert actor.mode(features).argmax() == probs.argmax()


def test_one_hot_policy_expects_over_all_actions():
    torch.manual_seed(5)
    actor = OneHotActor(NormedMLP(3, 4, [8]))
    features = torch.randn(6, 3)
    worth = torch.tensor([1.0, -2.0, 0.5, 3.0])
    expected = actor.expect(features, torch.zeros(6, 4), lambda codes: (codes * worth).sum(-1))
    probs = actor.network(features).softmax(-1)
    torch.testing.assert_close(expected.values, probs @ worth)
    torch.testing.assert_close(expected.entropy, torch.distributions.Categorical(probs).entropy())
    torch.testing.assert_close(expected.bonus, 4 * expected.entropy)
    expected.values.sum().backward()
    assert actor.network.linears[-1].weight.grad.abs().sum() > 0


def test_squashed_policy_expects_at_the_actions_of_the_draws():
    torch.manual_seed(6)
    actor = SquashedGaussianActor(NormedMLP(4, 6, [8]))
    features, draws = torch.randn(5, 4), torch.randn(5, 3)
    expected = actor.expect(features, draws, lambda actions: actions.sum(-1))
    torch.testing.assert_close(expected.values, actor.actions(features, draws).sum(-1))
    mean, log_std = actor(features)
    gaussian = torch.distributions.Normal(mean, log_std.exp()).log_prob(mean + draws * log_std.exp()).sum(-1)
    torch.testing.assert_close(expected.bonus, -3 * gaussian)
    torch.testing.assert_close(actor.mode(features), mean.tanh())
