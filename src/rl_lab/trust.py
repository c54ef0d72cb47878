"""Trust: what a configuration may contain, the user's own (no secrets) or a stranger's (nothing that reaches out)."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from rl_lab.core.errors import UserError, hide, looks_secret
from rl_lab.orchestration.files import Files

MAX_CONFIG_BYTES = 2**18
MAX_NODES = 5_000
MAX_DEPTH = 32
MAX_WHOLE_NUMBER = 2**63
MAX_RESOLVED = 2**18  # characters when every ${...} is replaced
REFERENCE_COST = 256  # characters: what resolving one ${...} costs in time
SAFE_RESOLVERS = ("add",)
# ${resolver: or ${key}; names made of further ${...} are neither.
_REFERENCE = re.compile(r"""\$\{\s*(?:(?P<resolver>[A-Za-z_][\w.]*)\s*:|(?P<key>[^\s\\{}():'"$]+)\s*\})""")
_FROM_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*\w+\s*(,\s*null\s*)?\}")
_SECRET_GROUP = re.compile(r"(.*_)?(secrets?|passwords?|credentials?|(api|access|private)_?keys?)", re.IGNORECASE)
_NEVER_A_NUMBER = re.compile(r"password|secret", re.IGNORECASE)


def _from_environment(*arguments: Any) -> Any:
    value = oc.env(*arguments)
    if isinstance(value, str):
        hide(value)
    return value


OmegaConf.register_new_resolver("oc.env", _from_environment, replace=True)


def check_secrets(composed: DictConfig) -> None:
    """Refuse a secret that is written out; one that stays in the environment is fine."""
    for key, value in _leaves(OmegaConf.to_container(composed, resolve=False)):
        if _is_written_secret(key, value):
            raise UserError(
                "a secret must not be written into a configuration: it would be saved with every run",
                key=key,
                remedy="put it into an environment variable and write ${oc.env:NAME}",
            )


def _is_written_secret(key: str, value: Any) -> bool:
    *groups, name = key.split(".")
    if isinstance(value, str):
        secret = looks_secret(name) or (name != "_target_" and any(_SECRET_GROUP.fullmatch(group) for group in groups))
        return secret and value not in ("", "???") and not _FROM_ENVIRONMENT.fullmatch(value)
    return isinstance(value, (int, float)) and value is not True and _NEVER_A_NUMBER.search(name) is not None


def load_saved(path: Path, allow: Collection[str] = ()) -> DictConfig:
    """Read the config.yaml of a run or an export, which a stranger may have written, so that it can be resolved.

    Resolvers reach out of a configuration: `allow` names those that the user permits, such as oc.env.
    """
    config, plain = _read(path)
    for key, value in _leaves(plain):
        for name in _resolvers(key, value):
            if name not in (*SAFE_RESOLVERS, *allow):
                raise UserError(
                    f"a saved configuration may not use ${{{name}:...}}",
                    key=key,
                    value=value,
                    valid=[f"${{{safe}:...}}" for safe in SAFE_RESOLVERS],
                    remedy=f"if it is your own run, say --allow {name}, or give its training command again",
                )
    try:
        resolved = _Growth(plain).size(plain)
    except RecursionError:
        resolved = MAX_RESOLVED + 1
    if resolved > MAX_RESOLVED:
        raise UserError("the ${...} of this configuration multiply, or go in a circle", key=str(path))
    return config


def read_saved(path: Path) -> DictConfig:
    """Read a saved configuration to compare it; it must not be resolved."""
    return _read(path)[0]


def check_folder(folder: Path) -> None:
    """Refuse links, pipes and devices in the folder of a run or an export: through them one would write elsewhere."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            entry = Path(parent, name)
            try:
                mode = entry.lstat().st_mode
            except FileNotFoundError:  # the run goes on, and removes what it no longer needs
                continue
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                kind = "link" if stat.S_ISLNK(mode) else "pipe, socket or device"
                raise UserError(
                    f"there is a {kind} among the files of a run or an export, which only has files and folders",
                    key=str(entry),
                    remedy="if it is yours, replace it by what it stands for",
                )


def read_text(path: Path, max_bytes: int) -> str:
    """Read a small regular file, without following links or waiting for pipes."""
    files = Files()
    if files.size(path) > max_bytes:
        raise ValueError(f"{path.name} has more than {max_bytes:,} bytes")
    return files.read(path).decode()


def _read(path: Path) -> tuple[DictConfig, Any]:
    check_folder(path.parent)
    try:
        tree = _SavedLoader(read_text(path, MAX_CONFIG_BYTES)).get_single_data()
        config = OmegaConf.create(tree if isinstance(tree, dict) else {})
        plain = OmegaConf.to_container(config, resolve=False)
    except (OSError, yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"the configuration cannot be read: {reason}", key=str(path)) from None
    if not plain:
        raise UserError("the configuration is not a mapping", key=str(path))
    for key, value in _leaves(plain):
        if isinstance(value, int) and abs(value) > MAX_WHOLE_NUMBER:  # too long even to be shown
            raise UserError("the configuration has a number that is too large to be one", key=key)
    return config, plain


class _SavedLoader(get_yaml_loader()):  # type: ignore[misc]
    """Reads YAML, but none that grows when it is read (aliases), asks for objects (tags), or is too deep or long."""

    depth = num_nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("a saved configuration may not use YAML aliases")
        if event.tag is not None:
            raise yaml.YAMLError(f"a saved configuration may not use YAML tags, such as {event.tag}")
        self.depth, self.num_nodes = self.depth + 1, self.num_nodes + 1
        if self.depth > MAX_DEPTH or self.num_nodes > MAX_NODES:
            raise yaml.YAMLError("it is too deep or too long to be one")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _resolvers(key: str, value: Any) -> Iterator[str]:
    for found in _references(key, value):
        if found["resolver"] is not None:
            yield found["resolver"]


def _references(key: str, value: Any) -> Iterator[re.Match[str]]:
    for opened in re.finditer(r"\$\{", value) if isinstance(value, str) else ():
        found = _REFERENCE.match(value, opened.start())
        if found is None:
            raise UserError(
                "a saved configuration may refer to keys by their names only",
                key=key,
                value=value,
                remedy="if it is your own run, give its training command again",
            )
        yield found


class _Growth:
    """How long a configuration becomes when its ${...} are replaced: a few lines can ask for more than memory holds."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.sizes: dict[tuple[Any, ...], int] = {}

    def size(self, node: Any, place: tuple[Any, ...] = ()) -> int:
        if place not in self.sizes:
            self.sizes[place] = MAX_RESOLVED + 1  # of one that refers to itself
            if isinstance(node, (Mapping, list)):
                entries = node.items() if isinstance(node, Mapping) else enumerate(node)
                self.sizes[place] = sum(self.size(entry, (*place, name)) for name, entry in entries)
            else:
                found = list(_references(".".join(map(str, place)), node))
                referred = (self._referred(entry["key"], place) for entry in found if entry["key"] is not None)
                self.sizes[place] = len(str(node)) + len(found) * REFERENCE_COST + sum(referred)
        return self.sizes[place]

    def _referred(self, key: str, place: tuple[Any, ...]) -> int:
        num_dots = len(key) - len(key.lstrip("."))
        node, there = self.root, ()
        for name in (*place[: -num_dots if num_dots else 0], *re.findall(r"[^.\[\]]+", key)):
            if isinstance(node, str):
                break  # a reference itself: counted whole
            entries = dict(enumerate(node)) if isinstance(node, list) else node if isinstance(node, Mapping) else {}
            known = next((own for own in entries if str(own) == str(name)), None)
            if known is None:
                raise UserError(f"${{{key}}} refers to a key that is not there", key=".".join(map(str, place)))
            node, there = entries[known], (*there, known)
        return self.size(node, there)


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from _leaves(value, f"{key}[{i}]")
    else:
        yield key, tree
