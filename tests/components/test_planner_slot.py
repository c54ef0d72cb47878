"""Every planner in one slot: known best plans, ties, infeasible candidates, horizon 1, a batch of one, particles."""

import pytest
import torch

from rl_lab.components.controllers.one_hot import OneHotActor
from rl_lab.components.dynamics.analytic import AnalyticModel, index_of
from rl_lab.components.dynamics.ensemble import EnsembleDynamics
from rl_lab.components.planners.cem import CEM
from rl_lab.components.planners.icem import ICEM
from rl_lab.components.planners.mcts import GumbelSearch
from rl_lab.components.planners.mppi import MPPI
from rl_lab.components.planners.policy_guided import PolicyGuided
from rl_lab.components.planners.shooting import RandomShooting
from rl_lab.components.planners.slot import Lookahead, returns_of


class Line(AnalyticModel):
    """A point that actions move by up to 0.5; the reward is minus the squared distance to the origin."""

    def step(self, latents, actions):
        return latents + 0.5 * actions

    def rewards(self, latents, actions):
        return -self.step(latents, actions).square().sum(-1)


class Steps(Line):
    """The same with two actions: left and right by 0.5."""

    discrete = True

    def step(self, latents, actions):
        return latents + index_of(actions).unsqueeze(-1).to(latents.dtype) - 0.5


class Uniform:
    """A policy that knows nothing."""

    def __init__(self, discrete):
        self.discrete = discrete

    def actions(self, latents, draws):
        if not self.discrete:
            return draws.tanh()
        return torch.nn.functional.one_hot(draws.argmax(-1), 2).float()

    def __call__(self, latents):
        return torch.full((*latents.shape[:-1], 2), -0.6931)


CONTINUOUS = {
    "shooting": lambda horizon=3: RandomShooting(1, horizon, 512),
    "cem": lambda horizon=3: CEM(1, horizon, 64, 8, 5, min_std=1e-3),
    "icem": lambda horizon=3: ICEM(1, horizon, 40, 8, 5, min_std=1e-3),
    "mppi": lambda horizon=3: MPPI(1, horizon, 128, 8, 16, 6, select="mean"),
    "policy_guided": lambda horizon=3: PolicyGuided(1, horizon, 512, temperature=0.05, noise_std=0.1),
}
DISCRETE = {
    "shooting": lambda horizon=3: RandomShooting(2, horizon, 64, discrete=True),
    "cem": lambda horizon=3: CEM(2, horizon, 32, 4, 4, discrete=True),
    "icem": lambda horizon=3: ICEM(2, horizon, 32, 4, 4),
    "mppi": lambda horizon=3: MPPI(2, horizon, 64, 8, 8, 4),
    "policy_guided": lambda horizon=3: PolicyGuided(2, horizon, 64, temperature=0.05, discrete=True),
    "mcts": lambda horizon=3: GumbelSearch(2, 32, max_depth=horizon),
}


def decide(planner, model, latents, *, state=None, explore=False, seed=0, **parts):
    looking = Lookahead(
        model, planner.action, parts.pop("discount", 1.0), **{"policy": Uniform(model.discrete)} | parts
    )
    state = state or {"mean": planner.initial_mean(len(latents), latents)}
    generator = torch.Generator().manual_seed(seed)
    return looking.decide(planner, latents, state, explore=explore, generator=generator)


@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_planners_find_the_way_to_the_origin(name, horizon):
    latents = torch.tensor([[1.0], [-1.0], [0.2], [0.0]])
    said = decide(CONTINUOUS[name](horizon), Line(), latents)
    torch.testing.assert_close(said.actions, torch.tensor([[-1.0], [1.0], [-0.4], [0.0]]), rtol=0, atol=0.2)
    assert said.extras["plan"].shape == (4, 1)


