"""Workflow: hooks, state, episode tracking, and the types it exchanges with the lab."""

import copy
import dataclasses
import inspect
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn

from rl_lab.core.batch import Batch
from rl_lab.core.optim import Optimizer
from rl_lab.core.phase import Hook, Phase
from rl_lab.core.schedules import Linear
from rl_lab.core.workflow import (
    Act,
    CollectResult,
    ControllerManager,
    Environment,
    Event,
    Logger,
    ReplayBuffer,
    RLModule,
    Trainer,
    Update,
    Workflow,
    WorkflowContext,
    WorldModelComponents,
    WorldModelWorkflow,
    as_module,
    declared_fields,
)

PHASE = Phase("joint", hooks=(Hook("collect"),), duration_steps=1)


@dataclasses.dataclass
class ToyWorkflow(Workflow):
    """A policy that is right in the middle, with a little of everything."""

    actor: nn.Module
    critic: nn.Module
    optimizer: Optimizer
    epsilon: Linear
    rate: float = 0.5
    checkpointed: ClassVar = ("target", "temperature", "count", "history")

    def __post_init__(self):
        self.target = copy.deepcopy(self.critic)
        self.temperature = torch.tensor(1.0)
        self.count = 0
        self.history = []

    def act(self, observations, state=None, *, explore=True, generator=None):
        means = self.actor(observations).squeeze(-1)
        noise = torch.randn(means.shape, generator=generator) if explore else torch.zeros_like(means)
        return Act(means + noise, state, {"log_probs": -0.5 * noise.square()})

    def value(self, observations):
        return self.critic(observations).squeeze(-1)

    def update_critic(self, batch, *, phase):
        return self.optimizer.step({"value": (self.value(batch.observations) - batch.rewards).square().mean()})

    def update_population(self, *, phase):
        return {}


def toy():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        actor, critic = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = Optimizer(
        [*actor.parameters(), *critic.parameters()],
        partial(torch.optim.SGD, lr=0.1),
        learning_rate=Linear(1.0, 0.0, steps=10, of="updates"),
    )
    return ToyWorkflow(actor, critic, optimizer, epsilon=Linear(1.0, 0.0, steps=10))


def batch(size=5):
    return Batch.from_columns(
        {
            "observations": torch.randn(size, 2, generator=torch.Generator().manual_seed(0)),
            "actions": torch.zeros(size),
            "rewards": torch.ones(size),
        }
    )


def test_as_module_adds_actions_and_log_probs():
    workflow = toy()
    module = as_module(workflow)
    assert isinstance(module, RLModule)
    before = batch()
    after = module.act(before)
    assert torch.equal(after.actions, workflow.actor(before.observations).squeeze(-1))
    assert torch.equal(after["log_probs"], torch.zeros(5))
    assert torch.equal(after.rewards, before.rewards)
    assert "log_probs" not in before
    assert before.actions.tolist() == [0.0] * 5


def test_as_module_adds_values_without_a_graph():
    workflow = toy()
    after = as_module(workflow).value(batch())
    assert torch.equal(after["values"], workflow.value(batch().observations))
    assert not after["values"].requires_grad
    assert after["actions"].tolist() == [0.0] * 5


def test_as_module_explores_with_the_generator_of_its_caller():
    workflow = toy()
    first, second = (
        as_module(workflow, explore=True, generator=torch.Generator().manual_seed(seed)).act(batch()) for seed in (1, 1)
    )
    other = as_module(workflow, explore=True, generator=torch.Generator().manual_seed(2)).act(batch())
    assert torch.equal(first.actions, second.actions)
    assert not torch.equal(first.actions, other.actions)
    assert not torch.equal(first.actions, as_module(workflow).act(batch()).actions)


def test_protocols_can_be_checked_at_run_time():
    class Buffer:
        def add(self, batch): ...
        def sample(self, batch_size): ...
        def __len__(self):
            return 0

    class Run:
        def train_step(self): ...
        def eval_step(self): ...

    class World:
        num_envs = 2

        def reset(self): ...
        def step(self, actions): ...

    class Log:
        def log(self, key, value): ...

    things = {RLModule: as_module(toy()), ReplayBuffer: Buffer(), Trainer: Run(), Environment: World(), Logger: Log()}
    for protocol in things:
        for offered, thing in things.items():
            assert isinstance(thing, protocol) == (offered is protocol), (protocol, offered)
    assert not isinstance([], ReplayBuffer)


