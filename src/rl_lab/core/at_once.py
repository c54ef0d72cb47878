"""Two halves of an update that do not need each other: on a GPU the kernels of both run at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

First = TypeVar("First")
Second = TypeVar("Second")


class AtOnce:
    """Runs two functions; on a GPU the second one on a stream of its own, where autograd then goes back through it.

    What the second one reads must live until the update ends: memory that one stream gives back may be written anew
    before the other has read it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
        """Return both answers."""
        if self._stream is None:
            return first(), second()
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        answer = first()
        with torch.cuda.stream(self._stream):
            other = second()
        here.wait_stream(self._stream)
        return answer, other
