"""TD-MPC2: the probes with continuous and with discrete actions, acting with and without planning, imagining."""

import functools

import pytest
import torch

from rl_lab.components.controllers.one_hot import OneHotActor
from rl_lab.components.controllers.squashed import SquashedGaussianActor
from rl_lab.components.normalizers import PercentileScale
from rl_lab.components.normed import NormedEnsemble, NormedMLP
from rl_lab.components.planners.mppi import MPPI
from rl_lab.components.twohot import TwoHot
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Hook, Phase
from rl_lab.core.seeding import SeedTree
from rl_lab.data.collector import RolloutCollector
from rl_lab.data.sources import ReplaySource
from rl_lab.envs.make import make_env
from rl_lab.orchestration.loop import training_loop
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.workflows.tdmpc import TDMPCWorkflow
from tests.workflows.test_probes import GAMMA, VALUES

NUM_ENVS = 8


def build(seeds, *, plan=True, episodic=True, horizon=1, discrete=False, **knobs):
    torch.manual_seed(0)
    size = 2 if discrete else 1  # entries of an action vector
    parts = {
        "encoder": NormedMLP(1, 16, [32], simplex=8),
        "dynamics": NormedMLP(16, 16, [32], actions=size, simplex=8),
        "reward": NormedMLP(16, 101, [32], actions=size, zero_output=True),
        "policy": OneHotActor(NormedMLP(16, 2, [32])) if discrete else SquashedGaussianActor(NormedMLP(16, 2, [32])),
        "critics": NormedEnsemble(16, 101, [32], actions=size, num_members=2),
    }
    if episodic:
        parts["termination"] = NormedMLP(16, 1, [32])
    trained = [p for name, part in parts.items() if name != "policy" for p in part.parameters()]
    adam = functools.partial(torch.optim.Adam, lr=3e-3)
    return TDMPCWorkflow(
        **parts,
        twohot=TwoHot(),
        scale=PercentileScale(),
        planner=MPPI(size, horizon=horizon, num_samples=32, num_policy_samples=4, num_elites=8, num_iterations=2),
        model_optimizer=Optimizer(trained, adam, max_grad_norm=20.0),
        policy_optimizer=Optimizer(parts["policy"].parameters(), adam, max_grad_norm=20.0),
        generator=seeds.generator("workflow"),
        gamma=GAMMA,
        target_rate=0.1,
        plan=plan,
        **knobs,
    )


@pytest.mark.parametrize("discrete", [False, True], ids=["continuous", "discrete"])
@pytest.mark.parametrize("probe", ["constant", "observation", "delayed", "action", "both"])
def test_tdmpc2_solves_probe(probe, discrete):
    seeds = SeedTree(3)
    workflow = build(seeds, discrete=discrete)
    environment = make_env(f"probe/{probe}", NUM_ENVS, kwargs={"continuous": not discrete})
    state = workflow.initial_state(NUM_ENVS)
    collector = RolloutCollector(environment, seeds, initial_state=state)
    source = ReplaySource(NUM_ENVS, seeds.numpy("source"), "cpu", capacity=4000, batch_size=64, min_size=100, window=1)
    ratio, steps = (0.5, 2000) if probe in ("action", "both") else (0.25, 1600)
    hooks = (Hook("collect", 8), Hook("update_agent", ratio=ratio))
    phase = Phase("p", hooks=hooks, buffer="data", duration_steps=steps)
    scheduler = PhaseScheduler([phase], ready=lambda name: source.ready)
    for _ in training_loop(workflow, scheduler, collector, {"data": source}):
        pass
    for observation, value in VALUES[probe].items():
        estimate = value_of_best_action(workflow, probe, observation)
        assert abs(estimate - value) < 0.2, (observation, estimate, value)
    if probe in ("action", "both"):
        returns, _ = collector.collect_episodes(workflow.act, 40)
        assert sum(returns) / 40 > 0.9
        workflow.plan = False  # the policy alone has learned it, too
        returns, _ = collector.collect_episodes(workflow.act, 40)
        assert sum(returns) / 40 > 0.8


def value_of_best_action(workflow, probe, observation):
    wanted = {"action": 1.0, "both": observation}.get(probe, 0.0)
    if workflow.policy.discrete:
        best = torch.tensor([int(wanted > 0)])
    else:
        best = torch.tensor([[0.5 * wanted]])
    with torch.no_grad():
        return workflow.model.all_values(workflow.encoder(torch.tensor([[observation]])), best).mean().item()


def test_evaluation_acts_without_noise_and_the_plan_is_kept_per_environment():
    workflow = build(SeedTree(0), horizon=3)
    seen = torch.tensor([[0.3], [-0.2]])
    state = workflow.initial_state(2)
    first = workflow.act(seen, state, explore=False, generator=torch.Generator().manual_seed(1))
    again = workflow.act(seen, state, explore=False, generator=torch.Generator().manual_seed(1))
    assert torch.equal(first.actions, again.actions)
    assert first.state["mean"].shape == (2, 3, 1)
    assert first.actions.abs().max() <= 1


def test_policy_alone_is_deterministic_when_asked():
    workflow = build(SeedTree(0), plan=False)
    seen = torch.tensor([[0.5]])
    assert workflow.initial_state(1) is None
    assert torch.equal(workflow.act(seen, explore=False).actions, workflow.act(seen, explore=False).actions)


def test_imagination_is_a_batch():
    workflow = build(SeedTree(0), horizon=3)
    latents = workflow.encoder(torch.randn(5, 1, generator=torch.Generator().manual_seed(0)))
    with torch.no_grad():
        batch = workflow.imagine(horizon=4, latents=latents)
    assert tuple(batch.shape) == (4, 5)
    assert torch.equal(batch.observations[0], latents)
    assert torch.equal(batch.observations[1:], batch.next_observations[:-1])
    assert batch["discounts"].max() <= GAMMA
    with pytest.raises(ValueError, match="at least 1, not 0"):
        workflow.imagine(horizon=0, latents=latents)


def test_target_critics_start_equal_and_are_checkpointed():
    workflow = build(SeedTree(0))
    for ours, target in zip(workflow.critics.parameters(), workflow.target_critics.parameters(), strict=True):
        assert torch.equal(ours, target)
    assert "target_critics" in workflow.get_state()
