"""training_loop: the order of a run. Everything else serves it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rl_lab.core.batch import COLUMNS, Batch, tree_leaves
from rl_lab.core.capture import Answer, HookCapture
from rl_lab.core.errors import RunError
from rl_lab.core.phase import Hook, Phase
from rl_lab.core.workflow import CollectResult, Event, Metrics, Update, Workflow
from rl_lab.data.sources import as_trajectory
from rl_lab.orchestration.phase_scheduler import PhaseScheduler

Evaluate = Callable[[], Metrics]
Step = Callable[..., Event]
OnNonfinite = Callable[[str, Batch | None], None]  # what was found, and the data that brought it


def refuse_nonfinite(found: str, batch: Batch | None) -> None:
    """Stop the run at the first number that is not finite."""
    raise RunError(found)


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
        phase = scheduler.current_phase(times=hook.times)
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
    *,
    on_nonfinite: OnNonfinite = refuse_nonfinite,
    capture: HookCapture | None = None,
) -> Event:
    """Run one hook and say what it did; on a GPU `capture` makes each update one graph."""
    if hook.name == "collect":
        return _collect(hook, phase, workflow, collector, sources, on_nonfinite, capture)
    if hook.name == "evaluate":
        if evaluate is None:
            raise ValueError("the phase has the hook 'evaluate', but the loop was given no evaluate function")
        return Event(hook.name, phase.name, metrics=evaluate())
    if capture is not None:
        return _captured_update(hook, phase, workflow, sources, capture)
    return _update(hook, phase, workflow, sources, on_nonfinite)


def advance_schedules(workflow: Workflow, sources: Mapping[str, Any], scheduler: PhaseScheduler) -> None:
    """Bring every schedule to the scheduler's counters; they stay constant within a hook."""
    counters = {"agent_steps": scheduler.agent_steps, "updates": scheduler.updates}
    workflow.advance_schedules(**counters)
    for source in sources.values():
        source.advance(**counters)


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


def _collect(
    hook: Hook,
    phase: Phase,
    workflow: Workflow,
    collector: Any,
    sources: Mapping[str, Any],
    on_nonfinite: OnNonfinite,
    capture: HookCapture | None,
) -> Event:
    collect: Callable[[int], CollectResult]
    if workflow.collects:
        num_calls, collect = hook.times, partial(_collect_step, workflow, phase, collector)
    else:
        act = workflow.act if capture is None else capture.act(workflow.act)
        follow = workflow.follow if phase.settings.get("policy") == "random" else None
        num_calls, collect = 1, lambda _: collector.collect(act, hook.times, follow=follow)
    steps = env_steps = episodes = 0
    kept: list[CollectResult] = []
    for step in range(num_calls):
        added = {name: source.ring.added for name, source in sources.items() if source.ring is not None}
        result = collect(step)
        frames = result.extras.get("env_steps", result.steps)
        steps += result.steps
        episodes += result.episodes
        env_steps += frames
        if result.trajectory is None or hook.source is None:
            kept.append(result)
        elif _is_finite(trajectory := as_trajectory(result.trajectory, collector.num_envs)):
            kept.append(result)
            sources[hook.source].add(trajectory)
        else:
            on_nonfinite(f"phase '{phase.name}' collected a reward or an observation that is not finite", trajectory)
            # Nothing of it is kept, so the stream begins anew on both sides.
            sources[hook.source].close_open()
            collector.reset_episodes()
        if frames:  # dreams move no environment
            _end_elsewhere(sources, added)
    metrics = _mean_over_episodes(kept)
    return Event(hook.name, phase.name, steps=steps, episodes=episodes, env_steps=env_steps, metrics=metrics)


def _end_elsewhere(sources: Mapping[str, Any], added: Mapping[str, int]) -> None:
    """End running episodes in every replay that still has as many decisions as before: there they do not go on."""
    for name, count in added.items():
        if sources[name].ring.added == count:
            sources[name].close_open()


def _mean_over_episodes(results: Sequence[CollectResult]) -> Metrics:
    """Average each metric over the episodes of several collections; one that counts none weighs like one episode."""
    if len(results) == 1:
        return results[0].metrics
    totals: dict[str, Any] = {}
    weights: dict[str, int] = {}
    for result in results:
        weight = max(result.episodes, 1)
        for name, value in result.metrics.items():
            totals[name] = totals.get(name, 0.0) + value * weight
            weights[name] = weights.get(name, 0) + weight
    return {name: total / weights[name] for name, total in totals.items()}


def _collect_step(workflow: Workflow, phase: Phase, collector: Any, step: int) -> CollectResult:
    frames = collector.frames
    result = workflow.collect_step(step, phase=phase)
    if not isinstance(result, CollectResult):
        raise TypeError(f"{type(workflow).__name__}.collect_step must return a CollectResult, not {result!r}")
    env_steps = collector.frames - frames or result.steps  # none: it has a world of its own
    return replace(result, extras={"env_steps": env_steps, **result.extras})


