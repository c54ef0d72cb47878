"""Prefetch: the rows of the next batch are read in a thread while an update runs on this one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

MIN_BYTES = 2**20  # of a batch: below, handing it to a thread takes longer than reading it


class Prefetch:
    """One reading that is under way, for rows that are asked for next."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._reading: tuple[Any, int, Future[Any]] | None = None

    def begin(self, rows: Any, version: int, read: Callable[[], Any]) -> None:
        """Read in the background; `version` says of which contents."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._reading = rows, version, self._threads.submit(read)

    def result(self, rows: Any, version: int) -> Any:
        """Return what was read of these very rows; None if it is not what was begun, or contents changed since."""
        if self._reading is None:
            return None
        begun, at, reading = self._reading
        self._reading = None
        return reading.result() if begun is rows and at == version else None
