"""Signals: SIGTERM and the first Ctrl-C ask runs to stop; the second Ctrl-C aborts at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_on_signal(stops: Sequence[Callable[[], None]]) -> Iterator[None]:
    """Call every `stop` when a signal comes. Only the main thread gets signals; elsewhere this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = 0

    def note(number: int, frame: Any) -> None:
        nonlocal count
        count += 1
        if count > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt
        for stop in stops:
            stop()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
