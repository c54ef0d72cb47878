"""Triton, in which our GPU kernels are written: it comes with torch for GPUs, and is not there for CPUs."""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["AVAILABLE", "jit", "tl", "triton"]
AVAILABLE = triton is not None


def jit(function: Any) -> Any:
    """Return a kernel, or a function for kernels, that Triton compiles; without Triton nobody calls it.

    One kernel serves one group or many: compiling takes longer than what it could save.
    """
    return function if triton is None else triton.jit(function, do_not_specialize=["groups"])
