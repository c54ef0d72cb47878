"""Large products on a CPU: the numbers and gradients of torch's own, by whatever routine they are made."""

import pytest
import torch
import torch.nn.functional as F

from rl_lab.components.controllers.deterministic import DeterministicActor
from rl_lab.components.layers import Linear
from rl_lab.components.nets import MLP
from rl_lab.components.normed import NormedEnsemble, NormedMLP
from rl_lab.components.stacked import StackedMLP
from rl_lab.components.value_losses import climb, regress
from rl_lab.core import products
from rl_lab.core.products import LARGE, LARGE_MEMBER, add, fill, linear, product, stacked, weight_gradient

SIDE, ROWS = 128, 512  # ROWS * SIDE ** 2 multiplications are just large in a stack


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def calls(monkeypatch):
    """What the fast routine was asked; a core without wide vectors is given torch's own in its place."""
    found = []
    routine = products.ONEDNN or (lambda rows, weight, bias, *_: F.linear(rows, weight, bias))

    def spy(rows, weight, bias, *options):
        found.append((rows, weight))
        return routine(rows, weight, bias, *options)

    monkeypatch.setattr(products, "ONEDNN", spy)
    return found


@pytest.fixture
def with_and_without(calls, monkeypatch):
    """Run something with the fast routine and without it, and compare all that it returns."""

    def compare(work, num_calls=None):
        answers = []
        for routine in (products.ONEDNN, None):
            monkeypatch.setattr(products, "ONEDNN", routine)
            answers.append(work())
        assert calls if num_calls is None else len(calls) == num_calls
        for ours, plain in zip(*answers, strict=True):
            assert ours.shape == plain.shape
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)

    return compare


def lies_as(one, other):
    """Whether two tensors lie in memory alike; how long a step along a side of 1 is does not matter."""
    return one.shape == other.shape and all(
        size == 1 or a == b for size, a, b in zip(one.shape, one.stride(), other.stride(), strict=True)
    )


def layouts(rows, columns):
    """The same matrix, as it may lie in memory; and one whose rows are all the same."""
    values = draws(rows, columns, seed=1)
    wide, tall = torch.zeros(rows, columns + 5), torch.zeros(columns, rows + 3)
    wide[:, 2 : columns + 2], tall[:, 1 : rows + 1] = values, values.T
    apart = values.repeat_interleave(2, 0)[::2]
    views = [values, values.T.contiguous().T, wide[:, 2 : columns + 2], tall[:, 1 : rows + 1].T, apart]
    assert all(torch.equal(view, values) for view in views)
    return [*views, values[:1].expand(rows, -1)]


