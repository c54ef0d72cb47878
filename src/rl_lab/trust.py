"""Trust: what a configuration may contain, the user's own (no secrets) or a stranger's (nothing that reaches out)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_lab.core.errors import UserError, looks_secret

MAX_CONFIG_BYTES = 2**20
MAX_DEPTH = 32
_RESOLVER = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*:")
SAFE_RESOLVERS = ("add",)


def check_secrets(composed: DictConfig) -> None:
    """Refuse a secret that is written out; one that stays in the environment is fine."""
    for key, value in _texts(OmegaConf.to_container(composed, resolve=False)):
        if looks_secret(key) and value and not value.startswith("${oc.env:"):
            raise UserError(
                "a secret must not be written into a configuration: it would be saved with every run",
                key=key,
                value=value,
                remedy="put it into an environment variable and write ${oc.env:NAME}",
            )


def load_saved(path: Path) -> DictConfig:
    """Read the config.yaml of a run or an export, which a stranger may have written."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UserError("the configuration is too large to be one", key=str(path))
        text = path.read_text(encoding="utf-8")
        _check_events(text, path)
        config = OmegaConf.create(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"the configuration cannot be read: {reason}", key=str(path)) from None
    if not isinstance(config, DictConfig):
        raise UserError("the configuration is not a mapping", key=str(path))
    for key, value in _texts(OmegaConf.to_container(config, resolve=False)):
        for name in _RESOLVER.findall(value):
            if name not in SAFE_RESOLVERS:
                raise UserError(
                    f"a saved configuration may not use ${{{name}:...}}",
                    key=key,
                    value=value,
                    valid=[f"${{{safe}:...}}" for safe in SAFE_RESOLVERS],
                    remedy="if it is your own run, give its training command again: that reads your own files",
                )
    return config


def _check_events(text: str, path: Path) -> None:
    """Refuse YAML that grows when it is read (aliases), that asks for objects (tags) or that is absurdly deep."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise UserError("a saved configuration may not use YAML aliases", key=str(path))
        if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)) and event.tag is not None:
            raise UserError("a saved configuration may not use YAML tags", key=str(path), value=event.tag)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise UserError("the configuration is nested too deeply to be one", key=str(path))
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _texts(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from _texts(value, f"{key}[{i}]")
    elif isinstance(tree, str):
        yield key, tree
