"""A world model that was trained knows where it is: after five frames it follows thirty actions with closed eyes.

`python tests/learning/test_open_loop.py docs/pictures/dreamer_open_loop.png` draws the first of the held-out windows.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_lab.build import build_experiment
from rl_lab.components.drawings import filmstrip
from rl_lab.composition import load_experiment
from rl_lab.core.phase import Hook, Phase
from rl_lab.environment import build_environments
from rl_lab.orchestration.loop import advance_schedules, run_hook
from rl_lab.orchestration.pictures import png

NUM_EPISODES, NUM_CONTEXT, NUM_BLIND = 64, 5, 30
PHASE = Phase("model", hooks=(Hook("update_world_model"),), duration_updates=1)
# Below its free nats a divergence costs nothing, and a prior may be as wrong as that at every step.
CHANGES = {
    "device": "cpu",
    "workflow.free_nats": 0.05,
    "optimizers.model.learning_rate.start": 1e-3,
    "optimizers.model.learning_rate.end": 1e-3,
}
AGENT = torch.tensor([230.0, 80.0, 60.0])  # its colour


def random_episodes(config, seed=1_000):
    """Return pictures [T + 1, N, C, H, W] and random actions [T, N] of episodes that last long enough."""
    world = build_environments(config.environment, 2 * NUM_EPISODES, ())
    generator = np.random.default_rng(seed)
    seen, _ = world.reset(seed=list(range(seed, seed + 2 * NUM_EPISODES)))
    pictures, actions, alive = [seen], [], np.ones(2 * NUM_EPISODES, bool)
    for _ in range(NUM_CONTEXT + NUM_BLIND - 1):
        actions.append(generator.integers(4, size=2 * NUM_EPISODES))
        seen, _, terminated, truncated, _ = world.step(actions[-1])
        alive &= ~(terminated | truncated)
        pictures.append(seen)
        if (ended := terminated | truncated).any():
            world.reset(seed=[7 if i else None for i in ended], options={"reset_mask": ended})
    world.close()
    chosen = np.flatnonzero(alive)[:NUM_EPISODES]
    assert len(chosen) == NUM_EPISODES
    return torch.from_numpy(np.stack(pictures)[:, chosen]), torch.from_numpy(np.stack(actions)[:, chosen])


def cells(pictures, size=8):
    """Return in which cell the agent is in pictures [..., C, H, W]: where the colour is nearest to its own."""
    patch = pictures.shape[-1] // size
    means = pictures.float().unflatten(-1, (size, patch)).unflatten(-3, (size, patch)).mean((-1, -3))  # [..., C, 8, 8]
    return (means - AGENT[:, None, None]).square().sum(-3).flatten(-2).argmin(-1)


def trained(num_updates):
    """Return an experiment whose model learned from random steps; such episodes last 80 steps on average."""
    experiment = build_experiment(load_experiment("dreamerv3_gridworld", CHANGES), Path("unwritten"))
    workflow, sources, collector = experiment.workflow, experiment.sources, experiment.collector
    for _ in range(20):
        sources["replay"].add(collector.collect(workflow.act, 100, follow=workflow.follow).trajectory)
    advance_schedules(workflow, sources, experiment.scheduler)
    for _ in range(num_updates):
        run_hook(Hook("update_world_model", 1, source="replay"), PHASE, workflow, collector, sources)
    return experiment


@torch.no_grad()
def dreamed(experiment):
    """Return held-out pictures [T, N, C, H, W], and what the model decodes: at first it sees, then it only acts."""
    pictures, actions = random_episodes(experiment.config)
    workflow = experiment.workflow
    model, generator = workflow._model, torch.Generator().manual_seed(0)
    codes = workflow.actor.policy.from_replay(actions)
    state, decoded = model.initial(NUM_EPISODES, torch.device("cpu")), []
    for t in range(NUM_CONTEXT):
        latents, _ = model.look(pictures[t], state, generator)
        state = {**latents, "action": codes[t]}
        decoded.append(model.decoder.decode(model.rssm.features(latents)))
    for step in range(NUM_CONTEXT - 1, NUM_CONTEXT - 1 + NUM_BLIND):
        draws = model.rssm.variable.draw((NUM_EPISODES,), latents["deter"], generator)
        latents = model.rssm.imagine_step(latents, codes[step], draws)
        decoded.append(model.decoder.decode(model.rssm.features(latents)))
    experiment.close()
    return pictures, torch.stack(decoded)


def shares_right(experiment):
    """Return how often the agent's cell is decoded right after each of the blind steps."""
    pictures, decoded = dreamed(experiment)
    return (cells(decoded) == cells(pictures)).float().mean(1)[NUM_CONTEXT:].tolist()


def test_the_cell_is_read_off_a_picture():
    picture = torch.full((3, 16, 16), 20.0)
    picture[:, 6:8, 10:12] = AGENT[:, None, None]
    assert cells(picture) == 3 * 8 + 5


def test_a_model_that_was_hardly_trained_is_lost():
    assert shares_right(trained(2))[-1] < 0.5


@pytest.mark.learning
def test_a_trained_model_knows_its_cell():
    right = shares_right(trained(4000))
    print([round(share, 3) for share in right])
    assert right[-1] >= 0.95


if __name__ == "__main__":
    world, dream = dreamed(trained(4000))
    Path(sys.argv[1]).write_bytes(png(filmstrip(world[:, 0], dream[:, 0], NUM_CONTEXT).numpy()))
