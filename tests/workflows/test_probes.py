"""Every algorithm solves the probes that apply to it, and its values are the known ones."""

import functools

import pytest
import torch
from torch import nn

from rl_lab.components.controllers.actors import CategoricalActor, GaussianActor
from rl_lab.components.controllers.critics import ValueCritic
from rl_lab.components.nets import MLP
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Hook, Phase
from rl_lab.core.schedules import Linear
from rl_lab.core.seeding import SeedTree
from rl_lab.data.collector import RolloutCollector
from rl_lab.data.prioritized import PrioritizedReplaySource
from rl_lab.data.sources import ReplaySource, StreamSource
from rl_lab.envs.make import make_env
from rl_lab.orchestration.loop import training_loop
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.workflows.dqn import DQNWorkflow
from rl_lab.workflows.ppo import PPOWorkflow

PROBES = ("constant", "observation", "delayed", "action", "both")
GAMMA = 0.9
NUM_ENVS = 8
# observation -> optimal value; where it is not listed the probe never shows it
VALUES = {
    "constant": {0.0: 1.0},
    "observation": {-1.0: -1.0, 1.0: 1.0},
    "delayed": {0.0: GAMMA, 1.0: 1.0},
    "action": {0.0: 1.0},
    "both": {-1.0: 1.0, 1.0: 1.0},
}


def train(workflow, source, environment, seeds, hooks, steps):
    collector = RolloutCollector(environment, seeds)
    phase = Phase("training", hooks=hooks, buffer="data", duration_steps=steps)
    scheduler = PhaseScheduler([phase], ready=lambda name: source.ready)
    for event in training_loop(workflow, scheduler, collector, {"data": source}):
        assert all(torch.isfinite(torch.as_tensor(value)) for value in event.metrics.values()), event
    return collector.collect_episodes(workflow.act, 40)[0]


def make_ppo(seeds, continuous):
    torch.manual_seed(0)
    head = functools.partial(MLP, 1, hidden=(32,), initialization="orthogonal")
    actor = (
        GaussianActor(head(outputs=1, output_gain=0.01), 1, -0.5) if continuous else CategoricalActor(head(outputs=2))
    )
    critic = ValueCritic(head(outputs=1))
    optimizer = Optimizer(nn.ModuleList([actor, critic]).parameters(), functools.partial(torch.optim.Adam, lr=1e-2))
    return PPOWorkflow(actor, critic, optimizer, seeds.generator("workflow"), gamma=GAMMA, minibatch_size=128)


@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])
@pytest.mark.parametrize("probe", PROBES)
def test_ppo_solves_probe(probe, continuous):
    seeds = SeedTree(1)
    workflow = make_ppo(seeds, continuous)
    environment = make_env(f"probe/{probe}", NUM_ENVS, kwargs={"continuous": continuous})
    source = StreamSource(NUM_ENVS, seeds.numpy("source"), "cpu")
    hooks = (Hook("collect", 32), Hook("update_controller"))
    returns = train(workflow, source, environment, seeds, hooks, 9_000)
    check_values(workflow, probe, tolerance=0.15)
    if probe in ("action", "both"):
        assert sum(returns) / len(returns) > 0.95


@pytest.mark.parametrize("variant", ["plain", "double_n_step", "prioritized"])
@pytest.mark.parametrize("probe", PROBES)
def test_dqn_solves_probe(probe, variant):
    seeds = SeedTree(2)
    torch.manual_seed(0)
    network = MLP(1, 2, (32,), "relu")
    optimizer = Optimizer(network.parameters(), functools.partial(torch.optim.Adam, lr=5e-3))
    epsilon = Linear(1.0, 0.1, 2000)
    workflow = DQNWorkflow(
        network, optimizer, epsilon, GAMMA, double=variant != "plain", target_rate=0.1, target_every=1
    )
    environment = make_env(f"probe/{probe}", NUM_ENVS)
    kind = PrioritizedReplaySource if variant == "prioritized" else ReplaySource
    window = 3 if variant == "double_n_step" else None
    source = kind(
        NUM_ENVS,
        seeds.numpy("source"),
        "cpu",
        capacity=2000,
        batch_size=64,
        min_size=200,
        window=window,
        pad=window is not None,
    )
    hooks = (Hook("collect", 4), Hook("update_controller", ratio=0.125))
    returns = train(workflow, source, environment, seeds, hooks, 4_800)
    check_values(workflow, probe, tolerance=0.1)
    if probe in ("action", "both"):
        assert min(returns) == 1.0


def check_values(workflow, probe, tolerance):
    for observation, value in VALUES[probe].items():
        with torch.no_grad():
            estimate = workflow.value(torch.tensor([[observation]])).item()
        assert abs(estimate - value) < tolerance, (observation, estimate, value)
