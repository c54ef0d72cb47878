"""Where the CPU time of one run goes, by part; the job and the table are those of `model_free_cpu.py`.

python benchmarks/model_free_profile.py JOB      (a job as JSON; the last line printed is its result)
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from model_free_jobs import Job, overrides


class Parts:
    """CPU time by part: what runs inside a part that has a name of its own counts there only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running = ["the loop around it"]
        self._since = time.process_time()

    def switch(self) -> None:
        """Give the time since the last switch to the part that runs."""
        now = time.process_time()
        name = self._running[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    def named(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose time counts under a name."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self._running.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self._running.pop()

        return call

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Count a method under a name."""
        setattr(owner, method, self.named(name, getattr(owner, method)))


def main() -> None:
    import torch

    from rl_lab.build import build_experiment
    from rl_lab.composition import load_experiment
    from rl_lab.orchestration.loop import training_loop
    from rl_lab.workflows import ppo

    job: Job = json.loads(sys.argv[1])
    parts = Parts()
    with tempfile.TemporaryDirectory() as folder:
        experiment = build_experiment(load_experiment(f"{job['algorithm']}_cartpole", overrides(job)), Path(folder))
        workflow, collector, source = experiment.workflow, experiment.collector, experiment.sources["replay"]
        parts.watch(collector.environments, "step", "environment: step")
        parts.watch(collector, "_reset_rows", "environment: seeds and resets")
        parts.watch(workflow, "act", "act")
        parts.watch(collector, "collect", "collector: its own work")
        parts.watch(source, "add", "replay: write")
        parts.watch(source, "draw", "replay: draw")
        parts.watch(source, "gather", "replay: read")
        parts.watch(workflow, "update_controller", "update: forward, losses")
        parts.watch(torch.Tensor, "backward", "update: backward")
        parts.watch(workflow.optimizer, "step", "update: norm, check, Adam")
        if job["algorithm"] == "ppo":
            parts.watch(workflow, "with_advantages", "values and advantages of the rollout")
            pieces = ppo.minibatches

            def minibatches(*args: Any) -> Iterator[Any]:
                step = parts.named("shuffled minibatches", pieces(*args).__next__)
                while True:
                    try:
                        yield step()
                    except StopIteration:
                        return

            ppo.minibatches = minibatches
        else:
            parts.watch(workflow, "_value_after", "update: value of the successors")
            parts.watch(workflow, "_move_target", "update: target network")
        started = time.process_time()
        parts._since = started
        for _ in training_loop(workflow, experiment.scheduler, collector, experiment.sources):
            pass
        parts.switch()
        seconds = time.process_time() - started
        steps = experiment.scheduler.agent_steps
        experiment.close()
    print(json.dumps({"steps": steps, "cpu_seconds": seconds, "wall_seconds": seconds, "parts": parts.seconds}))


if __name__ == "__main__":
    main()
