"""MBMPC: its losses against a loop over rows, probes, planning with and without policy, imagination; MPC."""

import copy
import functools
import math
from pathlib import Path

import pytest
import torch

from rl_lab.build import build_experiment
from rl_lab.components.controllers.critics import ValueCritic
from rl_lab.components.controllers.one_hot import OneHotActor
from rl_lab.components.controllers.squashed import SquashedGaussianActor
from rl_lab.components.dynamics.analytic import CartPoleModel, QuadraticValue
from rl_lab.components.dynamics.deterministic import DeterministicDynamics
from rl_lab.components.nets import MLP
from rl_lab.components.planners.cem import CEM
from rl_lab.components.planners.policy_guided import PolicyGuided
from rl_lab.components.planners.shooting import RandomShooting
from rl_lab.components.policy_losses import LARGEST, exp_weight, log_probs_of
from rl_lab.composition import compose
from rl_lab.core.batch import Batch
from rl_lab.core.errors import UserError
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Hook, Phase
from rl_lab.core.seeding import SeedTree
from rl_lab.data.collector import RolloutCollector
from rl_lab.data.sources import ReplaySource
from rl_lab.envs.make import make_env
from rl_lab.orchestration.loop import training_loop
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.workflows.mbmpc import MBMPCWorkflow
from rl_lab.workflows.mpc import MPCWorkflow
from tests.workflows.test_probes import GAMMA, NUM_ENVS, PROBES, VALUES
from tests.workflows.test_sac import STILL


def build(discrete, *, observation=3, planner=None, optimizer=STILL, **knobs):
    torch.manual_seed(0)
    num_actions = 2
    size = num_actions if discrete else 1
    network = MLP(observation, size if discrete else 2, (32,), "relu")
    policy = OneHotActor(network) if discrete else SquashedGaussianActor(network, -5.0)
    dynamics = DeterministicDynamics(observation, size, (32,), "relu", discrete, done=True)
    critic = ValueCritic(MLP(observation, 1, (32,), "relu"))
    return MBMPCWorkflow(
        dynamics,
        planner or PolicyGuided(size, horizon=2, num_samples=16, discrete=discrete),
        torch.Generator().manual_seed(0),
        policy,
        critic,
        dynamics_optimizer=Optimizer(dynamics.parameters(), optimizer),
        policy_optimizer=Optimizer(policy.parameters(), optimizer),
        critic_optimizer=Optimizer(critic.parameters(), optimizer),
        **{"gamma": GAMMA} | knobs,
    )


def transitions(discrete, size=30):
    generator = torch.Generator().manual_seed(4)
    actions = torch.rand(size, 1, generator=generator) * 2 - 1
    plan = (
        torch.rand(size, 2, generator=generator).softmax(-1) if discrete else torch.rand(size, 1, generator=generator)
    )
    return Batch(
        observations=torch.randn(size, 3, generator=generator),
        actions=(actions[:, 0] > 0).long() if discrete else actions,
        rewards=torch.randn(size, generator=generator),
        terminated=torch.rand(size, generator=generator) < 0.3,
        truncated=torch.rand(size, generator=generator) < 0.3,
        next_observations=torch.randn(size, 3, generator=generator),
        extras={"plan": plan},
    )


def log_density(workflow, seen, action):
    """The density of one action by hand: the Gaussian's at the action before its squash, over the squash's slope."""
    mean, raw = workflow.policy.network.layers(seen).chunk(2, -1)
    std = math.exp(-5.0 + 3.5 * (math.tanh(raw.item()) + 1.0))
    inside = max(-LARGEST, min(LARGEST, action.item()))
    apart = (math.atanh(inside) - mean.item()) / std
    gaussian = math.exp(-0.5 * apart**2) / (std * math.sqrt(2 * math.pi))
    return math.log(gaussian / (1 - inside**2))


