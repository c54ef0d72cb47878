"""Triton, in which our GPU kernels are written: it comes with torch for GPUs, and is not there for CPUs."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["AVAILABLE", "build_ahead", "jit", "tl", "triton", "wait_until_built"]
AVAILABLE = triton is not None
_ONE_FOR_ALL = ["groups", "num_pixels", "num_blocks", "width"]
_builds: dict[Hashable, Future[Any]] = {}


def jit(function: Any) -> Any:
    """Return a kernel, or a function for kernels, that Triton compiles; without Triton nobody calls it.

    One kernel serves one group or many, pictures of all sizes: compiling takes longer than what it could save.
    """
    return function if triton is None else triton.jit(function, do_not_specialize=_ONE_FOR_ALL)


def build_ahead(key: Hashable, kernel: Any, device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Build a kernel in a thread, once for each key, while others run: building takes a third of a second."""
    if (kernel, key) not in _builds:
        _builds[kernel, key] = _threads().submit(_build, kernel, device, *arguments, **constants)


def wait_until_built() -> None:
    """Wait for all kernels whose building has begun."""
    for build in list(_builds.values()):  # another thread may begin one meanwhile
        build.result()


def _build(kernel: Any, device: torch.device, *arguments: Any, **constants: Any) -> None:
    with torch.cuda.device(device):
        kernel.warmup(*arguments, grid=(1,), **constants)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(8, thread_name_prefix="kernels")
