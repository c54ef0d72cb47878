"""The Collector against a slow loop of single environments; resets, successors, statistics, restoring."""

import gymnasium
import numpy as np
import pytest
import torch

from rl_lab.core.seeding import SeedTree
from rl_lab.core.workflow import Act
from rl_lab.data.collector import RolloutCollector, SteppedEnvironment
from rl_lab.envs.make import make_env


def random_act(num_actions=2):
    def act(observations, state=None, *, explore=True, generator=None):
        return Act(torch.randint(num_actions, (len(observations),), generator=generator))

    return act


def recurrent_act(observations, state, *, explore=True, generator=None):
    """Counts the steps of the episode in its state and stores the count it saw."""
    return Act(
        torch.randint(2, (len(observations),), generator=generator),
        state={"count": state["count"] + 1},
        extras={"count": state["count"]},
    )


def make_collector(id="tiny/CartPole", num_envs=3, seed=0, **options):
    return RolloutCollector(make_env(id, num_envs), SeedTree(seed), **options)


def test_equals_single_environments_step_for_step():
    collector = make_collector()
    batch = collector.collect(random_act(), 120).trajectory
    for index in range(3):
        env = gymnasium.make("CartPole-v1")
        episode = 0
        observation, _ = env.reset(seed=SeedTree(0).seed("collect/environment", index, episode))
        for t in range(120):
            np.testing.assert_array_equal(batch.observations[t, index].numpy(), observation)
            observation, reward, terminated, truncated, _ = env.step(int(batch.actions[t, index]))
            np.testing.assert_array_equal(batch.next_observations[t, index].numpy(), observation)
            assert batch.rewards[t, index] == reward
            assert bool(batch.terminated[t, index]) == terminated
            assert bool(batch.truncated[t, index]) == truncated
            if terminated or truncated:
                episode += 1
                observation, _ = env.reset(seed=SeedTree(0).seed("collect/environment", index, episode))
        assert episode > 0


def test_chunks_make_no_difference():
    whole = make_collector(seed=4).collect(random_act(), 60).trajectory
    parts_of = make_collector(seed=4)
    parts = [parts_of.collect(random_act(), size).trajectory for size in (1, 7, 52)]
    for name in ("observations", "actions", "rewards", "terminated", "next_observations"):
        assert torch.equal(whole[name], torch.cat([part[name] for part in parts]))


def test_truncation_is_not_termination_and_keeps_the_final_observation():
    collector = RolloutCollector(make_env("tiny/Pendulum", 2, max_episode_steps=5), SeedTree(0))
    act = lambda observations, state=None, **_: Act(torch.zeros(len(observations), 1))  # noqa: E731
    result = collector.collect(act, 12)
    batch = result.trajectory
    assert batch.truncated[4].all()
    assert batch.truncated[9].all()
    assert not batch.terminated.any()
    assert not torch.equal(batch.next_observations[4], batch.observations[5])  # successor, not the reset observation
    assert torch.equal(batch.next_observations[3], batch.observations[4])
    assert result.episodes == 4


def test_episode_statistics():
    collector = make_collector(num_envs=4)
    result = collector.collect(random_act(), 200)
    batch = result.trajectory
    returns, running = [], torch.zeros(4)
    for t in range(200):
        running += batch.rewards[t]
        for i in range(4):
            if batch.dones[t, i]:
                returns.append(running[i].item())
                running[i] = 0.0
    assert result.extras["episode_returns"] == returns
    assert result.episodes == len(returns)
    assert result.metrics["episode_return"] == pytest.approx(sum(returns) / len(returns))
    assert result.metrics["episode_length"] == pytest.approx(sum(returns) / len(returns))  # one reward per step
    np.testing.assert_array_equal(collector.running_returns, running.numpy())


def test_act_state_is_reset_where_an_episode_ended():
    collector = make_collector(initial_state={"count": torch.zeros(3, dtype=torch.int64)})
    batch = collector.collect(recurrent_act, 150).trajectory
    expected = torch.zeros(3, dtype=torch.int64)
    for t in range(150):
        assert torch.equal(batch["count"][t], expected)
        expected = torch.where(batch.dones[t], 0, expected + 1)


def test_a_state_whose_beginning_is_unknown_is_refused():
    def keeps(observations, state=None, **_):
        return Act(torch.zeros(len(observations), dtype=torch.int64), torch.zeros(len(observations), 1))

    with pytest.raises(ValueError, match=r"initial_state=workflow\.initial_state"):
        make_collector().collect(keeps, 1)


def test_act_state_is_reset_by_name_whatever_its_order():
    def act(observations, state, *, explore=True, generator=None):
        actions = torch.randint(2, (len(observations),), generator=generator)
        said = {"score": state["score"] + 1, "count": state["count"] + 1}
        return Act(actions, said, {"score": state["score"], "count": state["count"]})

    collector = make_collector(initial_state={"count": torch.zeros(3), "score": torch.full((3,), 100.0)})
    batch = collector.collect(act, 60).trajectory
    assert torch.equal(batch["score"], batch["count"] + 100)
    assert batch.dones.any()


@pytest.mark.parametrize(("first", "then"), [("mean", None), (None, "mean"), ("mean", "means")])
def test_columns_that_come_or_go_between_steps_are_refused_by_name(first, then):
    names = iter([first, first, then])

    def act(observations, state=None, **_):
        name = next(names)
        return Act(torch.zeros(3, dtype=torch.int64), None, {} if name is None else {name: torch.zeros(3)})

    with pytest.raises(ValueError, match="the same columns at every step") as refused:
        make_collector().collect(act, 3)
    assert all(f"'{name}'" in str(refused.value) for name in (first, then) if name)


