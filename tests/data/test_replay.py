import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_lab.core.batch import Batch, replace_unchecked
from rl_lab.data.replay import Ring
from rl_lab.data.windows import Windows
from tests.data.tiny_world import ReferenceReplay, World, canonical, read, successor

TORCH = torch.device("cpu")  # torch tensors instead of NumPy arrays
MODES = {"whole": {}, "padded": {"padded": True}, "running": {"running": True}}


def all_windows(ring, windows):
    """Gather every valid window at once."""
    windows.sync()
    rows = windows.expand(np.flatnonzero(windows.valid))
    return ring.gather(rows, running=windows.running, padded=windows.padded)


def expected(reference, windows):
    if windows.running:
        return reference.running(windows.length)
    return reference.whole(windows.length, pad=windows.padded)


def without_successors(batch):
    return replace_unchecked(batch, next_observations=None)


@st.composite
def histories(draw):
    """Draw sizes, and what happens: chunks of decisions (with successors or not) and closed episodes."""
    num_envs = draw(st.integers(1, 3))
    events = st.one_of(
        st.tuples(st.just("add"), st.integers(1, 12)),
        st.tuples(st.just("add"), st.integers(1, 3)),
        st.tuples(st.just("blind"), st.integers(1, 4)),
        st.tuples(st.just("close"), st.integers(0, num_envs - 1)),
    )
    return {
        "num_envs": num_envs,
        "capacity": draw(st.integers(1, 40)),
        "max_length": draw(st.sampled_from([1, 2, 4, 9])),
        "seed": draw(st.integers(0, 2**16)),
        "events": draw(st.lists(events, min_size=1, max_size=10)),
        "length": draw(st.integers(1, 4)),
    }


def play(history, rings, reference, check):
    world = World(history["num_envs"], history["seed"], history["max_length"])
    for kind, value in history["events"]:
        if kind == "close":
            world.restart(value)
            reference.close_open(value)
            for ring in rings:
                ring.close_open(np.arange(history["num_envs"]) == value)
        else:
            chunk = world.collect(value)
            reference.add(chunk, with_successors=kind == "add")
            for ring in rings:
                ring.add(chunk if kind == "add" else without_successors(chunk))
        check()


@settings(max_examples=150, deadline=None)
@given(histories())
def test_the_ring_holds_what_a_slow_list_based_replay_holds(history):
    num_envs, capacity, length = history["num_envs"], history["capacity"], history["length"]
    rings = [Ring(num_envs, capacity), Ring(num_envs, capacity, TORCH)]
    reference = ReferenceReplay(num_envs, capacity)
    views = [[Windows(ring, length, **mode) for mode in MODES.values()] for ring in rings]

    def check():
        for ring, windows in zip(rings, views, strict=True):
            assert len(ring) == len(reference)
            for view in windows:
                view.sync()
                wanted = expected(reference, view)
                assert view.count == np.count_nonzero(view.valid) == len(wanted)
                if wanted:
                    got = read(all_windows(ring, view), view.running)
                    assert canonical(got, view.running) == canonical(wanted, view.running)

    play(history, rings, reference, check)


