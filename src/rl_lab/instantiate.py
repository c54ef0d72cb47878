"""Instantiation: a node with a `_target_` becomes an object, if the target may be used and the arguments fit."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_lab.core.errors import UserError
from rl_lab.parsing import parse

# Only what is *defined* below these may be built: a dotted path alone can lead anywhere
# (torch.nn.functional.torch.load resolves).
ALLOWED_PACKAGES = (
    "rl_lab.components",
    "rl_lab.core.schedules",
    "rl_lab.data",
    "rl_lab.workflows",
    "torch.nn",
    "torch.optim",
)


def instantiate(
    node: Any, key: str, *, given: Mapping[str, Any] | None = None, allow: Sequence[str] = (), kind: type | None = None
) -> Any:
    """Build the object that a node describes; `given` are arguments that the lab adds where they are wanted."""
    target = resolve_target(node, key, allow)
    partial = parse(bool, node.get("_partial_", False), f"{key}._partial_")
    written = _arguments(node)
    arguments = {name: _build_nested(value, f"{key}.{name}", allow) for name, value in written.items()}
    parameters = _parameters(target, key)
    for name, value in (given or {}).items():
        if name in written:
            raise UserError(
                f"'{name}' is filled in by the lab", key=f"{key}.{name}", value=written[name], remedy="remove it"
            )
        if name in parameters:
            arguments[name] = value
    _check_names(target, parameters, arguments, key, partial=partial)
    _check_types(target, arguments, written, key)
    if partial:
        return _partial(target, arguments, key, kind)
    try:
        built = target(**arguments)
    except UserError as error:
        raise error.under(key) from error
    except Exception as error:
        raise UserError(
            f"{target.__name__} cannot be built from these arguments: {_told(error)}",
            key=key,
            value=written,
            remedy="correct the arguments; dimensions come from _dims",
        ) from error
    if kind is not None and not isinstance(built, kind):
        raise UserError(
            f"a {kind.__name__} is expected here, not a {type(built).__name__}",
            key=f"{key}._target_",
            value=node["_target_"],
            remedy=f"name a class that is a {kind.__name__}",
        )
    return built


def _told(error: Exception) -> str:
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def _partial(target: Callable[..., Any], arguments: dict[str, Any], key: str, kind: type | None) -> Any:
    if kind is not None:
        raise UserError(
            f"a whole {kind.__name__} is expected here", key=f"{key}._partial_", value=True, remedy="remove _partial_"
        )
    made = functools.partial(target, **arguments)
    made.__name__ = target.__name__  # type: ignore[attr-defined]  # losses are reported by name
    return made


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
        remedy="use something defined in these packages, or allow another one with --allow PACKAGE",
    )
    if not _within(path, packages):
        raise refusal
    module_path, _, name = path.rpartition(".")
    module = _import(module_path, path, key)
    if not hasattr(module, name):
        names = [
            entry
            for entry, value in vars(module).items()
            if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module_path
        ]
        raise UserError(f"'{module_path}' has no '{name}'", key=key, value=name, valid=names, remedy="correct the name")
    target = getattr(module, name)
    if not (inspect.isclass(target) or inspect.isfunction(target)):
        raise refusal
    if not _within(f"{target.__module__}.{target.__name__}", packages):
        raise refusal
    return typing.cast(Callable[..., Any], target)


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
                remedy="correct the path: package.module.Class",
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


def _within(path: str, packages: Sequence[str]) -> bool:
    return any(path.startswith(f"{package}.") for package in packages)


def _arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in node.items() if name not in ("_target_", "_partial_")}


def _build_nested(value: Any, key: str, allow: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        if "_target_" in value:
            return instantiate(value, key, allow=allow)
        return {name: _build_nested(entry, f"{key}.{name}", allow) for name, entry in value.items()}
    if isinstance(value, list):
        return [_build_nested(entry, f"{key}[{i}]", allow) for i, entry in enumerate(value)]
    return value


def _parameters(target: Callable[..., Any], key: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(target).parameters
    except ValueError:
        raise UserError(
            "this target does not say which arguments it takes",
            key=f"{key}._target_",
            value=target.__name__,
            remedy="name a class with a constructor of its own",
        ) from None


def _check_names(
    target: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    arguments: Mapping[str, Any],
    key: str,
    *,
    partial: bool,
) -> None:
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    for name in arguments:
        if name not in named and not takes_any:
            raise UserError(
                f"{target.__name__} has no argument '{name}'",
                key=f"{key}.{name}",
                value=name,
                valid=named,
                remedy="correct the name, or remove it",
            )
    if partial:
        return
    for name in named:
        if name not in arguments and parameters[name].default is inspect.Parameter.empty:
            raise UserError(
                f"{target.__name__} needs the argument '{name}'",
                key=f"{key}.{name}",
                valid=named,
                remedy=f"set {key}.{name}",
            )


def _check_types(target: Callable[..., Any], built: dict[str, Any], plain: Mapping[str, Any], key: str) -> None:
    """Compare plain values with the annotations of our own targets; integral floats become integers."""
    if not target.__module__.startswith("rl_lab."):
        return
    function = target.__init__ if inspect.isclass(target) else target
    hints = typing.get_type_hints(function, include_extras=True)
    for name, value in plain.items():
        if name in hints and _is_plain(value) and _is_plain_annotation(hints[name]):
            built[name] = parse(_without_objects(hints[name]), value, f"{key}.{name}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" not in value and all(_is_plain(entry) for entry in value.values())
    if isinstance(value, list):
        return all(_is_plain(entry) for entry in value)
    return True


_PLAIN = (int, float, str, bool, type(None))


def _is_plain_annotation(kind: Any) -> bool:
    """Whether an annotation admits plain data, perhaps besides objects."""
    if typing.get_origin(kind) is typing.Literal:
        return True
    return kind in _PLAIN or any(_is_plain_annotation(argument) for argument in typing.get_args(kind))


def _without_objects(kind: Any) -> Any:
    """Drop the members of a union that only an object could satisfy."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    kept = tuple(argument for argument in typing.get_args(kind) if _is_plain_annotation(argument))
    return typing.Union[kept]  # noqa: UP007
