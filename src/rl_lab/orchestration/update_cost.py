"""What one update computes: arithmetic, how long that takes at full speed, and its kernels on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from rl_lab.core import products
from rl_lab.core.capture import HookCapture, uncompiled
from rl_lab.core.phase import Hook, Phase
from rl_lab.orchestration.loop import run_hook
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.orchestration.run_parts import RunParts
from rl_lab.orchestration.stopwatch import device_wait


@dataclass(frozen=True)
class UpdateCost:
    """What one call of an update hook computes."""

    hook: str
    operations: dict[str, int]  # floating-point operations of matrix products and convolutions, by type
    peaks: dict[str, float]  # operations per second that this device reaches in a large matrix product, by type
    kernels: int | None = None  # on a GPU: launches of one replay, and how long they keep it busy
    kernel_seconds: float | None = None

    @property
    def floor_seconds(self) -> float:
        """How long the arithmetic alone takes at full speed."""
        return sum(count / self.peaks[kind] for kind, count in self.operations.items())


class Arithmetic(TorchDispatchMode):
    """Counts the floating-point operations of matrix products and convolutions, by the type of their numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        out = func(*args, **(kwargs or {}))
        count = _linear if func._overloadpacket is products.ONEDNN else flop_registry.get(func._overloadpacket)
        if count is not None:
            kind = str(next(given.dtype for given in args if isinstance(given, Tensor))).removeprefix("torch.")
            total = count(*args, **(kwargs or {}), out_val=out)
            self.operations[kind] = self.operations.get(kind, 0) + total
        return out


def _linear(rows: Tensor, weight: Tensor, *_: Any, out_val: Tensor) -> int:
    return 2 * rows.numel() * len(weight)


def update_cost(orchestrator: Orchestrator, hook: Hook) -> UpdateCost:
    """Run an update once more as it is and count what it computes; on a GPU look at one replay of it, too."""
    parts, phase = orchestrator.parts, orchestrator.scheduler.current_phase()
    kernels = None if orchestrator.capture is None else _kernels(parts, orchestrator.capture, hook, phase)
    arithmetic = Arithmetic()
    with uncompiled(), arithmetic:
        run_hook(hook, phase, parts.workflow, parts.collector, parts.sources)
    peaks = {kind: peak_of(parts.collector.device, kind) for kind in arithmetic.operations}
    count, busy = kernels or (None, None)
    return UpdateCost(hook.name, arithmetic.operations, peaks, count, busy)


def _kernels(parts: RunParts, capture: HookCapture, hook: Hook, phase: Phase) -> tuple[int, float] | None:
    """Return how many kernels one replay launches, and how long they take; None where the driver does not tell."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    found: list[Any] = []
    replay = capture.run

    def watched(*arguments: Any) -> Any:
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            columns = replay(*arguments)
            torch.cuda.synchronize()
        found.extend(event for event in profiler.events() if event.device_type.name == "CUDA")
        return columns

    capture.run = watched  # type: ignore[method-assign, assignment]
    try:
        run_hook(hook, phase, parts.workflow, parts.collector, parts.sources, capture=capture)
    finally:
        capture.run = replay  # type: ignore[method-assign]
    if not found:
        return None
    return len(found), sum(event.time_range.elapsed_us() for event in found) * 1e-6


def peak_of(device: str, kind: str, *, repeats: int = 5) -> float:
    """Measure how many operations per second a large matrix product reaches here, with the settings of the run."""
    size = 1024 if device == "cpu" else 8192
    left = torch.ones(size, size, dtype=getattr(torch, kind), device=device)
    wait = device_wait(device) or (lambda: None)
    best = float("inf")
    for _ in range(repeats):
        wait()
        start = perf_counter()
        _ = products.product(left, left)  # as the run multiplies
        wait()
        best = min(best, perf_counter() - start)
    return 2.0 * size**3 / best