def _is_finite(trajectory: Batch) -> bool:
    columns = (trajectory.rewards, *tree_leaves(trajectory.observations), *tree_leaves(trajectory.next_observations))
    return all_finite(columns)


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether every number is finite. A finite sum has finite terms only, and is quicker to look at."""
    return all(
        math.isfinite(_sum(tensor.detach())) or bool(torch.isfinite(tensor).all())
        for tensor in tensors
        if tensor.is_floating_point()
    )


def _sum(tensor: torch.Tensor) -> float:
    if not tensor.is_cpu or tensor.dtype != torch.float32:
        return float(tensor.sum())
    with np.errstate(over="ignore", invalid="ignore"):  # who asks looks again
        return float(tensor.numpy().sum())  # a third of torch's time on the few numbers of a step


def _captured_update(
    hook: Hook, phase: Phase, workflow: Workflow, sources: Mapping[str, Any], capture: HookCapture
) -> Event:
    method = getattr(workflow, hook.name)
    key = (hook.source, tuple(sorted(phase.settings.items())))
    if not workflow.takes_batch(hook.name):
        for _ in range(hook.times):
            capture.run(key, hook.name, lambda: _answer(method(phase=phase)))
        return Event(hook.name, phase.name, updates=hook.times, metrics=_captured_metrics(capture))
    assert hook.source is not None
    source = sources[hook.source]

    def update(batch: Batch) -> Answer:
        metrics, columns = _answer(method(batch, phase=phase))
        return metrics, _unless_failed(workflow, batch, columns)

    def from_rows(rows: torch.Tensor) -> Answer:
        batch = source.gather(rows)
        metrics, columns = update(batch)
        if columns:
            source.write(batch.rows, columns)
        return metrics, {}

    def from_columns(columns: Mapping[str, Any]) -> Answer:
        return update(Batch(**columns))

    if source.captures:  # gathering belongs to the graph; all rows go to the device in one copy
        for drawn in _draws(source, hook.times):
            for rows in torch.as_tensor(drawn).to(source.device, non_blocking=True):
                capture.run(key, hook.name, from_rows, rows)
    else:
        for batch in _batches(source, hook.times):
            columns = capture.run(key, hook.name, from_columns, {name: batch[name] for name in COLUMNS})
            if columns:
                source.write(batch.rows, columns)
    return Event(hook.name, phase.name, updates=hook.times, metrics=_captured_metrics(capture))


def _unless_failed(workflow: Workflow, batch: Batch, columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the columns to write; those that the batch has where a step was not finite, which no host decides."""
    flags = [optimizer.failed for optimizer in workflow.optimizers()] if columns else []
    if not flags:
        return dict(columns)
    failed = torch.stack(flags).amax() > 0
    return {
        name: torch.where(failed, batch[name].to(column.dtype) if name in batch else column.nan_to_num(0, 0, 0), column)
        for name, column in columns.items()
    }


def _captured_metrics(capture: HookCapture) -> Metrics:
    drained = () if capture.deferred else capture.drain()
    return {name: value for _, metrics, _ in drained for name, value in metrics.items()}


def _draws(source: Any, times: int) -> Iterator[Any]:
    """Draw the rows of so many batches, together where the source allows it."""
    drawn = 0
    while drawn < times:
        # Priorities change between updates, so a source that depends on them draws one batch at a time.
        ahead = times - drawn if source.draw_ahead else 1
        yield source.draw(ahead)
        drawn += ahead


def _batches(source: Any, times: int) -> Iterator[Batch]:
    """Gather one batch after the other; while one is used, the source may read what it can of the next."""
    for drawn in _draws(source, times):
        following = [*drawn, None]
        for rows, next_rows in pairwise(following):
            batch = source.gather(rows)
            if next_rows is not None:
                source.prefetch(next_rows)
            yield batch


def _answer(result: Metrics | Update | None) -> Answer:
    """Return metrics and columns of what a hook returned."""
    if isinstance(result, Update):
        return result.metrics, result.columns
    return ({} if result is None else result), {}


def _update(
    hook: Hook, phase: Phase, workflow: Workflow, sources: Mapping[str, Any], on_nonfinite: OnNonfinite
) -> Event:
    method = getattr(workflow, hook.name)
    optimizers = [o for o in workflow.optimizers() if o.nonfinite.device.type == "cpu"]
    collected: list[Metrics] = []

    def call(source: Any, batch: Batch | None) -> None:
        result = method(phase=phase) if batch is None else method(batch, phase=phase)
        metrics, columns = _answer(result)
        failed = [optimizer for optimizer in optimizers if optimizer.nonfinite]  # the step itself was not applied
        for optimizer in failed:
            optimizer.nonfinite.zero_()
        if failed:
            on_nonfinite(f"{hook.name} in phase '{phase.name}' met a loss or gradient that is not finite", batch)
            return
        collected.append(metrics)
        if batch is not None and columns:
            source.write(batch.rows, columns)

    if not workflow.takes_batch(hook.name):
        for _ in range(hook.times):
            call(None, None)
    else:
        assert hook.source is not None
        for batch in _batches(sources[hook.source], hook.times):
            call(sources[hook.source], batch)
    return Event(hook.name, phase.name, updates=hook.times, metrics=mean_metrics(collected))
