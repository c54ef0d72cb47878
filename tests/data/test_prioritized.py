import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_lab.core.errors import UserError
from rl_lab.core.schedules import Linear
from rl_lab.data.prioritized import PrioritizedReplaySource, SumTree
from tests.data.test_replay import assert_equal_states
from tests.data.test_sources import same
from tests.data.tiny_world import ReferenceReplay, World, canonical, read


def source(num_envs=2, seed=0, **knobs):
    knobs = {"capacity": 60, "batch_size": 16, "alpha": 0.7, "beta": 0.5} | knobs
    return PrioritizedReplaySource(num_envs, np.random.default_rng(seed), "cpu", **knobs)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3000),
    st.integers(0, 2**16),
    st.lists(st.integers(1, 200), min_size=1, max_size=5),
)
def test_the_tree_finds_what_a_cumulative_sum_finds(size, seed, changes):
    rng = np.random.default_rng(seed)
    tree, masses = SumTree(size), np.zeros(size)
    for count in changes:
        leaves = rng.integers(size, size=count)
        masses[leaves] = np.where(rng.random(count) < 0.3, 0.0, 10.0 ** rng.integers(-3, 4, size=count))
        tree.set(leaves, masses[leaves])
        np.testing.assert_array_equal(tree.leaves[:size], masses)
        np.testing.assert_allclose(tree.top.sum(), masses.sum(), rtol=1e-12)
        if masses.sum() == 0:
            continue
        fractions = np.concatenate([rng.random(50), [0.0, np.nextafter(1.0, 0.0)]])
        found = tree.find(fractions)
        assert (masses[found] > 0).all()
        edges = np.cumsum(masses) / masses.sum()
        assert (edges[found] >= fractions - 1e-9).all()
        assert ((edges - masses / masses.sum())[found] <= fractions + 1e-9).all()


