"""Targets: the classes and functions that a configuration may name."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rl_lab
from rl_lab.core.errors import UserError

# Only what is *defined* below these may be built: a dotted path alone can lead anywhere
# (torch.nn.functional.torch.load resolves).
OUR_PACKAGES = ("rl_lab.components", "rl_lab.core.schedules", "rl_lab.data", "rl_lab.workflows")
ALLOWED_PACKAGES = (*OUR_PACKAGES, "torch.nn", "torch.optim")
# Of torch only modules, optimisers and nn.functional, under the names that it publishes: further inside are functions
# that import any module by its name (torch.nn.attention._fa4).
TORCH_NAMESPACES = ("torch.nn", "torch.nn.functional", "torch.optim")
MAX_PATH = 200  # characters: Python would look for a path name by name, however long it is


def resolve_target(node: Any, key: str, allow: Sequence[str] = ()) -> Callable[..., Any]:
    """Return the class or function that a node names, if it may be used."""
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        raise UserError(
            "a node with a _target_ is expected here",
            key=key,
            value=node,
            remedy="choose one by name, or write {_target_: package.module.Class, ...}",
        )
    path, key = node["_target_"], f"{key}._target_"
    packages = (*ALLOWED_PACKAGES, *allow)
    refusal = UserError(
        "this target may not be used",
        key=key,
        value=path,
        valid=packages,
        remedy="use something defined in these packages (of torch: modules, optimisers, nn.functional), "
        "or allow another one with --allow PACKAGE",
    )
    module_path, _, name = path.rpartition(".")
    if not module_path and len(name) <= MAX_PATH and (near := _nearest_paths(path)):
        raise UserError(
            "a target is a full path, package.module.Class",
            key=key,
            value=path,
            valid=packages,
            remedy=f"write {' or '.join(near)}",
        )
    if not _may_be_imported(path, module_path, allow):
        raise refusal
    module = _import(module_path, path, key)
    if not hasattr(module, name):
        names = [
            entry
            for entry, value in vars(module).items()
            if _is_target(value) and _may_be_called(value, allow) and entry[0] != "_"
        ]
        raise UserError(f"'{module_path}' has no '{name}'", key=key, value=name, valid=names, remedy="correct the name")
    target = getattr(module, name)
    if not _is_target(target) or not _may_be_called(target, allow):
        raise refusal
    return typing.cast(Callable[..., Any], target)


def _nearest_paths(name: str) -> list[str]:
    """Return the full paths of the classes whose names are nearest to this one: ours before torch's."""
    published = [f"{module.__name__}.{entry}" for module in (torch.nn, torch.optim) for entry in _classes_of(module)]
    paths: dict[str, list[str]] = {}  # by the class name in small letters
    for path in (*_own_classes(), *published):
        paths.setdefault(path.rpartition(".")[2].lower(), []).append(path)
    near = [name.lower()] if name.lower() in paths else difflib.get_close_matches(name.lower(), paths, n=3, cutoff=0.6)
    return [path for entry in near for path in paths[entry]][:3]


def _classes_of(module: types.ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if inspect.isclass(value) and name[0] != "_"]


def _own_classes() -> Iterator[str]:
    """Yield the classes that our files define; nothing is imported for a name that nobody trusts."""
    root = Path(rl_lab.__file__).parent
    for file in sorted(root.rglob("*.py")):
        module = ".".join(("rl_lab", *file.relative_to(root).with_suffix("").parts))
        if _within(f"{module}.", OUR_PACKAGES):
            yield from (
                f"{module}.{name}" for name in re.findall(r"^class ([A-Za-z]\w*)", file.read_text(), re.MULTILINE)
            )


def _may_be_imported(path: str, module_path: str, allow: Sequence[str]) -> bool:
    if _within(path, allow):
        return True
    is_public = len(path) <= MAX_PATH and not any(name.startswith("_") for name in path.split("."))
    return is_public and (_within(path, OUR_PACKAGES) or module_path in TORCH_NAMESPACES)


def _may_be_called(target: Any, allow: Sequence[str]) -> bool:
    defined = f"{target.__module__}.{target.__name__}"
    if _within(defined, (*OUR_PACKAGES, *allow)):
        return True
    if inspect.isclass(target):
        return _within(defined, ALLOWED_PACKAGES) and issubclass(target, (nn.Module, torch.optim.Optimizer))
    return target.__module__ == "torch.nn.functional"


def _import(module_path: str, path: str, key: str) -> types.ModuleType:
    try:
        return importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        missing = error.name or module_path
        if module_path == missing or module_path.startswith(f"{missing}."):
            parent = missing.rpartition(".")[0]
            raise UserError(
                f"there is no module '{missing}'",
                key=key,
                value=missing,
                valid=_modules_in(parent),
                remedy=f"correct the path: package.module.Class, in one of {', '.join(ALLOWED_PACKAGES)}",
            ) from None
        raise UserError(
            f"'{module_path}' needs the package '{missing}', which is not installed",
            key=key,
            value=path,
            remedy=f"pip install {missing.partition('.')[0]}",
        ) from None
    except Exception as error:
        raise UserError(
            f"the module cannot be imported: {type(error).__name__}: {error}",
            key=key,
            value=path,
            remedy=f"python -c 'import {module_path}' must work",
        ) from error


def _modules_in(package: str) -> list[str]:
    module = importlib.import_module(package) if package else None
    paths = getattr(module, "__path__", [])  # a plain module contains none
    return [f"{package}.{entry.name}" for entry in pkgutil.iter_modules(paths)]


def _is_target(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isfunction(value)


def _within(path: str, packages: Sequence[str]) -> bool:
    return any(path.startswith(f"{package}.") for package in packages)
