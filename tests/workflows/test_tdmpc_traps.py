"""What is easy to get wrong in TD-MPC2, one test each. Two-hot codes and networks have theirs in tests/components."""

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_lab.build import build_experiment
from rl_lab.components.latent_model import td_targets, termination_loss
from rl_lab.components.planners.mppi import MPPI
from rl_lab.components.representation.augmentation import RandomShift
from rl_lab.composition import compose, load_experiment
from rl_lab.core.batch import Batch
from rl_lab.core.phase import Hook, Phase
from rl_lab.core.seeding import SeedTree
from rl_lab.data.collector import RolloutCollector
from rl_lab.envs.make import make_env
from rl_lab.runs import run_training
from tests.workflows.test_tdmpc import build

PHASE = Phase("p", hooks=(Hook("update_agent"),), duration_updates=1)
SMALL = {
    "device": "cpu",
    "_dims.latent": 8,
    "algorithm.encoder_hidden": [8],
    "algorithm.hidden": [8, 8],
    "components.planner.num_samples": 8,
    "components.planner.num_policy_samples": 2,
    "components.planner.num_elites": 4,
}


def windows(horizon=3, num=4, *, discrete=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    seen = torch.randn(horizon + 1, num, 1, generator=generator)
    if discrete:
        actions = torch.randint(2, (horizon, num), generator=generator)
    else:
        actions = torch.rand(horizon, num, 1, generator=generator) * 2 - 1
    never = torch.zeros(horizon, num, dtype=torch.bool)
    return Batch(
        observations=seen[:-1],
        actions=actions,
        rewards=torch.randn(horizon, num, generator=generator),
        terminated=never,
        truncated=never.clone(),
        next_observations=seen[1:],
    )


def at(batch, name, step, row):
    flags = torch.zeros_like(batch.terminated)
    flags[step, row] = True
    return batch.with_columns(**{name: flags})


def targets_of(batch, **knobs):
    """Return the TD targets that one update of a fresh agent learns from."""
    workflow = build(SeedTree(0), horizon=3, **knobs)
    torch.nn.init.normal_(workflow.target_critics.weights[-1], generator=torch.Generator().manual_seed(1))  # not zero
    found = []
    learn = workflow._model_losses

    def spy(start, next_latents, targets, *rest):
        found.append(targets.clone())
        return learn(start, next_latents, targets, *rest)

    workflow._model_losses = spy
    workflow.update_agent(batch, phase=PHASE)
    return found[0]


@pytest.mark.parametrize("td_lambda", [0.0, 0.9])
def test_termination_counts_at_its_own_step_and_truncation_bootstraps(td_lambda):
    batch = windows()
    free = targets_of(batch, td_lambda=td_lambda)
    ended = targets_of(at(batch, "terminated", 2, 1), td_lambda=td_lambda)
    assert ended[2, 1] == batch.rewards[2, 1]  # nothing comes after it
    others = torch.ones(3, 4, dtype=torch.bool)
    others[:, 1] = False
    torch.testing.assert_close(ended[others], free[others])
    if td_lambda == 0.0:
        torch.testing.assert_close(ended[:2, 1], free[:2, 1])
    assert (free - batch.rewards).abs().min() > 1e-3  # the critics do say something
    torch.testing.assert_close(targets_of(at(batch, "truncated", 2, 1), td_lambda=td_lambda), free)


@pytest.mark.parametrize("trace", [0.0, 0.3, 0.95, 1.0])
def test_td_lambda_against_a_loop(trace):
    """Windows that were padded may hold an end in the middle, too: nothing leaks over it."""
    generator = torch.Generator().manual_seed(3)
    horizon, num, gamma = 5, 64, 0.9
    batch = windows(horizon, num)
    ends = torch.rand(horizon, num, generator=generator)
    batch = batch.with_columns(terminated=ends < 0.15, truncated=(ends > 0.85) & (ends < 0.99))
    values = torch.randn(horizon, num, generator=generator)
    targets = td_targets(batch, values, gamma, trace)
    for row in range(num):
        for start in range(horizon):
            total, weight, discount = 0.0, 1.0, 1.0
            for t in range(start, horizon):
                # The mean over n-step returns: stop here with probability 1 - trace, or because nothing follows.
                total += weight * discount * batch.rewards[t, row].item()
                discount *= gamma * (not batch.terminated[t, row])
                goes_on = trace if t < horizon - 1 and not batch.dones[t, row] else 0.0
                total += weight * (1.0 - goes_on) * discount * values[t, row].item()
                weight *= goes_on
            assert targets[start, row].item() == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_what_follows_an_end_in_a_padded_window_counts_for_nothing(flag, padded):
    batch = at(windows(), flag, 0, 1)
    changed = batch.with_columns(
        **{name: getattr(batch, name).clone() for name in ("observations", "actions", "rewards", "next_observations")}
    )
    for column in (changed.observations, changed.actions, changed.rewards):
        column[1:, 1] += 1.0
    changed.next_observations[1:, 1] -= 1.0
    learned = []
    for given in (batch, changed):
        workflow = build(SeedTree(0), horizon=3, padded=padded)
        metrics = workflow.update_agent(given, phase=PHASE)
        losses = [value for name, value in metrics.items() if name.endswith("_loss")]
        learned.append([*losses, *(parameter.detach() for parameter in workflow.dynamics.parameters())])
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(*learned, strict=True))
    assert same == padded


