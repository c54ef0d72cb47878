"""TD-MPC2 against numbers computed once with the authors' mathematics: two updates and two plans at toy size."""

import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_lab.components.controllers.squashed import SquashedGaussianActor
from rl_lab.components.normalizers import PercentileScale
from rl_lab.components.normed import NormedEnsemble, NormedMLP
from rl_lab.components.planners.mppi import MPPI
from rl_lab.components.twohot import TwoHot
from rl_lab.core import noise
from rl_lab.core.batch import Batch
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Hook, Phase
from rl_lab.workflows.tdmpc import TDMPCWorkflow

GOLDEN = Path(__file__).parent.parent / "golden" / "tdmpc2.safetensors"
PHASE = Phase("p", hooks=(Hook("update_agent"),), duration_updates=1)


@pytest.fixture(scope="module")
def numbers():
    return load_file(GOLDEN)


def build(numbers, kind):
    parts = {
        "encoder": NormedMLP(5, 16, [8], simplex=8),
        "dynamics": NormedMLP(16, 16, [16, 16], actions=2, simplex=8),
        "reward": NormedMLP(16, 101, [16, 16], actions=2),
        "policy": SquashedGaussianActor(NormedMLP(16, 4, [16, 16])),
        "critics": NormedEnsemble(16, 101, [16, 16], actions=2, num_members=5),
    }
    if kind == "episodic":
        parts["termination"] = NormedMLP(16, 1, [16, 16])
    for name, module in parts.items():
        load(module, numbers, f"{kind}/before/{'q' if name == 'critics' else name}")
    trained = [p for name, module in parts.items() if name != "policy" for p in module.parameters()]
    model_optimizer = Optimizer(
        trained,
        functools.partial(torch.optim.Adam, lr=3e-4),
        max_grad_norm=20.0,
        rates=dict.fromkeys(parts["encoder"].parameters(), 0.3),
    )
    policy_optimizer = Optimizer(
        parts["policy"].parameters(), functools.partial(torch.optim.Adam, lr=3e-4, eps=1e-5), max_grad_norm=20.0
    )
    planner = MPPI(2, horizon=3, num_samples=12, num_policy_samples=3, num_elites=4, num_iterations=3)
    workflow = TDMPCWorkflow(
        **parts,
        twohot=TwoHot(),
        scale=PercentileScale(),
        planner=planner,
        model_optimizer=model_optimizer,
        policy_optimizer=policy_optimizer,
        generator=torch.Generator(),
    )
    load(workflow.target_critics, numbers, f"{kind}/before/target_q")
    return workflow


def tensors(module):
    """Yield (golden name, where in it, tensor in golden layout) of a module's weights."""
    if isinstance(module, SquashedGaussianActor):
        module = module.network
    whole = ...
    if isinstance(module, NormedEnsemble):
        for i, (weight, bias) in enumerate(zip(module.weights, module.biases, strict=True)):
            yield f"{i}.weight", (..., slice(weight.shape[1])), weight.data.transpose(1, 2)
            yield f"{i}.bias", whole, bias.data.squeeze(1)
        yield "0.weight", (..., slice(-2, None)), module.action_weight.data.transpose(1, 2)
        for i, (gain, shift) in enumerate(zip(module.gains, module.shifts, strict=True)):
            yield f"{i}.ln.weight", whole, gain.data.squeeze(1)
            yield f"{i}.ln.bias", whole, shift.data.squeeze(1)
        return
    for i, linear in enumerate(module.linears):
        yield f"{i}.weight", (..., slice(linear.in_features)), linear.weight.data
        yield f"{i}.bias", whole, linear.bias.data
    if module.action_weight is not None:
        yield "0.weight", (..., slice(-2, None)), module.action_weight.data.T
    for i, norm in enumerate(module.norms):
        yield f"{i}.ln.weight", whole, norm.weight.data
        yield f"{i}.ln.bias", whole, norm.bias.data


def load(module, numbers, prefix):
    for name, where, tensor in tensors(module):
        tensor.copy_(numbers[f"{prefix}.{name}"][where])


