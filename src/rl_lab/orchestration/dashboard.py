"""Dashboard: what a person sees of a running experiment; a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

_REDRAW_SECONDS = 0.5  # a redraw takes 2 to 3 ms
_PLAIN_SECONDS = 10.0
_NUM_METRICS = 10
_MAX_WIDTH = 110
_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = " ..--==##"


@dataclass
class Status:
    """Everything the dashboard shows."""

    name: str
    phase: str = ""
    phase_progress: float = 0.0  # from 0 to 1
    phase_index: int = 0  # from 0
    num_phases: int = 1
    env_steps: int = 0
    agent_steps: int = 0
    updates: int = 0
    episodes: int = 0
    total_steps: int | None = None  # planned agent steps
    steps_per_second: float = 0.0
    updates_per_second: float = 0.0
    eta_seconds: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # env_steps, mean return
    checkpoint_age_seconds: float | None = None
    warnings: list[str] = field(default_factory=list)


class Dashboard:
    """Shows a run. It never stops one: what goes wrong while drawing ends the drawing only.

    `console=None` draws a live panel if the stream is a terminal; True and False decide it. As a context manager it
    puts the terminal back when the run raises.
    """

    def __init__(self, console: bool | None = None, stream: TextIO | None = None) -> None:
        self._wanted, self._stream = console, stream
        self._live: Any = None  # rich.live.Live while the panel is shown
        self._last = -math.inf  # when something was shown
        self._shown_warnings = 0

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, status: Status) -> None:
        """Begin showing a run."""
        stream = self._stream = sys.stdout if self._stream is None else self._stream
        atexit.register(self.close)  # a hidden cursor must come back however the process ends
        try:
            if _is_terminal(stream) if self._wanted is None else self._wanted:
                self._open_panel(stream, status)
        except Exception as error:
            self._fall_back(error)
        if self._live is None:
            planned = "" if status.total_steps is None else f", {status.total_steps:,} agent steps planned"
            self._line(f"{status.name}: {_counted(status.num_phases, 'phase')}{planned}")
            self._last = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether `update` would show something now; asking is cheaper than making a status for nothing."""
        return time.monotonic() - self._last >= (_PLAIN_SECONDS if self._live is None else _REDRAW_SECONDS)

    def update(self, status: Status) -> None:
        """Show the state of the run, unless that was done a moment ago."""
        if self.due:
            self._show(status, progress_line)

    def evaluation(self, status: Status) -> None:
        """Show a new evaluation, the last of `status.evaluations`."""
        self._show(status, evaluation_line)

    def message(self, text: str) -> None:
        """Show a line of text that stays."""
        if self._live is None:
            self._line(text)
            return
        try:
            self._live.console.print(text, markup=False, highlight=False)
        except Exception as error:
            self._fall_back(error)

    def close(self) -> None:
        """Leave the last picture and give the terminal back; a second call does nothing."""
        atexit.unregister(self.close)
        live, self._live = self._live, None
        if live is not None:
            try:
                live.stop()
            except Exception as error:
                self._line(f"(the dashboard could not be closed: {error})")

    def _open_panel(self, stream: TextIO, status: Status) -> None:
        from rich import console as rich_console
        from rich.live import Live

        class Console(rich_console.Console):
            def on_broken_pipe(self) -> None:  # rich would end the process
                raise BrokenPipeError("nobody reads the output")

        # A redraw is ours to call: rich's own thread would take time from the run between two updates.
        console = Console(file=stream, force_terminal=True if self._wanted else None)
        live = Live(panel(status, *_size(console)), console=console, auto_refresh=False)
        self._live = live  # before start, so that a failure in it is undone
        live.start(refresh=True)
        self._last = time.monotonic()

    def _show(self, status: Status, plain: Callable[[Status], str]) -> None:
        self._last = time.monotonic()
        try:
            if self._live is not None:
                self._live.update(panel(status, *_size(self._live.console)), refresh=True)
                return
            for text in status.warnings[self._shown_warnings :]:
                self._line(f"warning: {text}")
            self._shown_warnings = len(status.warnings)
            self._line(plain(status))
        except Exception as error:
            self._fall_back(error)

    def _fall_back(self, error: Exception) -> None:
        self.close()
        self._line(f"(the dashboard could not be drawn: {type(error).__name__}: {error}; the run goes on)")

    def _line(self, text: str) -> None:
        stream = sys.stdout if self._stream is None else self._stream
        try:
            encoding = stream.encoding or "utf-8"
            print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
        except (OSError, ValueError):  # a closed pipe or stream: nobody is looking
            pass