def test_errors_of_predicted_ends_are_shares_of_all_steps():
    logits = torch.tensor([[3.0, -1.0, 2.0, -4.0], [-2.0, -2.0, 1.0, -1.0]], requires_grad=True)
    ended = torch.tensor([[True, True, False, False], [False, False, False, True]])
    loss, errors = termination_loss(logits, ended)
    assert {name: value.item() for name, value in errors.items()} == {
        "termination_rate": 3 / 8,
        "termination_missed": 2 / 8,
        "termination_false": 2 / 8,
    }
    sigmoid = logits.detach().sigmoid()
    expected = -torch.where(ended, sigmoid, 1 - sigmoid).log().mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    metrics = build(SeedTree(0), horizon=3).update_agent(at(windows(), "terminated", 2, 1), phase=PHASE)
    assert metrics["termination_rate"].item() == pytest.approx(1 / 12)
    assert {"termination_loss", "termination_missed", "termination_false"} <= metrics.keys()


def test_evaluation_takes_a_sampled_elite_not_the_mean():
    """Two good ways exclude each other: their mean is neither."""
    planner = MPPI(1, horizon=1, num_samples=64, num_policy_samples=0, num_elites=16, num_iterations=1)
    zeros = torch.zeros(200, 1)
    decided = planner.plan(
        zeros,
        planner.initial_mean(200, zeros),
        dynamics=lambda latents, actions: latents,
        reward=lambda latents, actions: actions.abs().sum(-1),
        value=lambda latents: torch.zeros(latents.shape[:-1]),
        policy=None,
        discount=1.0,
        explore=False,
        generator=torch.Generator().manual_seed(0),
    )
    assert decided.actions.abs().min() > 0.9
    assert 50 < int((decided.actions > 0).sum()) < 150  # both ways, whatever the mean says
    assert decided.mean.abs().mean() < 0.5


def test_the_warm_start_of_an_environment_is_reset_when_its_episode_ends():
    workflow = build(SeedTree(0), horizon=3)
    environment = make_env("probe/delayed", 3, kwargs={"continuous": True})
    collector = RolloutCollector(environment, SeedTree(0), initial_state=workflow.initial_state(3))
    collector.environments._elapsed[1] = 1  # this one is a step ahead of the others
    seen = []

    def act(observations, state, **how):
        seen.append((collector.running_lengths.copy(), state["mean"].abs().sum((1, 2)) > 0))
        return workflow.act(observations, state, **how)

    collector.collect(act, 9)
    warm = [(int(length), bool(kept)) for lengths, plans in seen for length, kept in zip(lengths, plans, strict=True)]
    assert {kept for length, kept in warm if length == 0} == {False}
    assert {kept for length, kept in warm if length > 0} == {True}
    mixed = [set(lengths.tolist()) for lengths, _ in seen]
    assert {0, 1} in mixed  # some go on while others begin


