"""Analytic models equal their worlds over whole episodes; learned ones fit, normalise, disagree and propagate."""

import numpy as np
import pytest
import torch

from rl_lab.components.dynamics.analytic import (
    CartPoleModel,
    GridWorldModel,
    PendulumModel,
    PointMassModel,
    QuadraticValue,
    SwingUpModel,
)
from rl_lab.components.dynamics.deterministic import DeterministicDynamics
from rl_lab.components.dynamics.ensemble import HELD_OUT, EnsembleDynamics
from rl_lab.components.normalizers import RunningNormalizer
from rl_lab.core.batch import Batch
from rl_lab.core.errors import UserError
from rl_lab.envs.make import make_env

MODELS = {
    "tiny/CartPole": CartPoleModel(),
    "tiny/Pendulum": PendulumModel(),
    "tiny/PointMass": PointMassModel(),
    "tiny/CartPoleSwingUp": SwingUpModel(),
}


def exact_state(id, world):
    """What a world keeps, in its own precision, as the model's latents."""
    state = world.get_state()["state"]
    if id == "tiny/Pendulum":
        return np.stack([np.cos(state[0]), np.sin(state[0]), state[1]], -1)
    if id == "tiny/CartPoleSwingUp":
        return np.stack([state[0], state[1], np.cos(state[2]), np.sin(state[2]), state[3]], -1)
    return state.T.copy()


def random_actions(generator, world, num_envs):
    if hasattr(world.single_action_space, "n"):
        return generator.integers(world.single_action_space.n, size=num_envs)
    return generator.uniform(-1.2, 1.2, (num_envs, *world.single_action_space.shape)).astype(np.float32)


@pytest.mark.parametrize("id", MODELS)
def test_analytic_models_equal_their_worlds_over_whole_episodes(id):
    model, num_envs = MODELS[id], 16
    world = make_env(id, num_envs)
    seen, _ = world.reset(seed=1)
    generator = np.random.default_rng(2)
    latents, alive = torch.from_numpy(exact_state(id, world)), np.ones(num_envs, bool)
    for _ in range(world.max_episode_steps):
        actions = random_actions(generator, world, num_envs)
        following, rewards, terminated, _, _ = world.step(actions)
        given, now = torch.from_numpy(actions), model.encode(torch.from_numpy(seen))
        # from every observation, in single precision
        torch.testing.assert_close(model.step(now, given).numpy()[alive], following[alive], rtol=0, atol=1e-5)
        torch.testing.assert_close(model.rewards(now, given).numpy()[alive], rewards[alive], rtol=0, atol=1e-5)
        ended = model.ended(torch.from_numpy(following)).numpy().astype(bool)
        assert (ended == terminated)[alive].all()
        # from the first state on, in double precision
        latents = model.step(latents, given)
        torch.testing.assert_close(latents.numpy()[alive], exact_state(id, world)[alive], rtol=0, atol=1e-5)
        alive, seen = alive & ~terminated, following
    assert id == "tiny/CartPole" or alive.all()


def test_the_model_of_cart_pole_stays_exact_while_the_pole_is_balanced():
    world = make_env("tiny/CartPole", 1)
    seen, _ = world.reset(seed=0)
    latents, model = torch.from_numpy(exact_state("tiny/CartPole", world)), CartPoleModel()
    for _ in range(500):
        x, x_dot, theta, theta_dot = seen[0]
        action = np.array([int(theta + 0.4 * theta_dot + 0.05 * x + 0.1 * x_dot > 0)])
        seen, _, terminated, _, _ = world.step(action)
        assert not terminated
        latents = model.step(latents, torch.from_numpy(action))
    torch.testing.assert_close(latents.numpy(), exact_state("tiny/CartPole", world), rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"size": 5, "walls": True}, {"size": 6, "random_goal": True}])
def test_the_model_of_the_grid_reads_pictures(settings):
    world = make_env("tiny/GridWorld", 12, kwargs=settings)
    model = GridWorldModel(settings.get("size", 8), settings.get("walls", False))
    seen, _ = world.reset(seed=3)
    generator, alive = np.random.default_rng(0), np.ones(12, bool)
    for _ in range(60):
        latents = model.encode(torch.from_numpy(seen))
        assert np.array_equal(latents.numpy()[alive], world.get_state()["state"].T[alive])
        actions = random_actions(generator, world, 12)
        seen, rewards, terminated, _, _ = world.step(actions)
        given = torch.from_numpy(actions)
        following = model.step(latents, given)
        assert np.array_equal(following.numpy()[alive], world.get_state()["state"].T[alive])
        assert np.allclose(model.rewards(latents, given).numpy()[alive], rewards[alive])
        assert np.array_equal(model.ended(following).numpy().astype(bool)[alive], terminated[alive])
        alive &= ~terminated


def test_discrete_actions_are_indices_or_vectors_that_stand_for_their_largest_entry():
    latents = torch.randn(5, 4) * 0.1
    index = torch.tensor([0, 1, 1, 0, 1])
    vectors = torch.tensor([[0.2, 0.1], [-0.9, -0.3], [0.0, 1.0], [1.0, 0.0], [-1.0, 0.5]])
    model = CartPoleModel()
    assert torch.equal(model.step(latents, index), model.step(latents, vectors))
    learned = DeterministicDynamics(4, 2, (8,), discrete=True)
    assert torch.equal(learned.step(latents, index), learned.step(latents, vectors))


