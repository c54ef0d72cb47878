"""Composition: overrides in, one configuration out. The only file that drives Hydra."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigIndexError, OmegaConfBaseException
from yaml import YAMLError

from rl_lab.config import PACKAGE_CONFIGS, RunConfig, parse_run
from rl_lab.core.errors import UserError, without_hidden
from rl_lab.overrides import (
    UNKNOWN_KEY,
    as_overrides,
    check_grammar,
    entry_by_word,
    explain,
    group_options,
    no_entry,
    normalize,
    offer_paths,
)
from rl_lab.trust import check_secrets

OmegaConf.register_new_resolver("add", lambda *terms: sum(terms), replace=True)

# Raising these extends a run or changes only what is written about it; everything else makes it another run.
EXTENDING_KEYS = (
    "training.total_timesteps",
    "training.stop_at_return",
    "training.resume_path",
    "evaluation.inspect",
    "logging",
    "checkpoint",
)


def compose(overrides: Sequence[str], folder: Path | None = None) -> DictConfig:
    """Compose a configuration. A `configs` folder in the working directory is searched before the package's own."""
    config, parsed = _load(overrides, folder)
    del config["hydra"]
    check_secrets(config)
    _check_dims(config, parsed)
    return config


def choices(overrides: Sequence[str]) -> dict[str, str]:
    """Return which file each group takes."""
    config, _ = _load(overrides, None)
    return {str(group): str(choice) for group, choice in config.hydra.runtime.choices.items()}


def _load(overrides: Sequence[str], folder: Path | None) -> tuple[DictConfig, list[Override]]:
    user_configs = (Path.cwd() if folder is None else folder) / "configs"
    search_path = create_config_search_path(str(PACKAGE_CONFIGS))
    roots = [PACKAGE_CONFIGS]
    if user_configs.is_dir():
        search_path.prepend("user", f"file://{user_configs.resolve()}")
        roots.insert(0, user_configs)
    try:
        overrides = [normalize(override, roots) for override in overrides]
    except UserError as error:
        raise _with_paths(error, overrides, folder) from None
    parsed = check_grammar(overrides)
    loader = ConfigLoaderImpl(config_search_path=search_path)
    loader.repository = _OwnFolders(search_path)
    try:
        config = loader.load_configuration("config", overrides=list(overrides), run_mode=RunMode.RUN)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise explain(error, overrides, roots) from None
    except (TypeError, ValueError) as error:
        raise entry_by_word(error, [text.lstrip("+~").partition("=")[0] for text in overrides]) or error from None
    OmegaConf.set_struct(config, False)
    OmegaConf.set_readonly(config, False)
    return config, parsed


def _with_paths(error: UserError, overrides: Sequence[str], folder: Path | None) -> UserError:
    """Where a word such as seed=3 names no key, but the last part of a few, say their full paths."""
    others = [text for text in overrides if text.partition("=")[0].strip() != error.key]
    if error.problem != UNKNOWN_KEY or len(others) == len(overrides):
        return error
    try:
        return offer_paths(error, OmegaConf.to_container(compose(others, folder)))
    except UserError:
        return error  # that is not the only mistake


def used_dims(config: DictConfig) -> set[str]:
    """Return the names in `_dims` that some ${...} refers to, and those that the environment fills in."""
    return {"observation", "action", *re.findall(r"(?:\b_dims[.[]|\$\{\.)(\w+)", OmegaConf.to_yaml(config))}