def test_hooks_are_the_methods_named_update():
    assert set(ToyWorkflow.hooks()) == {"update_critic", "update_population"}
    assert toy().hooks() == ToyWorkflow.hooks()
    assert Workflow.hooks() == ()

    class Joint(ToyWorkflow):
        update_rate = 3

        def update_agent(self, batch, *, phase):
            return {}

    assert set(Joint.hooks()) == {"update_agent", "update_critic", "update_population"}


def test_takes_batch_says_whether_a_hook_wants_one():
    assert ToyWorkflow.takes_batch("update_critic")
    assert not ToyWorkflow.takes_batch("update_population")
    assert toy().takes_batch("update_critic")


def test_collects_only_if_collect_step_is_defined():
    class Own(ToyWorkflow):
        def collect_step(self, step, *, phase):
            return CollectResult(steps=1)

    assert not toy().collects
    made = toy()
    made.__class__ = Own
    assert made.collects


def test_what_is_not_defined_says_so():
    bare = Workflow()
    assert bare.initial_state(3) is None
    assert bare.initialize(None) is None
    with pytest.raises(NotImplementedError, match=r"Workflow does not define act"):
        bare.act(torch.zeros(1))
    with pytest.raises(NotImplementedError, match=r"Workflow has no world model"):
        bare.imagine(horizon=3)
    with pytest.raises(NotImplementedError):
        bare.collect_step(0, phase=PHASE)


def test_optimisers_and_schedules_among_the_attributes_are_found():
    workflow = toy()
    assert list(workflow.optimizers()) == [workflow.optimizer]
    workflow.advance_schedules(agent_steps=5, updates=2)
    assert workflow.epsilon.value.item() == 0.5
    assert workflow.optimizer.torch_optimizer.param_groups[0]["lr"] == pytest.approx(0.8)


def test_the_default_state_holds_what_is_listed_and_is_restored_in_place():
    workflow = toy()
    workflow.temperature.fill_(0.25)
    workflow.count, workflow.history = 7, [1, 2]
    state = copy.deepcopy(workflow.get_state())
    assert state.keys() == {"target", "temperature", "count", "history"}
    assert state["target"].keys() == workflow.target.state_dict().keys()

    other = toy()
    temperature, target, weight = other.temperature, other.target, other.target.weight
    other.set_state(state)
    assert other.temperature is temperature
    assert temperature.item() == 0.25
    assert other.target is target
    assert target.weight is weight
    assert torch.equal(weight, workflow.target.weight)
    assert (other.count, other.history) == (7, [1, 2])
    assert other.rate == 0.5


def test_a_learned_scalar_is_restored_in_place_too():
    class Learned(Workflow):
        checkpointed = ("log_alpha",)

        def __init__(self):
            self.log_alpha = nn.Parameter(torch.zeros(()))

    workflow = Learned()
    parameter = workflow.log_alpha
    workflow.set_state({"log_alpha": torch.tensor(3.0)})
    assert workflow.log_alpha is parameter
    assert parameter.requires_grad
    assert parameter.item() == 3.0


def test_a_workflow_that_lists_nothing_has_no_state():
    workflow = Workflow()
    assert workflow.get_state() == {}
    workflow.set_state({})


def test_episode_tracking_counts_returns_and_lengths():
    workflow = Workflow()
    workflow._reset_episode_tracking(2, clear_history=True)
    assert workflow._update_episode_stats([1.0, 10.0], [False, False]) == 0
    assert workflow._update_episode_stats(torch.tensor([2.0, 20.0]), torch.tensor([False, True]), {}) == 1
    assert workflow._update_episode_stats(torch.tensor([[4.0], [40.0]]), torch.tensor([[1.0], [1.0]])) == 2
    assert workflow.episode_returns == [30.0, 7.0, 40.0]
    assert workflow.episode_lengths == [2, 3, 1]


def test_episode_tracking_restarts_with_and_without_its_history():
    workflow = Workflow()
    workflow._reset_episode_tracking(1)
    workflow._update_episode_stats([5.0], [True])
    workflow._update_episode_stats([3.0], [False])
    workflow._reset_episode_tracking(1)
    assert workflow.episode_returns == [5.0]
    workflow._update_episode_stats([1.0], [True])
    assert workflow.episode_returns == [5.0, 1.0]  # the open episode was forgotten
    workflow._reset_episode_tracking(3, clear_history=True)
    assert workflow.episode_returns == []
    assert workflow.episode_lengths == []
    assert workflow._update_episode_stats([1.0, 2.0, 3.0], [True, False, True]) == 2


