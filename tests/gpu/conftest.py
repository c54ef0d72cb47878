"""Everything in this folder needs a CUDA device. Each file also runs by itself, without pytest."""

from pathlib import Path

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests of this folder, before any are chosen by their marks."""
    absent = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(absent)


@pytest.fixture(autouse=True)
def full_precision():
    """Begin with products in float32: an experiment that an earlier test built may have left them in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
