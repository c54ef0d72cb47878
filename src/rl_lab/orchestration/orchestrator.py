"""Orchestrator: consumes the events of the loop; logs, evaluates, saves. Knows nothing of any algorithm."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_lab.core.batch import COLUMNS, Batch
from rl_lab.core.capture import HookCapture, device_stream
from rl_lab.core.errors import RunError
from rl_lab.core.workflow import Event
from rl_lab.envs.pool import EnvironmentFault
from rl_lab.orchestration.checkpoint import Checkpoint, CheckpointManager
from rl_lab.orchestration.dashboard import Dashboard, Status
from rl_lab.orchestration.loggers import MetricSums, prefixed
from rl_lab.orchestration.loop import advance_schedules, run_hook, training_loop
from rl_lab.orchestration.recorder import Recorder
from rl_lab.orchestration.run_parts import RunParts
from rl_lab.orchestration.signals import stop_on_signal
from rl_lab.orchestration.state_files import encode

FINISHED, STOPPED = 0, 75  # exit codes
MAX_FAILED_SAVES = 3
MAX_ROLLBACKS = 3
MAX_KEPT_BATCHES = 10  # that held a number which is not finite
NONFINITE_POLICIES = ("stop", "skip", "rollback")


class RollBack(Exception):  # noqa: N818
    """Raised inside a hook to go back to the last checkpoint."""


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
    captures: bool = False  # update hooks become CUDA graphs
    nonfinite: str = "stop"  # what a number that is not finite does: stop, skip its step, or roll back
    facts: Mapping[str, Any] | None = None  # for the manifest: config hash, device


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
        parts: RunParts,
        settings: RunSettings,
        folder: str | Path,
        checkpoints: CheckpointManager,
        dashboard: Dashboard | None = None,
    ) -> None:
        folder = Path(folder)
        self.parts, self.settings, self.folder, self.checkpoints = parts, settings, folder, checkpoints
        self.scheduler, self.evaluator, self.counters = parts.scheduler, parts.evaluator, parts.counters
        self.recorder = Recorder(folder, tensorboard=settings.tensorboard, dashboard=dashboard)
        self._logged_steps = self._logged_updates = 0
        self._evaluated_steps = self._evaluated_updates = 0
        self._saved_steps = 0
        self._saved_at = self._started_at = time.monotonic()
        self._wall_before = 0.0  # seconds of earlier sessions
        self._steps_before = self._updates_before = 0
        self._stopping = False
        self._cycles = 0
        self._phase = self.scheduler.current_phase().name
        self._phase_index = self.scheduler.phase_index
        self._is_online = {phase.name: phase.type == "online" for phase in self.scheduler.phases}
        self._shown: dict[str, float] = {}
        self._failed_saves = 0
        self._rollbacks = 0
        self.capture = HookCapture(parts.seeds.generators, deferred=True) if settings.captures else None
        if self.capture is not None:
            parts.evaluator.act = self.capture.act(parts.workflow.act, compiled=False)
        self._events = self._loop()

    def run(self) -> int:
        """Train until the curriculum ends (0) or a signal asks to stop (75)."""
        with device_stream(self.parts.collector.device):
            return self._run()

    def _run(self) -> int:
        self._started_at = self._saved_at = time.monotonic()
        self.recorder.open(self._status(), env_steps=self.counters.env_steps, resumed=self.counters.actions > 0)
        try:
            with stop_on_signal([self.stop]):
                while True:
                    try:
                        return self._run_to_end()
                    except RollBack:
                        self._roll_back()
        except EnvironmentFault as fault:
            raise RunError(f"{fault}\nThe last good checkpoint is intact.") from fault
        finally:
            self.recorder.close()

    def _run_to_end(self) -> int:
        if self.counters.actions == 0:
            self.save()
        while not self._stopping and not self.is_finished():
            self._consume(next(self._events))
        if not self.is_finished():
            self.save(required=True)
            self._write_summary(finished=False)
            return STOPPED
        self._finish()
        return FINISHED

    def stop(self) -> None:
        """Ask the run to save and stop at the next action."""
        self._stopping = True
        with suppress(RuntimeError):  # a signal may come while a line is being printed
            self.recorder.message("stopping: the run is saved at the next action; Ctrl-C again aborts")

    def _loop(self) -> Iterator[Event]:
        parts = self.parts
        return training_loop(
            parts.workflow, parts.scheduler, parts.collector, parts.sources, parts.evaluator, self._run_hook
        )

    def _run_hook(self, *given: Any) -> Event:
        event = run_hook(*given, on_nonfinite=self._on_nonfinite, capture=self.capture)
        # An infinite weight behind a unit that saturates leaves loss and gradients finite.
        if event.updates and self.parts.any_weight_overflows():
            self._refuse_nonfinite_weights()
        return event

    @contextmanager
    def by_cycles(self) -> Iterator[Callable[[], None]]:
        """Give the run into the caller's hands: each call runs one cycle as `run` does, logs and saves included."""
        with device_stream(self.parts.collector.device):
            self.recorder.open(self._status(), env_steps=self.counters.env_steps, resumed=self.counters.actions > 0)
            try:
                yield self._run_cycle
            finally:
                self.recorder.close()

    def _run_cycle(self) -> None:
        cycles = self._cycles
        while self._cycles == cycles:
            self._consume(next(self._events))

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

    def save(self, *, required: bool = False) -> None:
        """Write a checkpoint of everything. A disk that refuses is waited for, unless the save is required."""
        self._saved_at = time.monotonic()
        self._saved_steps = self.counters.agent_steps
        self.check_captured()
        self._refuse_nonfinite_weights()  # a checkpoint never holds one
        try:
            self._check_space()
            state = self.get_state()  # syncs the log first: its length is part of the state
            self.checkpoints.save(self.counters.actions, state, self._facts(), self._histories())
        except OSError as error:
            self._failed_saves += 1
            cause = f"checkpoint {self.counters.actions} could not be written: {error.strerror or error}"
            if required or self._failed_saves >= MAX_FAILED_SAVES:
                raise RunError(
                    f"{cause}. This was failure {self._failed_saves} in a row; the last good checkpoint is intact in "
                    f"{self.checkpoints.folder}, and the same command continues from it."
                ) from None
            self.recorder.warn(f"{cause}; training goes on")
            return
        self._failed_saves = 0

    def _histories(self) -> dict[str, Any]:
        return {name: source.history for name, source in self.parts.sources.items() if source.history is not None}

    def _check_space(self) -> None:
        free = self.checkpoints.files.free_bytes(self.folder)
        if free < 2 * self.checkpoints.last_bytes:
            raise OSError(28, f"only {free:,} bytes are free, less than twice the last checkpoint")

    def _on_nonfinite(self, found: str, batch: Batch | None) -> None:
        """Do what the policy says about a number that is not finite."""
        where = self._keep_batch(batch)
        if self.settings.nonfinite == "skip":
            self.recorder.warn(f"{found}; skipped")
            return
        if self._can_roll_back():
            raise RollBack
        raise RunError(f"{found}. The step was not applied; the last checkpoint is good.{where}")

    def _refuse_nonfinite_weights(self) -> None:
        if (part := self.parts.nonfinite_part()) is not None:
            if self._can_roll_back():
                raise RollBack
            raise RunError(f"a weight of '{part}' is not finite; the last good checkpoint is intact")

    def _can_roll_back(self) -> bool:
        wanted = self.settings.nonfinite == "rollback" and self._rollbacks < MAX_ROLLBACKS
        return wanted and bool(self.checkpoints.numbered())

    def _keep_batch(self, batch: Batch | None) -> str:
        folder, number = self.folder / "nonfinite", f"{self.counters.actions:010d}"
        kept = self.checkpoints.files.names(folder)
        if batch is None or len(kept) >= MAX_KEPT_BATCHES:
            return ""
        before = sum(name.startswith(number) for name in kept)  # one hook may meet several
        tensors, _ = encode({name: getattr(batch, name) for name in COLUMNS})
        path = folder / f"{number}{f'-{before + 1}' if before else ''}.safetensors"
        try:
            self.checkpoints.files.make_folder(folder)
            self.checkpoints.files.write(path, tensors)
        except OSError as error:
            return f" Its batch could not be kept: {error.strerror}."
        return f" Its batch is in {path}."

    def _roll_back(self) -> None:
        self._rollbacks += 1
        checkpoint = self.checkpoints.load_latest()
        if checkpoint is None:
            raise RunError("there is no good checkpoint to roll back to")
        seconds = self._wall_seconds()
        self.restore(checkpoint)
        self._wall_before, self._started_at = seconds, time.monotonic()
        self.parts.seeds.reseed("rollback", self._rollbacks)
        self.recorder.warn(f"rolled back to {self.counters.agent_steps:,} agent steps, with fresh random numbers")
        self._events = self._loop()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint, in place."""
        if self.capture is not None:
            self.capture.clear()
        lost = self.parts.set_state(checkpoint.state, checkpoint.histories)
        if lost:
            self.recorder.warn(f"{lost} environments did not come back the same: their episodes were cut there")
        run = checkpoint.state["run"]
        self._logged_steps, self._logged_updates = run["logged_steps"], run["logged_updates"]
        self._evaluated_steps, self._evaluated_updates = run["evaluated_steps"], run["evaluated_updates"]
        self._wall_before = run["wall_seconds"]
        self._rollbacks = max(self._rollbacks, run["rollbacks"])
        self._phase = self.scheduler.current_phase().name  # also passes the end of a cycle that was just finished
        self._cycles, self._phase_index = self.scheduler.cycles, self.scheduler.phase_index
        self._saved_steps = self._steps_before = self.counters.agent_steps
        self._updates_before = self.counters.updates
        self.recorder.truncate(run["jsonl_offset"], self.counters.env_steps)

    def is_finished(self) -> bool:
        """Whether nothing is left to do, by the curriculum or by the return that was asked for."""
        target, last = self.settings.stop_at_return, self.evaluator.last
        reached = target is not None and last is not None and last.return_mean >= target
        return reached or self.scheduler.is_finished()

    def get_state(self) -> dict[str, Any]:
        """Return the parts' state and the run's own."""
        self._take_captured()
        run = {
            "logged_steps": self._logged_steps,
            "logged_updates": self._logged_updates,
            "evaluated_steps": self._evaluated_steps,
            "evaluated_updates": self._evaluated_updates,
            "rollbacks": self._rollbacks,
            "jsonl_offset": self.recorder.sync(),
            "wall_seconds": self._wall_seconds(),
        }
        return {**self.parts.get_state(), "run": run}

    def summary(self, *, finished: bool) -> dict[str, Any]:
        """Return the run in a few numbers."""
        last, best = self.evaluator.last, self.evaluator.best
        seconds = self._wall_seconds()
        return {
            "name": self.settings.name,
            "seed": self.settings.seed,
            "finished": finished,
            "total_timesteps": self.settings.total_timesteps,
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
            self.parts.sums.add_all(prefixed(event.hook, event.metrics), weight)
        if self._cycle_ended():
            self._end_cycle(online=self._is_online[event.phase])
        dashboard = self.recorder.dashboard
        if dashboard is not None and dashboard.due:
            dashboard.update(self._status())

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
        self._tell_incidents()
        steps, updates = self.counters.agent_steps, self.counters.updates
        since = steps - self._logged_steps if online else updates - self._logged_updates
        phase_ended = self.scheduler.phase_index > self._phase_index and not self.scheduler.is_finished()
        self._phase_index = self.scheduler.phase_index
        if phase_ended:
            self._take_captured()
        # What a phase says of itself must not be taken for the next one's.
        if since >= self.settings.log_every or (phase_ended and len(self.parts.sums)):
            self._log_means()
        every = self.settings.evaluate_every if self.parts.workflow.acts else None
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
        evaluated = (self._evaluated_steps, self._evaluated_updates)
        current = (self.counters.agent_steps, self.counters.updates)  # offline, only updates make another agent
        untested = self.parts.workflow.acts and (self.evaluator.last is None or evaluated != current)
        self._take_captured()
        if untested or len(self.parts.sums):
            self.counters.actions += 1  # what follows is in no checkpoint yet, not even in one of the last cycle's end
            if untested:
                advance_schedules(self.parts.workflow, self.parts.sources, self.scheduler)
                self.evaluator()
                self._record_evaluation()
            if len(self.parts.sums):
                self._log_means()
        self.save(required=True)
        self._write_summary(finished=True)

    def _record_evaluation(self) -> None:
        evaluation = self.evaluator.last
        assert evaluation is not None
        self._tell_incidents()
        self._evaluated_steps, self._evaluated_updates = self.counters.agent_steps, self.counters.updates
        inspection = self.evaluator.inspection
        metrics: dict[str, Any] = prefixed("evaluate", {**inspection.metrics, **evaluation.metrics()})
        self._write(metrics | {"eval/returns": list(evaluation.returns)})
        self.recorder.write_pictures(inspection.pictures, self.counters.env_steps)
        if evaluation is self.evaluator.best:
            try:
                self.checkpoints.save_best(self.parts.parameters(), self._facts())
            except OSError as error:
                self.recorder.warn(f"the best agent could not be written: {error.strerror}; training goes on")
        if self.recorder.dashboard is not None:
            self.recorder.dashboard.evaluation(self._status())

    def _tell_incidents(self) -> None:
        for incident in (incident for pool in self.parts.incidents for incident in pool):
            self.recorder.warn(incident)  # once

    def _log_means(self) -> None:
        self._logged_steps, self._logged_updates = self.counters.agent_steps, self.counters.updates
        self.check_captured()
        self._take_captured()
        self._shown |= (means := self.parts.sums.drain())
        self._write(means | {"time/steps_per_second": self._steps_per_second()})

    def _take_captured(self) -> None:
        """Add what captured updates summed on the device."""
        for hook, metrics, count in () if self.capture is None else self.capture.drain():
            self.parts.sums.add_all(prefixed(hook, metrics), count)

    def check_captured(self) -> None:
        """Read the flags that captured updates left on the device; the steps themselves were not applied."""
        for optimizer in self.parts.workflow.optimizers() if self.capture is not None else ():
            if optimizer.nonfinite.item():
                optimizer.nonfinite.zero_()
                self._on_nonfinite("an update met a loss or gradient that is not finite", None)

    def _write(self, metrics: Mapping[str, Any]) -> None:
        counters = self.counters
        tags = {
            "phase": self._phase,
            "agent_steps": counters.agent_steps,
            "updates": counters.updates,
            "episodes": counters.episodes,
        }
        self.recorder.write(metrics, counters.env_steps, tags)

    def _write_summary(self, *, finished: bool) -> None:
        text = json.dumps(self.summary(finished=finished), indent=1)
        try:
            self.checkpoints.files.replace(self.folder / "summary.json", text.encode())
        except OSError as error:
            self.recorder.warn(f"summary.json could not be written: {error.strerror}")

    def _facts(self) -> dict[str, Any]:
        last = self.evaluator.last
        return {
            "version": 1,
            "global_step": self.counters.agent_steps,
            "workflow_name": type(self.parts.workflow).__name__,
            "run_id": self.folder.name,
            "counters": vars(self.counters).copy(),
            "replay_meta": {name: {"size": len(source)} for name, source in self.parts.sources.items()},
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
            updates_per_second=self._per_second(counters.updates - self._updates_before),
            eta_seconds=left,
            metrics=self._shown,
            evaluations=[(entry.env_steps, entry.return_mean) for entry in self.evaluator.history],
            checkpoint_age_seconds=time.monotonic() - self._saved_at,
            warnings=self.recorder.warnings,
        )

    def _steps_per_second(self) -> float:
        return self._per_second(self.counters.agent_steps - self._steps_before)

    def _per_second(self, count: int) -> float:
        return count / max(time.monotonic() - self._started_at, 1e-9)

    def _wall_seconds(self) -> float:
        return self._wall_before + time.monotonic() - self._started_at