def test_nothing_is_planned_while_actions_are_random(monkeypatch):
    experiment = build_experiment(load_experiment("tdmpc2_swingup", {"device": "cpu"}), Path("unwritten"))
    workflow, collector = experiment.workflow, experiment.collector
    monkeypatch.setattr(workflow, "_decide", None)
    before = collector.generator.get_state()
    batch = collector.collect(workflow.act, 5, follow=workflow.follow).trajectory
    assert batch.actions.unique().numel() == batch.actions.numel()
    assert torch.equal(collector.generator.get_state(), before)
    assert torch.equal(collector.state["mean"], workflow.initial_state(collector.num_envs)["mean"])
    experiment.close()


def test_the_running_scale_and_the_target_critics_are_in_every_checkpoint(tmp_path):
    changes = {"training.total_timesteps": 60, "buffer.batch_size": 4, "evaluation.episodes": 1, **SMALL}
    changes |= {"training.phases.0.duration_steps": 40, "training.phases.0.workflow_hooks.0.collect": 20}
    composed = load_experiment("tdmpc2_swingup", {**changes, "environment.max_episode_steps": 40})
    run_training(composed, run_dir=tmp_path / "run", quiet=True)
    experiment = build_experiment(composed, tmp_path / "run")
    saved = experiment.checkpoints.load_latest().state
    experiment.close()
    assert "average" in saved["components"]["scale"]
    assert {"weights.0", "biases.2"} <= saved["workflow_custom"]["target_critics"].keys()
    online = saved["components"]["critics"]["weights.2"]
    assert not torch.equal(saved["workflow_custom"]["target_critics"]["weights.2"], online)


def test_hidden_layers_of_the_critics_start_as_all_others_do():
    """The published code once left them at torch's own start, because the ensemble is stacked afterwards."""
    experiment = build_experiment(load_experiment("tdmpc2_swingup", {"device": "cpu"}), Path("unwritten"))
    critics, dynamics = experiment.components["critics"], experiment.components["dynamics"]
    for weight in [*critics.weights[:-1], *(layer.weight for layer in dynamics.linears)]:
        assert 0.015 < weight.std() < 0.025
        assert weight.abs().max() < 0.15
    assert critics.weights[-1].abs().max() == 0
    assert experiment.components["reward"].linears[-1].weight.abs().max() == 0
    assert experiment.components["reward"].linears[-2].weight.std() > 0.015
    experiment.close()


def test_of_discrete_actions_the_model_sees_codes_only():
    """Whatever planner and policy propose, the model is asked about actions that can be executed."""
    workflow = build(SeedTree(0), horizon=3, discrete=True)
    seen = []
    for name in ("dynamics", "reward", "critics", "target_critics"):
        part = getattr(workflow, name)
        part.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1].reshape(-1, 2)))
    state = workflow.initial_state(5)
    observations = torch.linspace(-1, 1, 5).unsqueeze(-1)
    said = workflow.act(observations, state, generator=torch.Generator().manual_seed(0))
    batch = windows(discrete=True)
    workflow.update_agent(batch, phase=PHASE)
    codes = torch.cat(seen)
    assert len(codes) > 500
    assert ((codes == 1).sum(-1) == 1).all()
    assert ((codes == 0).sum(-1) == 1).all()
    assert said.actions.dtype == torch.int64
    assert said.actions.shape == (5,)
    assert torch.equal(workflow.model.codes(batch.actions).argmax(-1), batch.actions)
    vectors = torch.tensor([[0.2, -0.9], [-0.9, -0.3]])
    assert workflow.model.executed(vectors).tolist() == [0, 1]
    assert workflow.model.codes(vectors).tolist() == [[1, 0], [0, 1]]
    imagined = workflow.imagine(horizon=2, latents=torch.full((3, 16), 0.125))
    assert imagined.actions.dtype == torch.int64


