"""Wrong input gets one screen: the key, the value, the nearest valid name and what to do; exit code 2, nothing left."""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import nn

from rl_lab.build import build_experiment
from rl_lab.cli import main
from rl_lab.composition import compose, load_experiment
from rl_lab.core.errors import UserError
from rl_lab.core.optim import Optimizer
from rl_lab.core.workflow import Act, Workflow
from rl_lab.data.storage import HostStorage
from rl_lab.instantiate import instantiate
from rl_lab.runs import run_training
from rl_lab.targets import resolve_target

MAX_LINES = 20  # of one screen


def phases(text: str) -> str:
    return f"training.phases=[{text}]"


CASES = {
    # what is wrong: (arguments of `rl-lab train`, key, further texts that the answer must have)
    "unknown key": (["dqn_cartpole", "training.total_timestep=5"], "training.total_timestep", ["total_timesteps"]),
    "unknown section": (["dqn_cartpole", "trainig.total_timesteps=5"], "trainig", ["nearest:  training"]),
    "unknown root key": (["dqn_cartpole", "worklow=dqn"], "worklow", ["nearest:  workflow"]),
    "last part of a key": (["dqn_cartpole", "seed=3"], "seed", ["write experiment.seed=..."]),
    "last part of several keys": (
        ["sac_pendulum", "lr=1e-2"],
        "lr",
        ["optimizers.actor.optimizer.lr=... or optimizers.critic.optimizer.lr=..."],
    ),
    "last part of a key beside another mistake": (["dqn_cartpole", "seed=3", "worklow=x"], "seed", ["experiment"]),
    "setting of a phase outside its settings": (
        ["dqn_cartpole", phases("{name: a, duration_steps: 5, policy: random, workflow_hooks: [collect]}")],
        "training.phases[0].policy",
        ["goes under settings, such as settings: {policy: random}"],
    ),
    "unknown key of a part": (
        ["dqn_cartpole", "components.q_network.hiden=[3]"],
        "components.q_network.hiden",
        ["hidden"],
    ),
    "unknown key of the workflow": (["ppo_cartpole", "workflow.gama=0.9"], "workflow.gama", ["nearest:  gamma"]),
    "unknown key of a buffer": (["dqn_cartpole", "buffer.capacty=9"], "buffer.capacty", ["nearest:  capacity"]),
    "unknown key of a phase": (
        ["dqn_cartpole", phases("{name: a, duration_step: 5, workflow_hooks: [collect]}")],
        "training.phases[0].duration_step",
        ["nearest:  duration_steps"],
    ),
    "unknown key of a hook": (
        ["dqn_cartpole", phases("{name: a, duration_cycles: 5, workflow_hooks: [{update_controller: {ration: 1}}]}")],
        "training.phases[0].workflow_hooks[0].update_controller.ration",
        ["nearest:  ratio"],
    ),
    "wrong type: number": (["dqn_cartpole", "training.total_timesteps=many"], "training.total_timesteps", ["'many'"]),
    "wrong type: list": (["dqn_cartpole", "components.q_network.hidden=64"], "components.q_network.hidden", ["a list"]),
    "wrong type: inside a list": (
        ["dqn_cartpole", "components.q_network.hidden=[64,wide]"],
        "components.q_network.hidden[1]",
        ["'wide'"],
    ),
    "wrong type: mapping": (["dqn_cartpole", "evaluation=5"], "evaluation", ["a mapping"]),
    "wrong type: truth": (["dqn_cartpole", "workflow.double=maybe"], "workflow.double", ["true or false"]),
    "wrong type: text": (["dqn_cartpole", "experiment.name=5"], "experiment.name", ["a text"]),
    "half a step": (["dqn_cartpole", "training.total_timesteps=10.5"], "training.total_timesteps", ["whole number"]),
    "not a number": (["dqn_cartpole", "workflow.gamma=nan"], "workflow.gamma", ["finite"]),
    "out of range": (["dqn_cartpole", "workflow.gamma=1.5"], "workflow.gamma", ["from 0 to 1"]),
    "negative": (["dqn_cartpole", "environment.num_envs=-1"], "environment.num_envs", ["-1"]),
    "zero": (["ppo_cartpole", "workflow.num_epochs=0"], "workflow.num_epochs", ["at least 1"]),
    "negative seed": (["ppo_cartpole", "experiment.seed=-1"], "experiment.seed", ["from 0"]),
    "a name that is no folder": (["ppo_cartpole", "experiment.name=../x"], "experiment.name", ["folder"]),
    "a name made of an id": (
        ["sac_mujoco", "environment.id=tiny/Pendulum"],
        "experiment.name",
        ["experiment.name=sac_tiny-Pendulum"],
    ),
    "unknown experiment": (["experiment=dqn_cartpol"], "experiment", ["nearest:  dqn_cartpole"]),
    "unknown experiment, short": (["dqn_cartpol"], "experiment", ["nearest:  dqn_cartpole"]),
    "no experiment": (["environment=cartpole"], "environment", ["experiment=NAME"]),
    "no experiment, composed by hand": (["+environment=cartpole"], "experiment", ["dqn_cartpole", "experiment=NAME"]),
    "unknown workflow": (["ppo_cartpole", "workflow=pppo"], "workflow", ["nearest:  ppo"]),
    "unknown workflow class": (
        ["ppo_cartpole", "workflow._target_=rl_lab.workflows.ppo.PPOWorkflw"],
        "workflow._target_",
        ["nearest:  PPOWorkflow"],
    ),
    "unknown workflow file": (
        ["ppo_cartpole", "workflow._target_=rl_lab.workflows.pppo.PPOWorkflow"],
        "workflow._target_",
        ["nearest:  rl_lab.workflows.ppo"],
    ),
    "a workflow that is none": (
        ["ppo_cartpole", "workflow._target_=rl_lab.components.nets.MLP"],
        "workflow._target_",
        ["a subclass of Workflow"],
    ),
    "unknown environment group": (["dqn_cartpole", "environment=cartpol"], "environment", ["nearest:  cartpole"]),
    "unknown part": (["dqn_cartpole", "components/q_network=duelling"], "components/q_network", ["nearest:  dueling"]),
    "unknown part, as the defaults say it": (
        ["dqn_cartpole", "components/q_network@components.q_network=duelling"],
        "components/q_network",
        ["nearest:  dueling"],
    ),
    "unknown hook": (
        ["dqn_cartpole", phases("{name: a, duration_cycles: 2, workflow_hooks: [collect, update_controler]}")],
        "training.phases[0].workflow_hooks[1]",
        ["nearest:  update_controller"],
    ),
    "unknown verb": (
        ["dqn_cartpole", phases("{name: a, duration_cycles: 2, workflow_hooks: [colect]}")],
        "training.phases[0].workflow_hooks[0]",
        ["nearest:  collect", "update_"],
    ),
    "a hook that is no hook": (
        ["dqn_cartpole", phases("{name: a, duration_cycles: 2, workflow_hooks: [[collect]]}")],
        "training.phases[0].workflow_hooks[0]",
        ["{collect: 128}"],
    ),
    "no hooks": (
        ["dqn_cartpole", phases("{name: a, duration_cycles: 2, workflow_hooks: []}")],
        "training.phases[0]",
        ["workflow_hooks is empty"],
    ),
    "no phases": (["dqn_cartpole", "training.phases=[]"], "training.phases", ["at least one"]),
    "one name twice": (
        ["dqn_cartpole", phases(",".join(["{name: a, duration_cycles: 2, workflow_hooks: [collect]}"] * 2))],
        "training.phases[1].name",
        ["'a'"],
    ),
    "unknown phase type": (
        ["dqn_cartpole", phases("{name: a, type: onlin, duration_cycles: 2, workflow_hooks: [collect]}")],
        "training.phases[0].type",
        ["nearest:  online"],
    ),
    "unknown buffer": (
        ["dqn_cartpole", phases("{name: a, buffer: repay, duration_cycles: 2, workflow_hooks: [collect]}")],
        "training.phases[0].buffer",
        ["nearest:  replay"],
    ),
    "unknown source": (
        [
            "dqn_cartpole",
            phases("{name: a, duration_cycles: 2, workflow_hooks: [{update_controller: {source: rply}}]}"),
        ],
        "training.phases[0].workflow_hooks[0].source",
        ["nearest:  replay"],
    ),
    "unknown buffer group": (["dqn_cartpole", "buffer=replya"], "buffer", ["nearest:  replay"]),
    "a rollout wanted, a replay given": (
        ["ppo_cartpole", "buffer=replay"],
        "training.phases[0].buffer",
        ["buffer=stream"],
    ),
    "unknown setting": (
        ["dqn_cartpole", phases("{name: a, duration_cycles: 2, settings: {polcy: random}, workflow_hooks: [collect]}")],
        "training.phases[0].settings.polcy",
        ["nearest:  policy"],
    ),
    "unknown value of a setting": (
        ["dqn_cartpole", phases("{name: a, duration_cycles: 2, settings: {policy: rndom}, workflow_hooks: [collect]}")],
        "training.phases[0].settings.policy",
        ["nearest:  random"],
    ),
    "two durations": (
        ["dqn_cartpole", phases("{name: a, duration_steps: 5, duration_cycles: 3, workflow_hooks: [collect]}")],
        "training.phases[0]",
        ["duration_steps", "duration_cycles", "keep one"],
    ),
    "no duration": (
        ["dqn_cartpole", phases("{name: a, workflow_hooks: [collect]}")],
        "training.phases[0]",
        ["duration_steps", "duration_updates", "duration_cycles"],
    ),
    "collect offline": (
        ["dqn_cartpole", phases("{name: a, type: offline, duration_cycles: 3, workflow_hooks: [collect]}")],
        "training.phases[0]",
        ["'collect' does not belong"],
    ),
    "times and ratio": (
        ["dqn_cartpole", phases("{name: a, duration_cycles: 3, workflow_hooks: [{update_x: {times: 2, ratio: 1}}]}")],
        "training.phases[0].workflow_hooks[0].update_x",
        ["not both"],
    ),
    "missing component": (
        ["dqn_cartpole", "~components.q_network"],
        "components.q_network",
        ["DQNWorkflow needs q_network"],
    ),
    "missing controller": (
        ["ppo_cartpole", "~controllers.critic"],
        "components.critic",
        ["PPOWorkflow needs actor, critic"],
    ),
    "misnamed component": (
        ["dqn_cartpole", "~components.q_network", "+components.q_netwrk={_target_: rl_lab.components.nets.MLP}"],
        "components.q_network",
        ["nearest:  q_netwrk"],
    ),
    "unused component": (
        ["ppo_cartpole", "+components/encoder=mlp", "_dims.latent=4"],
        "components.encoder",
        ["PPOWorkflow does not use 'encoder', only actor, critic, optimizer"],
    ),
    "unused controller": (
        ["ppo_cartpole", "+controller@controllers.actr=random_policy"],
        "controllers.actr",
        ["nearest:  actor"],
    ),
    "two optimisers where one fits": (
        ["ppo_cartpole", "+optimizers.b={trains: [critic], optimizer: {_target_: torch.optim.Adam}}"],
        "optimizers",
        ["single optimiser", "['agent', 'b']"],
    ),
    "no optimiser": (["ppo_cartpole", "~optimizers.agent"], "optimizers.optimizer", ["PPOWorkflow needs"]),
    "parameter in no optimiser": (
        ["ppo_cartpole", "optimizers.agent.trains=[actor]"],
        "optimizers",
        ["'critic'", "never learn"],
    ),
    "an optimiser of nothing": (
        ["ppo_cartpole", "optimizers.agent.trains=[]"],
        "optimizers.agent.trains",
        ["nothing to train"],
    ),
    "an optimiser of something unknown": (
        ["ppo_cartpole", "optimizers.agent.trains=[actor,critc]"],
        "optimizers.agent.trains[1]",
        ["nearest:  critic"],
    ),
    "an optimiser that is none": (
        ["ppo_cartpole", "optimizers.agent.optimizer._target_=torch.nn.Linear", "~optimizers.agent.optimizer.eps"],
        "optimizers.agent.optimizer._target_",
        ["torch.optim.Adam"],
    ),
    "an optimiser that needs a closure": (
        ["dqn_cartpole", "optimizers.agent.optimizer._target_=torch.optim.LBFGS"],
        "optimizers.agent.optimizer",
        ["closure", "torch.optim.Adam"],
    ),
    "infinite learning rate": (
        ["dqn_cartpole", "optimizers.agent.optimizer.eps=inf"],
        "optimizers.agent.optimizer.eps",
        ["finite"],
    ),
    "more than a machine counts": (["dqn_cartpole", "workflow.target_every=1e30"], "workflow.target_every", ["finite"]),
    "negative learning rate": (
        ["sac_pendulum", "optimizers.actor.optimizer.lr=-1"],
        "optimizers.actor.optimizer",
        ["-1"],
    ),
    "unknown argument of an optimiser": (
        ["dqn_cartpole", "optimizers.agent.optimizer.learning_rate=0.1"],
        "optimizers.agent.optimizer.learning_rate",
        ["Adam has no argument"],
    ),
    "a rate of a part that is not trained here": (
        ["ppo_cartpole", "optimizers.agent.rates={acto: 0.5}"],
        "optimizers.agent.rates.acto",
        ["nearest:  actor"],
    ),
    "a gradient scale of nothing": (
        ["ppo_cartpole", "optimizers.agent.gradient_scales={critic: 0}"],
        "optimizers.agent.gradient_scales.critic",
        ["above 0"],
    ),
    "bad environment id": (
        ["dqn_cartpole", "environment.id=tiny/CartPol"],
        "environment.id",
        ["nearest:  tiny/CartPole"],
    ),
    "bad environment id of Gymnasium": (
        ["dqn_cartpole", "environment.id=CartPole-v7"],
        "environment.id",
        ["CartPole-v1"],
    ),
    "an id that imports a module": (["dqn_cartpole", "environment.id=os:system"], "environment.id", ["--allow os"]),
    "missing extra": (
        ["dqn_cartpole", "environment.id=dm_control/cartpole-balance-v0"],
        "environment.id",
        ["pip install"],
    ),
    "unknown setting of an environment": (
        ["dqn_cartpole", "environment=gridworld", "environment.kwargs.siez=9"],
        "environment.kwargs.siez",
        ["nearest:  size"],
    ),
    "whole windows for a recurrent model": (
        ["dreamer_cartpole", "buffer.mode=whole", "buffer.online=false"],
        "buffer.mode",
        ["running windows of at least 3", "set it to running"],
    ),
    "a replay without running windows": (
        ["dreamer_cartpole", "buffer=prioritized", "~buffer.online"],
        "buffer.mode",
        [],
    ),
    "a window without a step to learn from": (
        ["dreamer_cartpole", "buffer.window=2"],
        "buffer.window",
        ["at least 3 rows"],
    ),
    "no windows": (["tdmpc2_swingup", "buffer.window=null"], "buffer.window", ["whole windows"]),
    "min_size above capacity": (["dqn_cartpole", "buffer.min_size=200000"], "buffer.min_size", ["capacity is 100000"]),
    "a window longer than the ring": (
        ["dqn_cartpole", "buffer.capacity=10", "buffer.min_size=1", "buffer.window=50"],
        "buffer.window",
        ["50"],
    ),
    "an argument that the lab fills in": (["dqn_cartpole", "buffer.num_envs=3"], "buffer.num_envs", ["remove it"]),
    "a discrete actor, real actions": (
        ["ppo_cartpole", "environment=pendulum"],
        "controllers",
        ["real numbers", "gaussian"],
    ),
    "a continuous actor, discrete actions": (
        ["ppo_cartpole", "model=ppo_continuous"],
        "controllers",
        ["indices", "categorical"],
    ),
    "too many actions": (["ppo_cartpole", "controllers.actor.network.outputs=5"], "controllers", ["has only 2"]),
    "a critic with several values": (
        ["ppo_cartpole", "controllers.critic.network.outputs=3"],
        "controllers",
        ["instead of one"],
    ),
    "a critic of something else": (
        ["ppo_cartpole", "controllers.critic.network.inputs=7"],
        "controllers",
        ["_dims.observation"],
    ),
    "vectors wanted, images shown": (
        ["dqn_cartpole", "environment=gridworld"],
        "components.q_network.inputs",
        ["conv"],
    ),
    "images wanted, vectors shown": (
        ["dqn_cartpole", "components/q_network=conv"],
        "components.q_network.inputs",
        ["mlp"],
    ),
    "wrong dims": (["dqn_cartpole", "_dims.observation=5"], "_dims.observation", ["has observation 4, not 5"]),
    "an unknown size": (["dreamer_cartpole", "_dims.deterr=8"], "_dims.deterr", ["nearest:  deter"]),
    "an unknown size, with a plus": (["dreamer_cartpole", "+_dims.deterr=8"], "_dims.deterr", ["nearest:  deter"]),
    "a mapping with an unknown size": (["dreamer_cartpole", "+_dims={deterr: 8}"], "_dims.deterr", ["nearest:  deter"]),
    "a size of another model": (["dreamer_cartpole", "_dims.head_units=8"], "_dims.head_units", ["nearest:  units"]),
    "almost a size": (["dreamerv2_gridworld", "_dims.head_unit=8"], "_dims.head_unit", ["nearest:  head_units"]),
    "dims that are none": (["dqn_cartpole", "_dims=5"], "_dims", ["a mapping"]),
    "target outside the allowed packages": (
        ["dqn_cartpole", "components.q_network._target_=os.system"],
        "components.q_network._target_",
        ["--allow"],
    ),
    "target behind an allowed path": (
        ["dqn_cartpole", "components.q_network._target_=torch.nn.functional.torch.load"],
        "components.q_network._target_",
        ["torch.nn.functional.torch"],
    ),
    "target imported by an allowed module": (
        ["dqn_cartpole", "components.q_network._target_=rl_lab.data.collector.Callable"],
        "components.q_network._target_",
        ["may not be used"],
    ),
    "unknown activation": (
        ["dqn_cartpole", "components.q_network.activation=rellu"],
        "components.q_network.activation",
        ["nearest:  relu"],
    ),
    "no network": (["dqn_cartpole", "components.q_network=null"], "components.q_network", ["_target_"]),
    "unknown schedule": (
        ["dqn_cartpole", "workflow.epsilon._target_=rl_lab.core.schedules.Liner"],
        "workflow.epsilon._target_",
        ["nearest:  Linear"],
    ),
    "unknown counter of a schedule": (
        ["dqn_cartpole", "workflow.epsilon.of=update"],
        "workflow.epsilon.of",
        ["nearest:  updates"],
    ),
    "unknown device": (["dqn_cartpole", "experiment.device=gpu"], "experiment.device", ["auto"]),
    "a card that is not there": (["dqn_cartpole", "experiment.device=cuda:99"], "experiment.device", ["auto"]),
    "an interpolation to nothing": (
        ["dqn_cartpole", "workflow.gamma=${algorithm.gama}"],
        "workflow.gamma",
        ["algorithm.gama"],
    ),
    "an interpolation in a circle": (
        ["dqn_cartpole", "algorithm.a=${algorithm.b}", "algorithm.b=${algorithm.a}"],
        "algorithm.a",
        ["Recursive"],
    ),
    "a sum of words": (["dqn_cartpole", "workflow.gamma=${add:1,x}"], "workflow.gamma", ["${"]),
    "several values": (["dqn_cartpole", "experiment.seed=1,2"], "experiment.seed", ["--seeds"]),
    "half a list": (["dqn_cartpole", "components.q_network.hidden=[1,"], "components.q_network.hidden", ["quotes"]),
    "an entry that a list does not have": (
        ["dqn_cartpole", "training.phases[0].workflow_hooks[7].collect=3"],
        "training.phases[0].workflow_hooks[7]",
        ["count from 0", "--package 'training.phases[0].workflow_hooks'"],
    ),
    "an entry of a list by a word": (
        ["dqn_cartpole", "training.phases.first.name=x"],
        "training.phases[first]",
        ["count from 0", "--package 'training.phases'"],
    ),
    "an entry of a list by a word, whole": (["dqn_cartpole", "training.phases.first=3"], "training.phases[first]", []),
    "an entry of a list taken away": (
        ["dqn_cartpole", "~training.phases[0]"],
        "training.phases.0",
        ["training.phases=[...]"],
    ),
    "half an override": (["dqn_cartpole", "=3"], "command line", ["key=value"]),
    "too many environments": (["dqn_cartpole", "environment.num_envs=1e9"], "environment.num_envs", ["100,000"]),
    "too much memory": (["dqn_cartpole", "components.q_network.hidden=[1e15]"], "components.q_network", ["MLP"]),
    "too large a buffer": (
        ["dqn_cartpole", "buffer.capacity=1e18"],
        "buffer.capacity",
        ["5,000,000,000,000,000,005 bytes", "storage: disk"],
    ),
    "a buffer on no disk": (
        ["dqn_cartpole", "buffer.storage=disk", "buffer.folder=/nowhere/x"],
        "buffer.folder",
        ["cannot be written", "'/nowhere/x'"],
    ),
    "images that cannot be halved": (
        ["dreamerv3_gridworld", "environment.resize=[18,18]"],
        "components.rssm.encoder.image.multipliers",
        ["2 levels", "multiples of 4 pixels, not [3, 18, 18]", "environment.resize"],
    ),
    "images that are too small": (
        ["dreamerv3_gridworld", "environment.resize=[2,2]"],
        "components.rssm.encoder.image.multipliers",
        ["multiples of 4 pixels, not [3, 2, 2]"],
    ),
    "too long a collection": (
        ["dqn_cartpole", phases("{name: a, duration_cycles: 2, workflow_hooks: [{collect: 1e12}]}")],
        "training.phases[0].workflow_hooks[0].collect",
        ["at most"],
    ),
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def answer(words: list[str], capsys) -> str:
    """Give a command that is wrong; return what it says, which is one screen."""
    capsys.readouterr()
    code = main(["train", *words])
    said = capsys.readouterr()
    assert code == 2, said
    assert said.out == ""
    assert "Traceback" not in said.err
    assert said.err.startswith("error: ")
    assert len(said.err.splitlines()) <= MAX_LINES
    return said.err


@pytest.mark.parametrize(("words", "key", "texts"), CASES.values(), ids=CASES)
def test_a_mistake_is_told_on_one_screen(words, key, texts, capsys, elsewhere):
    text = answer(words, capsys)
    assert f"\n  key:      {key}\n" in text
    assert "\n  remedy:   " in text
    for expected in texts:
        assert expected in text
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("name", ["unknown hook", "wrong dims", "out of range", "unused component"])
def test_a_dry_run_and_python_say_the_same(name, capsys):
    words, _, _ = CASES[name]
    run = answer(words, capsys)
    assert answer([*words, "--dry-run"], capsys) == run
    with pytest.raises(UserError) as caught:
        run_training(load_experiment(words[0], words[1:]), quiet=True)
    assert run == f"error: {caught.value}\n"


def test_a_replay_that_memory_has_no_room_for(capsys, elsewhere, monkeypatch):
    given = HostStorage._zeros

    def little(self, shape, kind):  # some systems promise any amount, and end the process later
        if math.prod(shape) * kind.itemsize > 2**30:
            raise MemoryError
        return given(self, shape, kind)

    monkeypatch.setattr(HostStorage, "_zeros", little)
    text = answer(["dreamerv3_gridworld", "buffer.capacity=1e7"], capsys)
    assert "\n  key:      buffer.capacity\n" in text
    assert f"{(10**7 + 8) * (3 * 16 * 16 + 4 + 8):,} bytes" in text
    assert "storage: disk" in text
    answer(["dqn_in_the_dream", "buffers.dreams.capacity=1e8"], capsys)
    assert list(elsewhere.iterdir()) == []


def test_choices_that_the_experiment_makes_useless_are_told(capsys):
    def told(*words):
        assert main(["train", *words, "--cfg", "job", "--package", "_dims"]) == 0
        return capsys.readouterr().err

    assert told("dreamer_cartpole", "model=dreamerv3_200m") == (
        "warning: model=dreamerv3_200m changes only _dims.depth here: dreamer_cartpole states other values itself "
        "(_dims.deter, _dims.units, _dims.variables, _dims.classes, ...); set them by key=value\n"
    )
    assert "model=dreamerv3_200m changes nothing here: " in told("dreamerv3_gridworld", "model=dreamerv3_200m")
    assert "changes only algorithm.encoder_hidden here" in told("tdmpc2_pixels", "model=tdmpc2_48m")
    assert told("dreamerv3_dmc", "model=dreamerv3_200m") == ""
    assert told("dqn_cartpole", "components/q_network=dueling", "buffer=prioritized") == ""
    assert told("ppo_cartpole", "environment=gridworld", "model=ppo_pixels") == ""
    assert told("dqn_cartpole", "environment=cartpole") == ""  # what it is anyway
    assert told("dqn_cartpole", "buffer=replay") == ""
    rate = "optimizers.model.optimizer.lr=1e-3"
    assert f"{rate} is never used: optimizers.model.learning_rate" in told("dreamer_cartpole", rate)
    assert told("tdmpc2_swingup", rate) == ""  # which has no schedule
    assert told("dreamer_cartpole", "_dims.deter=8") == ""
    assert "nothing here refers to environment.task" in told("dreamer_cartpole", "environment.task=boxing")
    assert told("mcts_gridworld", "environment=minigrid", "environment.task=Empty-5x5") == ""


def test_a_size_in_a_file_that_nothing_refers_to_is_told(capsys):
    folder = Path("configs/experiment")
    folder.mkdir(parents=True)
    mine = "# @package _global_\ndefaults:\n  - ppo_cartpole\n  - _self_\n_dims:\n  latent: 8\n  hidden: 3\n"
    (folder / "mine.yaml").write_text(mine + "algorithm: {a: '${add:${_dims.hidden},1}'}\n")
    assert main(["train", "mine", "--cfg", "job"]) == 0
    assert capsys.readouterr().err == "warning: nothing here refers to _dims.latent\n"
    assert main(["train", "mine", "_dims.hidden=4", "--cfg", "job"]) == 0
    assert "_dims.latent" in answer(["mine", "_dims.latent=4", "--cfg", "job"], capsys)


def test_phases_that_never_begin_are_told(capsys):
    words = ["train", "dreamerv1_gridworld", "--dry-run", "training.total_timesteps"]
    assert main([*words[:-1], f"{words[-1]}=4000"]) == 0
    expected = "warning: training.total_timesteps=4000 ends the run before these phases begin: training\n"
    assert capsys.readouterr().err == expected
    assert main([*words[:-1], f"{words[-1]}=4001"]) == 0
    assert capsys.readouterr().err == ""
    cut = load_experiment(
        "ppo_cartpole",
        [
            phases(
                "{name: a, duration_cycles: 2, workflow_hooks: [{collect: 16}]},"
                "{name: b, duration_steps: 5, workflow_hooks: [{collect: 16}, update_controller]},"
                "{name: c, type: eval_only, workflow_hooks: [evaluate]}"
            ),
            "training.total_timesteps=256",
            "evaluation.episodes=1",
        ],
    )
    run_training(cut, run_dir="run", quiet=True)
    assert capsys.readouterr().err == expected.replace("4000", "256").replace("training\n", "b\n")


@pytest.mark.parametrize("words", [["--run-dir", "{}"], ["logging.folder={}"]], ids=["run-dir", "folder"])
def test_a_folder_that_cannot_be_written(words, capsys, elsewhere):
    blocker = elsewhere / "file"
    blocker.write_text("I am a file")
    words = [word.format(blocker / "below") for word in words]
    text = answer(["dqn_cartpole", "training.total_timesteps=10", *words], capsys)
    assert str(blocker / "below") in text
    assert "--run-dir" in text
    assert os.listdir(elsewhere) == ["file"]


def test_a_mistake_leaves_an_existing_folder_as_it_was(capsys, elsewhere):
    (elsewhere / "run").mkdir()
    (elsewhere / "run" / "notes.txt").write_text("mine")
    answer(["dqn_cartpole", "workflow.gamma=7", "--run-dir", "run"], capsys)
    assert os.listdir(elsewhere / "run") == ["notes.txt"]


def test_a_folder_of_other_files_is_not_filled(capsys, elsewhere):
    names = [".git", "data", "notes.txt", "paper.tex", "plots.py", "results.csv"]
    for name in names:
        (elsewhere / name).touch()
    toy = ["ppo_cartpole", "training.total_timesteps=256", "evaluation.episodes=1", "--quiet", "--run-dir"]
    text = answer([*toy, "."], capsys)
    assert "it has data, notes.txt, paper.tex, plots.py and 1 more" in text
    assert "an empty or a new folder" in text
    assert sorted(os.listdir(elsewhere)) == names
    for name in names[1:]:
        (elsewhere / name).unlink()
    assert main(["train", *toy, "."]) == 0  # what is hidden does not count


def test_another_configuration_is_refused_with_the_difference(capsys, elsewhere):
    toy = ["ppo_cartpole", "training.total_timesteps=256", "evaluation.episodes=1", "--run-dir", "run", "--quiet"]
    assert main(["train", *toy]) == 0
    before = sorted((path, path.stat().st_mtime_ns) for path in Path("run").rglob("*") if path.name != ".lock")
    text = answer([*toy, "workflow.gamma=0.5"], capsys)
    assert "workflow.gamma: 0.98 -> 0.5" in text
    assert sorted((path, path.stat().st_mtime_ns) for path in Path("run").rglob("*") if path.name != ".lock") == before


@dataclass(eq=False)
class TwoHeads(Workflow):
    """A workflow with two optimisers, for the cases that ours cannot have."""

    actor: nn.Module
    critic: nn.Module
    actor_optimizer: Optimizer
    critic_optimizer: Optimizer

    def act(self, observations, state=None, *, explore=True, generator=None):
        return Act(self.actor.act(observations, explore=explore, generator=generator))

    def update_controller(self, batch, *, phase):
        return {}


def two_heads(*words: str):
    return compose(
        [
            "experiment=ppo_cartpole",
            f"++workflow={{_target_: {TwoHeads.__module__}.TwoHeads}}",
            "~optimizers.agent",
            "+optimizers.actor={trains: [actor], optimizer: {_target_: torch.optim.Adam}}",
            "+optimizers.critic={trains: [critic], optimizer: {_target_: torch.optim.Adam}}",
            *words,
        ]
    )


def build(composed):
    for name in ("gamma", "gae_lambda", "clip_range", "num_epochs", "minibatch_size"):
        composed.workflow.pop(name, None)
    return build_experiment(composed, Path("unwritten"), allow=("tests",))


def test_a_parameter_in_two_optimisers():
    build(two_heads()).close()
    with pytest.raises(UserError, match="'critic' is trained by two optimisers, 'actor' and 'critic'") as caught:
        build(two_heads("optimizers.actor.trains=[actor,critic]"))
    assert caught.value.key == "optimizers.critic.trains"
    assert caught.value.remedy


def test_an_optimiser_of_its_own_that_is_misnamed():
    composed = two_heads()
    composed.optimizers.crtic = composed.optimizers.pop("critic")
    with pytest.raises(UserError, match="needs actor, critic, actor_optimizer, critic_optimizer") as caught:
        build(composed)
    assert caught.value.key == "optimizers.critic_optimizer"


def test_a_part_inside_the_workflow_is_sent_where_parts_belong():
    composed = two_heads()
    composed.workflow.critic = composed.controllers.pop("critic")
    with pytest.raises(UserError, match="'critic' is missing") as caught:
        build(composed)
    assert caught.value.key == "workflow.critic"
    assert "components or controllers" in caught.value.remedy


class Mute(Workflow):
    """Reads the context and does nothing that one could run."""


def test_a_workflow_that_cannot_act():
    composed = two_heads()
    composed.workflow = {"_target_": f"{Mute.__module__}.Mute"}
    composed.optimizers = {"actor": {"_target_": "torch.optim.Adam"}, "critic": {"_target_": "torch.optim.Adam"}}
    composed.training.phases[0].workflow_hooks = ["collect"]
    with pytest.raises(UserError, match="neither act nor collect_step") as caught:
        build(composed)
    assert caught.value.key == "workflow._target_"


def test_a_bare_optimiser_is_named_after_what_it_trains():
    composed = two_heads()
    composed.optimizers.crtic = {"_target_": "torch.optim.Adam"}
    composed.workflow = {"_target_": f"{Mute.__module__}.Mute"}
    with pytest.raises(UserError, match="named after the controller") as caught:
        build(composed)
    assert (caught.value.key, "critic" in str(caught.value)) == ("optimizers.crtic", True)


@pytest.mark.parametrize(
    "path",
    [
        "os.system",
        "builtins.eval",
        "subprocess.run",
        "torch.load",
        "torch.hub.load",
        "torch.nn.functional.torch.load",
        "torch.nn.modules.module.functools.partial",
        "torch.nn.modules.module.OrderedDict",
        "torch.optim.optimizer.torch",
        "rl_lab.components.nets.torch",
        "rl_lab.components.nets.np.load",
        "rl_lab.data.collector.Any",
        "rl_lab.data.collector.SeedTree",
        "rl_lab.cli.main",
        "rl_lab.componentsx.nets.MLP",
        "rl_lab.components",
        "MLP",
        "",
        ".",
        "..os.system",
        "rl_lab.components.",
        "rl_lab.components.nets.MLP.__init__",
        "torch.nn.Module.load_state_dict",
    ],
)
def test_targets_that_are_refused(path):
    with pytest.raises(UserError) as caught:
        resolve_target({"_target_": path}, "node")
    assert caught.value.key == "node._target_"
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("GRU", "write rl_lab.components.representation.cells.GRU or torch.nn.GRU"),
        ("replaysource", "write rl_lab.data.sources.ReplaySource"),
        ("Adamm", "torch.optim.Adam"),
    ],
)
def test_a_class_name_alone_is_answered_with_its_full_path(name, remedy):
    with pytest.raises(UserError, match="full path") as caught:
        resolve_target({"_target_": name}, "cell")
    assert caught.value.key == "cell._target_"
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("node", [None, 3, "rl_lab.components.nets.MLP", [], {}, {"_target_": 3}, {"_target_": None}])
def test_nodes_that_are_none(node):
    with pytest.raises(UserError, match="_target_"):
        resolve_target(node, "node")


