"""Data sets: .npz files as steps, what is wrong with them told by name, the same after a stop."""

import pickle
import zipfile

import numpy as np
import pytest
import torch

from rl_lab.core.errors import UserError
from rl_lab.data.offline import OfflineSource
from rl_lab.data.replay import Ring
from rl_lab.data.windows import Windows
from tests.data.test_replay import all_windows
from tests.data.test_sources import same
from tests.data.tiny_world import World, canonical, read


def source(files, seed=0, **knobs):
    knobs = {"batch_size": 16} | knobs
    given = str(files) if not isinstance(files, list) else [str(path) for path in files]
    return OfflineSource(7, np.random.default_rng(seed), "cpu", files=given, **knobs)


def arrays(chunk, *, successors=True, single=False):
    """Return the steps of a world as arrays, observations as floats."""
    columns = {
        "observations": chunk.observations.numpy().astype(np.float64),
        "actions": chunk.actions.numpy().astype(np.int32),
        "rewards": chunk.rewards.numpy().astype(np.float64),
        "terminated": chunk.terminated.numpy(),
        "truncated": chunk.truncated.numpy(),
        "marks": chunk.extras["marks"].numpy(),
    }
    if successors:
        columns["next_observations"] = chunk.next_observations.numpy().astype(np.float64)
    return {name: column[:, 0] for name, column in columns.items()} if single else columns


def write(path, columns, **changes):
    kept = {name: value for name, value in (columns | changes).items() if value is not None}
    np.savez(path, **kept)
    return path


def windows_of(ring, length, **mode):
    return read(all_windows(ring, Windows(ring, length, **mode)), mode.get("running", False))


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("storage", ["cpu", "disk", "device"])
def test_every_window_of_the_data_is_there(tmp_path, num_envs, storage):
    chunk = World(num_envs, seed=2).collect(60)
    path = write(tmp_path / "steps.npz", arrays(chunk, single=num_envs == 1))
    replay = source(path, storage=storage, folder=str(tmp_path), columns=["marks"])
    assert len(replay) == 60 * num_envs
    assert replay.ready
    ring = Ring(num_envs, 1000)
    ring.add(chunk.map(lambda leaf: leaf.float() if leaf.dim() == 3 else leaf))
    ring.close_open()
    for length, mode in ((1, {}), (3, {}), (4, {"running": True}), (3, {"padded": True})):
        got, wanted = windows_of(replay.ring, length, **mode), windows_of(ring, length, **mode)
        assert canonical(got, mode.get("running", False)) == canonical(wanted, mode.get("running", False))
    batch = replay.sample()
    assert (batch.observations.dtype, batch.actions.dtype) == (torch.float32, torch.int64)
    assert (batch.rewards.dtype, batch.terminated.dtype) == (torch.float32, torch.bool)
    assert batch["marks"].dtype == torch.int32
    assert "marks" not in source(path).sample()


def test_files_are_read_in_order_and_each_ends_an_episode(tmp_path):
    world = World(1, never_ends=True)
    for i in range(3):
        write(tmp_path / f"part{i}.npz", arrays(world.collect(5), single=True))
    replay = source(tmp_path / "part*.npz", window=5)
    assert len(replay) == 15
    starts = sorted(set(replay.sample(100).observations[0, :, 2].tolist()))
    assert starts == [0, 5, 10]  # no window crosses a file
    whole = source([tmp_path / "part2.npz", tmp_path / "part0.npz"], window=5)
    assert sorted(set(whole.sample(100).observations[0, :, 2].tolist())) == [0, 10]
    batch = replay.sample(100)
    assert batch.truncated[-1].all()
    assert not batch.terminated.any()
    assert not batch.truncated[:-1].any()


def test_steps_that_do_not_follow_each_other_are_not_joined(tmp_path):
    columns = arrays(World(1, never_ends=True).collect(30), single=True)
    order = np.random.default_rng(0).permutation(30)
    path = write(tmp_path / "shuffled.npz", {name: column[order] for name, column in columns.items()})
    replay = source(path)
    batch = replay.sample(200)
    assert torch.equal(batch.next_observations[:, 2], batch.observations[:, 2] + 1)
    assert len(set(batch.observations[:, 2].tolist())) == 30
    neighbours = sum(order[i] + 1 == order[i + 1] for i in range(29))
    assert source(path, window=2).windows.count == neighbours if neighbours else True


