"""CheckpointManager: a directory per checkpoint, digests of every file, the manifest written last."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rl_lab.orchestration.state_files import decode, encode

FORMAT = 1
PACKAGES = ("rl-lab", "torch", "numpy", "gymnasium")


class Files:
    """The few calls through which a checkpoint reaches the disk."""

    def write(self, path: Path, data: bytes) -> None:
        """Write a new file and wait until it is on the disk."""
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents."""
        path.mkdir(parents=True, exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        """Give a folder its final name."""
        os.rename(source, target)

    def sync_folder(self, path: Path) -> None:
        """Wait until the entries of a folder are on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a folder with everything in it."""
        shutil.rmtree(path, ignore_errors=True)


class CheckpointManager:
    """Keeps the last checkpoints of a run under `folder`, and `best` beside them."""

    def __init__(self, folder: Path, *, keep: int = 2, files: Files | None = None) -> None:
        self.folder, self.keep = folder, keep
        self.files = Files() if files is None else files

    def save(self, number: int, state: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
        """Write a checkpoint; it appears under its number only when it is complete."""
        target = self.folder / f"{number:010d}"
        if target.exists():
            return target
        self._publish(target, state, facts)
        for old in self.numbered()[: -self.keep]:
            self.files.remove(old)
        return target

    def save_best(self, state: Mapping[str, Any], facts: Mapping[str, Any]) -> Path:
        """Replace the best agent."""
        target = self.folder.parent / "best"
        retired = self.folder.parent / f".best.old-{os.getpid()}"
        if target.exists():
            self.files.rename(target, retired)
        self._publish(target, state, facts)
        self.files.remove(retired)
        return target

    def numbered(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if path.name.isdecimal() and path.is_dir())

    def load_latest(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return (manifest, state) of the newest good checkpoint, or None if there is none."""
        for path in reversed(self.numbered()):
            try:
                return self.load(path)
            except CheckpointError as error:
                aside = path.with_name(f"{path.name}.corrupt")
                os.rename(path, aside)
                print(f"warning: checkpoint {path.name} is damaged ({error}); set aside as {aside.name}")
        return None

    @staticmethod
    def load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Verify every file of a checkpoint, then return (manifest, state)."""
        try:
            manifest = json.loads((path / "manifest.json").read_bytes())
            if manifest["format"] > FORMAT:
                raise CheckpointError(f"its format {manifest['format']} is newer than this version of rl-lab knows")
            contents: dict[str, bytes] = {}
            for name, expected in manifest["files"].items():
                data = (path / name).read_bytes()
                if len(data) != expected["size"] or hashlib.sha256(data).hexdigest() != expected["sha256"]:
                    raise CheckpointError(f"{name} does not match its digest")
                contents[name] = data
            state = {
                section: decode(contents[f"{section}.safetensors"], contents[f"{section}.json"])
                for section in manifest["sections"]
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(str(error)) from None
        return manifest, state

    def _publish(self, target: Path, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
        self.files.remove(temporary)
        self.files.make_folder(temporary)
        described: dict[str, dict[str, Any]] = {}
        for section, value in state.items():
            tensors, plain = encode(value)
            for name, data in ((f"{section}.safetensors", tensors), (f"{section}.json", plain)):
                self.files.write(temporary / name, data)
                described[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest = {
            "format": FORMAT,
            "created_at": datetime.now(UTC).isoformat(),
            "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
            "threads": torch.get_num_threads(),
            **facts,
            "sections": list(state),
            "files": described,
        }
        self.files.write(temporary / "manifest.json", json.dumps(manifest, indent=1).encode())
        self.files.sync_folder(temporary)
        self.files.rename(temporary, target)
        self.files.sync_folder(target.parent)


class CheckpointError(Exception):
    """A checkpoint that cannot be trusted."""
