import contextlib
import threading

import pytest
import torch

from rl_lab.core import kernels


class Kernel:
    """Stands for a Triton kernel: remembers how it was built, and by which thread."""

    def __init__(self, gate=None, error=None):
        self.built, self.gate, self.error = [], gate, error

    def warmup(self, *arguments, grid, **constants):
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        self.built.append((arguments, grid, constants, threading.current_thread().name))


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(kernels, "_builds", {})


def test_kernels_are_built_beside_the_caller_once_for_each_key():
    go = threading.Event()
    kernel, device = Kernel(go), torch.device("cuda")
    for _ in range(3):
        kernels.build_ahead("small", kernel, device, 1, SIZE=2)
    kernels.build_ahead("large", kernel, device, 1, SIZE=4)
    assert kernel.built == []  # the caller did not wait
    go.set()
    kernels.wait_until_built()
    assert sorted(constants["SIZE"] for _, _, constants, _ in kernel.built) == [2, 4]
    assert all(name != threading.current_thread().name for *_, name in kernel.built)


def test_who_waits_learns_that_a_kernel_cannot_be_built():
    kernels.build_ahead("key", Kernel(error=RuntimeError("out of registers")), torch.device("cuda"))
    with pytest.raises(RuntimeError, match="out of registers"):
        kernels.wait_until_built()