@settings(max_examples=60, deadline=None)
@given(histories())
def test_a_view_that_looks_rarely_sees_the_same_as_one_that_always_looks(history):
    ring = Ring(history["num_envs"], history["capacity"])
    reference = ReferenceReplay(history["num_envs"], history["capacity"])
    often, rarely = (Windows(ring, history["length"], padded=True) for _ in range(2))
    rarely.sync()
    play(history, [ring], reference, often.sync)
    rarely.sync()
    np.testing.assert_array_equal(often.valid, rarely.valid)
    assert often.count == rarely.count


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 60), st.integers(0, 2**16), st.lists(st.integers(1, 30), max_size=6))
def test_every_drawn_transition_re_simulates(num_envs, capacity, seed, chunks):
    world, ring = World(num_envs, seed), Ring(num_envs, capacity)
    windows = Windows(ring, 1)
    lengths = {}  # (env, episode) -> length
    for num_steps in chunks:
        chunk = world.collect(num_steps)
        ring.add(chunk)
        for seen in chunk.next_observations[chunk.dones].tolist():
            lengths[seen[0], seen[1]] = seen[2]
    windows.sync()
    if not windows.count:
        return
    batch = ring.gather(windows.draw(np.random.default_rng(seed), 64))
    for i in range(64):
        env, episode, t, state = batch.observations[i].tolist()
        assert batch.next_observations[i].tolist() == [
            env,
            episode,
            t + 1,
            successor(env, state, int(batch.actions[i])),
        ]
        assert int(batch.rows[i]) % num_envs == env
        is_end = lengths.get((env, episode)) == t + 1
        assert bool(batch.dones[i]) is is_end
        assert float(batch.rewards[i]) == (1 + episode if is_end else 0)  # only the last step is rewarded


def test_one_step_episodes_take_two_rows_each():
    world, ring = World(1, max_length=1), Ring(1, 10)
    ring.add(world.collect(4))
    assert ring.heads.tolist() == [8]
    assert len(ring) == 4
    assert ring.opened.tolist() == [False]
    assert ring.columns["is_last"][:8].tolist() == [False, True] * 4
    assert ring.columns["is_first"][:8].tolist() == [True, False] * 4
    assert ring.columns["rewards"][:8].tolist() == [1, 0, 2, 0, 3, 0, 4, 0]
    assert ring.columns["actions"][1:8:2].tolist() == [0, 0, 0, 0]


def test_the_open_row_is_a_successor_but_no_start():
    world, ring = World(1, never_ends=True), Ring(1, 10)
    chunk = world.collect(3)
    ring.add(chunk)
    windows = Windows(ring, 1)
    windows.sync()
    assert np.flatnonzero(windows.valid).tolist() == [0, 1, 2]
    assert torch.equal(ring.gather(np.array([2])).next_observations, chunk.next_observations[2])


def test_without_successors_the_newest_decision_waits_for_the_next_observation():
    world, ring = World(1, never_ends=True), Ring(1, 10)
    windows = Windows(ring, 1)
    ring.add(without_successors(world.collect(2)))
    windows.sync()
    assert np.flatnonzero(windows.valid).tolist() == [0]
    second = world.collect(1)
    ring.add(without_successors(second))
    windows.sync()
    assert np.flatnonzero(windows.valid).tolist() == [0, 1]
    assert torch.equal(ring.gather(np.array([1])).next_observations, second.observations[0])


def test_an_end_without_a_final_observation_repeats_the_last_one():
    world, ring = World(1, max_length=1), Ring(1, 10)
    chunk = world.collect(1)
    ring.add(without_successors(chunk))
    batch = ring.gather(np.array([0]))
    assert torch.equal(batch.next_observations, batch.observations)
    assert torch.equal(batch.dones, torch.tensor([True]))


def test_entries_without_a_successor_are_masked_by_has_next():
    ring = Ring(2, 10)
    columns = {"observations": [[1.0], [2.0]], "actions": [0, 0], "rewards": [0.0, 0.0], "dones": [False, False]}
    batch = Batch.from_columns(columns | {"next_observations": [torch.tensor([5.0]), None]})
    ring.add(batch.map(lambda leaf: leaf[None]))
    assert ring.opened.tolist() == [True, False]
    windows = Windows(ring, 1)
    windows.sync()
    assert np.flatnonzero(windows.valid).tolist() == [0]


def test_close_open_truncates_running_episodes_only_where_asked():
    world, ring = World(2, never_ends=True), Ring(2, 20)
    ring.add(world.collect(3))
    ring.close_open(np.array([False, True]))
    assert ring.heads.tolist() == [3, 4]
    assert ring.gather(np.array([4, 5])).truncated.tolist() == [False, True]
    ring.close_open()
    ring.close_open()  # nothing is open any more
    assert ring.heads.tolist() == [4, 4]
    world.restart(0)
    world.restart(1)
    ring.add(world.collect(1))
    windows = Windows(ring, 3)
    windows.sync()
    assert np.flatnonzero(windows.valid).tolist() == [0, 1]  # three decisions of the closed episodes, no other


