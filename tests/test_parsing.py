"""Plain data becomes values of annotated types, or a message that names the place."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from rl_lab.core.errors import UserError
from rl_lab.core.ranges import Count, Natural, NonNegative, Positive, Range, Unit
from rl_lab.parsing import parse


@dataclass(frozen=True)
class Inner:
    size: Count
    mode: Literal["slow", "fast"] = "slow"


@dataclass(frozen=True)
class Outer:
    inner: Inner
    entries: list[Inner] = field(default_factory=list)
    pair: tuple[int, int] | None = None
    free: Any = None


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int, 3, 3),
        (int, 1e5, 100_000),
        (float, 3, 3.0),
        (float, 0.5, 0.5),
        (str, "a", "a"),
        (bool, False, False),
        (int | None, None, None),
        (float | None, 2, 2.0),
        (Any, {"x": [1]}, {"x": [1]}),
        (Literal["a", "b"], "b", "b"),
        (list[int], [1, 2.0], [1, 2]),
        (Sequence[float], [1, 2], [1.0, 2.0]),
        (tuple[int, int], [1, 2], (1, 2)),
        (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
        (dict[str, int], {"a": 1.0}, {"a": 1}),
        (Mapping[str, int | list[int]], {"a": 1, "b": [2]}, {"a": 1, "b": [2]}),
        (Unit, 1, 1.0),
        (Count, 1, 1),
        (Natural, 0, 0),
        (Inner, {"size": 2.0}, Inner(2)),
        (Outer, {"inner": {"size": 1}, "entries": [{"size": 2, "mode": "fast"}]}, Outer(Inner(1), [Inner(2, "fast")])),
    ],
)
def test_values_that_fit(kind, value, expected):
    parsed = parse(kind, value, "key")
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value", "key"),
    [
        (int, 1.5, "key"),
        (int, True, "key"),
        (int, "3", "key"),
        (int, 2**63, "key"),
        (float, math.nan, "key"),
        (float, math.inf, "key"),
        (float, 10**400, "key"),
        (float, False, "key"),
        (str, 3, "key"),
        (bool, 1, "key"),
        (bool, "true", "key"),
        (int, None, "key"),
        (Literal["a", "b"], "c", "key"),
        (Literal["a", "b"], ["a"], "key"),
        (list[int], "12", "key"),
        (list[int], [1, "x"], "key[1]"),
        (list[int], {"a": 1}, "key"),
        (tuple[int, int], [1, 2, 3], "key"),
        (dict[str, int], [1], "key"),
        (dict[str, int], {"a": "x"}, "key.a"),
        (Unit, 1.01, "key"),
        (Unit, -0.01, "key"),
        (Count, 0, "key"),
        (Natural, -1, "key"),
        (Positive, 0.0, "key"),
        (NonNegative, -1e-9, "key"),
        (Annotated[int, Range(2, 4)], 5, "key"),
        (Inner, [], "key"),
        (Inner, {}, "key.size"),
        (Inner, {"size": 1, "sise": 2}, "key.sise"),
        (Outer, {"inner": {"size": 1}, "entries": [{"size": 1}, {"size": 0}]}, "key.entries[1].size"),
        (Outer, {"inner": {"size": 1}, "pair": [1, "b"]}, "key.pair[1]"),
    ],
)
def test_values_that_do_not(kind, value, key):
    with pytest.raises(UserError) as caught:
        parse(kind, value, "key")
    assert caught.value.key == key
    assert caught.value.remedy


def test_ranges_say_what_they_are():
    assert str(Range(1)) == "of at least 1"
    assert str(Range(0, open=True)) == "above 0"
    assert str(Range(0, 1)) == "from 0 to 1"
    assert str(Range(0, 1, open=True)) == "above 0 and at most 1"
    assert str(Range(1, 100_000)) == "from 1 to 100,000"
