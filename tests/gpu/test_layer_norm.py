"""The kernel behind normalised layers gives what the plain operations give. Needs a CUDA device.

`pytest -m gpu tests/gpu`, or `python tests/gpu/test_layer_norm.py` where pytest is not installed.
"""

import torch

from rl_lab.components import normed
from rl_lab.components.normed import NormedEnsemble, NormedMLP


def agree(module, *inputs, tolerance=1e-4):
    for parameter in module.parameters():
        parameter.data.normal_(std=0.3)
    called = []
    original = normed.fused_norm
    normed.fused_norm = lambda *args, **kwargs: called.append(1) or original(*args, **kwargs)
    try:
        with torch.no_grad():
            given = module(*inputs)
    finally:
        normed.fused_norm = original
    assert called
    expected = module(*inputs)  # with gradients: the plain operations
    assert given.shape == expected.shape
    torch.testing.assert_close(given, expected.detach(), rtol=tolerance, atol=tolerance)


def random(*shape):
    return torch.randn(*shape, device="cuda")


def test_the_kernel_agrees_with_plain_operations():
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    with torch.device("cuda"):
        for rows in (1, 7, 512, 8192):
            agree(NormedMLP(24, 512, [256], simplex=8), random(rows, 24))
            agree(NormedMLP(512, 101, [512, 512], actions=6), random(rows, 512), random(rows, 6))
            agree(NormedMLP(96, 96, [48], actions=3), random(3, rows, 96), random(3, rows, 3))  # no power of two
            agree(NormedEnsemble(64, 11, [128, 64], actions=2, num_members=3), random(rows, 64), random(rows, 2))
        repeated = random(5, 1, 64).expand(-1, 512, -1)
        agree(NormedMLP(64, 64, [128, 128], actions=38, simplex=8), repeated, random(5, 512, 38))
        agree(NormedMLP(64, 8, [2048], actions=1), random(40, 64), random(40, 1))


def test_members_of_an_ensemble():
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("highest")
    with torch.device("cuda"):
        ensemble = NormedEnsemble(64, 11, [128, 64], actions=2, num_members=5)
        agree(ensemble, random(4, 6, 64), random(4, 6, 2), torch.tensor([3, 1]))


if __name__ == "__main__":
    test_the_kernel_agrees_with_plain_operations()
    test_members_of_an_ensemble()
    print("layer norm: the kernel agrees")
