"""Parcel: arrays that travel to a device in one copy, through memory that is used again for the same shapes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes
_KEPT_BYTES, _KEPT_PARCELS = 2**20, 32  # larger parcels, and more kinds of them, are not kept

Content = tuple[tuple[int, ...], torch.dtype]  # shape and type of an entry


class Parcel:
    """Room for entries of given shapes and types, on the host and on a device."""

    def __init__(self, contents: Sequence[Content], device: torch.device) -> None:
        sizes = [int(np.prod(shape)) * kind.itemsize for shape, kind in contents]
        ends = list(itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        host = torch.zeros(ends[-1] if ends else 0, dtype=torch.uint8)
        self._host, self._there = host, torch.zeros_like(host, device=device)
        self._slots, self._entries = [], []
        for (shape, kind), start, size in zip(contents, [0, *ends[:-1]], sizes, strict=True):
            here = host[start : start + size].view(torch.int16 if kind == torch.bfloat16 else kind)
            self._slots.append(here.view(shape).numpy())
            self._entries.append(self._there[start : start + size].view(kind).view(shape))

    @property
    def num_bytes(self) -> int:
        """What it takes on each side."""
        return self._host.nbytes

    def send(self, arrays: Sequence[NDArray]) -> list[Tensor]:
        """Return the arrays (of bfloat16 the bits) on the device; the next parcel overwrites them.

        Nobody waits: from ordinary memory the copy is taken before this returns, and the device keeps the order.
        """
        for slot, array in zip(self._slots, arrays, strict=True):
            slot[...] = array
        self._there.copy_(self._host, non_blocking=True)
        return self._entries


class Post:
    """Sends parcels to a device and keeps the small ones for the next time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parcels: dict[tuple[Content, ...], Parcel] = {}

    def send(self, arrays: Sequence[NDArray], kinds: Sequence[torch.dtype]) -> list[Tensor]:
        """Return arrays as tensors of these types, until the next call."""
        contents = tuple((array.shape, kind) for array, kind in zip(arrays, kinds, strict=True))
        parcel = self._parcels.get(contents)
        if parcel is None:
            parcel = Parcel(contents, self._device)
            if parcel.num_bytes <= _KEPT_BYTES and len(self._parcels) < _KEPT_PARCELS:
                self._parcels[contents] = parcel
        return parcel.send(arrays)
