"""Loggers: where a run's numbers go (JSON lines, TensorBoard), and the running means between two records."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_lab.orchestration.files import Files

_PREFIXES = {
    "collect": "collect/",
    "update_world_model": "train/",
    "update_controller": "controller/",
    "evaluate": "eval/",
}


@dataclass(frozen=True, slots=True)
class Record:
    """One number at one step. A list of numbers is kept in the JSON lines only."""

    ts: float
    step: int  # env_steps
    key: str
    value: Any
    tags: Mapping[str, Any] = field(default_factory=dict)


def prefixed(hook: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Put the hook's prefix before the bare names; a name that has a prefix already keeps it."""
    return {_full_name(hook, name): value for name, value in metrics.items()}


@cache
def _full_name(hook: str, name: str) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError(f"'{hook}' returned a metric named {name!r}; names must be text")
    return name if "/" in name else _PREFIXES.get(hook, hook.removeprefix("update_") + "/") + name


def scalar(key: str, value: Any) -> float:
    """Return a metric's value as a float, or say by name what is wrong with it. Waits for the device."""
    if isinstance(value, Tensor):
        _check_tensor(key, value)
        return float(value.item())
    if isinstance(value, Real):  # Python's and NumPy's own numbers
        return float(value)
    if getattr(value, "shape", None) == () and getattr(value, "dtype", None) is not None and value.dtype.kind in "bfiu":
        return float(value)  # a NumPy array without dimensions
    raise ValueError(f"metric '{key}' is {_described(value)}; a metric is one number: a float or a 0-d tensor")


class MetricSums:
    """The mean of every metric since the last record.

    Numbers on a device are summed there and read once, in `drain`, so that adding never waits for the device.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[Any]] = {}  # key -> [sum on the host, total weight, sum on a device or None]

    def add(self, key: str, value: Any, weight: float = 1) -> None:
        """Add one number, counted `weight` times; a weight of 0 leaves no trace."""
        if type(value) is not float:
            if isinstance(value, Tensor) and not value.is_cpu:
                self._add_on_device(key, value, weight)
                return
            value = scalar(key, value)  # reading a tensor of the CPU waits for nothing and is cheaper than adding to it
        if weight <= 0:
            self._ignore(key, weight)
            return
        entry = self._sums.get(key)
        if entry is None:
            self._sums[key] = [value * weight, weight, None]
        else:
            entry[0] += value * weight
            entry[1] += weight

    def add_all(self, metrics: Mapping[str, Any], weight: float = 1) -> None:
        """Add every metric of a hook."""
        for key, value in metrics.items():
            self.add(key, value, weight)

    def drain(self) -> dict[str, float]:
        """Return the means in the order in which their keys came, and start again."""
        means = {key: total / weight for key, total, weight in self._read()}
        self._sums.clear()
        return means

    def get_state(self) -> list[list[Any]]:
        """Return [key, sum, weight] of every metric as plain data, in order; sums that are not finite as text."""
        return [[key, total if math.isfinite(total) else str(total), weight] for key, total, weight in self._read()]

    def set_state(self, state: Sequence[Sequence[Any]]) -> None:
        """Restore what `get_state` returned."""
        self._sums = {str(key): [float(total), weight, None] for key, total, weight in state}

    def __len__(self) -> int:
        return len(self._sums)

    def _add_on_device(self, key: str, value: Tensor, weight: float) -> None:
        _check_tensor(key, value)
        if weight <= 0:
            self._ignore(key, weight)
            return
        entry = self._sums.setdefault(key, [0.0, 0, None])
        if entry[2] is None:
            entry[2] = torch.zeros((), dtype=torch.float64, device=value.device)
        entry[2].add_(value.detach(), alpha=weight)  # a sum, not a list: a captured hook rewrites its metrics in place
        entry[1] += weight

    @staticmethod
    def _ignore(key: str, weight: float) -> None:
        if weight < 0:
            raise ValueError(f"metric '{key}' has weight {weight}; a weight must not be negative")

    def _read(self) -> list[tuple[str, float, float]]:
        on_device = {key: entry[2] for key, entry in self._sums.items() if entry[2] is not None}
        read: dict[str, float] = {}
        for device in {total.device for total in on_device.values()}:  # one wait for each device
            keys = [key for key, total in on_device.items() if total.device == device]
            read.update(zip(keys, torch.stack([on_device[key] for key in keys]).tolist(), strict=True))
        return [(key, host + read.get(key, 0.0), weight) for key, (host, weight, _) in self._sums.items()]


class JsonlLogger:
    """Appends records to a file, one JSON object per line and one `os.write` per call.

    A torn last line (the process was killed inside a write) is cut off when the file is opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._keys: dict[str, str] = {}  # encoded once
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        self._offset = _end_of_last_line(self._file, size)
        self._torn = self._offset < size  # whether there is more in the file than whole lines
        self._mend()
        if size == 0:
            Files().sync(self.path.parent)

    @property
    def offset(self) -> int:
        """The length of the file in bytes."""
        return self._offset

    def write(self, records: Sequence[Record]) -> None:
        """Append records."""
        if not records:
            return
        lines = []
        tags: Mapping[str, Any] | None = None
        tags_text = ""
        for record in records:
            if record.tags is not tags:  # the records of one step share their tags
                tags = record.tags
                tags_text = json.dumps(dict(tags), allow_nan=False)
            key = self._keys.get(record.key)
            if key is None:
                key = self._keys[record.key] = json.dumps(record.key)
            value = record.value
            if type(value) is float and math.isfinite(value):
                value_text, this_tags = repr(value), tags_text
            else:
                value_text, this_tags = _encoded(record, tags_text)
            ts = float(record.ts)
            lines.append(
                f'{{"ts": {ts!r}, "step": {record.step}, "key": {key}, "value": {value_text}, "tags": {this_tags}}}\n'
            )
        self._append("".join(lines).encode())

    def truncate(self, offset: int) -> None:
        """Cut the file to an offset that this logger reported earlier."""
        if not 0 <= offset <= self._offset:
            raise ValueError(f"cannot cut {self.path} to {offset} bytes: it has {self._offset}, so records were lost")
        if offset and os.pread(self._file, 1, offset - 1) != b"\n":
            raise ValueError(f"cannot cut {self.path} to {offset} bytes: no line ends there")
        os.ftruncate(self._file, offset)
        self._offset = offset

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, data: bytes) -> None:
        self._mend()
        self._torn = True
        written = 0
        try:
            while written < len(data):  # more than once only when the disk is full or a signal came
                written += os.write(self._file, data[written:])
        except OSError:
            with contextlib.suppress(OSError):  # a disk that refuses to write may refuse to cut; the next call does it
                self._mend()
            raise
        self._torn = False
        self._offset += written

    def _mend(self) -> None:
        """Cut off what is no whole line."""
        if self._torn:
            os.ftruncate(self._file, self._offset)
            self._torn = False


