from itertools import pairwise

import numpy as np
import pytest
import torch

from rl_lab.core.batch import Batch
from rl_lab.core.errors import UserError
from rl_lab.data.sources import ReplaySource, StreamSource, as_trajectory
from tests.data.test_replay import assert_equal_states
from tests.data.tiny_world import World, read


def replay(num_envs=2, seed=0, **knobs):
    knobs = {"capacity": 60, "batch_size": 16} | knobs
    return ReplaySource(num_envs, np.random.default_rng(seed), "cpu", **knobs)


def columns(num_envs=2):
    return {
        "observations": np.arange(num_envs * 3.0).reshape(num_envs, 3),
        "actions": np.arange(num_envs),
        "rewards": np.ones(num_envs),
        "dones": np.zeros(num_envs, bool),
    }


def same(left, right):
    for name in ("observations", "actions", "rewards", "terminated", "truncated", "next_observations", "rows"):
        one, other = getattr(left, name), getattr(right, name)
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert left.extras.keys() == right.extras.keys()
    for name in left.extras:
        torch.testing.assert_close(left.extras[name], right.extras[name], rtol=0, atol=0)


def test_a_mapping_of_one_step_gains_a_time_dimension():
    batch = as_trajectory(columns(), 2)
    assert batch.shape == (1, 2)
    assert batch.observations.shape == (1, 2, 3)
    assert batch.observations.dtype == torch.float32
    assert as_trajectory(batch, 2) is batch


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_trajectory_of_other_environments_is_refused(num_envs):
    with pytest.raises(ValueError, match=rf"\[time, {num_envs}\]"):
        as_trajectory(columns(2), num_envs)


def test_an_empty_trajectory_is_refused():
    with pytest.raises(ValueError, match=r"\[0, 2\]"):
        as_trajectory(World(2).collect(1).map(lambda leaf: leaf[:0]), 2)


class TestStream:
    def stream(self):
        return StreamSource(2, np.random.default_rng(0), "cpu")

    def test_it_keeps_the_last_rollout_whole_however_often_it_is_read(self):
        source, world = self.stream(), World(2)
        assert not source.ready
        assert len(source) == 0
        source.add(world.collect(3))
        rollout = world.collect(5)
        source.add(rollout)
        assert source.ready
        assert len(source) == source.batch_size == 10
        for rows in source.draw(3):
            batch = source.gather(rows)
            assert batch.rows is None
            same(batch, rollout)
        same(source.sample(), rollout)

    def test_reading_before_collecting_is_an_error(self):
        with pytest.raises(ValueError, match="no rollout"):
            self.stream().sample()

    def test_infos_are_not_kept(self):
        source = self.stream()
        source.add(columns() | {"infos": [{"a": 1}, {"b": 2}]})
        assert source.sample().infos == ()

    def test_some_transitions_each_once(self):
        source, world = self.stream(), World(2)
        rollout = world.collect(5)
        source.add(rollout)
        got = source.sample(10)
        assert sorted(got.observations.tolist()) == sorted(rollout.flatten().observations.tolist())
        assert len(source.sample(4)) == 4
        with pytest.raises(ValueError, match="11 transitions"):
            source.sample(11)

    def test_written_columns_stay_beside_the_rollout(self):
        source = self.stream()
        source.add(World(2).collect(5))
        source.write(None, {"latents": torch.ones(5, 2, 7), "priority": torch.ones(5, 2)})
        assert source.sample()["latents"].shape == (5, 2, 7)
        assert "priority" not in source.sample()

    def test_state(self):
        source, other = self.stream(), self.stream()
        other.set_state(source.get_state())
        assert not other.ready
        source.add(World(2).collect(5))
        other.set_state(source.get_state())
        same(source.sample(), other.sample())