@pytest.mark.parametrize("device", [None, TORCH])
def test_a_chunk_longer_than_the_ring_leaves_its_newest_rows(device):
    world, ring, reference = World(2, seed=3), Ring(2, 14, device), ReferenceReplay(2, 14)
    for num_steps in (5, 200, 3):
        chunk = world.collect(num_steps)
        ring.add(chunk)
        reference.add(chunk)
    windows = Windows(ring, 2, running=True)
    assert canonical(read(all_windows(ring, windows), True), True) == canonical(reference.running(2), True)


def test_images_stay_bytes_and_dict_observations_stay_dicts():
    shape = (6, 2)
    generator = np.random.default_rng(0)
    images = torch.from_numpy(generator.integers(0, 256, (7, 2, 3, 4, 4), dtype=np.uint8))
    speeds = torch.from_numpy(generator.random((7, 2, 5), dtype=np.float32))
    ended = torch.zeros(shape, dtype=torch.bool)
    ended[2, 1] = True
    batch = Batch(
        observations={"camera": {"front": images[:-1]}, "speed": speeds[:-1]},
        actions=torch.from_numpy(generator.random((*shape, 2), dtype=np.float32)),
        rewards=torch.zeros(shape),
        terminated=ended,
        truncated=torch.zeros_like(ended),
        next_observations={"camera": {"front": images[1:]}, "speed": speeds[1:]},
        extras={"latents": {"mean": torch.ones(*shape, 3, dtype=torch.float16)}},
        infos=[{"secret": 1}] * 6,
    )
    for device in (None, TORCH):
        ring = Ring(2, 20, device)
        ring.add(batch)
        got = ring.gather(np.array([4 + 0, 4 + 1, 0]))  # row 2 of both environments, row 0 of the first
        assert got.observations["camera"]["front"].dtype == torch.uint8
        assert torch.equal(got.observations["camera"]["front"], images[[2, 2, 0], [0, 1, 0]])
        assert torch.equal(got.next_observations["camera"]["front"], images[[3, 3, 1], [0, 1, 0]])
        assert torch.equal(got.next_observations["speed"], speeds[[3, 3, 1], [0, 1, 0]])
        assert got.extras["latents"]["mean"].dtype == torch.float16
        assert got.infos == ()
        assert (got.observations["speed"].shape, got.actions.shape) == ((3, 5), (3, 2))


def test_columns_that_do_not_fit_are_refused_by_name():
    world, ring = World(2), Ring(2, 20)
    chunk = world.collect(2)
    ring.add(chunk)
    with pytest.raises(ValueError, match=r"'actions' of int64.*float32"):
        ring.add(replace_unchecked(chunk, actions=chunk.actions.float()))
    with pytest.raises(ValueError, match="'observations'"):
        ring.add(replace_unchecked(chunk, observations=chunk.observations[..., :2]))
    with pytest.raises(ValueError, match="marks"):
        ring.add(replace_unchecked(chunk, extras={}))
    with pytest.raises(ValueError, match="2 environments"):
        ring.add(World(3).collect(1))
    with pytest.raises(ValueError, match="is_last"):
        Ring(2, 20).add(chunk.with_columns(is_last=chunk.dones))


