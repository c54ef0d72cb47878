"""Stopwatch: where the time of a run goes, by hook and part. What is timed inside another part counts there only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from rl_lab.core.workflow import Act
from rl_lab.orchestration.orchestrator import Orchestrator

_SOURCE_PARTS = {"add": "store", "draw": "draw", "gather": "gather", "write": "write back"}


@dataclass(frozen=True)
class Line:
    """The time of one part of one hook."""

    hook: str  # empty for what belongs to none
    part: str
    seconds: float
    calls: int


class Stopwatch:
    """Times functions; `place` says which hook runs now."""

    def __init__(self, place: Callable[[], str]) -> None:
        self._place = place
        self._lines: dict[tuple[str, str], list[float]] = {}  # seconds, calls
        self._inside = [0.0]  # time of the parts inside each part that runs now
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._lines = {}
        self._started = perf_counter()

    def elapsed(self) -> float:
        """Return the seconds since the beginning."""
        return perf_counter() - self._started

    def lines(self) -> list[Line]:
        """Return what was measured, in the order in which it first ran."""
        return [Line(hook, part, entry[0], int(entry[1])) for (hook, part), entry in self._lines.items()]

    def calls(self, part: str, hook: str) -> int:
        """Return how often a part ran."""
        return int(self._lines.get((hook, part), (0.0, 0))[1])

    def timed(self, part: str, function: Callable[..., Any], hook: str | None = None) -> Callable[..., Any]:
        """Return a function whose time counts for a part of the hook that runs, or of the one that is named."""

        def run(*arguments: Any, **options: Any) -> Any:
            key = (self._place() if hook is None else hook, part)
            self._inside.append(0.0)
            start = perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                took = perf_counter() - start
                entry = self._lines.setdefault(key, [0.0, 0])
                entry[0] += took - self._inside.pop()
                entry[1] += 1
                self._inside[-1] += took

        return run

    def watch(self, owner: Any, method: str, part: str, hook: str | None = None) -> None:
        """Time a method of an object from now on."""
        setattr(owner, method, self.timed(part, getattr(owner, method), hook))


def watch_run(orchestrator: Orchestrator) -> Stopwatch:
    """Time the parts of a run: environment, decisions, replay, updates, waiting for the device, logs."""
    parts, scheduler = orchestrator.parts, orchestrator.scheduler

    def place() -> str:
        hook = scheduler.next_action()
        return "" if hook is None else hook.name

    stopwatch = Stopwatch(place)
    wait = device_wait(parts.collector.device)
    for method in ("step", "reset"):
        stopwatch.watch(parts.collector.environments, method, "environment")
    _watch_collector(stopwatch, parts.collector, wait)
    for source in parts.sources.values():
        for method, part in _SOURCE_PARTS.items():
            stopwatch.watch(source, method, part)
    if parts.workflow.collects:
        stopwatch.watch(parts.workflow, "collect_step", "collect_step")
    if orchestrator.capture is not None:
        stopwatch.watch(orchestrator.capture, "run", "update")
    else:
        for name in parts.workflow.hooks():
            stopwatch.watch(parts.workflow, name, "update")
    stopwatch.watch(parts.evaluator.collector, "collect_episodes", "episodes")
    if parts.evaluator.inspect is not None:
        stopwatch.watch(parts.evaluator, "inspect", "inspect")
    if wait is not None:
        _watch_reading(stopwatch, orchestrator, wait)
    for owner, method in ((parts.sums, "add_all"), (parts.sums, "drain"), (orchestrator.recorder, "write")):
        stopwatch.watch(owner, method, "logging", "")
    return stopwatch


def device_wait(device: str) -> Callable[[], None] | None:
    """Return what waits until a device has done everything; none is needed on the CPU."""
    kind = torch.device(device).type
    if kind == "cpu":
        return None
    return torch.mps.synchronize if kind == "mps" else lambda: torch.cuda.synchronize(device)


def _watch_collector(stopwatch: Stopwatch, collector: Any, wait: Callable[[], None] | None) -> None:
    collect = collector.collect
    waiting = None if wait is None else stopwatch.timed("host wait", wait)

    def collect_with(act: Callable[..., Act], *arguments: Any, **options: Any) -> Any:
        timed = stopwatch.timed("act", act)

        def decide(*given: Any, **how: Any) -> Act:
            said: Act = timed(*given, **how)
            if waiting is not None:  # the Collector copies the actions to the host next, and would wait there
                waiting()
            return said

        return collect(decide, *arguments, **options)

    collector.collect = stopwatch.timed("collector", collect_with)


def _watch_reading(stopwatch: Stopwatch, orchestrator: Orchestrator, wait: Callable[[], None]) -> None:
    """Tell the wait for what the device has still to do from the time that logging takes."""
    check, waiting = orchestrator.check_captured, stopwatch.timed("host wait", wait, "")

    def check_after_waiting() -> None:
        waiting()
        check()

    orchestrator.check_captured = check_after_waiting  # type: ignore[method-assign]
