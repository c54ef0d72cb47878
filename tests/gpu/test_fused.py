"""Kernels of world models give what the plain operations give, gradients too. Needs a CUDA device.

`pytest -m gpu tests/gpu`, or `python tests/gpu/test_fused.py` where pytest is not installed.
"""

import contextlib
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components import fused, laprop, layers, twohot
from rl_lab.components.representation import cells, images, rssm, scan, variables

MODULES = (cells, images, laprop, layers, scan, twohot, variables)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


def agree(given, expected, inputs, tolerance):
    torch.testing.assert_close(given.float(), expected.float(), rtol=tolerance, atol=tolerance)
    weights = torch.randn_like(expected.float())
    found = [
        torch.autograd.grad((answer.float() * weights).sum(), inputs, retain_graph=True) for answer in (given, expected)
    ]
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


def plainly(function, *arguments):
    """Call a function as it runs without kernels and written-out gradients."""
    with contextlib.ExitStack() as patched:
        for module in MODULES:
            for name in {"fuses", "is_written_out"} & vars(module).keys():
                patched.enter_context(mock.patch.object(module, name, return_value=False))
        return function(*arguments)


def test_gates():
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        for rows, size, num_blocks in ((16, 2048, 8), (3, 30, 1), (1024, 64, 4)):
            gates, deter = random(rows, 3 * size, dtype=dtype), random(rows, size)
            arguments = (deter, gates, num_blocks, -1.0)
            agree(cells.gated(*arguments), plainly(cells.gated, *arguments), (gates, deter), tolerance)


def test_samples():
    torch.manual_seed(1)
    for num_variables, num_classes, unimix in ((32, 32, 0.01), (5, 7, 0.0), (16, 8, 0.01)):
        variable = variables.Categoricals(num_variables, num_classes, unimix)
        logits = random(64, variable.size)
        draws = torch.rand(64, num_variables, device="cuda")
        given, expected = variable.sample(logits, draws), plainly(variable.sample, logits, draws)
        assert torch.equal(given.unflatten(-1, (-1, num_classes)).sum(-1), torch.ones(64, num_variables, device="cuda"))
        same = (given == expected.round()).all(-1)  # a sum that is rounded otherwise may move a draw across a border
        assert same.float().mean() > 0.95
        agree(given[same], expected[same], (logits,), 1e-4)


def test_activations():
    torch.manual_seed(2)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        for rows, size in ((16, 256), (1024, 2048), (5, 48), (20_000, 64)):
            values, bias, scale = random(rows, size, dtype=dtype), random(size), random(size)
            for given_bias in (bias, None):
                given = fused.Activated.apply(values, given_bias, scale, 1e-4, None)
                sums = values if given_bias is None else values + bias.to(dtype)
                expected = F.silu(F.rms_norm(sums, (size,), eps=1e-4) * scale.to(dtype))
                agree(given, expected, (values,), tolerance)
    values, bias, scale = random(500, 64), random(64), random(64)
    expected = F.silu(F.rms_norm(values + bias, (64,), eps=1e-4) * scale)
    agree(fused.Activated.apply(values, bias, scale, 1e-4, None), expected, (values, bias, scale), 1e-3)


def shaken(module):
    """Move biases and scales away from where they begin."""
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return module.cuda()


def test_pictures():
    torch.manual_seed(3)
    encoder = shaken(images.PooledEncoder((3, 64, 64), 16))
    decoder = shaken(images.PooledDecoder(300, (3, 64, 64), 256, 16, 64))
    seen = torch.randint(0, 256, (9, 3, 64, 64), dtype=torch.uint8, device="cuda")
    features = random(9, 300)
    with torch.backends.cudnn.flags(allow_tf32=False):
        parameters = list(encoder.parameters())
        agree(encoder(seen), plainly(encoder, seen), parameters, 1e-3)
        parameters = [features, *decoder.parameters()]
        agree(decoder(features), plainly(decoder, features), parameters, 1e-3)
    with torch.autocast("cuda", torch.bfloat16):
        answer, expected = encoder(seen), plainly(encoder, seen)
    assert answer.dtype == expected.dtype == torch.bfloat16
    assert (answer - expected).abs().mean() < 0.02 * expected.abs().mean()


