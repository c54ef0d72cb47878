"""One update of Dreamer v3, of 2023 and later, against the author's code: losses, gradients of all parameters."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_lab.core import cell_operations, noise
from rl_lab.core.batch import Batch
from rl_lab.core.phase import Hook, Phase
from rl_lab.core.seeding import SeedTree
from tests.workflows.dreamers import build

GOLDEN = Path(__file__).parent.parent / "golden"  # dreamer_2023 and dreamer_v3, made by make_dreamer_*.py
PHASE = Phase("joint", hooks=(Hook("collect"),), duration_steps=1)
PARTS = ("rssm", "decoder", "reward", "continuation", "actor", "critic", "slow_critic")
LOSSES = {
    "reconstruction": "observation",
    "reward": "rew",
    "continue": "con",
    "dynamics": "dyn",
    "representation": "rep",
    "actor": "policy",
    "critic": "value",
    "replay_value": "repval",
}
KNOBS = {"gamma": 1 - 1 / 333, "horizon": 4, "free_nats": 1.0, "continue_weight": 0.0}


def load(workflow, numbers):
    """Put the parameters of the file into a workflow, and return those of its parts that learn."""
    parts = {name: getattr(workflow, name) for name in PARTS}
    for name, part in parts.items():
        place = f"before/{name}/"
        part.load_state_dict({key.removeprefix(place): v for key, v in numbers.items() if key.startswith(place)})
    return {name: part for name, part in parts.items() if name != "slow_critic"}


def compare(parts, numbers, places, rtol):
    """Compare the gradients of all parameters; return how many there are."""
    compared = 0
    for part, module in parts.items():
        for name, parameter in module.named_parameters():
            expected = numbers[f"{places[part]}/{name}"]
            tolerance = 1e-5 * expected.abs().max().item()
            where = f"{part} {name}"
            torch.testing.assert_close(
                parameter.grad, expected, rtol=rtol, atol=tolerance, msg=lambda text, where=where: f"{where}: {text}"
            )
            compared += 1
    return compared


@pytest.fixture(autouse=True)
def without_chance(monkeypatch):
    def sample(logits, draws, unimix, answers, passed=None):
        """Take the most probable codes."""
        codes = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        answers.copy_(codes.view(answers.shape))
        if passed is not None:
            passed.masked.copy_(answers * passed.step.next_keeps.unsqueeze(-1))

    monkeypatch.setattr(cell_operations, "sample", sample)
    monkeypatch.setattr(noise, "normal", lambda shape, like, generator: torch.full(shape, 0.5))


@pytest.mark.parametrize("actor_gradient", ["dynamics", "reinforce"])
def test_an_update_is_the_authors_of_2023(actor_gradient):
    numbers = load_file(GOLDEN / "dreamer_2023.safetensors")
    # A rate of zero leaves the model where it is while the behaviour is learned, as in the author's numbers.
    knobs = KNOBS | {"actor_gradient": actor_gradient}
    workflow = build("v3 of 2023", 5, 2, SeedTree(0), discrete=False, lr=0.0, units=8, **knobs)
    parts = load(workflow, numbers)
    del parts["continuation"]  # the author's says the discount everywhere
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
    assert compare(parts, numbers, places, rtol=1e-4) == 56


def test_an_update_is_the_authors():
    numbers = load_file(GOLDEN / "dreamer_v3.safetensors")
    workflow = build("v3", 5, 2, SeedTree(0), discrete=False, units=8, gamma=1 - 1 / 333, horizon=4)
    parts = load(workflow, numbers)
    workflow.return_scale.average.fill_(4.0)  # 5 - 1: the percentiles that make_dreamer_v3.py gives
    given = {name.removeprefix("batch/"): column for name, column in numbers.items() if name.startswith("batch/")}

    def led_to(name):
        """Return what led to each observation, beside the observation that it was the answer to."""
        return torch.cat([given[name], torch.zeros_like(given[name][:1])])

    def ahead(name):
        return torch.cat([torch.zeros_like(given[name][:1]), given[name]])

    # In replay 0 is no class: nothing was stored there.
    states = {"deter": given["deter"].bfloat16(), "stoch": (given["stoch"] + 1).to(torch.uint8)}
    batch = Batch(
        observations=ahead("observations"),
        actions=led_to("previous_actions"),
        rewards=led_to("rewards"),
        terminated=led_to("is_terminal").bool(),
        truncated=(led_to("is_last") - led_to("is_terminal")).bool(),
        extras={
            "is_first": ahead("is_first").bool(),
            "is_last": ahead("is_last").bool(),
            **{name: torch.cat([state[None], state.new_zeros(6, *state.shape)]) for name, state in states.items()},
        },
    )
    metrics = workflow.update_agent(batch, phase=PHASE).metrics
    for name, theirs in LOSSES.items():
        torch.testing.assert_close(metrics[f"{name}_loss"], numbers[f"loss/{theirs}"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics["loss"], numbers["loss/total"], rtol=1e-5, atol=1e-6)
    assert compare(parts, numbers, {name: f"gradient/{name}" for name in parts}, rtol=1e-4) == 75
