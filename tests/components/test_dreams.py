"""Looking at a world model: one that is right makes no error at any step, one that is wrong shows where."""

import pytest
import torch
from torch import nn

from rl_lab.components.dreams import inspect_world_model
from rl_lab.components.predictions import UnitNormal
from rl_lab.components.representation.rssm import Observed
from rl_lab.components.representation.variables import Gaussians
from rl_lab.components.world_model import WorldModel
from rl_lab.core.batch import Batch
from rl_lab.core.seeding import SeedTree
from tests.workflows.dreamers import PAPERS, build

LENGTHS = (40, 9, 60)


class Walk(nn.Module):
    """A model of a walk on a line that sees where it is; `drift` is its mistake at every imagined step."""

    def __init__(self, drift):
        super().__init__()
        self.drift, self.variable = drift, Gaussians(1)

    def encode(self, observations):
        return observations

    def initial(self, num_rows, device):
        return {"deter": torch.zeros(num_rows, 1), "stoch": torch.zeros(num_rows, 0)}

    def observe_sequence(self, state, actions, embeddings, is_first, draws):
        assert is_first[0].all()
        assert not is_first[1:].any()
        torch.testing.assert_close(embeddings[1:] - embeddings[:-1], actions[1:], rtol=0, atol=1e9)
        self.led_here = actions
        states = {"deter": embeddings, "stoch": embeddings[..., :0]}
        return Observed(states, torch.cat([embeddings, embeddings], -1), torch.cat([embeddings, embeddings], -1))

    def imagine_step(self, state, actions, draws, weights):
        return {"deter": state["deter"] + actions + self.drift, "stoch": state["stoch"]}

    def constants(self, dtype):
        return {}

    def features(self, state):
        return state["deter"]


class Look:
    """Decodes the position as it is."""

    def __call__(self, features):
        return {"observation": features}

    def targets(self, observations):
        return {"observation": observations}

    def errors(self, predictions, observations):
        return (predictions["observation"] - observations).square().sum(-1)

    def decode(self, features):
        return features


class Constant:
    """A head that says what it is told."""

    def __init__(self, say):
        self.say = say

    def __call__(self, features):
        return self.say(features)

    def mean(self, outputs):
        return UnitNormal().mean(outputs)


def walk(seed=0):
    generator = torch.Generator().manual_seed(seed)
    steps, episodes = max(LENGTHS), len(LENGTHS)
    actions = torch.randint(0, 2, (steps, episodes, 1), generator=generator).float() * 2.0 - 1.0
    observations = torch.cat([torch.zeros(1, episodes, 1), actions[:-1].cumsum(0)])
    valid = torch.arange(steps)[:, None] < torch.tensor(LENGTHS)
    ends = torch.arange(steps)[:, None] == torch.tensor(LENGTHS) - 1
    mask = valid.unsqueeze(-1)
    return Batch(
        observations=observations * mask,
        actions=actions * mask,
        rewards=(observations + actions).squeeze(-1) * valid,  # where the action led
        terminated=ends,
        truncated=torch.zeros_like(ends),
        next_observations=(observations + actions) * mask,
        extras={"valid": valid},
    )


def look(drift, end=lambda features: torch.full_like(features, 0.9)):
    model = WorldModel(Walk(drift), Look(), Constant(lambda x: x), Constant(end), 0.9, torch.float32)
    return inspect_world_model(
        walk(),
        model,
        from_replay=lambda actions: actions,
        value=lambda features: torch.zeros(features.shape[:-1]),
        generator=torch.Generator().manual_seed(0),
    )


def test_a_right_model_makes_no_error():
    found = look(0.0).metrics
    assert {f"open_loop_error_{k}" for k in (1, 5, 10, 15, 30, 50)} <= found.keys()
    wrong = {name for name in found if name.startswith("open_loop")} - {
        "open_loop_reward_observed",
        "open_loop_reward_correlation",
    }
    assert all(found[name] == pytest.approx(0.0, abs=1e-6) for name in wrong)
    assert found["open_loop_reward_correlation"] == pytest.approx(1.0)
    assert found["unchanged_error_1"] == pytest.approx(1.0)  # every step of the walk is one long
    assert found["unchanged_error_50"] > 5.0
    assert found["termination_missed"] == 1.0
    assert found["termination_false"] == 0.0
    assert found["termination_observed"] == pytest.approx(len(LENGTHS) / sum(LENGTHS))
    assert "termination_correlation" not in found  # what the model says of ends does not vary


