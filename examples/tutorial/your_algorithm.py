"""The tutorial's algorithm: an autoencoder of observations and rewards, trained on what a random policy sees.

`YourWorkflow` is written in the style that reads everything from the context and steps the environment itself.
Run it in this folder:

    rl-lab train +experiment=your_algorithm_env --allow your_algorithm
"""

# ruff: noqa: UP006, UP035  # written as in the document that it follows

from typing import Any, Dict

import torch
from torch import Tensor, nn

from rl_lab import Batch, CollectResult, PhaseConfig, WorkflowContext, WorldModelWorkflow
from rl_lab.components.nets import MLP
from rl_lab.components.representation.heads import ObservationHead, RewardHead


class YourEncoder(nn.Module):
    """Observations to latents, and heads that predict observation and reward from them."""

    def __init__(self, input_dim: int, latent_dim: int) -> None:
        super().__init__()
        self.network = MLP(input_dim, latent_dim, hidden=(64,), activation="relu")
        self.observation_head = ObservationHead(latent_dim, input_dim)
        self.reward_head = RewardHead(latent_dim)

    def forward(self, observations: Tensor) -> Tensor:
        """Encode [..., input_dim] as [..., latent_dim]."""
        return self.network(observations)


class YourWorkflow(WorldModelWorkflow):
    """Collects with the controller in the role `actor`; learns to reconstruct what was collected."""

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
        self.controllers = context.controller_manager

        # Get optimizers
        self.optimizer = context.optimizers.get("world_model")

    def select_action(self, observations: Tensor) -> Tensor:
        """Ask the controller."""
        return self.controllers.act("actor", observations)

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

    def compute_loss(self, batch: Batch) -> Tensor:
        """Reconstruct observations and rewards from the latents of sequences [L, B]."""
        latents = self.encoder(batch.observations)
        reconstruction = self.encoder.observation_head.loss(latents, batch.observations)
        return reconstruction + self.encoder.reward_head.loss(latents, batch.rewards)

    def update_world_model(self, batch: Batch, *, phase: PhaseConfig) -> Dict[str, float]:
        """One gradient step on world model."""
        # Your loss computation
        loss = self.compute_loss(batch)

        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

        return {"loss": loss.item()}

    def get_state(self) -> Dict[str, Any]:
        """Return what a checkpoint needs besides components and optimisers."""
        return {"current_obs": self.current_obs, "tracking": self._snapshot_episode_tracking()}

    def set_state(self, state: Dict[str, Any]) -> None:
        """Restore it."""
        self.current_obs = state["current_obs"]
        self._restore_episode_tracking(state["tracking"])