def test_stats_say_what_the_same_decision_rests_on():
    workflow = build(SeedTree(0), horizon=3)
    observations = torch.tensor([[0.3], [-0.2]])
    for plan in (True, False):
        workflow.plan = plan
        state = workflow.initial_state(2)
        said = workflow.act(observations, state, generator=torch.Generator().manual_seed(1))
        told = workflow.act_with_stats(observations, state, generator=torch.Generator().manual_seed(1))
        assert torch.equal(said.actions, told.actions)
        assert said.extras == {}
        latents = workflow.encoder(observations)
        torch.testing.assert_close(told.extras["latent"], latents)
        values = workflow.model.all_values(latents, said.actions).detach()
        torch.testing.assert_close(told.extras["q_mean"], values.mean(0))
        torch.testing.assert_close(told.extras["q_spread"], values.std(0))
        torch.testing.assert_close(told.extras["policy_value"], workflow.value(observations))
        assert all(len(column) == 2 for column in told.extras.values())
        assert ("plan_return" in told.extras) == plan
        if plan:
            assert torch.equal(said.state["mean"], told.state["mean"])
            assert (told.extras["plan_std"] >= workflow.planner.min_std).all()


def test_pictures_are_shifted_when_acting_and_when_learning(monkeypatch):
    experiment = build_experiment(load_experiment("tdmpc2_pixels", SMALL), Path("unwritten"))
    workflow = experiment.workflow
    shifted = []
    monkeypatch.setattr(
        RandomShift,
        "sample",
        lambda self, observations, generator: shifted.append((tuple(observations.shape), generator)) or observations,
    )
    trajectory = experiment.collector.collect(workflow.act, 12).trajectory
    assert shifted == [((4, 3, 30, 30), experiment.collector.generator)] * 12
    shifted.clear()
    experiment.sources["replay"].add(trajectory)
    workflow.update_agent(experiment.sources["replay"].sample(5), phase=PHASE)
    generator = workflow.generator
    assert shifted == [((3, 5, 3, 30, 30), generator), ((5, 3, 30, 30), generator)]
    assert trajectory.actions.dtype == torch.int64
    experiment.close()


def test_a_dict_of_a_picture_and_a_vector_is_encoded_shifted_and_learned_from(room):
    changes = {**SMALL, "environment.id": room, "environment.num_envs": 2, "environment.kwargs": {}}
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items() if key not in ("device",)]
    overrides += ["experiment.device=cpu", "components/encoder@components.encoder=dict"]
    overrides += ["~environment.kwargs.size", "+components.encoder.channels=[4,4,4,4]"]
    experiment = build_experiment(compose(["experiment=tdmpc2_pixels", *overrides]), Path("unwritten"))
    workflow, source = experiment.workflow, experiment.sources["replay"]
    source.add(experiment.collector.collect(workflow.act, 12, follow=workflow.follow).trajectory)
    batch = source.sample(6)
    latents = workflow._encode(batch.observations, workflow.generator)
    torch.testing.assert_close(latents.unflatten(-1, (-1, 8)).sum(-1), torch.ones(3, 6, 1))
    before = {name: value.clone() for name, value in workflow.encoder.state_dict().items()}
    workflow.update_agent(batch, phase=PHASE)
    workflow.update_agent(batch, phase=PHASE)  # heads that start at zero pass no gradient at first
    changed = [name for name, value in workflow.encoder.state_dict().items() if not torch.equal(value, before[name])]
    assert any("camera" in name for name in changed)
    assert any("speed" in name for name in changed)
    experiment.close()


@pytest.fixture
def room():
    """A world that shows a picture and a vector."""

    class Room(gymnasium.Env):
        observation_space = spaces.Dict(
            {"camera": spaces.Box(0, 255, (16, 16, 3), np.uint8), "speed": spaces.Box(-1.0, 1.0, (2,), np.float32)}
        )
        action_space = spaces.Discrete(3)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self._see(), {}

        def step(self, action):
            return self._see(), float(action), self.np_random.random() < 0.05, False, {}

        def _see(self):
            camera = self.np_random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            return {"camera": camera, "speed": self.np_random.uniform(-1, 1, 2).astype(np.float32)}

    gymnasium.register("TrapRoom-v0", Room, max_episode_steps=50)
    yield "TrapRoom-v0"
    del gymnasium.registry["TrapRoom-v0"]
