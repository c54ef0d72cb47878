"""What a GPU records must not ask the host: no update and no decision reads a tensor's value."""

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_lab.build import build_experiment
from rl_lab.composition import load_experiment
from rl_lab.core.capture import HookCapture
from rl_lab.core.phase import Hook, Phase
from rl_lab.orchestration.loop import advance_schedules, run_hook

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.is_nonzero.default}
PHASE = Phase("p", hooks=(Hook("collect"),), duration_steps=1)
HOOKS = {
    "tdmpc2_swingup": ("update_agent",),
    "dqn_cartpole": ("update_controller",),
    "ppo_cartpole": ("update_controller",),
    "sac_pendulum": ("update_agent",),
    "td3_pendulum": ("update_critic", "update_actor"),
    "mbmpc_cartpole": ("update_world_model", "update_controller"),
    "pets_swingup": ("update_world_model",),
    "dreamer_cartpole": ("update_agent",),
    "dreamerv1_gridworld": ("update_agent",),
    "dreamerv2_gridworld": ("update_agent",),
}


class NoHostReads(TorchDispatchMode):
    """Fails at whatever would make the host wait for a device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        by_mask = function is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        if function in READS or by_mask:
            raise AssertionError(f"{function} reads a tensor's value on the host")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", HOOKS)
def test_updates_and_decisions_read_nothing_on_the_host(name):
    small = {"buffer.storage": "device", "buffer.batch_size": 4} if not name.startswith("ppo") else {}
    experiment = build_experiment(load_experiment(name, {"device": "cpu", **small}), Path("unwritten"))
    workflow, collector, sources = experiment.workflow, experiment.collector, experiment.sources
    sources["replay"].add(collector.collect(workflow.act, 80, follow=workflow.follow).trajectory)
    advance_schedules(workflow, sources, experiment.scheduler)
    capture = HookCapture(experiment.seeds.generators, deferred=True)
    for hook in HOOKS[name]:
        call = Hook(hook, 1, source="replay")
        run_hook(call, PHASE, workflow, collector, sources, capture=capture)  # the first one makes moments
        with NoHostReads():
            run_hook(call, PHASE, workflow, collector, sources, capture=capture)
    seen = torch.from_numpy(collector.observations)
    with NoHostReads():
        workflow.act(seen, workflow.initial_state(collector.num_envs), generator=collector.generator)
    experiment.close()


def test_a_read_is_found():
    with pytest.raises(AssertionError, match="reads a tensor's value"), NoHostReads():
        torch._foreach_add_([torch.zeros(())], torch.ones(()))
