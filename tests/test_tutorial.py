"""The tutorial of the RL Lab document runs as it stands there: only imports and target paths are changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_lab.build import build_experiment
from rl_lab.cli import main
from rl_lab.composition import compose
from rl_lab.orchestration.loop import training_loop
from rl_lab.runs import load_agent, run_training

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "examples" / "tutorial"
ALLOW = ("your_algorithm",)

WORKFLOW = '''
class YourWorkflow(WorldModelWorkflow):
    def __init__(self):
        super().__init__()

    def initialize(self, context: WorkflowContext) -> None:
        """Bind components and setup state."""
        self._bind_context(context)
        self._reset_episode_tracking(self.num_envs, clear_history=True)
        self._reset_rollout_state(
            initial_obs=context.initial_observation,
            initial_dones=context.initial_dones,
        )

    def _bind_context(self, context: WorkflowContext) -> None:
        """Extract what you need from context. Use your own variable names."""
        self.config = context.config
        self.device = context.device
        self.environment = context.train_environment
        self.num_envs = int(getattr(self.environment, "num_envs", 1))

        # Get components - use whatever names make sense for your algorithm
        components = context.components
        self.encoder = getattr(components, "encoder", None)
        self.dynamics = getattr(components, "dynamics_model", None)

        # Get optimizers
        self.optimizer = context.optimizers.get("world_model")

    def collect_step(self, step: int, *, phase: PhaseConfig) -> CollectResult:
        """One step of environment interaction."""
        with torch.no_grad():
            # Your collection logic
            action = self.select_action(self.current_obs)
            next_obs, reward, done, info = self.environment.step(action)

            # Track episode stats (provided by base class)
            self._update_episode_stats(reward, done, info)

            # Build trajectory
            trajectory = {
                "observations": self.current_obs,
                "actions": action,
                "rewards": reward,
                "dones": done,
            }

            self.current_obs = next_obs

        return CollectResult(
            steps=self.num_envs,
            trajectory=trajectory,
            metrics={"collect/reward": float(reward.mean())},
        )

    def update_world_model(self, batch: Batch, *, phase: PhaseConfig) -> Dict[str, float]:
        """One gradient step on world model."""
        # Your loss computation
        loss = self.compute_loss(batch)

        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

        return {"loss": loss.item()}
'''

EXPERIMENT = """\
# @package _global_
defaults:
  - /workflow: your_algorithm
  - /components/representation_learner@components.encoder: your_encoder
  - /controller@controllers.actor: your_controller
  - /buffer: world_model_sequence
  - /environment: cartpole
  - _self_

experiment:
  name: your_algorithm_cartpole
  seed: 42
  device: auto

_dims:
  observation: 4
  action: 2
  latent: 64

algorithm:
  learning_rate: 1e-4
  # Your hyperparameters

components:
  encoder:
    input_dim: ${_dims.observation}
    latent_dim: ${_dims.latent}

training:
  total_timesteps: 100000
  phases:
    - name: training
      type: online
      buffer: replay
      duration_steps: 100000
      workflow_hooks:
        - collect
        - update_world_model
"""

SHORT = ("buffer.min_size=100", "logging.every=100", "logging.tensorboard=false", "experiment.device=cpu")


@pytest.fixture(autouse=True)
def in_the_tutorial(monkeypatch):
    """Work in the tutorial's folder, as its reader does."""
    monkeypatch.chdir(TUTORIAL)
    monkeypatch.setattr(sys, "path", [*sys.path, str(TUTORIAL)])
    yield
    sys.modules.pop("your_algorithm", None)


def composed(steps: int, *overrides: str):
    return compose(["experiment=your_algorithm_env", f"training.total_timesteps={steps}", *SHORT, *overrides])


def records(folder: Path, key: str) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["value"] for record in map(json.loads, lines) if record["key"] == key]


def test_the_workflow_is_the_documents_line_by_line():
    ours = iter((TUTORIAL / "your_algorithm.py").read_text().splitlines())
    for line in WORKFLOW.strip().splitlines():
        assert line in ours, f"missing, or out of order: {line!r}"


