"""Planner x dynamics x policy loss: every planner works with every model, and swapping is a change of configuration."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from rl_lab.build import build_experiment
from rl_lab.composition import compose
from rl_lab.orchestration.loop import training_loop

PLANNERS = {  # target, what a toy needs of it
    "shooting": ("shooting.RandomShooting", {"num_samples": 8, "horizon": 2, "discrete": None}),
    "cem": ("cem.CEM", {"num_samples": 8, "num_elites": 2, "num_iterations": 2, "horizon": 2, "discrete": None}),
    "icem": ("icem.ICEM", {"num_samples": 8, "num_elites": 2, "horizon": 2}),
    "mppi": ("mppi.MPPI", {"num_samples": 8, "num_policy_samples": 2, "num_elites": 2, "horizon": 2}),
    "policy_guided": ("policy_guided.PolicyGuided", {"num_samples": 8, "horizon": 2, "discrete": None}),
    "mcts": ("mcts.GumbelSearch", {"num_simulations": 4}),
}
SIZES = {"observation": "${_dims.observation}", "action": "${_dims.action}"}
LEARNED = {"hidden": [8], "done": True, "discrete": None, **SIZES}
PARTICLES = {"num_members": 3, "num_elites": 2, "num_particles": 4}
DYNAMICS = {
    "analytic": ("analytic.{0}", {}),
    "deterministic": ("deterministic.DeterministicDynamics", LEARNED),
    "ensemble": ("ensemble.EnsembleDynamics", LEARNED | PARTICLES),
}
LOSSES = ("cloning", "advantage")
WORLDS = {  # environment, policy, known model
    "discrete": ("cartpole", "one_hot", "CartPoleModel"),
    "continuous": ("swingup", "squashed", "SwingUpModel"),
}
ROWS = [
    (kind, planner, dynamics, LOSSES[(i + j) % 2])
    for kind in WORLDS
    for i, planner in enumerate(PLANNERS)
    for j, dynamics in enumerate(DYNAMICS)
    if not (kind == "continuous" and planner == "mcts")
]


def choose(place: str, target: str, settings: dict, *, discrete: bool) -> list[str]:
    """Put another part in a place, as a whole: settings of the one before would stay otherwise."""
    values = {name: discrete if value is None else value for name, value in settings.items()}
    node = ", ".join(f"{name}: {value}" for name, value in {"_target_": target, **values}.items())
    return [f"~components.{place}", f"+components.{place}={{{node}}}"]


def words(kind: str, planner: str, dynamics: str, loss: str) -> list[str]:
    environment, policy, model = WORLDS[kind]
    discrete, learned = kind == "discrete", dynamics != "analytic"
    updates = "{update_controller: {ratio: 0.25}}" + (", {update_world_model: {ratio: 0.25}}" if learned else "")
    phase = f"{{name: p, buffer: replay, duration_steps: 200, workflow_hooks: [{{collect: 8}}, {updates}]}}"
    target, settings = PLANNERS[planner]
    known, knobs = DYNAMICS[dynamics]
    return [
        *("experiment=mbmpc_cartpole", f"environment={environment}", f"controller@controllers.policy={policy}"),
        *choose(
            "planner",
            f"rl_lab.components.planners.{target}",
            settings | {"action": SIZES["action"]},
            discrete=discrete,
        ),
        *choose("dynamics", f"rl_lab.components.dynamics.{known.format(model)}", knobs, discrete=discrete),
        *([] if learned else ["~optimizers.dynamics"]),
        *(f"controllers.{name}.network.hidden=[8]" for name in ("policy", "critic")),
        *(f"workflow.policy_loss={loss}", f"training.phases=[{phase}]", "environment.num_envs=2"),
        *("buffer.capacity=64", "buffer.min_size=8", "buffer.batch_size=8", "experiment.device=cpu"),
        *("evaluation.episodes=2", "environment.max_episode_steps=12"),
    ]


@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_every_planner_works_with_every_model(row):
    experiment = build_experiment(compose(words(*row)), Path("unwritten"))
    before = {name: [p.detach().clone() for p in o.parameters] for name, o in experiment.optimizers.items()}
    loop = training_loop(experiment.workflow, experiment.scheduler, experiment.collector, experiment.sources)
    events = list(islice(loop, 8))
    experiment.close()
    losses = [float(v) for event in events for name, v in event.metrics.items() if name.endswith("loss")]
    assert losses
    assert all(torch.isfinite(torch.tensor(losses)))
    for name, optimizer in experiment.optimizers.items():
        assert any(not torch.equal(a, b) for a, b in zip(before[name], optimizer.parameters, strict=True)), name


def test_the_matrix_is_whole():
    assert len(ROWS) == 6 * 3 + 5 * 3
    for kind in WORLDS:
        met = {(planner, loss) for k, planner, _, loss in ROWS if k == kind}
        assert {(p, loss) for p in PLANNERS for loss in LOSSES if kind == "discrete" or p != "mcts"} == met


@pytest.mark.parametrize("planner", ["shooting", "cem", "icem", "policy_guided"])
def test_planners_of_observations_plan_in_a_latent_space_too(planner):
    target, settings = PLANNERS[planner]
    settings = settings | {"horizon": "${algorithm.horizon}", "action": SIZES["action"]}
    overrides = [
        *("experiment=tdmpc2_swingup", "_dims.latent=8"),
        *choose("planner", f"rl_lab.components.planners.{target}", settings, discrete=False),
        *("algorithm.encoder_hidden=[8]", "algorithm.hidden=[8]", "environment.max_episode_steps=40"),
        *("buffer.capacity=120", "buffer.batch_size=4", "experiment.device=cpu", "evaluation.episodes=1"),
        *("training.phases.0.duration_steps=10", "training.phases.0.workflow_hooks.0.collect=10"),
    ]
    experiment = build_experiment(compose(overrides), Path("unwritten"))
    loop = training_loop(experiment.workflow, experiment.scheduler, experiment.collector, experiment.sources)
    events = list(islice(loop, 5))
    experiment.close()
    assert any(event.hook == "update_agent" for event in events)
    assert all(torch.isfinite(torch.as_tensor(v)) for event in events for v in event.metrics.values())
