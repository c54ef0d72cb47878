"""Instantiation: a node with a `_target_` becomes an object, if the target may be used and the arguments fit."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_lab.core.errors import UserError
from rl_lab.parsing import parse
from rl_lab.targets import resolve_target

_OWN_KEYS = ("_target_", "_partial_")


def instantiate(
    node: Any, key: str, *, given: Mapping[str, Any] | None = None, allow: Sequence[str] = (), kind: type | None = None
) -> Any:
    """Build the object that a node describes; `given` are arguments that the lab adds where they are wanted."""
    target = resolve_target(node, key, allow)
    partial = parse(bool, node.get("_partial_", False), f"{key}._partial_")
    written = _arguments(node, key)
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
    text = str(error).partition("\n")[0][:300]
    return text if type(error) is ValueError else f"{type(error).__name__}: {text}"


def _partial(target: Callable[..., Any], arguments: dict[str, Any], key: str, kind: type | None) -> Any:
    if kind is not None:
        raise UserError(
            f"a whole {kind.__name__} is expected here", key=f"{key}._partial_", value=True, remedy="remove _partial_"
        )
    made = functools.partial(target, **arguments)
    made.__name__ = target.__name__  # type: ignore[attr-defined]  # losses are reported by name
    return made


def _arguments(node: Mapping[str, Any], key: str) -> dict[str, Any]:
    arguments = {str(name): value for name, value in node.items() if name not in _OWN_KEYS}
    for name in arguments:
        if name.startswith("_"):
            raise UserError(
                f"a node has no key '{name}'", key=f"{key}.{name}", value=name, valid=_OWN_KEYS, remedy="remove it"
            )
    return arguments


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
                remedy=f"correct the name, or remove it (on the command line: ~{key}.{name})",
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
    """Compare what is written with the annotations of our own targets; integral floats become integers."""
    if not target.__module__.startswith("rl_lab."):
        for name, value in plain.items():
            if isinstance(value, float):
                parse(float, value, f"{key}.{name}")  # torch lets numbers pass that are none
        return
    function = target.__init__ if inspect.isclass(target) else target
    hints = typing.get_type_hints(function, include_extras=True)
    for name, value in plain.items():
        kind, place = hints.get(name, Any), f"{key}.{name}"
        if _is_plain(value) and inspect.isclass(kind) and kind not in _PLAIN and kind not in _CONTAINERS:
            raise UserError(
                f"a {kind.__name__} is expected here",
                key=place,
                value=value,
                remedy="write a node: {_target_: package.module.Class, ...}",
            )
        if _admits_plain(kind) and (_is_plain(value) or _admits_only_plain(kind)):
            built[name] = parse(_without_objects(kind), value, place)


_PLAIN = (int, float, str, bool, type(None))
_CONTAINERS = (dict, list, tuple)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" not in value and all(_is_plain(entry) for entry in value.values())
    if isinstance(value, list):
        return all(_is_plain(entry) for entry in value)
    return True


def _admits_plain(kind: Any) -> bool:
    """Whether an annotation admits plain data, perhaps besides objects."""
    if typing.get_origin(kind) is typing.Literal:
        return True
    return kind in _PLAIN or any(_admits_plain(argument) for argument in typing.get_args(kind))


def _admits_only_plain(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return _admits_only_plain(typing.get_args(kind)[0])
    arguments = [argument for argument in typing.get_args(kind) if argument is not Ellipsis]
    return kind in _PLAIN or origin is typing.Literal or (bool(arguments) and all(map(_admits_only_plain, arguments)))


def _without_objects(kind: Any) -> Any:
    """Drop the members of a union that only an object could satisfy."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    kept = tuple(argument for argument in typing.get_args(kind) if _admits_plain(argument))
    return typing.Union[kept]  # noqa: UP007
