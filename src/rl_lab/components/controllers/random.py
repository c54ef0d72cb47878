"""The random policy: uniform actions, for warm-up data and as a baseline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.core.batch import tree_leaves
from rl_lab.core.ranges import Count


class RandomPolicy(nn.Module):
    """Uniform actions: indices below `action` when discrete, else vectors in [-1, 1]."""

    def __init__(self, action: Count, discrete: bool = True) -> None:
        super().__init__()
        self.action, self.discrete = action, discrete

    def act(self, observations: Any, *, explore: bool = True, generator: torch.Generator | None = None) -> Tensor:
        """Draw one action per observation, whatever is observed."""
        leaf = next(tree_leaves(observations))
        if self.discrete:
            return torch.randint(self.action, (len(leaf),), generator=generator, device=leaf.device)
        return torch.rand((len(leaf), self.action), generator=generator, device=leaf.device) * 2.0 - 1.0
