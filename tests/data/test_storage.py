"""Columns of every type, in every memory, come back as they were: bfloat16, bytes, dicts; restored and rewritten."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from rl_lab.core.batch import Batch, tree_leaves
from rl_lab.core.errors import UserError
from rl_lab.data.disk import DiskStorage
from rl_lab.data.replay import Ring
from rl_lab.orchestration.state_files import decode, encode
from tests.data.tiny_world import World

KINDS = ("cpu", "disk", "device")


@pytest.fixture
def make_ring(tmp_path):
    def make(kind, num_envs=2, capacity=40):
        if kind == "disk":
            return Ring(num_envs, capacity, storage=DiskStorage(tmp_path))
        return Ring(num_envs, capacity, torch.device("cpu") if kind == "device" else None)

    return make


def with_latents(chunk, generator):
    """Add columns as a world model keeps them."""
    shape = tuple(chunk.shape)
    return chunk.with_columns(
        deter=torch.randn(*shape, 5, generator=generator).bfloat16(),
        stoch=torch.randint(0, 16, (*shape, 3), generator=generator).to(torch.uint8),
        scalar=torch.randn(shape, generator=generator).bfloat16(),
    )


def bits(tensor):
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        for one, other in zip(tree_leaves(left[name]), tree_leaves(right[name]), strict=True):
            one, other = torch.as_tensor(one), torch.as_tensor(other)
            assert one.dtype == other.dtype, name
            assert torch.equal(bits(one), bits(other)), name


@pytest.mark.parametrize("kind", KINDS)
def test_latents_are_stored_written_back_and_leave_with_their_rows(kind, make_ring):
    generator = torch.Generator().manual_seed(0)
    world, ring = World(2, never_ends=True), make_ring(kind, capacity=20)
    chunk = with_latents(world.collect(8), generator)
    ring.add(chunk)
    rows = np.arange(16).reshape(8, 2)
    got = ring.gather(rows, running=True)
    for name, kept in (("deter", torch.bfloat16), ("stoch", torch.uint8), ("scalar", torch.bfloat16)):
        assert got[name].dtype == kept
        assert torch.equal(bits(got[name]), bits(chunk[name]))
    new = torch.randn(3, 2, 5, generator=generator).bfloat16()
    ring.write(torch.from_numpy(rows[2:5]), {"deter": new, "stoch": torch.full((3, 2, 3), 9, dtype=torch.uint8)})
    got = ring.gather(rows, running=True)
    assert torch.equal(bits(got["deter"][2:5]), bits(new))
    assert torch.equal(bits(got["deter"][5:]), bits(chunk["deter"][5:]))
    assert (got["stoch"][2:5] == 9).all()
    assert torch.equal(got["stoch"][:2], chunk["stoch"][:2])
    later = with_latents(world.collect(7), generator)
    ring.add(later)  # 15 decisions in 11 rows: positions 0 to 3 are overwritten
    got = ring.gather(rows, running=True)
    assert torch.equal(bits(got["deter"][:4]), bits(later["deter"][3:]))
    assert torch.equal(bits(got["deter"][4:5]), bits(new[2:]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_later_row_wins_in_bfloat16_too(kind, make_ring):
    ring = make_ring(kind, num_envs=1)
    ring.add(with_latents(World(1, never_ends=True).collect(10), torch.Generator().manual_seed(0)))
    rows = np.array([[1, 2], [2, 3]])
    values = torch.arange(20.0).view(2, 2, 5).bfloat16()
    ring.write(rows, {"deter": values, "fresh": values[..., 0]})
    got = ring.gather(np.array([1, 2, 3, 4]))
    assert got["deter"][:3, 0].tolist() == [0, 10, 15]  # row 2 is in both windows: the later step counts
    assert got["fresh"].tolist() == [0, 10, 15, 0]
    assert got["fresh"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_another_type_is_refused_by_name(kind, make_ring):
    ring = make_ring(kind)
    chunk = with_latents(World(2).collect(3), torch.Generator().manual_seed(0))
    ring.add(chunk)
    with pytest.raises(ValueError, match=r"'deter' of bfloat16 .* float32"):
        ring.add(chunk.with_columns(deter=chunk["deter"].float()))
    with pytest.raises(ValueError, match=r"'deter' of bfloat16 .* int16"):
        ring.write(np.arange(2), {"deter": torch.zeros(2, 5, dtype=torch.int16)})
    with pytest.raises(ValueError, match=r"'stoch' of uint8 .* bfloat16"):
        ring.write(np.arange(2), {"stoch": torch.zeros(2, 3, dtype=torch.bfloat16)})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_a_saved_ring_comes_back_from_files_in_any_memory(kind, other, make_ring):
    generator = torch.Generator().manual_seed(1)
    world, ring = World(2, seed=5), make_ring(kind)
    ring.segment_bytes = 400
    for num_steps in (9, 30, 4):
        ring.add(with_latents(world.collect(num_steps), generator))
    ring.write(np.arange(12), {"deter": torch.randn(12, 5, generator=generator).bfloat16()})
    ring.write(np.arange(3), {"surprise": torch.randn(3, generator=generator).bfloat16()})
    segments = ring.segments()
    assert len(segments) > 1
    saved = decode(*encode(ring.get_state(since=segments[-1][1], written=False)))  # through the files of a checkpoint
    parts = {start: decode(*encode(ring.read(start, stop))) for start, stop in segments}
    pages = {start: decode(*encode(ring.read_page(start, stop))) for start, stop in ring.pages()}
    assert len(pages) > 1
    copy = make_ring(other)
    copy.add(with_latents(World(2, seed=9).collect(50), generator))  # what was there before is gone
    copy.set_state(saved, parts, pages)
    more = with_latents(world.collect(5), generator)
    for each in (ring, copy):
        each.add(more)
    np.testing.assert_array_equal(ring.steps, copy.steps)
    for group in ("columns", "extras", "written"):
        same(*(whole(each, group) for each in (ring, copy)))


def whole(ring, group):
    return {
        f"{name} {i}": ring.storage.export(leaf, 0, ring.size)
        for name, column in getattr(ring, group).items()
        for i, leaf in enumerate(tree_leaves(column))
    }


def test_columns_that_updates_rewrite_are_saved_only_as_far_as_rows_are_filled(make_ring):
    ring = make_ring("cpu", capacity=1000)
    ring.add(with_latents(World(2, never_ends=True).collect(10), torch.Generator().manual_seed(0)))
    ring.write(np.arange(4), {"deter": torch.ones(4, 5).bfloat16(), "new": torch.ones(4)})
    written = ring.get_state()["written"]
    assert len(written["rewritten"]["deter"]) == len(written["written"]["new"]) == 22  # with the open rows
    assert ring.pages() == [(0, 22)]
    ring.add(with_latents(World(2, never_ends=True).collect(990), torch.Generator().manual_seed(0)))
    assert len(ring.get_state()["written"]["written"]["new"]) == ring.size
    ring.segment_bytes = 14 * 100  # of a row, `deter` and `new`
    assert ring.pages()[:2] == [(0, 100), (100, 200)]
    assert ring.pages()[-1][1] == ring.size


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_staged_rows_are_what_gather_reads(kind, make_ring):
    ring = make_ring(kind)
    ring.add(with_latents(World(2, seed=2).collect(30), torch.Generator().manual_seed(0)))
    rows = np.arange(6)[:, None] + np.array([[0, 8, 3]])
    for mode in ({"running": True}, {}, {"padded": True}):
        plain = ring.gather(rows, **mode)
        staged = ring.gather(rows, staged=ring.stage(rows, **mode), **mode)
        for name in (*Batch.__slots__,):
            if name != "extras" and getattr(plain, name) is not None and name != "infos":
                assert torch.equal(getattr(plain, name), getattr(staged, name)), name
        same(plain.extras, staged.extras)


class TestSize:
    """One million 64 x 64 pictures with the latents of a 12M model."""

    CHANNELS, SIDE, DETER, NUM_VARIABLES = 3, 64, 2048, 32

    def ring(self, make_ring, kind, capacity):
        shape = (4, 1)
        chunk = Batch(
            observations=torch.zeros(5, 1, self.CHANNELS, self.SIDE, self.SIDE, dtype=torch.uint8)[:4],
            actions=torch.zeros(shape, dtype=torch.int64),
            rewards=torch.zeros(shape),
            terminated=torch.zeros(shape, dtype=torch.bool),
            truncated=torch.zeros(shape, dtype=torch.bool),
            next_observations=torch.zeros(*shape, self.CHANNELS, self.SIDE, self.SIDE, dtype=torch.uint8),
            extras={
                "deter": torch.zeros(*shape, self.DETER, dtype=torch.bfloat16),
                "stoch": torch.zeros(*shape, self.NUM_VARIABLES, dtype=torch.uint8),
            },
        )
        ring = make_ring(kind, num_envs=1, capacity=capacity)
        ring.add(chunk)
        return ring

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("capacity", [10, 64])
    def test_it_fits(self, kind, capacity, make_ring):
        ring = self.ring(make_ring, kind, capacity)
        picture = self.CHANNELS * self.SIDE**2
        latents = 2 * self.DETER + self.NUM_VARIABLES
        action, reward, flags, step, last = 8, 4, 4, 4, 1
        per_row = picture + latents + action + reward + flags + step + last
        assert per_row == 16437
        assert ring.nbytes == per_row * (capacity + 1)
        assert per_row * (10**6 + 1) < 17e9
        assert ring.history_bytes == picture + action + reward + flags


@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=["numpy", "torch"])
def test_a_replay_that_memory_has_no_room_for_is_refused(device):
    ring = Ring(1, 10**6 - 1, device)
    with pytest.raises(UserError, match=f"{10**6 * 2**30:,} bytes") as caught:
        ring.zeros(torch.empty(1, 2**30, dtype=torch.uint8), 1)
    assert (caught.value.key, caught.value.value) == ("capacity", 10**6 - 1)


class TestDisk:
    def test_no_file_has_a_name(self, make_ring, tmp_path):
        ring = make_ring("disk")
        ring.add(World(2).collect(30))
        assert list(tmp_path.iterdir()) == []

    def test_a_killed_process_leaves_nothing(self, tmp_path):
        code = """if True:
            import os, signal, sys
            from rl_lab.data.disk import DiskStorage
            from rl_lab.data.replay import Ring
            from tests.data.tiny_world import World
            ring = Ring(1, 5000, storage=DiskStorage(sys.argv[1]))
            ring.add(World(1).collect(3000))
            os.kill(os.getpid(), signal.SIGKILL)
        """
        killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
        assert killed.returncode == -9
        assert list(tmp_path.iterdir()) == []

    def test_a_disk_without_room_is_refused_at_once(self, make_ring, monkeypatch):
        def full(descriptor, start, length):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(UserError, match=r"No space left on device.*bytes are free") as caught:
            make_ring("disk").add(World(2).collect(1))
        assert caught.value.key == "folder"

    def test_a_folder_that_is_not_there_is_named(self, tmp_path):
        ring = Ring(2, 10, storage=DiskStorage(tmp_path / "absent"))
        with pytest.raises(UserError, match="No such file") as caught:
            ring.add(World(2).collect(1))
        assert caught.value.value.endswith("absent")

    def test_rows_lie_in_the_file_and_not_in_memory(self, make_ring):
        ring = make_ring("disk")
        ring.add(World(2).collect(3))
        assert all(not leaf.flags.owndata for leaf in tree_leaves(ring.columns))
