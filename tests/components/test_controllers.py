import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Normal

from rl_lab.components.controllers import squashed
from rl_lab.components.controllers.actors import CategoricalActor, GaussianActor
from rl_lab.components.controllers.critics import ValueCritic
from rl_lab.components.controllers.random import RandomPolicy
from rl_lab.components.nets import MLP, ConvNet


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def observations() -> torch.Tensor:
    return torch.randn(6, 4, generator=seeded())


def test_categorical_actor_samples_or_takes_the_mode(observations):
    actor = CategoricalActor(MLP(4, 3))
    logits = actor.network.layers(observations)
    with torch.no_grad():
        assert torch.equal(actor.act(observations, explore=False, generator=None), logits.argmax(-1))
        drawn = actor.act(observations, explore=True, generator=seeded(1))
        assert torch.equal(drawn, actor.act(observations, explore=True, generator=seeded(1)))
        many = torch.stack(
            [actor.act(observations, explore=True, generator=g) for g in [seeded(2)] for _ in range(3000)]
        )
    assert drawn.shape == (6,)
    assert drawn.dtype == torch.int64
    frequencies = torch.nn.functional.one_hot(many, 3).float().mean(0)
    assert (frequencies - logits.softmax(-1)).abs().max() < 0.05


def test_categorical_actor_evaluates_with_gradients(observations):
    actor = CategoricalActor(MLP(4, 3))
    actions = torch.tensor([0, 1, 2, 0, 1, 2])
    log_probs, entropy = actor.evaluate(observations, actions)
    reference = Categorical(logits=actor.network(observations))
    torch.testing.assert_close(log_probs, reference.log_prob(actions))
    torch.testing.assert_close(entropy, reference.entropy())
    (log_probs.sum() + entropy.sum()).backward()
    assert all(parameter.grad is not None for parameter in actor.parameters())


def test_gaussian_actor_samples_or_takes_the_mean(observations):
    actor = GaussianActor(MLP(4, 2), action=2, log_std=-1.0)
    mean = actor.network.layers(observations)
    with torch.no_grad():
        torch.testing.assert_close(actor.act(observations, explore=False, generator=None), mean, rtol=1e-5, atol=1e-6)
        drawn = actor.act(observations, explore=True, generator=seeded(1))
        assert torch.equal(drawn, actor.act(observations, explore=True, generator=seeded(1)))
        generator = seeded(2)
        many = torch.stack([actor.act(observations, explore=True, generator=generator) for _ in range(3000)])
    assert drawn.shape == (6, 2)
    assert (many.mean(0) - mean).abs().max() < 0.05
    assert (many.std(0) - torch.tensor(-1.0).exp()).abs().max() < 0.05


def test_gaussian_actor_learns_its_spread(observations):
    actor = GaussianActor(MLP(4, 2), action=2, log_std=-0.5)
    actions = torch.randn(6, 2, generator=seeded(3))
    log_probs, entropy = actor.evaluate(observations, actions)
    reference = Normal(actor.network(observations), torch.tensor(-0.5).exp())
    torch.testing.assert_close(log_probs, reference.log_prob(actions).sum(-1))
    torch.testing.assert_close(entropy, reference.entropy().sum(-1))
    entropy.sum().backward()
    assert actor.log_std.grad.tolist() == [6.0, 6.0]


def test_rollouts_are_evaluated_whole():
    rollout = torch.randn(5, 6, 4, generator=seeded())  # [T, N, O]
    for actor, actions in (
        (CategoricalActor(MLP(4, 3)), torch.zeros(5, 6, dtype=torch.int64)),
        (GaussianActor(MLP(4, 2), action=2), torch.zeros(5, 6, 2)),
    ):
        log_probs, entropy = actor.evaluate(rollout, actions)
        assert log_probs.shape == entropy.shape == (5, 6)


def test_actors_take_any_network():
    images = torch.randint(256, (3, 1, 8, 8), generator=seeded(), dtype=torch.uint8)
    actor = CategoricalActor(ConvNet((1, 8, 8), 4, channels=(2,), hidden=(8,)))
    assert actor.act(images, explore=True, generator=seeded()).shape == (3,)


def test_value_critic_drops_the_last_dimension():
    critic = ValueCritic(nn.Linear(4, 1))
    observations = torch.randn(5, 6, 4, generator=seeded())
    assert critic(observations).shape == (5, 6)
    assert torch.equal(critic(observations), critic.network(observations)[..., 0])


def test_random_policy_is_uniform_over_indices():
    policy = RandomPolicy(4)
    drawn = policy.act(torch.zeros(40_000, 3), generator=seeded())
    assert drawn.dtype == torch.int64
    assert (torch.bincount(drawn, minlength=4) / 40_000 - 0.25).abs().max() < 0.01
    assert drawn.max() == 3


def test_random_policy_is_uniform_over_the_box():
    policy = RandomPolicy(2, discrete=False)
    drawn = policy.act({"camera": torch.zeros(40_000, 1, 8, 8), "speed": torch.zeros(40_000, 1)}, generator=seeded())
    assert drawn.shape == (40_000, 2)
    assert drawn.min() >= -1.0
    assert drawn.max() <= 1.0
    assert drawn.mean().abs() < 0.02
    assert (drawn.var() - 1 / 3).abs() < 0.01
    assert list(policy.parameters()) == []


def test_random_policy_depends_on_its_generator_only():
    policy, seen = RandomPolicy(100), torch.zeros(50, 3)
    first = policy.act(seen, generator=seeded(4))
    torch.manual_seed(0)
    assert torch.equal(first, policy.act(seen + 1.0, explore=False, generator=seeded(4)))
    assert not torch.equal(first, policy.act(seen, generator=seeded(5)))


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_a_squashed_gaussian_has_the_gradients_of_torch(used):
    torch.manual_seed(0)
    mean, log_std = torch.randn(7, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    draws, weights = torch.randn(7, 3), [torch.randn(7, 3), torch.randn(7), torch.randn(7)]
    gaussian = Normal(mean, log_std.exp())
    raw = mean + log_std.exp() * draws
    before = gaussian.log_prob(raw).sum(-1)
    expected = (raw.tanh(), before - (1.0 - raw.tanh() ** 2).log().sum(-1), before)
    given = squashed._squashed(mean, log_std, draws)
    found = []
    for outputs in (given, expected):
        total = sum((outputs[i] * weights[i]).sum() for i in used)
        found.append([*outputs, *torch.autograd.grad(total, (mean, log_std), allow_unused=True)])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(torch.zeros(7, 3) if ours is None else ours, plain, rtol=1e-4, atol=1e-5)
