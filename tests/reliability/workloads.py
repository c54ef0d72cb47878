"""The runs that the tests stop, kill and damage. A new workflow joins by one line."""

from __future__ import annotations

SEGMENTS = ("small_segments", 700)  # of `faults`: several segments even in these small rings, which wrap around

_OFTEN = (
    "checkpoint.every_steps=40",
    "checkpoint.every_seconds=null",
    "evaluation.every=90",
    "evaluation.episodes=2",
    "logging.every=50",
    "logging.tensorboard=false",
    "experiment.device=cpu",
    "--quiet",
)
_REPLAY = ("buffer.capacity=120", "buffer.min_size=32", "buffer.batch_size=8")
_DQN = ("components.q_network.hidden=[8]", "optimizers.agent.learning_rate.steps=2000", *_REPLAY, *_OFTEN)
_PPO = (
    "controllers.actor.network.hidden=[8]",
    "controllers.critic.network.hidden=[8]",
    "environment.num_envs=3",
    "workflow.num_epochs=2",
    "workflow.minibatch_size=16",
    *_OFTEN,
)
_SHORT_ROLLOUTS = "training.phases.0.workflow_hooks.0.collect=9"
TOY = ("--allow=tests", *_OFTEN)
_TDMPC = (
    "_dims.latent=8",
    "algorithm.encoder_hidden=[8]",
    "algorithm.hidden=[8]",
    "components.planner.num_samples=8",
    "components.planner.num_policy_samples=2",
    "components.planner.num_elites=4",
    "components.planner.num_iterations=1",
    "environment.max_episode_steps=40",
    "buffer.capacity=120",
    "buffer.batch_size=4",
    "training.phases.0.duration_steps=50",
    "training.phases.0.workflow_hooks.0.collect=25",
    "training.total_timesteps=120",
    *_OFTEN,
)
_CONTINUOUS = (
    "algorithm.hidden=[8]",
    "environment.max_episode_steps=40",
    "training.phases.0.duration_steps=40",
    "training.phases.0.workflow_hooks.0.collect=10",
    "training.total_timesteps=160",
    *_REPLAY,
    *_OFTEN,
)
_DREAMER = (
    "_dims.deter=16",
    "_dims.units=8",
    "_dims.variables=2",
    "_dims.classes=4",
    "_dims.stoch=8",
    "environment.num_envs=2",
    "environment.max_episode_steps=30",
    "workflow.horizon=3",
    "buffer.capacity=120",
    "buffer.min_size=32",
    "buffer.batch_size=4",
    "buffer.window=9",
    "training.total_timesteps=200",
    *_OFTEN,
)
_PLANNING = (
    "components.planner.num_samples=8",
    "components.planner.horizon=2",
    "environment.num_envs=2",
    "environment.max_episode_steps=30",
    *_OFTEN,
)
_LEARNED = (
    "components.dynamics.hidden=[8]",
    "training.phases.0.duration_steps=40",
    "training.phases.0.workflow_hooks.0.collect=5",
    "training.total_timesteps=120",
    *_REPLAY,
)
_MCTS = (
    "components.planner.num_simulations=4",
    "environment.num_envs=2",
    "environment.resize=[8,8]",
    "environment.max_episode_steps=20",
    "training.phases.0.duration_steps=40",
    "training.total_timesteps=120",
    *_REPLAY,
    *_OFTEN,
)
_DREAM = (
    "components.dynamics.hidden=[8]",
    "components.q_network.hidden=[8]",
    "environment.num_envs=2",
    "buffers.replay.min_size=8",
    "buffers.replay.batch_size=8",
    "buffers.dreams.capacity=100",
    "buffers.dreams.min_size=16",
    "buffers.dreams.batch_size=8",
    "training.phases.0.duration_steps=40",
    "training.phases.0.workflow_hooks.0.collect=5",
    "training.phases.1.duration_updates=20",
    "training.phases.1.workflow_hooks.0.update_world_model=5",
    "training.phases.2.duration_steps=120",
    *_OFTEN,
)