def test_quadratic_value():
    value = QuadraticValue([1.0, 2.0], best=10.0)
    assert value(torch.tensor([[1.0, 2.0], [0.0, 0.0]])).tolist() == [1.0, 10.0]


def test_running_normalizer_against_all_values_at_once():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1000, 3, generator=generator) * torch.tensor([1.0, 50.0, 0.0]) + torch.tensor([0.0, 1e4, 7.0])
    normalizer = RunningNormalizer(3)
    for part in values.split([10, 300, 1, 689]):
        normalizer.update(part)
    torch.testing.assert_close(normalizer.mean, values.double().mean(0))
    torch.testing.assert_close(normalizer.variance, values.double().var(0, correction=0))
    normal = normalizer(values)
    torch.testing.assert_close(normal[:, :2].std(0), torch.ones(2), rtol=1e-2, atol=0)
    assert normal[:, 2].abs().max() < 1e-3  # does not vary: shifted, not scaled
    torch.testing.assert_close(normalizer.inverse(normal), values, rtol=1e-5, atol=1e-3)
    assert set(normalizer.state_dict()) == {"mean", "variance", "count", "shift", "scale"}


def test_running_normalizer_forgets_when_it_is_full():
    normalizer = RunningNormalizer(1, max_count=100)
    for _ in range(50):
        normalizer.update(torch.zeros(100, 1))
    for _ in range(20):
        normalizer.update(torch.ones(100, 1))
    assert normalizer.mean.item() > 0.99


def transitions(size, seed=0, first_row=0):
    """A point on a line that an action moves; it ends beyond 2, the reward is minus the distance."""
    generator = torch.Generator().manual_seed(seed)
    seen = torch.rand(size, 1, generator=generator) * 4 - 2
    actions = torch.rand(size, 1, generator=generator) * 2 - 1
    following = seen + 0.5 * actions
    return Batch(
        observations=seen,
        actions=actions,
        rewards=-seen.abs().squeeze(-1),
        terminated=following.squeeze(-1) > 1.8,
        truncated=torch.zeros(size, dtype=torch.bool),
        next_observations=following,
        rows=torch.arange(first_row, first_row + size),
    )


def fit(dynamics, batches, generator=None, rate=3e-3):
    optimizer = torch.optim.Adam(dynamics.parameters(), lr=rate)
    for batch in batches:
        optimizer.zero_grad()
        losses = dynamics.losses(batch, generator)
        sum(losses.values()).backward()
        optimizer.step()
    return losses


def test_deterministic_dynamics_learn_change_reward_and_end():
    torch.manual_seed(0)
    dynamics = DeterministicDynamics(1, 1, (32,), "relu", reward=True, done=True)
    fit(dynamics, [transitions(256, seed) for seed in range(500)], rate=1e-2)
    batch = transitions(500, 10_000)
    with torch.no_grad():
        following = dynamics(torch.cat([batch.observations, batch.actions], -1))  # [B, O + A] to [B, O]
        assert (following - batch.next_observations).abs().mean() < 0.03
        assert torch.equal(following, dynamics.step(batch.observations, batch.actions))
        assert (dynamics.rewards(batch.observations, batch.actions) - batch.rewards).abs().mean() < 0.05
        ended = dynamics.ended(batch.next_observations) > 0.5
    assert (ended == batch.terminated).float().mean() > 0.95


def test_heads_are_optional_and_a_missing_reward_is_never_a_constant():
    dynamics = DeterministicDynamics(1, 1, (8,), reward=False, done=False)
    batch = transitions(16)
    assert set(dynamics.losses(batch)) == {"dynamics"}
    assert not dynamics.ended(batch.observations).any()
    with pytest.raises(AssertionError, match="no reward head"):
        dynamics.rewards(batch.observations, batch.actions)


