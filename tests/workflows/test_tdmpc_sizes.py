"""The sizes of TD-MPC2 are what their names say, and the large ones build and learn."""

from pathlib import Path

import pytest
import torch
from torch import nn

from rl_lab.build import build_experiment
from rl_lab.composition import compose, load_experiment, resolve
from rl_lab.core.phase import Hook, Phase
from rl_lab.instantiate import instantiate

PHASE = Phase("p", hooks=(Hook("update_agent"),), duration_updates=1)
SIZES = {"tdmpc2_1m": 1.2e6, "tdmpc2": 4.96e6, "tdmpc2_19m": 18e6, "tdmpc2_48m": 47e6, "tdmpc2_317m": 313e6}


def num_parameters(model):
    """Count the parameters for walker-walk (24 observations, 6 actions) without allocating them."""
    plain = resolve(compose(["experiment=tdmpc2_dmc", f"model={model}", "_dims.observation=24", "_dims.action=6"]))
    with torch.device("meta"):
        parts = [
            instantiate(node, name) for group in ("components", "controllers") for name, node in plain[group].items()
        ]
    return sum(parameter.numel() for part in parts if isinstance(part, nn.Module) for parameter in part.parameters())


@pytest.mark.parametrize("model", SIZES)
def test_a_model_is_as_large_as_its_name_says(model):
    counted = num_parameters(model)
    assert counted == pytest.approx(SIZES[model], rel=0.015)
    named = {"tdmpc2": 5.0}.get(model) or float(model.removeprefix("tdmpc2_").removesuffix("m"))
    assert counted == pytest.approx(named * 1e6, rel=0.25)


def update_once(model, device):
    planner = {"num_samples": 4, "num_policy_samples": 1, "num_elites": 2, "num_iterations": 1}
    changes = {f"components.planner.{name}": value for name, value in planner.items()}
    changes |= {"environment.id": "tiny/CartPoleSwingUp", "evaluation.episodes": 1, "name": "sizes", "device": device}
    changes |= {"buffer.capacity": 100, "buffer.batch_size": 2, "model": model}
    experiment = build_experiment(load_experiment("tdmpc2_dmc", changes), Path("unwritten"))
    source, workflow = experiment.sources["replay"], experiment.workflow
    source.add(experiment.collector.collect(workflow.act, 6, follow=workflow.follow).trajectory)
    watched = [
        workflow.dynamics.linears[0].weight,
        workflow.critics.weights[0],
        workflow.policy.network.linears[0].weight,
    ]
    before = [weight.detach().clone() for weight in watched]
    metrics = workflow.update_agent(source.sample(), phase=PHASE)
    metrics = workflow.update_agent(source.sample(), phase=PHASE)  # the critics' output layer starts at zero
    assert all(torch.isfinite(torch.as_tensor(value)) for value in metrics.values())
    assert all(not torch.equal(old, new) for old, new in zip(before, watched, strict=True))
    experiment.close()


def test_48m_builds_and_updates_on_a_cpu():
    update_once("tdmpc2_48m", "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_317m_builds_and_updates_on_a_gpu():
    update_once("tdmpc2_317m", "cuda")
