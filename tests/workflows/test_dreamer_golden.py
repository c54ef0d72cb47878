"""One update of Dreamer v3 of 2023 against the author's own code: losses, and the gradient of every parameter."""

import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_lab.components.controllers.dreamer import DreamerActor
from rl_lab.components.normalizers import PercentileScale
from rl_lab.components.policies import BoundedNormal
from rl_lab.components.predictions import Bernoulli
from rl_lab.components.representation.cells import GRU
from rl_lab.components.representation.heads import Head
from rl_lab.components.representation.observations import (
    ObservationDecoder,
    ObservationEncoder,
    VectorDecoder,
    VectorEncoder,
)
from rl_lab.components.representation.rssm import RSSM
from rl_lab.components.representation.variables import Categoricals
from rl_lab.components.twohot import TwoHot
from rl_lab.core import noise
from rl_lab.core.batch import Batch
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Hook, Phase
from rl_lab.core.seeding import SeedTree
from rl_lab.workflows.dreamer import DreamerWorkflow

GOLDEN = Path(__file__).parent.parent / "golden" / "dreamer_2023.safetensors"  # made by make_dreamer_2023.py
OBSERVATION, ACTION, DETER, UNITS, WIDE, BINS = 5, 2, 16, 8, 12, 41
PHASE = Phase("joint", hooks=(Hook("collect"),), duration_steps=1)


@pytest.fixture(scope="module")
def numbers():
    return load_file(GOLDEN)


def build(numbers, actor_gradient):
    """Build the workflow with the parameters of the file, and optimisers that leave everything where it is."""
    variable = Categoricals(4, 4)
    features = DETER + variable.size
    wide = {"units": WIDE, "num_layers": 2, "norm": "layer"}
    encoder = ObservationEncoder(OBSERVATION, functools.partial(VectorEncoder, **wide), image=None)
    cell = GRU(DETER, variable.size, ACTION, UNITS, activation="silu", norm="layer", input_norm="layer")
    head = functools.partial(Head, features, units=UNITS, num_layers=2, norm="layer")
    parts = {
        "rssm": RSSM(encoder, cell, variable, UNITS, norm="layer"),
        "decoder": ObservationDecoder(features, OBSERVATION, functools.partial(VectorDecoder, **wide), image=None),
        "reward": head(TwoHot(BINS, -20.0, 20.0)),
        "continuation": head(Bernoulli()),
        "actor": DreamerActor(features, BoundedNormal(ACTION), UNITS, 2, norm="layer", output_scale=1.0),
        "critic": head(TwoHot(BINS, -20.0, 20.0)),
    }
    model = [p for name in ("rssm", "decoder", "reward", "continuation") for p in parts[name].parameters()]
    still = functools.partial(torch.optim.SGD, lr=0.0)
    workflow = DreamerWorkflow(
        **parts,
        return_scale=PercentileScale(floor_first=False),
        model_optimizer=Optimizer(model, still),
        actor_optimizer=Optimizer(parts["actor"].parameters(), still),
        critic_optimizer=Optimizer(parts["critic"].parameters(), still),
        generator=SeedTree(0).generator("workflow"),
        gamma=1 - 1 / 333,
        horizon=4,
        dynamics_weight=0.5,
        continue_weight=0.0,
        replay_value_weight=0.0,
        actor_gradient=actor_gradient,
        stored_latents=False,
    )
    for name, part in {**parts, "slow_critic": workflow.slow_critic}.items():
        given = {
            key.removeprefix(f"before/{name}/"): v for key, v in numbers.items() if key.startswith(f"before/{name}/")
        }
        part.load_state_dict(given)
    return workflow, parts


@pytest.mark.parametrize("actor_gradient", ["dynamics", "reinforce"])
def test_an_update_is_the_authors(numbers, actor_gradient, monkeypatch):
    monkeypatch.setattr(Categoricals, "sample", lambda self, parameters, draws: self.mode(parameters))
    monkeypatch.setattr(noise, "normal", lambda shape, like, generator: torch.full(shape, 0.5))
    workflow, parts = build(numbers, actor_gradient)
    given = {name: numbers[f"batch/{name}"] for name in ("observations", "actions", "rewards", "is_first")}
    ahead = {name: torch.cat([torch.zeros_like(column[:1]), column]) for name, column in given.items()}
    never = torch.zeros(ahead["rewards"].shape, dtype=torch.bool)
    # A row of ours has the action that its observation was answered with, and the reward that this brought.
    batch = Batch(
        observations=ahead["observations"],
        actions=ahead["actions"],
        rewards=torch.cat([given["rewards"], given["rewards"][:1]]),
        terminated=never,
        truncated=never,
        extras={"is_first": ahead["is_first"].bool(), "is_last": never},
    )
    metrics = workflow.update_agent(batch, phase=PHASE).metrics
    theirs = {"dynamics": "dynamics_of_model", "actor": actor_gradient}
    for name in ("reconstruction", "reward", "dynamics", "representation", "actor", "critic"):
        expected = numbers[f"loss/{theirs.get(name, name)}"]
        torch.testing.assert_close(metrics[f"{name}_loss"], expected, rtol=1e-5, atol=1e-6)
    places = {name: f"gradient/{name}" for name in parts} | {"actor": f"gradient/{actor_gradient}/actor"}
    compared = 0
    for part, module in parts.items():
        for name, parameter in module.named_parameters() if part != "continuation" else ():
            expected = numbers[f"{places[part]}/{name}"]
            tolerance = 1e-5 * expected.abs().max().item()
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=tolerance, msg=f"{part} {name}")
            compared += 1
    assert compared == 56
