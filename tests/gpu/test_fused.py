"""Kernels of a recurrent step give what the plain operations give, gradients too. Needs a CUDA device.

`pytest -m gpu tests/gpu`, or `python tests/gpu/test_fused.py` where pytest is not installed.
"""

import torch
import torch.nn.functional as F

from rl_lab.components import fused
from rl_lab.components.representation import cells, variables


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


def plainly(module, function, *arguments):
    """Call a function as it runs without kernels."""
    original = module.fuses
    module.fuses = lambda _: False
    try:
        return function(*arguments)
    finally:
        module.fuses = original


def test_gates():
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        for rows, size, num_blocks in ((16, 2048, 8), (3, 30, 1), (1024, 64, 4)):
            gates, deter = random(rows, 3 * size, dtype=dtype), random(rows, size)
            arguments = (deter, gates, num_blocks, -1.0)
            agree(cells.gated(*arguments), plainly(cells, cells.gated, *arguments), (gates, deter), tolerance)


def test_samples():
    torch.manual_seed(1)
    for num_variables, num_classes, unimix in ((32, 32, 0.01), (5, 7, 0.0), (16, 8, 0.01)):
        variable = variables.Categoricals(num_variables, num_classes, unimix)
        logits = random(64, variable.size)
        draws = torch.rand(64, num_variables, device="cuda")
        given, expected = variable.sample(logits, draws), plainly(variables, variable.sample, logits, draws)
        assert torch.equal(given.unflatten(-1, (-1, num_classes)).sum(-1), torch.ones(64, num_variables, device="cuda"))
        same = (given == expected.round()).all(-1)  # a sum that is rounded otherwise may move a draw across a border
        assert same.float().mean() > 0.95
        agree(given[same], expected[same], (logits,), 1e-4)


def test_norms():
    torch.manual_seed(2)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        for rows, size in ((16, 256), (1024, 2048), (5, 48)):
            values, ahead = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype)
            offset, scale = random(rows, size, dtype=dtype).detach().zero_().requires_grad_(), random(size).detach()
            given, normalized = fused.NormedSilu.apply(values, ahead, scale, offset, 1e-4)
            expected = F.rms_norm(values + ahead, (size,), eps=1e-4)
            torch.testing.assert_close(normalized.float(), expected.float(), rtol=tolerance, atol=tolerance)
            agree(given, F.silu(expected * scale.to(dtype) + offset), (values, ahead, offset), tolerance)


if __name__ == "__main__":
    test_gates()
    test_samples()
    test_norms()
    print("fused: the kernels agree")
