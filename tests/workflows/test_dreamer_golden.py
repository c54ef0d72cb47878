"""One update of Dreamer v3 of 2023 against the author's own code: losses, and the gradient of every parameter."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_lab.components.representation.variables import Categoricals
from rl_lab.core import noise
from rl_lab.core.batch import Batch
from rl_lab.core.phase import Hook, Phase
from rl_lab.core.seeding import SeedTree
from tests.workflows.dreamers import build

GOLDEN = Path(__file__).parent.parent / "golden" / "dreamer_2023.safetensors"  # made by make_dreamer_2023.py
PHASE = Phase("joint", hooks=(Hook("collect"),), duration_steps=1)
PARTS = ("rssm", "decoder", "reward", "continuation", "actor", "critic", "slow_critic")
KNOBS = {"gamma": 1 - 1 / 333, "horizon": 4, "free_nats": 1.0, "continue_weight": 0.0}


@pytest.fixture(scope="module")
def numbers():
    return load_file(GOLDEN)


def load(workflow, numbers):
    """Put the parameters of the file into a workflow, and return those of its parts that learn."""
    parts = {name: getattr(workflow, name) for name in PARTS}
    for name, part in parts.items():
        place = f"before/{name}/"
        part.load_state_dict({key.removeprefix(place): v for key, v in numbers.items() if key.startswith(place)})
    return {name: part for name, part in parts.items() if name not in ("continuation", "slow_critic")}


@pytest.mark.parametrize("actor_gradient", ["dynamics", "reinforce"])
def test_an_update_is_the_authors(numbers, actor_gradient, monkeypatch):
    monkeypatch.setattr(Categoricals, "sample", lambda self, parameters, draws: self.mode(parameters))
    monkeypatch.setattr(noise, "normal", lambda shape, like, generator: torch.full(shape, 0.5))
    # A rate of zero leaves the model where it is while the behaviour is learned, as in the author's numbers.
    knobs = KNOBS | {"actor_gradient": actor_gradient}
    workflow = build("v3 of 2023", 5, 2, SeedTree(0), discrete=False, lr=0.0, units=8, **knobs)
    parts = load(workflow, numbers)
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
        for name, parameter in module.named_parameters():
            expected = numbers[f"{places[part]}/{name}"]
            tolerance = 1e-5 * expected.abs().max().item()
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=tolerance, msg=f"{part} {name}")
            compared += 1
    assert compared == 56
