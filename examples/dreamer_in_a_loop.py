"""The parts in a plain loop: Dreamer v3 on cart-pole without configuration or files, then a dream as numbers.

Run it: `python examples/dreamer_in_a_loop.py --steps 4000`
"""

import argparse
from functools import partial

import torch

from rl_lab import Hook, Optimizer, Phase, ReplaySource, RolloutCollector, SeedTree, make_env, seed_all
from rl_lab.components.controllers.dreamer import DreamerActor
from rl_lab.components.laprop import LaProp
from rl_lab.components.normalizers import PercentileScale
from rl_lab.components.policies import OneHot
from rl_lab.components.predictions import Bernoulli
from rl_lab.components.representation.cells import BlockGRU
from rl_lab.components.representation.heads import Head
from rl_lab.components.representation.observations import (
    ObservationDecoder,
    ObservationEncoder,
    VectorDecoder,
    VectorEncoder,
)
from rl_lab.components.representation.rssm import RSSM
from rl_lab.components.representation.variables import Categoricals
from rl_lab.components.twohot import SymexpTwoHot
from rl_lab.workflows.dreamer import DreamerWorkflow

NUM_ENVS, OBSERVATION, ACTION = 4, 4, 2
DETER, UNITS = 128, 64
COLLECTED = 8  # decisions in every environment between updates
NUM_UPDATES = 4  # after each of these collections
PHASE = Phase("training", hooks=(Hook("collect", COLLECTED), Hook("update_agent", NUM_UPDATES)), duration_cycles=1)


def build_agent(seeds: SeedTree) -> DreamerWorkflow:
    """Put Dreamer v3 together: what it sees with, what it predicts, how it decides, and what trains all of it."""
    variable = Categoricals(num_variables=8, num_classes=8)
    rssm = RSSM(
        encoder=ObservationEncoder(OBSERVATION, vector=partial(VectorEncoder, units=UNITS, keeps_size=True)),
        cell=BlockGRU(DETER, variable.size, ACTION, UNITS),
        variable=variable,
        units=UNITS,
        prior_layers=2,
    )
    head = partial(Head, rssm.num_features, units=UNITS)
    parts = {
        "rssm": rssm,
        "decoder": ObservationDecoder(rssm.num_features, OBSERVATION, vector=partial(VectorDecoder, units=UNITS)),
        "reward": head(SymexpTwoHot(), num_layers=1, output_scale=0.0),
        "continuation": head(Bernoulli(), num_layers=1),
        "actor": DreamerActor(rssm.num_features, OneHot(ACTION), UNITS),
        "critic": head(SymexpTwoHot(), num_layers=3, output_scale=0.0),
    }
    parameters = [parameter for part in parts.values() for parameter in part.parameters()]
    return DreamerWorkflow(
        **parts,
        model_optimizer=Optimizer(parameters, partial(LaProp, lr=1e-3)),
        return_scale=PercentileScale(floor_first=False),
        generator=seeds.generator("workflow"),
        gamma=0.99,
        free_nats=0.1,
    )


def train(num_steps: int, seed: int = 0) -> tuple[DreamerWorkflow, list[float]]:
    """Train for a number of agent steps; return the agent and the returns of its episodes."""
    torch.set_num_threads(1)
    seed_all(seed)  # decides the initial weights; everything after that draws from named generators
    seeds = SeedTree(seed)
    agent = build_agent(seeds)
    # The Collector carries the recurrent state and puts it back where an episode begins.
    state = agent.initial_state(NUM_ENVS)
    collector = RolloutCollector(make_env("tiny/CartPole", NUM_ENVS), seeds, initial_state=state)
    # Running windows cross episodes: the first row is context, the others are learned from.
    options = {"capacity": 20_000, "batch_size": 16, "window": 9, "mode": "running", "min_size": 500}
    replay = ReplaySource(NUM_ENVS, seeds.numpy("replay"), "cpu", **options)
    returns: list[float] = []
    for index in range(num_steps // (NUM_ENVS * COLLECTED)):
        result = collector.collect(agent.act, COLLECTED)
        replay.add(result.trajectory)
        returns += result.extras["episode_returns"]
        if not replay.ready:
            continue
        for _ in range(NUM_UPDATES):
            batch = replay.sample()
            update = agent.update_agent(batch, phase=PHASE)
            replay.write(batch.rows, update.columns)  # the latents as the model sees them now
        if index % 20 == 19:
            recent = returns[-10:]
            told = f"return {sum(recent) / len(recent):6.1f}  loss {update.metrics['loss'].item():7.3f}"
            print(f"{(index + 1) * result.steps:>7,} steps  {told}")
    return agent, returns


@torch.no_grad()
def dream(agent: DreamerWorkflow, horizon: int = 10) -> torch.Tensor:
    """See the first observation of an episode, go on with closed eyes; return the observations dreamed [H, 4]."""
    observations, _ = make_env("tiny/CartPole", 1).reset(seed=[0])
    seen = agent.act(torch.from_numpy(observations), agent.initial_state(1), generator=torch.Generator().manual_seed(0))
    imagined = agent.imagine(horizon=horizon, states={name: seen.state[name] for name in ("deter", "stoch")})
    return agent.decoder.decode(imagined.observations)[:, 0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Dreamer on cart-pole, the parts in a plain loop.")
    parser.add_argument("--steps", type=int, default=4_000, help="agent steps: decisions over all environments")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    trained, _ = train(arguments.steps, arguments.seed)
    print("a dream: position, speed, angle, angular speed")
    for step, row in enumerate(dream(trained).tolist()):
        print(f"{step:>3}  " + "  ".join(f"{number:7.3f}" for number in row))
