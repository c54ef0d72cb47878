"""What a curriculum comes to before it has begun."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence

from rl_lab.core.phase import Phase
from rl_lab.data.sources import Source


class Stock:
    """How many steps the buffers will hold, of those that a run collects and of data sets that are there already."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources
        self._added: dict[int, float] = {}

    def held(self, name: str) -> float:
        """Return how many steps a buffer will have taken in."""
        ring = self._sources[name].ring
        return self._added.get(self._room(name), 0) + (0 if ring is None else ring.added)

    def add(self, name: str, steps: float) -> None:
        """Note that steps will be collected into a buffer."""
        self._added[self._room(name)] = self._added.get(self._room(name), 0) + steps

    def ready(self, name: str | None) -> bool:
        """Whether a buffer will have as much as it wants before an update."""
        return name is None or self.held(name) >= self._sources[name].min_size

    def _room(self, name: str) -> int:
        source = self._sources[name]
        return id(source if source.ring is None else source.ring)  # a buffer that shares rows fills with their owner


def tell_what_never_runs(
    phases: Sequence[Phase],
    sources: Mapping[str, Source],
    needs_source: Callable[[str], bool],
    *,
    total_timesteps: int | None,
    num_envs: int,
) -> None:
    """Say which phases never begin, for `total_timesteps` are collected before, and which updates lack data."""
    stock, cut_off, steps = Stock(sources), [], 0
    for phase in phases:
        if total_timesteps is not None and phase.type == "online" and steps >= total_timesteps:
            cut_off.append(phase.name)
            continue
        collects = [hook for hook in phase.hooks if hook.name == "collect"]
        in_cycle = num_envs * sum(hook.times for hook in collects)
        most = math.inf  # nobody knows how many cycles a number of updates takes
        if phase.duration_steps is not None:
            most = math.ceil(phase.duration_steps / in_cycle)
        elif phase.duration_cycles is not None:
            most = phase.duration_cycles
        if in_cycle and total_timesteps is not None:
            most = min(most, math.ceil((total_timesteps - steps) / in_cycle))
        for hook in collects:
            if (target := hook.source or phase.buffer) is not None:
                stock.add(target, most * num_envs * hook.times)
        if phase.duration_updates is None:
            steps += int(most) * in_cycle if in_cycle else 0
        last = {hook.source or phase.buffer: num_envs * hook.times for hook in collects[-1:]}
        for hook in phase.hooks if phase.type == "online" else ():
            name = hook.source or phase.buffer
            if hook.is_update and name is not None and needs_source(hook.name):
                # A ratio counts the steps of a collect only if there was enough before it.
                late = 0 if hook.ratio is None else last.get(name, 0)
                _tell_idle(hook.name, phase.name, name, stock.held(name), late, sources[name].min_size)
    if cut_off:
        _warn(
            f"training.total_timesteps={total_timesteps} ends the run before these phases begin: {', '.join(cut_off)}"
        )


def _tell_idle(hook: str, phase: str, source: str, held: float, late: int, min_size: int) -> None:
    if held - late < min_size:
        when = "" if held < min_size else " before the last collect"
        holds = held if held < min_size else held - late
        _warn(
            f"{hook} never runs in phase '{phase}': "
            f"'{source}' will hold {int(holds):,} of min_size {min_size:,} steps{when}"
        )


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
