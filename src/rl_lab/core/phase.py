"""Hook and Phase: the curriculum as data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

PHASE_TYPES = ("online", "offline", "eval_only")
DURATIONS = ("duration_steps", "duration_updates", "duration_cycles")


@dataclass(frozen=True, slots=True)
class Hook:
    """One entry of a cycle: a verb and how often. `times` of collect counts decisions in every environment."""

    name: str
    times: int = 1
    ratio: float | None = None  # calls per agent step; replaces times
    source: str | None = None  # another source than the phase's buffer

    def __post_init__(self) -> None:
        if not (self.name in ("collect", "evaluate") or self.name.startswith("update_")):
            raise ValueError(f"unknown hook '{self.name}': use collect, evaluate, or a method named update_*")
        if self.times < 1:
            raise ValueError(f"hook '{self.name}' has times: {self.times}; at least 1 is needed")
        if self.ratio is not None and not 0 < self.ratio < math.inf:
            raise ValueError(f"hook '{self.name}' has ratio: {self.ratio}; it must be a number above 0")
        if self.ratio is not None and not self.is_update:
            raise ValueError(f"hook '{self.name}' takes no ratio; only update_* hooks do")
        if self.ratio is not None and self.times != 1:
            raise ValueError(f"hook '{self.name}' has times: {self.times} and ratio: {self.ratio}; keep one of them")

    @property
    def is_update(self) -> bool:
        """Whether this hook is a method of the workflow that learns."""
        return self.name.startswith("update_")


@dataclass(frozen=True, slots=True)
class Phase:
    """A stage of the curriculum. Reads as an object and as a mapping: `phase.name`, `phase["name"]`."""

    name: str
    type: str = "online"
    hooks: tuple[Hook, ...] = ()
    buffer: str | None = None
    duration_steps: int | None = None
    duration_updates: int | None = None
    duration_cycles: int | None = None
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    progress: float = 0.0  # from 0 to 1, when given to a hook
    times: int = 1  # calls of the hook that receives it

    def __post_init__(self) -> None:
        if self.type not in PHASE_TYPES:
            raise ValueError(f"unknown type '{self.type}'; valid types are {', '.join(PHASE_TYPES)}")
        if not self.hooks:
            raise ValueError("workflow_hooks is empty: list at least one of collect, evaluate, update_*")
        given = [name for name in DURATIONS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given: keep exactly one")
        if not given and self.type != "eval_only":
            raise ValueError(f"no duration: give exactly one of {', '.join(DURATIONS)}")
        for name in given:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        names = [hook.name for hook in self.hooks]
        if self.type != "online" and "collect" in names:
            raise ValueError(f"'collect' does not belong in a phase of type '{self.type}'; make it online")
        if self.type != "online" and self.duration_steps is not None:
            raise ValueError(f"duration_steps does not fit type '{self.type}': nothing is collected there")
        if self.type == "eval_only" and set(names) != {"evaluate"}:
            raise ValueError(f"an eval_only phase may only list 'evaluate', not {sorted(set(names) - {'evaluate'})}")
        if self.duration_updates is not None and not any(hook.is_update for hook in self.hooks):
            raise ValueError("duration_updates needs an update_* hook")
        if self.duration_steps is not None and "collect" not in names:
            raise ValueError("duration_steps needs the hook 'collect'")
        if "collect" not in names and any(hook.ratio is not None for hook in self.hooks):
            raise ValueError("a ratio counts collected steps: it needs the hook 'collect' in the same phase")

    def __getitem__(self, key: str) -> Any:
        if key in self.keys():
            return getattr(self, key)
        raise KeyError(f"a phase has no '{key}'; it has {', '.join(self.keys())}")

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def get(self, key: str, default: Any = None) -> Any:
        """Read like a mapping."""
        return self[key] if key in self.keys() else default

    def keys(self) -> tuple[str, ...]:
        """Return the names that can be read."""
        return tuple(self.__slots__)

    def at(self, *, progress: float, times: int) -> Phase:
        """Return this phase as one hook call sees it."""
        return replace(self, progress=progress, times=times)


PhaseConfig = Phase
PhaseDefinition = Phase
