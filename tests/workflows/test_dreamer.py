"""Dreamer of all three papers: known worlds, probes, alignment, where gradients go, what replay keeps."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_lab.build import build_parts
from rl_lab.composition import compose, parse_config
from rl_lab.core import noise
from rl_lab.core.batch import Batch
from rl_lab.core.capture import HookCapture
from rl_lab.core.errors import UserError
from rl_lab.core.phase import Hook, Phase
from rl_lab.core.schedules import Linear
from rl_lab.core.seeding import SeedTree
from rl_lab.data.collector import RolloutCollector
from rl_lab.data.pipeline import arrivals
from rl_lab.data.sources import ReplaySource
from rl_lab.environment import fill_dims
from rl_lab.envs.make import make_env
from rl_lab.envs.world import World
from rl_lab.orchestration.loop import run_hook, training_loop
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from tests.workflows.dreamers import DETER, PAPERS, build
from tests.workflows.test_probes import GAMMA, VALUES

NUM_ENVS = 8
PHASE = Phase("p", hooks=(Hook("update_agent"),), duration_updates=1)


class Counter(World):
    """Shows nothing. Action 1 counts up; the reward is the count after the action; at 3 the world ends."""

    def __init__(self, num_envs, *, max_episode_steps=7):
        box = spaces.Box(-1.0, 1.0, (1,), dtype=np.float32)
        super().__init__(num_envs, box, spaces.Discrete(2), num_variables=1, max_episode_steps=max_episode_steps)

    def _initial(self, generator):
        return np.zeros(1)

    def _advance(self, actions):
        self._state[0] += actions
        return (self._state[0] / 3.0).astype(np.float32), self._state[0] == 3

    def _observe(self):
        return np.zeros((self.num_envs, 1), np.float32)


def replay(seeds, window=9, batch_size=16, num_envs=NUM_ENVS, capacity=4000, min_size=100):
    return ReplaySource(
        num_envs,
        seeds.numpy("source"),
        "cpu",
        capacity=capacity,
        batch_size=batch_size,
        min_size=min_size,
        window=window,
        mode="running",
    )


def run(phases, workflow, collector, source):
    scheduler = PhaseScheduler(phases, ready=lambda name: source.ready)
    for event in training_loop(workflow, scheduler, collector, {"data": source}):
        assert all(torch.isfinite(torch.as_tensor(value)) for value in event.metrics.values()), event


@pytest.mark.parametrize("paper", PAPERS)
def test_the_model_predicts_a_counter_that_it_cannot_see(paper):
    """Only the actions that led there, and where episodes begin, say what the count is."""
    seeds = SeedTree(0)
    workflow = build(paper, 1, 2, seeds, gamma=GAMMA, horizon=2, lr=5e-3 if paper == "v3" else 3e-3)
    source = replay(seeds, window=17)
    collector = RolloutCollector(Counter(NUM_ENVS), seeds, initial_state=workflow.initial_state(NUM_ENVS))
    hooks = (Hook("collect", 16), Hook("update_world_model", ratio=0.0625))
    settings = {"policy": "random"}
    steps = 9600 if paper == "v3" else 6400
    run([Phase("p", hooks=hooks, buffer="data", duration_steps=steps, settings=settings)], workflow, collector, source)
    batch = source.sample(64)
    with torch.no_grad():
        seen = workflow._see(batch)
        rewards = workflow.reward.mean(workflow.reward(seen.features))
        continues = workflow.continuation.mean(workflow.continuation(seen.features))
    known = seen.batch["is_first"].cumsum(0) > 0  # before that, the window began inside an episode
    truth = seen.batch.rewards
    assert len(truth[known].unique()) == 4
    assert (seen.batch.terminated & known).sum() > 20
    assert torch.equal((3.0 * rewards[known]).round(), (3.0 * truth[known]).round())
    ends = seen.batch.terminated[known]
    assert torch.equal(continues[known] < 0.5 * GAMMA, ends)
    assert (continues[known][~ends] - GAMMA).abs().mean() < 0.03


SLOW = pytest.mark.learning
PROBES = [
    ("v3", "constant", False),
    ("v3", "observation", False),
    ("v3", "delayed", False),
    ("v3", "action", False),
    ("v3", "both", False),
    ("v2", "both", False),
    ("v1", "both", True),
    ("v3 of 2023", "both", True),
    *(
        pytest.param("v3", probe, True, marks=SLOW)
        for probe in ("constant", "observation", "delayed", "action", "both")
    ),
    *(pytest.param(paper, "delayed", True, marks=SLOW) for paper in ("v1", "v2")),
    pytest.param("v2", "both", True, marks=SLOW),
    pytest.param("v1", "both", False, marks=SLOW),
]


@pytest.mark.parametrize(("paper", "probe", "continuous"), PROBES)
def test_dreamer_solves_probe(paper, probe, continuous):
    seeds = SeedTree(3)
    knobs = {} if paper == "v3" else {"exploration": 0.3 if continuous else 0.1, "entropy_weight": 1e-2}
    action, lr = 1 if continuous else 2, 4e-3 if paper == "v3" else 3e-3
    workflow = build(paper, 1, action, seeds, discrete=not continuous, gamma=GAMMA, horizon=2, lr=lr, **knobs)
    environment = make_env(f"probe/{probe}", NUM_ENVS, kwargs={"continuous": continuous})
    collector = RolloutCollector(environment, seeds, initial_state=workflow.initial_state(NUM_ENVS))
    source = replay(seeds, window=4, batch_size=56)  # no episode is longer than two steps
    num_updates = {"constant": 80, "action": 200, "both": 300}.get(probe, 120)
    if continuous and probe == "action":
        num_updates = 300
    collect = Hook("collect", 8)
    model, joint = Hook("update_world_model", ratio=0.125), Hook("update_agent", ratio=0.125)
    run(
        [
            Phase(
                "model",
                hooks=(collect, model),
                buffer="data",
                duration_steps=5 * num_updates,
                settings={"policy": "random"},
            ),
            Phase("joint", hooks=(collect, joint), buffer="data", duration_steps=8 * num_updates),
        ],
        workflow,
        collector,
        source,
    )
    for observation, value in VALUES[probe].items():
        state = None
        if observation == 1.0 and probe == "delayed":  # seen at the second step only
            state = workflow.act(torch.zeros(1, 1), generator=torch.Generator().manual_seed(0)).state
        estimate = workflow.value(torch.tensor([[observation]]), state).item()
        # Where actions matter, the value is that of a policy which still explores a little.
        assert abs(estimate - value) < (0.3 if probe in ("action", "both") else 0.15), (observation, estimate, value)
    if probe in ("action", "both"):
        returns, _ = collector.collect_episodes(workflow.act, 400)  # latents are drawn, so that a few go wrong
        assert sum(returns) / 400 > 0.8


def collected(paper="v3", num_steps=60, monkeypatch=None, seed=0, random=False, **knobs):
    """A workflow, and a replay of the counter world that it acted in."""
    seeds = SeedTree(seed)
    workflow = build(paper, 1, 2, seeds, gamma=GAMMA, horizon=3, **knobs)
    if monkeypatch is not None:  # samples become a function of the parameters alone
        monkeypatch.setattr(noise, "uniform", lambda shape, like, generator: torch.full(shape, 0.5))
        monkeypatch.setattr(noise, "normal", lambda shape, like, generator: torch.zeros(shape))
    collector = RolloutCollector(Counter(2), seeds, initial_state=workflow.initial_state(2))
    source = replay(seeds, window=num_steps // 2, batch_size=4, num_envs=2, capacity=400, min_size=1)
    source.add(collector.collect(workflow.act, num_steps, follow=workflow.follow if random else None).trajectory)
    return workflow, collector, source


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("paper", PAPERS)
def test_training_sees_what_acting_saw(paper, random, monkeypatch):
    """The states of acting, or of following random actions, with resets, are those of a scan over the replay."""
    workflow, _, source = collected(paper, monkeypatch=monkeypatch, random=random, stored_latents=True)
    batch = source.gather(source.windows.expand(np.array([0, 1])))  # from the very first step of both environments
    assert batch["is_first"].sum() > 6
    with torch.no_grad():
        whole = workflow._see(batch)
    acted, decisions = workflow.rssm.unpack(arrivals(batch).extras), ~arrivals(batch)["is_last"]
    for name, states in whole.observed.states.items():
        torch.testing.assert_close(states[decisions], acted[name][decisions], rtol=1e-2, atol=1e-2)
    assert not torch.allclose(acted["deter"][0], acted["deter"][1], atol=1e-2)


def test_a_window_goes_on_from_the_stored_latents(monkeypatch):
    workflow, _, source = collected(monkeypatch=monkeypatch)
    start = next(
        i for i in range(4, 40) if not source.ring.last[2 * i] and not source.ring.columns["is_first"][2 * i + 2]
    )
    batch = source.gather(source.windows.expand(np.array([2 * start])))
    with torch.no_grad():
        states = workflow._see(batch).observed.states
        without = workflow._see(Batch(**{name: batch[name] for name in FIELDS}, extras=flags(batch))).observed.states
    acted = workflow.rssm.unpack(arrivals(batch).extras)
    torch.testing.assert_close(states["deter"][0], acted["deter"][0], rtol=2e-2, atol=2e-2)
    assert not torch.allclose(without["deter"][0], acted["deter"][0], atol=2e-2)


FIELDS = ("observations", "actions", "rewards", "terminated", "truncated")


def flags(batch):
    return {name: batch[name] for name in ("is_first", "is_last")}


def test_a_window_whose_latents_nobody_stored_begins_from_nothing(monkeypatch):
    """Data that another policy collected: an update stores latents in its own rows, the others still have none."""
    workflow, collector, _ = collected(monkeypatch=monkeypatch)
    source = replay(SeedTree(1), window=5, batch_size=2, num_envs=2, capacity=400, min_size=1)
    trajectory = collector.collect(workflow.act, 50).trajectory
    source.add(Batch(**{name: trajectory[name] for name in (*FIELDS, "next_observations")}))
    start = next(
        i for i in range(20, 40) if not source.ring.last[2 * i] and not source.ring.columns["is_first"][2 * i + 2]
    )
    seen, other = (source.windows.expand(np.array(rows)) for rows in ([0, 1], [2 * start]))
    before = source.gather(other)
    assert "deter" not in before
    batch = source.gather(seen)
    source.write(batch.rows, workflow.update_agent(batch, phase=PHASE).columns)
    after = source.gather(other)
    assert "deter" in after
    with torch.no_grad():
        from_nothing, from_stored = (workflow._see(batch).observed.states for batch in (before, after))
    for name, states in from_nothing.items():
        assert torch.equal(from_stored[name], states)


@pytest.mark.parametrize("captured", [False, True])
def test_a_step_that_is_not_finite_leaves_nothing_behind(captured):
    """Neither in the weights, nor in running statistics, nor in the latents that replay keeps."""
    workflow, _, source = collected()
    encode, found = workflow.rssm.encode, []
    capture = HookCapture(lambda: [], deferred=True) if captured else None

    def update():
        given = (Hook("update_agent", source="data"), PHASE, workflow, None, {"data": source})
        run_hook(*given, on_nonfinite=lambda what, batch: found.append(what), capture=capture)
        if captured and workflow.model_optimizer.failed:  # the host has not looked yet, and later steps go on
            found.append("by the flag")
        return bytes(source.ring.extras["deter"])

    before = bytes(source.ring.extras["deter"])
    workflow.rssm.encode = lambda seen: encode(seen) * float("nan")
    assert update() == before
    assert len(found) == 1
    workflow.rssm.encode = encode
    assert update() != before
    assert len(found) == 1
    for part in (workflow.rssm, workflow.critic, workflow.slow_critic, workflow.return_scale):
        assert all(leaf.isfinite().all() for leaf in part.state_dict().values())


def test_an_update_refreshes_the_stored_latents():
    workflow, _, source = collected()
    rows = source.draw()[0]
    batch = source.gather(rows)
    before = {name: batch[name].clone() for name in ("deter", "stoch")}
    _, columns = workflow.update_agent(batch, phase=PHASE)
    assert columns["deter"].dtype == before["deter"].dtype
    assert columns["stoch"].dtype == torch.uint8
    for name, column in columns.items():
        assert column.shape == before[name].shape
        assert torch.equal(column[0], before[name][0])  # the context row is not seen again
        assert not torch.equal(column[1:], before[name][1:])
    source.write(batch.rows, columns)
    after = source.gather(rows)
    assert torch.equal(after["stoch"][-1], columns["stoch"][-1])
    # They are those of the pass before the parameters changed: the same as seeing without learning.
    assert not torch.equal(after["deter"], before["deter"])


def test_replay_without_latents_is_learned_from_and_gets_them():
    workflow, collector, _ = collected()
    source = replay(SeedTree(1), window=20, batch_size=4, num_envs=2, capacity=400, min_size=1)
    trajectory = collector.collect(workflow.act, 50).trajectory
    source.add(Batch(**{name: trajectory[name] for name in (*FIELDS, "next_observations")}))
    batch = source.sample()
    assert "deter" not in batch
    source.write(batch.rows, workflow.update_agent(batch, phase=PHASE).columns)
    assert source.gather(batch.rows)["stoch"][1:].any()
    workflow.update_agent(source.sample(), phase=PHASE)


@pytest.mark.parametrize("paper", PAPERS)
def test_imagination_is_a_batch(paper):
    workflow, _, source = collected(paper)
    with torch.no_grad():
        seen = workflow._see(source.sample())
        states = {name: leaf[0] for name, leaf in seen.observed.states.items()}
        dream = workflow.imagine(horizon=5, states=states, generator=torch.Generator().manual_seed(0))
        again = workflow.imagine(horizon=5, states=states, generator=torch.Generator().manual_seed(0))
    assert tuple(dream.shape) == (5, 4)
    assert torch.equal(dream.observations, again.observations)
    assert torch.equal(dream.observations[0], workflow.rssm.features(states))
    assert torch.equal(dream.observations[1:], dream.next_observations[:-1])
    continues = workflow.continuation.mean(workflow.continuation(dream.observations))
    torch.testing.assert_close(dream["weights"], continues.cumprod(0))
    torch.testing.assert_close(dream["discounts"][:-1], continues[1:])
    critic = workflow.slow_critic if paper == "v2" else workflow.critic
    torch.testing.assert_close(dream["next_values"], critic.mean(critic(dream.next_observations)))
    rewards = workflow.reward.mean(workflow.reward(dream.next_observations))
    torch.testing.assert_close(dream.rewards, rewards)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        workflow.imagine(horizon=0, states=states)


def gradients(workflow, loss):
    parts = ("rssm", "decoder", "reward", "continuation", "actor", "critic")
    for name in parts:
        getattr(workflow, name).zero_grad()
    loss.backward(retain_graph=True)
    return {
        name: sum(float(p.grad.abs().sum()) for p in getattr(workflow, name).parameters() if p.grad is not None)
        for name in parts
    }


@pytest.mark.parametrize(
    ("paper", "knobs"), [*((paper, {}) for paper in PAPERS), ("v3", {"actor_gradient": "dynamics"})]
)
def test_where_gradients_go(paper, knobs):
    workflow, _, source = collected(paper, **knobs)
    for _ in range(3):  # a zero output layer passes nothing on
        workflow.update_agent(source.sample(), phase=PHASE)
    seen = workflow._see(source.sample())
    losses, _ = workflow._behaviour.losses(seen, workflow.generator)
    reached = {
        name: {part for part, size in gradients(workflow, loss).items() if size} for name, loss in losses.items()
    }
    expected = {"actor": {"actor"}, "critic": {"critic"}}
    if paper == "v3":
        expected["replay_value"] = {"critic", "rssm"}
    assert reached == expected
    workflow._model.free_nats = 0.0
    losses, _ = workflow._model.losses(workflow._see(source.sample()))
    trained = {
        name: gradients(workflow, loss) for name, loss in losses.items() if name not in ("dynamics", "representation")
    }
    assert all(sizes["rssm"] > 0 for sizes in trained.values())
    assert all(sizes["actor"] == sizes["critic"] == 0 for sizes in trained.values())


def test_noise_on_actions_may_follow_a_schedule():
    def act(exploration, agent_steps):
        workflow = build("v3", 3, 2, SeedTree(0), discrete=False, exploration=exploration)
        workflow.advance_schedules(agent_steps=agent_steps, updates=0)
        seen, generator = torch.zeros(4_096, 3), torch.Generator().manual_seed(0)
        return workflow.act(seen, workflow.initial_state(4_096), generator=generator).actions

    quiet, falling = act(0.0, 0).clamp(-1.0, 1.0), Linear(0.2, 0.0, 100)
    inside = quiet.abs() < 0.5  # where hardly any noise is cut off
    assert (act(falling, 0) - quiet)[inside].std().item() == pytest.approx(0.2, rel=0.05)
    assert (act(falling, 50) - quiet)[inside].std().item() == pytest.approx(0.1, rel=0.05)
    assert torch.equal(act(falling, 100), quiet)


def test_gradients_through_the_model_are_those_of_finite_differences():
    workflow = build("v1", 1, 1, SeedTree(0), discrete=False)
    generator = torch.Generator().manual_seed(0)
    start = {
        name: torch.randn(16, leaf.shape[1], generator=generator) for name, leaf in workflow.initial_state(16).items()
    }
    weight = workflow.actor.outputs[0].weight
    direction = torch.randn(weight.shape, generator=generator)

    def objective():
        workflow.generator.manual_seed(0)
        dream = workflow._behaviour.imagine(start, 1, workflow.generator)
        return workflow._behaviour.returns(
            dream.rewards, dream.discounts, workflow._behaviour.values(dream.features)
        ).sum()

    (gradient,) = torch.autograd.grad(objective(), weight)
    with torch.no_grad():
        values = []
        for step in (0.02, -0.02):
            weight += step * direction
            values.append(objective().item())
            weight -= step * direction
    assert (gradient * direction).sum().item() == pytest.approx((values[0] - values[1]) / 0.04, rel=0.05)


@pytest.mark.parametrize("paper", ["v1", "v3"])
def test_what_the_actor_climbs_through_the_model(paper):
    workflow = build(paper, 1, 2, SeedTree(0), discrete=False, actor_gradient="dynamics", entropy_weight=0.0)
    returns, values = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    parameters, weights, scale = torch.randn(3, 4, 4), torch.rand(3, 4), torch.tensor(5.0 if paper == "v3" else 1.0)
    loss, _ = workflow._behaviour.actor_loss(parameters, torch.zeros(3, 4, 2), returns, values, scale, weights)
    of_returns, of_values = torch.autograd.grad(loss, [returns, values], allow_unused=True)
    torch.testing.assert_close(of_returns, -weights / scale / 12)
    if paper == "v1":  # the returns themselves
        assert of_values is None
    else:  # how much better they are than the values, as it was first published
        torch.testing.assert_close(of_values, torch.cat([weights / scale / 12, torch.zeros(1, 4)]))


def test_a_fresh_critic_of_v3_says_exactly_zero():
    workflow, _, _ = collected()
    assert torch.equal(workflow.value(torch.zeros(3, 1)), torch.zeros(3))


@pytest.mark.parametrize(("paper", "moves"), [("v1", [1, 2, 3]), ("v2", [3]), ("v3", [1, 2, 3])])
def test_the_slow_critic_follows(paper, moves):
    knobs = {"slow_every": 3} if paper == "v2" else {}
    workflow, _, source = collected(paper, **knobs)
    for count in (1, 2, 3):
        before = [p.clone() for p in workflow.slow_critic.parameters()]
        workflow.update_agent(source.sample(), phase=PHASE)
        pairs = list(zip(workflow.slow_critic.parameters(), before, workflow.critic.parameters(), strict=True))
        if count in moves:
            for now, old, online in pairs:
                torch.testing.assert_close(now, old + workflow.slow_rate * (online - old))
        else:
            assert all(torch.equal(now, old) for now, old, _ in pairs)


def test_replay_returns_one_step_at_a_time():
    generator = torch.Generator().manual_seed(0)
    shape = (9, 6)
    first = torch.rand(shape, generator=generator) < 0.3
    last = torch.cat([first[1:], torch.zeros(1, 6, dtype=torch.bool)])
    terminated = last & (torch.rand(shape, generator=generator) < 0.5)
    rewards = torch.randn(shape, generator=generator).masked_fill(first, 0.0)
    bootstrap = torch.randn(shape, generator=generator)
    behaviour = build("v3", 1, 2, SeedTree(0), gamma=0.9, trace=0.8)._behaviour
    returns = behaviour.replay_returns(rewards, terminated, last, bootstrap)
    for b in range(6):
        for t in range(8):  # brute force: the mixture of all n-step returns that stay inside the episode
            expected, weight, reward, discount = 0.0, 1.0, 0.0, 1.0
            for k in range(t + 1, 9):
                reward += discount * rewards[k, b].item()
                discount *= 0.0 if terminated[k, b] else 0.9
                ends = bool(last[k, b]) or k == 8
                share = weight if ends else weight * (1.0 - 0.8)
                expected += share * (reward + discount * bootstrap[k, b].item())
                weight *= 0.8
                if ends:
                    break
            assert returns[t, b].item() == pytest.approx(expected, abs=1e-5)


def test_hooks_can_be_run_apart():
    for paper in PAPERS:
        workflow, _, source = collected(paper)
        model = [p.clone() for p in workflow.rssm.parameters()]
        actor = [p.clone() for p in workflow.actor.parameters()]
        workflow.update_world_model(source.sample(), phase=PHASE)
        assert all(torch.equal(a, b) for a, b in zip(actor, workflow.actor.parameters(), strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(model, workflow.rssm.parameters(), strict=True))
        model = [p.clone() for p in workflow.rssm.parameters()]
        workflow.update_controller(source.sample(), phase=PHASE)
        assert all(torch.equal(a, b) for a, b in zip(model, workflow.rssm.parameters(), strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(actor, workflow.actor.parameters(), strict=True))


@pytest.mark.parametrize("paper", PAPERS)
def test_actor_and_critic_may_learn_from_the_last_rows_alone(paper, monkeypatch):
    """The window is seen as a whole; dreams begin in its last rows, and those are replayed to the critic."""
    workflow, _, source = collected(paper, monkeypatch=monkeypatch, dream_rows=3)
    batch, dreams = source.sample(), []
    imagine = workflow._behaviour.imagine

    def watched(states, horizon, generator):
        dreams.append((states, imagine(states, horizon, generator)))
        return dreams[0][1]

    monkeypatch.setattr(workflow._behaviour, "imagine", watched)
    seen = workflow._see(batch)
    losses, _ = workflow._behaviour.losses(seen, workflow.generator)
    ((states, dream),) = dreams
    for name, own in states.items():
        whole = seen.observed.states[name]
        assert torch.equal(own, torch.cat([whole[-3], whole[-2], whole[-1]]))
    assert ("replay_value" in losses) == (paper == "v3")
    if paper != "v3":
        return
    values = workflow._behaviour.values(dream.features)
    bootstrap = workflow._behaviour.returns(dream.rewards, dream.discounts, values)[0].view(3, -1)
    reached, expected = arrivals(batch), []
    for t, b in np.ndindex(2, 4):  # two of the three rows have a successor among them
        value, slow = workflow.critic(seen.features[-3 + t, b]), workflow.slow_critic(seen.features[-3 + t, b])
        target = replayed_return(reached, bootstrap, t, b, workflow.gamma)
        loss = workflow.critic.loss(value, target) + workflow.critic.loss(value, workflow.slow_critic.mean(slow))
        expected.append(loss * ~reached["is_last"][-3 + t, b])
    assert losses["replay_value"].item() == pytest.approx(torch.stack(expected).mean().item(), abs=1e-5)


def replayed_return(reached, bootstrap, t, b, gamma):
    """Return the lambda-return of row t of the last three, step by step."""
    if t == 2:
        return bootstrap[2, b]
    ahead = bootstrap[t + 1, b]
    if not reached["is_last"][-2 + t, b]:
        ahead = 0.05 * ahead + 0.95 * replayed_return(reached, bootstrap, t + 1, b, gamma)
    return reached.rewards[-2 + t, b] + gamma * ~reached.terminated[-2 + t, b] * ahead


def test_a_single_row_is_too_few_for_a_critic_that_learns_from_replay():
    with pytest.raises(UserError, match="dream_rows of at least 2"):
        collected(dream_rows=1)
    workflow, _, source = collected("v2", dream_rows=1)
    workflow.update_agent(source.sample(), phase=PHASE)


def test_one_optimiser_for_actor_or_critic_alone_is_refused():
    workflow, _, _ = collected("v2")
    parts = {
        name: getattr(workflow, name) for name in ("rssm", "decoder", "reward", "actor", "critic", "model_optimizer")
    }
    with pytest.raises(ValueError, match="an optimiser each"):
        type(workflow)(**parts, generator=workflow.generator, actor_optimizer=workflow.actor_optimizer)


def test_acting_is_recurrent_and_follows_the_generator():
    workflow, _, _ = collected()
    seen = torch.zeros(2, 1)
    act = lambda state, seed: workflow.act(seen, state, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    first = act(workflow.initial_state(2), 0)
    assert torch.equal(first.state["deter"], act(None, 0).state["deter"])
    assert first.state["deter"].shape == (2, DETER)
    assert not torch.allclose(act(first.state, 1).state["deter"], first.state["deter"])
    greedy = [workflow.act(seen, None, explore=False, generator=torch.Generator().manual_seed(0)).actions for _ in "ab"]
    assert torch.equal(*greedy)


@pytest.mark.parametrize("paper", PAPERS)
def test_half_precision_computes_nearly_the_same(paper):
    results = []
    for precision in ("float32", "bfloat16"):
        workflow, _, source = collected(paper, precision=precision)
        seen = workflow._see(source.sample())
        assert seen.features.dtype == torch.float32
        losses, _ = workflow._model.losses(seen)
        metrics, _ = workflow.update_agent(source.sample(), phase=PHASE)
        results.append((losses["reconstruction"].item(), float(metrics["grad_norm"])))
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in workflow.rssm.parameters())
    assert results[0] == pytest.approx(results[1], rel=0.1)


def num_parameters(*overrides, **dims):
    """Count the parameters of a model without making them."""
    composed = compose(["experiment=ppo_cartpole", "workflow=dreamer", *overrides])
    if dims:
        composed._dims.update(dims)
    config = parse_config(composed if dims else fill_dims(composed))
    with torch.device("meta"):
        parts = [build_parts(config, section, SeedTree(0), "meta", ()) for section in ("components", "controllers")]
    modules = [part for built in parts for part in built.values() if isinstance(part, torch.nn.Module)]
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "millions"),
    [("1m", 0.7), ("", 10.5), ("25m", 23.5), ("50m", 41.6), ("100m", 93.5), ("200m", 165.9)],
)
def test_sizes_are_near_their_names(name, millions):
    model = f"model=dreamerv3_{name}" if name else "model=dreamerv3"
    count = num_parameters(model, "environment=gridworld", "environment.resize=[64,64]") / 1e6
    assert count == pytest.approx(millions, rel=0.02)
    assert 0.65 < count / float(name.removesuffix("m") or 12) < 1.01


def test_the_smallest_model_has_as_many_parameters_as_the_author_reports_for_walker():
    policy = "controllers.actor.policy._target_=rl_lab.components.policies.BoundedNormal"
    assert num_parameters("model=dreamerv3_1m", policy, observation=24, action=6) == 640_867


def test_the_model_of_2023_has_the_layers_that_were_published():
    """Five normalised layers of 1024 for observations, a gated unit of 512, two layers of 512 for everything else."""

    def normalised(inputs, outputs):
        return inputs * outputs + 2 * outputs  # no bias: the norm has a scale and a shift

    def plain(inputs, outputs):
        return inputs * outputs + outputs

    encoder = normalised(24, 1024) + 4 * normalised(1024, 1024)
    decoder = normalised(1536, 1024) + 4 * normalised(1024, 1024) + plain(1024, 24)
    cell = normalised(1024 + 6, 512) + normalised(512 + 512, 3 * 512)
    prior = normalised(512, 512) + plain(512, 1024)
    posterior = normalised(512 + 1024, 512) + plain(512, 1024)
    heads = sum(normalised(1536, 512) + normalised(512, 512) + plain(512, outputs) for outputs in (255, 1, 12, 255))
    policy = "controllers.actor.policy._target_=rl_lab.components.policies.BoundedNormal"
    count = num_parameters("model=dreamerv3_2023", policy, observation=24, action=6)
    assert count == encoder + decoder + cell + prior + posterior + heads == 18_707_491


@pytest.mark.parametrize("paper", ["v1", "v3", "v3 of 2023"])
def test_parts_that_may_be_compiled_trace_whole_and_compute_the_same(paper):
    results = []
    for compiled in (False, True):
        workflow, _, source = collected(paper)
        if compiled:
            torch._dynamo.reset()
            torch._dynamo.config.recompile_limit = 64
            whole = {"backend": "aot_eager", "fullgraph": True, "dynamic": False}
            for part in vars(workflow).values():
                if isinstance(part, torch.nn.Module) and "forward" in vars(type(part)):
                    part.compile(**whole)
                for name in getattr(type(part), "pure", ()):
                    setattr(part, name, torch.compile(getattr(part, name), **whole))
        metrics = [workflow.update_agent(source.sample(), phase=PHASE).metrics for _ in range(2)]
        results.append([{name: float(value) for name, value in entry.items()} for entry in metrics])
    for plain, compiled in zip(*results, strict=True):
        assert plain == pytest.approx(compiled, rel=1e-4, abs=1e-4)
