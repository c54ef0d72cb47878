"""Notes: what a valid configuration does that was hardly meant; told on stderr before the command goes on."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

from omegaconf import DictConfig, OmegaConf

from rl_lab.composition import choices, comparable, compose, part, to_yaml, used_dims
from rl_lab.core.errors import UserError
from rl_lab.overrides import group_options
from rl_lab.run_folder import flat

_ABSENT = object()


def tell_notes(overrides: Sequence[str], composed: DictConfig) -> None:
    """Say which words of a command, and which sizes in files, come to nothing."""
    dims, used = part(composed, "_dims"), used_dims(composed)
    unused = [f"_dims.{name}" for name in dims if name not in used] if OmegaConf.is_dict(dims) else []
    if any(_stated(word) == "environment.task" for word in overrides) and "{environment.task}" not in to_yaml(composed):
        unused.append("environment.task")
    if unused:
        print(f"warning: nothing here refers to {_few(unused)}", file=sys.stderr)
    for note in (*_idle_rates(overrides, composed), *_idle_choices(overrides)):
        print(f"warning: {note}", file=sys.stderr)


def _idle_rates(overrides: Sequence[str], composed: DictConfig) -> Iterator[str]:
    """Yield learning rates that a command states where a schedule replaces them."""
    for word in overrides:
        key = _stated(word)
        if key.startswith("optimizers.") and key.endswith(".optimizer.lr"):
            schedule = f"{key.removesuffix('.optimizer.lr')}.learning_rate"
            if OmegaConf.select(composed, schedule) is not None:
                yield f"{word} is never used: {schedule} replaces it"


def _idle_choices(overrides: Sequence[str]) -> Iterator[str]:
    """Yield what becomes of choices, such as model=NAME, whose values the experiment mostly states itself."""
    experiment = [word for word in overrides if word.startswith("experiment=")]
    chosen = [word for word in overrides if word not in experiment and _is_choice(word)]
    own = choices(experiment) if experiment and chosen else {}
    for word in chosen if experiment else ():
        group, _, choice = word.lstrip("+").partition("=")
        if own.get(group) == choice:
            continue  # what it is anyway
        try:
            without, final = _composed(experiment), _composed([*experiment, word])
            alone, root = _composed([f"+{word.lstrip('+')}"]), _composed([])
        except UserError:
            continue  # it needs other words of the command
        changed = _different(final, without, {**final, **without})
        lost = set(_different(alone, root, alone)) & set(_different(alone, final, alone))
        if len(changed) < len(lost):
            what = f"only {_few(changed)}" if changed else "nothing"
            name = experiment[0].partition("=")[2]
            values = _few([key for key in dict.fromkeys(map(_key, alone)) if key in lost])
            yield f"{word} changes {what} here: {name} states other values itself ({values}); set them by key=value"


def _stated(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def _is_choice(word: str) -> bool:
    key, _, value = word.lstrip("+").partition("=")
    return value in group_options(key.partition("@")[0])


def _composed(words: Sequence[str]) -> dict[str, object]:
    return flat(comparable(compose(words)))


def _different(one: dict[str, object], other: dict[str, object], keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(_key(key) for key in keys if one.get(key, _ABSENT) != other.get(key, _ABSENT)))


def _key(key: str) -> str:
    return key.partition("[")[0]  # a list is one value


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
