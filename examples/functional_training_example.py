"""The loop as a function: `training_loop` with a step function and two losses of one's own. PPO on cart-pole.

Run it: `python examples/functional_training_example.py --steps 30000`
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_lab import (
    Event,
    Hook,
    Metrics,
    Optimizer,
    Phase,
    PhaseScheduler,
    RolloutCollector,
    SeedTree,
    StreamSource,
    Workflow,
    make_env,
    seed_all,
    training_loop,
)
from rl_lab.components.controllers.actors import CategoricalActor
from rl_lab.components.controllers.critics import ValueCritic
from rl_lab.components.nets import MLP
from rl_lab.orchestration.loop import run_hook
from rl_lab.workflows.ppo import PPOWorkflow

NUM_ENVS = 8


def curiosity_loss(
    *, policy: PPOWorkflow, obs: Tensor, actions: Tensor, rewards: Tensor, values: Tensor, advantages: Tensor
) -> Tensor:
    """Keep the policy undecided where it was surprised: entropy, weighted by the size of the advantage."""
    _, entropy = policy.actor.evaluate(obs, actions)
    return -0.01 * (advantages.detach().abs() * entropy).mean()


def diversity_loss(
    *, policy: PPOWorkflow, obs: Tensor, actions: Tensor, rewards: Tensor, values: Tensor, advantages: Tensor
) -> Tensor:
    """Use all actions over the batch: the negative entropy of the mean policy."""
    mean_policy = policy.actor.network(obs).softmax(-1).mean(0)
    return 0.01 * (mean_policy * mean_policy.log()).sum()


def centered_step(
    hook: Hook,
    phase: Phase,
    workflow: Workflow,
    collector: RolloutCollector,
    sources: Mapping[str, Any],
    evaluate: Callable[[], Metrics] | None = None,
) -> Event:
    """Run a hook as usual, except that the agent learns from a bonus for staying in the middle of the track."""
    if hook.name != "collect":
        return run_hook(hook, phase, workflow, collector, sources, evaluate)
    result = collector.collect(workflow.act, hook.times)
    trajectory = result.trajectory
    bonus = 0.1 * (1.0 - trajectory.next_observations[..., 0].abs() / 2.4)
    sources[hook.source].add(trajectory.with_columns(rewards=trajectory.rewards + bonus))
    return Event(
        hook.name,
        phase.name,
        steps=result.steps,
        episodes=result.episodes,
        metrics={**result.metrics, "bonus": bonus.mean()},
        env_steps=result.extras["env_steps"],
    )


def train(num_steps: int, seed: int = 0) -> list[Event]:
    """Train for a number of agent steps, then test; print on the way and return every event."""
    torch.set_num_threads(1)
    seed_all(seed)
    seeds = SeedTree(seed)
    actor = CategoricalActor(MLP(4, 2, initialization="orthogonal", output_gain=0.01))
    critic = ValueCritic(MLP(4, 1, initialization="orthogonal"))
    optimizer = Optimizer(
        [*actor.parameters(), *critic.parameters()], partial(torch.optim.Adam, lr=1e-3, eps=1e-5), max_grad_norm=0.5
    )
    workflow = PPOWorkflow(
        actor,
        critic,
        optimizer,
        seeds.generator("workflow"),
        gamma=0.98,
        gae_lambda=0.8,
        num_epochs=10,
        extra_losses=[curiosity_loss, diversity_loss],
    )
    collector = RolloutCollector(make_env("tiny/CartPole", NUM_ENVS), seeds)
    sources = {"stream": StreamSource(NUM_ENVS, seeds.numpy("source"), "cpu")}
    tester = RolloutCollector(make_env("tiny/CartPole", 10), seeds, stream="test")

    def evaluate() -> Metrics:
        returns, _ = tester.collect_episodes(workflow.act, 10)
        return {"return_mean": sum(returns) / len(returns)}

    scheduler = PhaseScheduler(
        [
            Phase(
                "training",
                hooks=(Hook("collect", 32), Hook("update_controller")),
                buffer="stream",
                duration_steps=num_steps,
            ),
            Phase("test", type="eval_only", hooks=(Hook("evaluate"),)),
        ],
        ready=lambda name: name is None or sources[name].ready,
    )
    events = []
    for event in training_loop(workflow, scheduler, collector, sources, evaluate, step=centered_step):
        events.append(event)
        if event.hook == "evaluate" or (event.hook == "update_controller" and len(events) % 40 == 0):
            wanted = ("policy_loss", "value_loss", "curiosity_loss", "diversity_loss", "return_mean")
            shown = "  ".join(f"{name} {float(event.metrics[name]):.3g}" for name in wanted if name in event.metrics)
            print(f"{scheduler.agent_steps:>7,} steps  {event.hook}: {shown}")
    return events


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PPO on cart-pole with a step function and losses of one's own.")
    parser.add_argument("--steps", type=int, default=30_000, help="agent steps: decisions over all environments")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    train(arguments.steps, arguments.seed)