def progress_line(status: Status) -> str:
    """Return the state of a run on one line."""
    words = [_phase_words(status), f"{100 * _fraction(status.phase_progress):3.0f} %", _counters(status)]
    words += [f"{key} {number(value)}" for key, value in most_important(status.metrics, 3)]
    words.append(" ".join(_speed(status)))
    if status.eta_seconds is not None:
        words.append(f"ETA {duration(status.eta_seconds)}")
    return "  ".join(words)


def evaluation_line(status: Status) -> str:
    """Return the last evaluation on one line."""
    if not status.evaluations:
        return f"evaluation  {_counters(status)}"
    steps, mean = status.evaluations[-1]
    best = _best(status.evaluations)
    return f"evaluation at {steps:,} env_steps: return {number(mean)} (best {number(best)})  {_counters(status)}"


def panel(status: Status, width: int, height: int, unicode: bool) -> Any:
    """Return the live panel as a rich renderable that fits a terminal of this size."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    width = min(width, _MAX_WIDTH)
    inner = max(width - 4, 1)
    rows: list[Any] = [_phase_row(status, inner, unicode)]

    planned = "" if status.total_steps is None else f" / {status.total_steps:,}"
    counters = [("env_steps", status.env_steps, ""), ("agent_steps", status.agent_steps, planned)]
    counters += [("updates", status.updates, ""), ("episodes", status.episodes, "")]
    cells = [Text.assemble((f"{name} ", "dim"), (f"{count:,}", "bold"), (of, "dim")) for name, count, of in counters]
    rows.append(_grid(Table, cells, inner, cell_width=22))
    rate, unit = _speed(status)
    times = [(rate, "bold"), (f" {unit}", "dim")]
    if status.eta_seconds is not None:
        times += [("   ETA ", "dim"), (duration(status.eta_seconds), "bold")]
    if status.checkpoint_age_seconds is not None:
        times += [("   checkpoint ", "dim"), (duration(status.checkpoint_age_seconds), "bold"), (" ago", "dim")]
    rows.append(Text.assemble(*times))

    metrics = most_important(status.metrics, _NUM_METRICS if height >= 20 else 4)
    if metrics:
        shown = [Text.assemble((f"{key} ", "dim"), (number(value), "cyan")) for key, value in metrics]
        rows += [Text(""), _grid(Table, shown, inner, cell_width=34)]

    if status.evaluations:
        steps, mean = status.evaluations[-1]
        rows += [
            Text(""),
            Text.assemble(
                ("evaluation ", "dim"), (number(mean), "bold green"), (f" at {steps:,}", "dim"),
                ("   best ", "dim"), (number(_best(status.evaluations)), "green"),
            ),
        ]  # fmt: skip
        num_rows = 4 if height >= 20 else 1
        rows += [Text(line, "green") for line in chart(status.evaluations, min(inner, 72), num_rows, unicode=unicode)]

    rows += [Text(f"warning: {text}", "yellow") for text in status.warnings[-3:]]
    for row in rows:
        if isinstance(row, Text):
            row.no_wrap, row.overflow = True, "ellipsis" if unicode else "crop"
    return Panel(Group(*rows), title=Text(status.name, "bold"), box=box.ROUNDED if unicode else box.ASCII, width=width)


def chart(evaluations: Sequence[tuple[int, float]], width: int, num_rows: int, *, unicode: bool = True) -> list[str]:
    """Draw evaluations as bars over evenly spaced env_steps: `num_rows` lines of at most `width` characters."""
    finite = [(step, value) for step, value in evaluations if abs(value) < 1e300]  # differences stay finite too
    if not finite or width < 1:
        return []
    num_columns = min(width, max(len(finite), 1))
    columns: list[list[float]] = [[] for _ in range(num_columns)]
    first, last = finite[0][0], max(step for step, _ in finite)
    for step, value in finite:
        place = (step - first) / (last - first) if last > first else 0.0
        columns[min(max(int(place * num_columns), 0), num_columns - 1)].append(value)
    heights: list[float] = []
    for column in columns:  # an empty column repeats its neighbour
        heights.append(sum(column) / len(column) if column else heights[-1])
    low, high = min(heights), max(heights)
    blocks = _BLOCKS if unicode else _ASCII_BLOCKS
    scaled = [1 + round((8 * num_rows - 1) * (h - low) / (high - low)) if high > low else 8 for h in heights]
    return ["".join(blocks[min(max(h - 8 * row, 0), 8)] for h in scaled) for row in reversed(range(num_rows))]


def most_important(metrics: dict[str, float], limit: int) -> list[tuple[str, float]]:
    """Choose the metrics a person looks at first: episode returns, then losses, then the rest in their order."""

    def rank(item: tuple[int, str]) -> tuple[int, int]:
        position, key = item
        name = key.rsplit("/", 1)[-1]
        if name == "episode_return":
            return 0, position
        if key.startswith(("time/", "eval/")):  # shown elsewhere, or of little interest
            return 4, position
        if "return" in name:
            return 1, position
        return (2 if "loss" in name else 3), position

    return [(key, metrics[key]) for _, key in sorted(enumerate(metrics), key=rank)[:limit]]


def number(value: float) -> str:
    """Return a number with about four digits."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e7 or size < 1e-3:
        return f"{value:.2e}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return a span of time as h:mm:ss, with days if need be."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour}:{minute:02}:{second:02}" if days else f"{hour}:{minute:02}:{second:02}"


