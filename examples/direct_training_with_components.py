"""The parts in a plain loop: PPO on cart-pole without scheduler, orchestrator, configuration or files.

Run it: `python examples/direct_training_with_components.py --steps 40000`
"""

import argparse
from functools import partial

import torch

from rl_lab import Hook, Optimizer, Phase, RolloutCollector, SeedTree, StreamSource, make_env, seed_all
from rl_lab.components.controllers.actors import CategoricalActor
from rl_lab.components.controllers.critics import ValueCritic
from rl_lab.components.nets import MLP
from rl_lab.workflows.ppo import PPOWorkflow

NUM_ENVS = 8
ROLLOUT = 32  # decisions in every environment between two updates


def train(num_steps: int, seed: int = 0) -> float:
    """Train for a number of agent steps and return the mean return of ten test episodes."""
    torch.set_num_threads(1)
    seed_all(seed)  # decides the initial weights; everything after that draws from named generators
    seeds = SeedTree(seed)

    collector = RolloutCollector(make_env("tiny/CartPole", NUM_ENVS), seeds)
    source = StreamSource(NUM_ENVS, seeds.numpy("source"), "cpu")
    actor = CategoricalActor(MLP(4, 2, initialization="orthogonal", output_gain=0.01))
    critic = ValueCritic(MLP(4, 1, initialization="orthogonal"))
    optimizer = Optimizer(
        [*actor.parameters(), *critic.parameters()], partial(torch.optim.Adam, lr=1e-3, eps=1e-5), max_grad_norm=0.5
    )
    workflow = PPOWorkflow(
        actor, critic, optimizer, seeds.generator("workflow"), gamma=0.98, gae_lambda=0.8, num_epochs=10
    )
    # A hook is told in which phase it runs. A loop of one's own has one phase.
    phase = Phase("training", hooks=(Hook("collect", ROLLOUT), Hook("update_controller")), duration_steps=num_steps)

    num_rollouts = max(num_steps // (NUM_ENVS * ROLLOUT), 1)
    returns: list[float] = []
    for index in range(num_rollouts):
        result = collector.collect(workflow.act, ROLLOUT)
        source.add(result.trajectory)
        metrics = workflow.update_controller(source.sample(), phase=phase)
        returns += result.extras["episode_returns"]
        if returns and (index % 20 == 19 or index == num_rollouts - 1):
            recent = returns[-20:]
            steps = (index + 1) * result.steps
            print(f"{steps:>7,} steps  return {sum(recent) / len(recent):6.1f}  loss {metrics['loss'].item():8.3f}")

    tester = RolloutCollector(make_env("tiny/CartPole", 10), seeds, stream="test")
    test_returns, _ = tester.collect_episodes(workflow.act, 10)
    return sum(test_returns) / len(test_returns)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="PPO on cart-pole, the parts in a plain loop.")
    parser.add_argument("--steps", type=int, default=40_000, help="agent steps: decisions over all environments")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"test return {train(arguments.steps, arguments.seed):.1f} of 500")