@pytest.mark.parametrize("size", [100, 5000, 200_000])
def test_rounding_never_finds_a_leaf_without_mass(size):
    rng = np.random.default_rng(size)
    for _ in range(10):
        tree = SumTree(size)
        masses = rng.random(size) * (rng.random(size) < 0.2)
        masses[size // 2 :] = 0.0
        tree.set(np.arange(size), masses)
        edges = np.cumsum(tree.levels[0].sum(axis=1)) / masses.sum()  # where rounding matters: between nodes
        fractions = np.concatenate([np.nextafter(edges, 0.0), edges, np.nextafter(edges, 2.0)])
        found = tree.find(fractions.clip(0.0, np.nextafter(1.0, 0.0)))
        assert (masses[found] > 0).all()


@pytest.mark.parametrize("size", [1, 32, 33, 5000, 200_000])
def test_a_tree_is_the_same_however_it_was_filled(size):
    rng = np.random.default_rng(0)
    masses = rng.random(size)
    at_once, by_parts = SumTree(size), SumTree(size)
    at_once.set(np.arange(size), masses)
    for part in np.array_split(rng.permutation(size), -(-size // 100)):
        by_parts.set(part, masses[part])
    for one, other in zip([*at_once.levels, at_once.top], [*by_parts.levels, by_parts.top], strict=True):
        np.testing.assert_array_equal(one, other)


def exact(replay):
    """Probabilities from the definition: by the starts and priorities, without the tree."""
    valid = np.flatnonzero(replay.windows.valid)
    return valid, replay.tree.leaves[valid] / replay.tree.leaves[valid].sum()


@pytest.mark.parametrize("knobs", [{}, {"window": 2}, {"window": 3, "pad": True}])
def test_draws_follow_the_priorities(knobs):
    replay = source(batch_size=50, **knobs)
    replay.add(World(2, seed=1).collect(60))
    replay.draw()
    starts = np.flatnonzero(replay.windows.valid)
    priorities = np.random.default_rng(3).random(len(starts)) * 5
    rows = starts if replay.window is None else replay.windows.expand(starts)
    replay.write(rows, {"priority": torch.from_numpy(priorities).float()})
    mass = (priorities.astype(np.float32).astype(np.float64) + 1e-6) ** 0.7
    np.testing.assert_allclose(exact(replay)[1], mass / mass.sum(), rtol=1e-12)
    drawn = replay.draw(2000)
    drawn = drawn if replay.window is None else drawn[:, 0]
    counts = np.bincount(drawn.reshape(-1), minlength=replay.ring.size)
    assert counts.sum() == counts[starts].sum() == 100_000
    expected = 100_000 * mass / mass.sum()
    # Strata of the mass make counts vary less than independent draws would.
    assert (np.abs(counts[starts] - expected) < 5 * np.sqrt(expected) + 1).all()


def test_weights_undo_the_bias():
    replay = source(beta=0.5)
    replay.add(World(2).collect(20))
    rows = replay.draw()[0]
    replay.write(rows, {"priority": torch.arange(16.0)})
    batch = replay.sample()
    starts, probabilities = exact(replay)
    chances = dict(zip(starts.tolist(), probabilities, strict=True))
    weights = np.array([(len(starts) * chances[row]) ** -0.5 for row in batch.rows.tolist()])
    assert batch["weights"].dtype == torch.float32
    np.testing.assert_allclose(batch["weights"], weights / weights.max(), rtol=1e-6)
    assert float(batch["weights"].max()) == 1


def test_weights_of_windows_lead_like_every_column():
    replay = source(window=3)
    replay.add(World(2).collect(20))
    batch = replay.sample()
    assert batch["weights"].shape == (3, 16)
    assert torch.equal(batch["weights"][0], batch["weights"][2])


def test_beta_follows_its_schedule():
    replay = source(beta=Linear(0.4, 1.0, steps=100, of="updates"))
    replay.add(World(2).collect(20))
    assert replay.beta == 0.4
    replay.advance(agent_steps=10**6, updates=50)
    assert replay.beta == pytest.approx(0.7)
    replay.write(replay.draw()[0], {"priority": torch.arange(16.0)})
    rows = replay.draw()[0]
    half = replay.gather(rows)["weights"]
    replay.advance(agent_steps=0, updates=100)
    full = replay.gather(rows)["weights"]
    torch.testing.assert_close(half.log() / 0.7, full.log())


def test_new_windows_have_the_greatest_priority_so_far():
    world, replay = World(1, never_ends=True), source(1, alpha=1.0, epsilon=0.5, capacity=20)
    replay.add(world.collect(4))
    assert replay.ready
    assert replay.tree.leaves[:6].tolist() == [1, 1, 1, 1, 0, 0]  # the open row has no mass
    replay.write(np.array([0, 1]), {"priority": torch.tensor([6.5, 0.25])})
    replay.add(world.collect(1))
    replay.ready
    assert replay.tree.leaves[:6].tolist() == [7, 0.75, 1, 1, 7, 0]
    replay.write(np.array([0]), {"priority": torch.tensor([0.0])})
    replay.add(world.collect(20))  # everything is overwritten; the greatest priority is remembered
    replay.ready
    assert sorted(replay.tree.leaves[:21].tolist()) == [0] + [7] * 20


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(6, 40),
    st.integers(0, 2**16),
    st.lists(st.integers(1, 15), min_size=1, max_size=8),
    st.sampled_from([{}, {"window": 2}, {"window": 2, "pad": True}, {"window": 2, "mode": "running"}]),
)
def test_mass_is_exactly_on_the_valid_windows(num_envs, capacity, seed, chunks, knobs):
    world, replay = World(num_envs, seed), source(num_envs, capacity=capacity, **knobs)
    reference = ReferenceReplay(num_envs, capacity)
    rng = np.random.default_rng(seed)
    for num_steps in chunks:
        chunk = world.collect(num_steps)
        replay.add(chunk)
        reference.add(chunk)
        if not replay.ready:
            continue
        starts = np.flatnonzero(replay.tree.leaves)
        np.testing.assert_array_equal(starts, np.flatnonzero(replay.windows.valid))
        wanted = reference.running(2) if replay.running else reference.whole(replay.window or 1, replay.padded)
        batch = replay.gather(replay.windows.expand(starts))
        got = read(batch, replay.running)
        assert canonical(got, replay.running) == canonical(wanted, replay.running)
        rows = replay.draw()[0]
        replay.write(rows, {"priority": torch.from_numpy(rng.random(16))})


def test_of_equal_rows_the_last_priority_counts():
    replay = source(1, alpha=1.0, epsilon=1.0)
    replay.add(World(1, never_ends=True).collect(5))
    replay.write(np.array([2, 3, 2, 2]), {"priority": torch.tensor([5.0, 1.0, 9.0, 3.0])})
    assert replay.tree.leaves[:5].tolist() == [1, 1, 4, 2, 1]


def test_priorities_of_a_window_belong_to_its_first_row():
    replay = source(1, alpha=1.0, epsilon=1.0, window=3)
    replay.add(World(1, never_ends=True).collect(6))
    rows = np.array([[1, 2], [2, 3], [3, 4]])
    replay.write(rows, {"priority": torch.tensor([[5.0, 6.0], [7.0, 7.0], [8.0, 8.0]])})
    assert replay.tree.leaves[:6].tolist() == [1, 6, 7, 1, 0, 0]


def test_a_priority_does_not_revive_a_row_that_cannot_start_a_window():
    replay = source(1)
    replay.add(World(1, max_length=1).collect(3))
    replay.write(np.array([0, 1]), {"priority": torch.ones(2)})
    assert (replay.tree.leaves[:6] > 0).tolist() == [True, False, True, False, True, False]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.1])
