"""Files: the few calls through which a checkpoint reaches the disk. Tests put faults behind each of them."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path


class Files:
    """A folder tree on disk."""

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, data: bytes) -> None:
        """Write a new file; it may not be on the disk yet."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)

    def sync(self, path: Path) -> None:
        """Wait until a file, or the entries of a folder, are on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder its final name."""
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with everything in it; what is not there is no error."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def names(self, path: Path) -> list[str]:
        """Return the sorted names in a folder; none if it is not there."""
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: Path) -> int:
        """Return the size of a regular file; links, pipes and devices are refused."""
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        return status.st_size

    def read(self, path: Path) -> bytes:
        """Read a regular file without following links or waiting for pipes."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError(f"{path.name} is not a regular file")
            return file.read()

    def free_bytes(self, path: Path) -> int:
        """Return how much may still be written."""
        return shutil.disk_usage(path).free
