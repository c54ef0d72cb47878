"""State checks: a checkpoint must fit the run before anything is touched; right digests prove nothing.

What would fail only later, in the middle of training, is looked for here; the rest fails while it is restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_lab.core.batch import Tree, tree_map
from rl_lab.orchestration.checkpoint import SavedHistory
from rl_lab.orchestration.run_parts import RunParts

PLAIN_SECTIONS = ("counters", "phase_state", "run")
COLLECTOR_ARRAYS = ("episode_index", "running_returns", "running_lengths", "observations", "state")


def check_state(
    parts: RunParts, fresh: Mapping[str, Any], saved: Mapping[str, Any], histories: Mapping[str, SavedHistory]
) -> None:
    """Compare a saved state with that of a run that has just been built; raise ValueError where it cannot fit."""
    for section in PLAIN_SECTIONS:
        _check_plain(fresh[section], saved[section], section)
    for name in COLLECTOR_ARRAYS:
        _check_same(_layout(saved["collector"][name]), _layout(fresh["collector"][name]), f"the collector's {name}")
    seen = _layout(parts.collector.observations, 1)
    for name in () if parts.workflow.collects else parts.sources:
        for columns in _columns(saved["sources"][name], histories[name].segments if name in histories else {}):
            _check_same(_layout(columns["observations"], 2), seen, f"the observations in '{name}'")
            for column, kind in (("rewards", "float32"), ("terminated", "bool"), ("truncated", "bool")):
                _check_same(_layout(columns[column], 2), ((), kind), f"the {column} in '{name}'")
    for key, total, weight in saved["sums"]:
        if not isinstance(total, (int, float, str)) or not isinstance(weight, (int, float)) or not weight > 0:
            raise ValueError(f"the sum of {key!r} is none")


def _check_plain(fresh: Mapping[str, Any], saved: Mapping[str, Any], section: str) -> None:
    _check_same(sorted(saved), sorted(fresh), f"the entries of {section}")
    for name, value in fresh.items():
        found = saved[name]
        of_whole_numbers = isinstance(found, list) and all(type(entry) is int for entry in found)
        if type(found) is not type(value) or (isinstance(value, list) and not of_whole_numbers):
            raise ValueError(f"{name} in {section} is a {type(found).__name__}")


def _columns(source: Mapping[str, Any], segments: Mapping[int, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the columns [T, N, ...] that a source saved: its rollout, or its ring's segments and tail."""
    yield from segments.values()
    for columns in (source.get("rollout"), source["ring"]["tail"] if "ring" in source else None):
        if columns is not None:
            yield columns


def _layout(tree: Tree, num_leading: int = 0) -> Tree:
    """Return a tree of the shapes, without leading dimensions, and the types."""
    return tree_map(lambda leaf: (tuple(leaf.shape[num_leading:]), str(leaf.dtype).removeprefix("torch.")), tree)


def _check_same(found: Any, expected: Any, what: str) -> None:
    if found != expected:
        raise ValueError(f"{what} are {found}, not {expected}")
