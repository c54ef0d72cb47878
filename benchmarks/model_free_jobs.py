"""The jobs of `model_free_cpu.py`: hyper-parameters, the overrides that express them, and one measured run of ours.

python benchmarks/model_free_jobs.py JOB      (a job as JSON; the last line printed is its result)
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PPO = {
    "num_envs": 8,
    "num_steps": 128,
    "batch_size": 256,
    "num_epochs": 4,
    "hidden": [64, 64],
    "learning_rate": 3e-4,
    "clip_range": 0.2,
    "linear": False,  # whether learning rate and clip range go down to zero over the run
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "value_weight": 0.5,
    "entropy_weight": 0.0,
    "max_grad_norm": 0.5,
}
PPO_TO_LEARN = PPO | {  # of the shipped experiment ppo_cartpole
    "num_steps": 32,
    "num_epochs": 10,
    "learning_rate": 1e-3,
    "linear": True,
    "gamma": 0.98,
    "gae_lambda": 0.8,
}
DQN = {  # of rl-baselines3-zoo
    "num_envs": 1,
    "train_every": 256,
    "num_updates": 128,
    "batch_size": 64,
    "hidden": [256, 256],
    "learning_rate": 2.3e-3,
    "capacity": 100_000,
    "learning_starts": 1000,
    "target_interval": 10,  # environment steps
    "gamma": 0.99,
    "exploration_fraction": 0.16,
    "final_epsilon": 0.04,
    "max_grad_norm": 10.0,
}
OURS, GYM, DOUBLE, SHIPPED, SB3 = "ours", "ours, Gymnasium's cart-pole", "ours, double", "ours, as shipped", "SB3"
TARGET = {"target": 475.0, "episodes": 10, "evaluate_every": 2048}
Job = dict[str, Any]


def jobs_of_throughput() -> Iterator[Job]:
    """PPO and DQN for a fixed number of steps."""
    for algorithm, knobs, steps in (("ppo", PPO, 65_536), ("dqn", DQN, 12_288)):
        extra = [] if algorithm == "ppo" else [DOUBLE]
        for variant in [SB3, OURS, *extra, GYM]:
            yield {"algorithm": algorithm, "variant": variant, "knobs": knobs, "steps": steps}


def jobs_of_ppo_time() -> Iterator[Job]:
    """Training until an evaluation reaches 475."""
    for variant in (SB3, OURS):
        yield TARGET | {"algorithm": "ppo", "variant": variant, "knobs": PPO_TO_LEARN, "steps": 100_000}


def jobs_of_dqn_time() -> Iterator[Job]:
    """Training until an evaluation reaches 475; also with the hyper-parameters of our own experiment."""
    for variant in (SB3, OURS, SHIPPED):
        yield TARGET | {"algorithm": "dqn", "variant": variant, "knobs": DQN, "steps": 50_000}


def jobs_of_overhead() -> Iterator[Job]:
    """The same PPO run through the Orchestrator and as a bare loop."""
    for variant in ("bare loop", "Orchestrator"):
        yield {"algorithm": "ppo", "variant": variant, "knobs": PPO, "steps": 65_536}


def jobs_of_profile() -> Iterator[Job]:
    """The same runs as a bare loop, with the time of every part."""
    for algorithm, knobs, steps in (("ppo", PPO, 65_536), ("dqn", DQN, 12_288)):
        yield {"algorithm": algorithm, "variant": OURS, "knobs": knobs, "steps": steps, "script": "profile"}


JOBS: dict[str, Callable[[], Iterator[Job]]] = {
    "throughput": jobs_of_throughput,
    "ppo_time": jobs_of_ppo_time,
    "dqn_time": jobs_of_dqn_time,
    "overhead": jobs_of_overhead,
    "profile": jobs_of_profile,
}


def overrides(job: Job) -> list[str]:
    """Express a job's hyper-parameters as overrides of the shipped experiment."""
    steps = job["steps"]
    common = [
        f"experiment.seed={job['seed']}",
        "experiment.device=cpu",
        f"training.total_timesteps={steps}",
        f"training.stop_at_return={job.get('target', 'null')}",
        f"evaluation.every={job.get('evaluate_every', 'null')}",
        f"evaluation.episodes={job.get('episodes', 1)}",
        "checkpoint.every_seconds=null",
    ]
    if job["variant"] == GYM:
        common.append("environment.id=CartPole-v1")
    if job["variant"] == SHIPPED:
        return common
    knobs = job["knobs"]
    linear = "{{_target_: rl_lab.core.schedules.Linear, start: {}, end: {}, steps: {}}}".format
    if job["algorithm"] == "ppo":
        rate, clip = knobs["learning_rate"], knobs["clip_range"]
        cycle = f"[{{collect: {knobs['num_steps']}}}, update_controller]"
        own = [
            f"environment.num_envs={knobs['num_envs']}",
            f"controllers.actor.network.hidden={knobs['hidden']}",
            f"controllers.critic.network.hidden={knobs['hidden']}",
            f"workflow.num_epochs={knobs['num_epochs']}",
            f"workflow.minibatch_size={knobs['batch_size']}",
            f"workflow.gamma={knobs['gamma']}",
            f"workflow.gae_lambda={knobs['gae_lambda']}",
            f"workflow.value_weight={knobs['value_weight']}",
            f"workflow.entropy_weight={knobs['entropy_weight']}",
            f"workflow.clip_range={linear(clip, 0.0, steps) if knobs['linear'] else clip}",
            f"optimizers.agent.learning_rate={linear(rate, 0.0, steps) if knobs['linear'] else rate}",
        ]
    else:
        # SB3 moves the target while it collects, every 10 steps; the network changes only in the 128 updates after
        # every 256 steps. So the target is the network before those updates: as a copy after every 128 updates.
        every, updates = knobs["train_every"], knobs["num_updates"]
        cycle = f"[{{collect: {every}}}, {{update_controller: {{ratio: {updates / every}}}}}]"
        first = -(-knobs["learning_starts"] // every) * every  # steps before SB3's first updates
        own = [
            "algorithm.n_step=1",
            "buffer.window=null",
            "buffer.pad=false",
            f"buffer.capacity={knobs['capacity']}",
            f"buffer.batch_size={knobs['batch_size']}",
            f"buffer.min_size={first - every}",
            f"components.q_network.hidden={knobs['hidden']}",
            f"optimizers.agent.learning_rate={knobs['learning_rate']}",
            f"workflow.epsilon={linear(1.0, knobs['final_epsilon'], int(knobs['exploration_fraction'] * steps))}",
            f"workflow.gamma={knobs['gamma']}",
            "workflow.target_rate=1.0",
            f"workflow.target_every={updates}",
            f"workflow.double={job['variant'] == DOUBLE}",
        ]
    phase = f"{{name: training, buffer: replay, duration_steps: {steps}, workflow_hooks: {cycle}}}"
    return [
        *common,
        *own,
        f"optimizers.agent.max_grad_norm={knobs['max_grad_norm']}",
        f"training.phases=[{phase}]",
    ]


class Stopwatch:
    """CPU and wall seconds, without the calls that are left out."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0

    def start(self) -> None:
        """Begin to count."""
        self.cpu -= time.process_time()
        self.wall -= time.perf_counter()

    def stop(self) -> None:
        """Stop counting."""
        self.cpu += time.process_time()
        self.wall += time.perf_counter()

    def leave_out(self, owner: Any, name: str) -> Stopwatch:
        """Stop while a method runs, and count that in a stopwatch of its own."""
        method, own = getattr(owner, name), Stopwatch()

        def call(*args: Any, **kwargs: Any) -> Any:
            self.stop()
            own.start()
            try:
                return method(*args, **kwargs)
            finally:
                own.stop()
                self.start()

        setattr(owner, name, call)
        return own


def run_ours(job: Job) -> dict[str, Any]:
    """Train as the command line does, with its records and a plain dashboard, and measure it."""
    import tensorboardX  # noqa: F401  (a run imports it when it begins; imports are not counted)
    import torch

    from rl_lab.build import build_experiment
    from rl_lab.composition import load_experiment
    from rl_lab.orchestration.dashboard import Dashboard
    from rl_lab.orchestration.loop import training_loop

    composed = load_experiment(f"{job['algorithm']}_cartpole", overrides(job))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        experiment = build_experiment(composed, folder)
        watch = Stopwatch()
        if job["variant"] == "bare loop":
            parts = experiment.parts()
            watch.start()
            for _ in training_loop(parts.workflow, parts.scheduler, parts.collector, parts.sources):
                pass
            watch.stop()
            result = {}
        else:
            orchestrator = experiment.orchestrator(folder, Dashboard(console=False))
            saving = watch.leave_out(orchestrator, "save")
            watch.leave_out(orchestrator.checkpoints, "save_best")
            watch.leave_out(experiment.evaluator.collector, "collect_episodes")
            inside = Stopwatch()
            orchestrator._events = _counted(orchestrator._events, inside)
            watch.start()
            orchestrator.run()
            watch.stop()
            result = {"loop_cpu_seconds": inside.cpu, "save_cpu_seconds": saving.cpu, "save_wall_seconds": saving.wall}
        history = experiment.evaluator.history
        if "target" in job:
            reached = history[-1].return_mean >= job["target"]
            result["reached_at"] = history[-1].env_steps if reached else None
            result["returns"] = [evaluation.return_mean for evaluation in history]
        steps, updates = experiment.scheduler.agent_steps, experiment.scheduler.updates
        if job["algorithm"] == "ppo":
            knobs = job["knobs"]
            rows = knobs["num_envs"] * knobs["num_steps"]
            updates *= knobs["num_epochs"] * -(-rows // knobs["batch_size"])
        experiment.close()
    counts = {"steps": steps, "gradient_steps": updates, "version": torch.__version__}
    return result | counts | {"cpu_seconds": watch.cpu, "wall_seconds": watch.wall}


def _counted(events: Iterator[Any], watch: Stopwatch) -> Iterator[Any]:
    """Yield the events of a loop and count the time in which it makes them."""
    while True:
        watch.start()
        event = next(events, None)
        watch.stop()
        if event is None:
            return
        yield event


def main() -> None:
    print(json.dumps(run_ours(json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
