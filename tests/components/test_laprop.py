"""LaProp and adaptive clipping against a slow reference, and a step that is not finite is not taken."""

import functools

import pytest
import torch
from torch import nn

from rl_lab.components.laprop import LaProp, clip_factors
from rl_lab.core.optim import Optimizer


def reference(start, gradients, lr, beta1=0.9, beta2=0.99, eps=1e-20, ratio=0.3, min_norm=1e-3):
    """One number at a time, in double precision."""
    values = [[float(x) for x in tensor.flatten()] for tensor in start]
    mean = [[0.0] * len(tensor) for tensor in values]
    square = [[0.0] * len(tensor) for tensor in values]
    for t, given in enumerate(gradients, 1):
        for i, tensor in enumerate(given):
            flat = [float(x) for x in tensor.flatten()]
            norm = sum(x * x for x in flat) ** 0.5
            limit = ratio * max(sum(x * x for x in values[i]) ** 0.5, min_norm)
            for j, gradient in enumerate(flat):
                gradient *= min(1.0, limit / norm) if norm else 1.0
                square[i][j] = beta2 * square[i][j] + (1 - beta2) * gradient**2
                normalized = gradient / ((square[i][j] / (1 - beta2**t)) ** 0.5 + eps)
                mean[i][j] = beta1 * mean[i][j] + (1 - beta1) * normalized
                values[i][j] -= lr * mean[i][j] / (1 - beta1**t)
    return values


def draws(seed, count=5):
    generator = torch.Generator().manual_seed(seed)
    start = [torch.randn(3, 2, generator=generator), 1e-5 * torch.randn(4, generator=generator)]
    gradients = [[3.0 * torch.randn(p.shape, generator=generator) for p in start] for _ in range(count)]
    gradients[2][0] *= 1e-3  # one that is not clipped
    return start, gradients


def test_against_one_number_at_a_time():
    start, gradients = draws(0)
    parameters = [nn.Parameter(p.clone()) for p in start]
    optimizer = LaProp(parameters, lr=1e-2, betas=(0.9, 0.99))
    for given in gradients:
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    for parameter, expected in zip(parameters, reference(start, gradients, 1e-2), strict=True):
        torch.testing.assert_close(parameter.data.flatten(), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_clipping_never_lengthens_and_keeps_the_direction():
    parameters = [torch.full((4,), 2.0), torch.zeros(3)]
    gradients = [torch.tensor([9.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 1e-5, 0.0])]
    factors = clip_factors(parameters, gradients, 0.3, 1e-3)
    clipped = [gradient * factor for gradient, factor in zip(gradients, factors, strict=True)]
    torch.testing.assert_close(clipped[0], torch.tensor([1.2, 0.0, 0.0, 0.0]))  # 0.3 of a norm of 4
    assert torch.equal(clipped[1], gradients[1])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(bad, first):
    start, gradients = draws(1)
    runs = []
    for insert in (False, True):
        parameters = [nn.Parameter(p.clone()) for p in start]
        optimizer = Optimizer(parameters, functools.partial(LaProp, lr=1e-2), max_grad_norm=1.0)
        assert optimizer.fused
        given = list(gradients)
        if insert:
            wrong = [torch.full_like(gradients[0][0], bad), gradients[0][1]]
            given.insert(0 if first else 2, wrong)
        for entry in given:
            for parameter, gradient in zip(parameters, entry, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        assert bool(optimizer.nonfinite) == insert
        runs.append(
            [p.data for p in parameters] + [v for p in parameters for v in optimizer.torch_optimizer.state[p].values()]
        )
    for expected, given in zip(*runs, strict=True):
        assert torch.equal(expected, given)


def test_the_whole_gradient_may_be_clipped_as_well():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = Optimizer([parameter], functools.partial(LaProp, lr=0.1, clip_ratio=None), max_grad_norm=0.5)
    optimizer.step({"x": (parameter * torch.tensor([3.0, 4.0, 0.0])).sum()})
    squares = optimizer.torch_optimizer.state[parameter]["exp_avg_sq"]
    torch.testing.assert_close(squares, 0.001 * torch.tensor([0.3, 0.4, 0.0]).square(), rtol=1e-3, atol=0.0)


def test_state_goes_on_where_it_was():
    start, gradients = draws(2)
    runs = []
    for stop in (None, 3):
        parameters = [nn.Parameter(p.clone()) for p in start]
        optimizer = Optimizer(parameters, functools.partial(LaProp, lr=1e-2))
        for t, entry in enumerate(gradients):
            if t == stop:
                saved, values = optimizer.get_state(), [p.data.clone() for p in parameters]
                parameters = [nn.Parameter(p) for p in values]
                optimizer = Optimizer(parameters, functools.partial(LaProp, lr=1e-2))
                optimizer.set_state(saved)
            for parameter, gradient in zip(parameters, entry, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        runs.append([p.data for p in parameters])
    for expected, given in zip(*runs, strict=True):
        assert torch.equal(expected, given)


def test_parameters_that_are_not_always_trained_count_their_own_steps():
    start, gradients = draws(3, count=4)
    parameters = [nn.Parameter(p.clone()) for p in start]
    optimizer = LaProp(parameters, lr=1e-2, betas=(0.9, 0.99))
    for t, entry in enumerate(gradients):
        parameters[0].grad = entry[0].clone()
        parameters[1].grad = entry[1].clone() if t >= 2 else None
        optimizer.step()
    expected = [
        reference(start[:1], [entry[:1] for entry in gradients], 1e-2)[0],
        reference(start[1:], [entry[1:] for entry in gradients[2:]], 1e-2)[0],
    ]
    for parameter, values in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.data.flatten(), torch.tensor(values), rtol=1e-5, atol=1e-6)
