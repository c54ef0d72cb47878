"""TD3: its losses against a loop over rows, the probes, smoothing, the delayed targets."""

import copy
import functools

import pytest
import torch

from rl_lab.components.controllers.deterministic import DeterministicActor
from rl_lab.components.nets import MLP
from rl_lab.components.stacked import StackedMLP
from rl_lab.core import noise
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Hook
from rl_lab.core.schedules import Linear
from rl_lab.core.seeding import SeedTree
from rl_lab.data.sources import ReplaySource
from rl_lab.envs.make import make_env
from rl_lab.workflows.td3 import TD3Workflow
from tests.workflows.test_probes import GAMMA, NUM_ENVS, PROBES, VALUES, train
from tests.workflows.test_sac import STILL, q_values, transitions

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def build(observation=3, action=2, *, optimizer=STILL, **knobs):
    torch.manual_seed(0)
    actor = DeterministicActor(MLP(observation, action, (32,), "relu"))
    critics = StackedMLP(observation + action, 1, (32,))
    return TD3Workflow(
        actor,
        critics,
        actor_optimizer=Optimizer(actor.parameters(), optimizer),
        critic_optimizer=Optimizer(critics.parameters(), optimizer),
        generator=torch.Generator().manual_seed(1),
        **{"gamma": GAMMA} | knobs,
    )


def test_the_losses_against_a_loop_over_rows(monkeypatch):
    workflow = build(smoothing_noise=0.4, smoothing_limit=0.3)
    for parameter in (*workflow.target_critics.parameters(), *workflow.target_actor.parameters()):
        parameter.data.mul_(1.3)  # so that targets and networks differ
    batch, draws = transitions(), torch.randn(40, 2)
    monkeypatch.setattr(noise, "normal", lambda shape, like, generator: draws)
    critic_losses, actor_losses = [], []
    for b in range(40):
        after = workflow.target_actor.network.layers(batch.next_observations[b]).tanh()
        after = torch.clip(after + torch.clip(0.4 * draws[b], -0.3, 0.3), -1, 1)
        bootstrap = min(q_values(workflow.target_critics, batch.next_observations[b], after))
        target = batch.rewards[b] + (0.0 if batch.terminated[b] else GAMMA * bootstrap)
        said = q_values(workflow.critics, batch.observations[b], batch.actions[b])
        critic_losses.append(sum((q - target) ** 2 for q in said))
        action = workflow.actor.network.layers(batch.observations[b]).tanh()
        actor_losses.append(-q_values(workflow.critics, batch.observations[b], action)[0])
    critic_loss = workflow.update_critic(batch, phase=None)["critic_loss"].item()
    actor_loss = workflow.update_actor(batch, phase=None)["actor_loss"].item()
    assert critic_loss == pytest.approx(torch.stack(critic_losses).mean().item(), rel=1e-4)
    assert actor_loss == pytest.approx(torch.stack(actor_losses).mean().item(), rel=1e-4)


def test_each_hook_moves_its_own_parts_and_targets_move_with_the_actor():
    workflow = build(optimizer=SGD, target_rate=0.25)
    names = ("actor", "critics", "target_actor", "target_critics")

    def moved(update):
        before = [copy.deepcopy(getattr(workflow, name)) for name in names]
        update(transitions(), phase=None)
        return [
            name
            for name, old in zip(names, before, strict=True)
            if any(
                not torch.equal(a, b)
                for a, b in zip(old.parameters(), getattr(workflow, name).parameters(), strict=True)
            )
        ]

    assert moved(workflow.update_critic) == ["critics"]
    old = [p.clone() for p in workflow.target_critics.parameters()]
    assert moved(workflow.update_actor) == ["actor", "target_actor", "target_critics"]
    for before, after, online in zip(
        old, workflow.target_critics.parameters(), workflow.critics.parameters(), strict=True
    ):
        torch.testing.assert_close(after, before + 0.25 * (online - before))
    assert set(workflow.get_state()) == {"target_actor", "target_critics"}


@pytest.mark.parametrize("probe", PROBES)
def test_td3_solves_probe(probe):
    seeds = SeedTree(5)
    adam = functools.partial(torch.optim.Adam, lr=3e-3)
    workflow = build(1, 1, optimizer=adam, target_rate=0.05, smoothing_noise=0.05, exploration_noise=0.3)
    environment = make_env(f"probe/{probe}", NUM_ENVS, kwargs={"continuous": True})
    source = ReplaySource(NUM_ENVS, seeds.numpy("source"), "cpu", capacity=4000, batch_size=64, min_size=200)
    hooks = (Hook("collect", 2), Hook("update_critic", ratio=0.25), Hook("update_actor", ratio=0.125))
    returns = train(workflow, source, environment, seeds, hooks, 2400)
    for observation, value in VALUES[probe].items():
        best = {"action": 0.5, "both": 0.5 * observation}.get(probe, 0.0)
        with torch.no_grad():
            estimate = workflow.critics(torch.tensor([[observation, best]])).mean().item()
        assert abs(estimate - value) < 0.15, (observation, estimate, value)
    if probe in ("action", "both"):
        assert sum(returns) / len(returns) > 0.95


def test_exploration_noise_is_a_number_or_a_schedule_and_actions_stay_inside():
    workflow = build(exploration_noise=Linear(1.0, 0.0, 100))
    seen = torch.zeros(5000, 3)
    mode = workflow.act(seen, explore=False).actions
    assert torch.equal(mode, workflow.act(seen, explore=False).actions)
    spreads = []
    for steps in (0, 90, 100):
        workflow.advance_schedules(agent_steps=steps, updates=0)
        said = workflow.act(seen, generator=torch.Generator().manual_seed(0)).actions
        assert said.abs().max() <= 1.0
        spreads.append((said - mode).std().item())
    assert spreads[0] > 0.5
    assert spreads[1] == pytest.approx(0.1, rel=0.05)
    assert spreads[2] == 0.0
