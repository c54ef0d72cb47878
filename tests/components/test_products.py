"""Large products on a CPU: the numbers and gradients of torch's own, by whatever routine they are made."""

import pytest
import torch
import torch.nn.functional as F

from rl_lab.components import products
from rl_lab.components.nets import MLP
from rl_lab.components.products import LARGE, linear, product, stacked
from rl_lab.components.stacked import StackedMLP

SIDE = 128  # SIDE ** 3 multiplications are just large


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def calls(monkeypatch):
    """What the fast routine was asked; a core without wide vectors is given torch's own in its place."""
    found = []
    routine = products._ONEDNN or (lambda rows, weight, bias, *_: F.linear(rows, weight, bias))

    def spy(rows, weight, bias, *options):
        found.append((rows, weight))
        return routine(rows, weight, bias, *options)

    monkeypatch.setattr(products, "_ONEDNN", spy)
    return found


def layouts(rows, columns):
    """The same matrix, as it may lie in memory."""
    values = draws(rows, columns, seed=1)
    wide, tall = torch.zeros(rows, columns + 5), torch.zeros(columns, rows + 3)
    wide[:, 2 : columns + 2], tall[:, 1 : rows + 1] = values, values.T
    return [values, values.T.contiguous().T, wide[:, 2 : columns + 2], tall[:, 1 : rows + 1].T]


@pytest.mark.parametrize("sizes", [(SIDE, SIDE, SIDE), (2 * SIDE, SIDE // 2, SIDE), (SIDE, 4 * SIDE, SIDE // 4)])
def test_products_are_those_of_double_precision_in_every_layout(calls, sizes):
    rows, inner, columns = sizes
    bias = draws(columns, seed=2)
    for left in layouts(rows, inner):
        for right in layouts(inner, columns):
            for shift in (None, bias):
                answer = product(left, right, shift)
                exact = left.double() @ right.double() + (0.0 if shift is None else shift.double())
                torch.testing.assert_close(answer, exact.float(), rtol=1e-5, atol=2e-5)
    assert len(calls) == 32
    # What is handed on lies densely: other layouts take a thousand times as long.
    assert all(weight.is_contiguous() or weight.T.is_contiguous() for _, weight in calls)


def test_small_and_double_products_are_left_to_torch(calls):
    assert SIDE**3 == LARGE
    product(draws(SIDE - 1, SIDE), draws(SIDE, SIDE))
    product(draws(SIDE, SIDE).double(), draws(SIDE, SIDE).double())
    linear(draws(SIDE - 1, SIDE), draws(SIDE, SIDE))
    assert calls == []


def test_autocast_and_the_compiler_see_operations_of_torch(calls):
    values, weight = draws(SIDE, SIDE), draws(SIDE, SIDE)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(values, weight).dtype == torch.bfloat16
    compiled = torch.compile(lambda values: linear(values, weight), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(values), F.linear(values, weight))
    assert calls == []


@pytest.mark.parametrize("leading", [(SIDE,), (2, SIDE), (1, 4, SIDE)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_has_the_gradients_of_torch(calls, leading, with_bias):
    answers = []
    for function in (linear, F.linear):
        values, weight = draws(*leading, SIDE).requires_grad_(), draws(SIDE, SIDE, seed=1).requires_grad_()
        bias = draws(SIDE, seed=2).requires_grad_() if with_bias else None
        outputs = function(values, weight, bias)
        outputs.tanh().sum().backward()
        answers.append([outputs, values.grad, weight.grad, *([bias.grad] if with_bias else [])])
    assert len(calls) == 3
    for ours, theirs in zip(*answers, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_nothing_is_computed_for_what_does_not_learn(calls):
    values, weight = draws(SIDE, SIDE).requires_grad_(), draws(SIDE, SIDE, seed=1)
    linear(values, weight).sum().backward()
    assert len(calls) == 2  # forth, and back to the values
    with torch.no_grad():
        assert not linear(values, weight).requires_grad
    assert len(calls) == 3


@pytest.mark.parametrize("rows_of_bias", [1, SIDE])
def test_stacked_products_are_those_of_every_member(calls, rows_of_bias):
    answers = []
    for function in (stacked, lambda rows, weight, bias: torch.baddbmm(bias, rows, weight)):
        rows, weight = draws(3, SIDE, SIDE).requires_grad_(), draws(3, SIDE, SIDE, seed=1).requires_grad_()
        bias = draws(3, rows_of_bias, SIDE, seed=2).requires_grad_()
        outputs = function(rows, weight, bias)
        outputs.tanh().sum().backward()
        answers.append([outputs, rows.grad, weight.grad, bias.grad])
    assert len(calls) == 9
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [lambda: MLP(4, 2, (SIDE, SIDE), "relu"), lambda: StackedMLP(4, 2, (SIDE, SIDE))])
def test_perceptrons_with_relu_are_the_same_with_and_without(calls, monkeypatch, make):
    torch.manual_seed(0)
    network, answers = make(), []
    for routine in (products._ONEDNN, None):
        monkeypatch.setattr(products, "_ONEDNN", routine)
        network.zero_grad()
        values = draws(SIDE, 4).requires_grad_()
        outputs = network(values)
        outputs.square().sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(network(values), outputs, rtol=1e-5, atol=1e-6)
        answers.append([outputs, values.grad, *(parameter.grad.clone() for parameter in network.parameters())])
        assert all(parameter.grad.stride() == parameter.stride() for parameter in network.parameters())
    assert len(calls) == (4 if isinstance(network, MLP) else 8)
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [lambda: MLP(4, 2, (SIDE, SIDE), "relu"), lambda: StackedMLP(4, 2, (SIDE, SIDE))])
def test_what_is_not_a_number_stays_visible_behind_relu(calls, make):
    network = make()
    with torch.no_grad():
        next(iter(network.parameters())).view(-1)[5] = torch.nan
        outputs = network(draws(SIDE, 4))
    assert calls
    assert outputs.isnan().any(-1).reshape(-1, SIDE)[0].all()
