"""LaProp (Ziyin et al. 2020) with adaptive gradient clipping (Brock et al. 2021): the optimiser of Dreamer v3.

Gradients are clipped tensor by tensor to a share of the parameters' own norm, divided by their running magnitude, and
only then averaged: momentum of normalised gradients, where Adam normalises the momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_lab.core.ranges import NonNegative, Positive, Unit


def clip_adaptively(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], ratio: float, min_norm: float
) -> list[Tensor]:
    """Return gradients whose norm is at most `ratio` of their parameter's norm, which counts as at least `min_norm`."""
    norms = torch.stack(torch._foreach_norm(gradients))
    limits = ratio * torch.stack(torch._foreach_norm(parameters)).clamp(min=min_norm)
    factors = 1.0 / (norms / limits).clamp(min=1.0)
    return list(torch._foreach_mul(gradients, factors.unbind()))


class LaProp(torch.optim.Optimizer):
    """Normalises, then averages. It reads `grad_scale` and `found_inf` like torch's fused optimisers (`fused`).

    A step that is not finite is skipped on the device, so that the whole update can be captured as a graph.
    Parameters without a gradient stay as they are; each counts its own steps.
    """

    def __init__(
        self,
        params: Any,
        lr: NonNegative = 4e-5,
        betas: tuple[Unit, Unit] = (0.9, 0.999),
        eps: Positive = 1e-20,
        clip_ratio: Positive | None = 0.3,
        clip_min_norm: Positive = 1e-3,
        fused: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": tuple(betas), "eps": eps, "clip_ratio": clip_ratio, "fused": fused}
        super().__init__(params, {**options, "clip_min_norm": clip_min_norm})
        self.grad_scale: Tensor | None = None  # gradients are divided by it
        self.found_inf: Tensor | None = None  # 1 where the step must be skipped

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step."""
        if closure is not None:
            raise ValueError("LaProp takes no closure")
        for group in self.param_groups:
            self._step_group(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in parameters]
        means, squares = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        steps = [state["step"] for state in states]
        beta1, beta2 = group["betas"]
        applied = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        torch._foreach_add_(steps, [applied] * len(steps) if isinstance(applied, Tensor) else applied)  # no host read
        counts = torch.stack(steps).clamp(min=1.0)  # of a run whose first step is skipped
        gradients = self._finite_gradients(parameters)
        if group["clip_ratio"] is not None:
            gradients = clip_adaptively(parameters, gradients, group["clip_ratio"], group["clip_min_norm"])
        # A skipped step has gradients of zero, and its averages do not decay.
        torch._foreach_mul_(squares, 1.0 - (1.0 - beta2) * applied)
        torch._foreach_addcmul_(squares, gradients, gradients, 1.0 - beta2)
        scales = torch._foreach_sqrt(squares)
        torch._foreach_mul_(scales, (1.0 - beta2**counts).rsqrt().unbind())
        torch._foreach_add_(scales, group["eps"])
        torch._foreach_mul_(means, 1.0 - (1.0 - beta1) * applied)
        torch._foreach_addcdiv_(means, gradients, scales, 1.0 - beta1)
        moves = torch._foreach_mul(means, (group["lr"] * applied / (1.0 - beta1**counts)).unbind())
        torch._foreach_sub_(parameters, moves)

    def _finite_gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients, scaled, or zeros where the step must be skipped: as one tensor and views of it."""
        sizes = [parameter.numel() for parameter in parameters]
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])  # type: ignore[union-attr]
        if self.grad_scale is not None:
            flat = flat / self.grad_scale
        if self.found_inf is not None:
            flat = torch.where(self.found_inf.bool(), 0.0, flat)
        return [part.view_as(p) for part, p in zip(flat.split(sizes), parameters, strict=True)]