def feed(monkeypatch, numbers, prefix):
    """Replace the draws by the golden ones, in their order; nothing may be left over."""
    names = sorted(name for name in numbers if name.startswith(f"{prefix}/draw"))
    left = list(names)

    def take(kind):
        def draw(shape, like, generator):
            name = left.pop(0)
            assert name.endswith(kind), (name, kind)
            return numbers[name].long() if kind == "permutation" else numbers[name].reshape(shape)

        return draw

    for function, kind in (("normal", "normal"), ("exponential", "exponential"), ("permutation", "permutation")):
        monkeypatch.setattr(noise, function, take(kind))
    return left


def batch_of(numbers, prefix):
    observations = numbers[f"{prefix}/batch/observations"]
    rewards = numbers[f"{prefix}/batch/rewards"].squeeze(-1)
    terminated = (
        numbers[f"{prefix}/batch/terminated"].squeeze(-1).bool()
        if f"{prefix}/batch/terminated" in numbers
        else torch.zeros_like(rewards, dtype=torch.bool)
    )
    return Batch(
        observations=observations[:-1],
        actions=numbers[f"{prefix}/batch/actions"],
        rewards=rewards,
        terminated=terminated,
        truncated=torch.zeros_like(terminated),
        next_observations=observations[1:],
    )


def update_twice(numbers, kind, monkeypatch, check=None):
    workflow = build(numbers, kind)
    for index in (1, 2):
        prefix = f"{kind}/update{index}"
        left = feed(monkeypatch, numbers, prefix)
        metrics = workflow.update_agent(batch_of(numbers, prefix), phase=PHASE)
        assert not left
        if check is not None:
            check(workflow, metrics, prefix)
    return workflow


@pytest.mark.parametrize("kind", ["plain", "episodic"])
def test_two_updates(numbers, kind, monkeypatch):
    names = {
        "consistency_loss": "consistency_loss",
        "reward_loss": "reward_loss",
        "value_loss": "value_loss",
        "loss": "total_loss",
        "grad_norm": "grad_norm",
        "policy_loss": "pi_loss",
        "policy_grad_norm": "pi_grad_norm",
        "policy_entropy": "pi_entropy",
        "value_scale": "pi_scale",
    }
    if kind == "episodic":
        names["termination_loss"] = "termination_loss"

    def check(workflow, metrics, prefix):
        for ours, theirs in names.items():
            expected = numbers[f"{prefix}/metric/{theirs}"].item()
            assert metrics[ours].item() == pytest.approx(expected, rel=1e-5, abs=1e-5), ours
        modules = {"encoder": workflow.encoder, "dynamics": workflow.dynamics, "reward": workflow.reward}
        modules |= {"policy": workflow.policy, "q": workflow.critics, "target_q": workflow.target_critics}
        if kind == "episodic":
            modules["termination"] = workflow.termination
        for name, module in modules.items():
            for part, where, tensor in tensors(module):
                expected = numbers[f"{prefix}/after/{name}.{part}"][where]
                torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(
            workflow.scale.average, numbers[f"{prefix}/after/scale"].squeeze(), rtol=0, atol=1e-5
        )

    update_twice(numbers, kind, monkeypatch, check)


@pytest.mark.parametrize("kind", ["plain", "episodic"])
def test_two_plans(numbers, kind, monkeypatch):
    workflow = update_twice(numbers, kind, monkeypatch)
    state = workflow.initial_state(1)
    for index, explore in ((0, True), (1, False)):
        prefix = f"{kind}/plan{index}"
        left = feed(monkeypatch, numbers, prefix)
        said = workflow.act(numbers[f"{prefix}/observation"], state, explore=explore)
        assert not left
        torch.testing.assert_close(said.actions[0], numbers[f"{prefix}/action"], rtol=0, atol=1e-4)
        torch.testing.assert_close(said.state["mean"][0], numbers[f"{prefix}/mean_after"], rtol=0, atol=1e-4)
        state = said.state
