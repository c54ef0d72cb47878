"""Dreamer v3 by its author's code of 2023 on a task of the control suite: trains, and writes what episodes returned.

Runs in an environment of its own and imports nothing of ours:

python -m venv .peers/dreamer; .peers/dreamer/bin/pip install --no-deps dreamerv3==1.5.0
.peers/dreamer/bin/pip install "jax[cpu]<0.5" optax "tensorflow_probability<0.25" tf_keras-nightly ruamel.yaml \\
    cloudpickle msgpack "mujoco<4" dm_control
MUJOCO_GL=disabled .peers/dreamer/bin/python benchmarks/peers/dreamer_2023.py CSV TASK SEED STEPS [--KEY VALUE ...]

Steps are counted as the author counts them: two for a decision, although his wrapper repeats actions in the first
episode of an environment only. Keys are his own, such as `--rssm.deter 256`; the base is his `dmc_proprio`. The last
line printed is what an update takes.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
from dm_control import suite
from dreamerv3 import agent as author
from dreamerv3 import embodied, jaxagent
from dreamerv3.embodied.envs import dmc
from dreamerv3.train import wrap_env

REPEAT = 2


class Episodes:
    """Writes a row for each episode: steps so far as the author counts them, its return, seconds so far."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", newline="")
        self.writer = csv.writer(self.file)
        self.writer.writerow(["env_steps", "episode_return", "seconds"])
        self.begin = time.perf_counter()

    def __call__(self, summaries: tuple) -> None:
        """Take in what the author's logger has to say."""
        for step, name, value in summaries:
            if name == "episode/score":
                self.writer.writerow([step, round(float(value), 1), round(time.perf_counter() - self.begin)])
        self.file.flush()


def main() -> None:
    """Train once."""
    path, task, seed, steps, *words = sys.argv[1:]
    config = embodied.Config(author.Agent.configs["defaults"]).update(author.Agent.configs["dmc_proprio"])
    config = config.update(
        {
            "task": f"dmc_{task.replace('-', '_')}",
            "seed": int(seed),
            "logdir": str(Path(path).with_suffix("")),
            "jax.platform": "cpu",
            "jax.precision": "float32",
            "envs.parallel": "none",
            "run.steps": int(steps) // REPEAT,
            "run.log_every": 60,
            "run.save_every": 1e9,
        }
    )
    config = embodied.Flags(config).parse(words)
    set_up = jaxagent.JAXAgent._setup

    def without_guard(self: jaxagent.JAXAgent) -> None:
        set_up(self)
        jax.config.update("jax_transfer_guard", "allow")

    train, seconds = jaxagent.JAXAgent.train, []

    def timed(self: jaxagent.JAXAgent, data: Any, state: Any = None) -> Any:
        begin = time.process_time()
        answer = train(self, data, state)
        jax.block_until_ready(self.varibs)
        seconds.append(time.process_time() - begin)
        return answer

    jaxagent.JAXAgent._setup, jaxagent.JAXAgent.train = without_guard, timed
    step = embodied.Counter()
    logger = embodied.Logger(step, [Episodes(Path(path))], REPEAT)
    domain, name = task.split("-", 1)

    def make(index: int) -> embodied.Env:
        random = {"random": 1000 * config.seed + index}
        world = dmc.DMC(suite.load(domain, name.replace("-", "_"), random), repeat=REPEAT, render=False)
        return wrap_env(world, config)

    environments = embodied.BatchEnv([make(i) for i in range(config.envs.amount)], parallel=False)
    replay = embodied.replay.Uniform(config.batch_length, config.replay_size, seed=config.seed)
    agent = author.Agent(environments.obs_space, environments.act_space, step, config)
    arguments = embodied.Config(**config.run, logdir=config.logdir, batch_steps=config.batch_size * config.batch_length)
    embodied.run.train(agent, environments, replay, logger, arguments)
    later = seconds[10:]  # the first compile
    if later:
        print(f"{len(later)} updates, CPU-milliseconds of one: {1e3 * statistics.median(later):.1f}")


if __name__ == "__main__":
    main()
