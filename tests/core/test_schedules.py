"""Schedules against their formulas; the device scalar."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_lab.core.schedules import Constant, Cosine, Exponential, Linear, Schedule, as_schedule

KINDS = [Linear, Exponential, Cosine]


@pytest.mark.parametrize("kind", KINDS)
def test_goes_from_start_to_end_and_stays_there(kind):
    schedule = kind(1.0, 0.1, steps=1000)
    assert schedule.at(0) == pytest.approx(1.0)
    assert schedule.at(1000) == pytest.approx(0.1)
    assert schedule.at(10**9) == pytest.approx(0.1)
    assert schedule.at(-5) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Linear(1.0, 0.0, steps=4), [1.0, 0.75, 0.5, 0.25, 0.0]),
        (Linear(0.0, 2.0, steps=4), [0.0, 0.5, 1.0, 1.5, 2.0]),
        (Exponential(1.0, 0.0001, steps=4), [1.0, 0.1, 0.01, 0.001, 0.0001]),
        (Exponential(-2.0, -8.0, steps=2), [-2.0, -4.0, -8.0]),
        (Cosine(1.0, 0.0, steps=4), [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0]),
        (Constant(0.3), [0.3, 0.3, 0.3]),
    ],
)
def test_values(schedule, expected):
    assert [schedule.at(count) for count in range(len(expected))] == pytest.approx(expected, abs=1e-12)


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.integers(1, 10**6), st.integers(0, 10**6))
def test_stays_between_start_and_end_and_moves_one_way(start, end, steps, count):
    for kind in KINDS:
        schedule = kind(start, end, steps=steps)
        now, later = schedule.at(count), schedule.at(count + 1)
        low, high = min(start, end), max(start, end)
        assert low * (1 - 1e-9) <= now <= high * (1 + 1e-9)
        assert (later - now) * (end - start) >= -1e-9 * high**2


def test_a_schedule_without_an_end_is_constant():
    for kind in KINDS:
        assert kind(0.7, steps=10).at(5) == pytest.approx(0.7)


@pytest.mark.parametrize(("of", "expected"), [("agent_steps", 0.75), ("updates", 0.5)])
def test_counts_what_it_says(of, expected):
    schedule = Linear(1.0, 0.0, steps=4, of=of)
    schedule.advance(agent_steps=1, updates=2)
    assert schedule.value.item() == expected


def test_the_scalar_changes_in_place():
    schedule = Linear(1.0, 0.0, steps=10)
    value = schedule.value
    assert value.shape == ()
    assert value.dtype == torch.float32
    assert value.item() == 1.0
    schedule.advance(agent_steps=5, updates=0)
    assert schedule.value is value
    assert value.item() == 0.5
    assert schedule.to("meta").value.device.type == "meta"


def test_refusals():
    with pytest.raises(ValueError, match=r"agent_steps or updates, not 'env_steps'"):
        Linear(1.0, 0.0, steps=10, of="env_steps")
    for kind in (Schedule, *KINDS):
        with pytest.raises(ValueError, match="at least 1, not 0"):
            kind(1.0, 0.5, steps=0)


@pytest.mark.parametrize(("start", "end"), [(0.0, 1.0), (1.0, 0.0), (1.0, -1.0), (0.0, None)])
def test_an_exponential_through_zero_is_refused(start, end):
    with pytest.raises(ValueError, match=rf"from {start} to {end}"):
        Exponential(start, end, steps=10)


def test_a_number_is_a_constant_schedule():
    schedule = as_schedule(0.2)
    assert isinstance(schedule, Schedule)
    assert schedule.at(123) == 0.2
    linear = Linear(1.0, 0.0, steps=2)
    assert as_schedule(linear) is linear
