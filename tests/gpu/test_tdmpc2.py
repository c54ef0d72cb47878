"""TD-MPC2 on a GPU: compiled parts learn what the plain ones do; many environments do not make updates wait."""

from pathlib import Path

import torch

from rl_lab.build import build_experiment
from rl_lab.composition import load_experiment
from rl_lab.core.capture import HookCapture, device_stream
from rl_lab.core.phase import Hook, Phase
from rl_lab.orchestration.loop import advance_schedules, run_hook

PHASE = Phase("p", hooks=(Hook("collect"),), duration_steps=1)
NUM_UPDATES, NUM_LAST = 1000, 100


def prepared(**changes):
    overrides = {"device": "cuda", "buffer.storage": "device", **changes}
    experiment = build_experiment(load_experiment("tdmpc2_swingup", overrides), Path("unwritten"))
    workflow, collector = experiment.workflow, experiment.collector
    for _ in range(4):
        experiment.sources["replay"].add(collector.collect(workflow.act, 64, follow=workflow.follow).trajectory)
    return experiment


def losses_of_many_updates(compile_, captured):
    with device_stream("cuda"):
        experiment = prepared(**{"training.compile": compile_})
        torch.set_float32_matmul_precision("highest")  # small losses are below what TF32 resolves
        capture = HookCapture(experiment.seeds.generators) if captured else None
        advance_schedules(experiment.workflow, experiment.sources, experiment.scheduler)
        events = [
            run_hook(
                Hook("update_agent", 1, source="replay"),
                PHASE,
                experiment.workflow,
                None,
                experiment.sources,
                capture=capture,
            )
            for _ in range(NUM_UPDATES)
        ]
        torch.cuda.synchronize()
        losses = [{key: float(value) for key, value in event.metrics.items()} for event in events]
        experiment.close()
    return losses


def test_compiled_and_captured_updates_learn_what_plain_ones_do():
    plain = losses_of_many_updates("none", captured=False)
    for compile_ in ("none", "parts"):
        given = losses_of_many_updates(compile_, captured=True)
        for key, value in plain[0].items():
            tolerance = (1e-6 if compile_ == "none" else 1e-4) * max(abs(value), 1.0)
            assert abs(given[0][key] - value) <= tolerance, (compile_, key, value, given[0][key])
        for key in (key for key in plain[0] if key.endswith("_loss") and key != "policy_loss"):
            expected, mean = (sum(entry[key] for entry in run[-NUM_LAST:]) / NUM_LAST for run in (plain, given))
            assert abs(mean - expected) <= 0.05 * abs(expected), (compile_, key, expected, mean)


def test_sixty_four_environments_train_without_a_wait_per_update():
    with device_stream("cuda"):
        experiment = prepared(**{"environment.num_envs": 64})
        workflow, sources = experiment.workflow, experiment.sources
        capture = HookCapture(experiment.seeds.generators, deferred=True)
        hook = Hook("update_agent", 8, source="replay")
        for _ in range(2):  # warm-up and recording
            run_hook(hook, PHASE, workflow, experiment.collector, sources, capture=capture)
        before = [parameter.clone() for parameter in workflow.critics.parameters()]
        for _ in range(5):
            collect = Hook("collect", 1, source="replay")
            assert run_hook(collect, PHASE, workflow, experiment.collector, sources, capture=capture).steps == 64
            torch.cuda.set_sync_debug_mode("error")
            try:
                run_hook(hook, PHASE, workflow, experiment.collector, sources, capture=capture)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        ((name, metrics, count),) = capture.drain()
        assert (name, count) == ("update_agent", 56)
        assert all(bool(torch.isfinite(value)) for value in metrics.values())
        assert any(not torch.equal(a, b) for a, b in zip(before, workflow.critics.parameters(), strict=True))
        experiment.close()