class TestReplay:
    def test_ready_after_min_size_decisions_and_a_complete_window(self):
        world, source = World(2, never_ends=True), replay(min_size=6, window=4)
        for num_steps, ready in ((2, False), (1, False), (1, True)):
            source.add(world.collect(num_steps))
            assert source.ready is ready
        assert len(source) == 8

    def test_ready_after_min_size_decisions(self):
        world, source = World(2, never_ends=True), replay(min_size=6)
        for ready in (False, False, True, True):
            source.add(world.collect(1))
            assert source.ready is ready

    def test_a_source_restored_to_other_episodes_forgets_the_old_ones(self):
        source, other = replay(window=3), replay(window=3)
        source.add(World(2, seed=1).collect(12))
        other.add(World(2, seed=2).collect(12))
        assert source.ready
        assert other.ready
        assert not np.array_equal(source.windows.valid, other.windows.valid)
        other.set_state(source.get_state())
        assert other.ready
        np.testing.assert_array_equal(source.windows.valid, other.windows.valid)
        assert source.windows.count == other.windows.count

    def test_ready_is_lost_when_the_last_window_is_overwritten(self):
        world, source = World(1, max_length=1), replay(1, capacity=12, window=3)
        world.begin[0]["length"] = 3
        source.add(world.collect(3))
        assert source.ready
        source.add(world.collect(30))
        assert not source.ready
        with pytest.raises(ValueError, match="no window"):
            source.draw()

    def test_a_full_ring_of_short_episodes_is_ready_although_final_rows_take_room(self):
        source = replay(1, capacity=20, min_size=20)
        source.add(World(1, max_length=1).collect(30))
        assert len(source) == 10
        assert source.ready

    @pytest.mark.parametrize(
        ("knobs", "shape", "successors"),
        [
            ({}, (16,), True),
            ({"window": 1}, (1, 16), True),
            ({"window": 3}, (3, 16), True),
            ({"window": 3, "pad": True}, (3, 16), True),
            ({"window": 3, "mode": "running"}, (3, 16), False),
        ],
    )
    @pytest.mark.parametrize("storage", ["cpu", "device"])
    def test_shapes_and_columns(self, knobs, shape, successors, storage):
        source = replay(storage=storage, **knobs)
        source.add(World(2).collect(40))
        rows = source.draw(5)
        assert rows.shape == (5, *shape)
        assert rows.dtype == np.int64
        batch = source.gather(rows[2])
        assert batch.shape == shape
        assert np.array_equal(batch.rows.numpy(), rows[2])
        assert (batch.next_observations is not None) is successors
        assert batch.extras.keys() == ({"marks"} if successors else {"marks", "is_first", "is_last"})
        Batch(**{name: getattr(batch, name) for name in batch.__slots__})  # the constructor checks all shapes
        assert source.sample(4).shape == (*shape[:-1], 4)

    @pytest.mark.parametrize(
        "knobs",
        [{}, {"window": 3}, {"window": 3, "pad": True}, {"window": 3, "mode": "running"}],
    )
    def test_torch_storage_gives_the_same_batches(self, knobs):
        host, device = replay(seed=7, **knobs), replay(seed=7, storage="device", **knobs)
        world = World(2, seed=1)
        for num_steps in (20, 1, 50, 3):
            chunk = world.collect(num_steps)
            for source in (host, device):
                source.add(chunk)
            drawn = host.draw(2), device.draw(2)
            np.testing.assert_array_equal(*drawn)
            for rows in drawn[0]:
                same(host.gather(rows), device.gather(torch.from_numpy(rows)))

    def test_padded_windows_repeat_the_last_decision_after_the_end(self):
        world, source = World(1, seed=4, max_length=3), replay(1, window=5, pad=True, batch_size=200)
        source.add(world.collect(50))
        seen_short = 0
        for window in read(source.sample()):
            first = window[0][0]
            ends = [row.terminated or row.truncated for row, _ in window]
            length = ends.index(True) + 1
            assert all(row.observation[1] == first.observation[1] for row, _ in window)
            assert [row.observation[2] for row, _ in window[:length]] == [
                first.observation[2] + i for i in range(length)
            ]
            assert all(step == window[length - 1] for step in window[length:])
            seen_short += length < 5
        assert seen_short == 200  # no episode is that long

    def test_an_n_step_fold_over_padded_windows_equals_the_sum_to_the_end_of_the_episode(self):
        world, source = World(1, seed=4, max_length=4), replay(1, window=3, pad=True, batch_size=100)
        chunk = world.collect(55)
        source.add(chunk)
        batch = source.sample()
        history = {
            tuple(o): float(r) for o, r in zip(chunk.observations[:, 0].tolist(), chunk.rewards[:, 0], strict=True)
        }
        alive = torch.ones(100)
        total, discount = torch.zeros(100), 1.0
        for t in range(3):
            total += alive * discount * batch.rewards[t]
            alive *= (~batch.dones[t]).float()
            discount *= 0.5
        for b in range(100):
            env, episode, step, _ = batch.observations[0, b].tolist()
            wanted = sum(
                0.5 ** (key[2] - step) * reward
                for key, reward in history.items()
                if key[:2] == (env, episode) and step <= key[2] < step + 3
            )
            assert float(total[b]) == wanted

    def test_running_windows_flag_the_first_and_the_last_rows_and_never_cross_the_head(self):
        world, source = World(2, seed=4), replay(2, capacity=40, window=6, mode="running", batch_size=300)
        for _ in range(9):
            source.add(world.collect(7))
            newest = {env: world.observe(env) for env in range(2)}
            for window in read(source.sample(), running=True):
                rows = [row for row, _ in window]
                env = rows[0].observation[0]
                for row in rows:
                    assert row.is_first is (row.observation[2] == 0)
                    assert row.observation != tuple(newest[env])
                for before, after in pairwise(rows):
                    assert before.is_last is after.is_first
                    _, episode, step, _ = before.observation
                    assert after.observation[:3] == (
                        (env, episode + 1, 0) if before.is_last else (env, episode, step + 1)
                    )
                    if before.is_last:
                        assert (before.action, before.reward, before.terminated, before.truncated) == (
                            0,
                            0,
                            False,
                            False,
                        )

    def test_several_sources_view_one_ring(self):
        owner = replay()
        frames = replay(capacity=None, ring=owner.ring, batch_size=4)
        sequences = replay(capacity=None, ring=owner.ring, window=3, mode="running", batch_size=5)
        owner.add(World(2).collect(20))
        assert frames.sample().shape == (4,)
        assert sequences.sample().shape == (3, 5)
        sequences.write(sequences.draw()[0], {"latents": torch.ones(3, 5)})
        assert "latents" in frames.sample()
        assert owner.get_state().keys() == {"ring"}
        assert frames.get_state() == {}

    def test_priorities_mean_nothing_to_uniform_draws(self):
        source = replay()
        source.add(World(2).collect(5))
        source.write(source.draw()[0], {"priority": torch.ones(16)})
        assert "priority" not in source.sample()

    @pytest.mark.parametrize("knobs", [{}, {"window": 3, "pad": True}, {"window": 4, "mode": "running"}])
    @pytest.mark.parametrize("storage", ["cpu", "device"])
    def test_a_restored_source_draws_the_same(self, knobs, storage):
        world, source = World(2, seed=3), replay(storage=storage, **knobs)
        source.add(world.collect(70))
        source.sample()
        other = replay(seed=99, storage=storage, **knobs)
        other.add(World(2, seed=8).collect(10))
        assert other.ready
        other.set_state(source.get_state())
        other.generator.bit_generator.state = source.generator.bit_generator.state
        for _ in range(3):
            same(source.sample(), other.sample())
            more = world.collect(3)
            source.add(more)
            other.add(more)
        assert_equal_states(source.get_state(), other.get_state())

    @pytest.mark.parametrize(
        ("knobs", "key"),
        [
            ({"min_size": 61}, "min_size"),
            ({"capacity": 0}, "capacity"),
            ({"capacity": None}, "capacity"),
            ({"batch_size": 0}, "batch_size"),
            ({"mode": "runing", "window": 3}, "mode"),
            ({"mode": "running"}, "window"),
            ({"pad": True}, "window"),
            ({"pad": True, "mode": "running", "window": 3}, "pad"),
            ({"window": 31}, "window"),
            ({"window": 0}, "window"),
            ({"storage": "gpu0"}, "storage"),
        ],
    )
    def test_what_cannot_work_is_refused_at_once(self, knobs, key):
        with pytest.raises(UserError) as caught:
            replay(**knobs)
        assert caught.value.key == key

    def test_a_view_takes_the_capacity_of_its_ring(self):
        owner = replay()
        with pytest.raises(UserError, match="60"):
            replay(capacity=50, ring=owner.ring)
        with pytest.raises(UserError):
            replay(capacity=None, ring=owner.ring, min_size=61)
