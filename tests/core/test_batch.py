"""Batch: construction, laws of its operations, and what it refuses."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_lab.core.batch import Batch, tree_leaves, tree_map, tree_zip

FIXED = ("observations", "actions", "rewards", "terminated", "truncated", "next_observations")


def make(size=4, start=0, *, nested=False, successors=True, infos=None, extras=True, rows=False):
    """A batch whose every column tells the number of its row."""
    numbers = torch.arange(start, start + size)

    def observe(offset):
        vector = torch.stack([numbers + offset, -numbers], dim=-1).float()
        return {"vector": vector, "inner": {"image": (numbers + offset).to(torch.uint8)}} if nested else vector

    given_infos = ()
    if infos == "list":
        given_infos = [{"row": int(i)} for i in numbers]
    elif infos == "mapping":
        given_infos = {"row": [int(i) for i in numbers], "name": [f"row {int(i)}" for i in numbers]}
    return Batch(
        observations=observe(0),
        actions=numbers * 10,
        rewards=numbers.float() / 2,
        terminated=numbers % 3 == 0,
        truncated=numbers % 3 == 1,
        next_observations=observe(1) if successors else None,
        infos=given_infos,
        extras={"log_probs": -numbers.float()} if extras else {},
        rows=numbers + 1000 if rows else None,
    )


def trajectory(steps=3, size=2, **keywords):
    return Batch.stack([make(size, start=10 * t, **keywords) for t in range(steps)])


def assert_same(left, right):
    """Equal in every column, dtype and info."""
    for name in (*FIXED, "rows"):
        one, other = getattr(left, name), getattr(right, name)
        assert (one is None) == (other is None), name
        for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True):
            assert a.dtype == b.dtype, name
            assert torch.equal(a, b), name
    assert left.extras.keys() == right.extras.keys()
    for name in left.extras:
        assert torch.equal(left.extras[name], right.extras[name]), name
    assert list(left.infos) == list(right.infos)
    if isinstance(left.infos, dict):
        assert left.infos == right.infos


@pytest.mark.parametrize("name", ["observations", "actions", "terminated", "truncated", "next_observations"])
def test_a_column_with_another_leading_shape_is_named(name):
    good = make(4)
    columns = {field.name: getattr(good, field.name) for field in dataclasses.fields(good)}
    columns[name] = columns[name][:3]
    with pytest.raises(ValueError, match=rf"'{name}' has shape \(3.*\(4,\)"):
        Batch(**columns)


def test_an_extra_column_or_a_nested_leaf_with_another_leading_shape_is_named():
    with pytest.raises(ValueError, match="'values'"):
        make(4).with_columns(values=torch.zeros(5))
    nested = make(4, nested=True)
    broken = {"vector": nested.observations["vector"], "inner": {"image": torch.zeros(2)}}
    with pytest.raises(ValueError, match="'observations'"):
        nested.with_columns(observations=broken)


def test_the_second_dimension_of_a_trajectory_is_checked_too():
    batch = trajectory(3, 2)
    with pytest.raises(ValueError, match=r"'values' has shape \(3, 1\).*\(3, 2\)"):
        batch.with_columns(values=torch.zeros(3, 1))
    assert batch.with_columns(values=torch.zeros(3, 2, 7))["values"].shape == (3, 2, 7)


def test_rows_may_number_whole_windows():
    windows = dataclasses.replace(trajectory(3, 2), rows=torch.tensor([5, 9]))
    assert windows.rows.tolist() == [5, 9]
    # A part of a window has no number of its own; writing back uses the batch that was drawn.
    assert windows.flatten().rows is None
    assert windows.select([2]).rows is None
    assert Batch.merge([windows, windows]).rows is None
    assert windows.to("cpu").rows.tolist() == [5, 9]


def test_is_frozen():
    batch = make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.rewards = torch.zeros(4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.select([0]).rewards = torch.zeros(1)
    with pytest.raises((AttributeError, TypeError)):
        batch.new_name = 1


def test_shape_len_and_dones():
    batch = make(5)
    assert len(batch) == 5
    assert batch.shape == (5,)
    assert torch.equal(batch.dones, batch.terminated | batch.truncated)
    assert batch.dones.tolist() == [True, True, False, True, True]
    assert trajectory(3, 2).shape == (3, 2)
    assert len(trajectory(3, 2)) == 3


COLUMNS = {
    "observations": [[0.0], [1.0], [2.0]],
    "actions": [0, 1, 0],
    "rewards": [1, 2, 3],
}


def test_from_columns_takes_dones_alone_as_terminated():
    batch = Batch.from_columns(COLUMNS | {"dones": [0, 1, 1]})
    assert batch.terminated.tolist() == [False, True, True]
    assert batch.truncated.tolist() == [False, False, False]
    assert batch.terminated.dtype == batch.truncated.dtype == torch.bool
    assert batch.rewards.dtype == torch.float32
    assert batch.next_observations is None


def test_from_columns_never_mixes_truncation_and_termination():
    flags = {"dones": [0, 1, 1]}
    told_truncated = Batch.from_columns(COLUMNS | flags | {"truncated": [0, 0, 1]})
    told_terminated = Batch.from_columns(COLUMNS | flags | {"terminated": [0, 1, 0]})
    for batch in (told_truncated, told_terminated):
        assert batch.terminated.tolist() == [False, True, False]
        assert batch.truncated.tolist() == [False, False, True]
        assert batch.dones.tolist() == [False, True, True]


def test_from_columns_without_any_flag_ends_nowhere():
    assert not Batch.from_columns(COLUMNS).dones.any()
    only_truncated = Batch.from_columns(COLUMNS | {"truncated": [0, 0, 1]})
    assert only_truncated.truncated.tolist() == [False, False, True]
    assert not only_truncated.terminated.any()


def test_from_columns_keeps_unknown_names_as_extras_and_leaves_its_argument_alone():
    columns = COLUMNS | {"values": np.zeros(3), "dones": np.array([True, False, False]), "infos": [{}, {}, {"a": 1}]}
    names = set(columns)
    batch = Batch.from_columns(columns)
    assert set(columns) == names
    assert set(batch.extras) == {"values"}
    assert batch["values"].dtype == torch.float32
    assert batch.infos[2] == {"a": 1}


def test_from_columns_names_what_is_missing():
    with pytest.raises(ValueError, match=r"\['actions', 'rewards'\].*\['dones', 'observations'\]"):
        Batch.from_columns({"observations": [[1.0]], "dones": [0]})


def test_from_columns_takes_trajectories_and_dict_observations():
    batch = Batch.from_columns(
        {
            "observations": {"a": np.zeros((3, 2, 4)), "b": np.zeros((3, 2), np.uint8)},
            "actions": np.zeros((3, 2), np.int64),
            "rewards": np.zeros((3, 2)),
            "dones": np.zeros((3, 2), bool),
            "next_observations": {"a": np.ones((3, 2, 4)), "b": np.ones((3, 2), np.uint8)},
        }
    )
    assert batch.shape == (3, 2)
    assert batch.observations["a"].dtype == torch.float32
    assert batch.next_observations["b"].dtype == torch.uint8
    assert batch.has_next.all()


def test_successors_may_be_none_as_a_whole():
    batch = Batch.from_columns(COLUMNS | {"next_observations": None})
    assert batch.next_observations is None
    assert batch.has_next.tolist() == [False, False, False]
    assert batch.has_next.dtype == torch.bool


@pytest.mark.parametrize("container", [list, tuple])
def test_single_successors_may_be_none(container):
    batch = Batch.from_columns(COLUMNS | {"next_observations": container([[5.0], None, np.array([7.0])])})
    assert batch.has_next.tolist() == [True, False, True]
    assert batch.next_observations.tolist() == [[5.0], [1.0], [7.0]]  # where there is none, the observation stands in
    assert batch.next_observations.dtype == torch.float32
    assert batch.select([1, 2]).has_next.tolist() == [False, True]
    assert Batch.from_columns(COLUMNS | {"next_observations": [None] * 3}).has_next.tolist() == [False] * 3


def test_single_successors_of_dict_observations_may_be_none():
    columns = {"observations": {"a": [[1.0], [2.0]]}, "actions": [0, 0], "rewards": [0, 0]}
    batch = Batch.from_columns(columns | {"next_observations": [None, {"a": [9.0]}]})
    assert batch.next_observations["a"].tolist() == [[1.0], [9.0]]
    assert batch.has_next.tolist() == [False, True]


def test_reads_fields_extras_and_dones_by_name():
    batch = make()
    assert batch["log_probs"] is batch.extras["log_probs"]
    assert batch["rewards"] is batch.rewards
    assert torch.equal(batch["dones"], batch.dones)
    for name in ("log_probs", "rewards", "dones", "observations"):
        assert name in batch
    assert "log_prob" not in batch


def test_an_unknown_column_is_answered_with_the_valid_names():
    with pytest.raises(KeyError, match=r"no column 'log_prob'.*'actions'.*'dones'.*'log_probs'.*'rewards'"):
        make()["log_prob"]


def test_merge_concatenates_every_column():
    merged = Batch.merge([make(2, rows=True, infos="list"), make(3, start=2, rows=True, infos="list")])
    assert_same(merged, make(5, rows=True, infos="list"))


@pytest.mark.parametrize("join", [Batch.merge, Batch.stack])
def test_joining_nothing_is_refused(join):
    with pytest.raises(ValueError, match="empty"):
        join([])


def test_merge_of_batches_where_only_some_have_successors():
    merged = Batch.merge([make(2, successors=False), make(2, start=2)])
    assert merged.has_next.tolist() == [False, False, True, True]
    assert torch.equal(merged.next_observations[:2], merged.observations[:2])
    assert torch.equal(merged.next_observations[2:], make(2, start=2).next_observations)
    # and in the other order
    assert Batch.merge([make(1), make(1, successors=False)]).has_next.tolist() == [True, False]
    # and with dict observations
    nested = Batch.merge([make(1, nested=True), make(2, nested=True, successors=False)])
    assert nested.has_next.tolist() == [True, False, False]


def test_merge_of_batches_where_none_has_successors_has_none():
    merged = Batch.merge([make(2, successors=False), make(2, successors=False)])
    assert merged.next_observations is None
    assert "has_next" not in merged.extras
    assert not merged.has_next.any()


def test_merge_keeps_the_masks_of_single_successors():
    masked = Batch.from_columns(COLUMNS | {"next_observations": [[5.0], None, [7.0]]})
    whole = Batch.from_columns(COLUMNS | {"next_observations": [[1.0], [2.0], [3.0]]})
    absent = Batch.from_columns(COLUMNS)
    assert Batch.merge([masked, whole]).has_next.tolist() == [True, False, True, True, True, True]
    assert Batch.merge([whole, masked]).has_next.tolist() == [True, True, True, True, False, True]
    assert Batch.merge([masked, absent]).has_next.tolist() == [True, False, True, False, False, False]
    assert "has_next" not in Batch.merge([whole, whole]).extras


def test_merge_refuses_columns_that_differ():
    with pytest.raises(ValueError, match=r"\['log_probs'\] against \[\]"):
        Batch.merge([make(), make(extras=False)])
    with pytest.raises(ValueError, match=r"trees differ.*inner.*Tensor"):
        Batch.merge([make(nested=True), make()])
    with pytest.raises(ValueError, match=r"trees differ.*Tensor.*inner"):
        Batch.merge([make(), make(nested=True)])


def test_merge_keeps_row_numbers_only_where_all_have_them():
    assert Batch.merge([make(rows=True), make()]).rows is None
    assert Batch.merge([make(), make(rows=True)]).rows is None


def test_merge_joins_infos_of_both_kinds():
    assert Batch.merge([make(1, infos="list"), make(2, start=1, infos="list")]).infos == [
        {"row": 0},
        {"row": 1},
        {"row": 2},
    ]
    merged = Batch.merge([make(1, infos="mapping"), make(2, start=1, infos="mapping")])
    assert merged.infos == {"row": [0, 1, 2], "name": ["row 0", "row 1", "row 2"]}
    assert Batch.merge([make(1), make(2)]).infos == ()


def test_merge_keeps_infos_beside_their_rows_when_some_batches_have_none():
    assert Batch.merge([make(2), make(1, infos="list")]).infos == [{}, {}, {"row": 0}]
    mapping = Batch.merge([make(2), make(1, start=7, infos="mapping")])
    assert mapping.infos["row"] == [None, None, 7]
    assert mapping.select([2]).infos["row"] == [7]


def test_merge_refuses_infos_that_do_not_fit():
    with pytest.raises(ValueError, match="list with infos given as a mapping"):
        Batch.merge([make(infos="list"), make(infos="mapping")])
    other = dataclasses.replace(make(infos="mapping"), infos={"elsewhere": [1, 2, 3, 4]})
    with pytest.raises(ValueError, match="different keys"):
        Batch.merge([make(infos="mapping"), other])


def test_merge_does_not_share_memory_with_its_parts():
    part = make(2)
    merged = Batch.merge([part, make(2)])
    merged.rewards.fill_(99.0)
    assert part.rewards.max() < 99.0


def picks(size):
    """(what to select, the row numbers that it means)."""
    mask = [i % 2 == 1 for i in range(size)]
    return [
        (torch.tensor(mask), [i for i in range(size) if mask[i]]),
        (np.array(mask), [i for i in range(size) if mask[i]]),
        (mask, [i for i in range(size) if mask[i]]),
        (slice(1, 4), [1, 2, 3]),
        (slice(None, None, 2), list(range(0, size, 2))),
        (slice(-2, None), [size - 2, size - 1]),
        ([-1, 0, -size], [size - 1, 0, 0]),
        ([2, 2, 1], [2, 2, 1]),
        (torch.tensor([3, 0]), [3, 0]),
        (np.array([3, 0]), [3, 0]),
        (range(2), [0, 1]),
        (2, [2]),
        (torch.tensor(-1), [size - 1]),
        ([], []),
        (torch.tensor([], dtype=torch.int64), []),
        (torch.zeros(size, dtype=torch.bool), []),
        (slice(0, 0), []),
    ]


@pytest.mark.parametrize("infos", [None, "list", "mapping"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("case", range(len(picks(5))))
def test_select(case, nested, infos):
    indices, expected = picks(5)[case]
    selected = make(5, nested=nested, infos=infos, rows=True).select(indices)
    assert selected.rewards.dtype == torch.float32
    assert selected.actions.tolist() == [10 * i for i in expected]
    assert selected.rows.tolist() == [1000 + i for i in expected]
    assert selected["log_probs"].tolist() == [-i for i in expected]
    image = selected.next_observations["inner"]["image"] if nested else selected.next_observations[:, 0]
    assert image.tolist() == [i + 1 for i in expected]
    assert len(selected) == len(expected)
    if infos == "list":
        assert selected.infos == [{"row": i} for i in expected]
    elif infos == "mapping":
        assert selected.infos == {"row": expected, "name": [f"row {i}" for i in expected]}


@pytest.mark.parametrize("indices", [[4], [-5], [True, False], torch.tensor([0.5])])
def test_select_outside_of_the_batch_is_an_error(indices):
    with pytest.raises((IndexError, RuntimeError)):
        make(4).select(indices)


def test_select_takes_steps_of_a_trajectory():
    batch = trajectory(3, 2, infos="list", rows=True)
    assert_same(batch.select([1]), Batch.stack([make(2, start=10, infos="list", rows=True)]))


def test_an_empty_batch_can_be_handled():
    empty = make(4, infos="list").select([])
    assert len(empty) == 0
    assert len(empty.select([])) == 0
    assert len(empty.select(torch.zeros(0, dtype=torch.bool))) == 0
    assert_same(Batch.merge([empty, make(2, infos="list")]), make(2, infos="list"))


KEYWORDS = st.fixed_dictionaries(
    {
        "nested": st.booleans(),
        "successors": st.booleans(),
        "infos": st.sampled_from([None, "list", "mapping"]),
        "extras": st.booleans(),
        "rows": st.booleans(),
    }
)
SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=4)


def parts_of(sizes, keywords):
    starts = np.cumsum([0, *sizes])[:-1]
    return [make(size, start=int(start), **keywords) for size, start in zip(sizes, starts, strict=True)]


@settings(max_examples=60, deadline=None)
@given(SIZES.filter(sum), KEYWORDS)
def test_merge_of_parts_is_the_whole_and_selects_back(sizes, keywords):
    parts = parts_of(sizes, keywords)
    merged = Batch.merge(parts)
    assert_same(merged, make(sum(sizes), **keywords))
    start = 0
    for part in parts:
        back = merged.select(slice(start, start + len(part)))
        if len(part):
            assert_same(back, part)
        start += len(part)


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, KEYWORDS)
def test_merge_is_associative(left, right, keywords):
    parts = parts_of([*left, *right], keywords)
    grouped = Batch.merge([Batch.merge(parts[: len(left)]), Batch.merge(parts[len(left) :])])
    assert_same(grouped, Batch.merge(parts))


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 6), KEYWORDS)
def test_select_laws(data, size, keywords):
    batch = make(size, **keywords)
    index = st.integers(-size, size - 1)
    first = data.draw(st.lists(index, max_size=6))
    again = data.draw(st.lists(st.integers(0, len(first) - 1), max_size=6)) if first else []
    assert_same(batch.select(slice(None)), batch)
    assert_same(batch.select(first).select(again), batch.select([first[i] for i in again]))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    assert_same(batch.select(mask), batch.select(mask.nonzero().flatten()))
    cut = data.draw(st.integers(0, size))
    if 0 < cut < size:
        assert_same(Batch.merge([batch.select(slice(0, cut)), batch.select(slice(cut, None))]), batch)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), KEYWORDS)
def test_flatten_of_a_stack_is_the_merge(steps, size, keywords):
    parts = [make(size, start=10 * t, **keywords) for t in range(steps)]
    flat = Batch.stack(parts).flatten()
    merged = Batch.merge(parts)
    assert flat.infos == ()
    assert_same(flat, dataclasses.replace(merged, infos=()))


def test_flatten_leaves_a_flat_batch_alone():
    batch = make(infos="list")
    assert batch.flatten() is batch


def test_stack_makes_time_the_first_dimension_and_keeps_infos_by_step():
    batch = trajectory(3, 2, nested=True, infos="mapping")
    assert batch.shape == (3, 2)
    assert batch.observations["vector"].shape == (3, 2, 2)
    assert batch.actions.tolist() == [[0, 10], [100, 110], [200, 210]]
    assert len(batch.infos) == 3
    assert batch.select([2]).infos[0]["row"] == [20, 21]
    assert trajectory(3, 2).infos == ()


def test_stack_of_different_sizes_is_refused():
    with pytest.raises(RuntimeError, match="equal size"):
        Batch.stack([make(2), make(3)])


def test_to_moves_tensors_and_leaves_the_rest():
    batch = dataclasses.replace(
        make(3, nested=True, infos="list", rows=True), extras={"names": np.array(["a", "b", "c"])}
    )
    moved = batch.to("meta")
    for column in (moved.observations, moved.next_observations, moved.actions, moved.rows, moved.terminated):
        assert all(leaf.device.type == "meta" for leaf in tree_leaves(column))
    assert moved["names"].tolist() == ["a", "b", "c"]
    assert moved.infos is batch.infos
    assert_same(make(3, rows=True).to("cpu"), make(3, rows=True))


def test_map_applies_to_every_tensor_and_leaves_none():
    doubled = make(3, nested=True, successors=False).map(lambda tensor: tensor.float() * 2)
    assert doubled.next_observations is None
    assert doubled.rows is None
    assert doubled.observations["inner"]["image"].tolist() == [0.0, 2.0, 4.0]
    assert doubled["log_probs"].tolist() == [0.0, -2.0, -4.0]
    assert doubled.terminated.tolist() == [2.0, 0.0, 0.0]


def test_with_columns_adds_and_replaces_and_leaves_the_original():
    batch = make(3)
    changed = batch.with_columns(values=torch.ones(3), rewards=torch.zeros(3), log_probs=torch.full((3,), 5.0))
    assert changed["values"].tolist() == [1.0] * 3
    assert changed.rewards.tolist() == [0.0] * 3
    assert changed["log_probs"].tolist() == [5.0] * 3
    assert "values" not in batch
    assert batch["log_probs"].tolist() == [0.0, -1.0, -2.0]
    assert torch.equal(changed.actions, batch.actions)


@pytest.mark.parametrize("name", ["dones", "extras"])
def test_with_columns_refuses_what_is_not_a_column(name):
    with pytest.raises(ValueError, match=f"'{name}' is not a column"):
        make(3).with_columns(**{name: torch.ones(3)})


def test_trees():
    tree = {"a": 1, "b": {"c": 2, "d": None}}
    assert tree_map(lambda leaf: leaf + 1, tree) == {"a": 2, "b": {"c": 3, "d": None}}
    assert tree_map(lambda leaf: leaf + 1, None) is None
    assert list(tree_leaves(tree)) == [1, 2]
    assert tree_zip(lambda x, y: x + y, tree, tree) == {"a": 2, "b": {"c": 4, "d": None}}


@pytest.mark.parametrize(
    ("left", "right"), [({"a": 1}, {"b": 1}), ({"a": 1}, None), (None, {"a": 1}), (None, 1), (1, None), (1, {"a": 1})]
)
def test_trees_of_different_structure_are_refused(left, right):
    with pytest.raises(ValueError, match="trees differ"):
        tree_zip(lambda x, y: x, left, right)
