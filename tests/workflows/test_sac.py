"""SAC: its losses against a loop over rows, the probes, the temperature, its variants."""

import copy
import functools
import math

import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from rl_lab.components.controllers.squashed import SquashedGaussianActor
from rl_lab.components.controllers.temperature import Temperature
from rl_lab.components.nets import MLP
from rl_lab.components.stacked import StackedMLP
from rl_lab.core import noise
from rl_lab.core.batch import Batch
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Hook
from rl_lab.core.seeding import SeedTree
from rl_lab.data.sources import ReplaySource
from rl_lab.envs.make import make_env
from rl_lab.workflows.sac import SACWorkflow
from tests.workflows.test_probes import GAMMA, NUM_ENVS, PROBES, VALUES, train

STILL = functools.partial(torch.optim.SGD, lr=0.0)


def build(observation=3, action=2, *, optimizer=STILL, layer_norm=False, **knobs):
    torch.manual_seed(0)
    actor = SquashedGaussianActor(MLP(observation, 2 * action, (32,), "relu"), -5.0)
    critics = StackedMLP(observation + action, 1, (32,), layer_norm=layer_norm)
    temperature = knobs.pop("temperature", None) or Temperature(action, 0.3)
    return SACWorkflow(
        actor,
        critics,
        temperature,
        actor_optimizer=Optimizer([*actor.parameters(), *temperature.parameters()], optimizer),
        critic_optimizer=Optimizer(critics.parameters(), optimizer),
        generator=torch.Generator().manual_seed(1),
        **{"gamma": GAMMA} | knobs,
    )


def transitions(size=40, observation=3, action=2):
    generator = torch.Generator().manual_seed(5)
    return Batch(
        observations=torch.randn(size, observation, generator=generator),
        actions=torch.rand(size, action, generator=generator) * 2 - 1,
        rewards=torch.randn(size, generator=generator),
        terminated=torch.rand(size, generator=generator) < 0.3,
        truncated=torch.rand(size, generator=generator) < 0.3,
        next_observations=torch.randn(size, observation, generator=generator),
    )


def sampled(workflow, observation, draws):
    """One action and its log density, by torch's distributions."""
    mean, raw = workflow.actor.network.layers(observation).chunk(2, -1)
    log_std = -5.0 + 3.5 * (raw.tanh() + 1.0)
    policy = TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform()])
    action = (mean + draws * log_std.exp()).tanh()
    return action, policy.log_prob(action).sum()


def q_values(critics, observation, action):
    """Every member's value of one row, layer by layer."""
    values = []
    for member in range(critics.num_members):
        row = torch.cat([observation, action])
        for i, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
            row = row @ weight[member] + bias[member, 0]
            row = row.relu() if i < len(critics.weights) - 1 else row
        values.append(row.squeeze(0))
    return values


def test_the_losses_against_a_loop_over_rows(monkeypatch):
    workflow = build(target_rate=0.0)
    for parameter in workflow.target_critics.parameters():
        parameter.data.mul_(1.3)  # so that targets and critics differ
    batch, known = transitions(), [torch.randn(40, 2), torch.randn(40, 2)]
    given = iter(known)
    monkeypatch.setattr(noise, "normal", lambda shape, like, generator: next(given))
    metrics = workflow.update_agent(batch, phase=None)
    critic_losses, actor_losses, log_probs = [], [], []
    for b in range(40):
        after, log_prob = sampled(workflow, batch.next_observations[b], known[0][b])
        bootstrap = min(q_values(workflow.target_critics, batch.next_observations[b], after)) - 0.3 * log_prob
        target = batch.rewards[b] + (0.0 if batch.terminated[b] else GAMMA * bootstrap)
        critic_losses.append(
            sum((q - target) ** 2 for q in q_values(workflow.critics, batch.observations[b], batch.actions[b]))
        )
        action, log_prob = sampled(workflow, batch.observations[b], known[1][b])
        actor_losses.append(0.3 * log_prob - min(q_values(workflow.critics, batch.observations[b], action)))
        log_probs.append(log_prob)
    assert metrics["critic_loss"].item() == pytest.approx(torch.stack(critic_losses).mean().item(), rel=1e-4)
    assert metrics["actor_loss"].item() == pytest.approx(torch.stack(actor_losses).mean().item(), rel=1e-4)
    assert metrics["entropy"].item() == pytest.approx(-torch.stack(log_probs).mean().item(), rel=1e-4)
    assert metrics["temperature"].item() == pytest.approx(0.3)


