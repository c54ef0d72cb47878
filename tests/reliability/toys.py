"""Small workflows with what the shipped ones do not have: recurrent state, rewritten columns, their own loop."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.core.optim import Optimizer
from rl_lab.core.workflow import Act, CollectResult, Update, Workflow


@dataclass(eq=False)
class RecurrentWorkflow(Workflow):
    """Acts on a recurrent state, keeps it as a column, and rewrites columns in two hooks on two views of one ring."""

    cell: nn.Module
    head: nn.Module
    optimizer: Optimizer
    generator: torch.Generator

    checkpointed = ("num_rewritten",)

    def __post_init__(self):
        self.num_rewritten = 0

    def initial_state(self, num_envs):
        return {"hidden": torch.full((num_envs, 4), 0.1), "steps": torch.zeros(num_envs, dtype=torch.int64)}

    @torch.no_grad()
    def act(self, observations, state=None, *, explore=True, generator=None):
        hidden = self.cell(observations, state["hidden"])
        logits = self.head(hidden)
        noise = torch.rand(logits.shape, generator=generator) if explore else 0.0
        state = {"hidden": hidden, "steps": state["steps"] + 1}
        kept = {"hidden": hidden, "half": hidden.bfloat16(), "age": state["steps"].to(torch.uint8)}
        return Act((logits + noise).argmax(-1), state, kept)

    def update_controller(self, batch, *, phase):
        weights = batch.extras.get("weights", torch.ones(()))
        loss = F.cross_entropy(self.head(batch["hidden"]).flatten(0, -2), batch.actions.flatten(), reduction="none")
        metrics = self.optimizer.step({"imitation": (loss.view(batch.shape) * weights).mean()})
        return Update(metrics, {"priority": loss.detach().view(batch.shape)})

    def update_memory(self, batch, *, phase):
        state, hidden = self.initial_state(batch.shape[1])["hidden"], []
        for observations, first in zip(batch.observations, batch["is_first"], strict=True):
            state = self.cell(observations, torch.where(first[:, None], 0.1, state))
            hidden.append(state)
        noise = torch.randn(batch.shape, generator=self.generator)
        predicted = torch.stack(hidden)
        metrics = self.optimizer.step({"memory": (self.head(predicted)[..., 0] - noise).square().mean()})
        self.num_rewritten += batch.rewards.numel()
        hidden = predicted.detach()
        return Update(metrics, {"hidden": hidden, "half": hidden.bfloat16(), "surprise": noise.abs()})


@dataclass(eq=False)
class SteppingWorkflow(Workflow):
    """Steps the environment itself, as the workflows of the tutorial do."""

    head: nn.Module
    optimizer: Optimizer
    generator: torch.Generator

    def initialize(self, context):
        self.environment, self.logger = context.train_environment, context.experiment_logger

    def act(self, observations, state=None, *, explore=True, generator=None):
        return Act(self.head(observations).argmax(-1))

    def collect_step(self, step, *, phase):
        observations = self.environment.observations
        actions = torch.randint(2, (self.environment.num_envs,), generator=self.generator)
        _, rewards, dones, _ = self.environment.step(actions)
        self.logger.log("angle", float(observations[:, 2].mean()))
        columns = {"observations": observations, "actions": actions, "rewards": rewards, "dones": dones}
        return CollectResult(steps=len(actions), episodes=int(dones.sum()), trajectory=columns)

    def update_controller(self, batch, *, phase):
        return self.optimizer.step({"copy": F.cross_entropy(self.head(batch.observations), batch.actions)})
