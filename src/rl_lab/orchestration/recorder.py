"""Recorder: writes a run's numbers to its folder and shows them; a full disk delays records, never loses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_lab.orchestration.dashboard import Dashboard, Status
from rl_lab.orchestration.loggers import JsonlLogger, Record, TensorBoardLogger

Warn = Callable[[str], None]


class Recorder:
    """The JSON lines, the TensorBoard events and the dashboard of one run."""

    def __init__(self, folder: Path, *, tensorboard: bool, dashboard: Dashboard | None) -> None:
        self.folder, self.dashboard = folder, dashboard
        self.warnings: list[str] = []
        self._wants_tensorboard = tensorboard
        self._jsonl: JsonlLogger | None = None
        self._tensorboard: TensorBoardLogger | None = None
        self._pending: list[Record] = []  # what the disk would not take yet

    def open(self, status: Status, *, env_steps: int, resumed: bool) -> None:
        """Begin to write; TensorBoard forgets what came after `env_steps` in an earlier session."""
        self._jsonl = JsonlLogger(self.folder / "metrics.jsonl")
        if self._wants_tensorboard:
            try:
                self._tensorboard = TensorBoardLogger(self.folder / "tensorboard", env_steps + 1 if resumed else None)
            except OSError as error:
                self.warn(f"no TensorBoard events: {error.strerror}")
        if self.dashboard is not None:
            self.dashboard.start(status)

    def write(self, metrics: Mapping[str, Any], env_steps: int, tags: Mapping[str, Any]) -> None:
        """Write one record per metric."""
        now = time.time()
        records = [Record(now, env_steps, key, value, tags) for key, value in metrics.items()]
        self._pending += records
        self.flush()
        if self._tensorboard is not None:
            try:
                self._tensorboard.write(records)
            except OSError as error:
                self._tensorboard = None
                self.warn(f"no more TensorBoard events: {error.strerror}")

    def flush(self) -> bool:
        """Write what is pending; False if the disk still refuses."""
        if self._jsonl is None or not self._pending:
            return True
        try:
            self._jsonl.write(self._pending)
        except OSError as error:
            self.warn(f"metrics.jsonl cannot be written: {error.strerror}; the records are kept in memory")
            return False
        self._pending = []
        return True

    def sync(self) -> int:
        """Wait until the JSON lines are on the disk and return their length."""
        if self._jsonl is None:
            return 0
        if not self.flush():
            raise OSError(28, "No space left on device", str(self.folder / "metrics.jsonl"))
        self._jsonl.sync()
        return self._jsonl.offset

    def truncate(self, offset: int) -> None:
        """Cut the JSON lines back to a checkpoint; call before `open`."""
        path = self.folder / "metrics.jsonl"
        if path.exists():
            logger = self._jsonl or JsonlLogger(path)
            logger.truncate(offset)
            if self._jsonl is None:
                logger.close()

    def warn(self, text: str) -> None:
        """Show a warning once, and keep it on the dashboard."""
        if text not in self.warnings:
            self.warnings.append(text)
            self.message(f"warning: {text}")

    def message(self, text: str) -> None:
        """Say something to the person who watches."""
        if self.dashboard is not None:
            self.dashboard.message(text)

    def close(self) -> None:
        """Close everything."""
        for part in (self._jsonl, self._tensorboard, self.dashboard):
            if part is not None:
                part.close()
        self._jsonl = self._tensorboard = None
