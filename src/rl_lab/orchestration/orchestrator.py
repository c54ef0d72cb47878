"""Orchestrator: consumes the events of the loop; logs, evaluates, saves. Knows nothing of any algorithm."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rl_lab.core.optim import Optimizer
from rl_lab.core.seeding import SeedTree, global_states, restore_global_states
from rl_lab.core.workflow import Event, Workflow
from rl_lab.data.collector import RolloutCollector
from rl_lab.orchestration.checkpoint import CheckpointManager
from rl_lab.orchestration.dashboard import Dashboard, Status
from rl_lab.orchestration.evaluation import Evaluator
from rl_lab.orchestration.loggers import JsonlLogger, MetricSums, Record, TensorBoardLogger, prefixed
from rl_lab.orchestration.loop import training_loop
from rl_lab.orchestration.phase_scheduler import PhaseScheduler

FINISHED, STOPPED = 0, 75  # exit codes


@dataclass(frozen=True)
class RunSettings:
    """What the Orchestrator needs to know of the configuration."""

    name: str
    seed: int
    total_timesteps: int | None = None
    stop_at_return: float | None = None
    evaluate_every: int | None = None
    log_every: int = 1000
    tensorboard: bool = True
    checkpoint_every_seconds: float | None = 60.0
    checkpoint_every_steps: int | None = None
    facts: Mapping[str, Any] | None = None  # for the manifest: config hash, device


@dataclass
class Counters:
    """The four counters of a run, and the finished hooks that number its checkpoints."""

    env_steps: int = 0
    agent_steps: int = 0
    updates: int = 0
    episodes: int = 0
    actions: int = 0


class WorkflowLogger:
    """What a workflow logs itself: the mean since the last record, under `workflow/`."""

    def __init__(self, sums: MetricSums) -> None:
        self._sums = sums

    def log(self, key: str, value: Any) -> None:
        """Record a value."""
        self._sums.add(key if "/" in key else f"workflow/{key}", value)


class Orchestrator:
    """Runs an experiment in a folder. Everything it uses is given to it."""

    def __init__(
        self,
        *,
        settings: RunSettings,
        folder: Path,
        workflow: Workflow,
        scheduler: PhaseScheduler,
        collector: RolloutCollector,
        sources: Mapping[str, Any],
        evaluator: Evaluator,
        seeds: SeedTree,
        counters: Counters,
        sums: MetricSums,
        components: Mapping[str, Any],
        controllers: Mapping[str, Any],
        optimizers: Mapping[str, Optimizer],
        checkpoints: CheckpointManager,
        dashboard: Dashboard | None = None,
    ) -> None:
        self.settings, self.folder, self.checkpoints = settings, folder, checkpoints
        self.workflow, self.scheduler, self.collector, self.sources = workflow, scheduler, collector, sources
        self.evaluator, self.seeds, self.counters, self.sums = evaluator, seeds, counters, sums
        self.components, self.controllers, self.optimizers = components, controllers, optimizers
        self.dashboard = dashboard
        self._logged_steps = self._logged_updates = 0
        self._evaluated_steps = 0
        self._saved_steps = 0
        self._saved_at = self._started_at = time.monotonic()
        self._wall_before = 0.0  # seconds of earlier sessions
        self._steps_before = 0
        self._signalled = 0
        self._cycles = 0
        self._phase = scheduler.current_phase().name
        self._is_online = {phase.name: phase.type == "online" for phase in scheduler.phases}
        self._shown: dict[str, float] = {}
        self._jsonl: JsonlLogger | None = None
        self._tensorboard: TensorBoardLogger | None = None
        self._events = training_loop(workflow, scheduler, collector, sources, evaluator)
        self.stopped_early = False
        self.warnings: list[str] = []

    def run(self) -> int:
        """Train until the curriculum ends (0) or a signal asks to stop (75)."""
        self._open()
        try:
            with self._signals():
                if self.counters.actions == 0:
                    self.save()
                for event in self._events:
                    self._consume(event)
                    if self._signalled:
                        self.save()
                        self._write_summary(finished=False)
                        return STOPPED
                    if self.stopped_early:
                        break
                self._finish()
                return FINISHED
        finally:
            self._close()

    def train_step(self) -> dict[str, float]:
        """Run one cycle of the scheduler and return the metrics of its events."""
        metrics: dict[str, float] = {}
        for event in self._events:
            self._count(event)
            metrics |= {key: float(value) for key, value in prefixed(event.hook, event.metrics).items()}
            if self._cycle_ended():
                break
        return metrics

    def eval_step(self) -> dict[str, float]:
        """Run one evaluation and return its metrics."""
        return {key: float(value) for key, value in prefixed("evaluate", self.evaluator()).items()}

    def save(self) -> None:
        """Write a checkpoint of everything."""
        if self._jsonl is not None:
            self._jsonl.sync()
        self.checkpoints.save(self.counters.actions, self.get_state(), self._facts())
        self._saved_at = time.monotonic()
        self._saved_steps = self.counters.agent_steps

    def parameters(self) -> dict[str, Any]:
        """Return what acting needs: the weights of components, controllers and workflow."""
        return {
            "components": _module_states(self.components),
            "controllers": _module_states(self.controllers),
            "workflow_custom": self.workflow.get_state(),
        }

    def set_parameters(self, state: Mapping[str, Any]) -> None:
        """Load what `parameters` returned."""
        _load_modules(self.components, state["components"])
        _load_modules(self.controllers, state["controllers"])
        self.workflow.set_state(state["workflow_custom"])

    def is_finished(self) -> bool:
        """Whether nothing is left to do, by the curriculum or by the return that was asked for."""
        target, last = self.settings.stop_at_return, self.evaluator.last
        reached = target is not None and last is not None and last.return_mean >= target
        return reached or self.scheduler.is_finished()

    def get_state(self) -> dict[str, Any]:
        """Return everything that decides how the run goes on."""
        return {
            **self.parameters(),
            "optimizers": {name: optimizer.get_state() for name, optimizer in self.optimizers.items()},
            "phase_state": self.scheduler.get_state(),
            "collector": self.collector.get_state(),
            "sources": {name: source.get_state() for name, source in self.sources.items()},
            "evaluation": self.evaluator.get_state(),
            "generators": self.seeds.get_state(),
            "rng_state": global_states(),
            "run": {
                "counters": vars(self.counters).copy(),
                "sums": self.sums.get_state(),
                "logged_steps": self._logged_steps,
                "logged_updates": self._logged_updates,
                "evaluated_steps": self._evaluated_steps,
                "jsonl_offset": 0 if self._jsonl is None else self._jsonl.offset,
                "wall_seconds": self._wall_seconds(),
            },
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore everything in place."""
        self.set_parameters(state)
        for name, optimizer in self.optimizers.items():
            optimizer.set_state(state["optimizers"][name])
        self.scheduler.set_state(state["phase_state"])
        self.collector.set_state(state["collector"])
        for name, source in self.sources.items():
            source.set_state(state["sources"][name])
        self.evaluator.set_state(state["evaluation"])
        self.seeds.set_state(state["generators"])
        restore_global_states(state["rng_state"])
        run = state["run"]
        for name, value in run["counters"].items():
            setattr(self.counters, name, value)
        self.sums.set_state(run["sums"])
        self._logged_steps, self._logged_updates = run["logged_steps"], run["logged_updates"]
        self._evaluated_steps = run["evaluated_steps"]
        self._wall_before = run["wall_seconds"]
        self._phase = self.scheduler.current_phase().name  # also passes the end of a cycle that was just finished
        self._cycles = self.scheduler.cycles
        self._saved_steps = self._steps_before = self.counters.agent_steps
        path = self.folder / "metrics.jsonl"
        if path.exists():
            logger = JsonlLogger(path)
            logger.truncate(run["jsonl_offset"])
            logger.close()

    def summary(self, *, finished: bool) -> dict[str, Any]:
        """Return the run in a few numbers."""
        last, best = self.evaluator.last, self.evaluator.best
        seconds = self._wall_seconds()
        return {
            "name": self.settings.name,
            "seed": self.settings.seed,
            "finished": finished,
            **{name: value for name, value in vars(self.counters).items() if name != "actions"},
            "last_evaluation": None if last is None else last.summary(),
            "best_evaluation": None if best is None else best.summary(),
            "wall_seconds": seconds,
            "steps_per_second": self.counters.agent_steps / max(seconds, 1e-9),
        }

    def _consume(self, event: Event) -> None:
        self._count(event)
        self._phase = event.phase
        if event.hook == "evaluate":
            self._record_evaluation()
        else:
            # A collect_step need not count its episodes; the Collector's metrics are means over episodes.
            weight = max(event.episodes, 1) if event.hook == "collect" else event.updates
            self.sums.add_all(prefixed(event.hook, event.metrics), weight)
        if self._cycle_ended():
            self._end_cycle(online=self._is_online[event.phase])
        if self.dashboard is not None and self.dashboard.due:
            self.dashboard.update(self._status())

    def _count(self, event: Event) -> None:
        self.counters.env_steps += event.env_steps
        self.counters.agent_steps += event.steps
        self.counters.updates += event.updates
        self.counters.episodes += event.episodes
        self.counters.actions += 1

    def _cycle_ended(self) -> bool:
        self.scheduler.next_action()  # passes over hooks that have nothing to do
        ended = self.scheduler.cycles > self._cycles
        self._cycles = self.scheduler.cycles
        return ended

    def _end_cycle(self, *, online: bool) -> None:
        steps, updates = self.counters.agent_steps, self.counters.updates
        since = steps - self._logged_steps if online else updates - self._logged_updates
        if since >= self.settings.log_every:
            self._log_means()
        every = self.settings.evaluate_every if self.workflow.acts else None
        if every is not None and steps // every > self._evaluated_steps // every:
            self.evaluator()
            self._record_evaluation()
        if self._checkpoint_due():
            self.save()

    def _checkpoint_due(self) -> bool:
        seconds, steps = self.settings.checkpoint_every_seconds, self.settings.checkpoint_every_steps
        if seconds is not None and time.monotonic() - self._saved_at >= seconds:
            return True
        return steps is not None and self.counters.agent_steps - self._saved_steps >= steps

    def _finish(self) -> None:
        last = self.evaluator.last
        if self.workflow.acts and (last is None or last.agent_steps < self.counters.agent_steps):
            self.evaluator()
            self._record_evaluation()
        self._log_means()
        self.save()
        self._write_summary(finished=True)

    def _record_evaluation(self) -> None:
        evaluation = self.evaluator.last
        assert evaluation is not None
        self._evaluated_steps = self.counters.agent_steps
        metrics: dict[str, Any] = prefixed("evaluate", evaluation.metrics())
        self._write(metrics | {"eval/returns": list(evaluation.returns)})
        if evaluation is self.evaluator.best:
            self.checkpoints.save_best(self.parameters(), self._facts())
        target = self.settings.stop_at_return
        if target is not None and evaluation.return_mean >= target:
            self.stopped_early = True
        if self.dashboard is not None:
            self.dashboard.evaluation(self._status())

    def _log_means(self) -> None:
        self._logged_steps, self._logged_updates = self.counters.agent_steps, self.counters.updates
        self._shown |= (means := self.sums.drain())
        self._write(means | {"time/steps_per_second": self._steps_per_second()})

    def _write(self, metrics: Mapping[str, Any]) -> None:
        counters = self.counters
        tags = {
            "phase": self._phase,
            "agent_steps": counters.agent_steps,
            "updates": counters.updates,
            "episodes": counters.episodes,
        }
        now = time.time()
        records = [Record(now, counters.env_steps, key, value, tags) for key, value in metrics.items()]
        for logger in (self._jsonl, self._tensorboard):
            if logger is not None:
                logger.write(records)

    def _write_summary(self, *, finished: bool) -> None:
        path = self.folder / "summary.json"
        temporary = path.with_name(f".summary.tmp-{os.getpid()}")
        temporary.write_text(json.dumps(self.summary(finished=finished), indent=1))
        os.replace(temporary, path)

    def _facts(self) -> dict[str, Any]:
        last = self.evaluator.last
        return {
            "version": 1,
            "global_step": self.counters.agent_steps,
            "workflow_name": type(self.workflow).__name__,
            "run_id": self.folder.name,
            "counters": vars(self.counters).copy(),
            "replay_meta": {name: {"size": len(source)} for name, source in self.sources.items()},
            "evaluation": None if last is None else last.summary(),
            **(self.settings.facts or {}),
        }

    def _status(self) -> Status:
        scheduler, counters = self.scheduler, self.counters
        rate = self._steps_per_second()
        total = self.settings.total_timesteps
        left = None if total is None or rate <= 0 else max(total - counters.agent_steps, 0) / rate
        phase = scheduler.current_phase()
        return Status(
            name=f"{self.settings.name} (seed {self.settings.seed})",
            phase=phase.name,
            phase_progress=phase.progress,
            phase_index=min(scheduler.phase_index, len(scheduler.phases) - 1),
            num_phases=len(scheduler.phases),
            env_steps=counters.env_steps,
            agent_steps=counters.agent_steps,
            updates=counters.updates,
            episodes=counters.episodes,
            total_steps=total,
            steps_per_second=rate,
            eta_seconds=left,
            metrics=self._shown,
            evaluations=[(entry.env_steps, entry.return_mean) for entry in self.evaluator.history],
            checkpoint_age_seconds=time.monotonic() - self._saved_at,
            warnings=self.warnings,
        )

    def _steps_per_second(self) -> float:
        elapsed = time.monotonic() - self._started_at
        return (self.counters.agent_steps - self._steps_before) / max(elapsed, 1e-9)

    def _wall_seconds(self) -> float:
        return self._wall_before + time.monotonic() - self._started_at

    def _open(self) -> None:
        self._started_at = self._saved_at = time.monotonic()
        self._jsonl = JsonlLogger(self.folder / "metrics.jsonl")
        if self.settings.tensorboard:
            purge = self.counters.env_steps + 1 if self.counters.actions else None
            self._tensorboard = TensorBoardLogger(self.folder / "tensorboard", purge)
        if self.dashboard is not None:
            self.dashboard.start(self._status())

    def _close(self) -> None:
        for part in (self._jsonl, self._tensorboard, self.dashboard):
            if part is not None:
                part.close()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop at the next action boundary on SIGTERM and the first Ctrl-C; the second Ctrl-C aborts at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: Any) -> None:
            self._signalled += 1
            if self._signalled > 1 and number == signal.SIGINT:
                raise KeyboardInterrupt
            if self.dashboard is not None:
                self.dashboard.message("stopping: the run is saved at the next action; Ctrl-C again aborts")

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _module_states(modules: Mapping[str, Any]) -> dict[str, Any]:
    return {name: module.state_dict() for name, module in modules.items() if isinstance(module, nn.Module)}


def _load_modules(modules: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    for name, module in modules.items():
        if isinstance(module, nn.Module):
            module.load_state_dict(states[name])