def test_priorities_that_make_no_sense_are_refused(bad):
    replay = source()
    replay.add(World(2).collect(9))
    rows = replay.draw()[0]
    before = replay.tree.leaves.copy()
    with pytest.raises(ValueError, match=rf"finite and not negative.*{bad}"):
        replay.write(rows, {"priority": torch.full((16,), bad)})
    with pytest.raises(ValueError, match="16 windows"):
        replay.write(rows, {"priority": torch.ones(3)})
    np.testing.assert_array_equal(replay.tree.leaves, before)


def test_other_columns_are_written_beside_priorities():
    replay = source()
    replay.add(World(2).collect(9))
    rows = replay.draw()[0]
    replay.write(rows, {"priority": torch.ones(16), "latents": torch.ones(16)})
    assert replay.gather(rows)["latents"].tolist() == [1.0] * 16
    assert "priority" not in replay.gather(rows)


def test_gathering_what_was_overwritten_is_an_error():
    world, replay = World(1, never_ends=True), source(1, capacity=5)
    replay.add(world.collect(5))
    rows = np.array([0])
    replay.gather(rows)
    replay.add(world.collect(1))
    replay.draw()
    with pytest.raises(ValueError, match="overwritten"):
        replay.gather(rows)


@pytest.mark.parametrize("knobs", [{}, {"window": 3, "pad": True}])
def test_a_restored_source_draws_the_same(knobs):
    knobs = knobs | {"beta": Linear(0.1, 0.9, steps=100)}
    world, replay = World(2, seed=3), source(**knobs)
    replay.add(world.collect(70))
    replay.write(replay.draw()[0], {"priority": torch.rand(16, generator=torch.Generator().manual_seed(0)) * 9})
    replay.add(world.collect(5))  # not looked at before it is saved
    replay.advance(agent_steps=50, updates=0)
    other = source(seed=99, **knobs)
    other.add(World(2, seed=8).collect(10))
    other.draw()
    other.set_state(replay.get_state())
    other.generator.bit_generator.state = replay.generator.bit_generator.state
    assert replay.max_priority == other.max_priority > 1
    assert replay.beta == other.beta == pytest.approx(0.5)
    for _ in range(3):
        one, two = replay.sample(), other.sample()
        same(one, two)
        more, priorities = world.collect(3), torch.arange(16.0)
        for each in (replay, other):
            each.write(one.rows, {"priority": priorities})
            each.add(more)
    assert_equal_states(replay.get_state(), other.get_state())


def test_a_view_can_be_restored_before_its_ring():
    owner = source()
    view = source(seed=1, capacity=None, ring=owner.ring, window=2)
    owner.add(World(2).collect(20))
    view.write(view.draw()[0], {"priority": torch.arange(16.0)})
    states = owner.get_state(), view.get_state()
    new_owner = source()
    new_view = source(seed=1, capacity=None, ring=new_owner.ring, window=2)
    new_view.set_state(states[1])
    new_owner.set_state(states[0])
    new_view.generator.bit_generator.state = view.generator.bit_generator.state
    same(view.sample(), new_view.sample())


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="no window"):
        source().draw()


@pytest.mark.parametrize(("knobs", "key"), [({"alpha": -1.0}, "alpha"), ({"epsilon": 0.0}, "epsilon")])
def test_what_cannot_work_is_refused_at_once(knobs, key):
    with pytest.raises(UserError) as caught:
        source(**knobs)
    assert caught.value.key == key


def test_what_is_added_after_a_restore_does_not_inherit_the_masses_of_the_rows_it_overwrites():
    whole, world = source(capacity=40), World(2)
    whole.add(world.collect(60))
    whole.write(whole.draw()[0], {"priority": torch.arange(16.0)})
    restored = source(capacity=40)
    restored.set_state(whole.get_state())
    chunk = world.collect(9)  # before anyone has looked at the restored source
    for each in (whole, restored):
        each.add(chunk)
    np.testing.assert_array_equal(restored.get_state()["masses"], whole.get_state()["masses"])