@pytest.mark.parametrize("device", [None, TORCH])
def test_written_columns_come_back_and_the_later_row_wins_where_windows_overlap(device):
    ring = Ring(1, 50, device)
    ring.add(World(1, never_ends=True).collect(40))
    generator = np.random.default_rng(0)
    for length in (1, 5):
        starts = generator.integers(0, 12, size=30)  # they overlap a lot
        rows = starts if length == 1 else starts + np.arange(length)[:, None]
        values = torch.from_numpy(generator.random((*rows.shape, 2), dtype=np.float32))
        ring.write(torch.from_numpy(rows), {"latents": values})
        wanted = {}
        for place in np.ndindex(rows.shape):  # time-major: later in the window, then later in the batch
            wanted[rows[place]] = values[place].tolist()
        for row, value in wanted.items():
            assert ring.gather(np.array([row])).extras["latents"][0].tolist() == value
        assert ring.gather(np.array([39])).extras["latents"].tolist() == [[0, 0]]


@pytest.mark.parametrize("device", [None, TORCH])
def test_what_was_written_leaves_with_its_row(device):
    world, ring = World(1, never_ends=True), Ring(1, 4, device)
    ring.add(world.collect(4))
    ring.write(np.arange(4), {"latents": torch.ones(4), "marks": torch.full((4,), -1, dtype=torch.int32)})
    ring.add(world.collect(2))  # rows 4 and 0
    batch = ring.gather(np.array([0, 1, 2, 3, 4]))
    assert batch.extras["latents"].tolist() == [0, 1, 1, 1, 0]
    assert [mark == -1 for mark in batch.extras["marks"].tolist()] == [False, True, True, True, False]


def test_history_is_not_rewritten():
    ring = Ring(1, 4)
    ring.add(World(1).collect(2))
    for name in ("rewards", "observations", "is_last"):
        with pytest.raises(ValueError, match="history"):
            ring.write(np.arange(2), {name: torch.zeros(2)})


@pytest.mark.parametrize("device", [None, TORCH])
@pytest.mark.parametrize("shape", [(3, 4), (12,), (3,), (5, 3), (), (4, 2)])
def test_columns_whose_leading_shape_is_not_their_rows_are_refused_by_name(device, shape):
    ring = Ring(1, 50, device)
    ring.add(World(1, never_ends=True).collect(40))
    rows = torch.arange(12).reshape(4, 3)
    latents = {"mean": torch.zeros(4, 3), "std": torch.zeros(shape)}
    with pytest.raises(ValueError, match=r"column 'latents' has the shape .*\[4, 3\]"):
        ring.write(rows, {"marks": torch.zeros(4, 3), "latents": latents})
    assert not ring.written  # nothing is written by halves


@pytest.mark.parametrize(("device", "other"), [(None, None), (TORCH, TORCH), (None, TORCH), (TORCH, None)])
@pytest.mark.parametrize("num_steps", [0, 3, 50])
def test_state_round_trip_is_exact_and_goes_on_equally(device, other, num_steps):
    world, ring = World(2, seed=5), Ring(2, 40, device)
    if num_steps:
        ring.add(world.collect(num_steps))
        ring.write(np.arange(3), {"latents": torch.rand(3, 2, generator=torch.Generator().manual_seed(0))})
    state = ring.get_state()
    fresh, used = Ring(2, 40, other), Ring(2, 40, other)
    used.add(World(2, seed=9).collect(90))
    used.write(np.arange(3), {"rubbish": torch.ones(3)})
    more = [world.collect(1), world.collect(7)]
    for chunk in more:
        ring.add(chunk)
    for copy in (fresh, used):
        copy.set_state(state)
        assert_equal_states(copy.get_state(), state)
        for chunk in more:
            copy.add(chunk)
        assert_equal_states(copy.get_state(), ring.get_state())
        assert len(copy) == len(ring)