class TensorBoardLogger:
    """Writes scalars to a TensorBoard event file; lists are skipped.

    All numbers of one step go into one event, written without tensorboardX's queue and thread: a twentieth of the
    cost of `add_scalar`.
    """

    def __init__(self, folder: str | os.PathLike[str], purge_step: int | None = None) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._event, self._session, self._summary = event_pb2.Event, event_pb2.SessionLog, summary_pb2.Summary
        os.makedirs(folder, exist_ok=True)
        # tensorboardX names files by the second: without the suffix a quick restart would overwrite its predecessor.
        self._writer = EventsWriter(os.path.join(folder, "events"), f".{time.time_ns()}")
        self._flushed = time.monotonic()
        self._closed = False
        if purge_step is not None:
            self.forget(purge_step)

    def forget(self, step: int) -> None:
        """Let TensorBoard show nothing that was written from this step on."""
        start = self._session(status=self._session.START)
        self._writer.write_event(self._event(wall_time=time.time(), step=step, session_log=start))

    def write(self, records: Sequence[Record]) -> None:
        """Write records; consecutive ones of one step share an event."""
        values: list[Any] = []
        last: Record | None = None
        for record in records:
            if isinstance(record.value, (list, tuple)):
                continue
            if last is not None and record.step != last.step:
                self._write(last, values)
                values = []
            values.append(self._summary.Value(tag=record.key, simple_value=scalar(record.key, record.value)))
            last = record
        if last is not None:
            self._write(last, values)
        if time.monotonic() - self._flushed > 10:
            self.flush()

    def write_picture(self, tag: str, step: int, data: bytes, shape: Sequence[int]) -> None:
        """Write a PNG of this shape, [H, W, 3]."""
        height, width, channels = shape
        image = self._summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=data)
        summary = self._summary(value=[self._summary.Value(tag=tag, image=image)])
        self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Flush and close the file; a second call does nothing."""
        if not self._closed:
            self._writer.close()
            self._closed = True

    def _write(self, record: Record, values: list[Any]) -> None:
        summary = self._summary(value=values)
        self._writer.write_event(self._event(wall_time=record.ts, step=record.step, summary=summary))


def _check_tensor(key: str, value: Tensor) -> None:
    if value.ndim or value.dtype.is_complex:
        raise ValueError(f"metric '{key}' is {_described(value)}; a metric is one number: a float or a 0-d tensor")


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"a {type(value).__name__} of shape {tuple(shape)} and type {value.dtype}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:59] + '…'} ({type(value).__name__})"


def _encoded(record: Record, tags_text: str) -> tuple[str, str]:
    """Encode a value that is not an ordinary float. JSON has no nan or inf: they become null and a tag."""
    if isinstance(record.value, (list, tuple)):
        values = [scalar(record.key, value) for value in record.value]
        strange: Any = [str(value) for value in values if not math.isfinite(value)]
        text = json.dumps([value if math.isfinite(value) else None for value in values])
    elif type(record.value) is int:
        return str(record.value), tags_text
    else:
        value = scalar(record.key, record.value)
        strange = "" if math.isfinite(value) else str(value)
        text = "null" if strange else repr(value)
    return text, json.dumps({**record.tags, "nonfinite": strange}, allow_nan=False) if strange else tags_text


def _end_of_last_line(file: int, size: int) -> int:
    end = size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