@pytest.mark.parametrize("policy_loss", ["cloning", "advantage"])
@pytest.mark.parametrize("discrete", [True, False])
def test_the_losses_against_a_loop_over_rows(discrete, policy_loss):
    workflow = build(discrete, policy_loss=policy_loss, temperature=0.7, weight_limit=2.0, target_rate=0.0)
    for parameter in workflow.target_critic.parameters():
        parameter.data.mul_(1.2)
    batch = transitions(discrete)
    critic_losses, advantages, log_probs = [], [], []
    for b in range(30):
        seen = batch.observations[b]
        after = workflow.target_critic.network.layers(batch.next_observations[b]).item()
        target = batch.rewards[b].item() + (0.0 if batch.terminated[b] else GAMMA * after)
        value = workflow.critic.network.layers(seen).item()
        critic_losses.append((value - target) ** 2)
        advantages.append(target - value)
        if discrete:
            logits = workflow.policy.network.layers(seen)
            log_probs.append([(logits[a] - logits.exp().sum().log()).item() for a in range(2)])
        else:
            log_probs.append(
                [log_density(workflow, seen, batch["plan"][b]), log_density(workflow, seen, batch.actions[b])]
            )
    center = sum(advantages) / 30
    spread = math.sqrt(sum((a - center) ** 2 for a in advantages) / 30)
    policy_losses = []
    for b in range(30):
        if policy_loss == "cloning":
            weights = batch["plan"][b].tolist() if discrete else [1.0, 0.0]
            policy_losses.append(-sum(w * p for w, p in zip(weights, log_probs[b], strict=True)))
        else:
            weight = min(math.exp((advantages[b] - center) / (spread + 1e-6) / 0.7), 2.0)
            taken = log_probs[b][batch.actions[b].item()] if discrete else log_probs[b][1]
            policy_losses.append(-weight * taken)
    metrics = workflow.update_controller(batch, phase=None)
    assert metrics["critic_loss"].item() == pytest.approx(sum(critic_losses) / 30, rel=1e-4)
    assert metrics["policy_loss"].item() == pytest.approx(sum(policy_losses) / 30, rel=1e-4)


@pytest.mark.parametrize("policy_loss", ["cloning", "advantage"])
def test_windows_bootstrap_after_n_steps(policy_loss):
    batch = transitions(True)
    flat = build(True, policy_loss=policy_loss).update_controller(batch, phase=None)
    one = build(True, policy_loss=policy_loss).update_controller(batch.map(lambda leaf: leaf.unsqueeze(0)), phase=None)
    assert {name: value.item() for name, value in flat.items()} == pytest.approx(
        {name: value.item() for name, value in one.items()}, rel=1e-5
    )
    workflow = build(True, policy_loss=policy_loss, target_rate=0.0)
    two = batch.map(lambda leaf: leaf.reshape(2, 15, *leaf.shape[1:]))
    expected = []
    for b in range(15):
        last = 0 if two.dones[0, b] else 1
        target = sum(GAMMA**t * two.rewards[t, b].item() for t in range(last + 1))
        if not two.terminated[last, b]:
            target += GAMMA ** (last + 1) * workflow.critic.network.layers(two.next_observations[last, b]).item()
        expected.append((workflow.critic.network.layers(two.observations[0, b]).item() - target) ** 2)
    assert workflow.update_controller(two, phase=None)["critic_loss"].item() == pytest.approx(
        sum(expected) / 15, rel=1e-4
    )


def test_weights_of_advantages_are_bounded():
    weights = exp_weight(torch.tensor([-100.0, 0.0, 1.0, 100.0]), 0.5, 20.0)
    torch.testing.assert_close(weights, torch.tensor([0.0, 1.0, math.exp(2.0), 20.0]))


def test_densities_integrate_to_one():
    workflow = build(False)
    seen = torch.randn(1, 3)
    actions = torch.linspace(-LARGEST, LARGEST, 4001).unsqueeze(-1)
    density = log_probs_of(workflow.policy, seen.expand(4001, -1), actions).exp()
    assert torch.trapezoid(density, actions[:, 0]).item() == pytest.approx(1.0, abs=0.02)


