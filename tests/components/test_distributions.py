import math

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal

from rl_lab.components.distributions import (
    categorical_entropy,
    categorical_log_prob,
    categorical_sample,
    gaussian_entropy,
    gaussian_log_prob,
    gaussian_sample,
)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_categorical_agrees_with_torch(shape):
    logits = 3.0 * noise(*shape)
    reference = Categorical(logits=logits)
    indices = torch.randint(4, shape[:-1], generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(categorical_log_prob(logits, indices), reference.log_prob(indices))
    torch.testing.assert_close(categorical_entropy(logits), reference.entropy())
    assert categorical_sample(logits, torch.Generator().manual_seed(0)).shape == shape[:-1]


def test_categorical_entropy_of_certainty_is_zero_and_has_a_gradient():
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    entropy = categorical_entropy(logits)
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(0.0, abs=1e-6)
    assert torch.isfinite(logits.grad).all()


def test_categorical_samples_have_the_stated_frequencies():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    count = 200_000
    drawn = categorical_sample(logits.expand(count, 4), torch.Generator().manual_seed(3))
    frequencies = torch.bincount(drawn, minlength=4) / count
    probabilities = logits.softmax(-1)
    errors = (frequencies - probabilities).abs() / (probabilities * (1 - probabilities) / count).sqrt()
    assert errors.max() < 4.0  # standard errors


def test_sampling_depends_on_the_generator_only():
    logits, mean, log_std = noise(50, 4), noise(50, 2), torch.zeros(2)
    for draw in (lambda g: categorical_sample(logits, g), lambda g: gaussian_sample(mean, log_std, g)):
        first = draw(torch.Generator().manual_seed(5))
        torch.manual_seed(99)
        assert torch.equal(first, draw(torch.Generator().manual_seed(5)))
        assert not torch.equal(first, draw(torch.Generator().manual_seed(6)))


@pytest.mark.parametrize("shape", [(2,), (3, 2), (4, 3, 2)])
def test_gaussian_agrees_with_torch(shape):
    mean, values, log_std = noise(*shape), noise(*shape, seed=1), torch.tensor([-1.0, 0.5])
    reference = Independent(Normal(mean, log_std.exp().expand_as(mean)), 1)
    torch.testing.assert_close(gaussian_log_prob(mean, log_std, values), reference.log_prob(values))
    torch.testing.assert_close(gaussian_entropy(mean, log_std), reference.entropy())


def test_gaussian_samples_have_the_stated_moments():
    mean, log_std = torch.tensor([2.0, -1.0]), torch.tensor([math.log(0.5), math.log(3.0)])
    count = 100_000
    drawn = gaussian_sample(mean.expand(count, 2), log_std, torch.Generator().manual_seed(0))
    standard_error = log_std.exp() / math.sqrt(count)
    assert ((drawn.mean(0) - mean).abs() < 4 * standard_error).all()
    assert ((drawn.std(0) / log_std.exp() - 1.0).abs() < 4 / math.sqrt(2 * count)).all()


def test_log_probabilities_have_the_gradients_of_torch():
    logits = noise(6, 3).requires_grad_()
    indices = torch.tensor([0, 1, 2, 0, 1, 2])
    (ours,) = torch.autograd.grad(categorical_log_prob(logits, indices).sum(), logits)
    (reference,) = torch.autograd.grad(Categorical(logits=logits).log_prob(indices).sum(), logits)
    torch.testing.assert_close(ours, reference)
    mean, log_std = noise(6, 2).requires_grad_(), torch.zeros(2, requires_grad=True)
    values = noise(6, 2, seed=1)
    ours = torch.autograd.grad(gaussian_log_prob(mean, log_std, values).sum(), (mean, log_std))
    reference = torch.autograd.grad(Normal(mean, log_std.exp()).log_prob(values).sum(), (mean, log_std))
    torch.testing.assert_close(ours, reference)
