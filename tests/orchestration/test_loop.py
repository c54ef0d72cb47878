"""training_loop: order, counters, write-back, skipped hooks, custom steps."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch

from rl_lab.core.errors import RunError
from rl_lab.core.phase import Hook, Phase
from rl_lab.core.schedules import Linear
from rl_lab.core.seeding import SeedTree
from rl_lab.core.workflow import Act, CollectResult, Update, Workflow
from rl_lab.data.collector import RolloutCollector, SteppedEnvironment
from rl_lab.data.sources import ReplaySource, StreamSource
from rl_lab.envs.make import make_env
from rl_lab.orchestration.loop import all_finite, run_hook, training_loop
from rl_lab.orchestration.phase_scheduler import PhaseScheduler


@dataclass(eq=False)
class Recording(Workflow):
    """Writes down what it is asked."""

    seen: list = field(default_factory=list)
    rate: Linear = field(default_factory=lambda: Linear(0.0, 1.0, 100))

    def act(self, observations, state=None, *, explore=True, generator=None):
        return Act(torch.randint(2, (len(observations),), generator=generator))

    def update_world_model(self, batch, *, phase):
        self.seen.append(("world_model", tuple(batch.shape), phase.times, round(float(self.rate.value), 3)))
        return Update({"loss": torch.tensor(float(len(self.seen)))}, {"marks": torch.ones(batch.shape)})

    def update_count(self, *, phase):
        self.seen.append(("count", phase.name, phase["progress"]))
        return {"calls": 1.0}


def run(phases, source, workflow=None, num_envs=2, **options):
    workflow = workflow or Recording()
    collector = RolloutCollector(make_env("tiny/CartPole", num_envs), SeedTree(0))
    scheduler = PhaseScheduler(phases, ready=lambda _: source.ready, needs_source=workflow.takes_batch)
    return workflow, list(training_loop(workflow, scheduler, collector, {"data": source}, **options))


def replay(num_envs=2, **options):
    given = {"capacity": 100, "batch_size": 4, "min_size": 8} | options
    return ReplaySource(num_envs, np.random.default_rng(0), "cpu", **given)


def test_order_counters_and_skipping_until_ready():
    source = replay()
    phase = Phase("p", hooks=(Hook("collect", 2), Hook("update_world_model", 3)), buffer="data", duration_steps=16)
    workflow, events = run([phase], source)
    assert [event.hook for event in events] == [
        "collect",
        "collect",
        *["update_world_model", "collect"] * 2,
        "update_world_model",
    ]
    assert sum(event.steps for event in events) == 16
    assert sum(event.updates for event in events) == 9
    assert [entry[:3] for entry in workflow.seen] == [("world_model", (4,), 3)] * 9
    assert float(events[2].metrics["loss"]) == 2.0  # the mean over three calls


def test_update_columns_are_written_back():
    source = replay()
    phase = Phase("p", hooks=(Hook("collect", 8), Hook("update_world_model")), buffer="data", duration_cycles=2)
    run([phase], source)
    batch = source.gather(np.arange(8))
    assert batch["marks"].sum() > 0


def test_schedules_move_between_hooks_only():
    phase = Phase("p", hooks=(Hook("collect", 5), Hook("update_world_model", 2)), buffer="data", duration_cycles=3)
    workflow, _ = run([phase], replay(min_size=1))
    assert [entry[3] for entry in workflow.seen] == [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]


def test_hook_without_a_batch_gets_none_and_the_phase_reads_both_ways():
    phase = Phase("p", hooks=(Hook("collect"), Hook("update_count")), buffer="data", duration_cycles=2)
    workflow, events = run([phase], replay())
    assert workflow.seen == [("count", "p", 0.0), ("count", "p", 0.5)]
    assert events[-1].updates == 1


def test_two_hooks_see_the_same_rollout():
    seen = []

    class Two(Recording):
        def update_world_model(self, batch, *, phase):
            seen.append(batch)
            return {}

        def update_controller(self, batch, *, phase):
            seen.append(batch)
            return {}

    source = StreamSource(2, np.random.default_rng(0), "cpu")
    hooks = (Hook("collect", 3), Hook("update_world_model"), Hook("update_controller"))
    run([Phase("p", hooks=hooks, buffer="data", duration_cycles=1)], source, Two())
    assert seen[0] is seen[1]
    assert tuple(seen[0].shape) == (3, 2)


def test_random_policy_setting():
    class Zero(Recording):
        def act(self, observations, state=None, *, explore=True, generator=None):
            return Act(torch.zeros(len(observations), dtype=torch.int64))

    followed = []

    class Follower(Zero):
        def follow(self, act, observations, state, actions, *, generator=None):
            followed.append(actions)
            return Act(actions)

    phase = Phase("p", hooks=(Hook("collect", 50),), buffer="data", duration_cycles=1, settings={"policy": "random"})
    for workflow in (Zero(), Follower()):
        source = replay(capacity=1000)
        run([phase], source, workflow)
        assert source.sample(200).actions.float().mean() > 0.2
    assert len(followed) == 50


def collect_for(first, second):
    """Run phases that collect for one buffer, then for another or for none, then for the first; return the first."""
    sources = {"first": replay(min_size=1, capacity=200), "second": replay(min_size=1)}
    sources["view"] = replay(min_size=1, capacity=None, ring=sources["first"].ring)
    phases = [
        Phase(f"{i}", hooks=(Hook("collect", 5),), buffer=name, duration_cycles=1)
        for i, name in enumerate((first, second, first))
    ]
    collector = RolloutCollector(make_env("tiny/CartPole", 2), SeedTree(0))
    assert len(list(training_loop(Recording(), PhaseScheduler(phases), collector, sources))) == 3
    return sources["first"]


def transitions(source):
    """Return all transitions that the source may draw."""
    return source.gather(np.unique(source.draw(1, 1000)))


@pytest.mark.parametrize("elsewhere", ["second", None])
def test_an_episode_does_not_go_on_over_steps_that_went_elsewhere(elsewhere):
    batch = transitions(collect_for("first", elsewhere))
    position, speed = batch.observations[:, 0], batch.observations[:, 1]
    torch.testing.assert_close(batch.next_observations[:, 0], position + 0.02 * speed, rtol=0, atol=1e-5)
    assert batch.truncated.sum() == 2  # where the first phase stopped, in both environments


def test_an_episode_goes_on_where_another_source_views_the_same_rows():
    assert not transitions(collect_for("first", "view")).truncated.any()


def test_a_workflow_may_collect_itself():
    class Own(Recording):
        def collect_step(self, step, *, phase):
            columns = {
                name: np.zeros((2, 4) if name == "observations" else 2, np.float32)
                for name in ("observations", "rewards")
            }
            columns |= {"actions": np.zeros(2, np.int64), "dones": np.zeros(2, bool)}
            return CollectResult(steps=2, trajectory=columns, metrics={"collect/reward": 0.5})

    source = replay(min_size=1)
    _, events = run([Phase("p", hooks=(Hook("collect", 3),), buffer="data", duration_cycles=1)], source, Own())
    assert events[0].steps == 6
    assert len(source) == 6
    assert events[0].metrics == {"collect/reward": 0.5}


class Stepping(Recording):
    """Steps the training environments itself; `tell` says what it returns of each step."""

    def __init__(self, environment, tell=lambda count, columns: columns):
        super().__init__()
        self.environment, self.tell, self.count = environment, tell, 0

    def collect_step(self, step, *, phase):
        seen, num_envs = self.environment.observations, self.environment.num_envs
        space = self.environment.action_space
        actions = torch.full((num_envs,), self.count % 2) if hasattr(space, "n") else torch.zeros(num_envs, 1)
        _, rewards, _, infos = self.environment.step(actions)
        self.count += 1
        columns = {"observations": seen, "actions": actions, "rewards": rewards}
        columns |= {"next_observations": infos["final_observation"]}
        columns |= {name: infos[name] for name in ("terminated", "truncated")}
        return CollectResult(num_envs, trajectory=self.tell(self.count, columns))


def step_for(buffers, *, tell=lambda count, columns: columns, env=("tiny/CartPole", 2), **settings):
    """Let a workflow that steps itself collect five times for each buffer in turn; return sources and events."""
    collector = RolloutCollector(make_env(*env, **settings), SeedTree(0))
    sources = {name: replay(env[1], min_size=1, capacity=200) for name in ("first", "second")}
    phases = [
        Phase(f"{i}", hooks=(Hook("collect", 5),), buffer=name, duration_cycles=1) for i, name in enumerate(buffers)
    ]
    workflow = Stepping(SteppedEnvironment(collector), tell)
    return sources, list(training_loop(workflow, PhaseScheduler(phases), collector, sources))


def assert_true_successors(batch):
    position, speed = batch.observations[:, 0], batch.observations[:, 1]
    torch.testing.assert_close(batch.next_observations[:, 0], position + 0.02 * speed, rtol=0, atol=1e-5)


def test_an_episode_that_a_workflow_steps_does_not_go_on_over_steps_that_went_elsewhere():
    sources, _ = step_for(["first", "second", "first"])
    for source, num_cut in ((sources["first"], 2), (sources["second"], 2)):
        batch = transitions(source)
        assert_true_successors(batch)
        assert batch.truncated.sum() == num_cut


def test_an_episode_does_not_go_on_over_steps_that_nobody_kept():
    sources, _ = step_for(["first"], tell=lambda count, columns: columns if count not in (2, 3) else None)
    batch = transitions(sources["first"])
    assert len(batch) == 6
    assert_true_successors(batch)


def test_an_episode_goes_on_where_a_workflow_adds_to_the_replay_itself():
    sources = {}

    def tell(count, columns):
        sources["first"].add(columns)

    collector = RolloutCollector(make_env("tiny/CartPole", 2), SeedTree(0))
    sources["first"] = replay(min_size=1)
    phase = Phase("p", hooks=(Hook("collect", 5),), duration_cycles=1)
    list(training_loop(Stepping(SteppedEnvironment(collector), tell), PhaseScheduler([phase]), collector, sources))
    assert not transitions(sources["first"]).truncated.any()


def test_steps_of_a_workflow_count_the_frames_of_repeated_actions():
    _, (event,) = step_for(["first"], env=("tiny/Pendulum", 2), action_repeat=4)
    assert (event.steps, event.env_steps) == (10, 40)


def test_metrics_of_several_collections_are_means_over_their_episodes():
    class Own(Recording):
        def collect_step(self, step, *, phase):
            metrics = [{"episode_return": 1.0}, {"episode_return": torch.tensor(100.0)}, {}][step]
            return CollectResult(steps=10, episodes=[9, 1, 0][step], metrics=metrics)

    _, (event,) = run([Phase("p", hooks=(Hook("collect", 3),), duration_cycles=1)], replay(), Own())
    assert event.episodes == 10
    assert float(event.metrics["episode_return"]) == pytest.approx(10.9)


def test_nothing_is_said_of_a_collection_that_was_not_kept():
    environment = make_env("tiny/CartPole", 2)
    step, count = environment.step, 0

    def broken(actions):
        nonlocal count
        count += 1
        observations, rewards, *rest = step(actions)
        return observations, rewards * (np.nan if count == 25 else 1.0), *rest

    environment.step = broken
    collector = RolloutCollector(environment, SeedTree(0))
    phase = Phase("p", hooks=(Hook("collect", 20),), buffer="data", duration_cycles=4)
    skip = partial(run_hook, on_nonfinite=lambda found, batch: None)
    loop = training_loop(Recording(), PhaseScheduler([phase]), collector, {"data": replay()}, step=skip)
    said = [event.metrics for event in loop]
    assert said[1] == {}
    assert all(np.isfinite(metrics["episode_return"]) for metrics in (said[0], *said[2:]) if metrics)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("numbers", "finite"),
    [([3e38, 3e38], True), ([-3e38, -3e38], True), ([np.inf, -np.inf], False), ([np.nan, 1.0], False), ([], True)],
)
def test_whether_numbers_are_finite_is_asked_without_a_warning(numbers, finite):
    assert all_finite([torch.tensor(numbers, dtype=torch.float32)]) == finite


def test_evaluate_hook_and_custom_step():
    calls = []

    def step(hook, phase, *rest):
        calls.append(hook.name)
        return run_hook(hook, phase, *rest)

    phase = Phase("e", "eval_only", (Hook("evaluate"),))
    _, events = run([phase], replay(), evaluate=lambda: {"return_mean": 1.0}, step=step)
    assert calls == ["evaluate"]
    assert events[0].metrics == {"return_mean": 1.0}


def test_a_loss_that_is_not_finite_stops_the_loop():
    import functools

    from rl_lab.core.optim import Optimizer

    network = torch.nn.Linear(4, 1)
    before = network.weight.clone()

    class Broken(Recording):
        def __init__(self):
            super().__init__()
            self.optimizer = Optimizer(network.parameters(), functools.partial(torch.optim.Adam, lr=0.1))

        def update_world_model(self, batch, *, phase):
            return self.optimizer.step({"bad": network(batch.observations).mean() * float("nan")})

    phase = Phase("p", hooks=(Hook("collect", 8), Hook("update_world_model")), buffer="data", duration_cycles=2)
    with pytest.raises(RunError, match="update_world_model"):
        run([phase], replay(), Broken())
    assert torch.equal(network.weight, before)
