"""CheckpointManager: a folder per checkpoint, a digest of every file it needs, the manifest written last.

A checkpoint is published by renaming a finished folder, so it is there completely or not at all. Replay history lies
beside the checkpoints in segments that are written once; a checkpoint lists the segments it needs.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from rl_lab.core.errors import RunError, UserError, shown
from rl_lab.orchestration.files import Files
from rl_lab.orchestration.state_files import decode, encode, read_json

FORMAT = 1
PACKAGES = ("rl-lab", "torch", "numpy", "gymnasium")
BEST = ("best", ".best.old")  # the best agent; the second name only while it is replaced
MAX_MANIFEST_BYTES = 16 * 2**20
_NUMBER = re.compile(r"\d{10}")
_SECTION_NAME = re.compile(r"[A-Za-z0-9_]+")
_REPLAY = ("segments", "pages")  # entries of a manifest
_BUFFER_NAME = re.compile(r"[\w-]+")
_SEGMENT_NAME = re.compile(r"\d{12}-[0-9a-f]{12}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_THREADS = 1_024
# Not the fault of a file: another day, or another user, may read it.
_UNREADABLE_NOW = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class CheckpointError(Exception):
    """A checkpoint that cannot be trusted."""


class History(Protocol):
    """Replay rows that never change any more, in segments cut by position, and what updates write, in pages of rows."""

    def segments(self) -> list[tuple[int, int]]:
        """Return (start, stop) of the complete segments that still hold living rows."""
        ...

    def read(self, start: int, stop: int) -> Mapping[str, Any]:
        """Return the columns of a segment."""
        ...

    def pages(self) -> list[tuple[int, int]]:
        """Return (start, stop) of blocks of rows that updates write to; the next save may find them changed."""
        ...

    def read_page(self, start: int, stop: int) -> Mapping[str, Any]:
        """Return the columns of a page."""
        ...


class Parts(Mapping[int, Any]):
    """Parts of a replay by their start, read from their files one at a time: memory may not hold all of them."""

    def __init__(
        self, entries: Sequence[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    ) -> None:
        self._entries, self._read = {entry["start"]: entry for entry in entries}, read

    def __getitem__(self, start: int) -> Mapping[str, Any]:
        return self._read(self._entries[start])

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class SavedHistory(NamedTuple):
    """The replay of a buffer as a checkpoint lists it."""

    segments: Parts
    pages: Parts


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    manifest: dict[str, Any]
    state: dict[str, Any]
    histories: dict[str, SavedHistory]  # of each buffer


class CheckpointManager:
    """Keeps the last checkpoints of a run in `folder`/checkpoints, replay segments and `best` beside them."""

    def __init__(
        self, folder: str | Path, *, keep: int = 2, files: Files | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        self.run_folder, self.folder, self.keep = Path(folder), Path(folder) / "checkpoints", keep
        self.files = Files() if files is None else files
        self.say = _complain if say is None else say
        self._segments: dict[str, dict[int, dict[str, Any]]] = {}  # buffer -> start -> entry of the manifest
        self.last_bytes = 0

    def save(
        self,
        number: int,
        state: Mapping[str, Any],
        facts: Mapping[str, Any],
        histories: Mapping[str, History] | None = None,
    ) -> Path:
        """Write a checkpoint; it appears under its number only when everything it needs is on the disk."""
        target = self.folder / f"{number:010d}"
        if target.name in self.files.names(self.folder):
            return target
        segments = {name: self._save_segments(name, history) for name, history in (histories or {}).items()}
        pages = {name: self._save_pages(name, history) for name, history in (histories or {}).items()}
        facts = {**facts, "segments": segments, "pages": pages, "parent": self._newest_name()}
        self._reveal(self._prepare(target, state, facts), target)
        self._segments = {name: {entry["start"]: entry for entry in entries} for name, entries in segments.items()}
        self._collect_garbage()
        return target

    def save_best(self, state: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
        """Replace the best agent; wherever this is cut short, the old one or the new one is found."""
        target, retired = self.run_folder / BEST[0], self.run_folder / BEST[1]
        temporary = self._prepare(target, state, facts)
        if target.name in self.files.names(self.run_folder):
            self.files.remove(retired)
            self.files.rename(target, retired)
        self._reveal(temporary, target)
        self.files.remove(retired)
        return target

    def load_best(self, max_bytes: int | None = None, sections: Collection[str] | None = None) -> Checkpoint | None:
        """Return the best agent, or None if there is none yet."""
        for attempts_left in (2, 1, 0):
            names = self.files.names(self.run_folder)
            found = next((name for name in BEST if name in names), None)
            if found is None:
                return None
            try:
                return self.load(self.run_folder / found, max_bytes, sections)
            except CheckpointError:
                if not attempts_left:  # before, its owner may just have replaced it
                    raise
        return None

    def save_agent(self, target: Path, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Write weights to a folder of their own."""
        self._reveal(self._prepare(target, state, facts), target)

    def numbered(self) -> list[Path]:
        """Return the published checkpoints, oldest first."""
        return [self.folder / name for name in self.files.names(self.folder) if _NUMBER.fullmatch(name)]

    def load_latest(self, max_bytes: int | None = None, sections: Collection[str] | None = None) -> Checkpoint | None:
        """Return the newest good checkpoint, or None if there is none; damaged ones are set aside.

        One who wants certain `sections` only is not the run itself, and moves nothing.
        """
        for path in reversed(self.numbered()):
            try:
                return self.load(path, max_bytes, sections)
            except CheckpointError as error:
                if path.name not in self.files.names(self.folder):  # its owner had no more use for it
                    return self.load_latest(max_bytes, sections)
                moved = f"it was set aside as {self._set_aside(path)}" if sections is None else "it is not set aside"
                self.say(f"warning: checkpoint {path.name} is damaged: {error}; {moved}")
        return None

    def _set_aside(self, path: Path) -> str:
        aside = path.with_name(f"{path.name}.corrupt")
        try:
            self.files.remove(aside)
            self.files.rename(path, aside)
        except OSError as error:
            raise RunError(f"checkpoint {path} is damaged and cannot be set aside: {error.strerror}") from None
        return aside.name

    def load(
        self,
        path: Path,
        max_bytes: int | None = None,
        sections: Collection[str] | None = None,
        *,
        replay: bool | None = None,
    ) -> Checkpoint:
        """Verify every file that a checkpoint needs, then read it. Nothing else is touched.

        With `sections`, only these are verified and read, and no replay unless `replay` says so.
        """
        try:
            checkpoint = self._load(path, max_bytes, sections, sections is None if replay is None else replay)
        except CheckpointError as error:
            raise CheckpointError(shown(str(error)[:200])) from None
        except UserError:
            raise
        except OSError as error:
            if error.errno in _UNREADABLE_NOW:
                raise RunError(f"checkpoint {path} cannot be read: {error.strerror}") from None
            name = Path(error.filename).name if isinstance(error.filename, (str, Path)) else "a file"
            raise CheckpointError(shown(f"{name}: {error.strerror or error}"[:200])) from None
        except Exception as error:  # whatever a hostile file can make a reader raise
            text = str(error).splitlines()
            raise CheckpointError(shown(text[0][:200]) if text else type(error).__name__) from None
        if path.parent == self.folder and sections is None:
            self._segments = {
                name: {entry["start"]: entry for entry in entries}
                for name, entries in checkpoint.manifest.get("segments", {}).items()
            }
        return checkpoint

    def _load(self, path: Path, max_bytes: int | None, wanted: Collection[str] | None, replay: bool) -> Checkpoint:
        manifest = self._read_manifest(path)
        files, sections = manifest["files"], manifest["sections"]
        expected = set(_files_of(sections))
        if set(files) != expected:
            raise CheckpointError("the manifest's list of files does not fit its sections")
        if strange := set(self.files.names(path)) ^ (expected | {"manifest.json"}):
            raise CheckpointError(f"{min(strange)} is missing, or does not belong there")
        segments, pages = (manifest.get(name, {}) if replay else {} for name in _REPLAY)
        if wanted is not None:
            if missing := set(wanted) - set(sections):
                raise CheckpointError(f"it lacks {', '.join(sorted(missing))}")
            sections = [section for section in sections if section in wanted]
        files = {name: files[name] for name in _files_of(sections)}
        parts = [entry for listed in (segments, pages) for entries in listed.values() for entry in entries]
        total = sum(entry["size"] for entry in (*files.values(), *parts))
        if max_bytes is not None and total > max_bytes:
            raise CheckpointError(f"it says that it has {total:,} bytes, more than the {max_bytes:,} this run can need")
        contents = {name: self._read_verified(path / name, entry) for name, entry in files.items()}
        state = {
            section: _decoded(section, contents[f"{section}.safetensors"], contents[f"{section}.json"])
            for section in sections
        }
        histories = {
            name: SavedHistory(
                *(Parts(own.get(name, ()), functools.partial(self._read_part, name)) for own in (segments, pages))
            )
            for name in segments
        }
        for saved in (part for history in histories.values() for part in history):
            for start in saved:  # verified now; read again when it is needed
                saved[start]
        return Checkpoint(path, manifest, state, histories)

    def _read_manifest(self, path: Path) -> dict[str, Any]:
        if self.files.size(path / "manifest.json") > MAX_MANIFEST_BYTES:
            raise CheckpointError("manifest.json is too large")
        data = self.files.read(path / "manifest.json")
        try:
            manifest = read_json(data)
        except (ValueError, RecursionError):
            manifest = None
        if not isinstance(manifest, dict):
            raise CheckpointError("manifest.json does not describe a checkpoint")
        manifest.pop("sha256", None)
        if _sealed(manifest) != data:  # to the byte: white space and order count, too
            raise CheckpointError("manifest.json does not match its digest")
        _check_manifest(manifest, path)
        return manifest

    def _read_verified(self, path: Path, entry: Mapping[str, Any]) -> bytes:
        if self.files.size(path) != entry["size"]:
            raise CheckpointError(f"{path.name} has another size than the manifest says")
        data = self.files.read(path)
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise CheckpointError(f"{path.name} does not match its digest")
        return data

    def _read_part(self, buffer: str, entry: Mapping[str, Any]) -> Any:
        data = self._read_verified(self._segment_folder(buffer) / entry["file"], entry)
        return _decoded(entry["file"], data, json.dumps(entry["columns"]).encode())

    def _save_segments(self, buffer: str, history: History) -> list[dict[str, Any]]:
        known = self._segments.get(buffer, {})
        folder = self._segment_folder(buffer)
        present = self.files.names(folder)
        segments = history.segments()
        missing = [(a, b) for a, b in segments if a not in known or known[a]["file"] not in present]
        if missing:
            self.files.make_folder(folder)
            known = known | {a: self._save_part(folder, a, history.read(a, b)) for a, b in missing}
            self.files.sync(folder, folder.parent)
            self._segments[buffer] = known  # written ones need not be written again if this checkpoint fails
        return [known[start] for start, _ in segments]

    def _save_pages(self, buffer: str, history: History) -> list[dict[str, Any]]:
        """Write the pages that changed: a file is named by what it holds."""
        pages, folder = history.pages(), self._segment_folder(buffer)
        if not pages:
            return []
        self.files.make_folder(folder)
        present = frozenset(self.files.names(folder))
        entries = [self._save_part(folder, a, history.read_page(a, b), present) for a, b in pages]
        self.files.sync(folder, folder.parent)
        return entries

    def _save_part(
        self, folder: Path, start: int, columns: Mapping[str, Any], present: Collection[str] = ()
    ) -> dict[str, Any]:
        data, plain = encode(columns)
        digest = hashlib.sha256(data).hexdigest()
        path = folder / f"{start:012d}-{digest[:12]}.safetensors"
        if path.name not in present:
            temporary = folder / f".{path.name}.tmp-{os.getpid()}"
            with self._nothing_left(temporary):
                self.files.write(temporary, data)
                self.files.sync(temporary)
                self.files.rename(temporary, path)
        return {"start": start, "file": path.name, "size": len(data), "sha256": digest, "columns": json.loads(plain)}

    def _segment_folder(self, buffer: str) -> Path:
        if not _BUFFER_NAME.fullmatch(buffer):  # it would lead out of the run folder
            raise CheckpointError(f"{buffer!r} is no name of a buffer")
        return self.run_folder / "replay" / buffer

    def _prepare(self, target: Path, state: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
        """Write a complete folder under a temporary name."""
        temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
        self.files.remove(temporary)
        with self._nothing_left(temporary):
            return self._write(temporary, state, facts)

    def _write(self, temporary: Path, state: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
        self.files.make_folder(temporary)
        described: dict[str, dict[str, Any]] = {}
        for section, value in state.items():
            tensors, plain = encode(value)
            for name, data in ((f"{section}.safetensors", tensors), (f"{section}.json", plain)):
                self.files.write(temporary / name, data)
                described[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest = {
            "format": FORMAT,
            "meta": {"created_at": datetime.now(UTC).isoformat(), "run_id": self.run_folder.name},
            "versions": _versions(),
            "threads": torch.get_num_threads(),
            **facts,
            "sections": list(state),
            "files": described,
        }
        data = _sealed(manifest)
        self.files.write(temporary / "manifest.json", data)
        self.files.sync(*(temporary / name for name in (*described, "manifest.json")), temporary)
        self.last_bytes = sum(entry["size"] for entry in described.values()) + len(data)
        return temporary

    def _reveal(self, temporary: Path, target: Path) -> None:
        """Give a complete folder its name, for good."""
        with self._nothing_left(temporary):
            self.files.rename(temporary, target)
        self.files.sync(target.parent)

    @contextmanager
    def _nothing_left(self, temporary: Path) -> Iterator[None]:
        """Remove what a disk that refuses has taken: the next save needs the room."""
        try:
            yield
        except OSError:
            with suppress(OSError):
                self.files.remove(temporary)
            raise

    def _newest_name(self) -> str | None:
        published = self.numbered()
        return published[-1].name if published else None

    def _collect_garbage(self) -> None:
        """Remove old checkpoints, what broken saves left, and segments that no kept checkpoint lists."""
        published = self.numbered()
        for old in published[: -self.keep]:
            self.files.remove(old)
        for folder, pattern in ((self.folder, _NUMBER), (self.run_folder, re.compile("best"))):
            for name in self.files.names(folder):
                stale = re.fullmatch(r"\.(.+)\.tmp-\d+", name)
                if stale and pattern.fullmatch(stale.group(1)):
                    self.files.remove(folder / name)
        listed: dict[str, set[str]] = {}
        for path in published[-self.keep :]:
            try:
                manifest = self._read_manifest(path)
            except (CheckpointError, UserError, OSError, ValueError, LookupError, TypeError, AttributeError):
                return  # a damaged one may list anything: remove nothing
            for buffer, entries in (entry for name in _REPLAY for entry in manifest.get(name, {}).items()):
                listed.setdefault(buffer, set()).update(entry["file"] for entry in entries)
        for buffer, names in listed.items():
            self._remove_unlisted(self._segment_folder(buffer), names)

    def _remove_unlisted(self, folder: Path, names: Iterable[str]) -> None:
        kept = set(names)
        for name in self.files.names(folder):
            if name not in kept:
                self.files.remove(folder / name)


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@functools.cache
def _versions() -> dict[str, str]:
    return {name: installed_version(name) for name in PACKAGES} | {"python": platform.python_version()}


def _decoded(name: str, tensors: bytes, plain: bytes) -> Any:
    try:
        return decode(tensors, plain)
    except Exception as error:  # whatever a hostile file can make a reader raise
        text = str(error).splitlines()
        raise CheckpointError(f"{name}: {text[0] if text else type(error).__name__}") from None


def installed_version(package: str) -> str:
    """Return the version of a package; one that is only on the path has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    """Write a manifest with the digest of itself."""
    digest = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1).encode()


def _files_of(sections: Iterable[str]) -> list[str]:
    return [f"{section}.{ending}" for section in sections for ending in ("safetensors", "json")]


def _check_manifest(manifest: Mapping[str, Any], path: Path) -> None:
    """Refuse a manifest that is not of the form that `CheckpointManager` writes; its digest proves nothing."""
    number = manifest.get("format")
    if type(number) is not int or number < 1:
        raise CheckpointError("manifest.json does not describe a checkpoint")
    if number > FORMAT:
        raise UserError(
            f"the checkpoint has format {number}, this rl-lab knows {FORMAT}",
            key=str(path),
            remedy="install a newer rl-lab",
        )
    sections, files = manifest["sections"], manifest["files"]
    segments, pages = (manifest.get(name, {}) for name in _REPLAY)
    well_formed = (
        all(_SECTION_NAME.fullmatch(section) for section in sections)
        and len(set(sections)) == len(sections)
        and all(_is_entry(entry) for entry in files.values())
        and all(_BUFFER_NAME.fullmatch(buffer) for buffer in (*segments, *pages))
        and set(pages) <= set(segments)
        and all(_is_part(entry) for own in (segments, pages) for entries in own.values() for entry in entries)
        and all(isinstance(text, str) for text in manifest["versions"].values())
        and type(manifest["threads"]) is int
        and 1 <= manifest["threads"] <= MAX_THREADS
    )
    if not well_formed:
        raise CheckpointError("manifest.json has an entry that is none")


def _is_entry(entry: Mapping[str, Any]) -> bool:
    return type(entry["size"]) is int and entry["size"] >= 0 and _DIGEST.fullmatch(entry["sha256"]) is not None


def _is_part(entry: Mapping[str, Any]) -> bool:
    is_position = type(entry["start"]) is int and entry["start"] >= 0
    return is_position and _is_entry(entry) and _SEGMENT_NAME.fullmatch(entry["file"]) is not None
