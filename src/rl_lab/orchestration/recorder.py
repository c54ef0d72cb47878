"""Recorder: writes a run's numbers to its folder and shows them; a full disk delays records, never loses them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_lab.orchestration.dashboard import Dashboard, Status
from rl_lab.orchestration.loggers import JsonlLogger, Record, TensorBoardLogger
from rl_lab.orchestration.pictures import png, write_picture

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
        self._to_tensorboard(lambda events: events.write(records))

    def write_pictures(self, pictures: Mapping[str, Any], env_steps: int) -> None:
        """Write each picture to `pictures/` and to TensorBoard; of each name the newest are kept."""
        try:
            for name, pixels in pictures.items():
                data, shape = png(pixels), tuple(pixels.shape)
                write_picture(self.folder / "pictures", env_steps, name, data)
                if self._tensorboard is not None:
                    self._tensorboard.write_picture(f"eval/{name}", env_steps, data, shape)
        except OSError as error:
            self.warn(f"a picture could not be written: {error.strerror}; training goes on")

    def flush(self) -> None:
        """Write what is pending, if the disk takes it."""
        try:
            self._write_pending()
        except OSError as error:
            self.warn(f"metrics.jsonl cannot be written: {error.strerror}; the records are kept in memory")

    def sync(self) -> int:
        """Wait until the JSON lines are on the disk and return their length."""
        if self._jsonl is None:
            return 0
        self._write_pending()
        self._jsonl.sync()
        return self._jsonl.offset

    def _write_pending(self) -> None:
        if self._jsonl is not None and self._pending:
            self._jsonl.write(self._pending)
            self._pending = []

    def _to_tensorboard(self, write: Callable[[TensorBoardLogger], None]) -> None:
        if self._tensorboard is not None:
            try:
                write(self._tensorboard)
            except OSError as error:
                self._tensorboard = None
                self.warn(f"no more TensorBoard events: {error.strerror}")

    def truncate(self, offset: int, env_steps: int) -> None:
        """Cut the JSON lines back to a checkpoint. If somebody has shortened them meanwhile, the run goes on.

        TensorBoard, if its file is open, forgets what came after `env_steps`.
        """
        self._pending = []
        logger = self._jsonl or JsonlLogger(self.folder / "metrics.jsonl")
        if offset < 0:
            raise ValueError(f"a log cannot be cut to {offset} bytes")
        try:
            logger.truncate(offset)
        except ValueError as error:
            self.warn(f"{error}; the run goes on")
        if self._jsonl is None:
            logger.close()
        self._to_tensorboard(lambda events: events.forget(env_steps + 1))

    def warn(self, text: str) -> None:
        """Show a warning once, and keep it on the dashboard; without one it goes to standard error."""
        if text not in self.warnings:
            self.warnings.append(text)
            self.message(f"warning: {text}")
            if self.dashboard is None:
                print(f"warning: {text}", file=sys.stderr, flush=True)

    def message(self, text: str) -> None:
        """Say something to the person who watches."""
        if self.dashboard is not None:
            self.dashboard.message(text)

    def close(self) -> None:
        """Close everything."""
        for part in (self._jsonl, self._tensorboard, self.dashboard):
            if part is not None:
                with suppress(OSError):  # a full disk must not hide how the run ended
                    part.close()
        self._jsonl = self._tensorboard = None