def test_gradients_reach_the_parts_that_each_loss_trains():
    workflow = build(optimizer=functools.partial(torch.optim.SGD, lr=0.01))
    before = copy.deepcopy((workflow.actor, workflow.critics, workflow.temperature))
    workflow._update_critics(transitions())
    moved = [
        _differs(a, b) for a, b in zip(before, (workflow.actor, workflow.critics, workflow.temperature), strict=True)
    ]
    assert moved == [False, True, False]
    critics = copy.deepcopy(workflow.critics)
    workflow._update_actor(transitions())
    assert _differs(before[0], workflow.actor)
    assert _differs(before[2], workflow.temperature)
    assert not _differs(critics, workflow.critics)


def _differs(a, b):
    return any(not torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_the_temperature_falls_while_the_entropy_is_above_the_wanted_one():
    temperature = Temperature(2, 0.5)
    assert temperature.target_entropy == -2.0
    assert temperature().item() == pytest.approx(0.5)
    for entropy, falls in ((1.0, True), (-3.0, False)):
        temperature.zero_grad()
        temperature.loss(torch.full((8,), -entropy)).backward()
        assert (temperature.log_value.grad > 0).item() is falls
    # d/d(log) of -log * (log_prob + target): the paper's gradient by the logarithm
    assert temperature.log_value.grad.item() == pytest.approx(-(3.0 - 2.0))


def test_a_fixed_temperature_is_saved_but_not_trained():
    temperature = Temperature(1, 0.2, learned=False)
    assert not list(temperature.parameters())
    assert temperature.state_dict()["log_value"].item() == pytest.approx(math.log(0.2))
    workflow = build(temperature=temperature, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    for _ in range(3):
        workflow.update_agent(transitions(), phase=None)
    assert workflow.temperature().item() == pytest.approx(0.2)


def test_targets_follow_at_their_rate():
    workflow = build(target_rate=0.25, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    old = [p.clone() for p in workflow.target_critics.parameters()]
    workflow.update_agent(transitions(), phase=None)
    for before, after, online in zip(
        old, workflow.target_critics.parameters(), workflow.critics.parameters(), strict=True
    ):
        torch.testing.assert_close(after, before + 0.25 * (online - before))
    assert "target_critics" in workflow.get_state()


def test_without_targets_the_critics_value_the_successor():
    workflow = build(use_targets=False, layer_norm=True, optimizer=functools.partial(torch.optim.Adam, lr=1e-3))
    assert workflow.target_critics is workflow.critics
    before = workflow.targets(transitions())
    for _ in range(20):
        workflow.update_agent(transitions(), phase=None)
    assert not torch.allclose(workflow.targets(transitions()), before)


@pytest.mark.parametrize("variant", ["targets", "layer_norm_without_targets"])
@pytest.mark.parametrize("probe", PROBES)
def test_sac_solves_probe(probe, variant):
    seeds = SeedTree(4)
    plain = variant == "targets"
    workflow = build(
        1,
        1,
        optimizer=functools.partial(torch.optim.Adam, lr=3e-3),
        temperature=Temperature(1, 0.01, learned=False),
        target_rate=0.05,
        use_targets=plain,
        layer_norm=not plain,
    )
    environment = make_env(f"probe/{probe}", NUM_ENVS, kwargs={"continuous": True})
    source = ReplaySource(NUM_ENVS, seeds.numpy("source"), "cpu", capacity=4000, batch_size=64, min_size=200)
    hooks = (Hook("collect", 8), Hook("update_agent", ratio=0.25))
    returns = train(workflow, source, environment, seeds, hooks, 2400)
    for observation, value in VALUES[probe].items():
        best = {"action": 0.5, "both": 0.5 * observation}.get(probe, 0.0)
        with torch.no_grad():
            estimate = workflow.critics(torch.tensor([[observation, best]])).mean().item()
        assert abs(estimate - value) < 0.15, (observation, estimate, value)
    if probe in ("action", "both"):
        assert sum(returns) / len(returns) > 0.95


def test_acting_explores_or_takes_the_mode():
    workflow = build()
    seen = torch.randn(5, 3)
    mode = workflow.act(seen, explore=False).actions
    assert torch.equal(mode, workflow.act(seen, explore=False).actions)
    generator = torch.Generator().manual_seed(0)
    many = torch.stack([workflow.act(seen, generator=generator).actions for _ in range(2000)])
    mean, log_std = workflow.actor(seen)
    torch.testing.assert_close(many.clamp(-0.999999, 0.999999).atanh().mean(0), mean, atol=0.1, rtol=0.0)
    torch.testing.assert_close(many.clamp(-0.999999, 0.999999).atanh().std(0), log_std.exp(), atol=0.1, rtol=0.1)
    assert many.abs().max() <= 1.0