def test_ends_are_calibrated_by_their_chance():
    def half_of_them(features):  # the continuation, of which the discount 0.9 is a part
        return torch.full_like(features, 0.9 * 0.5)

    found = look(0.0, end=half_of_them).metrics
    assert found["termination_bias"] == pytest.approx(0.5 - found["termination_observed"])


def test_a_wrong_model_is_more_wrong_the_further_it_looks():
    found = look(0.1).metrics
    for k in (1, 5, 10, 15, 30, 50):
        assert found[f"open_loop_error_{k}"] == pytest.approx((0.1 * k) ** 2, rel=1e-3)
    assert found["open_loop_reward_error"] > 1.0
    assert found["open_loop_reward_bias"] == pytest.approx(found["open_loop_reward_error"], rel=1e-5)  # always too far


def test_values_are_compared_with_what_came_after_them():
    """A critic that knows the walk: where an episode is cut, its last value completes the returns before it."""
    trajectory = walk()
    values = torch.zeros(trajectory.shape)
    following = torch.full_like(values[0], 7.0)  # what the world would have gone on to bring
    for t in reversed(range(len(values))):
        inside = trajectory["valid"][t]
        following = torch.where(inside, trajectory.rewards[t] + 0.9 * following, following)
        values[t] = following
    cut = trajectory.with_columns(terminated=torch.zeros_like(trajectory.terminated))
    model = WorldModel(Walk(0.0), Look(), Constant(lambda x: x), None, 0.9, torch.float32)
    found = inspect_world_model(
        cut,
        model,
        from_replay=lambda actions: actions,
        value=lambda features: values,
        generator=torch.Generator().manual_seed(0),
    )
    assert found.metrics["value_bias"] == pytest.approx(0.0, abs=1e-5)
    assert found.metrics["value_correlation"] == pytest.approx(1.0)
    assert 0.0 < found.metrics["value_tail"] < 0.5
    assert {"value_calibration", "reward_calibration", "dream"} == found.pictures.keys()


def test_the_picture_of_vectors_shows_context_and_dream():
    pictures = look(0.5).pictures
    assert pictures["dream"].dtype == torch.uint8
    assert pictures["dream"].shape[2] == 3


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.parametrize("observation", [3, [3, 32, 32]], ids=["vector", "image"])
def test_every_paper_can_be_looked_at_without_changing(paper, observation):
    workflow = build(paper, observation, 2, SeedTree(0))
    steps, episodes = 24, 3
    shape = (steps, episodes, *(observation if isinstance(observation, list) else [observation]))
    image = isinstance(observation, list)
    seen = torch.randint(0, 256, shape, dtype=torch.uint8) if image else torch.randn(shape)
    flags = torch.zeros(steps, episodes, dtype=torch.bool)
    trajectory = Batch(
        observations=seen,
        actions=torch.randint(0, 2, (steps, episodes)),
        rewards=torch.randn(steps, episodes),
        terminated=flags,
        truncated=flags,
        next_observations=seen,
        extras={"valid": ~flags},
    )
    before = workflow.generator.get_state()
    found = workflow.inspect(trajectory, generator=torch.Generator().manual_seed(0))
    again = workflow.inspect(trajectory, generator=torch.Generator().manual_seed(0))
    assert found.metrics == again.metrics
    assert torch.equal(workflow.generator.get_state(), before)
    assert 0.0 <= found.metrics["latent_use"] <= 1.0
    assert found.pictures["dream"].dtype == torch.uint8


def test_short_episodes_are_looked_at_as_far_as_they_go():
    flags = torch.zeros(3, 2, dtype=torch.bool)
    empty = Batch(
        observations=torch.zeros(3, 2, 1),
        actions=torch.zeros(3, 2, 1),
        rewards=torch.zeros(3, 2),
        terminated=flags,
        truncated=flags,
        next_observations=torch.zeros(3, 2, 1),
        extras={"valid": ~flags},
    )
    model = WorldModel(Walk(0.0), Look(), Constant(lambda x: x), None, 0.9, torch.float32)
    found = inspect_world_model(
        empty,
        model,
        from_replay=lambda actions: actions,
        value=lambda features: torch.zeros(features.shape[:-1]),
        generator=torch.Generator().manual_seed(0),
    )
    assert not found.pictures
    assert isinstance(found.metrics, dict)