@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_planners_find_the_way_to_the_origin(name, horizon):
    latents = torch.tensor([[1.1], [-1.3], [0.4], [-0.3]])
    said = decide(DISCRETE[name](horizon), Steps(), latents)
    assert said.actions.dtype == torch.int64
    assert said.actions.tolist() == [0, 1, 0, 1]
    plan = said.extras["plan"]
    torch.testing.assert_close(plan.sum(-1), torch.ones(4))
    assert (plan >= 0).all()
    assert plan.argmax(-1).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("planner", "model"),
    [*((CONTINUOUS[name], Line()) for name in CONTINUOUS), *((DISCRETE[name], Steps()) for name in DISCRETE)],
    ids=[*(f"continuous-{name}" for name in CONTINUOUS), *(f"discrete-{name}" for name in DISCRETE)],
)
class TestEveryPlanner:
    def test_a_batch_of_one_is_decided_and_chance_is_the_generators(self, planner, model):
        one = decide(planner(), model, torch.tensor([[0.7]]))
        again = decide(planner(), model, torch.tensor([[0.7]]))
        assert torch.equal(one.actions, again.actions)
        assert len(one.actions) == 1
        for leaf in (one.state["mean"], one.extras["plan"]):
            assert len(leaf) == 1
            assert leaf.isfinite().all()

    def test_plans_of_an_episode_go_on_from_each_other(self, planner, model):
        made = planner()
        first = decide(made, model, torch.tensor([[0.7], [-0.5]]))
        second = decide(made, model, torch.tensor([[0.2], [0.0]]), state=first.state)
        assert second.state["mean"].shape == first.state["mean"].shape
        initial = made.initial_mean(2, torch.zeros(1))
        assert initial.shape == first.state["mean"].shape
        assert initial.isfinite().all()

    def test_ties_are_decided(self, planner, model):
        class Nothing(type(model)):
            def rewards(self, latents, actions):
                return torch.zeros(latents.shape[:-1])

        said = decide(planner(), Nothing(), torch.zeros(3, 1))
        assert said.actions.isfinite().all()
        assert said.state["mean"].isfinite().all()

    def test_what_is_infeasible_is_avoided(self, planner, model):
        if isinstance(planner(), (MPPI, GumbelSearch)):
            pytest.skip("MPPI counts what is not a number as zero, as its authors do; a tree has no candidates")

        class Cliff(type(model)):
            def rewards(self, latents, actions):
                following = self.step(latents, actions)
                nan = torch.full_like(following[..., 0], torch.nan)
                return torch.where(following[..., 0] > 0.01, nan, super().rewards(latents, actions))

        said = decide(planner(), Cliff(), torch.tensor([[-0.2], [-1.1]]))
        assert said.state["mean"].isfinite().all()
        following = Cliff().step(torch.tensor([[-0.2], [-1.1]]), said.actions)
        assert following[1, 0] <= 0.01
        if not model.discrete:
            assert following[0, 0] <= 0.05

    def test_a_model_that_gives_no_number_at_all_still_gets_an_action(self, planner, model):
        class Broken(type(model)):
            def rewards(self, latents, actions):
                return torch.full(latents.shape[:-1], torch.nan)

        said = decide(planner(), Broken(), torch.zeros(2, 1))
        assert said.actions.float().isfinite().all()

    def test_exploring_varies(self, planner, model):
        if isinstance(planner(), RandomShooting):
            pytest.skip("it explores by its nature")
        latents = torch.zeros(1, 1)
        said = {
            tuple(decide(planner(), model, latents, explore=True, seed=seed).actions.flatten().tolist())
            for seed in range(12)
        }
        assert len(said) > 1

    def test_the_horizon_sees_the_value_and_nothing_counts_after_an_end(self, planner, model):
        class Ending(type(model)):
            def rewards(self, latents, actions):
                return torch.zeros(latents.shape[:-1])

            def ended(self, latents):
                return (latents[..., 0] > 0.3).to(latents.dtype)

        # Worth the most far to the right, but there the world has ended: the value counts only on the left.
        said = decide(planner(), Ending(), torch.tensor([[0.0]]), value=lambda z: 5.0 + z[..., 0].clamp(max=0.2))
        assert Ending().step(torch.tensor([[0.0]]), said.actions).item() <= 0.3


def test_returns_are_discounted_sums_until_an_end():
    class Counting(Line):
        def rewards(self, latents, actions):
            return latents[..., 0] + 1.0

        def ended(self, latents):
            return (latents[..., 0] > 1.2).to(latents.dtype)

    looking = Lookahead(Counting(), 1, 0.5, value=lambda z: 100.0 + z[..., 0])
    functions = dict(looking.functions(None))
    del functions["policy"]
    actions = torch.tensor([[[1.0], [0.0]], [[1.0], [0.0]], [[1.0], [1.0]]]).unsqueeze(0)  # [1, 3, 2, 1]
    got = returns_of(torch.zeros(1, 1), actions, **functions)
    first = 1.0 + 0.5 * 1.5 + 0.25 * 2.0  # ends with its third step, at 1.5
    second = 1.0 + 0.5 * 1.0 + 0.25 * 1.0 + 0.125 * 100.5
    torch.testing.assert_close(got, torch.tensor([[first, second]]))


