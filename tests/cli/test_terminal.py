import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_lab.cli.terminal import draw_curve, short, table, ticks


def plot_rows(text, height):
    """Return the part right of the axis, from top to bottom."""
    return [line.split("│" if "│" in line else "┤", 1)[1] for line in text.splitlines()[1 : 1 + height]]


def columns_of_dots(rows):
    """Return, for each column of characters, the mean height of its dots (0 at the bottom)."""
    found = {}
    for row, line in enumerate(rows):
        for column, character in enumerate(line):
            if 0x2800 < ord(character) < 0x2900:
                found.setdefault(column, []).append(len(rows) - 1 - row)
    return {column: sum(heights) / len(heights) for column, heights in sorted(found.items())}


def test_a_rising_curve_rises_from_one_end_of_the_plot_to_the_other():
    text = draw_curve([(i, float(i)) for i in range(100)], title="up", height=12, width=60, unicode=True)
    heights = list(columns_of_dots(plot_rows(text, 12)).values())
    assert text.splitlines()[0] == "up"
    assert heights == sorted(heights)
    assert (heights[0], heights[-1]) == (0, 11)
    assert len(heights) == 60 - len("80") - 2


def test_points_may_come_in_any_order_and_gaps_are_bridged():
    points = [(0, 0.0), (50, 10.0), (100, 0.0)]
    text = draw_curve(points, title="", unicode=True, height=8)
    assert draw_curve(points[::-1], title="", unicode=True, height=8) == text
    columns = columns_of_dots(plot_rows(text, 8))
    assert list(columns) == list(range(len(columns)))
    assert columns[len(columns) // 2] == max(columns.values()) == 7


def test_axes_are_labelled_with_round_numbers():
    text = draw_curve([(0, 0.0), (100_000, 500.0)], title="t", target=475, unicode=True)
    assert "500 ┤" in text
    assert "  0 ┤" in text
    assert text.splitlines()[-2].split() == ["0", "50k", "100k"]
    assert "475 = target" in text.splitlines()[-1]
    assert sum("╌" in row for row in plot_rows(text, 16)) == 1


def test_a_target_outside_the_data_is_inside_the_plot():
    text = draw_curve([(0, 1.0), (1, 2.0)], title="", target=100.0, unicode=True)
    assert "╌" in plot_rows(text, 16)[0]


def test_the_band_is_shaded_around_the_curve():
    points = [(float(i), 5.0) for i in range(10)]
    text = draw_curve(points, title="", band=[(x, 0.0, 10.0) for x, _ in points], unicode=True, height=9)
    for row in plot_rows(text, 9):
        assert "░" in row or any(0x2800 < ord(character) < 0x2900 for character in row)


def test_ascii_where_nothing_else_can_be_shown(monkeypatch):
    import io
    import sys

    points = [(i, math.sin(i)) for i in range(20)]
    assert draw_curve(points, title="t", target=0.5, band=[(0, -1, 1), (19, -1, 1)], unicode=False).isascii()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert draw_curve(points, title="t", target=0.5).isascii()
    assert "*" in draw_curve(points, title="t")
    assert all(line.isascii() for line in table(["a"], [["b"]]))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert not draw_curve(points, title="t").isascii()


def test_nothing_to_draw():
    for points in ([], [(0, math.nan)], [(math.inf, 1.0)]):
        assert "nothing to draw" in draw_curve(points, title="t")


@settings(max_examples=100, deadline=None)
@given(
    points=st.lists(st.tuples(st.floats(0, 1e9), st.floats(-1e12, 1e12) | st.floats()), max_size=20),
    width=st.integers(1, 120),
    height=st.integers(1, 30),
    target=st.none() | st.floats(-1e6, 1e6),
    unicode=st.booleans(),
)
def test_any_curve_fits(points, width, height, target, unicode):
    text = draw_curve(points, title="t", width=width, height=height, target=target, unicode=unicode)
    if "nothing" in text:
        return
    lines = text.splitlines()
    assert len(lines) == 1 + max(2, height) + 2 + (target is not None)
    assert all(len(line) <= max(width, 40) for line in lines)
    dotted = [line for line in lines[1:-2] if any(0x2800 < ord(c) < 0x2900 or c == "*" for c in line)]
    assert dotted


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 12))
@example(-0.5, 200000001.0, 2)  # hardly more than two steps
def test_ticks_are_round_even_and_cover_the_range(low, span, about):
    found = ticks(low, low + span, about)
    step = found[1] - found[0]
    tolerance = 1e-6 * (span + abs(low))
    assert found[0] <= low + tolerance
    assert found[-1] >= low + span - tolerance
    assert all(math.isclose(b - a, step, abs_tol=tolerance) for a, b in itertools.pairwise(found))
    assert len(found) <= about + 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (500, "500"), (9999, "9999"), (20_000, "20k"), (1_500_000, "1.5M"), (-250.5, "-250.5"), (2e9, "2G")],
)
def test_labels_are_short(value, text):
    assert short(value) == text


def test_table_aligns():
    lines = table(["name", "n"], [["a", "1"], ["long name", "100"]], right={1})
    assert [len(line) for line in lines] == [14, 14, 14, 14]
    assert lines[2] == "a            1"
    assert table(["a"], [])[0] == "a"