@pytest.mark.parametrize(
    ("names", "terminated", "truncated"),
    [
        ({"terminals": [0, 0, 1, 0], "timeouts": [0, 1, 0, 0]}, [0, 0, 1, 0], [0, 1, 0, 1]),
        ({"dones": [0, 1, 1, 0]}, [0, 1, 1, 0], [0, 0, 0, 1]),
        ({"dones": [0, 1, 1, 0], "truncated": [0, 1, 0, 0]}, [0, 0, 1, 0], [0, 1, 0, 1]),
        ({"terminated": [0.0, 0, 1, 0]}, [0, 0, 1, 0], [0, 0, 0, 1]),
    ],
)
def test_names_that_others_give_to_the_ends(tmp_path, names, terminated, truncated):
    columns = {"observations": np.arange(8.0).reshape(4, 2), "actions": np.zeros((4, 1)), "rewards": np.ones(4)}
    replay = source(write(tmp_path / "x.npz", columns, **{name: np.array(value) for name, value in names.items()}))
    rows = [row for row in range(replay.ring.size) if not replay.ring.last[row]][:4]
    batch = replay.ring.gather(np.array(rows))
    assert batch.observations[:, 0].tolist() == [0, 2, 4, 6]
    assert batch.terminated.int().tolist() == terminated
    assert batch.truncated.int().tolist() == truncated


def test_dicts_and_pictures(tmp_path):
    rng = np.random.default_rng(0)
    camera = rng.integers(0, 256, (6, 3, 4, 4), dtype=np.uint8)
    path = write(
        tmp_path / "x.npz",
        {
            "observations/camera": camera,
            "observations/speed": rng.random((6, 2)),
            "actions": rng.random((6, 2)),
            "rewards": np.ones(6),
            "terminated": np.zeros(6, bool),
        },
    )
    batch = source(path, window=6, batch_size=2).sample()
    assert batch.observations["camera"].dtype == torch.uint8
    assert np.array_equal(batch.observations["camera"][:, 0], camera)
    assert batch.observations["speed"].dtype == batch.actions.dtype == torch.float32


GOOD = {
    "observations": np.zeros((5, 2)),
    "actions": np.zeros(5, np.int64),
    "rewards": np.zeros(5),
    "terminated": np.zeros(5, bool),
}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rewards": None}, "lacks 'rewards'"),
        ({"actions": None, "action": np.zeros(5)}, "lacks 'actions'"),
        ({"terminated": None}, "does not say where episodes end"),
        ({"observations": np.zeros((4, 2))}, r"observations is \[4, 2\], but rewards are \[5\]"),
        ({"observations": np.full((5, 2), np.nan)}, "observations has numbers that are not finite"),
        ({"rewards": np.full(5, np.inf)}, "rewards has numbers that are not finite"),
        ({"rewards": np.zeros((5, 1, 1))}, r"rewards must be \[T\] or \[T, N\]"),
        ({"rewards": np.zeros(0), "observations": np.zeros((0, 2))}, r"rewards must be .* not \[0\]"),
        ({"actions": np.array(["up"] * 5)}, "actions is of type"),
        ({"actions": np.array([None] * 5)}, "unpickling them could run code"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path, changes, told):
    path = tmp_path / "bad.npz"
    kept = {name: value for name, value in (GOOD | changes).items() if value is not None}
    np.savez(path, allow_pickle=True, **kept)
    with pytest.raises(UserError, match=told) as caught:
        source(path)
    assert caught.value.key == "files"
    assert "bad.npz" in caught.value.problem
    if "action" in changes:
        assert "nearest:  action" in str(caught.value)


def test_real_actions_outside_their_range_are_refused(tmp_path):
    path = write(tmp_path / "wide.npz", GOOD, actions=np.linspace(-2.0, 1.5, 5))
    with pytest.raises(UserError, match=r"wide\.npz cannot be used: its actions lie in \[-2, 1\.5\]") as caught:
        source(path)
    assert "rescale real actions to [-1, 1]" in caught.value.remedy
    for fine in (np.linspace(-1.0, 1.0 + 1e-6, 5), np.arange(5)):
        assert source(write(tmp_path / "fine.npz", GOOD, actions=fine)).ready


def test_what_is_no_data_set_is_refused(tmp_path):
    good = write(tmp_path / "good.npz", GOOD)
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "torn.npz").write_bytes(good.read_bytes()[:-40])
    damaged = bytearray(good.read_bytes())
    damaged[200] ^= 255
    (tmp_path / "damaged.npz").write_bytes(damaged)
    for name in ("text.npz", "array.npy", "torn.npz", "damaged.npz"):
        with pytest.raises(UserError, match=name) as caught:
            source(tmp_path / name)
        assert caught.value.key == "files"
    for files in (tmp_path / "absent.npz", tmp_path / "no*.npz", []):
        with pytest.raises(UserError) as caught:
            source(files)
        assert caught.value.key == "files"