WORKLOADS: dict[str, tuple[str, ...]] = {
    "dqn": ("dqn_cartpole", "training.total_timesteps=320", "training.phases.0.workflow_hooks.0.collect=8", *_DQN),
    "dqn_prioritized": ("dqn_cartpole", "buffer=prioritized", "training.total_timesteps=400", *_DQN),
    "dqn_gymnasium": (
        "dqn_cartpole",
        "environment.id=CartPole-v1",
        "environment.num_envs=2",
        "training.total_timesteps=400",
        *_DQN,
    ),
    "ppo_discrete": ("ppo_cartpole", "training.total_timesteps=300", _SHORT_ROLLOUTS, *_PPO),
    "ppo_continuous": ("ppo_pendulum", "training.total_timesteps=300", _SHORT_ROLLOUTS, *_PPO),
    "curriculum": ("curriculum", *_DQN),
    "recurrent": ("recurrent", *TOY),
    "recurrent_on_disk": ("recurrent", "buffers.replay.storage=disk", "+buffers.sequences.online=true", *TOY),
    "stepping": ("stepping", *TOY),
    "tdmpc2": ("tdmpc2_swingup", *_TDMPC),
    "dreamer": ("dreamer_cartpole", "training.phases.0.workflow_hooks.0.collect=8", *_DREAMER),
    "dreamer_2023": (
        "dreamerv3_dmc_2023",
        "experiment.name=dreamer_2023",
        "environment=pendulum",
        "_dims.observation_units=8",
        "buffer.storage=cpu",
        "training.precision=float32",
        "training.phases.0.duration_steps=40",
        "training.phases.0.workflow_hooks.0.collect=10",
        *_DREAMER,
    ),
    "dreamer_pixels": (
        "dreamerv1_gridworld",
        "_dims.depth=4",
        "_dims.head_units=8",
        "training.phases.0.duration_steps=40",
        "training.phases.0.workflow_hooks.0.collect=10",
        "training.phases.1.duration_updates=40",
        "training.phases.1.workflow_hooks.0.update_world_model=10",
        *(word for word in _DREAMER if "variables" not in word and "classes" not in word),
    ),
    "tdmpc2_pixels": (
        "tdmpc2_pixels",
        "components.encoder.channels=[4,4,4,4]",
        "environment.num_envs=2",
        "workflow.td_lambda=0.5",
        "training.phases.1.duration_updates=40",
        "training.phases.1.workflow_hooks.0.update_agent=10",
        *_TDMPC,
    ),
    "sac": ("sac_pendulum", "environment.num_envs=2", "components.critics.layer_norm=true", *_CONTINUOUS),
    "td3": ("td3_pendulum", *_CONTINUOUS),
    # Layers that are large enough for the products of another library (core/products.py).
    "wide": (
        "td3_pendulum",
        *_CONTINUOUS,
        "algorithm.hidden=[256,256]",
        "buffer.batch_size=256",
        "training.total_timesteps=100",
    ),
    "mpc": ("mpc_cartpole", "training.phases.0.workflow_hooks.0.collect=5", "training.total_timesteps=100", *_PLANNING),
    "mbmpc": ("mbmpc_cartpole", *_PLANNING, *_LEARNED),
    "pets": (
        "pets_swingup",
        "components.planner.num_elites=4",
        "components.planner.num_iterations=2",
        *_PLANNING,
        *_LEARNED,
    ),
    "mcts": ("mcts_gridworld", *_MCTS),
    "dream": ("dqn_in_the_dream", *_DREAM),
}


def train(name: str, folder: object, *more: str) -> list[str]:
    """Return the words of `rl-lab train` for a workload in a folder."""
    return ["train", *WORKLOADS[name], *more, f"--run-dir={folder}"]
