"""The swing-up is solved: the pole stands in the last fifth of nearly every episode, looked at in every frame."""

import numpy as np
import pytest
import torch

from rl_lab import train
from rl_lab.envs.tiny import CartPoleSwingUp
from rl_lab.runs import load_agent

NUM_FRAMES, NUM_LAST, UPRIGHT = 500, 100, 0.95
COSINE = 2  # where it is in an observation


def standing_episodes(folder, num_episodes=10):
    """Count the episodes whose pole stands in all of the last frames."""
    agent = load_agent(folder)
    repeat = agent.config.environment.action_repeat
    world = CartPoleSwingUp(num_episodes)
    seen, _ = world.reset(seed=list(range(1_000, 1_000 + num_episodes)))
    generator = torch.Generator().manual_seed(0)
    state, cosines = agent.workflow.initial_state(num_episodes), []
    while len(cosines) < NUM_FRAMES:
        said = agent.workflow.act(torch.from_numpy(seen), state, explore=False, generator=generator)
        state = said.state
        for _ in range(repeat):
            seen, *_ = world.step(said.actions.numpy())
            cosines.append(seen[:, COSINE])
    agent.close()
    return int((np.stack(cosines)[-NUM_LAST:] > UPRIGHT).all(0).sum())


@pytest.mark.learning
@pytest.mark.parametrize("experiment", ["tdmpc2_swingup"])
def test_the_pole_stands(experiment, tmp_path):
    train(experiment, run_dir=tmp_path / "run", seed=10, logging__tensorboard=False)
    assert standing_episodes(tmp_path / "run") >= 9


def test_a_pole_that_was_never_trained_does_not_stand(tmp_path):
    shorter = {
        "training__total_timesteps": 50,
        "training__phases__0__duration_steps": 25,
        "training__phases__0__workflow_hooks__0__collect": 25,
        "environment__max_episode_steps": 40,
        "evaluation__episodes": 1,
    }
    train("tdmpc2_swingup", run_dir=tmp_path / "run", logging__tensorboard=False, evaluation__inspect=False, **shorter)
    assert standing_episodes(tmp_path / "run", 4) == 0