def test_a_pickle_in_a_file_is_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (tmp_path.joinpath("exploded").touch, ())

    path = tmp_path / "bomb.npz"
    write(path, GOOD)
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (), }".ljust(127) + b"\n"
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("extra.npy", header + pickle.dumps(Bomb()))
    with pytest.raises(UserError, match="run code"):
        source(path)
    assert not (tmp_path / "exploded").exists()


def test_a_header_that_promises_too_much_is_not_believed(tmp_path):
    path = tmp_path / "vast.npz"
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }".ljust(127)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rewards.npy", header + b"\n" + bytes(40))
    with pytest.raises(UserError, match="another size than it says"):
        source(path)


def test_arrays_stored_by_column_compressed_or_empty(tmp_path):
    columns = arrays(World(1, seed=3).collect(30), single=True)
    plain = source(write(tmp_path / "plain.npz", columns))
    changed = {name: np.asfortranarray(column) for name, column in columns.items()}
    np.savez_compressed(tmp_path / "other.npz", **changed, nothing=np.zeros((0, 3)), title=np.array("steps"))
    same(plain.sample(), source(tmp_path / "other.npz").sample())


def test_files_that_do_not_fit_each_other_are_named(tmp_path):
    one = write(tmp_path / "one.npz", GOOD)
    other = write(tmp_path / "other.npz", GOOD, observations=np.zeros((5, 3)))
    with pytest.raises(UserError, match=r"other\.npz cannot be used: it does not fit the files before it"):
        source([one, other])
    two = {name: np.repeat(column[:, None], 2, 1) for name, column in GOOD.items()}
    with pytest.raises(UserError, match="2 environments, the files before it have 1"):
        source([one, write(tmp_path / "two.npz", two)])


def test_a_window_that_fits_nowhere_is_refused(tmp_path):
    path = write(tmp_path / "x.npz", GOOD, terminated=np.array([0, 1, 0, 1, 0], bool))
    assert source(path, window=2).ready
    with pytest.raises(UserError) as caught:
        source(path, window=3)
    assert caught.value.key == "window"


def test_nothing_is_added(tmp_path):
    replay = source(write(tmp_path / "x.npz", GOOD))
    before = replay.draw(3)
    with pytest.raises(ValueError, match="takes nothing in"):
        replay.add(World(1).collect(2))
    replay.close_open()
    assert replay.history is None
    assert len(replay) == 5
    assert before.max() < replay.ring.size


def test_a_restored_source_has_what_updates_wrote(tmp_path):
    path = write(tmp_path / "x.npz", arrays(World(1, seed=3).collect(40), single=True))
    knobs = {"window": 4, "mode": "running", "columns": ["marks"]}
    one = source(path, **knobs)
    for _ in range(3):
        batch = one.sample()
        one.write(batch.rows, {"latents": torch.rand(4, 16, 2).bfloat16(), "marks": batch["marks"] + 1})
    other = source(path, seed=5, **knobs)
    other.write(other.draw()[0], {"rubbish": torch.ones(4, 16)})
    other.set_state(one.get_state())
    other.generator.bit_generator.state = one.generator.bit_generator.state
    for _ in range(3):
        same(one.sample(), other.sample())


@pytest.mark.parametrize("storage", ["cpu", "device", "disk"])
def test_a_column_of_the_data_is_as_it_was_read_where_the_run_goes_back_to_before_an_update(tmp_path, storage):
    path = write(tmp_path / "x.npz", arrays(World(1, seed=3).collect(40), single=True))
    one, other = (source(path, columns=["marks"], storage=storage, folder=str(tmp_path)) for _ in range(2))
    rows = np.arange(5)
    marks = one.gather(rows)["marks"]
    before = one.get_state()
    one.write(rows, {"marks": marks + 1})
    after = one.get_state()
    for replay in (one, other):  # the other one was never written to
        replay.set_state(after)
        assert torch.equal(replay.gather(rows)["marks"], marks + 1)
        replay.set_state(before)
        assert torch.equal(replay.gather(rows)["marks"], marks)
        assert not replay.get_state()["written"]["rewritten"]


def test_another_data_set_is_not_taken_for_the_same(tmp_path):
    chunk = arrays(World(1, seed=3).collect(40), single=True)
    state = source(write(tmp_path / "x.npz", chunk)).get_state()
    changed = source(write(tmp_path / "y.npz", chunk, rewards=chunk["rewards"] + 1))
    with pytest.raises(UserError, match="another one"):
        changed.set_state(state)
