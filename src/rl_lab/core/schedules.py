"""Schedules: pure functions of a counter. The loop evaluates them on the host; hooks read a device scalar."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from rl_lab.core.ranges import Count

Counter = Literal["agent_steps", "updates"]
COUNTERS = get_args(Counter)


class Schedule:
    """A value that moves from start to end over a number of agent steps (or updates)."""

    def __init__(self, start: float, end: float | None = None, steps: Count = 1, of: Counter = "agent_steps") -> None:
        if of not in COUNTERS:
            raise ValueError(f"a schedule counts {' or '.join(COUNTERS)}, not '{of}'")
        if steps < 1:
            raise ValueError(f"a schedule needs steps of at least 1, not {steps}")
        self.start, self.end, self.steps, self.of = float(start), float(start if end is None else end), steps, of
        self.tensor = torch.tensor(self.at(0))

    def at(self, count: int) -> float:
        """Return the value at a count."""
        return self.start

    def advance(self, *, agent_steps: int, updates: int) -> None:
        """Write the value for these counters into the device scalar."""
        self.tensor.fill_(self.at(agent_steps if self.of == "agent_steps" else updates))

    def to(self, device: str | torch.device) -> Schedule:
        """Move the device scalar."""
        self.tensor = self.tensor.to(device)
        return self

    @property
    def value(self) -> Tensor:
        """The current value, as a 0-d tensor that changes in place."""
        return self.tensor


class Constant(Schedule):
    """Always the same value."""


class Linear(Schedule):
    """A straight line, then constant."""

    def at(self, count: int) -> float:
        """Return the value at a count."""
        return self.start + (self.end - self.start) * min(max(count / self.steps, 0.0), 1.0)


class Exponential(Schedule):
    """A constant factor per step, then constant."""

    def __init__(self, start: float, end: float | None = None, steps: Count = 1, of: Counter = "agent_steps") -> None:
        if start == 0 or (end is not None and start * end <= 0):
            raise ValueError(f"an exponential schedule cannot go from {start} to {end}: both need one sign, none is 0")
        super().__init__(start, end, steps, of)

    def at(self, count: int) -> float:
        """Return the value at a count."""
        return self.start * (self.end / self.start) ** min(max(count / self.steps, 0.0), 1.0)


class Cosine(Schedule):
    """Half a cosine wave, then constant."""

    def at(self, count: int) -> float:
        """Return the value at a count."""
        progress = min(max(count / self.steps, 0.0), 1.0)
        return self.end + (self.start - self.end) * 0.5 * (1.0 + math.cos(math.pi * progress))


def as_schedule(value: float | Schedule) -> Schedule:
    """Take a number as a constant schedule."""
    return value if isinstance(value, Schedule) else Constant(value)
