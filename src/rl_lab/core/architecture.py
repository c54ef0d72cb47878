"""Architecture: which networks an agent consists of, and how large each of them is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn


class PartSize(NamedTuple):
    """One part of an agent."""

    name: str
    kind: str
    parameters: int
    trained: int  # of them; targets and other copies have none


def part_sizes(agent: Any) -> list[PartSize]:
    """Return the parts that have parameters: of a workflow, or of a mapping from names to parts."""
    parts = agent if isinstance(agent, Mapping) else vars(agent)
    sizes: list[PartSize] = []
    seen: set[int] = set()
    for name, part in parts.items():
        if not isinstance(part, nn.Module) or id(part) in seen:
            continue
        seen.add(id(part))
        parameters = list(part.parameters())
        total = sum(parameter.numel() for parameter in parameters)
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        if total:
            sizes.append(PartSize(name, type(part).__name__, total, trained))
    return sizes


def log_architecture(agent: Any, write: Callable[[str], Any] = print, *, layers: bool = False) -> str:
    """Write a table of the parts of an agent and their parameters, with their layers if asked; return it."""
    sizes = part_sizes(agent)
    rows = [(size.name, size.kind, f"{size.parameters:,}", "" if size.trained else "not trained") for size in sizes]
    total = sum(size.trained for size in sizes)
    rows.append(("in all", "", f"{total:,}", "trained"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
    if layers:
        parts = agent if isinstance(agent, Mapping) else vars(agent)
        lines += [f"{size.name}: {parts[size.name]}" for size in sizes]
    text = "\n".join(lines)
    write(text)
    return text