@pytest.mark.parametrize("sizes", [(2 * SIDE, SIDE, SIDE), (4 * SIDE, SIDE // 2, SIDE), (SIDE, 8 * SIDE, SIDE // 4)])
def test_products_are_those_of_double_precision_in_every_layout(calls, sizes):
    rows, inner, columns = sizes
    bias = draws(columns, seed=2)
    biases = [None, bias, bias.repeat_interleave(2)[::2], bias[:1].expand(columns)]
    for left in layouts(rows, inner):
        for right in layouts(inner, columns):
            for shift in biases:
                answer = product(left, right, shift)
                exact = left.double() @ right.double() + (0.0 if shift is None else shift.double())
                torch.testing.assert_close(answer, exact.float(), rtol=1e-5, atol=3e-4)
    assert len(calls) == 144
    # What is handed on lies densely: other layouts take a thousand times as long.
    assert all(weight.is_contiguous() or weight.T.is_contiguous() for _, weight in calls)


def test_small_thin_and_double_products_are_left_to_torch(calls):
    assert ROWS * SIDE**2 == LARGE_MEMBER == 2 * LARGE
    product(draws(255, SIDE), draws(SIDE, SIDE))
    product(draws(ROWS, SIDE).double(), draws(SIDE, SIDE).double())
    product(draws(3, 2048), draws(2048, 2048))
    product(draws(2048, 2048), draws(2048, 1))
    linear(draws(255, SIDE), draws(SIDE, SIDE))
    stacked(draws(2, 511, SIDE), draws(2, SIDE, SIDE), draws(2, 1, SIDE))
    assert calls == []


def test_what_does_not_fit_is_torch_s_to_answer(calls):
    values, weight = draws(ROWS, SIDE), draws(SIDE, SIDE)
    for function, other in ((product, draws(SIDE + 1, SIDE)), (linear, draws(SIDE, SIDE + 1))):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            function(values, other)
    for bias in (torch.ones(1), torch.ones(1, SIDE)):  # these are broadcast
        torch.testing.assert_close(product(values, weight, bias), values @ weight + 1.0)
    torch.testing.assert_close(linear(values, weight, torch.ones(1, SIDE)), values @ weight.T + 1.0)
    assert linear(values[:0], weight).shape == (0, SIDE)
    assert linear(draws(4 * SIDE), draws(4 * SIDE, 4 * SIDE)).shape == (4 * SIDE,)
    assert calls == []


def test_autocast_and_the_compiler_see_operations_of_torch(calls):
    values, weight = draws(ROWS, SIDE), draws(SIDE, SIDE)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(values, weight).dtype == torch.bfloat16
    compiled = torch.compile(lambda values: linear(values, weight), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(values), F.linear(values, weight))
    assert calls == []


@pytest.mark.parametrize("leading", [(ROWS,), (2, ROWS), (1, 4, SIDE)])
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
    values, weight = draws(ROWS, SIDE).requires_grad_(), draws(SIDE, SIDE, seed=1)
    linear(values, weight).sum().backward()
    assert len(calls) == 2  # forth, and back to the values
    with torch.no_grad():
        assert not linear(values, weight).requires_grad
    assert len(calls) == 3


@pytest.mark.parametrize(("inputs", "outputs"), [(SIDE, SIDE), (16, 8 * SIDE), (8 * SIDE, 16), (5, 3)])
@pytest.mark.parametrize("is_turned", [False, True])
def test_weight_gradients_lie_as_their_weights(calls, inputs, outputs, is_turned):
    rows, gradient = draws(ROWS, inputs), draws(ROWS, outputs, seed=1)
    weight = torch.empty(inputs, outputs).T if is_turned else torch.empty(outputs, inputs)
    found = weight_gradient(rows, gradient, weight)
    torch.testing.assert_close(found, gradient.T @ rows, rtol=1e-4, atol=1e-4)
    assert lies_as(found, weight)
    assert len(calls) == (inputs != 5)


@pytest.mark.parametrize("rows_of_bias", [1, ROWS])
def test_stacked_products_are_those_of_every_member(calls, rows_of_bias):
    answers = []
    for function in (stacked, lambda rows, weight, bias: torch.baddbmm(bias, rows, weight)):
        rows, weight = draws(3, ROWS, SIDE).requires_grad_(), draws(3, SIDE, SIDE, seed=1).requires_grad_()
        bias = draws(3, rows_of_bias, SIDE, seed=2).requires_grad_()
        outputs = function(rows, weight, bias)
        outputs.tanh().sum().backward()
        answers.append([outputs, rows.grad, weight.grad, bias.grad])
    assert len(calls) == 9
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


NETWORKS = {
    "mlp": lambda: MLP(4, 2, (SIDE, SIDE), "relu"),
    "stacked": lambda: StackedMLP(4, 2, (SIDE, SIDE)),
    "stacked smooth": lambda: StackedMLP(4, 2, (SIDE, SIDE), 3, "silu"),
    "stacked normed": lambda: StackedMLP(4, 2, (SIDE, SIDE), layer_norm=True),
    "normed": lambda: NormedMLP(4, 2, (SIDE, SIDE)),
    "linear": lambda: Linear(SIDE, SIDE),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_answer_and_learn_as_without_it(with_and_without, name):
    torch.manual_seed(0)
    network = NETWORKS[name]()

    def work():
        network.zero_grad()
        values = draws(ROWS, SIDE if name == "linear" else 4).requires_grad_()
        outputs = network(values)
        outputs.square().sum().backward()
        assert all(lies_as(parameter.grad, parameter) for parameter in network.parameters())
        with torch.no_grad():
            torch.testing.assert_close(network(values), outputs, rtol=1e-5, atol=1e-6)
        return [outputs, values.grad, *(parameter.grad.clone() for parameter in network.parameters())]

    with_and_without(work)


@pytest.mark.parametrize("options", [{"frozen": True}, {"members": torch.tensor([2, 0, 2])}, {"count": 2}])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_some_members_and_frozen_ones(with_and_without, activation, options):
    torch.manual_seed(0)
    network = StackedMLP(4, 2, (SIDE, SIDE), 3, activation)
    count, given = options.get("count", 3), {name: own for name, own in options.items() if name != "count"}

    def work():
        values = draws(count, ROWS, 4).requires_grad_()
        outputs = network.each(values, **given)
        outputs.square().sum().backward()
        learned = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
        assert bool(learned) != options.get("frozen", False)
        network.zero_grad()
        return [outputs, values.grad, *learned]

    with_and_without(work)


@pytest.mark.parametrize("members", [None, torch.tensor([1, 0])])
def test_an_ensemble_with_actions_is_the_same_without_it(with_and_without, members):
    torch.manual_seed(0)
    network = NormedEnsemble(SIDE, 3, (SIDE, SIDE), actions=2, num_members=3)

    def work():
        values, actions = draws(ROWS, SIDE).requires_grad_(), draws(ROWS, 2, seed=1).requires_grad_()
        outputs = network(values, actions, members)
        outputs.square().sum().backward()
        return [outputs, values.grad, actions.grad]

    with_and_without(work)


@pytest.mark.parametrize("members", [1, 2])
def test_critics_regress_and_actors_climb_as_without_it(with_and_without, members):
    torch.manual_seed(0)
    critics = StackedMLP(5, 1, (SIDE, SIDE), members)
    actor = DeterministicActor(MLP(3, 2, (SIDE, SIDE), "relu"))

    def work():
        loss, values = regress(critics, draws(ROWS, 5), draws(ROWS, seed=1))
        found = [loss, values, *(parameter.grad for parameter in critics.parameters())]
        assert all(lies_as(parameter.grad, parameter) for parameter in critics.parameters())
        found.append(climb(actor, critics, draws(ROWS, 3)))
        return [*found, *(parameter.grad for parameter in actor.parameters())]

    # Forth and to the weights and, behind the last layer, to the rows of the hidden one; the first critic alone climbs.
    with_and_without(work, num_calls=3 * members + 2 + 3)


@pytest.mark.parametrize("where", ["weight", "bias", "rows"])
@pytest.mark.parametrize("name", ["mlp", "stacked"])
def test_what_is_not_a_number_stays_visible_behind_relu(calls, name, where):
    network, values = NETWORKS[name](), draws(ROWS, 4)
    with torch.no_grad():
        spoilt = {"weight": 0, "bias": 1}.get(where)
        (values if spoilt is None else list(network.parameters())[spoilt]).view(-1)[2] = torch.nan
        outputs = network(values).reshape(-1, ROWS, 2)
    assert calls
    assert outputs[0].isnan().all(-1)[0]


@pytest.mark.parametrize("rows", [8, ROWS])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_may_go_where_something_lies_already(with_and_without, rows, has_bias):
    wide, weight, bias = draws(rows, 2, SIDE), draws(SIDE, SIDE, seed=1), draws(SIDE, seed=2) if has_bias else None

    def work():
        filled, added = torch.full((rows, 2, SIDE), 7.0), torch.full((rows, SIDE), 7.0)
        fill(filled[:, 1], wide[:, 0], weight.T, bias)
        add(added, wide[:, 0], weight)
        return filled, added

    with_and_without(work, num_calls=2 if rows == ROWS else 0)
    filled, added = work()
    expected = F.linear(wide[:, 0], weight, bias)
    torch.testing.assert_close(filled, torch.stack([torch.full_like(expected, 7.0), expected], 1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(added, 7.0 + wide[:, 0] @ weight, rtol=1e-4, atol=1e-4)
