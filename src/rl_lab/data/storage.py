"""Storage: a column is an array with one entry per ring row, in host memory (NumPy) or on a device (torch)."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_lab.data.parcel import Post

Column = Any  # np.ndarray or Tensor, [num_rows, ...]
Rows = Any  # flat row numbers, int64: np.ndarray or Tensor
BFLOAT16 = np.dtype([("bfloat16", np.int16)])  # NumPy has no such type: the bits, under its name


class Storage(Protocol):
    """What a ring needs of the memory that its columns lie in.

    Additions (`put`, `fill`) take row numbers on the host and are there after `flush`; everything else takes what
    `index` returned.
    """

    def index(self, rows: Rows) -> Rows:
        """Bring row numbers to where the columns are."""
        ...

    def flush(self) -> None:
        """Finish the additions so far."""
        ...

    def allocate(self, num_rows: int, values: Tensor, num_leading: int) -> Column:
        """Return zeros for rows like those of `values`, whose first `num_leading` dimensions are not of a row."""
        ...

    def put(
        self,
        name: str,
        column: Column,
        rows: NDArray[np.int64],
        values: Tensor,
        keep: NDArray[np.bool_] | None = None,
    ) -> None:
        """Write distinct rows; `keep` says which of the values, in order, are wanted."""
        ...

    def fill(self, column: Column, rows: NDArray[np.int64], value: float) -> None:
        """Write one value to whole rows."""
        ...

    def take(self, column: Column, rows: Rows, device: torch.device) -> Tensor:
        """Read rows of any shape: [*rows.shape, ...] on a device."""
        ...

    def stage(self, column: Column, rows: Rows, device: torch.device) -> Tensor:
        """Read rows as `take` does, but leave them where their way to the device begins; a thread may do this."""
        ...

    def overwrite(self, name: str, column: Column, rows: Rows, values: Tensor) -> None:
        """Write rows that may repeat: of equal ones the last wins."""
        ...

    def export(self, column: Column, start: int, stop: int) -> Column:
        """Return a copy of consecutive rows in host memory."""
        ...


class HostStorage:
    """NumPy arrays: indexing images in torch measured nine times slower."""

    def index(self, rows: Rows) -> NDArray[np.int64]:
        """Bring row numbers to the host."""
        return rows.numpy(force=True) if isinstance(rows, Tensor) else rows

    def flush(self) -> None:
        """Additions are made at once."""

    def allocate(self, num_rows: int, values: Tensor, num_leading: int) -> NDArray[Any]:
        """Return zeros of the same type; pages are touched only as rows arrive."""
        array = _as_array(values)
        return self._zeros((num_rows, *array.shape[num_leading:]), array.dtype)

    def put(
        self,
        name: str,
        column: NDArray[Any],
        rows: NDArray[np.int64],
        values: Tensor,
        keep: NDArray[np.bool_] | None = None,
    ) -> None:
        """Write distinct rows."""
        array = _checked(name, _as_array(values), column)
        _bits(column)[rows] = _bits(array if keep is None else array[keep])

    def fill(self, column: NDArray[Any], rows: NDArray[np.int64], value: float) -> None:
        """Write one value to whole rows."""
        column[rows] = value

    def take(self, column: NDArray[Any], rows: NDArray[np.int64], device: torch.device) -> Tensor:
        """Read rows of any shape."""
        return sent(self.stage(column, rows, device), device)

    def stage(self, column: NDArray[Any], rows: NDArray[np.int64], device: torch.device) -> Tensor:
        """Read rows of any shape into memory that the device can fetch them from."""
        bits = _bits(column)
        if device.type == "cuda":
            kind = torch.from_numpy(bits[:0]).dtype
            values = torch.empty((*rows.shape, *bits.shape[1:]), dtype=kind, pin_memory=True)
            bits.take(rows, axis=0, out=values.numpy(), mode="clip")  # the usual mode would copy twice
        else:
            values = torch.from_numpy(bits.take(rows, axis=0))
        return values.view(torch.bfloat16) if column.dtype == BFLOAT16 else values

    def overwrite(self, name: str, column: NDArray[Any], rows: NDArray[np.int64], values: Tensor) -> None:
        """Write rows that may repeat."""
        array = _checked(name, _as_array(values), column)
        _bits(column)[rows.reshape(-1)] = _bits(array)[last_of_equal(rows.reshape(-1))]

    def export(self, column: NDArray[Any], start: int, stop: int) -> NDArray[Any] | Tensor:
        """Return a copy of consecutive rows; of bfloat16, which NumPy cannot name, as a tensor."""
        copy = _bits(column)[start:stop].copy()
        return torch.from_numpy(copy).view(torch.bfloat16) if column.dtype == BFLOAT16 else copy

    def _zeros(self, shape: tuple[int, ...], kind: np.dtype[Any]) -> NDArray[Any]:
        return np.zeros(shape, kind)


class DeviceStorage:
    """Torch tensors. Nothing here asks the host or changes a shape, so that gathering and writing back capture.

    Additions wait on the host and travel together: one copy for a step instead of one for every column, and nobody
    waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._post = device, Post(device)
        self._waiting: list[tuple[Tensor, NDArray[np.int64], NDArray[Any] | float]] = []

    def index(self, rows: Rows) -> Tensor:
        """Bring row numbers to the device."""
        return torch.as_tensor(rows).to(self.device)

    def allocate(self, num_rows: int, values: Tensor, num_leading: int) -> Tensor:
        """Return zeros of the same type."""
        return torch.zeros((num_rows, *values.shape[num_leading:]), dtype=values.dtype, device=self.device)

    def put(
        self,
        name: str,
        column: Tensor,
        rows: NDArray[np.int64],
        values: Tensor,
        keep: NDArray[np.bool_] | None = None,
    ) -> None:
        """Write distinct rows."""
        _check(name, values, column)
        array = _bits(_as_array(values)).reshape(-1, *column.shape[1:])
        self._waiting.append((column, rows, array if keep is None else array[keep]))

    def fill(self, column: Tensor, rows: NDArray[np.int64], value: float) -> None:
        """Write one value to whole rows."""
        self._waiting.append((column, rows, value))

    def flush(self) -> None:
        """Send what waits, in one copy, and write it in the order in which it came."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        arrays: dict[int, NDArray[Any]] = {}  # by identity: columns share their row numbers
        kinds: dict[int, torch.dtype] = {}
        for column, rows, values in waiting:
            arrays[id(rows)], kinds[id(rows)] = rows, torch.int64
            if isinstance(values, np.ndarray):
                arrays[id(values)], kinds[id(values)] = values, column.dtype
        sent = dict(zip(arrays, self._post.send(list(arrays.values()), list(kinds.values())), strict=True))
        for column, rows, values in waiting:
            if isinstance(values, np.ndarray):
                column.index_copy_(0, sent[id(rows)], sent[id(values)])
            else:
                column.index_fill_(0, sent[id(rows)], values)

    def take(self, column: Tensor, rows: Tensor, device: torch.device) -> Tensor:
        """Read rows of any shape."""
        return column.index_select(0, rows.reshape(-1)).reshape(*rows.shape, *column.shape[1:]).to(device)

    def stage(self, column: Tensor, rows: Tensor, device: torch.device) -> Tensor:
        """Read rows; they are on a device already."""
        return self.take(column, rows, self.device)

    def overwrite(self, name: str, column: Tensor, rows: Tensor, values: Tensor) -> None:
        """Write rows that may repeat; equal rows write equal values, so that their order cannot matter."""
        flat = rows.reshape(-1)
        order = torch.argsort(flat, stable=True)
        last = order[torch.searchsorted(flat[order], flat, right=True) - 1]
        column.index_copy_(0, flat, _checked(name, values.detach().to(self.device), column)[last])

    def export(self, column: Tensor, start: int, stop: int) -> Tensor:
        """Return a copy of consecutive rows in host memory."""
        return column[start:stop].to("cpu", copy=True)


def sent(staged: Tensor, device: torch.device) -> Tensor:
    """Return staged rows on a device; nobody waits while they travel from pinned memory."""
    return staged if device.type == "cpu" else staged.to(device, non_blocking=staged.is_pinned())


def _as_array(values: Tensor) -> NDArray[Any]:
    """Return a tensor as an array, of bfloat16 the bits."""
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy(force=True).view(BFLOAT16)
    return values.numpy(force=True)


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as one of a plain type, which NumPy copies faster."""
    return array.view(np.int16) if array.dtype == BFLOAT16 else array


def last_of_equal(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each entry where its row number occurs last: NumPy promises no order for repeated assignments."""
    order = np.argsort(rows, kind="stable")
    return order[np.searchsorted(rows[order], rows, side="right") - 1]


def _checked(name: str, values: Any, column: Any) -> Any:
    """Return values as [-1, *row shape]."""
    _check(name, values, column)
    return values.reshape(-1, *column.shape[1:])


def _check(name: str, values: Any, column: Any) -> None:
    """Refuse what a write would silently cast or broadcast."""
    row_shape = column.shape[1:]
    if values.dtype != column.dtype or values.shape[values.ndim - len(row_shape) :] != row_shape:
        raise ValueError(
            f"column '{name}' of {_type_name(column)} rows {tuple(row_shape)} cannot take values "
            f"of {_type_name(values)} with shape {tuple(values.shape)}"
        )


def _type_name(values: Any) -> str:
    return "bfloat16" if values.dtype == BFLOAT16 else str(values.dtype).removeprefix("torch.")
