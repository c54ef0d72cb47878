"""Dreamer on a GPU: eager, captured and compiled updates agree, graphs write latents back. Needs a CUDA device.

`pytest -m gpu tests/gpu`, or `python tests/gpu/test_dreamer.py` where pytest is not installed.
"""

from pathlib import Path

import torch

from rl_lab.build import build_experiment
from rl_lab.composition import load_experiment
from rl_lab.core.capture import HookCapture, device_stream
from rl_lab.core.phase import Hook, Phase
from rl_lab.orchestration.loop import advance_schedules, run_hook

PHASE = Phase("p", hooks=(Hook("collect"),), duration_steps=1)
LAPROP = {"optimizers.model.learning_rate.start": 1e-4, "optimizers.model.learning_rate.end": 1e-4}
SMALL = {
    "dreamer_cartpole": LAPROP,
    "dreamerv3_gridworld": LAPROP,
    "dreamerv2_gridworld": {},
    "dreamerv1_gridworld": {},
    "dreamerv3_dmc_2023": {
        "experiment.name": "small",
        "environment": "pendulum",
        "environment.num_envs": 4,
        "_dims.deter": 64,
        "_dims.units": 32,
        "_dims.observation_units": 32,
        "_dims.variables": 8,
        "_dims.classes": 8,
        "_dims.stoch": 64,
        "buffer.window": 17,
        "training.precision": "float32",
    },
}


def prepare(name, **changes):
    own = {"device": "cuda", "buffer.storage": "device", **SMALL[name], **changes}
    experiment = build_experiment(load_experiment(name, own), Path("unwritten"))
    workflow, collector = experiment.workflow, experiment.collector
    for _ in range(4):
        experiment.sources["replay"].add(collector.collect(workflow.act, 80, follow=workflow.follow).trajectory)
    return experiment


def update(experiment, capture, times=1):
    advance_schedules(experiment.workflow, experiment.sources, experiment.scheduler)
    hook = Hook("update_agent", times, source="replay")
    event = run_hook(hook, PHASE, experiment.workflow, experiment.collector, experiment.sources, capture=capture)
    return {key: float(value) for key, value in event.metrics.items()}


def run(name, times, captured, halves=None, **changes):
    torch.backends.cudnn.deterministic = True  # otherwise sums of convolutions differ from run to run, and so do draws
    torch.use_deterministic_algorithms(True, warn_only=True)
    with device_stream("cuda"):
        experiment = prepare(name, **changes)
        experiment.workflow._at_once = halves or experiment.workflow._at_once
        capture = HookCapture(experiment.seeds.generators) if captured else None
        metrics = [update(experiment, capture) for _ in range(times)]
        torch.cuda.synchronize()
        ring = experiment.sources["replay"].ring
        latents = {key: column.float().cpu() for key, column in ring.extras.items()}
        experiment.close()
    return metrics, latents


def compare(eager, other, first, later):
    for step, (expected, given) in enumerate(zip(eager, other, strict=True)):
        assert expected.keys() == given.keys()
        for key, value in expected.items():
            tolerance = (first if step < 3 else later) * max(abs(value), 1.0)
            assert abs(value - given[key]) <= tolerance, (step, key, value, given[key])


def check_capture(name):
    eager, latents = run(name, 8, captured=False)
    replayed, replayed_latents = run(name, 8, captured=True)
    compare(eager, replayed, first=1e-4, later=0.05)
    assert latents.keys() == replayed_latents.keys()
    for key, column in latents.items():
        assert column.abs().sum() > 0
        same = torch.isclose(column, replayed_latents[key], rtol=0.05, atol=0.05).float().mean().item()
        assert same > 0.98, (key, same)


def test_v3_on_vectors_agrees():
    check_capture("dreamer_cartpole")


def test_v3_on_pixels_agrees():
    check_capture("dreamerv3_gridworld")


def test_v3_of_2023_agrees():
    check_capture("dreamerv3_dmc_2023")


def test_v2_agrees():
    check_capture("dreamerv2_gridworld")


def test_v1_agrees():
    check_capture("dreamerv1_gridworld")


def test_both_halves_at_once_agree_with_one_after_the_other():
    for name in ("dreamer_cartpole", "dreamerv3_gridworld"):
        for captured in (False, True):
            at_once, latents = run(name, 8, captured)
            in_turn, latents_in_turn = run(name, 8, captured, halves=lambda first, second: (first(), second()))
            compare(in_turn, at_once, first=1e-4, later=0.05)
            same = torch.isclose(latents["deter"], latents_in_turn["deter"], rtol=0.05, atol=0.05).float().mean().item()
            assert same > 0.98, (name, captured, same)


def test_compiled_parts_agree():
    for name in ("dreamer_cartpole", "dreamerv1_gridworld"):
        eager, _ = run(name, 3, captured=True)
        compiled, _ = run(name, 3, captured=True, **{"training.compile": "parts"})
        compare(eager[:1], compiled[:1], first=1e-3, later=1e-3)
        compare(eager, compiled, first=0.05, later=0.05)


def test_half_precision_is_near():
    full, _ = run("dreamerv3_gridworld", 1, captured=False)
    half, _ = run("dreamerv3_gridworld", 1, captured=False, **{"training.precision": "bfloat16"})
    for key in ("reconstruction_loss", "continue_loss", "reward_loss", "dynamics_loss"):
        assert abs(full[0][key] - half[0][key]) < 0.05 * abs(full[0][key]) + 0.05, (key, full[0][key], half[0][key])


def test_long_runs_agree_on_average():
    means = []
    for captured in (False, True):
        metrics, _ = run("dreamer_cartpole", 150, captured=captured)
        last = metrics[-50:]
        means.append({key: sum(entry[key] for entry in last) / len(last) for key in ("reconstruction_loss", "loss")})
    for key, value in means[0].items():
        assert abs(value - means[1][key]) < 0.1 * abs(value) + 0.02, (key, means)


def test_replays_draw_fresh_noise():
    with device_stream("cuda"):
        experiment = prepare("dreamer_cartpole")
        act = HookCapture(experiment.seeds.generators).act(experiment.workflow.act)
        seen = torch.zeros(4, 4, device="cuda")
        state = experiment.workflow.initial_state(4)
        stored = [
            tuple(act(seen, state, generator=experiment.collector.generator).extras["stoch"].flatten().tolist())
            for _ in range(10)
        ]
        assert len(set(stored)) > 5
        experiment.close()


def test_recurrent_acting_agrees():
    answers = []
    for captured in (False, True):
        with device_stream("cuda"):
            experiment = prepare("dreamer_cartpole")
            workflow = experiment.workflow
            act = HookCapture(experiment.seeds.generators).act(workflow.act) if captured else workflow.act
            generator = torch.Generator("cuda").manual_seed(3)
            state = workflow.initial_state(4)
            for step in range(8):
                seen = torch.full((4, 4), 0.1 * step, device="cuda")
                said = act(seen, state, explore=False, generator=generator)
                state = {key: leaf.clone() for key, leaf in said.state.items()}
            answers.append(state["deter"].cpu())
            experiment.close()
    torch.testing.assert_close(*answers, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(name, "passed", flush=True)
