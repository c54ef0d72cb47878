"""A disk in memory behind the file layer: it can stop at any step, and lose what was not synced."""

from __future__ import annotations

import copy
import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

from rl_lab.orchestration.files import Files

PAGE = 64  # small, so that small files have several


class File:
    """What a file holds now, and what of it is on the disk for certain."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.synced: bytes | None = None

    def survive(self, rng: random.Random) -> File:
        """Return the file after a power failure."""
        before, kind = self.synced or b"", rng.randrange(4)
        if self.synced == self.data or kind == 0:
            data = before
        elif kind == 1:
            data = self.data
        elif kind == 2:  # the length is there, but only some pages
            pages = [self.data[i : i + PAGE] for i in range(0, len(self.data), PAGE)]
            data = b"".join(page if rng.random() < 0.5 else bytes(len(page)) for page in pages)
        else:
            data = self.data[: rng.randrange(len(self.data) + 1)]
        return _synced(File(data))


class Folder:
    """Names now, and the changes since they were synced: each is there completely or not at all, in any order."""

    def __init__(self) -> None:
        self.entries: dict[str, File | Folder] = {}
        self.synced: dict[str, File | Folder] = {}
        self.changes: list[dict[str, File | Folder | None]] = []

    def change(self, change: dict[str, File | Folder | None]) -> None:
        """Set and remove names."""
        self.changes.append(change)
        _apply(self.entries, change)

    def sync(self) -> None:
        """Make sure of everything so far."""
        self.synced, self.changes = dict(self.entries), []

    def survive(self, rng: random.Random) -> Folder:
        """Return the folder after a power failure."""
        kept = [change for change in self.changes if rng.random() < 0.5]
        rng.shuffle(kept)
        entries = dict(self.synced)
        for change in kept:
            _apply(entries, change)
        folder = Folder()
        folder.entries = {name: node.survive(rng) for name, node in entries.items()}
        folder.sync()
        return folder


def _apply(entries: dict[str, File | Folder], change: dict[str, File | Folder | None]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _synced(file: File) -> File:
    file.synced = file.data
    return file


class Disk(Files):
    """A file layer in memory. `before_step` is called before everything that changes something, and may raise."""

    def __init__(self, root: Folder | None = None) -> None:
        self.root = Folder() if root is None else root
        self.before_step: Callable[[str], None] = lambda name: None
        self.free = 10**9

    def copy(self) -> Disk:
        """Return an independent disk with the same contents and the same uncertainty."""
        return Disk(copy.deepcopy(self.root))

    def after_power_failure(self, rng: random.Random) -> Disk:
        """Return a disk on which what was not synced is there, not there, or there in part."""
        return Disk(self.root.survive(rng))

    def make_folder(self, path: Path) -> None:
        folder = self.root
        for part in path.parts[1:]:
            if part not in folder.entries:
                self.before_step(f"make {path}")
                folder.change({part: Folder()})
                if part != path.name:
                    self.before_step(f"sync above {path}")
                    folder.sync()
            folder = self._folder_in(folder, part, path)

    def write(self, path: Path, data: bytes) -> None:
        parent = self._folder(path.parent)
        self.before_step(f"create {path}")
        file = parent.entries.get(path.name)
        if not isinstance(file, File):
            file = File(b"")
            parent.change({path.name: file})
        file.data = bytes(data[: len(data) // 2])
        self.before_step(f"write {path}")
        file.data = bytes(data)

    def sync(self, *paths: Path) -> None:
        for path in paths:
            self.before_step(f"sync {path}")
            node = self._node(path)
            if isinstance(node, Folder):
                node.sync()
            else:
                _synced(node)

    def rename(self, source: Path, target: Path) -> None:
        assert source.parent == target.parent
        self.before_step(f"rename {source} to {target}")
        parent, node = self._folder(source.parent), self._node(source)
        there = parent.entries.get(target.name)
        if isinstance(there, Folder) and there.entries:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(target))
        parent.change({source.name: None, target.name: node})

    def remove(self, path: Path) -> None:
        try:
            node = self._node(path)
        except FileNotFoundError:
            return
        if isinstance(node, Folder):
            for name in list(node.entries):
                self.remove(path / name)
        self.before_step(f"remove {path}")
        self._folder(path.parent).change({path.name: None})

    def names(self, path: Path) -> list[str]:
        try:
            return sorted(self._folder(path).entries)
        except FileNotFoundError:
            return []

    def size(self, path: Path) -> int:
        return len(self._file(path).data)

    def read(self, path: Path) -> bytes:
        return self._file(path).data

    def free_bytes(self, path: Path) -> int:
        return self.free

    def _node(self, path: Path) -> File | Folder:
        node: File | Folder = self.root
        for part in path.parts[1:]:
            if not isinstance(node, Folder) or part not in node.entries:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            node = node.entries[part]
        return node

    def _folder(self, path: Path) -> Folder:
        return self._folder_in(None, "", path)

    def _folder_in(self, parent: Folder | None, name: str, path: Path) -> Folder:
        node = self._node(path) if parent is None else parent.entries[name]
        if not isinstance(node, Folder):
            raise FileNotFoundError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        return node

    def _file(self, path: Path) -> File:
        node = self._node(path)
        if not isinstance(node, File):
            raise ValueError(f"{path.name} is not a regular file")
        return node