def test_three_losses_move_three_parts():
    workflow = build(True, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    names = ("dynamics", "policy", "critic")

    def moved(update):
        before = [copy.deepcopy(getattr(workflow, name)) for name in names]
        update(transitions(True), phase=None)
        pairs = zip(names, before, strict=True)
        return [
            n
            for n, old in pairs
            if any(
                not torch.equal(a, b) for a, b in zip(old.parameters(), getattr(workflow, n).parameters(), strict=True)
            )
        ]

    assert moved(workflow.update_world_model) == ["dynamics"]
    assert moved(workflow.update_controller) == ["policy", "critic"]
    assert moved(workflow.update_agent) == ["dynamics", "policy", "critic"]
    assert "target_critic" in workflow.get_state()


@pytest.mark.parametrize("policy_loss", ["cloning", "advantage"])
@pytest.mark.parametrize("probe", PROBES)
def test_mbmpc_solves_probe(probe, policy_loss):
    seeds = SeedTree(6)
    adam = functools.partial(torch.optim.Adam, lr=3e-3)
    planner = PolicyGuided(2, horizon=1, num_samples=16, random_share=0.5, discrete=True)
    workflow = build(True, observation=1, planner=planner, optimizer=adam, target_rate=0.1, policy_loss=policy_loss)
    environment = make_env(f"probe/{probe}", NUM_ENVS)
    collector = RolloutCollector(environment, seeds, initial_state=workflow.initial_state(NUM_ENVS))
    source = ReplaySource(NUM_ENVS, seeds.numpy("source"), "cpu", capacity=4000, batch_size=64, min_size=200)
    hooks = (Hook("collect", 8), Hook("update_world_model", ratio=0.25), Hook("update_controller", ratio=0.25))
    phases = [  # a planner that has only seen what it chose itself may never learn of anything better
        Phase("random", hooks=hooks[:1], buffer="data", duration_steps=192, settings={"policy": "random"}),
        Phase("p", hooks=hooks, buffer="data", duration_steps=2400 if probe == "both" else 1600),
    ]
    scheduler = PhaseScheduler(phases, ready=lambda name: source.ready)
    for event in training_loop(workflow, scheduler, collector, {"data": source}):
        assert all(torch.isfinite(torch.as_tensor(value)) for value in event.metrics.values()), event
    returns, _ = collector.collect_episodes(workflow.act, 40)
    chosen = probe in ("action", "both")
    if chosen:
        assert min(returns) == 1.0
    for observation, value in VALUES[probe].items():
        with torch.no_grad():
            estimate = workflow.value(torch.tensor([[observation]])).item()
        # Where actions matter, the random ones are in the mean as well.
        assert abs(estimate - value) < (0.3 if chosen else 0.15), (observation, estimate, value)


def test_the_policy_can_act_alone():
    workflow = build(True, plan=False)
    assert workflow.initial_state(3) is None
    seen = torch.randn(3, 3)
    said = workflow.act(seen, explore=False)
    assert torch.equal(said.actions, workflow.policy(seen).argmax(-1))
    assert not said.extras


def test_plans_become_a_column_only_where_they_are_cloned():
    seen = torch.randn(3, 3)
    for policy_loss, column in (("cloning", {"plan"}), ("advantage", set())):
        workflow = build(True, policy_loss=policy_loss)
        state, generator = workflow.initial_state(3), torch.Generator().manual_seed(0)
        assert set(workflow.act(seen, state, generator=generator).extras) == column
        given, before = torch.tensor([0, 1, 1]), generator.get_state()
        said = workflow.follow(workflow.act, seen, state, given, generator=generator)  # while somebody else acts
        assert set(said.extras) == column
        assert torch.equal(said.actions, given)
        assert torch.equal(generator.get_state(), before) == (not column)  # plans only for a column


def test_imagination_is_a_batch():
    workflow = build(True)
    with torch.no_grad():
        batch = workflow.imagine(horizon=4, latents=torch.randn(5, 3))
    assert tuple(batch.shape) == (4, 5)
    assert torch.equal(batch.observations[1:], batch.next_observations[:-1])
    assert batch.actions.dtype == torch.int64
    assert tuple(batch["discounts"].shape) == (4, 5)
    assert batch["discounts"].max() <= GAMMA
    with pytest.raises(ValueError, match="at least 1, not 0"):
        workflow.imagine(horizon=0, latents=torch.randn(5, 3))


def test_pets_needs_neither_policy_nor_critic():
    torch.manual_seed(0)
    dynamics = DeterministicDynamics(3, 1, (8,))
    workflow = MBMPCWorkflow(dynamics, CEM(1, 3, 16, 4, 2), torch.Generator().manual_seed(0))
    said = workflow.act(torch.randn(2, 3), workflow.initial_state(2), generator=torch.Generator().manual_seed(0))
    assert tuple(said.actions.shape) == (2, 1)
    assert workflow.value(torch.randn(2, 3)).tolist() == [0.0, 0.0]


def test_known_dynamics_balance_a_pole_without_learning():
    critic = QuadraticValue([1.0, 0.3, 30.0, 1.0], best=100.0)
    planner = RandomShooting(2, 12, 128, discrete=True)
    workflow = MPCWorkflow(CartPoleModel(), planner, torch.Generator(), critic)
    assert workflow.hooks() == ()
    environment = make_env("tiny/CartPole", 3, max_episode_steps=150)
    collector = RolloutCollector(environment, SeedTree(0), initial_state=workflow.initial_state(3))
    returns, _ = collector.collect_episodes(workflow.act, 3)
    assert returns == [150.0] * 3


@pytest.mark.parametrize(
    ("experiment", "hook"),
    [("pets_swingup", "update_controller"), ("mcts_gridworld", "update_world_model"), ("pets_swingup", "update_agent")],
)
def test_hooks_that_would_train_nothing_are_refused_before_the_first_step(experiment, hook):
    phase = f"{{name: p, buffer: replay, duration_steps: 9, workflow_hooks: [collect, {{{hook}: {{ratio: 1}}}}]}}"
    composed = compose([f"experiment={experiment}", f"training.phases=[{phase}]", "experiment.device=cpu"])
    with pytest.raises(UserError, match="what is not there"):
        build_experiment(composed, Path("unwritten"))
