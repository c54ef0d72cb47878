"""What a curriculum comes to before it has begun."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from rl_lab.core.phase import Phase


def tell_phases_cut_off(phases: Sequence[Phase], total_timesteps: int | None, num_envs: int) -> None:
    """Say which phases never begin because `total_timesteps` are collected before; that may be meant."""
    cut_off, steps = [], 0
    for phase in phases:
        if total_timesteps is not None and phase.type == "online" and steps >= total_timesteps:
            cut_off.append(phase.name)
        in_cycle = num_envs * sum(hook.times for hook in phase.hooks if hook.name == "collect")
        if phase.duration_steps is not None:
            steps += math.ceil(phase.duration_steps / in_cycle) * in_cycle
        elif phase.duration_cycles is not None:  # nobody knows how many steps a number of updates takes
            steps += phase.duration_cycles * in_cycle
    if cut_off:
        print(
            f"warning: training.total_timesteps={total_timesteps} ends the run before these phases begin: "
            f"{', '.join(cut_off)}",
            file=sys.stderr,
            flush=True,
        )