def _check_dims(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Refuse sizes on the command line that nothing refers to. Files may state what not every composition uses."""
    for override in overrides:
        section, _, name = override.key_or_group.partition(".")
        if section == "_dims" and not override.is_delete():
            value = override.value()
            names = [name.partition(".")[0]] if name else value if isinstance(value, dict) else []
            for unused in sorted({str(name) for name in names} - used_dims(config)):
                raise UserError(
                    "nothing in this configuration refers to a size of this name",
                    key=f"_dims.{unused}",
                    value=unused,
                    valid=used_dims(config),
                    remedy="correct the name, or remove it",
                )


class _OwnFolders(ConfigRepository):
    """Finds configurations in the user's folder and the package's only; a search path could even import a package."""

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        for entry in config_search_path.get_path():
            if str(entry.provider).startswith("hydra.searchpath"):
                raise UserError(
                    "configurations are looked for in ./configs and in the package only",
                    key="hydra.searchpath",
                    value=entry.path,
                    remedy="copy the files to ./configs",
                )
        super().initialize_sources(config_search_path)

    def _find_object_source(self, config_path: str, object_type: ObjectType | None) -> ConfigSource | None:
        path = PurePosixPath(config_path)
        if path.is_absolute() or ".." in path.parts:
            raise UserError(
                "a configuration may not be taken from outside ./configs and the package",
                key="defaults",
                value=config_path,
                remedy="copy the file to ./configs and name it from there",
            )
        return super()._find_object_source(config_path, object_type)


def resolve(config: DictConfig) -> dict[str, Any]:
    """Resolve every interpolation and return plain data."""
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise _unresolved(error) from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def part(config: DictConfig, key: str) -> Any:
    """Return the value at a dotted key, or None where there is none or it is still to be filled in."""
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException as error:
        raise _unresolved(error) from None


def _unresolved(error: OmegaConfBaseException) -> UserError:
    key = error.full_key or "configuration"
    problem = str(error).strip().split("\n")[0]
    if "Missing mandatory value" in problem and key in ("experiment.name", "workflow", "training.phases"):
        return UserError(
            "no experiment is chosen",
            key="experiment",
            valid=group_options("experiment"),
            remedy="add experiment=NAME",
        )
    return UserError(problem, key=key, remedy="set the value, or correct the ${...} that refers to it")


def load_experiment(name: str, overrides: Sequence[str] | Mapping[str, Any] = ()) -> DictConfig:
    """Compose a shipped or own experiment by name; overrides as `key=value` texts or as a mapping."""
    given = as_overrides(overrides) if isinstance(overrides, Mapping) else list(overrides)
    return compose([f"experiment={name}", *given])


def parse_config(config: DictConfig) -> RunConfig:
    """Validate a composed configuration whose dimensions are known."""
    return parse_run(resolve(config))


def select(config: DictConfig, key: str) -> DictConfig:
    """Return a part of a configuration for printing."""
    selected = part(config, key)
    if selected is None:
        raise UserError(
            "no such key",
            key="--package",
            value=key,
            valid=[str(name) for name in config],
            remedy="name a part, such as training.phases",
        )
    return selected if OmegaConf.is_config(selected) else OmegaConf.create({key: selected})


def to_yaml(config: DictConfig, *, resolved: bool = False) -> str:
    """Write a configuration as YAML; interpolations stay unless asked for, and the environment's texts are hidden."""
    return OmegaConf.to_yaml(OmegaConf.create(_masked(resolve(config))) if resolved else config)


def _masked(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _masked(entry) for name, entry in tree.items()}
    if isinstance(tree, list):
        return [_masked(entry) for entry in tree]
    return without_hidden(tree) if isinstance(tree, str) else tree


def override(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a configuration with `key=value` overrides of single values."""
    changed = config.copy()
    for text in overrides:
        key, equals, value = text.lstrip("+").partition("=")
        if not equals or not key:
            raise UserError("this is not an override", key="command line", value=text, remedy="write key=value")
        try:
            OmegaConf.update(changed, key, OmegaConf.create(f"value: {value}").value)
        except ConfigIndexError as error:
            raise no_entry(str(error.full_key)) from None
        except (YAMLError, OmegaConfBaseException, TypeError, ValueError, IndexError) as error:
            if found := entry_by_word(error, [key]):
                raise found from None
            problem = str(error).split("\n")[0]
            raise UserError(
                f"this cannot be set: {problem}", key=key, value=value, remedy="correct the key or the value"
            ) from None
    return changed


def config_hash(config: DictConfig) -> str:
    """Return a digest of everything that decides the course of a run."""
    plain = comparable(config)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def comparable(config: DictConfig) -> dict[str, Any]:
    """Return the unresolved configuration without the keys that only extend a run."""
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    for key in EXTENDING_KEYS:
        *parents, last = key.split(".")
        node: Any = plain
        for parent in parents:
            node = node.get(parent, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node.pop(last, None)
    return {str(key): value for key, value in plain.items()}
