"""Precision: networks that compute in bfloat16; whatever is between them stays in float32.

Products and convolutions take half the memory traffic and, on a GPU, tensor cores. Weights, moments, losses, targets
and what one network gives to the next are float32, in every algorithm, because each network hands its answer back so.
Only who asks a network with bfloat16 (`as_computed`) gets its answer as it was computed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def compute_in_bfloat16(parts: Iterable[Any], device: str) -> None:
    """Let the modules among these parts, and the modules in them, compute in bfloat16."""
    kind = torch.device(device).type
    for part in parts:
        for module in part.modules() if isinstance(part, nn.Module) else ():
            cls: Any = type(module)
            of_torch = module is not part and cls.__module__.startswith("torch.nn.")  # a layer inside a network
            if not of_torch and not issubclass(cls, Lowered) and cls.forward is not nn.Module.forward:
                module.__class__ = lowered(cls, kind)


class Lowered:
    """Marks the classes that compute in bfloat16."""


@functools.cache
def lowered(kind: Any, device: str) -> Any:
    """Return the class whose `forward` computes in bfloat16 and answers in the type of the question; copies keep it."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Without the cache of converted weights: a captured graph must convert the weights of its own replay.
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            answer = kind.forward(self, *args, **kwargs)
        return answer if _is_bfloat16(args) else _in_float32(answer)

    return type(kind.__name__, (kind, Lowered), {"forward": forward, "__module__": kind.__module__})


def as_computed(values: Tensor, network: Any) -> Tensor:
    """Return values in the type that a network would convert them to, for plans that ask it many times."""
    return values.bfloat16() if isinstance(network, Lowered) else values


def _is_bfloat16(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.bfloat16


def _in_float32(answer: Any) -> Any:
    if isinstance(answer, Tensor):
        return answer.float() if answer.dtype == torch.bfloat16 else answer
    if isinstance(answer, dict):
        return {name: _in_float32(entry) for name, entry in answer.items()}
    if isinstance(answer, tuple):
        entries = [_in_float32(entry) for entry in answer]
        return type(answer)(*entries) if hasattr(answer, "_fields") else tuple(entries)
    return answer