def noisy(size, seed):
    """The point of `transitions` with noise of deviation 0.2 where it is negative."""
    batch = transitions(size, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    draws = 0.2 * torch.randn(size, 1, generator=generator) * (batch.observations < 0)
    return Batch(
        **{name: batch[name] for name in ("observations", "actions", "rewards", "terminated", "truncated")},
        next_observations=batch.next_observations + draws,
        rows=torch.arange(size) + size * seed,
    )


@pytest.fixture(scope="module")
def ensemble():
    torch.manual_seed(0)
    dynamics = EnsembleDynamics(
        1, 1, (32,), num_members=4, num_elites=2, num_particles=400, done=False, propagation="tsinf"
    )
    fit(dynamics, [noisy(256, seed) for seed in range(600)], torch.Generator().manual_seed(0))
    return dynamics


def test_an_ensemble_learns_mean_and_noise(ensemble):
    seen = torch.tensor([[-1.0], [1.0]])
    actions = torch.tensor([[0.4], [0.4]])
    particles = seen.unsqueeze(1).expand(-1, 400, -1)
    with torch.no_grad():
        torch.testing.assert_close(ensemble.step(seen, actions), seen + 0.2, rtol=0, atol=0.06)
        drawn = ensemble.propagate(particles, actions, torch.Generator().manual_seed(1))
    spread = drawn.std(1).squeeze(-1)
    assert spread[0].item() == pytest.approx(0.2, abs=0.06)
    assert spread[1].item() < 0.08


def test_log_variances_stay_between_their_bounds(ensemble):
    raw = torch.tensor([[-1e4, 1e4]]).T.expand(2, 2)
    _, log_variance = ensemble._split(raw)
    low, high = ensemble.min_log_variance.item(), ensemble.max_log_variance.item()
    assert log_variance.min().item() >= low - 1e-4
    assert log_variance.max().item() <= high + 1e-4
    assert log_variance[1, 0].item() == pytest.approx(high, abs=0.01)


def test_members_disagree_where_nothing_was_learned(ensemble):
    with torch.no_grad():
        known = ensemble.disagreement(torch.tensor([[0.5]]), torch.tensor([[0.1]]))
        unknown = ensemble.disagreement(torch.tensor([[15.0]]), torch.tensor([[0.1]]))
    assert unknown.item() > 10 * known.item()


def test_elites_are_the_members_with_the_least_error_on_rows_that_are_never_learned_from():
    torch.manual_seed(0)
    dynamics = EnsembleDynamics(1, 1, (8,), num_members=3, num_elites=1, num_particles=2, reward=False, error_rate=0.5)
    batch = transitions(64)
    with torch.no_grad():
        dynamics.network.biases[-1][0] += 3.0
        dynamics.network.biases[-1][2] += 5.0
    held_out = [i for i in range(64) if i % HELD_OUT == 0]
    before = dynamics.losses(batch, torch.Generator().manual_seed(0))["dynamics"].item()
    assert dynamics.elites().tolist() == [1]
    # Another fate of the held-out rows changes the errors, never the loss.
    other = batch.next_observations.clone()
    other[held_out] += 1.0
    changed = batch.with_columns(next_observations=other)
    torch.manual_seed(0)
    twin = EnsembleDynamics(1, 1, (8,), num_members=3, num_elites=1, num_particles=2, reward=False, error_rate=0.5)
    with torch.no_grad():
        twin.network.biases[-1][0] += 3.0
        twin.network.biases[-1][2] += 5.0
    twin.changes.update(batch.next_observations - batch.observations)
    dynamics.changes.load_state_dict(twin.changes.state_dict())
    for model in (dynamics, twin):
        model.changes.update = lambda values: None
        model.inputs.load_state_dict(dynamics.inputs.state_dict())
        model.inputs.update = lambda values: None
    first = dynamics.losses(batch, torch.Generator().manual_seed(0))["dynamics"].item()
    second = twin.losses(changed, torch.Generator().manual_seed(0))["dynamics"].item()
    assert first == second
    assert before != 0.0
    assert not torch.equal(dynamics.errors, twin.errors)


@pytest.mark.parametrize("propagation", ["ts1", "tsinf"])
def test_particles_meet_the_members_that_the_propagation_says(propagation):
    torch.manual_seed(0)
    dynamics = EnsembleDynamics(
        1, 1, (4,), num_members=3, num_elites=3, num_particles=6, reward=False, propagation=propagation
    )
    with torch.no_grad():  # member m moves by m, without noise
        for weight in dynamics.network.weights:
            weight.zero_()
        dynamics.network.biases[-1][:, 0, 0] = torch.arange(3.0)
        dynamics.network.biases[-1][:, 0, 1] = -1e4
        dynamics.min_log_variance.fill_(-40.0)
        dynamics.errors.copy_(torch.tensor([0.1, 0.2, 0.3]))
    generator = torch.Generator().manual_seed(0)
    particles, actions = torch.zeros(2, 6, 1), torch.zeros(2, 1)
    steps = [dynamics.propagate(particles, actions, generator).squeeze(-1) for _ in range(8)]
    for moved in steps:
        assert sorted(moved[0].round().tolist()) == [0, 0, 1, 1, 2, 2]
        assert torch.equal(moved[0].round(), moved[1].round())
    same = all(torch.equal(moved.round(), steps[0].round()) for moved in steps)
    assert same is (propagation == "tsinf")
    if propagation == "tsinf":
        assert steps[0][0].round().tolist() == [0, 1, 2, 0, 1, 2]


def test_an_ensemble_says_when_it_cannot_hold_rows_out():
    dynamics = EnsembleDynamics(1, 1, (4,), num_particles=5)
    batch = transitions(8)
    with pytest.raises(UserError, match="storage=device"):
        dynamics.losses(
            Batch(
                **{
                    name: batch[name]
                    for name in ("observations", "actions", "rewards", "terminated", "truncated", "next_observations")
                }
            )
        )
    for wrong in ({"num_elites": 9}, {"num_particles": 7}):
        with pytest.raises(ValueError, match="num_"):
            EnsembleDynamics(1, 1, (4,), **wrong)
