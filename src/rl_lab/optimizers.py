"""Optimisers from a configuration: what each of them trains, and that every parameter belongs to exactly one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rl_lab.config import RunConfig
from rl_lab.core.errors import UserError
from rl_lab.core.optim import Optimizer
from rl_lab.core.ranges import NonNegative, Positive
from rl_lab.core.schedules import Schedule
from rl_lab.instantiate import instantiate
from rl_lab.parsing import parse


@dataclass(frozen=True)
class OptimizerSection:
    """One entry of `optimizers`."""

    trains: list[str]  # names of components and controllers
    optimizer: dict[str, Any]  # a node with `_partial_`: the parameters are added here
    max_grad_norm: Positive | None = None
    learning_rate: NonNegative | dict[str, Any] | None = None
    rates: dict[str, Positive] = field(default_factory=dict)  # factors of the learning rate, by name
    gradient_scales: dict[str, Positive] = field(default_factory=dict)  # factors of the gradients, before clipping


def build_optimizers(
    config: RunConfig, components: Mapping[str, Any], controllers: Mapping[str, Any], allow: Sequence[str]
) -> dict[str, Optimizer]:
    """Build optimisers; every trainable parameter belongs to exactly one of them."""
    both = components.keys() & controllers.keys()
    if both:
        raise UserError(
            "a component and a controller share a name",
            key="controllers",
            value=min(both),
            remedy="give one of them another name",
        )
    parts = {**components, **controllers}
    nodes = dict(config.optimizers)
    if not nodes and any(_trainable(part) for part in components.values()):
        # Not a word about optimisers: Adam for all components, as a workflow that reads the context expects.
        rate = {"lr": config.algorithm["learning_rate"]} if "learning_rate" in config.algorithm else {}
        nodes = {"world_model": {"_target_": "torch.optim.Adam", "_partial_": True, **rate}}
    built: dict[str, Optimizer] = {}
    owner: dict[int, str] = {}
    for name, node in nodes.items():
        key = f"optimizers.{name}"
        section = _section(name, node, key, components, controllers)
        for part in section.trains:
            for parameter in _trainable(parts[part]):
                if owner.setdefault(id(parameter), name) != name:
                    raise UserError(
                        f"'{part}' is trained by two optimisers, '{owner[id(parameter)]}' and '{name}'",
                        key=f"{key}.trains",
                        value=section.trains,
                        remedy="list each component in one optimiser only",
                    )
        parameters = [parameter for part in section.trains for parameter in _trainable(parts[part])]
        place = key if _is_bare(node) else f"{key}.optimizer"
        rates = _by_parameter(section.rates, section.trains, f"{key}.rates", parts)
        scales = _by_parameter(section.gradient_scales, section.trains, f"{key}.gradient_scales", parts)
        built[name] = _build(section, key, place, list(dict.fromkeys(parameters)), rates, scales, allow)
    _check_all_trained(parts, owner, nodes)
    return built


def _by_parameter(
    factors: Mapping[str, float], trains: Sequence[str], key: str, parts: Mapping[str, Any]
) -> dict[nn.Parameter, float]:
    for part in factors:
        if part not in trains:
            raise UserError(
                "this optimiser does not train such a part",
                key=f"{key}.{part}",
                value=part,
                valid=trains,
                remedy="correct the name, or add it to `trains`",
            )
    return {parameter: factor for part, factor in factors.items() for parameter in _trainable(parts[part])}


def _section(
    name: str, node: Any, key: str, components: Mapping[str, Any], controllers: Mapping[str, Any]
) -> OptimizerSection:
    if _is_bare(node):  # named by what it trains
        if name != "world_model" and name not in controllers:
            raise UserError(
                "an optimiser without `trains` is named after the controller it trains, or world_model",
                key=key,
                value=name,
                valid=["world_model", *controllers],
                remedy="rename it, or write {trains: [...], optimizer: {...}}",
            )
        return OptimizerSection(list(components) if name == "world_model" else [name], dict(node))
    section: OptimizerSection = parse(OptimizerSection, node, key)
    for i, part in enumerate(section.trains):
        if part not in components and part not in controllers:
            raise UserError(
                "no component or controller has this name",
                key=f"{key}.trains[{i}]",
                value=part,
                valid=[*components, *controllers],
                remedy="correct the name, or declare the part under components or controllers",
            )
    return section


def _is_bare(node: Any) -> bool:
    return isinstance(node, Mapping) and "_target_" in node


def _build(
    section: OptimizerSection,
    key: str,
    place: str,
    parameters: list[nn.Parameter],
    rates: Mapping[nn.Parameter, float],
    scales: Mapping[nn.Parameter, float],
    allow: Sequence[str],
) -> Optimizer:
    if not parameters:
        raise UserError(
            "this optimiser has nothing to train",
            key=f"{key}.trains",
            value=section.trains,
            remedy="list a part that has parameters, or remove the optimiser",
        )
    make = instantiate({**section.optimizer, "_partial_": True}, place, allow=allow)
    if not (inspect.isclass(make.func) and issubclass(make.func, torch.optim.Optimizer)):
        raise UserError(
            "an optimiser is expected here",
            key=f"{place}._target_",
            value=section.optimizer["_target_"],
            valid=[f"torch.optim.{name}" for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad")],
            remedy="name a class of torch.optim",
        )
    schedule = _schedule(section.learning_rate, f"{key}.learning_rate", allow)
    try:
        _rehearse(make, parameters[0].device)
        return Optimizer(
            parameters,
            make,
            max_grad_norm=section.max_grad_norm,
            learning_rate=schedule,
            rates=rates,
            scales=scales,
        )
    except (TypeError, ValueError, RuntimeError, AssertionError, LookupError, ArithmeticError) as error:
        raise UserError(
            f"the optimiser cannot be used with these arguments: {str(error).partition(chr(10))[0] or repr(error)}",
            key=place,
            value=section.optimizer,
            remedy="correct its arguments, or take another one, such as torch.optim.Adam",
        ) from error


def _schedule(learning_rate: float | Mapping[str, Any] | None, key: str, allow: Sequence[str]) -> Schedule | None:
    if learning_rate is None:
        return None
    if not isinstance(learning_rate, Mapping):
        return Schedule(learning_rate)
    schedule: Schedule = instantiate(learning_rate, key, allow=allow, kind=Schedule)
    if min(schedule.start, schedule.end) < 0:
        raise UserError(
            "a learning rate must not be negative",
            key=key,
            value=dict(learning_rate),
            remedy="let start and end be at least 0",
        )
    return schedule


def _rehearse(make: Callable[..., torch.optim.Optimizer], device: torch.device) -> None:
    """Take one step on a parameter of no use: some optimisers refuse only then (closures, sparse gradients, GPUs)."""
    parameter = nn.Parameter(torch.zeros(2, 2, device=device))
    parameter.grad = torch.zeros_like(parameter)
    Optimizer([parameter], make).step()


def _check_all_trained(parts: Mapping[str, Any], owner: Mapping[int, str], nodes: Mapping[str, Any]) -> None:
    for name, part in parts.items():
        if any(id(parameter) not in owner for parameter in _trainable(part)):
            raise UserError(
                f"the parameters of '{name}' belong to no optimiser and would never learn",
                key="optimizers",
                value=name,
                valid=nodes,
                remedy=f"add '{name}' to the list `trains` of one of them",
            )


def _trainable(part: Any) -> list[nn.Parameter]:
    return [p for p in part.parameters() if p.requires_grad] if isinstance(part, nn.Module) else []
