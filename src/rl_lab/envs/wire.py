"""What a pool and its workers say to each other: frames of a JSON header and raw arrays, over a stream socket.

A frame is the lengths of both parts, then the parts. Nothing that is read here can name code or hold objects.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

_LENGTHS = struct.Struct("<II")
_MAX_HEADER, _MAX_PAYLOAD = 1 << 26, 1 << 30  # a worker that went mad shall not fill the memory
_PLAIN = "biuf"  # kinds of arrays that travel: booleans and numbers

Entry = tuple[list[str], str | None, list[Any]]  # of an info: path, dtype, shape; or path, None, values


class WireError(Exception):
    """What the other side sent is not a frame."""


def encode(header: Mapping[str, Any]) -> bytes:
    """Return a header's bytes, padded so that the arrays behind it are aligned."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def send(connection: socket.socket, header: bytes, arrays: Sequence[np.ndarray] = ()) -> None:
    """Send one frame in one system call where that is possible; the arrays are contiguous."""
    parts = [_LENGTHS.pack(len(header), sum(array.nbytes for array in arrays)), header, *arrays]
    sent = connection.sendmsg(parts)
    total = _LENGTHS.size + len(header) + sum(array.nbytes for array in arrays)
    if sent < total:
        connection.sendall(memoryview(b"".join(memoryview(part) for part in parts))[sent:])


class Reader:
    """Reads frames into one buffer that is kept: what `read` returned is valid until the next call."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.buffer = bytearray(1 << 16)

    def read(self) -> tuple[bytes, int, int]:
        """Return a frame's header, and where in `buffer` its arrays begin and end."""
        have = self._receive(0)
        while have < _LENGTHS.size:
            have += self._receive(have)
        header_length, payload_length = _LENGTHS.unpack_from(self.buffer)
        if header_length > _MAX_HEADER or payload_length > _MAX_PAYLOAD:
            raise WireError(f"a frame of {header_length} and {payload_length} bytes")
        start = _LENGTHS.size + header_length
        end = start + payload_length
        if end >= len(self.buffer):  # one byte more than a frame, so that too long an answer is seen
            self.buffer = self.buffer[:have] + bytearray(end + 1 - have)
        while have < end:
            have += self._receive(have)
        if have > end:
            raise WireError(f"{have - end} bytes behind the end of an answer")
        return bytes(self.buffer[_LENGTHS.size : start]), start, end

    def arrays(self, layout: Iterable[Sequence[Any]], start: int, end: int) -> list[np.ndarray]:
        """Return views of the arrays of a frame; `layout` is a dtype and a shape for each."""
        views = []
        for code, shape in layout:
            dtype = np.dtype(code)
            if dtype.kind not in _PLAIN:
                raise WireError(f"arrays of type {code} do not travel")
            view = np.ndarray(tuple(shape), dtype, self.buffer, start)
            start += view.nbytes
            views.append(view)
        if start != end:
            raise WireError("the arrays and the length of an answer disagree")
        return views

    def _receive(self, have: int) -> int:
        with memoryview(self.buffer) as view:
            count = self._connection.recv_into(view[have:])
        if not count:
            raise EOFError("the connection was closed")
        return count


def layout_of(arrays: Iterable[np.ndarray]) -> list[list[Any]]:
    """Return dtype and shape of each array, as a header tells them."""
    return [[array.dtype.str, list(array.shape)] for array in arrays]


def leaf_spaces(space: spaces.Space) -> list[spaces.Space]:
    """Return the spaces of the arrays in an observation, in the order in which they travel."""
    if isinstance(space, spaces.Dict):
        return [leaf for entry in space.values() for leaf in leaf_spaces(entry)]
    return [space]


def leaves(space: spaces.Space, tree: Any) -> list[Any]:
    """Return the arrays of an observation in the order of `leaf_spaces`."""
    if isinstance(space, spaces.Dict):
        return [leaf for key, entry in space.items() for leaf in leaves(entry, tree[key])]
    return [tree]


def tree_of(space: spaces.Space, arrays: Iterator[np.ndarray]) -> Any:
    """Return the observation whose `leaves` these are."""
    if isinstance(space, spaces.Dict):
        return {key: tree_of(entry, arrays) for key, entry in space.items()}
    return next(arrays)


def told_space(space: spaces.Space) -> dict[str, Any]:
    """Describe a space of the seam in JSON values."""
    if isinstance(space, spaces.Dict):
        return {"entries": [[key, told_space(entry)] for key, entry in space.items()]}
    if isinstance(space, spaces.Discrete):
        return {"n": int(space.n), "start": int(space.start)}
    bounds = [
        bound.flat[0].item() if (bound == bound.flat[0]).all() else bound.tolist() for bound in (space.low, space.high)
    ]
    return {"dtype": space.dtype.str, "shape": list(space.shape), "bounds": bounds}


def space_of(told: Mapping[str, Any]) -> spaces.Space:
    """Return the space that `told_space` described."""
    if "entries" in told:
        return spaces.Dict({key: space_of(entry) for key, entry in told["entries"]})
    if "n" in told:
        return spaces.Discrete(told["n"], start=told["start"])
    dtype, shape = np.dtype(told["dtype"]), tuple(told["shape"])
    low, high = (np.broadcast_to(np.array(bound, dtype), shape) for bound in told["bounds"])
    return spaces.Box(low, high, dtype=dtype.type)


def told_infos(infos: Mapping[str, Any]) -> tuple[list[Entry], list[np.ndarray]]:
    """Describe what environments said besides: entries for the header, and the arrays of numbers among them.

    Texts and lists travel in the header; what JSON cannot hold stays behind.
    """
    entries: list[Entry] = []
    arrays: list[np.ndarray] = []
    for path, values in _flat(infos, []):
        if values.dtype.kind in _PLAIN:
            values = np.ascontiguousarray(values)
            entries.append((path, values.dtype.str, list(values.shape)))
            arrays.append(values)
            continue
        try:
            json.dumps(values.tolist())
        except (TypeError, ValueError):
            continue
        entries.append((path, None, values.tolist()))
    return entries, arrays


def infos_of(entries: Iterable[Entry], arrays: Iterator[np.ndarray]) -> dict[str, Any]:
    """Return the infos that `told_infos` described."""
    infos: dict[str, Any] = {}
    for path, code, values in entries:
        parent = infos
        for key in path[:-1]:
            parent = parent.setdefault(key, {})
        if code is None:
            column = np.full(len(values), None, dtype=object)
            for row, value in enumerate(values):
                column[row] = value
            parent[path[-1]] = column
        else:
            parent[path[-1]] = next(arrays)
    return infos


def merge_infos(merged: dict[str, Any], rows: Sequence[int], infos: Mapping[str, Any], num_rows: int) -> None:
    """Copy the infos of some rows into those of all, as Gymnasium's vector environments group them."""
    for key, values in infos.items():
        if isinstance(values, Mapping):
            merge_infos(merged.setdefault(key, {}), rows, values, num_rows)
            continue
        if key not in merged:
            fill = None if values.dtype == object else 0
            merged[key] = np.full((num_rows, *values.shape[1:]), fill, dtype=values.dtype)
        merged[key][rows] = values


def _flat(infos: Mapping[str, Any], path: list[str]) -> Iterator[tuple[list[str], np.ndarray]]:
    for key, values in infos.items():
        if isinstance(values, Mapping):
            yield from _flat(values, [*path, str(key)])
        elif isinstance(values, np.ndarray):
            yield [*path, str(key)], values
