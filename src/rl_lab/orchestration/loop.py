"""training_loop: the order of a run. Everything else serves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rl_lab.core.batch import Batch
from rl_lab.core.phase import Hook, Phase
from rl_lab.core.workflow import CollectResult, Event, Metrics, Update, Workflow
from rl_lab.orchestration.phase_scheduler import PhaseScheduler

Evaluate = Callable[[], Metrics]
Step = Callable[..., Event]


def training_loop(
    workflow: Workflow,
    scheduler: PhaseScheduler,
    collector: Any,
    sources: Mapping[str, Any],
    evaluate: Evaluate | None = None,
    step: Step | None = None,
) -> Iterator[Event]:
    """Run the curriculum, yielding one Event per hook. Logging and saving are the caller's."""
    run = run_hook if step is None else step
    while (hook := scheduler.next_action()) is not None:
        phase = scheduler.current_phase().at(progress=scheduler.progress(), times=hook.times)
        advance_schedules(workflow, sources, scheduler)
        event = run(hook, phase, workflow, collector, sources, evaluate)
        scheduler.advance(hook.name, steps=event.steps, updates=event.updates)
        yield event


def run_hook(
    hook: Hook,
    phase: Phase,
    workflow: Workflow,
    collector: Any,
    sources: Mapping[str, Any],
    evaluate: Evaluate | None = None,
) -> Event:
    """Run one hook and say what it did."""
    if hook.name == "collect":
        return _collect(hook, phase, workflow, collector, sources)
    if hook.name == "evaluate":
        if evaluate is None:
            raise ValueError("the phase has the hook 'evaluate', but the loop was given no evaluate function")
        results = [evaluate() for _ in range(hook.times)]
        return Event(hook.name, phase.name, metrics=results[-1])
    return _update(hook, phase, workflow, sources)


def advance_schedules(workflow: Workflow, sources: Mapping[str, Any], scheduler: PhaseScheduler) -> None:
    """Bring every schedule to the scheduler's counters; they stay constant within a hook."""
    counters = {"agent_steps": scheduler.agent_steps, "updates": scheduler.updates}
    workflow.advance_schedules(**counters)
    for source in sources.values():
        source.advance(**counters)


def _collect(hook: Hook, phase: Phase, workflow: Workflow, collector: Any, sources: Mapping[str, Any]) -> Event:
    if workflow.collects:
        results = [_collect_step(workflow, step, phase) for step in range(hook.times)]
    else:
        random_actions = phase.settings.get("policy") == "random"
        results = [collector.collect(workflow.act, hook.times, random_actions=random_actions)]
    steps = env_steps = episodes = 0
    for result in results:
        steps += result.steps
        episodes += result.episodes
        env_steps += result.extras.get("env_steps", result.steps)
        if result.trajectory is not None and hook.source is not None:
            sources[hook.source].add(result.trajectory)
    metrics = mean_metrics([result.metrics for result in results])
    return Event(hook.name, phase.name, steps=steps, episodes=episodes, env_steps=env_steps, metrics=metrics)


def _collect_step(workflow: Workflow, step: int, phase: Phase) -> CollectResult:
    result = workflow.collect_step(step, phase=phase)
    if not isinstance(result, CollectResult):
        raise TypeError(f"{type(workflow).__name__}.collect_step must return a CollectResult, not {result!r}")
    return result


def _update(hook: Hook, phase: Phase, workflow: Workflow, sources: Mapping[str, Any]) -> Event:
    method = getattr(workflow, hook.name)
    collected: list[Metrics] = []
    if not workflow.takes_batch(hook.name):
        for _ in range(hook.times):
            collected.append(_metrics_of(method(phase=phase), None, None))
    else:
        assert hook.source is not None
        source = sources[hook.source]
        drawn = 0
        while drawn < hook.times:
            # Priorities change between updates, so a source that depends on them draws one batch at a time.
            ahead = hook.times - drawn if source.draw_ahead else 1
            for rows in source.draw(ahead):
                batch = source.gather(rows)
                collected.append(_metrics_of(method(batch, phase=phase), source, batch))
            drawn += ahead
    for optimizer in workflow.optimizers():
        if optimizer.nonfinite.device.type == "cpu" and optimizer.nonfinite:
            raise FloatingPointError(
                f"{hook.name} in phase '{phase.name}' met a loss or gradient that is not finite; "
                "that step was not applied"
            )
    return Event(hook.name, phase.name, updates=hook.times, metrics=mean_metrics(collected))


def _metrics_of(result: Metrics | Update | None, source: Any, batch: Batch | None) -> Metrics:
    if isinstance(result, Update):
        if source is not None and batch is not None and result.columns:
            source.write(batch.rows, result.columns)
        return result.metrics
    return {} if result is None else result


def mean_metrics(collected: Sequence[Metrics]) -> Metrics:
    """Average each metric over several calls; tensors stay where they are."""
    if len(collected) == 1:
        return collected[0]
    values: dict[str, list[Any]] = {}
    for metrics in collected:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {
        name: torch.stack(entries).mean() if isinstance(entries[0], torch.Tensor) else sum(entries) / len(entries)
        for name, entries in values.items()
    }
