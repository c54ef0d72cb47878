"""Stable-baselines3's SAC and TD3 on Pendulum, measured: reads a job as JSON, prints its result as the last line.

Runs in an environment of its own (see `continuous_control.py`, which starts it) and imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    knobs = job["knobs"]
    environments = make_vec_env("Pendulum-v1", 1, seed=job["seed"])
    noise = {"action_noise": NormalActionNoise([0.0], [0.2])} if job["algorithm"] == "td3" else {}  # 0.1 of the range
    model = {"sac": SAC, "td3": TD3}[job["algorithm"]](
        "MlpPolicy",
        environments,
        learning_rate=knobs["learning_rate"],
        buffer_size=knobs["capacity"],
        learning_starts=knobs["learning_starts"],
        batch_size=knobs["batch_size"],
        gamma=knobs["gamma"],
        tau=knobs["target_rate"],
        train_freq=knobs["train_every"],
        gradient_steps=knobs["train_every"],
        policy_kwargs={"net_arch": knobs["hidden"]},
        seed=job["seed"],
        device="cpu",
        **noise,
    )
    cpu, wall = time.process_time(), time.perf_counter()
    model.learn(job["steps"])
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(json.dumps({"cpu_seconds": cpu, "wall_seconds": wall, "updates": model._n_updates}))


if __name__ == "__main__":
    main()
