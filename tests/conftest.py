import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some sandboxes show AMX units and forbid their use

import pytest
import torch

torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays: looking through it for garbage took half the time of collecting."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def own_process_settings():
    """A test that builds an experiment changes how the process computes; the next one starts from the usual."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