def test_the_yaml_is_the_documents():
    assert (TUTORIAL / "configs/experiment/your_algorithm_env.yaml").read_text() == EXPERIMENT
    assert (TUTORIAL / "configs/workflow/your_algorithm.yaml").read_text() == "_target_: your_algorithm.YourWorkflow\n"


def test_the_command_trains(tmp_path):
    words = ["train", "+experiment=your_algorithm_env", "--allow", "your_algorithm", "--run-dir", str(tmp_path / "run")]
    short = ["training.total_timesteps=900", "training.phases.0.duration_steps=700", *SHORT]
    assert main([*words, *short, "--quiet"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["finished"]
    assert summary["agent_steps"] == 700
    assert summary["updates"] == 601
    assert summary["last_evaluation"] is None  # it defines no act
    assert records(tmp_path / "run", "collect/reward")[0] == 1.0
    losses = records(tmp_path / "run", "train/loss")
    assert len(losses) >= 5
    assert losses[-1] < 0.5 * losses[0]


def test_the_script_trains(tmp_path):
    command = [sys.executable, "../../scripts/train.py", "+experiment=your_algorithm_env", "--allow", "your_algorithm"]
    short = ["training.total_timesteps=150", "--run-dir", str(tmp_path / "run"), *SHORT]
    said = subprocess.run([*command, *short], cwd=TUTORIAL, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    assert records(tmp_path / "run", "train/loss")


def test_collected_steps_reach_the_buffer(tmp_path):
    experiment = build_experiment(composed(300, "environment.num_envs=3"), tmp_path, allow=ALLOW)
    workflow, replay = experiment.workflow, experiment.sources["replay"]
    assert workflow.num_envs == 3
    assert workflow.dynamics is None
    assert workflow.config["algorithm"]["learning_rate"] == 1e-4
    rate = workflow.optimizer.torch_optimizer.param_groups[0]["lr"]
    assert float(rate) == pytest.approx(1e-4)
    events = list(training_loop(workflow, experiment.scheduler, experiment.collector, experiment.sources))
    assert len(replay) == sum(event.steps for event in events) == 300
    assert sum(event.updates for event in events) == sum(event.hook == "update_world_model" for event in events) > 50
    batch = replay.sample()
    assert batch.observations.shape == (16, 16, 4)
    assert batch.actions.unique().tolist() == [0, 1]
    following = batch.observations[1:] - batch.observations[:-1]
    inside = ~(batch["is_last"][1:] | batch["is_first"][1:])  # a final row repeats the observation before it
    moved = following[..., 0][inside] - 0.02 * batch.observations[:-1, :, 1][inside]  # x += 0.02 x_dot
    assert inside.any()
    torch.testing.assert_close(moved, torch.zeros_like(moved), atol=1e-6, rtol=0)
    assert len(workflow.episode_returns) > 5
    experiment.close()


def test_it_resumes_exactly(tmp_path):
    run_training(composed(150), run_dir=tmp_path / "stopped", quiet=True, allow=ALLOW)
    run_training(composed(300), run_dir=tmp_path / "stopped", quiet=True, allow=ALLOW)
    run_training(composed(300), run_dir=tmp_path / "straight", quiet=True, allow=ALLOW)
    weights = []
    for name in ("stopped", "straight"):
        experiment = load_agent(tmp_path / name, which="last", allow=ALLOW)
        weights.append(experiment.components["encoder"].state_dict())
        experiment.close()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_it_cannot_be_evaluated(tmp_path, capsys):
    run_training(composed(120), run_dir=tmp_path / "run", quiet=True, allow=ALLOW)
    assert main(["eval", str(tmp_path / "run"), "--allow", "your_algorithm"]) == 2
    assert "YourWorkflow defines no act" in capsys.readouterr().err
    hook = "training.phases=[{name: test, type: eval_only, workflow_hooks: [evaluate]}]"
    assert main(["train", "your_algorithm_env", hook, "--allow", "your_algorithm", "--dry-run"]) == 2
    assert "defines no act" in capsys.readouterr().err
