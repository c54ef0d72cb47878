"""Parts of DreamerV3 against numbers computed once with the author's mathematics at toy size."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rl_lab.components.laprop import LaProp, clip_factors
from rl_lab.components.normalizers import PercentileScale
from rl_lab.components.representation.cells import BlockGRU
from rl_lab.components.representation.rssm import RSSM
from rl_lab.components.representation.variables import Categoricals
from rl_lab.components.returns import td_lambda
from rl_lab.components.twohot import SymexpTwoHot
from rl_lab.components.world_model import WorldModel

GOLDEN = Path(__file__).parent.parent / "golden" / "dreamer_parts.safetensors"


@pytest.fixture(scope="module")
def numbers():
    return load_file(GOLDEN)


def close(given, expected):
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


class Embedding(nn.Module):
    outputs = 6

    def forward(self, observations):
        return observations


@pytest.fixture(scope="module")
def rssm(numbers):
    model = RSSM(Embedding(), BlockGRU(16, 16, 3, 8), Categoricals(4, 4), 8, prior_layers=2)
    blocks = {"weight": lambda weight: weight.permute(2, 1, 0)}  # theirs is [out, in, blocks]

    def load(layer, name, **views):
        for key, value in layer.named_parameters(recurse=False):
            given = numbers[f"rssm/{name}.{'weight' if key == 'scale' else key}"]
            value.data.copy_(views.get(key, lambda weight: weight)(given))

    for ours, theirs in (("from_deter", "in_deter"), ("from_stoch", "in_stoch"), ("from_action", "in_action")):
        load(getattr(model.cell, ours).linear, f"{theirs}.0")
        load(getattr(model.cell, ours).norm, f"{theirs}.1")
    load(model.cell.hidden, "hidden.linear", **blocks)
    load(model.cell.hidden_norm, "hidden.norm")
    load(model.cell.gates, "gates", **blocks)
    load(model.posterior.linear, "posterior.0")
    load(model.posterior.norm, "posterior.n_0")
    load(model.posterior_output, "posterior.logit")
    for i, layer in enumerate(model.prior.layers):
        load(layer.linear, f"prior.{i}")
        load(layer.norm, f"prior.n_{i}")
    load(model.prior.output, "prior.logit")
    return model


def inputs(numbers):
    state = {"deter": numbers["step/deter"], "stoch": numbers["step/stoch"].flatten(1)}
    return state, numbers["step/action"], numbers["step/embed"]


@torch.no_grad()
def test_one_step(numbers, rssm):
    state, action, embed = inputs(numbers)
    assert action.abs().max() > 1  # so that the division counts
    first = torch.zeros(3, dtype=torch.bool)
    after, posterior = rssm.observe(state, action, embed, first, torch.rand(3, 4))
    close(after["deter"], numbers["step/deter_next"])
    close(posterior, numbers["step/posterior_logits"].flatten(1))
    close(rssm.prior(after["deter"]), numbers["step/prior_logits"].flatten(1))
    close(rssm.variable.probs(posterior), numbers["step/posterior_probs_after_unimix"])


@torch.no_grad()
def test_one_step_of_a_sequence_and_of_imagination(numbers, rssm):
    state, action, embed = inputs(numbers)
    first = torch.zeros(1, 3, dtype=torch.bool)
    observed = rssm.observe_sequence(state, action[None], embed[None], first, torch.rand(1, 3, 4))
    close(observed.states["deter"][0], numbers["step/deter_next"])
    close(observed.posterior[0], numbers["step/posterior_logits"].flatten(1))
    close(observed.prior[0], numbers["step/prior_logits"].flatten(1))
    close(rssm.imagine_step(state, action, torch.rand(3, 4))["deter"], numbers["step/deter_next"])


def test_divergences(numbers, rssm):
    variable = rssm.variable
    model = WorldModel(rssm, None, None, None, 0.99, torch.float32)
    posterior, prior = (numbers[f"kl/{name}_logits"].flatten(1) for name in ("posterior", "prior"))
    close(
        variable.divergence(*map(variable.distribution, (posterior, prior))), numbers["kl/dyn_and_rep_before_free_nats"]
    )
    dynamics, representation, _ = model.divergences(posterior, prior)
    expected = numbers["kl/after_free_nats"].mean()
    close(dynamics, expected)
    close(representation, expected)


def test_two_hot(numbers):
    twohot = SymexpTwoHot()
    torch.testing.assert_close(twohot.bins, numbers["twohot/bins"], rtol=1e-6, atol=0.0)
    logits, targets = numbers["twohot/logits"], numbers["twohot/targets"].squeeze(1)
    close(-twohot.loss(logits, targets), numbers["twohot/log_prob"])
    torch.testing.assert_close(twohot.mean(logits), numbers["twohot/mode"].squeeze(1), rtol=1e-5, atol=0.0)
    assert twohot.mean(torch.zeros(1, 255)).item() == numbers["twohot/mode_at_zero_logits"].item() == 0.0


def test_lambda_returns(numbers):
    given = {name.partition("/")[2]: value.squeeze(2).T for name, value in numbers.items() if name.startswith("lambda")}
    discounts = (1.0 - given["terminal"][1:]) * (1.0 - 1.0 / 333.0)
    traces = 0.95 * (1.0 - given["last"][1:])
    close(td_lambda(given["rewards"][1:], given["bootstrap"][1:], discounts, traces), given["returns"])


def test_return_scale(numbers):
    scale = PercentileScale(rate=0.01, floor_first=False)
    for i in range(3):
        scale.update(numbers[f"return_scale/{i}_input"])
        low, high = numbers[f"return_scale/{i}_percentiles"]
        close(scale.average, high - low)
        close(scale.value, numbers[f"return_scale/{i}_scale"])


def test_optimizer(numbers):
    parameters = [nn.Parameter(numbers[f"optimizer/before{i}"].clone()) for i in (0, 1)]
    optimizer = LaProp(parameters, lr=1e-2)
    for step in range(3):
        for i, parameter in enumerate(parameters):
            parameter.grad = numbers[f"optimizer/step{step}_grad{i}"].clone()
        gradients = [parameter.grad for parameter in parameters]
        factors = clip_factors([parameter.detach() for parameter in parameters], gradients, 0.3, 1e-3)
        clipped = [gradient * factor for gradient, factor in zip(gradients, factors, strict=True)]
        optimizer.step()
        for i, parameter in enumerate(parameters):
            close(clipped[i], numbers[f"optimizer/step{step}_clipped{i}"])
            close(parameter.data, numbers[f"optimizer/step{step}_param{i}"])
