"""The online queue: consecutive windows, each once, before anything else; the same after a stop."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_lab.core.errors import UserError
from rl_lab.data.online import OnlineQueue
from rl_lab.data.replay import Ring
from rl_lab.data.sources import ReplaySource
from tests.data.test_sources import same
from tests.data.tiny_world import World, read


def source(num_envs=2, seed=0, **knobs):
    knobs = {"capacity": 200, "batch_size": 4, "window": 5, "mode": "running", "online": True} | knobs
    return ReplaySource(num_envs, np.random.default_rng(seed), "cpu", **knobs)


class Reference:
    """Cut the rows of every environment as they are completed, and remember what was not served."""

    def __init__(self, num_envs, length, limit):
        self.num_envs, self.length, self.limit = num_envs, length, limit
        self.rows = [0] * num_envs
        self.waiting = []

    def follow(self, heads):
        for env in range(self.num_envs):
            while self.rows[env] + self.length <= heads[env]:
                self.waiting.append((self.rows[env] // self.length, env))
                self.rows[env] += self.length
        self.waiting = sorted(entry for entry in self.waiting if entry[0] * self.length > heads[entry[1]] - self.limit)

    def take(self, count):
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(8, 60),
    st.integers(1, 4),
    st.integers(0, 2**16),
    st.lists(st.tuples(st.integers(1, 25), st.integers(0, 5), st.booleans()), min_size=1, max_size=8),
)
def test_every_window_is_served_once_and_in_order(num_envs, capacity, length, seed, events):
    world, ring = World(num_envs, seed), Ring(num_envs, capacity)
    queue, reference = OnlineQueue(ring, length), Reference(num_envs, length, ring.num_rows)
    for num_steps, count, closes in events:
        ring.add(world.collect(num_steps))
        if closes:
            world.restart(0)
            ring.close_open(np.arange(num_envs) == 0)
        reference.follow(ring.heads)
        assert len(queue) == len(reference.waiting)
        expected = [number * length % ring.num_rows * num_envs + env for number, env in reference.take(count)]
        assert queue.take(count).tolist() == expected
        assert len(queue) == len(reference.waiting)


def test_new_windows_fill_batches_first_and_uniform_draws_the_rest():
    world, replay = World(2, never_ends=True), source(batch_size=3)
    replay.add(world.collect(20))  # four windows in each environment
    batches = [read(replay.gather(rows), running=True) for rows in replay.draw(4)]
    starts = [(window[0][0].observation[0], window[0][0].observation[2]) for batch in batches for window in batch]
    assert starts[:8] == [(env, step) for step in (0, 5, 10, 15) for env in (0, 1)]
    assert len(starts) == 12
    assert len(replay.online) == 0
    replay.add(world.collect(4))
    assert len(replay.online) == 0
    replay.add(world.collect(1))
    first = read(replay.sample(), running=True)
    assert [(window[0][0].observation[0], window[0][0].observation[2]) for window in first[:2]] == [(0, 20), (1, 20)]


def test_drawing_several_batches_at_once_or_one_by_one_serves_the_same_new_windows():
    one, other, world = source(), source(), World(2, seed=3)
    chunk = world.collect(40)
    one.add(chunk), other.add(chunk)
    num_new = len(one.online)
    together = one.draw(5).transpose(0, 2, 1).reshape(-1, 5)
    singly = np.concatenate([other.draw()[0].T for _ in range(5)])
    np.testing.assert_array_equal(together[:num_new], singly[:num_new])


def test_uniform_draws_do_not_depend_on_the_queue_being_empty_of_windows():
    plain, online = source(online=False), source()
    chunk = World(2, seed=3).collect(40)
    plain.add(chunk), online.add(chunk)
    online.online.take(1000)
    np.testing.assert_array_equal(plain.draw(3), online.draw(3))


@pytest.mark.parametrize("shared", [False, True])
def test_a_restored_queue_goes_on_where_it_was(shared):
    world, replay = World(2, seed=3), source(capacity=60)
    views = [replay, source(capacity=None, ring=replay.ring, window=4)] if shared else [replay]
    replay.add(world.collect(33))
    for view in views:
        view.sample()
    copy = source(capacity=60, seed=9)
    copies = [copy, source(capacity=None, ring=copy.ring, window=4, seed=9)] if shared else [copy]
    copy.add(World(2, seed=8).collect(50))
    for view, restored in zip(views, copies, strict=True):
        restored.sample()
        restored.set_state(view.get_state())
        restored.generator.bit_generator.state = view.generator.bit_generator.state
    for num_steps in (3, 40, 1):
        for view, restored in zip(views, copies, strict=True):
            assert len(view.online) == len(restored.online)
            same(view.sample(), restored.sample())
        more = world.collect(num_steps)
        replay.add(more)
        copy.add(more)
    assert len(copy.online)


def test_a_queue_of_other_environments_is_refused():
    with pytest.raises(ValueError, match="3 environments, not 2"):
        OnlineQueue(Ring(2, 10), 2).set_state(OnlineQueue(Ring(3, 10), 2).get_state())


def test_only_running_windows_have_a_queue():
    with pytest.raises(UserError) as caught:
        source(mode="whole")
    assert caught.value.key == "online"
    assert "online" not in source(online=False).get_state()


def test_columns_written_to_new_windows_are_there_when_they_are_drawn_again():
    replay = source(num_envs=1, batch_size=1)
    replay.add(World(1, never_ends=True).collect(10))
    batch = replay.sample()
    replay.write(batch.rows, {"latents": torch.arange(5.0)[:, None].bfloat16()})
    assert replay.gather(batch.rows)["latents"][:, 0].tolist() == [0, 1, 2, 3, 4]
