"""Policies of Dreamer against torch's distributions; noise is an argument, gradients reach the parameters."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from rl_lab.components.controllers.dreamer import DreamerActor
from rl_lab.components.policies import BoundedNormal, OneHot, TanhNormal, TruncatedNormal

CONTINUOUS = [BoundedNormal, TanhNormal, TruncatedNormal]


def parameters(policy, num=5, seed=0):
    return torch.randn(num, sum(policy.sizes), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [OneHot, *CONTINUOUS])
def test_samples_follow_their_own_density_and_are_differentiable(kind):
    policy = kind(3)
    given = parameters(policy).requires_grad_()
    draws = policy.draw((5,), torch.zeros(()), torch.Generator().manual_seed(1))
    actions = policy.sample(given, draws)
    assert torch.equal(actions, policy.sample(given, draws))  # chance is an argument
    assert actions.shape == (5, 3)
    assert policy.log_prob(given, actions).shape == policy.entropy(given).shape == (5,)
    (actions * torch.arange(3.0)).sum().backward()
    assert torch.isfinite(given.grad).all()
    assert given.grad.abs().sum() > 0
    assert policy.mode(given).shape == (5, 3)


def test_one_hot():
    policy = OneHot(4, unimix=0.2)
    logits = torch.tensor([[3.0, 0.0, 0.0, -3.0]])
    probs = 0.8 * logits.softmax(-1) + 0.05
    codes = torch.eye(4)
    torch.testing.assert_close(policy.log_prob(logits.expand(4, -1), codes), probs[0].log())
    torch.testing.assert_close(policy.entropy(logits), -(probs * probs.log()).sum(-1))
    assert policy.to_environment(policy.mode(logits)).tolist() == [0]
    assert torch.equal(policy.from_replay(torch.tensor([[2, 0]]))[0], codes[[2, 0]])
    draws = policy.draw((40_000,), torch.zeros(()), torch.Generator().manual_seed(0))
    samples = policy.sample(logits.expand(40_000, -1), draws)
    torch.testing.assert_close(samples.mean(0), probs[0], rtol=0.05, atol=0.01)
    mixed = policy.perturb(codes[[0]].expand(8_000, -1), 0.5, torch.Generator().manual_seed(0)).mean(0)
    torch.testing.assert_close(mixed, torch.tensor([0.625, 0.125, 0.125, 0.125]), rtol=0.1, atol=0.01)


def test_bounded_normal():
    policy = BoundedNormal(2)
    given = parameters(policy)
    mean, std = given[:, :2].tanh(), 0.9 * (given[:, 2:] + 2.0).sigmoid() + 0.1
    expected = Independent(Normal(mean, std), 1)
    actions = expected.sample()
    torch.testing.assert_close(policy.log_prob(given, actions), expected.log_prob(actions))
    torch.testing.assert_close(policy.entropy(given), expected.entropy())
    assert torch.equal(policy.mode(given), mean)


def test_tanh_normal():
    policy = TanhNormal(2)
    given = 0.3 * parameters(policy)
    mean, std = 5.0 * (given[:, :2] / 5.0).tanh(), F.softplus(given[:, 2:] + policy._raw_std) + 1e-4
    assert policy.moments(torch.zeros(1, 4))[1][0, 0].item() == pytest.approx(5.0, abs=1e-3)
    expected = Independent(TransformedDistribution(Normal(mean, std), TanhTransform()), 1)
    actions = 0.9 * torch.rand(5, 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(policy.log_prob(given, actions), expected.log_prob(actions), rtol=1e-4, atol=1e-4)
    assert policy.mode(given).abs().max() < 1


@pytest.mark.parametrize(("std", "tolerance"), [(0.1, 1e-3), (0.8, 1e-3), (1.5, 1e-3), (3.0, 0.05), (5.0, 0.15)])
@pytest.mark.parametrize("mean", [0.0, 0.5, 2.0])
def test_the_entropy_of_a_tanh_normal_is_that_of_its_actions(mean, std, tolerance):
    policy = TanhNormal(1, initial_std=std)
    given = torch.tensor([5.0 * math.atanh(mean / 5.0), 0.0])
    raw = torch.linspace(mean - 10 * std, mean + 10 * std, 400_001, dtype=torch.float64)
    density = torch.distributions.Normal(mean, std).log_prob(raw).exp()
    lost = (1.0 - raw.tanh().square()).clamp(min=1e-300).log()
    lost = torch.where(raw.abs() > 15.0, 2.0 * (math.log(2.0) - raw.abs()), lost)
    expected = torch.distributions.Normal(mean, std).entropy() + (density * lost).sum() * 20 * std / 400_000
    assert policy.entropy(given).item() == pytest.approx(expected.item(), abs=tolerance)


def test_no_deviation_of_a_tanh_normal_has_more_entropy_than_even_actions():
    found = [TanhNormal(1, initial_std=std).entropy(torch.zeros(2)).item() for std in (0.1, 0.5, 0.9, 2.0, 5.0, 10.0)]
    assert max(found) == found[2] <= math.log(2.0)  # of actions spread evenly over [-1, 1]
    assert found == sorted(found[:3]) + sorted(found[3:], reverse=True)


def test_truncated_normal_against_numerical_integration():
    policy = TruncatedNormal(1)
    given = parameters(policy, 4)
    grid = torch.linspace(-1, 1, 20_001)[:-1] + 5e-5
    for row in given:
        density = policy.log_prob(row.expand(len(grid), -1), grid.unsqueeze(-1)).double().exp()
        assert (density.sum() * 1e-4).item() == pytest.approx(1.0, abs=1e-3)
        entropy = -(density * density.log()).sum() * 1e-4
        assert policy.entropy(row).item() == pytest.approx(entropy.item(), abs=1e-3)
        draws = policy.draw((20_000,), torch.zeros(()), torch.Generator().manual_seed(0))
        samples = policy.sample(row.expand(20_000, -1), draws)
        assert samples.abs().max() < 1
        assert samples.mean().item() == pytest.approx((density * grid).sum().item() * 1e-4, abs=0.02)


@pytest.mark.parametrize("kind", [OneHot, BoundedNormal])
def test_actor_acts_with_or_without_chance(kind):
    torch.manual_seed(0)
    actor = DreamerActor(6, kind(2), 8, output_scale=1.0)
    features = torch.randn(64, 6)

    def act(explore, exploration, seed):
        amount = None if exploration is None else torch.tensor(exploration)
        generator = torch.Generator().manual_seed(seed)
        return actor.act(features, explore=explore, exploration=amount, generator=generator)

    assert torch.equal(act(False, 0.5, 0), act(False, None, 1))
    assert torch.equal(act(True, 0.3, 0), act(True, 0.3, 0))
    assert not torch.equal(act(True, None, 0), act(True, None, 1))
    assert not torch.equal(act(True, None, 0), act(True, 1.0, 0))
    assert torch.equal(act(True, None, 0).clamp(-1, 1), act(True, 0.0, 0))
    if kind is BoundedNormal:
        assert act(True, None, 0).abs().max() > 1  # the environment clips
        assert act(True, 0.3, 0).abs().max() <= 1


def test_mean_and_deviation_have_weights_of_their_own():
    actor = DreamerActor(6, BoundedNormal(2), 8)
    before = actor(torch.ones(1, 6))
    with torch.no_grad():
        actor.outputs[1].bias.add_(1.0)
    change = actor(torch.ones(1, 6)) - before
    torch.testing.assert_close(change, torch.tensor([[0.0, 0.0, 1.0, 1.0]]))


def test_a_fresh_actor_is_almost_indifferent():
    torch.manual_seed(0)
    actor = DreamerActor(6, OneHot(4), 8)
    probs = actor(torch.randn(32, 6)).softmax(-1)
    assert (probs - 0.25).abs().max() < 0.02