def test_episode_tracking_is_restored_from_a_snapshot():
    workflow = Workflow()
    workflow._reset_episode_tracking(2, clear_history=True)
    workflow._update_episode_stats([1.0, 2.0], [True, False])
    snapshot = workflow._snapshot_episode_tracking()
    for _ in range(2):  # a snapshot can be used more than once
        workflow._update_episode_stats([9.0, 9.0], [True, True])
        workflow._restore_episode_tracking(snapshot)
        assert workflow.episode_returns == [1.0]
        assert workflow._update_episode_stats([4.0, 5.0], [False, True]) == 1
        assert workflow.episode_returns == [1.0, 7.0]
        assert workflow.episode_lengths == [1, 2]


def test_reset_rollout_state_keeps_where_the_rollout_starts():
    workflow = Workflow()
    observations, dones = torch.ones(2, 3), torch.zeros(2)
    workflow._reset_rollout_state(initial_obs=observations, initial_dones=dones)
    assert workflow.current_obs is observations
    assert workflow.current_dones is dones


def test_controller_manager_maps_roles_to_controllers():
    class Controller:
        def act(self, observations, *, scale=1):
            return observations * scale

    manager = ControllerManager(actor=Controller())
    assert manager.act("actor", 3, scale=2) == 6
    assert list(manager) == ["actor"]
    assert isinstance(manager["actor"], Controller)
    with pytest.raises(KeyError, match=r"no controller in the role 'critic'.*'actor'"):
        manager.act("critic", 3)


CONTEXT_FIELDS = [
    "config",
    "device",
    "train_environment",
    "eval_environment",
    "components",
    "buffers",
    "optimizers",
    "controller_manager",
    "checkpoint_manager",
    "experiment_logger",
    "initial_observation",
    "initial_dones",
    "global_step",
]


def test_the_context_is_frozen_and_has_the_thirteen_fields_of_the_seed():
    assert [field.name for field in dataclasses.fields(WorkflowContext)] == CONTEXT_FIELDS
    assert len(CONTEXT_FIELDS) == 13
    values = dict.fromkeys(CONTEXT_FIELDS) | {"components": WorldModelComponents(encoder="an encoder")}
    context = WorkflowContext(**values)
    assert context.components.encoder == "an encoder"
    with pytest.raises(AttributeError):
        context.components.decoder
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.device = "cuda"


def test_collect_result_has_defaults_of_its_own():
    one, other = CollectResult(8), CollectResult(steps=4)
    assert (one.steps, one.episodes, one.metrics, one.trajectory, one.extras) == (8, 0, {}, None, {})
    one.metrics["return"] = 1.0
    one.extras["note"] = "kept"
    assert other.metrics == {}
    assert other.extras == {}


def test_act_update_and_event():
    act = Act(torch.zeros(2))
    assert act.state is None
    assert dict(act.extras) == {}
    with pytest.raises(TypeError):
        act.extras["shared"] = torch.zeros(2)
    metrics, columns = Update({"loss": 1.0}, {"priority": torch.ones(2)})
    assert metrics == {"loss": 1.0}
    assert columns["priority"].tolist() == [1.0, 1.0]
    event = Event("collect", "joint", steps=8)
    assert (event.updates, event.episodes, event.metrics) == (0, 0, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.steps = 9


def test_declared_fields_are_the_constructor():
    assert [field.name for field in declared_fields(ToyWorkflow)] == ["actor", "critic", "optimizer", "epsilon", "rate"]
    assert [field.name for field in declared_fields(ToyWorkflow)] == list(inspect.signature(ToyWorkflow).parameters)

    class FromContext(Workflow):
        def __init__(self):
            super().__init__()

    assert declared_fields(FromContext) == ()


def test_the_names_of_the_seed():
    assert WorldModelWorkflow is Workflow


def test_a_hook_can_be_called_without_an_orchestrator():
    workflow = toy()
    workflow.advance_schedules(agent_steps=0, updates=9)
    first = workflow.update_critic(batch(), phase=PHASE)["value_loss"]
    for _ in range(20):
        last = workflow.update_critic(batch(), phase=PHASE)["value_loss"]
    assert last < first
