"""Ranges: number types with limits. The constructor is the schema, so the configuration checks what it annotates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """The limits of a number, both included unless `open` leaves the lower one out."""

    low: float = -math.inf
    high: float = math.inf
    open: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"above {self.low:,}" if self.open else f"of at least {self.low:,}"
        return f"{'above' if self.open else 'from'} {self.low:,} {'and at most' if self.open else 'to'} {self.high:,}"


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Unit = Annotated[float, Range(0, 1)]  # discounts, probabilities, rates
Positive = Annotated[float, Range(0, open=True)]
NonNegative = Annotated[float, Range(0)]