def test_random_actions_keep_extras_and_state_and_leave_the_act_stream_alone():
    options = {"initial_state": {"count": torch.zeros(3, dtype=torch.int64)}}
    collector = make_collector("tiny/CartPole", **options)
    given = []

    def follow(act, observations, state, actions, *, generator):
        given.append(actions)
        return act(observations, state, explore=True, generator=generator)  # whose actions nobody takes

    batch = collector.collect(recurrent_act, 30, follow=follow).trajectory
    assert set(batch.actions.unique().tolist()) == {0, 1}
    assert torch.equal(batch.actions, torch.stack(given))
    assert batch["count"].max() > 3
    other = make_collector("tiny/CartPole", **options)
    other.collect(recurrent_act, 30)
    assert torch.equal(collector.generator.get_state(), other.generator.get_state())


def test_env_zero_does_not_depend_on_the_number_of_environments():
    act = lambda observations, state=None, **_: Act(torch.zeros(len(observations), dtype=torch.int64))  # noqa: E731
    few, many = (make_collector(num_envs=n).collect(act, 40).trajectory for n in (1, 5))
    assert torch.equal(few.observations[:, 0], many.observations[:, 0])


def test_frames_are_counted_with_action_repeat():
    collector = RolloutCollector(make_env("tiny/CartPole", 2, action_repeat=4), SeedTree(0))
    result = collector.collect(random_act(), 30)
    assert result.steps == 60
    assert 60 < result.extras["env_steps"] <= 240  # the last step of an episode may be cut short


def test_collect_episodes_plays_the_same_episodes_whatever_the_number_of_environments_steps():
    act = lambda observations, state=None, **_: Act((observations[:, 2] > 0).long())  # noqa: E731
    collector = make_collector(num_envs=4)
    first = collector.collect_episodes(act, 10)
    assert collector.collect_episodes(act, 10) == first
    assert len(first[0]) == len(first[1]) == 10
    assert first[0] == [float(length) for length in first[1]]


@pytest.mark.parametrize("id", ["tiny/CartPole", "CartPole-v1", "tiny/GridWorld"])
def test_restores_exactly_by_seed_and_replay(id):
    num_actions = 4 if "Grid" in id else 2
    act = random_act(num_actions)
    collector = make_collector(id, num_envs=3, seed=7)
    collector.collect(act, 77)
    state = collector.get_state()
    generators = collector.seeds.get_state()
    expected = collector.collect(act, 60).trajectory
    other = make_collector(id, num_envs=3, seed=7)
    assert other.set_state(state)
    other.seeds.set_state(generators)
    restored = other.collect(act, 60).trajectory
    for name in ("observations", "actions", "rewards", "terminated", "truncated", "next_observations"):
        assert torch.equal(expected[name], restored[name]), name
    np.testing.assert_array_equal(collector.running_returns, other.running_returns)


def test_restores_exactly_when_a_policy_uses_the_memory_of_its_actions_again():
    memory = torch.zeros(3, dtype=torch.int64)

    def act(observations, state=None, *, explore=True, generator=None):
        return Act(memory.copy_(torch.randint(2, (3,), generator=generator)))

    collector, other = make_collector(), make_collector()
    actions = collector.collect(act, 8).trajectory.actions
    assert actions.unique().tolist() == [0, 1]
    assert other.set_state(collector.get_state())


def test_restoring_that_fails_starts_a_new_episode_and_says_so():
    collector = make_collector(num_envs=3)
    collector.collect(random_act(), 5)
    state = collector.get_state()
    state["observations"][1] += 1.0  # as if the world had not come back the same
    other = make_collector(num_envs=3)
    assert not other.set_state(state)
    assert other.replaced_rows.tolist() == [False, True, False]
    assert other.running_lengths[1] == 0
    assert other.episode_index[1] == state["episode_index"][1] + 1


def test_refuses_environments_that_reset_themselves():
    env = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    with pytest.raises(ValueError, match="autoreset"):
        RolloutCollector(env, SeedTree(0))


def test_four_value_view():
    collector = make_collector(num_envs=2)
    environment = SteppedEnvironment(collector)
    ended = 0
    for _ in range(60):
        observations, rewards, dones, infos = environment.step(torch.zeros(2, dtype=torch.int64))
        assert observations.shape == (2, 4)
        assert rewards.shape == dones.shape == (2,)
        if dones.any():
            ended += 1
            row = int(dones.nonzero()[0])
            assert not np.array_equal(infos["final_observation"][row], observations[row].numpy())
            assert observations[row].abs().max() < 0.06  # a fresh start
    assert ended > 0


def test_the_four_value_view_begins_another_episode_at_each_reset():
    collector = make_collector(num_envs=2)
    environment = SteppedEnvironment(collector)
    beginnings = [environment.reset()]
    assert torch.equal(environment.reset(), beginnings[0])  # nobody has played it
    for _ in range(3):
        environment.step(torch.zeros(2, dtype=torch.int64))
        beginnings.append(environment.reset())
    assert len({tuple(seen.flatten().tolist()) for seen in beginnings}) == 4
    assert collector.running_lengths.tolist() == [0, 0]
