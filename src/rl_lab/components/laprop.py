"""LaProp (Ziyin et al. 2020) with adaptive gradient clipping (Brock et al. 2021): the optimiser of Dreamer v3.

Gradients are clipped tensor by tensor to a share of the parameters' own norm, divided by their running magnitude, and
only then averaged: momentum of normalised gradients, where Adam normalises the momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_lab.components.fused import fuses
from rl_lab.core.laprop_kernel import Numbers, Tables, tabulate, take_step
from rl_lab.core.ranges import NonNegative, Positive, Unit


def clip_factors(parameters: Sequence[Tensor], gradients: Sequence[Tensor], ratio: float, min_norm: float) -> Tensor:
    """Return factors that make the norm of gradients at most `ratio` of their parameter's, at least of `min_norm`."""
    norms = torch.stack(torch._foreach_norm(gradients))
    limits = ratio * torch.stack(torch._foreach_norm(parameters)).clamp(min=min_norm)
    return (norms / limits).clamp(min=1.0).reciprocal()


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
        self._tables: dict[tuple[int, ...], Tables] = {}

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
        applied = torch.ones_like(steps[0]) if self.found_inf is None else 1.0 - self.found_inf
        torch._foreach_add_(steps, [applied] * len(steps))  # no host read
        counts = torch.stack(steps).clamp(min=1.0)  # of a run whose first step is skipped
        flat, gradients = self._finite_gradients(parameters)
        factors = torch.ones_like(counts)
        if group["clip_ratio"] is not None:
            factors = clip_factors(parameters, gradients, group["clip_ratio"], group["clip_min_norm"])
        rates = group["lr"] * applied / (1.0 - beta1**counts)
        numbers = Numbers(factors, (1.0 - beta2**counts).rsqrt(), rates, applied)
        triples = list(zip(parameters, means, squares, strict=True))
        if fuses(flat) and all(_is_plain(tensor) for triple in triples for tensor in triple):
            take_step(flat, self._tables_of(triples), numbers, group["betas"], group["eps"])
        else:
            _take_step(gradients, triples, numbers, group["betas"], group["eps"])

    def _finite_gradients(self, parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients, scaled, or zeros where the step must be skipped: as one tensor and views of it."""
        sizes = [parameter.numel() for parameter in parameters]
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])  # type: ignore[union-attr]
        if self.grad_scale is not None:
            flat = flat / self.grad_scale
        if self.found_inf is not None:
            flat = torch.where(self.found_inf.bool(), 0.0, flat)
        return flat, [part.view_as(p) for part, p in zip(flat.split(sizes), parameters, strict=True)]

    def _tables_of(self, triples: list[tuple[Tensor, Tensor, Tensor]]) -> Tables:
        places = tuple(tensor.data_ptr() for triple in triples for tensor in triple)
        if places not in self._tables:  # before a graph is recorded; moments that are loaded lie elsewhere
            self._tables[places] = tabulate(triples)
        return self._tables[places]


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.dtype == torch.float32


def _take_step(
    gradients: list[Tensor],
    triples: list[tuple[Tensor, Tensor, Tensor]],
    numbers: Numbers,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Do by operations what `take_step` does by a kernel."""
    parameters, means, squares = (list(column) for column in zip(*triples, strict=True))
    gradients = list(torch._foreach_mul(gradients, numbers.factors.unbind()))
    # A skipped step has gradients of zero, and its averages do not decay.
    torch._foreach_mul_(squares, 1.0 - (1.0 - betas[1]) * numbers.applied)
    torch._foreach_addcmul_(squares, gradients, gradients, 1.0 - betas[1])
    scales = torch._foreach_sqrt(squares)
    torch._foreach_mul_(scales, numbers.spreads.unbind())
    torch._foreach_add_(scales, eps)
    torch._foreach_mul_(means, 1.0 - (1.0 - betas[0]) * numbers.applied)
    torch._foreach_addcdiv_(means, gradients, scales, 1.0 - betas[0])
    torch._foreach_sub_(parameters, torch._foreach_mul(means, numbers.rates.unbind()))