@settings(max_examples=100, deadline=None)
@given(histories(), st.lists(st.booleans(), min_size=10, max_size=10), st.integers(1, 200))
def test_segments_written_once_and_the_tail_restore_the_ring(history, saves, segment_bytes):
    ring, copy = (Ring(history["num_envs"], history["capacity"]) for _ in range(2))
    ring.segment_bytes = segment_bytes
    reference = ReferenceReplay(history["num_envs"], history["capacity"])
    disk = {}
    moments = iter(saves)
    rng = np.random.default_rng(history["seed"])

    def save():
        if ring.columns and rng.random() < 0.5:  # what is on the disk already may be rewritten
            rows = rng.integers(ring.num_filled * ring.num_envs, size=3)
            marks = torch.from_numpy(rng.integers(100, size=3, dtype=np.int32))
            ring.write(rows, {"marks": marks, "latents": torch.ones(3)})
        if not next(moments, True):
            return
        segments = ring.segments()
        for start, stop in segments:
            disk.setdefault((start, stop), ring.read(start, stop))
        for start, stop in disk.keys() - set(segments):
            del disk[start, stop]
        copy.set_state(
            ring.get_state(since=segments[-1][1] if segments else 0), {start: part for (start, _), part in disk.items()}
        )
        assert_equal_states(copy.get_state(), ring.get_state())

    play(history, [ring], reference, save)


def test_a_decision_that_may_still_be_truncated_is_in_no_segment():
    world, ring = World(1, never_ends=True), Ring(1, 40)
    ring.segment_bytes = 1  # one position each
    ring.add(world.collect(3))
    assert ring.segments() == [(0, 1), (1, 2)]
    ring.close_open()
    assert ring.segments() == [(0, 1), (1, 2), (2, 3)]
    assert ring.read(2, 3)["truncated"].tolist() == [[True]]


def assert_equal_states(left, right):
    assert type(left) is type(right) or {type(left), type(right)} == {np.ndarray, torch.Tensor}
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal_states(left[key], right[key])
    elif isinstance(left, (np.ndarray, torch.Tensor)):
        left, right = np.asarray(left), np.asarray(right)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    else:
        assert left == right


def test_a_state_of_another_size_is_refused():
    with pytest.raises(ValueError, match="17 rows"):
        Ring(1, 20).set_state(Ring(1, 16).get_state())


@pytest.mark.parametrize("batch_size", [1, 16, 4000])  # some need several rounds, the largest lists the starts
@pytest.mark.parametrize(("length", "mode"), [(1, {}), (2, {}), (3, {"padded": True}), (4, {"running": True}), (5, {})])
def test_draws_are_uniform_over_valid_starts_although_heads_differ(length, mode, batch_size):
    ring = Ring(3, 300)
    world = World(3, seed=1, max_length=3)
    world.begin[0]["length"] = 10**6  # this environment never ends an episode, so its head stays behind
    ring.add(world.collect(40))
    assert len(set(ring.heads.tolist())) == 3
    windows = Windows(ring, length, **mode)
    windows.sync()
    starts = np.flatnonzero(windows.valid)
    generator = np.random.default_rng(length)
    drawn = [windows.draw(generator, batch_size) for _ in range(8000 // batch_size)]
    assert {len(batch) for batch in drawn} == {batch_size}
    counts = np.bincount(np.concatenate(drawn), minlength=ring.size)
    assert counts.sum() == counts[starts].sum() == 8000
    mean = 8000 / len(starts)
    chi_square = ((counts[starts] - mean) ** 2 / mean).sum()
    degrees = len(starts) - 1
    assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)
    by_place = [batch[0] for batch in drawn]  # no place in the batch prefers some rows either
    if batch_size == 16:
        assert abs(np.mean(by_place) - np.mean(starts)) < 4 * np.std(starts) / np.sqrt(len(by_place))


def test_few_valid_starts_among_many_rows_are_found_without_spinning():
    ring = Ring(1, 2000)
    world = World(1, seed=2, max_length=2)
    ring.add(world.collect(400))
    world.begin[0]["length"] = 10**6
    ring.add(world.collect(6))
    windows = Windows(ring, 6)
    windows.sync()
    assert windows.count in (1, 2)  # the episode that was running may count
    drawn = windows.draw(np.random.default_rng(0), 1000)
    counts = np.bincount(drawn, minlength=ring.size)
    assert (counts > 0).tolist() == windows.valid.tolist()


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="no window"):
        Windows(Ring(1, 10), 1).draw(np.random.default_rng(0), 1)