def test_a_known_reward_of_arrival_counts_at_the_horizon_too():
    class Arrival:
        of_arrival = True

        def __call__(self, latents, actions):
            return -latents.square().sum(-1)

    planner = CEM(1, 1, 128, 8, 5, min_std=1e-3)
    said = decide(planner, Line(), torch.tensor([[0.2], [1.0]]), reward=Arrival())
    torch.testing.assert_close(said.actions, torch.tensor([[-0.4], [-1.0]]), rtol=0, atol=0.05)


def test_coloured_noise_has_deviation_one_and_the_wanted_spectrum():
    generator = torch.Generator().manual_seed(0)
    for horizon in (8, 15, 30):
        for exponent in (0.0, 2.0):
            planner = ICEM(2, horizon, noise_exponent=exponent)
            drawn = planner.coloured((4, 2000, 2), planner.waves(torch.zeros(1)), generator)
            assert tuple(drawn.shape) == (4, horizon, 2000, 2)
            assert drawn.std().item() == pytest.approx(1.0, abs=0.05)
            power = torch.fft.rfft(drawn, dim=1).abs().square().mean((0, 2, 3))
            ratio = (power[1] / power[3]).item()
            assert ratio == pytest.approx(3.0**exponent, rel=0.1)
    planner = ICEM(1, 20, noise_exponent=2.0)
    neighbours = planner.coloured((1, 4000, 1), planner.waves(torch.zeros(1)), generator)
    assert (neighbours[:, 1:] * neighbours[:, :-1]).mean() > 0.8


def test_icem_keeps_elites_and_moves_them_on():
    seen = []

    class Watched(Line):
        def step(self, latents, actions):
            seen.append(actions.clone())
            return super().step(latents, actions)

    planner = ICEM(1, 3, 8, 2, 2, kept_share=0.5)
    assert planner.num_kept == 1
    first = decide(planner, Watched(), torch.tensor([[0.6]]))
    best = first.state["mean"].unflatten(1, (2, 3))[0, 1, :, 0]  # the kept sequence
    seen.clear()
    decide(planner, Watched(), torch.tensor([[0.6 + 0.5 * float(best[0])]]), state=first.state)
    competing = [float(actions[0, 0, 0]) for actions in seen[:3]]  # the kept one comes first in the first round
    assert competing == pytest.approx([float(best[1]), float(best[2]), float(best[2])])
    assert planner.sample_counts == [8, 6]


def test_shooting_lets_the_last_plan_compete():
    planner = RandomShooting(1, 3, 2)
    kept = torch.tensor([[[0.0], [-1.0], [-1.0]]])  # moved on: straight to the origin
    said = decide(planner, Line(), torch.tensor([[1.0]]), state={"mean": kept})
    assert said.actions.item() == -1.0


def test_wrong_knobs_are_refused():
    for make in (
        lambda: CEM(1, num_samples=4, num_elites=5),
        lambda: ICEM(1, num_samples=8, num_elites=5),
    ):
        with pytest.raises(ValueError, match="num_elites"):
            make()
    with pytest.raises(ValueError, match="policy"):
        decide(PolicyGuided(1), Line(), torch.zeros(1, 1), policy=None)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_planners_look_ahead_with_particles(name):
    torch.manual_seed(0)
    dynamics = EnsembleDynamics(1, 1, (8,), num_members=2, num_elites=2, num_particles=4)
    planner = CONTINUOUS[name](2)
    said = decide(planner, dynamics, torch.randn(3, 1), value=lambda z: z[..., 0])
    assert tuple(said.actions.shape) == (3, 1)


def test_the_spread_of_particles_can_be_sought():
    torch.manual_seed(0)
    dynamics = EnsembleDynamics(1, 1, (8,), num_members=2, num_elites=2, num_particles=4, reward=False)
    looking = Lookahead(dynamics, 1, 1.0, reward=_Zero(), disagreement_weight=2.0)
    functions = looking.functions(None)
    particles = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    got = functions["reward"](particles, torch.zeros(1, 1))
    torch.testing.assert_close(got, 2.0 * torch.tensor([0.0, 1.0, 0.0, 1.0]).std().reshape(1))


class _Zero:
    of_arrival = False

    def __call__(self, latents, actions):
        return torch.zeros(latents.shape[:-1])


def test_a_policy_proposes_and_gives_logits():
    torch.manual_seed(0)
    policy = OneHotActor(torch.nn.Linear(1, 2))
    proposals = Lookahead(Steps(), 2, 1.0, policy=policy).functions(torch.Generator().manual_seed(0))["policy"]
    latents = torch.randn(5, 3, 1)
    assert tuple(proposals(latents).shape) == (5, 3, 2)
    torch.testing.assert_close(proposals.logits(latents).exp().sum(-1), torch.ones(5, 3))
