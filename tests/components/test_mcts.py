"""Gumbel tree search against numbers that mctx computed, and on worlds whose best plan is known."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_lab.components.dynamics.analytic import GridWorldModel
from rl_lab.components.planners.mcts import VISITS, GumbelSearch, halving
from rl_lab.components.planners.slot import Lookahead
from rl_lab.core import noise
from rl_lab.envs.make import make_env

NUMBERS = load_file(Path(__file__).parent.parent / "golden" / "mctx.safetensors")
CASES = sorted({name.split("/")[0] for name in NUMBERS})


class Table:
    """A world of states in a row, as functions for a planner; latents hold the state's number."""

    def __init__(self, case):
        self.tables = {name.split("/")[1]: value for name, value in NUMBERS.items() if name.startswith(f"{case}/")}

    def state(self, latents):
        return latents[..., 0].long()

    def functions(self):
        tables = self.tables
        return {
            "dynamics": lambda z, a: tables["successors"][self.state(z), a.argmax(-1)].float().unsqueeze(-1),
            "reward": lambda z, a: tables["rewards"][self.state(z), a.argmax(-1)],
            "value": lambda z: tables["values"][self.state(z)],
            "policy": self,
            "termination": lambda z: tables["ended"][self.state(z)],
            "discount": 0.9,
        }

    def logits(self, latents):
        return self.tables["logits"][self.state(latents)]


@pytest.mark.parametrize("kind", ["plain", "noisy"])
@pytest.mark.parametrize("case", CASES)
def test_searches_are_those_of_mctx(case, kind, monkeypatch):
    world = Table(case)
    num_actions, num_simulations, considered, depth = world.tables["knobs"].tolist()
    expected = {name: NUMBERS[f"{case}/{kind}/{name}"] for name in ("gumbel", "action", "weights", "visits", "value")}
    monkeypatch.setattr(noise, "exponential", lambda *_: (-expected["gumbel"]).exp())
    search = GumbelSearch(num_actions, num_simulations, considered, depth)
    trees = []
    begin = search._begin
    monkeypatch.setattr(search, "_begin", lambda *args: trees.append(begin(*args)) or trees[-1])
    latents = world.tables["starts"].float().unsqueeze(-1)
    mean = search.initial_mean(len(latents), latents)
    plan = search.plan(latents, mean, explore=kind == "noisy", **world.functions())
    assert torch.equal(trees[0].edges[trees[0].roots, VISITS], expected["visits"])
    assert torch.equal(plan.actions.argmax(-1), expected["action"])
    torch.testing.assert_close(plan.mean[:, 0], expected["weights"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plan.values[:, 0], expected["value"], rtol=1e-4, atol=1e-5)


def test_environments_do_not_influence_each_other():
    world = Table("few")
    search = GumbelSearch(4, 16)
    latents = torch.arange(6.0).unsqueeze(-1)
    together = search.plan(latents, search.initial_mean(6, latents), **world.functions())
    for i in range(6):
        alone = search.plan(latents[i : i + 1], search.initial_mean(1, latents), **world.functions())
        torch.testing.assert_close(alone.mean, together.mean[i : i + 1])


@pytest.mark.parametrize("num_actions", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("num_simulations", [1, 5, 16, 50])
def test_halving_spends_every_simulation_on_a_visit_that_is_due(num_actions, num_simulations):
    schedule = halving(num_actions, num_simulations)
    assert len(schedule) == num_simulations
    visits = [0] * num_actions
    for wanted in schedule:
        due = [i for i, count in enumerate(visits) if count == wanted]
        assert due, (schedule, visits)
        visits[due[0]] += 1
    assert schedule[: min(num_actions, num_simulations)] == (
        list(range(num_simulations))[:1] if num_actions == 1 else [0] * min(num_actions, num_simulations)
    )


def test_a_search_without_policy_and_value_finds_a_goal_within_its_depth():
    model = GridWorldModel(size=4)
    search = GumbelSearch(4, num_simulations=200, max_depth=6)
    world = make_env("tiny/GridWorld", 4, kwargs={"size": 4})
    seen, _ = world.reset(seed=0)
    looking = Lookahead(model, num_actions=4, discount=0.95)
    latents = model.encode(torch.from_numpy(seen))
    near = (latents[:, :2] - latents[:, 2:]).abs().sum(-1)
    for _ in range(int(near.max())):
        said = looking.decide(search, latents, {"mean": search.initial_mean(4, latents)}, explore=False, generator=None)
        latents = torch.where(model.ended(latents).bool().unsqueeze(-1), latents, model.step(latents, said.actions))
    assert model.ended(latents).all()


def test_the_improved_policy_prefers_what_is_better():
    world = Table("few")
    tables = world.tables
    latents = tables["starts"].float().unsqueeze(-1)
    search = GumbelSearch(4, num_simulations=64, max_depth=1, value_scale=1.0)
    plan = search.plan(latents, search.initial_mean(8, latents), **world.functions())
    prior = tables["logits"][tables["starts"].long()].softmax(-1)
    after = tables["successors"][tables["starts"].long()]
    q_values = (
        tables["rewards"][tables["starts"].long()]
        + 0.9 * (1 - tables["ended"][after.long()]) * tables["values"][after.long()]
    )
    improved = (plan.mean[:, 0] * q_values).sum(-1)
    assert (improved > (prior * q_values).sum(-1)).all()
    assert math.isclose(plan.mean.sum().item(), 8.0, rel_tol=1e-5)
