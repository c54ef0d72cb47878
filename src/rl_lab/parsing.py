"""Parsing: plain data from YAML into values of annotated types; a mistake names the key, the value and what fits."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from rl_lab.core.errors import UserError
from rl_lab.core.ranges import Range


def parse(kind: Any, value: Any, key: str) -> Any:
    """Turn plain data into a value of the annotated type; a mistake names the key, the value and what fits."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return _parse_within(arguments, value, key)
    if origin in (typing.Union, types.UnionType):
        return _parse_union(arguments, value, key)
    if dataclasses.is_dataclass(kind):
        return _parse_dataclass(typing.cast(type, kind), value, key)
    if origin is Literal:
        if value not in arguments:
            raise UserError(
                "this is not one of the valid values",
                key=key,
                value=value,
                valid=arguments,
                remedy="choose one of them",
            )
        return value
    if origin in (list, tuple, Sequence) or kind in (list, tuple):
        return _parse_sequence(kind, value, key)
    if origin in (dict, Mapping) or kind in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _unexpected("a mapping", key, value)
        return {str(name): parse(arguments[1] if arguments else Any, v, f"{key}.{name}") for name, v in value.items()}
    return _parse_scalar(kind, value, key)


def _parse_within(arguments: tuple[Any, ...], value: Any, key: str) -> Any:
    parsed = parse(arguments[0], value, key)
    for limits in arguments[1:]:
        if isinstance(limits, Range) and parsed not in limits:
            raise UserError(
                f"a number {limits} is expected here", key=key, value=value, remedy=f"write a number {limits}"
            )
    return parsed


def _parse_union(kinds: tuple[Any, ...], value: Any, key: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    errors = []
    for kind in kinds:
        try:
            return parse(kind, value, key)
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _parse_dataclass(kind: type, value: Any, key: str) -> Any:
    if not isinstance(value, Mapping):
        raise _unexpected("a mapping", key, value)
    entries = {entry.name: entry for entry in dataclasses.fields(kind)}
    settings = "; what the workflow reads goes under settings, such as settings: {policy: random}"
    for name in value:
        if name not in entries:
            raise UserError(
                f"unknown key '{name}'",
                key=f"{key}.{name}" if key else str(name),
                value=name,
                valid=entries,
                remedy=f"correct the name, or remove it{settings if 'settings' in entries else ''}",
            )
    hints = typing.get_type_hints(kind, include_extras=True)
    values = {}
    for name, entry in entries.items():
        place = f"{key}.{name}" if key else name
        if name in value:
            values[name] = parse(hints[name], value[name], place)
        elif entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
            raise UserError(f"'{name}' is missing", key=place, remedy=f"set {place}=...")
    return kind(**values)


def _parse_sequence(kind: Any, value: Any, key: str) -> Any:
    if isinstance(value, str) or not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise _unexpected("a list", key, value)
    arguments = [argument for argument in typing.get_args(kind) if argument is not Ellipsis]
    entries = list(value)
    if typing.get_origin(kind) is tuple and Ellipsis not in typing.get_args(kind):
        if len(entries) != len(arguments):
            raise _unexpected(f"a list of {len(arguments)}", key, value)
        return tuple(parse(k, v, f"{key}[{i}]") for i, (k, v) in enumerate(zip(arguments, entries, strict=True)))
    parsed = [parse(arguments[0] if arguments else Any, entry, f"{key}[{i}]") for i, entry in enumerate(entries)]
    return tuple(parsed) if typing.get_origin(kind) is tuple else parsed


def _parse_scalar(kind: Any, value: Any, key: str) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and kind in _LIMITS and not abs(value) < _LIMITS[kind]:
        raise UserError(
            "a finite number is expected here", key=key, value=value, remedy=f"keep below {_LIMITS[kind]:.0e}"
        )
    if is_number and kind is float:
        return float(value)
    if is_number and kind is int and value == int(value):
        return int(value)  # 1e5 is a float to YAML and an integer to people
    if isinstance(kind, type) and isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
        return value
    raise _unexpected(_NAMES.get(kind, getattr(kind, "__name__", str(kind))), key, value)


_LIMITS = {int: 2**63, float: 1e308}  # as numbers are computed with
_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_EXAMPLES = {
    "a whole number": "4",
    "a number": "0.5",
    "a text": "name",
    "true or false": "true",
    "a mapping": "{name: value}",
    "a list": "[64, 64]",
    "a list of 2": "[64, 64]",
}


def _unexpected(expected: str, key: str, value: Any) -> UserError:
    example = f", such as {_EXAMPLES[expected]}" if expected in _EXAMPLES else ""
    return UserError(f"{expected} is expected here", key=key, value=value, remedy=f"write {expected}{example}")
