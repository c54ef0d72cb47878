"""DiskStorage: columns in memory-mapped files, for a replay that is larger than the memory.

The files have no names: however a process ends, nothing of them is left. A run comes back from the segments of its
checkpoint, as it does with every other storage.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from rl_lab.core.errors import UserError
from rl_lab.data.storage import HostStorage


class DiskStorage(HostStorage):
    """Arrays whose memory is a file in `folder`; the system keeps in memory what was used last."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def new_file(self) -> IO[bytes]:
        """Return an empty file without a name."""
        try:
            return tempfile.TemporaryFile(dir=self.folder)
        except OSError as error:
            raise UserError(
                f"the replay cannot be written to this folder: {error.strerror or error}",
                key="folder",
                value=str(self.folder),
                remedy="name a folder that is there and that you may write to",
            ) from None

    def _zeros(self, shape: tuple[int, ...], kind: np.dtype[Any]) -> NDArray[Any]:
        num_bytes = max(int(np.prod(shape, dtype=np.int64)) * kind.itemsize, 1)
        try:
            with self.new_file() as file:
                # Room for all rows now: a disk that is full later would end the process without a word.
                _reserve(file.fileno(), num_bytes)
                mapped = mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            free = None
            with contextlib.suppress(OSError):
                free = shutil.disk_usage(self.folder).free
            room = "" if free is None else f"; {free:,} bytes are free"
            raise UserError(
                f"no room for {num_bytes:,} bytes of replay: {error.strerror or error}{room}",
                key="folder",
                value=str(self.folder),
                remedy="name a folder on a larger disk, or lower capacity",
            ) from None
        return np.ndarray(shape, kind, buffer=mapped)


def _reserve(descriptor: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    else:
        os.ftruncate(descriptor, num_bytes)
