"""Target networks: copies that follow the online weights slowly, or now and then."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def move_target(target: Sequence[Tensor], online: Sequence[Tensor], rate: float, count: Tensor, every: int = 1) -> None:
    """Count an update; at every so many of them move the target weights towards the online ones."""
    count += 1
    if every == 1:
        torch._foreach_lerp_(target, online, rate)
    else:
        # Inside a captured graph no host decides, so the rate itself is zero between movements.
        torch._foreach_lerp_(target, online, [rate * (count % every == 0).float()] * len(target))
