"""Variants: runs of one experiment that differ in more than their seed, told apart by the keys that differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_lab.cli.runs import Run
from rl_lab.core.errors import UserError, shown

_MOST_KEYS = 3  # that a name shows, unless it takes more to tell two variants apart
_ABSENT = object()


def variant_names(runs: Sequence[Run]) -> dict[Path, str]:
    """Return the name of each run's experiment, followed by `[key=value]` where others of that name differ."""
    names = {run.folder: run.name for run in runs}
    for name in set(names.values()):
        alike = [run for run in runs if run.name == name]
        knobs = {run.folder: found for run in alike if len(alike) > 1 and (found := _knobs(run))}
        keys = sorted({key for own in knobs.values() for key in own})
        differing = [key for key in keys if len({repr(own.get(key, _ABSENT)) for own in knobs.values()}) > 1]
        texts = {folder: [_text(key, own) for key in differing] for folder, own in knobs.items()}
        for folder, text in texts.items():
            names[folder] += _suffix(text, [other for other in texts.values() if other != text])
    return names


def experiment_of(name: str) -> str:
    """Return the experiment's own name from that of a variant."""
    return name.partition(" [")[0]


def _knobs(run: Run) -> dict[str, Any]:
    """Return everything that decides the course of a run, but its seed; nothing where that is not known."""
    from rl_lab.composition import comparable  # Hydra, which a single run's curve does without
    from rl_lab.run_folder import flat
    from rl_lab.trust import read_saved

    try:
        knobs = flat(comparable(read_saved(run.folder / "config.yaml")))
    except UserError:
        return {}
    knobs.pop("experiment.seed", None)
    return knobs


def _text(key: str, knobs: dict[str, Any]) -> str:
    return f"{key}={shown(str(knobs[key]))}" if key in knobs else f"~{key}"


def _suffix(text: Sequence[str], others: Sequence[Sequence[str]]) -> str:
    if not others:
        return ""
    few = text[:_MOST_KEYS]
    if len(text) > _MOST_KEYS and all(other[:_MOST_KEYS] != few for other in others):
        return f" [{', '.join(few)}, {len(text) - _MOST_KEYS} more]"
    return f" [{', '.join(text)}]"
