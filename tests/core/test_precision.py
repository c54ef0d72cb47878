"""Networks in bfloat16: what they compute in, what they hand back, what stays as it was."""

import copy
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from rl_lab.build import build_experiment
from rl_lab.components.nets import MLP
from rl_lab.components.normed import NormedMLP
from rl_lab.composition import load_experiment
from rl_lab.core.capture import compile_parts
from rl_lab.core.phase import Hook, Phase
from rl_lab.core.precision import as_computed, compute_in_bfloat16

PHASE = Phase("p", hooks=(Hook("collect"),), duration_steps=1)


class Answer(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.inner = NormedMLP(3, 2, [4])

    def forward(self, values):
        inner = self.inner(values)
        assert inner.dtype == torch.float32  # also between networks of one part
        return {"named": Answer(self.linear(values), inner), "count": 3}


def test_products_are_bfloat16_and_answers_float32():
    torch.manual_seed(0)
    module = NormedMLP(5, 4, [8])
    plain = copy.deepcopy(module)
    compute_in_bfloat16([module, "no module"], "cpu")
    inside = []
    values = torch.randn(6, 5)
    module.norms[0].register_forward_pre_hook(lambda _, inputs: inside.append(inputs[0].dtype))
    answer = module(values)
    assert inside == [torch.bfloat16]
    assert answer.dtype == torch.float32
    assert not torch.equal(answer, plain(values))
    torch.testing.assert_close(answer, plain(values), rtol=0.05, atol=1e-3)
    answer.sum().backward()
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in module.parameters()} == {torch.float32}


def test_who_asks_in_bfloat16_is_answered_so():
    torch.manual_seed(0)
    module, plain, values = NormedMLP(5, 8, [8], simplex=4), NormedMLP(5, 8, [8]), torch.randn(6, 5)
    compute_in_bfloat16([module], "cpu")
    asked = as_computed(values, module)
    answer = module(asked)
    assert asked.dtype == answer.dtype == torch.bfloat16
    torch.testing.assert_close(answer.float(), module(values), rtol=0.02, atol=1e-3)
    assert as_computed(values, plain) is values


def test_answers_of_any_shape_come_back_in_float32():
    module = Several()
    compute_in_bfloat16([module], "cpu")
    answer = module(torch.randn(2, 3))
    assert isinstance(answer["named"], Answer)
    assert answer["named"].first.dtype == answer["named"].second.dtype == torch.float32
    assert answer["count"] == 3
    assert not torch.is_autocast_enabled("cpu")


def test_a_copy_uses_its_own_weights():
    """Target networks are copies: they must not answer for the original."""
    module = MLP(3, 2)
    compute_in_bfloat16([module], "cpu")
    compute_in_bfloat16([module], "cpu")  # once is enough
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    values = torch.randn(64, 3)
    assert module(values).abs().max() == 0
    assert twin(values).abs().max() > 0
    assert type(module).__name__ == "MLP"
    assert isinstance(module, MLP)
    assert module.state_dict().keys() == MLP(3, 2).state_dict().keys()


def test_compiled_parts_keep_the_names_of_their_weights():
    """So checkpoints of compiled and of other runs can be exchanged."""
    module = nn.Sequential(NormedMLP(3, 2, [4]), nn.Linear(2, 2))
    names = list(module.state_dict())
    compute_in_bfloat16([module], "cpu")
    compile_parts([module, module[0]])
    assert list(module.state_dict()) == names


@pytest.mark.parametrize(
    ("name", "hook", "changes"),
    [
        ("tdmpc2_swingup", "update_agent", {}),
        ("tdmpc2_pixels", "update_agent", {"buffer.batch_size": 8}),
        ("dreamerv2_gridworld", "update_agent", {"buffer.batch_size": 4, "buffer.window": 5}),
        ("dqn_cartpole", "update_controller", {}),
        ("ppo_cartpole", "update_controller", {"workflow.num_epochs": 1}),
    ],
)
def test_every_algorithm_learns_in_bfloat16_with_losses_in_float32(name, hook, changes):
    losses = {}
    for precision in ("float32", "bfloat16"):
        given = {"device": "cpu", "training.precision": precision, **changes}
        experiment = build_experiment(load_experiment(name, given), Path("unwritten"))
        collector, source = experiment.collector, experiment.sources["replay"]
        follow = None if name == "ppo_cartpole" else experiment.workflow.follow
        trajectory = collector.collect(experiment.workflow.act, 16, follow=follow).trajectory
        source.add(trajectory)
        metrics = getattr(experiment.workflow, hook)(source.sample(), phase=PHASE)
        metrics = getattr(metrics, "metrics", metrics)
        assert all(torch.as_tensor(value).dtype in (torch.float32, torch.float64) for value in metrics.values())
        losses[precision] = {key: float(value) for key, value in metrics.items() if key.endswith("loss")}
        for optimizer in experiment.workflow.optimizers():
            assert {p.dtype for p in optimizer.parameters} == {torch.float32}
            moments = [v for state in optimizer.torch_optimizer.state.values() for v in state.values()]
            assert {moment.dtype for moment in moments} == {torch.float32}
        experiment.close()
    assert losses["float32"].keys() == losses["bfloat16"].keys()
    assert losses["float32"] != losses["bfloat16"]
    if name != "ppo_cartpole":  # whose rollout depends on what was decided
        for key, value in losses["float32"].items():
            assert losses["bfloat16"][key] == pytest.approx(value, rel=0.1, abs=0.02), key
