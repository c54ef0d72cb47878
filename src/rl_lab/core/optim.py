"""Optimizer: weigh named losses, backward, clip, step; a non-finite step is never applied."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.core.schedules import Schedule

_NOTHING: Mapping[str, float] = {}


class Optimizer:
    """A torch optimiser with the steps around it that every algorithm repeats.

    `step(losses, weights)` minimises the weighted sum of the named losses and reports each of them by name.
    `step(losses, backward=False)`, and `step()` without losses, apply the gradients that are there. `rates` multiplies
    the learning rate of some parameters, `scales` their gradients, before these are clipped together.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: Callable[..., torch.optim.Optimizer],
        *,
        max_grad_norm: float | None = None,
        learning_rate: Schedule | None = None,
        rates: Mapping[nn.Parameter, float] | None = None,
        scales: Mapping[nn.Parameter, float] | None = None,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self.parameters:
            raise ValueError("an optimiser was given no trainable parameter")
        fused = {"fused": True} if _offers_fused(optimizer) else {}
        groups = [{"params": members, "rate": rate} for rate, members in _grouped(self.parameters, rates).items()]
        self.torch_optimizer = optimizer(groups, **fused)
        self._scaled = {scale: members for scale, members in _grouped(self.parameters, scales).items() if scale != 1.0}
        self._prepare_groups()
        self.fused = bool(self.torch_optimizer.defaults.get("fused"))
        self.max_grad_norm = max_grad_norm
        self.learning_rate = learning_rate
        kinds = {(parameter.device, parameter.dtype) for parameter in self.parameters}
        adam = type(self.torch_optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        self._is_plain_adam = adam and self.fused and len(kinds) == 1
        self.nonfinite = torch.zeros((), device=self.parameters[0].device)  # sticky: read by the host when it likes
        self.failed = torch.zeros_like(self.nonfinite)  # whether the last step was not applied

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(
        self,
        losses: Mapping[str, Tensor] | None = None,
        weights: Mapping[str, float | Tensor] = _NOTHING,
        *,
        backward: bool = True,
    ) -> dict[str, Tensor]:
        """Apply one update and return the losses and the gradient norm before clipping, still on the device."""
        metrics: dict[str, Tensor] = {}
        if losses is not None:
            total = _weighted_sum(losses, weights)
            if backward:
                self.zero_grad()
                total.backward()  # type: ignore[no-untyped-call]
            metrics = {f"{name}_loss": loss.detach() for name, loss in losses.items()}
            metrics["loss"] = total.detach()
        for scale, members in self._scaled.items():
            torch._foreach_mul_([parameter.grad for parameter in members if parameter.grad is not None], scale)
        norm = self._norm()
        checked = norm if losses is None else norm + metrics["loss"]
        found = (checked - checked).ne(0.0).to(norm.dtype)  # x - x is not 0 where x is infinite or not a number
        self.failed.copy_(found)
        torch.maximum(self.nonfinite, found, out=self.nonfinite)
        excess = None if self.max_grad_norm is None else ((norm + 1e-6) / self.max_grad_norm).clamp(min=1.0)
        if self.fused:
            self._step_fused(excess, found)
        elif norm.device.type == "cpu":
            if excess is not None:
                torch._foreach_div_([p.grad for p in self.parameters if p.grad is not None], excess)
            if not found:
                self.torch_optimizer.step()
        else:
            raise TypeError(
                f"{type(self.torch_optimizer).__name__} has no fused kernel, which a GPU needs to skip a non-finite "
                "step without asking the host; use Adam, AdamW, SGD or Adagrad"
            )
        metrics["grad_norm"] = norm
        return metrics

    @torch.no_grad()
    def weights_norm(self) -> Tensor:
        """Return the norm of all parameters together."""
        return _norm(self.parameters)

    def advance(self, *, agent_steps: int, updates: int) -> None:
        """Follow the learning-rate schedule."""
        if self.learning_rate is None:
            return
        schedule = self.learning_rate
        rate = schedule.at(agent_steps if schedule.of == "agent_steps" else updates)
        for group in self.torch_optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * group["rate"])
            else:
                group["lr"] = rate * group["rate"]

    def get_state(self) -> dict[str, Any]:
        """Return the optimiser's moments and the sticky flag."""
        return {"optimizer": self.torch_optimizer.state_dict(), "nonfinite": self.nonfinite}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore moments and flag."""
        self._check_fits(state["optimizer"])
        self.torch_optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch would share its tensors
        self._match_layout()
        self.nonfinite.copy_(state["nonfinite"])
        self._prepare_groups(scaled=True)

    def _match_layout(self) -> None:
        """Lay moments out in memory like their parameters (channels last, say): fused kernels take that for granted."""
        for parameter, entry in self.torch_optimizer.state.items():
            for name, value in entry.items():
                whole = isinstance(value, Tensor) and value.shape == parameter.shape
                if whole and value.stride() != parameter.stride():
                    entry[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)

    def _check_fits(self, saved: Mapping[str, Any]) -> None:
        """Refuse moments of another shape: torch does not look, and its fused kernels would write beyond their end."""
        groups = self.torch_optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        for index, entry in saved["state"].items() if self.fused else ():
            for name, value in entry.items():
                if value is not None and tuple(value.shape) not in ((), tuple(parameters[index].shape)):
                    raise ValueError(f"'{name}' of parameter {index} has the shape {tuple(value.shape)}")
        for group, given in zip(groups, saved["param_groups"], strict=True):
            for name in group.keys() & given.keys() - {"params"}:
                if not _same_kind(group[name], given[name]):
                    raise ValueError(f"the optimiser's option '{name}' is a {type(given[name]).__name__}")

    def _prepare_groups(self, *, scaled: bool = False) -> None:
        """Scale the learning rates, and keep them on the GPU where one is used: a captured step reads them there."""
        device = self.parameters[0].device
        for group in self.torch_optimizer.param_groups:
            factor = 1.0 if scaled else group["rate"]
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].to(device).mul_(factor)
            else:
                rate = group["lr"] * factor
                group["lr"] = torch.tensor(rate, device=device) if device.type == "cuda" else rate
            if device.type == "cuda" and "capturable" in group:
                group["capturable"] = True

    def _step_fused(self, excess: Tensor | None, found: Tensor) -> None:
        """Let the kernel itself divide the gradients by `excess` and skip the step where `found` is 1."""
        optimizer = self.torch_optimizer
        if self._is_plain_adam and len(optimizer.state) == len(self.parameters):
            _step_adam(optimizer, excess, found)
            return
        first = not optimizer.state
        optimizer.grad_scale, optimizer.found_inf = excess, found  # type: ignore[attr-defined]
        optimizer.step()
        if first:
            self._clear_state_where(found.bool())

    def _clear_state_where(self, skipped: Tensor) -> None:
        # A kernel that skips its very first step leaves new momentum buffers unset.
        for entry in self.torch_optimizer.state.values():
            for value in entry.values():
                if isinstance(value, Tensor):
                    value.masked_fill_(skipped, 0)

    def _norm(self) -> Tensor:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not gradients:
            raise ValueError("no parameter of this optimiser received a gradient")
        return _norm(gradients)


def _norm(tensors: list[Any]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def _grouped(
    parameters: list[nn.Parameter], factors: Mapping[nn.Parameter, float] | None
) -> dict[float, list[nn.Parameter]]:
    """Return the parameters of each factor; it is 1 where none is given."""
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(1.0 if factors is None else factors.get(parameter, 1.0), []).append(parameter)
    return groups


def _weighted_sum(losses: Mapping[str, Tensor], weights: Mapping[str, float | Tensor]) -> Tensor:
    if not losses:
        raise ValueError("no losses were given; step() without any applies the gradients that are there")
    unknown = weights.keys() - losses.keys()
    if unknown:
        raise ValueError(f"weights for {sorted(unknown)}, but the losses are {sorted(losses)}")
    # A loss whose weight is the number 0 is only watched: nothing needs to flow back through it.
    counted = [name for name in losses if isinstance(weights.get(name), Tensor) or weights.get(name) != 0] or losses
    return functools.reduce(operator.add, [_weighed(losses[name], weights.get(name)) for name in counted])


def _weighed(loss: Tensor, weight: float | Tensor | None) -> Tensor:
    return loss if weight is None else loss * weight


@torch.no_grad()
def _step_adam(optimizer: torch.optim.Optimizer, excess: Tensor | None, found: Tensor) -> None:
    """Do what the `step` of Adam and AdamW does once their state exists.

    Around the same kernel theirs groups tensors, looks for hooks and profiles: for the small networks of
    reinforcement learning that takes longer than the kernel.
    """
    counted = 1.0 - found  # a skipped step does not count
    for group in optimizer.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            continue
        states = [optimizer.state[parameter] for parameter in parameters]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, [counted] * len(steps))
        kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        kernel(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            grad_scale=excess,
            found_inf=found,
        )


def _same_kind(own: Any, given: Any) -> bool:
    if own is None or given is None:
        return True
    if isinstance(own, tuple):
        return isinstance(given, tuple) and len(own) == len(given) and all(map(_same_kind, own, given))
    return _is_number(own) == _is_number(given) and (_is_number(own) or type(own) is type(given))


def _is_number(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.dim() == 0) or type(value) in (int, float)


def _offers_fused(optimizer: Callable[..., Any]) -> bool:
    target = getattr(optimizer, "func", optimizer)
    stated = getattr(optimizer, "keywords", {})
    return "fused" in inspect.signature(target).parameters and not {"fused", "foreach"} & stated.keys()
