import numpy as np
import pytest
import torch

from rl_lab.core.batch import Batch
from rl_lab.data.pipeline import arrivals, minibatches, pack
from rl_lab.data.sources import ReplaySource
from tests.data.tiny_world import World


def flat(num_rows):
    index = torch.arange(num_rows)
    off = torch.zeros(num_rows, dtype=torch.bool)
    return Batch(index[:, None].float(), index * 2, index.float() * 3, off, off, extras={"values": index * 4})


def test_pack_stacks_steps():
    trajectory = World(3).collect(5)
    packed = pack([trajectory.map(lambda leaf, t=t: leaf[t]) for t in range(5)])
    assert packed.shape == (5, 3)
    for name in ("observations", "actions", "rewards", "terminated", "truncated", "next_observations", "marks"):
        assert torch.equal(packed[name], trajectory[name])


def test_pack_refuses_what_does_not_match():
    step = World(3).collect(1).map(lambda leaf: leaf[0])
    with pytest.raises(ValueError, match="empty"):
        pack([])
    with pytest.raises(ValueError, match="step 1"):
        pack([step, step.select(slice(0, 2))])
    with pytest.raises(ValueError, match="step 1"):
        pack([step, step.with_columns(log_probs=torch.zeros(3))])
    with pytest.raises(ValueError, match="step 2"):
        pack([step, step, step.with_columns(actions=step.actions.float())])
    with pytest.raises(ValueError, match=r"\[N\]"):
        pack([World(3).collect(2)])


def test_pack_marks_steps_without_a_successor():
    step = World(3).collect(1).map(lambda leaf: leaf[0])
    blind = step.with_columns(next_observations=None)
    assert pack([step, blind]).has_next.tolist() == [[True] * 3, [False] * 3]


@pytest.mark.parametrize(("num_rows", "size", "sizes"), [(12, 4, [4, 4, 4]), (10, 4, [4, 4, 2]), (3, 8, [3])])
def test_minibatches_give_every_row_once_and_keep_rows_together(num_rows, size, sizes):
    pieces = list(minibatches(flat(num_rows), size, torch.Generator().manual_seed(0)))
    assert [len(piece) for piece in pieces] == sizes
    whole = Batch.merge(pieces)
    assert sorted(whole.actions.tolist()) == [2 * i for i in range(num_rows)]
    assert torch.equal(whole.rewards / 3, whole.observations[:, 0])
    assert torch.equal(whole["values"], 2 * whole.actions)


def test_minibatches_shuffle_by_the_generator_alone():
    orders = [
        [
            row
            for piece in minibatches(flat(50), 7, torch.Generator().manual_seed(seed))
            for row in piece.actions.tolist()
        ]
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != sorted(orders[0])
    before = torch.random.get_rng_state()
    list(minibatches(flat(50), 7, torch.Generator().manual_seed(0)))
    assert torch.equal(before, torch.random.get_rng_state())


def test_minibatches_need_a_flat_batch():
    with pytest.raises(ValueError, match="flatten"):
        next(minibatches(World(2).collect(3), 2, torch.Generator()))
    with pytest.raises(ValueError, match="at least one"):
        next(minibatches(flat(3), 0, torch.Generator()))


def test_arrivals_pair_each_observation_with_what_brought_it_there():
    world = World(2, seed=3, max_length=4)
    source = ReplaySource(2, np.random.default_rng(0), "cpu", capacity=200, batch_size=50, window=8, mode="running")
    chunk = world.collect(80)
    source.add(chunk)
    # Slow reference: by arrival observation, the step that led to it.
    led = {}
    for t in range(80):
        for env in range(2):
            step = (chunk.actions[t, env], chunk.rewards[t, env], chunk.terminated[t, env], chunk.truncated[t, env])
            led[tuple(chunk.next_observations[t, env].tolist())] = tuple(float(value) for value in step)
    batch = source.sample()
    arrived = arrivals(batch)
    assert arrived.shape == (7, 50)
    assert torch.equal(arrived.observations, batch.observations[1:])
    assert torch.equal(arrived.rows, batch.rows[1:])
    assert torch.equal(arrived["is_last"], batch["is_last"][1:])
    num_first = 0
    for t in range(7):
        for b in range(50):
            wanted = led.get(tuple(arrived.observations[t, b].tolist()), (0, 0, 0, 0))
            got = (arrived.actions[t, b], arrived.rewards[t, b], arrived.terminated[t, b], arrived.truncated[t, b])
            assert tuple(float(value) for value in got) == wanted
            num_first += bool(arrived["is_first"][t, b])
    assert num_first > 0


def test_arrivals_zero_actions_of_any_shape_where_an_episode_begins():
    off = torch.zeros(2, 1, dtype=torch.bool)
    batch = Batch(
        torch.zeros(2, 1, 3),
        torch.ones(2, 1, 4),
        torch.ones(2, 1),
        ~off,
        ~off,
        extras={"is_first": torch.tensor([[False], [True]])},
    )
    arrived = arrivals(batch)
    assert arrived.actions.tolist() == [[[0, 0, 0, 0]]]
    assert not arrived.dones.any()
    assert arrived.rewards.tolist() == [[0]]


def test_arrivals_need_flags():
    with pytest.raises(KeyError, match="is_first"):
        arrivals(World(2).collect(3))
