"""What the rehearsal finds before the first step; networks that do not fit are in test_configs.py."""

import pytest
import torch

from rl_lab.core.errors import UserError
from rl_lab.core.seeding import SeedTree
from rl_lab.core.workflow import Act, Workflow
from rl_lab.data.collector import RolloutCollector
from rl_lab.envs.make import make_env
from rl_lab.rehearsal import check_decisions


class Counting(Workflow):
    def initial_state(self, num_envs):
        return {"count": torch.zeros(num_envs)}

    def act(self, observations, state=None, *, explore=True, generator=None):
        actions = torch.zeros(len(observations), dtype=torch.int64)
        return Act(actions, {"count": state["count"] + 1}, {"seen": state["count"]})


class Fine(Counting):
    def follow(self, act, observations, state, actions, *, generator=None):
        return Act(actions, {"count": state["count"] - 1}, {"seen": state["count"]})


class Forgetful(Counting):
    def follow(self, act, observations, state, actions, *, generator=None):
        return Act(actions, state)


class Short(Counting):
    def follow(self, observations, state, actions):
        return Act(actions, state)


def rehearse(workflow):
    collector = RolloutCollector(make_env("tiny/CartPole", 3), SeedTree(0), initial_state=workflow.initial_state(3))
    check_decisions(workflow, collector, "controllers")
    return collector


@pytest.mark.parametrize("kind", [Counting, Fine])
def test_what_fits_passes(kind):
    rehearse(kind())


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Forgetful, "what Forgetful.follow returns is not like"), (Short, "Short cannot follow actions")],
)
def test_a_wrong_follow_is_found_before_the_first_random_phase(kind, message):
    with pytest.raises(UserError, match=message) as caught:
        rehearse(kind())
    assert "define follow(act, observations, state, actions, *, generator)" in str(caught.value)


def test_a_state_whose_beginning_is_unknown_is_found():
    class Endless(Counting):
        def initial_state(self, num_envs):
            return None

        def act(self, observations, state=None, *, explore=True, generator=None):
            return Act(torch.zeros(len(observations), dtype=torch.int64), torch.zeros(len(observations)))

    with pytest.raises(UserError, match="says not how an episode begins") as caught:
        rehearse(Endless())
    assert "define initial_state(num_envs)" in str(caught.value)


@pytest.mark.parametrize(
    "change", [lambda count: count.double(), lambda count: count.unsqueeze(-1), lambda count: {"deep": count}]
)
def test_a_state_that_is_not_like_its_beginning_is_found(change):
    class Changing(Counting):
        def act(self, observations, state=None, *, explore=True, generator=None):
            said = super().act(observations, state)
            return said._replace(state={"count": change(said.state["count"])})

    with pytest.raises(UserError, match=r"Changing\.act returns is not like the one of initial_state") as caught:
        rehearse(Changing())
    assert "torch.float32 [3]" in str(caught.value)


def test_what_an_act_changes_in_place_is_not_the_beginning_of_an_episode():
    class InPlace(Counting):
        def act(self, observations, state=None, *, explore=True, generator=None):
            observations.fill_(7.0)
            return Act(torch.zeros(len(observations), dtype=torch.int64), {"count": state["count"].add_(1)})

    collector = rehearse(InPlace())
    assert collector.state["count"].tolist() == [0, 0, 0]
    assert abs(collector.observations).max() < 0.06
