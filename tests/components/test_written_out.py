"""On a CPU, pieces with their way back written out give what plain operations and autograd give."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components import fused, layers, twohot
from rl_lab.components.representation import cells, images, rssm, scan, variables

TYPES = {"float32": (torch.float32, 1e-5), "bfloat16": (torch.bfloat16, 3e-2)}


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def shaken(module):
    """Move biases and scales away from where they begin."""
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return module


@pytest.fixture
def both(monkeypatch):
    """Call a function as it is, with and without gradients, and by plain operations; the first must be written out."""
    torch.manual_seed(0)
    written_out = {"_ScanBackward", "SampledBackward", "ActivatedBackward", "_CrossEntropyBackward"}

    def call(function, *arguments):
        given = function(*arguments)
        assert written_out & names_of(given.grad_fn)
        with torch.no_grad():
            torch.testing.assert_close(function(*arguments), given, rtol=0, atol=0)
        with monkeypatch.context() as patched:
            for module in (cells, layers, scan, twohot, variables):
                patched.setattr(module, "is_written_out", lambda _: False)
            return given, function(*arguments)

    return call


def names_of(node, seen=None):
    """Return the names of what autograd will go through."""
    seen = set() if seen is None else seen
    if node is not None and node not in seen:
        seen.add(node)
        for before, _ in node.next_functions:
            names_of(before, seen)
    return {type(entry).__name__ for entry in seen}


def agree(given, expected, inputs, tolerance):
    torch.testing.assert_close(given.float(), expected.float(), rtol=tolerance, atol=tolerance)
    weights = torch.randn_like(expected.float())
    found = [torch.autograd.grad((answer.float() * weights).sum(), inputs) for answer in (given, expected)]
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        assert theirs.abs().max() > 0
        error = (ours.float() - theirs.float()).abs().max()
        assert error <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("rows", "size", "num_blocks"), [(16, 128, 8), (3, 30, 1), (40, 64, 4)])
def test_gates(kind, rows, size, num_blocks):
    torch.manual_seed(1)
    dtype, tolerance = TYPES[kind]
    gates, deter = random(rows, 3 * size, dtype=dtype), random(rows, size)
    given, expected = fused.mix(gates, deter, size // num_blocks, -1.0), cells.gated(deter, gates, num_blocks, -1.0)
    agree(given, expected, (gates, deter), tolerance)
    with torch.no_grad():
        torch.testing.assert_close(cells.gated(deter, gates, num_blocks, -1.0), given, rtol=0, atol=0)


@pytest.mark.parametrize(("num_variables", "num_classes", "unimix"), [(32, 32, 0.01), (5, 7, 0.0), (16, 8, 0.01)])
def test_samples(both, num_variables, num_classes, unimix):
    variable = variables.Categoricals(num_variables, num_classes, unimix)
    logits = (3.0 * torch.randn(64, variable.size)).requires_grad_()
    given, expected = both(variable.sample, logits, torch.rand(64, num_variables))
    same = (given == expected.round()).all(-1)  # a sum that is rounded otherwise may move a draw across a border
    assert same.float().mean() > 0.95
    agree(given[same], expected[same], (logits,), 1e-5)
    highest = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0)).expand(64, num_variables)
    given, expected = both(variable.sample, logits, highest)
    torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(16, 256), (4, 3, 48), (2, 5, 5, 8)])
def test_norms_with_silu(kind, has_bias, shape):
    torch.manual_seed(2)
    dtype, tolerance = TYPES[kind]
    values, bias, scale = random(*shape, dtype=dtype), random(shape[-1]), random(shape[-1])
    sums = values + bias.to(dtype) if has_bias else values
    expected = F.silu(F.rms_norm(sums, shape[-1:], eps=1e-4) * scale.to(dtype))
    inputs = (values, bias, scale) if has_bias else (values, scale)
    before = values.detach().clone()
    bias = bias if has_bias else None
    given = fused.activate(values, bias, scale, 1e-4)
    agree(given, expected, inputs, tolerance)
    constant = fused.activate(values, bias if bias is None else bias.detach(), scale.detach(), 1e-4)
    expected = F.silu(F.rms_norm(sums, shape[-1:], eps=1e-4) * scale.to(dtype))
    agree(constant, expected, (values,), tolerance)  # as gradients pass through a model that does not learn
    with torch.no_grad():
        torch.testing.assert_close(fused.activate(values, bias, scale, 1e-4), given)
    assert torch.equal(values, before)


def test_pictures(both):
    encoder = shaken(images.PooledEncoder((3, 16, 16), 4, (2, 4), 3))
    decoder = shaken(images.PooledDecoder(40, (3, 16, 16), 32, 4, 16, (2, 4), 3))
    seen, features = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8), random(5, 40)
    agree(*both(encoder, seen), list(encoder.parameters()), 1e-4)
    agree(*both(decoder, features), [features, *decoder.parameters()], 1e-4)


@pytest.mark.parametrize("values", [0.3, -7.0, 1e30, 0.0])
def test_two_hot_losses(both, values):
    prediction = twohot.SymexpTwoHot(31, 5.0)
    logits, targets = random(4, 6, 31), values * torch.rand(4, 6)
    agree(*both(prediction.loss, logits, targets), (logits,), 1e-5)


class Embedded(nn.Module):
    outputs = 10


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("units", [24, 256])  # small products, and some that oneDNN makes where it can
def test_scan(both, kind, units):
    dtype, _ = TYPES[kind]
    num_steps, num_rows, size = 9, 5 if units == 24 else 64, 128 if units == 24 else 512
    variable = variables.Categoricals(8, 6)
    model = shaken(rssm.RSSM(Embedded(), cells.BlockGRU(size, 48, 3, units, num_blocks=4), variable, units))
    assert scan.Parts(model.cell, model.posterior, model.posterior_output, variable).can_scan(*torch.zeros(2, 1))
    state = {"deter": torch.randn(num_rows, size), "stoch": variable.mode(torch.randn(num_rows, 48))}
    embeddings, actions = random(num_steps, num_rows, 10), torch.randn(num_steps, num_rows, 3)
    is_first, draws = torch.rand(num_steps, num_rows) < 0.3, torch.rand(num_steps, num_rows, 8)

    def observe():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            seen = model.observe_sequence(state, actions, embeddings, is_first, draws)
        return torch.cat([*seen.states.values(), seen.posterior.float(), seen.prior.float()], -1)

    given, expected = both(observe)
    inputs = [embeddings, *model.parameters()]
    if dtype == torch.float32:
        assert torch.equal(given[..., size:][..., :48], expected[..., size:][..., :48].round())
        agree(given, expected, inputs, 1e-4)
    else:  # codes differ sooner or later
        error = (given[0] - expected[0])[..., :size].abs().mean()
        assert error < 0.01 * expected[0][..., :size].abs().mean()
        weights = torch.randn_like(given[:2])
        found = [torch.autograd.grad((answer[:2] * weights).sum(), inputs) for answer in (given, expected)]
        for ours, theirs in zip(*found, strict=True):
            assert ours.dtype == theirs.dtype == torch.float32
            assert (ours - theirs).norm() <= 0.1 * theirs.norm()


def test_what_is_not_a_number_stays_visible():
    variable = variables.Categoricals(3, 4)
    logits = torch.zeros(5, 12)
    logits[2, 5] = float("nan")
    for wanted in (False, True):
        codes = variable.sample(logits.clone().requires_grad_(wanted), torch.full((5, 3), 0.5))
        assert codes.isnan().any(-1).tolist() == [False, False, True, False, False]


def test_weights_that_change_before_the_way_back_are_refused():
    torch.manual_seed(0)
    variable = variables.Categoricals(4, 4)
    model = rssm.RSSM(Embedded(), cells.BlockGRU(16, 16, 3, 8, num_blocks=4), variable, 8)
    state = model.initial(5, "cpu")
    seen = model.observe_sequence(
        state, torch.randn(3, 5, 3), torch.randn(3, 5, 10), torch.zeros(3, 5, dtype=torch.bool), torch.rand(3, 5, 4)
    )
    with torch.no_grad():
        model.cell.gates.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        seen.states["deter"].sum().backward()