def test_dense_layers():
    torch.manual_seed(5)
    layer = shaken(layers.Dense(48, 32, num_ahead=8))
    values, ahead = random(20, 40), random(20, 32)
    agree(layer(values, ahead), plainly(layer, values, ahead), [values, ahead, *layer.parameters()][:3], 1e-3)
    whole = shaken(layers.Dense(40, 32))
    agree(whole(values), plainly(whole, values), [values, *whole.parameters()], 1e-3)
    scanned = list(layers.keyed(whole).values())
    tape = layers.Tape(layers.constants(scanned, torch.float32))  # as imagination uses it
    given, expected = whole(values, None, tape), plainly(whole, values, None, tape)
    agree(given, expected, (values,), 1e-3)


def test_two_hot_losses():
    torch.manual_seed(6)
    prediction = twohot.SymexpTwoHot().cuda()
    logits, values = random(50, 20, 255), 10.0 * torch.randn(50, 20, device="cuda")
    agree(prediction.loss(logits, values), plainly(prediction.loss, logits, values), (logits,), 1e-4)


class Embedded(nn.Module):
    outputs = 10


def test_scan():
    torch.manual_seed(4)
    num_steps, num_rows, size = 9, 5, 128
    variable = variables.Categoricals(8, 6)
    cell = cells.BlockGRU(size, 48, 3, 24, num_blocks=4)
    model = shaken(rssm.RSSM(Embedded(), cell, variable, units=32))
    state = {"deter": random(num_rows, size).detach(), "stoch": variable.mode(random(num_rows, 48)).detach()}
    embeddings, actions = random(num_steps, num_rows, 10), random(num_steps, num_rows, 3).detach()
    is_first = torch.rand(num_steps, num_rows, device="cuda") < 0.3
    draws = torch.rand(num_steps, num_rows, 8, device="cuda")
    arguments = (state, actions, embeddings, is_first, draws)
    given, expected = model.observe_sequence(*arguments), plainly(model.observe_sequence, *arguments)
    assert torch.equal(given.states["stoch"], expected.states["stoch"].round())
    both = [torch.cat([*seen.states.values(), seen.posterior, seen.prior], -1) for seen in (given, expected)]
    agree(*both, [embeddings, *model.parameters()], 1e-3)
    with torch.autocast("cuda", torch.bfloat16):
        given, expected = model.observe_sequence(*arguments), plainly(model.observe_sequence, *arguments)
    assert given.posterior.dtype == expected.posterior.dtype == torch.bfloat16
    weights = torch.randn_like(given.states["deter"])
    found = [
        torch.autograd.grad((seen.states["deter"] * weights).sum(), [embeddings, *model.cell.parameters()])
        for seen in (given, expected)
    ]
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        assert (ours - theirs).norm() < 0.1 * theirs.norm()
    first = (given.states["deter"][0] - expected.states["deter"][0]).abs()
    assert first.mean() < 0.01 * expected.states["deter"][0].abs().mean()


def test_laprop():
    shapes = ((3, 2), (5,), (70, 300), (1,), (4096,))
    for skipped in (0.0, 1.0):
        torch.manual_seed(4)
        start = [torch.randn(shape, device="cuda") for shape in shapes]
        gradients = [[torch.randn(shape, device="cuda") for shape in shapes] for _ in range(3)]
        found = []
        for fuse in (True, False):
            parameters = [nn.Parameter(values.clone()) for values in start]
            optimizer = laprop.LaProp(parameters, lr=1e-2)
            for step, given in enumerate(gradients):
                optimizer.grad_scale = torch.tensor(2.0, device="cuda")
                optimizer.found_inf = torch.tensor(skipped if step == 1 else 0.0, device="cuda")
                for parameter, gradient in zip(parameters, given, strict=True):
                    parameter.grad = gradient.clone()
                optimizer.step() if fuse else plainly(optimizer.step)
            moments = [entry[name] for entry in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
            found.append([parameter.data for parameter in parameters] + moments)
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


if __name__ == "__main__":
    test_gates()
    test_samples()
    test_activations()
    test_pictures()
    test_dense_layers()
    test_two_hot_losses()
    test_scan()
    test_laprop()
    print("fused: the kernels agree")
