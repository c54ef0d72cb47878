"""Stable-baselines3 on cart-pole, measured: reads a job as JSON, prints its result as the last line.

Runs in an environment of its own (see `model_free_cpu.py`, which starts it) and imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy


class StopAtReturn(BaseCallback):
    """Evaluates every so many steps and stops at a return; counts the time that this takes."""

    def __init__(self, every: int, episodes: int, target: float) -> None:
        super().__init__()
        self.every, self.episodes, self.target = every, episodes, target
        self.environments = make_vec_env("CartPole-v1", 1, seed=10_000)
        self.cpu = self.wall = 0.0
        self.returns: list[float] = []
        self.reached_at: int | None = None

    def _on_step(self) -> bool:
        if self.num_timesteps // self.every == (self.num_timesteps - self.training_env.num_envs) // self.every:
            return True
        cpu, wall = time.process_time(), time.perf_counter()
        mean, _ = evaluate_policy(self.model, self.environments, self.episodes, deterministic=True)
        self.returns.append(float(mean))
        self.cpu += time.process_time() - cpu
        self.wall += time.perf_counter() - wall
        if mean >= self.target:
            self.reached_at = self.num_timesteps
        return self.reached_at is None


def scheduled(value: float, linear: bool) -> Any:
    return (lambda remaining: value * remaining) if linear else value


def build(job: dict[str, Any]) -> PPO | DQN:
    knobs = job["knobs"]
    environments = make_vec_env("CartPole-v1", knobs["num_envs"], seed=job["seed"])
    common = {"gamma": knobs["gamma"], "batch_size": knobs["batch_size"], "max_grad_norm": knobs["max_grad_norm"]}
    if job["algorithm"] == "ppo":
        return PPO(
            "MlpPolicy",  # separate tanh networks for policy and value
            environments,
            learning_rate=scheduled(knobs["learning_rate"], knobs["linear"]),
            clip_range=scheduled(knobs["clip_range"], knobs["linear"]),
            n_steps=knobs["num_steps"],
            n_epochs=knobs["num_epochs"],
            gae_lambda=knobs["gae_lambda"],
            vf_coef=knobs["value_weight"],
            ent_coef=knobs["entropy_weight"],
            policy_kwargs={"net_arch": {"pi": knobs["hidden"], "vf": knobs["hidden"]}},
            seed=job["seed"],
            device="cpu",
            **common,
        )
    return DQN(
        "MlpPolicy",
        environments,
        learning_rate=knobs["learning_rate"],
        buffer_size=knobs["capacity"],
        learning_starts=knobs["learning_starts"],
        train_freq=knobs["train_every"],
        gradient_steps=knobs["num_updates"],
        target_update_interval=knobs["target_interval"],
        exploration_fraction=knobs["exploration_fraction"],
        exploration_final_eps=knobs["final_epsilon"],
        policy_kwargs={"net_arch": knobs["hidden"]},
        seed=job["seed"],
        device="cpu",
        **common,
    )


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    model = build(job)
    callback = StopAtReturn(job["evaluate_every"], job["episodes"], job["target"]) if "target" in job else None
    cpu, wall = time.process_time(), time.perf_counter()
    model.learn(job["steps"], callback=callback)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    gradient_steps = model._n_updates
    if job["algorithm"] == "ppo":  # SB3 counts epochs
        knobs = job["knobs"]
        gradient_steps *= -(-knobs["num_envs"] * knobs["num_steps"] // knobs["batch_size"])
    result = {"steps": model.num_timesteps, "gradient_steps": gradient_steps}
    if callback is not None:
        cpu, wall = cpu - callback.cpu, wall - callback.wall
        result |= {"reached_at": callback.reached_at, "returns": callback.returns}
    print(json.dumps(result | {"cpu_seconds": cpu, "wall_seconds": wall, "version": torch.__version__}))


if __name__ == "__main__":
    main()
