"""PhaseScheduler: a finite state machine over the phases of a curriculum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from rl_lab.core.errors import UserError
from rl_lab.core.phase import Hook, Phase

CALLS_PER_EVENT = 64  # a long update hook is split, so that a run can always be stopped within seconds


def always_ready(source: str | None) -> bool:
    """Answer for sources that are never waited for."""
    return True


class PhaseScheduler:
    """Says what to do next, and learns from `advance` what was done.

    `ready(source)` tells whether a source can be drawn from; `needs_source(hook)` whether a hook wants a batch.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        *,
        total_timesteps: int | None = None,
        ready: Callable[[str | None], bool] = always_ready,
        needs_source: Callable[[str], bool] = lambda hook: True,
    ) -> None:
        if not phases:
            raise ValueError("a curriculum needs at least one phase")
        self.phases = tuple(phases)
        self.total_timesteps = total_timesteps
        self._ready = ready
        self._needs_source = needs_source
        self.agent_steps = 0  # decisions over all environments since the start
        self.updates = 0
        self.cycles = 0
        self.phase_index = 0
        self._pending: Hook | None = None
        self._place: dict[str, Any] | None = None  # where next_action started to look; None: not looked yet
        self._enter_phase()

    def _enter_phase(self) -> None:
        num_hooks = len(self.phases[self.phase_index].hooks) if self.phase_index < len(self.phases) else 0
        self.phase_steps = self.phase_updates = self.phase_cycles = 0
        self.hook_index = self.calls_done = 0
        self.ratio_steps = [0] * num_hooks
        self.ratio_calls = [0] * num_hooks
        self._active = False
        self._accruing: list[int] = []

    def current_phase(self, times: int = 1) -> Phase:
        """Return the phase that the next action belongs to, with its progress, as a hook of so many calls sees it."""
        progress = self.progress()
        return self.phases[min(self.phase_index, len(self.phases) - 1)].at(progress=progress, times=times)

    def progress(self) -> float:
        """Return how far that phase is, from 0 to 1."""
        self.next_action()
        if self.phase_index >= len(self.phases):
            return 1.0
        done, duration = self._measure(self.phases[self.phase_index])
        return min(done / duration, 1.0)

    def next_action(self) -> Hook | None:
        """Return the hook to run now, with the number of calls to make, or None at the end of the curriculum.

        The answer stays the same until `advance`.
        """
        if self._place is None:
            place = self._describe_place()
            self._pending = self._find_next()
            self._place = place
        return self._pending

    def _find_next(self) -> Hook | None:
        while self.phase_index < len(self.phases):
            phase = self.phases[self.phase_index]
            if self._at_cycle_start() and self._skipped_by_cap(phase):
                self._leave_phase()
                continue
            if self._at_cycle_start() and self.phase_cycles == 0:
                self._check_offline_sources(phase)
            if self.hook_index == len(phase.hooks):
                self._end_cycle(phase)
                continue
            hook = phase.hooks[self.hook_index]
            times = self._times(phase, hook)
            if times == 0:
                self._finish_hook()
                continue
            if hook.name == "collect":
                self._note_readiness(phase)
            return replace(hook, times=times, ratio=None, source=hook.source or phase.buffer)
        return None

    def advance(self, action: str | Hook, steps: int = 0, updates: int | None = None) -> None:
        """Record that the action was done. `updates` defaults to the calls that `next_action` asked for."""
        name = action if isinstance(action, str) else action.name
        hook = self.next_action()
        if hook is None or hook.name != name:
            raise ValueError(f"advance('{name}'), but the next action is '{None if hook is None else hook.name}'")
        self._pending = self._place = None
        phase = self.phases[self.phase_index]
        declared = phase.hooks[self.hook_index]
        if hook.is_update:
            done = hook.times if updates is None else updates
            self._active |= done > 0
            self.updates += done
            self.phase_updates += done
            if declared.ratio is not None:
                self.ratio_calls[self.hook_index] += hook.times
        elif name == "evaluate":
            self._active = True
        else:
            self._active |= steps > 0
            self.agent_steps += steps
            self.phase_steps += steps
            for index in self._accruing:
                self.ratio_steps[index] += steps
        self.calls_done += hook.times
        if name == "collect" or self._times(phase, declared) == 0:
            self._finish_hook()

    def get_state(self) -> dict[str, Any]:
        """Return the place inside the curriculum, the cycle and the hook, and the update debt.

        It is the place after the last `advance`, also if `next_action` has looked beyond the end of the cycle since:
        so the end of a phase is judged anew after a restore, and a longer duration extends a finished run.
        """
        place = self._describe_place() if self._place is None else self._place
        return {name: _copy(value) for name, value in place.items()}

    def _describe_place(self) -> dict[str, Any]:
        return {name: _copy(getattr(self, name)) for name in _STATE}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go to the place that `get_state` described."""
        for name in _STATE:
            setattr(self, name, _copy(state[name]))
        self._pending = self._place = None

    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.next_action() is None

    def debt(self) -> dict[int, float]:
        """Return, per ratio hook of the current phase, the calls owed so far, fractions included."""
        hooks = self.phases[self.phase_index].hooks if self.phase_index < len(self.phases) else ()
        return {
            index: hook.ratio * self.ratio_steps[index] - self.ratio_calls[index]
            for index, hook in enumerate(hooks)
            if hook.ratio is not None
        }

    def _times(self, phase: Phase, hook: Hook) -> int:
        """Return how many calls are left of this hook in this cycle, at most one event's worth."""
        if hook.name == "evaluate":
            return min(hook.times - self.calls_done, 1)  # each evaluation has records, pictures and an agent of its own
        if not hook.is_update:
            return hook.times
        if not self._can_run(phase, hook):
            return 0
        if hook.ratio is None:
            left = hook.times - self.calls_done
        else:
            left = _calls_owed(hook.ratio, self.ratio_steps[self.hook_index]) - self.ratio_calls[self.hook_index]
        return max(0, min(left, CALLS_PER_EVENT))

    def _can_run(self, phase: Phase, hook: Hook) -> bool:
        return not self._needs_source(hook.name) or self._ready(hook.source or phase.buffer)

    def _check_offline_sources(self, phase: Phase) -> None:
        for hook in phase.hooks:
            if phase.type == "offline" and hook.is_update and not self._can_run(phase, hook):
                raise UserError(
                    f"phase '{phase.name}' is offline, but the source of '{hook.name}' has too little data",
                    key=f"training.phases[{self.phase_index}]",
                    value=hook.source or phase.buffer,
                    remedy="collect enough in an earlier online phase, or lower the buffer's min_size",
                )

    def _note_readiness(self, phase: Phase) -> None:
        # Steps count towards a ratio only if its source was ready before they were taken.
        self._accruing = [
            index for index, hook in enumerate(phase.hooks) if hook.ratio is not None and self._can_run(phase, hook)
        ]

    def _finish_hook(self) -> None:
        self.hook_index += 1
        self.calls_done = 0

    def _end_cycle(self, phase: Phase) -> None:
        if not self._active:
            raise UserError(
                f"phase '{phase.name}' went through a whole cycle without a step, an update or an evaluation",
                key=f"training.phases[{self.phase_index}].workflow_hooks",
                value=[hook.name for hook in phase.hooks],
                remedy="add 'collect', or make sure that the phase's buffer has data",
            )
        self.cycles += 1
        self.phase_cycles += 1
        self.hook_index = 0
        self._active = False
        done, duration = self._measure(phase)
        if done >= duration:
            self._leave_phase()

    def _measure(self, phase: Phase) -> tuple[int, int]:
        if phase.duration_steps is not None:
            return self.phase_steps, phase.duration_steps
        if phase.duration_updates is not None:
            return self.phase_updates, phase.duration_updates
        return self.phase_cycles, 1 if phase.duration_cycles is None else phase.duration_cycles

    def _skipped_by_cap(self, phase: Phase) -> bool:
        return phase.type == "online" and self.total_timesteps is not None and self.agent_steps >= self.total_timesteps

    def _at_cycle_start(self) -> bool:
        return self.hook_index == 0 and self.calls_done == 0

    def _leave_phase(self) -> None:
        self.phase_index += 1
        self._enter_phase()


_STATE = (
    "agent_steps",
    "updates",
    "cycles",
    "phase_index",
    "phase_steps",
    "phase_updates",
    "phase_cycles",
    "hook_index",
    "calls_done",
    "ratio_steps",
    "ratio_calls",
    "_active",
)


def _calls_owed(ratio: float, steps: int) -> int:
    numerator, denominator = _exact(ratio)
    return (numerator * steps * 10**9 + denominator) // (denominator * 10**9)  # 1e-9: 3 x 0.3333333333333333 is a call


@functools.lru_cache
def _exact(ratio: float) -> tuple[int, int]:
    # The decimal that the user wrote: as binary fractions, 0.7 x 86243510 is less than 60370457.
    return Fraction(str(ratio)).as_integer_ratio()


def _copy(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value
