"""Optimizer: weigh named losses, backward, clip, step; a non-finite step is never applied."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.core.schedules import Schedule

_NOTHING: Mapping[str, float] = {}


class Optimizer:
    """A torch optimiser with the steps around it that every algorithm repeats.

    `step(losses, weights)` minimises the weighted sum of the named losses and reports each of them by name.
    `step()` without losses applies the gradients that are there.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: Callable[..., torch.optim.Optimizer],
        *,
        max_grad_norm: float | None = None,
        learning_rate: Schedule | None = None,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self.parameters:
            raise ValueError("an optimiser was given no trainable parameter")
        fused = {"fused": True} if _offers_fused(optimizer) else {}
        self.torch_optimizer = optimizer(self.parameters, **fused)
        self.fused = bool(self.torch_optimizer.defaults.get("fused"))
        self.max_grad_norm = float("inf") if max_grad_norm is None else float(max_grad_norm)
        self.learning_rate = learning_rate
        self.nonfinite = torch.zeros((), device=self.parameters[0].device)  # sticky: read by the host when it likes

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.torch_optimizer.zero_grad(set_to_none=True)

    def step(
        self, losses: Mapping[str, Tensor] | None = None, weights: Mapping[str, float | Tensor] = _NOTHING
    ) -> dict[str, Tensor]:
        """Apply one update and return the losses and the gradient norm before clipping, still on the device."""
        metrics: dict[str, Tensor] = {}
        if losses is not None:
            if not losses:
                raise ValueError("no losses were given; step() without any applies the gradients that are there")
            unknown = weights.keys() - losses.keys()
            if unknown:
                raise ValueError(f"weights for {sorted(unknown)}, but the losses are {sorted(losses)}")
            total = sum(loss * weights[name] if name in weights else loss for name, loss in losses.items())
            assert isinstance(total, Tensor)
            self.zero_grad()
            total.backward()  # type: ignore[no-untyped-call]
            metrics = {f"{name}_loss": loss.detach() for name, loss in losses.items()}
            metrics["loss"] = total.detach()
        norm = self._clip()
        finite = torch.isfinite(norm) if losses is None else torch.isfinite(norm + metrics["loss"])
        found = (~finite).to(norm.dtype)
        self.nonfinite.copy_(torch.maximum(self.nonfinite, found))
        if self.fused:
            first = not self.torch_optimizer.state
            self.torch_optimizer.found_inf = found  # type: ignore[attr-defined]  # the kernel itself skips the step
            self.torch_optimizer.step()
            if first:
                self._clear_state_where(found.bool())
        elif norm.device.type == "cpu":
            if finite:
                self.torch_optimizer.step()
        else:
            raise TypeError(
                f"{type(self.torch_optimizer).__name__} has no fused kernel, which a GPU needs to skip a non-finite "
                "step without asking the host; use Adam, AdamW, SGD or Adagrad"
            )
        metrics["grad_norm"] = norm
        return metrics

    def advance(self, *, agent_steps: int, updates: int) -> None:
        """Follow the learning-rate schedule."""
        if self.learning_rate is None:
            return
        schedule = self.learning_rate
        rate = schedule.at(agent_steps if schedule.of == "agent_steps" else updates)
        for group in self.torch_optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def get_state(self) -> dict[str, Any]:
        """Return the optimiser's moments and the sticky flag."""
        return {"optimizer": self.torch_optimizer.state_dict(), "nonfinite": self.nonfinite}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore moments and flag."""
        self.torch_optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch would share its tensors
        self.nonfinite.copy_(state["nonfinite"])

    def _clear_state_where(self, skipped: Tensor) -> None:
        # A kernel that skips its very first step leaves new momentum buffers unset.
        for entry in self.torch_optimizer.state.values():
            for value in entry.values():
                if isinstance(value, Tensor):
                    value.masked_fill_(skipped, 0)

    def _clip(self) -> Tensor:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not gradients:
            raise ValueError("no parameter of this optimiser received a gradient")
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        if self.max_grad_norm != float("inf"):
            torch._foreach_mul_(gradients, (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


def _offers_fused(optimizer: Callable[..., Any]) -> bool:
    target = getattr(optimizer, "func", optimizer)
    stated = getattr(optimizer, "keywords", {})
    return "fused" in inspect.signature(target).parameters and not {"fused", "foreach"} & stated.keys()
