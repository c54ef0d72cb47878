"""Eager and captured updates agree, replays draw fresh noise, graphs survive what they must. Needs a CUDA device.

`pytest -m gpu tests/gpu`, or `python tests/gpu/test_capture.py` where pytest is not installed.
"""

from pathlib import Path

import numpy as np
import torch

from rl_lab.build import build_experiment
from rl_lab.composition import load_experiment
from rl_lab.core.batch import Batch
from rl_lab.core.capture import HookCapture, device_stream
from rl_lab.core.errors import RunError
from rl_lab.core.phase import Hook, Phase
from rl_lab.orchestration.loop import advance_schedules, run_hook

PHASE = Phase("p", hooks=(Hook("collect"),), duration_steps=1)
SMALL = {
    "tdmpc2_swingup": ("update_agent", {"buffer.storage": "device"}),
    "dqn_cartpole": ("update_controller", {"buffer.storage": "device", "workflow.target_every": 3}),
    "ppo_cartpole": ("update_controller", {"workflow.num_epochs": 2}),
    "sac_pendulum": ("update_agent", {"buffer.storage": "device"}),
    "mbmpc_cartpole": (("update_world_model", "update_controller"), {"buffer.storage": "device"}),
    "pets_swingup": ("update_world_model", {"buffer.storage": "device"}),
    "mcts_gridworld": ("update_controller", {"buffer.storage": "device"}),
    "td3_pendulum": (("update_critic", "update_critic", "update_actor"), {"buffer.storage": "device"}),
}


def prepare(name):
    hook, changes = SMALL[name]
    experiment = build_experiment(load_experiment(name, {"device": "cuda", **changes}), Path("unwritten"))
    collector = experiment.collector
    for _ in range(4):
        trajectory = collector.collect(experiment.workflow.act, 64, follow=experiment.workflow.follow).trajectory
        experiment.sources["replay"].add(trajectory)
    return experiment, hook


def update(experiment, hook, capture, times):
    advance_schedules(experiment.workflow, experiment.sources, experiment.scheduler)
    call = Hook(hook, times, source="replay")
    return run_hook(call, PHASE, experiment.workflow, experiment.collector, experiment.sources, capture=capture)


def weights(experiment):
    parts = experiment.parts().parameters()
    return {
        f"{group}.{name}.{key}": value.clone()
        for group in ("components", "controllers", "workflow_custom")
        for name, state in parts[group].items()
        for key, value in (state.items() if isinstance(state, dict) else [("", torch.as_tensor(state))])
    }


def check_agreement(name):
    results = []
    for captured in (False, True):
        with device_stream("cuda"):
            experiment, hook = prepare(name)
            capture = HookCapture(experiment.seeds.generators) if captured else None
            cycle = (hook,) if isinstance(hook, str) else hook
            metrics = [update(experiment, entry, capture, 1).metrics for _ in range(10) for entry in cycle]
            torch.cuda.synchronize()
            losses = [{key: float(value) for key, value in entry.items()} for entry in metrics]
            results.append((losses, weights(experiment)))
            experiment.close()
    (eager, eager_weights), (replayed, replayed_weights) = results
    for step, (expected, given) in enumerate(zip(eager, replayed, strict=True)):
        assert expected.keys() == given.keys()
        for key, value in expected.items():
            scale = max(abs(value), 1.0)
            assert abs(value - given[key]) <= (1e-5 if step < 4 else 1e-3) * scale, (name, step, key, value, given[key])
    for key, value in eager_weights.items():
        difference = (value.double() - replayed_weights[key].double()).abs().max().item()
        assert difference < 1e-3, (name, key, difference)


def test_tdmpc2_agrees():
    check_agreement("tdmpc2_swingup")


def test_dqn_agrees():
    check_agreement("dqn_cartpole")


def test_ppo_agrees():
    check_agreement("ppo_cartpole")


def test_sac_agrees():
    check_agreement("sac_pendulum")


def test_td3_agrees():
    check_agreement("td3_pendulum")


def test_mbmpc_agrees():
    check_agreement("mbmpc_cartpole")


def test_pets_agrees():
    check_agreement("pets_swingup")


def test_mcts_agrees():
    check_agreement("mcts_gridworld")


def check_decisions_agree(name):
    """The same decisions, eager and captured: a planner must not wait for the host either."""
    actions = []
    for captured in (False, True):
        with device_stream("cuda"):
            experiment, _ = prepare(name)
            workflow, collector = experiment.workflow, experiment.collector
            act = HookCapture(experiment.seeds.generators).act(workflow.act) if captured else workflow.act
            generator = torch.Generator("cuda").manual_seed(0)
            seen, state = (
                torch.from_numpy(collector.observations).to("cuda"),
                workflow.initial_state(collector.num_envs),
            )
            said = []
            for _ in range(8):
                decision = act(seen, state, explore=True, generator=generator)
                state = decision.state
                said.append(decision.actions.float().clone())
            actions.append(torch.stack(said))
            experiment.close()
    assert (actions[0] - actions[1]).abs().max() < 1e-3, name


def test_decisions_of_planners_agree():
    for name in ("mbmpc_cartpole", "pets_swingup", "mcts_gridworld", "sac_pendulum", "td3_pendulum"):
        check_decisions_agree(name)


def test_replays_draw_fresh_noise():
    with device_stream("cuda"):
        experiment, _ = prepare("tdmpc2_swingup")
        act = HookCapture(experiment.seeds.generators).act(experiment.workflow.act)
        generator = experiment.collector.generator
        seen = torch.zeros(1, 5, device="cuda")
        state = experiment.workflow.initial_state(1)
        actions = [act(seen, state, explore=True, generator=generator).actions.item() for _ in range(12)]
        assert len(set(actions)) > 10, actions
        experiment.close()


def test_a_hook_that_waits_for_the_host_is_named():
    with device_stream("cuda"):
        capture = HookCapture(list)

        def waits(values):
            return {"loss": values.sum() * values.sum().item()}, {}

        for _ in range(3):
            capture.run("k", "update_waits", waits, torch.ones(3, device="cuda"))
        said = ""
        try:
            capture.run("k", "update_waits", waits, torch.ones(3, device="cuda"))
        except RunError as error:
            said = str(error)
        assert "update_waits" in said
        assert "item()" in said


def test_device_and_host_replay_give_the_same_batches():
    batches = []
    for storage in ("cpu", "device"):
        changes = {"device": "cuda", "buffer.storage": storage, "buffer.min_size": 10}
        experiment = build_experiment(load_experiment("dqn_cartpole", changes), Path("unwritten"))
        generator = np.random.default_rng(0)
        for _ in range(3):
            seen = generator.normal(size=(51, 1, 4)).astype(np.float32)
            ends = generator.uniform(size=(50, 1)) < 0.1
            batch = Batch(
                observations=torch.from_numpy(seen[:-1]),
                actions=torch.from_numpy(generator.integers(2, size=(50, 1))),
                rewards=torch.ones(50, 1),
                terminated=torch.from_numpy(ends),
                truncated=torch.zeros(50, 1, dtype=torch.bool),
                next_observations=torch.from_numpy(seen[1:]),
            )
            experiment.sources["replay"].add(batch)
            experiment.sources["replay"].close_open()
        batches.append(experiment.sources["replay"].sample())
        experiment.close()
    for name in ("observations", "actions", "rewards", "terminated", "next_observations"):
        assert torch.equal(batches[0][name], batches[1][name]), name


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(name, "passed", flush=True)
