"""Files: the few calls through which a checkpoint reaches the disk. Tests put faults behind each of them."""

from __future__ import annotations

import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


class Files:
    """A folder tree on disk."""

    def make_folder(self, path: Path) -> None:
        """Create a folder. The names of its parents are on the disk, its own after the next `sync` of its parent."""
        if not path.parent.is_dir():
            self.make_folder(path.parent)
            self.sync(path.parent.parent)
        path.mkdir(exist_ok=True)

    def write(self, path: Path, data: bytes) -> None:
        """Write a new file; it may not be on the disk yet."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)

    def sync(self, *paths: Path) -> None:
        """Wait until files, and the entries of folders, are on the disk. Together they take little longer than one."""
        if len(paths) == 1:
            _sync(paths[0])
            return
        with ThreadPoolExecutor(max(len(paths), 1)) as threads:
            list(threads.map(_sync, paths))

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder its final name."""
        os.rename(source, target)

    def replace(self, path: Path, data: bytes) -> None:
        """Write a file that is there completely, in its old or its new form, whatever happens."""
        temporary = path.with_name(f".{path.name}.tmp")
        self.write(temporary, data)
        self.sync(temporary)
        self.rename(temporary, path)
        self.sync(path.parent)

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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