def _phase_row(status: Status, width: int, unicode: bool) -> Any:
    from rich.text import Text

    done = _fraction(status.phase_progress)
    label = Text(_phase_words(status), "bold")
    share = Text(f" {100 * done:3.0f} %")
    room = width - label.cell_len - share.cell_len - 1
    if room < 8:
        return label.append_text(share)
    room = min(room, 60)
    # Several phases share the bar, so that it shows what is planned as well as what is done.
    num_parts = status.num_phases if 1 < status.num_phases <= room // 4 else 1
    full, empty, edge = ("━", "─", "╋") if unicode else ("=", "-", "+")
    bar = Text(" ")
    for part in range(num_parts):
        length = (part + 1) * room // num_parts - part * room // num_parts - (1 if part else 0)
        if part:
            bar.append(edge, "dim")
        current = status.phase_index if num_parts > 1 else 0
        filled = length if part < current else round(done * length) if part == current else 0
        bar.append(full * filled, "green" if part < current else "cyan").append(empty * (length - filled), "dim")
    return label.append_text(bar).append_text(share)


def _phase_words(status: Status) -> str:
    return f"phase {min(status.phase_index + 1, status.num_phases)}/{status.num_phases} {status.phase}".rstrip()


def _grid(table_class: Any, cells: Sequence[Any], width: int, cell_width: int) -> Any:
    num_columns = max(1, width // cell_width)
    grid = table_class.grid(padding=(0, 2), expand=False)
    for _ in range(num_columns):
        grid.add_column(no_wrap=True, overflow="crop")
    for start in range(0, len(cells), num_columns):
        grid.add_row(*cells[start : start + num_columns])
    return grid


def _speed(status: Status) -> tuple[str, str]:
    """Return the rate of steps and its unit; of updates while only they happen."""
    if status.steps_per_second == 0 and status.updates_per_second > 0:
        return number(status.updates_per_second), "updates/s"
    return number(status.steps_per_second), "steps/s"


def _counters(status: Status) -> str:
    total = "" if status.total_steps is None else f"/{status.total_steps:,}"
    return (
        f"env_steps {status.env_steps:,}  agent_steps {status.agent_steps:,}{total}  "
        f"updates {status.updates:,}  episodes {status.episodes:,}"
    )


def _best(evaluations: Sequence[tuple[int, float]]) -> float:
    return max((value for _, value in evaluations if math.isfinite(value)), default=math.nan)


def _fraction(progress: float) -> float:
    return min(max(progress, 0.0), 1.0) if math.isfinite(progress) else 0.0


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def _size(console: Any) -> tuple[int, int, bool]:
    return console.size.width, console.size.height, str(console.encoding).lower().replace("-", "").startswith("utf")