def test_targets_that_are_allowed():
    assert resolve_target({"_target_": "torch.nn.Linear"}, "node") is nn.Linear
    with pytest.raises(UserError, match="may not be used"):
        resolve_target({"_target_": f"{__name__}.TwoHeads"}, "node")
    assert resolve_target({"_target_": f"{__name__}.TwoHeads"}, "node", allow=("tests",)) is TwoHeads


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import nothing_of_this_name", "pip install nothing_of_this_name"),
        ("def broken(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_module_that_cannot_be_imported(text, expected, elsewhere, monkeypatch):
    (elsewhere / "of_the_user.py").write_text(text)
    monkeypatch.syspath_prepend(str(elsewhere))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with pytest.raises(UserError, match="of_the_user") as caught:
        resolve_target({"_target_": "of_the_user.Thing"}, "node", allow=("of_the_user",))
    assert expected in str(caught.value)


def test_nested_nodes_name_their_place():
    node = {"_target_": "rl_lab.components.controllers.critics.ValueCritic"}
    node["network"] = {"_target_": "rl_lab.components.nets.MLP", "inputs": 3, "outputs": 1, "hidden": [4, -4]}
    with pytest.raises(UserError) as caught:
        instantiate(node, "controllers.critic")
    assert caught.value.key == "controllers.critic.network.hidden[1]"


def test_a_partial_keeps_the_name_of_what_it_calls():
    made = instantiate({"_target_": "rl_lab.components.returns.n_step", "_partial_": True, "n": 3}, "node")
    assert (made.__name__, made.keywords) == ("n_step", {"n": 3})
    with pytest.raises(UserError, match="remove _partial_"):
        instantiate({"_target_": "torch.nn.Linear", "_partial_": True}, "node", kind=nn.Module)
    with pytest.raises(UserError, match="true or false"):
        instantiate({"_target_": "torch.nn.Linear", "_partial_": "yes"}, "node")
