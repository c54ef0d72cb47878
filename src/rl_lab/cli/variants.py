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
        keys = {key for own in knobs.values() for key in own}
        distinct = {key: len({repr(own.get(key, _ABSENT)) for own in knobs.values()}) for key in keys}
        differing = sorted((key for key in keys if distinct[key] > 1), key=lambda key: (-distinct[key], key))
        texts = {folder: [_text(key, own) for key in differing] for folder, own in knobs.items()}
        num_shown = _num_shown(list(texts.values()))
        for folder, text in texts.items():
            hidden = [f"{len(text) - num_shown} more"] if len(text) > num_shown else []
            names[folder] += f" [{', '.join([*text[:num_shown], *hidden])}]" if text else ""
    return names


def experiment_of(name: str) -> str:
    """Return the experiment's own name from that of a variant."""
    return name.partition(" [")[0]


def _knobs(run: Run) -> dict[str, Any]:
    """Return what decides what a run learns, but its seed; nothing where that is not known."""
    from rl_lab.composition import comparable  # Hydra, which a single run's curve does without
    from rl_lab.run_folder import flat
    from rl_lab.trust import read_saved

    try:
        knobs = flat(comparable(read_saved(run.folder / "config.yaml")))
    except UserError:
        return {}
    return {key: knob for key, knob in knobs.items() if key != "experiment.seed" and not key.startswith("evaluation.")}


def _text(key: str, knobs: dict[str, Any]) -> str:
    return f"{key}={shown(str(knobs[key]))}" if key in knobs else f"~{key}"


def _num_shown(texts: Sequence[Sequence[str]]) -> int:
    """Return how many keys a name shows: few, unless it takes more to tell all variants apart."""
    variants = {tuple(text) for text in texts}
    longest = max(map(len, variants), default=0)
    few = (n for n in range(_MOST_KEYS, longest) if len({text[:n] for text in variants}) == len(variants))
    return next(few, longest)
