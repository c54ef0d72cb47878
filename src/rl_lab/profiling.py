"""Profiles: where the time of a run goes, what one update computes, and how much of the machine that uses."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import psutil
import torch
from omegaconf import DictConfig

from rl_lab.build import Experiment, build_experiment
from rl_lab.composition import override
from rl_lab.core.capture import WARM_UP_CALLS
from rl_lab.core.errors import UserError
from rl_lab.core.phase import Hook, Phase
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.stopwatch import Line, Stopwatch, device_wait, watch_run
from rl_lab.orchestration.update_cost import UpdateCost, update_cost
from rl_lab.runs import load_run

ALONE = ("evaluation.every=null", "checkpoint.every_seconds=null", "checkpoint.every_steps=null")
MAX_PREPARATION_SECONDS = 600.0  # filling buffers, compiling, warming up
_ENDLESS = 10**12


@dataclass(frozen=True)
class Profile:
    """The time of some cycles of one phase."""

    name: str
    phase: str
    device: str
    captured: bool
    num_cycles: int
    seconds: float
    agent_steps: int
    updates: int
    lines: list[Line]  # the last one is what no other accounts for
    memory: dict[str, int]  # bytes
    costs: list[UpdateCost] = field(default_factory=list)


def profile_run(
    folder: str | Path,
    overrides: Sequence[str] = (),
    *,
    phase: str | None = None,
    cycles: int | None = None,
    seconds: float = 5.0,
    allow: Sequence[str] = (),
) -> Profile:
    """Profile a run where its newest checkpoint left it. Nothing is written to its folder."""
    with tempfile.TemporaryDirectory() as work:
        experiment = load_run(Path(folder), Path(work), [*overrides, *ALONE], allow=allow)
        return _profiled(experiment, Path(work), phase, cycles, seconds)


def profile_experiment(
    composed: DictConfig,
    *,
    phase: str | None = None,
    cycles: int | None = None,
    seconds: float = 5.0,
    allow: Sequence[str] = (),
) -> Profile:
    """Profile an experiment from its beginning, with buffers that were filled by random actions."""
    with tempfile.TemporaryDirectory() as work:
        experiment = build_experiment(override(composed, ALONE), Path(work), allow=allow)
        return _profiled(experiment, Path(work), phase, cycles, seconds)


def _profiled(experiment: Experiment, work: Path, name: str | None, cycles: int | None, seconds: float) -> Profile:
    try:
        phase = choose_phase(experiment.scheduler, name)
        fill_sources(experiment, phase)
        experiment.scheduler = endless_scheduler(experiment, phase)
        orchestrator = experiment.orchestrator(work)
        stopwatch = watch_run(orchestrator)
        with orchestrator.by_cycles() as run_cycle:
            warm_up(run_cycle, stopwatch, phase)
            profile = _timed(experiment, orchestrator, stopwatch, run_cycle, cycles, seconds)
            costs = [update_cost(orchestrator, hook) for hook in _update_hooks(phase) if _can_run(experiment, hook)]
        return replace(profile, costs=costs)
    finally:
        experiment.close()


def choose_phase(scheduler: PhaseScheduler, name: str | None) -> Phase:
    """Return the phase of a name; otherwise the next one that learns, or the last that did."""
    phases = scheduler.phases
    if name is not None:
        for phase in phases:
            if phase.name == name:
                return phase
        raise UserError(
            "there is no such phase",
            key="--phase",
            value=name,
            valid=[phase.name for phase in phases],
            remedy="name one of them",
        )
    learning = [i for i, phase in enumerate(phases) if _update_hooks(phase)]
    ahead = [i for i in learning if i >= scheduler.phase_index]
    return phases[(ahead or learning[-1:] or [0])[0]]


def endless_scheduler(experiment: Experiment, phase: Phase) -> PhaseScheduler:
    """Return a curriculum of this phase only, without end, whose counters go on where they are."""
    endless = replace(phase, duration_steps=None, duration_updates=None, duration_cycles=_ENDLESS)
    sources, before = experiment.sources, experiment.scheduler
    scheduler = PhaseScheduler(
        [endless],
        ready=lambda name: name is None or sources[name].ready,
        needs_source=experiment.workflow.takes_batch,
    )
    scheduler.agent_steps, scheduler.updates = before.agent_steps, before.updates
    return scheduler


def fill_sources(experiment: Experiment, phase: Phase) -> None:
    """Collect with random actions until the phase can learn; what it collects itself before is left to it."""
    workflow, collector = experiment.workflow, experiment.collector
    collects = any(hook.name == "collect" for hook in phase.hooks)
    names = [hook.source for hook in _update_hooks(phase) if workflow.takes_batch(hook.name)]
    deadline = perf_counter() + MAX_PREPARATION_SECONDS
    for name in names:
        assert name is not None
        source = experiment.sources[name]
        while not source.ready and not (collects and (source.min_size <= 1 or workflow.collects)):
            if workflow.collects or perf_counter() > deadline:
                raise UserError(
                    f"the buffer '{name}' cannot be filled for this phase",
                    key=f"training.phases: {phase.name}",
                    value=name,
                    remedy="profile a run that has data already, or lower the buffer's min_size",
                )
            source.add(collector.collect(workflow.act, 32, follow=workflow.follow).trajectory)


def warm_up(run_cycle: Callable[[], None], stopwatch: Stopwatch, phase: Phase) -> None:
    """Run cycles until every update hook has been compiled, recorded and replayed."""
    deadline = perf_counter() + MAX_PREPARATION_SECONDS
    wanted = {hook.name for hook in phase.hooks if hook.is_update}
    run_cycle()
    while any(stopwatch.calls("update", name) < WARM_UP_CALLS + 2 for name in wanted):
        if perf_counter() > deadline:
            break
        run_cycle()


def _timed(
    experiment: Experiment,
    orchestrator: Orchestrator,
    stopwatch: Stopwatch,
    run_cycle: Callable[[], None],
    cycles: int | None,
    seconds: float,
) -> Profile:
    wait = device_wait(experiment.device)
    if wait is not None:
        wait()
    before = replace(orchestrator.counters)
    stopwatch.reset()
    num_cycles = 0
    while num_cycles < cycles if cycles is not None else stopwatch.elapsed() < seconds:
        run_cycle()
        num_cycles += 1
    if wait is not None:
        stopwatch.timed("host wait", wait, "")()
    elapsed = stopwatch.elapsed()
    order = [*dict.fromkeys(hook.name for hook in orchestrator.scheduler.phases[0].hooks), ""]
    lines = sorted(stopwatch.lines(), key=lambda line: order.index(line.hook))
    lines.append(Line("", "other", elapsed - sum(line.seconds for line in lines), 0))
    return Profile(
        name=experiment.config.experiment.name,
        phase=orchestrator.scheduler.phases[0].name,
        device=experiment.device,
        captured=experiment.captures,
        num_cycles=num_cycles,
        seconds=elapsed,
        agent_steps=orchestrator.counters.agent_steps - before.agent_steps,
        updates=orchestrator.counters.updates - before.updates,
        lines=lines,
        memory=memory_of(experiment.device),
    )


def memory_of(device: str) -> dict[str, int]:
    """Return how many bytes this process holds, and the most it has held on the device."""
    found = {"host": psutil.Process().memory_info().rss}
    if device.startswith("cuda"):
        found["device, allocated"] = torch.cuda.max_memory_allocated(device)
        found["device, reserved"] = torch.cuda.max_memory_reserved(device)
    return found


def _can_run(experiment: Experiment, hook: Hook) -> bool:
    needs = experiment.workflow.takes_batch(hook.name)
    return not needs or (hook.source is not None and experiment.sources[hook.source].ready)


def _update_hooks(phase: Phase) -> list[Hook]:
    """Return the update hooks of a phase, each once, for a single call."""
    hooks = {hook.name: hook for hook in reversed(phase.hooks) if hook.is_update}
    return [replace(hook, times=1, ratio=None, source=hook.source or phase.buffer) for hook in hooks.values()][::-1]
