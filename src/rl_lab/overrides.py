"""Overrides: what a person types as key=value; written, read, and explained where it is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigIndexError

from rl_lab.config import PACKAGE_CONFIGS
from rl_lab.core.errors import UserError

UNKNOWN_KEY = "unknown key"
_MAX_PATHS = 4  # that are offered for a word which is the last part of several


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Write a mapping as overrides; `seed`, `device` and `name` are short for experiment.*."""
    short = {"seed": "experiment.seed", "device": "experiment.device", "name": "experiment.name"}
    return [f"{short.get(key, key.replace('__', '.'))}={_as_text(value)}" for key, value in values.items()]


def group_options(group: str, roots: Sequence[Path] | None = None) -> list[str]:
    """Return the names that a configuration group offers."""
    if roots is None:
        roots = [Path.cwd() / "configs", PACKAGE_CONFIGS]
    return sorted({path.stem for root in roots for path in (root / group).glob("*.yaml")})


def normalize(override: str, roots: Sequence[Path]) -> str:
    """Return an override as Hydra wants it; a key that cannot be is refused."""
    text = override.strip()
    if ("=" not in text and not text.startswith("~")) or text.startswith("="):
        raise UserError(
            "this is neither an option nor an override",
            key="command line",
            value=override,
            valid=group_options("experiment", roots),
            remedy="write key=value, or experiment=NAME",
        )
    if text.startswith("+experiment="):
        text = text[1:]
    key, equals, value = text.partition("=")
    key = re.sub(r"\[(\d+)\]", r".\1", key)  # phases[0], as errors write it, is phases.0 to Hydra
    text = key + equals + value
    if re.fullmatch(r"~.+\.\d+", key):
        raise UserError(
            "an entry of a list cannot be removed alone",
            key=key[1:],
            remedy=f"write the whole list: {key[1:].rpartition('.')[0]}=[...]",
        )
    group, _, package = key.partition("@")
    if group.replace("/", ".") == package:
        return f"{group}{equals}{value}"  # as an experiment's defaults say it: components/x@components.x
    if text[0] == "+" and "." in key and "@" not in key and "/" not in key:
        return f"++{text.lstrip('+')}"  # Hydra's single plus refuses a key that is there already
    if text[0] in "+~" or "@" in key or "/" in key:
        return text
    if "." in key:
        return f"++{text}"  # what does not exist is refused by our own schema, which knows the nearest name
    names = [*_root_keys(), *_groups(roots)]
    if key not in names:
        raise UserError(UNKNOWN_KEY, key=key, value=key, valid=names, remedy="see the keys with --cfg job")
    return text


def check_grammar(overrides: Sequence[str]) -> list[Override]:
    """Return overrides as Hydra reads them; refuse what it cannot, and lists of values to sweep over."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        key, _, value = error.override.lstrip("+~").partition("=")
        raise UserError(
            f"this override cannot be read: {str(error).splitlines()[0]}",
            key=key,
            value=value,
            remedy="put texts with special characters into quotes: 'key=\"some text\"'",
        ) from None
    for override in parsed:
        if override.is_sweep_override():
            raise UserError(
                "one value is expected here, not several",
                key=override.key_or_group,
                value=override.input_line,
                remedy="start one run for each value; --seeds 0-4 does so for seeds; a list is [1,2]",
            )
    return parsed


def _root_keys() -> list[str]:
    root = OmegaConf.load(PACKAGE_CONFIGS / "config.yaml")
    return [str(key) for key in root if key != "defaults"]


def _groups(roots: Sequence[Path]) -> list[str]:
    return [
        str(folder.relative_to(root))
        for root in roots
        for folder in sorted(root.rglob("*"))
        if folder.is_dir() and any(folder.glob("*.yaml"))
    ]


def explain(error: Exception, overrides: Sequence[str], roots: Sequence[Path]) -> UserError:
    """Say in our words why Hydra could not compose."""
    text = str(error).strip()
    if isinstance(error.__cause__, ConfigIndexError):
        return no_entry(str(error.__cause__.full_key))
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        options = group_options(key.split("@")[0], roots)
        if options and value not in options and value != "null":
            return UserError(f"unknown {key}", key=key, value=value, valid=options, remedy="see `rl-lab list`")
        if f"Could not override '{key}'" in text:
            return UserError(
                "no experiment is chosen, or the one that is does not choose this",
                key=key,
                value=value,
                valid=group_options("experiment", roots),
                remedy=f"add experiment=NAME, or +{key}={value}",
            )
    lines = [line.strip() for line in text.split("\n") if line.strip() and "provider=" not in line]
    named = re.search(r"full_key: (\S+)", text) or re.search(r"'([\w./@]+)'", text)
    return UserError(
        " ".join(lines[:4])[:600] or type(error).__name__,
        key=named.group(1) if named else "configuration",
        remedy="see the composition with --cfg job",
    )


def offer_paths(error: UserError, composed: Any) -> UserError:
    """Return the error of an unknown key with the few keys whose last part it is, if there are such."""
    paths = [path for path in _paths(composed) if path.rpartition(".")[2] == error.key]
    if not 0 < len(paths) <= _MAX_PATHS:
        return error
    remedy = "write " + " or ".join(f"{path}=..." for path in paths)
    return UserError(error.problem, key=error.key, value=error.value, valid=paths, remedy=remedy)


def _paths(tree: Any, prefix: str = "") -> list[str]:
    """Return the dotted paths of all values."""
    if not isinstance(tree, dict):
        return [prefix]
    return [path for name, value in tree.items() for path in _paths(value, f"{prefix}.{name}" if prefix else str(name))]


def no_entry(key: str) -> UserError:
    """Say that a list has no entry `list[3]`."""
    remedy = f"entries count from 0; see them with --cfg job --package '{key.rpartition('[')[0]}'"
    return UserError("the list has no such entry", key=key, remedy=remedy)


def entry_by_word(error: Exception, keys: Iterable[str]) -> UserError | None:
    """Say which of these keys names an entry of a list by a word, if that is what the error is about."""
    word = re.search(r"'([^']+)'", str(error))
    for key in keys if word else ():
        before, found, _ = f".{re.sub(r'[][]+', '.', key)}.".partition(f".{word[1]}.")
        if found and before:
            return no_entry(f"{before[1:]}[{word[1]}]")
    return None


def _as_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_as_text(entry) for entry in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}: {_as_text(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (str, Path)) and not re.fullmatch(r"[A-Za-z_][\w/.-]*", str(value)):
        # Hydra reads backslashes as they are, but for those before a quote.
        escaped = re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), str(value))
        return f'"{escaped}"'  # so that a text stays one, whatever is in it
    return f'"{value}"' if isinstance(value, str) and value.lower() in _WORDS else str(value)


_WORDS = ("null", "true", "false", "nan", "inf")  # what Hydra would not take as texts
