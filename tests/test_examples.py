"""The examples run, learn, and do what their docstrings say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def loaded(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_direct_training_learns_and_prints_progress(capsys):
    # The last digits of a product differ between processors, and a single seed ends anywhere from 100 to 500.
    seeds = range(5)
    returns = [loaded("direct_training_with_components").train(20_000, seed) for seed in seeds]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3 * len(seeds)
    assert all("steps  return" in line and "loss" in line for line in lines)
    assert sum(returns) / len(returns) > 150


def test_dreamer_learns_in_a_plain_loop_and_dreams(capsys):
    example = loaded("dreamer_in_a_loop")
    before = torch.random.get_rng_state()
    agent, returns = example.train(1_300)
    torch.random.set_rng_state(before)
    assert len(returns) > 20
    first, last = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert last < 0.9 * first  # the loss
    dreamed = example.dream(agent, horizon=7)
    assert dreamed.shape == (7, 4)
    assert dreamed.isfinite().all()
    assert dreamed[0].abs().max() < 1.0  # an episode begins near the middle


@pytest.fixture(scope="module")
def functional():
    return loaded("functional_training_example")


@pytest.fixture(scope="module")
def events(functional):
    return functional.train(2_000)


def test_both_losses_are_reported_by_name(events):
    updates = [event for event in events if event.hook == "update_controller"]
    assert updates
    for event in updates:
        assert {"curiosity_loss", "diversity_loss", "policy_loss", "value_loss"} <= event.metrics.keys()
    metrics = updates[-1].metrics
    total = metrics["policy_loss"] + 0.5 * metrics["value_loss"] + metrics["curiosity_loss"] + metrics["diversity_loss"]
    assert metrics["loss"] == pytest.approx(float(total), rel=1e-4, abs=1e-5)


def test_the_step_function_is_used_and_the_test_comes_last(events):
    collected = [event for event in events if event.hook == "collect"]
    assert all(0 < event.metrics["bonus"] <= 0.1 for event in collected)
    assert sum(event.steps for event in collected) == sum(event.env_steps for event in collected) == 2_048
    assert [event.hook for event in events].count("evaluate") == 1
    assert events[-1].phase == "test"
    assert events[-1].metrics["return_mean"] > 5


@pytest.mark.parametrize("name", ["curiosity_loss", "diversity_loss"])
def test_losses_reach_the_policy(functional, name):
    from rl_lab.components.controllers.actors import CategoricalActor
    from rl_lab.components.nets import MLP

    class Policy:
        actor = CategoricalActor(MLP(4, 2))

    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(16, 4, generator=generator)
    loss = getattr(functional, name)(
        policy=Policy,
        obs=obs,
        actions=torch.zeros(16, dtype=torch.int64),
        rewards=torch.ones(16),
        values=torch.zeros(16),
        advantages=torch.randn(16, generator=generator),
    )
    assert loss.shape == ()
    loss.backward()
    assert any(parameter.grad.abs().sum() > 0 for parameter in Policy.actor.parameters())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_runs_as_a_program(path, tmp_path):
    command = [sys.executable, str(path), "--steps", "300"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip()
    assert not list(tmp_path.iterdir())
