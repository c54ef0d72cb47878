"""What TD-MPC2 can be given beside its defaults: eager = captured for pictures, codes, TD(lambda), bfloat16.

`pytest -m gpu tests/gpu`, or `python tests/gpu/test_tdmpc.py` where pytest is not installed.
"""

from pathlib import Path

import torch

from rl_lab.build import build_experiment
from rl_lab.composition import load_experiment
from rl_lab.core.capture import HookCapture, device_stream
from tests.gpu.test_capture import update, weights

VARIANTS = {
    "pictures and discrete actions": ("tdmpc2_pixels", {}),
    "TD(lambda)": ("tdmpc2_swingup", {"workflow.td_lambda": 0.9}),
    "bfloat16": ("tdmpc2_swingup", {"training.precision": "bfloat16"}),
    "scaled gradients": ("tdmpc2_swingup", {"optimizers.model.gradient_scales": {"encoder": 0.5}}),
}


def prepare(variant):
    name, changes = VARIANTS[variant]
    changes = {"device": "cuda", "buffer.storage": "device", **changes}
    experiment = build_experiment(load_experiment(name, changes), Path("unwritten"))
    workflow, collector = experiment.workflow, experiment.collector
    for _ in range(4):
        experiment.sources["replay"].add(collector.collect(workflow.act, 64, follow=workflow.follow).trajectory)
    return experiment


def check_updates(variant):
    results = []
    for captured in (False, True):
        with device_stream("cuda"):
            experiment = prepare(variant)
            capture = HookCapture(experiment.seeds.generators) if captured else None
            metrics = [update(experiment, "update_agent", capture, 1).metrics for _ in range(10)]
            torch.cuda.synchronize()
            losses = [{key: float(value) for key, value in entry.items()} for entry in metrics]
            results.append((losses, weights(experiment)))
            experiment.close()
    (eager, eager_weights), (replayed, replayed_weights) = results
    for step, (expected, given) in enumerate(zip(eager, replayed, strict=True)):
        assert expected.keys() == given.keys()
        for key, value in expected.items():
            tolerance = (1e-4 if step < 4 else 1e-2) * max(abs(value), 1.0)
            assert abs(value - given[key]) <= tolerance, (variant, step, key, value, given[key])
    for key, value in eager_weights.items():
        difference = (value.double() - replayed_weights[key].double()).abs().max().item()
        assert difference < 5e-3, (variant, key, difference)


def check_decisions(variant):
    """Eight decisions in a row: three are eager, then the graph goes on with the same stream of chance."""
    answers = []
    for captured in (False, True):
        with device_stream("cuda"):
            experiment = prepare(variant)
            act = experiment.workflow.act
            if captured:
                act = HookCapture(experiment.seeds.generators).act(act)
            collector, generator = experiment.collector, torch.Generator("cuda").manual_seed(1)
            seen = torch.from_numpy(collector.observations).cuda()
            state, said = experiment.workflow.initial_state(collector.num_envs), []
            for _ in range(8):
                answer = act(seen, state, explore=True, generator=generator)
                state = answer.state
                said.append((answer.actions.clone(), state["mean"].clone()))
            answers.append(said)
            experiment.close()
    for step, ((actions, mean), (others, other_mean)) in enumerate(zip(*answers, strict=True)):
        assert (actions.float() - others.float()).abs().max() < 1e-2, (variant, step)
        assert (mean - other_mean).abs().max() < 1e-2, (variant, step)
    assert len({mean.cpu().numpy().tobytes() for _, mean in answers[1]}) == 8  # every replay draws anew


def test_updates_agree():
    for variant in VARIANTS:
        check_updates(variant)


def test_decisions_agree():
    for variant in ("pictures and discrete actions", "bfloat16"):
        check_decisions(variant)


def test_replays_shift_pictures_anew():
    with device_stream("cuda"):
        experiment = prepare("pictures and discrete actions")
        shift = experiment.components["augmentation"]
        generator = torch.Generator("cuda").manual_seed(0)
        images = torch.randint(255, (8, 3, 32, 32), dtype=torch.uint8, device="cuda")
        capture = HookCapture(lambda: [generator])
        moved = []
        for _ in range(8):
            capture.run("k", "shift", lambda seen: ({"sum": shift.sample(seen, generator)[..., 0].sum()}, {}), images)
            ((_, metrics, _),) = capture.drain()
            moved.append(float(metrics["sum"]))
        assert len(set(moved)) > 5, moved
        experiment.close()


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(name, "passed", flush=True)
