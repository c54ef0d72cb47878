"""Batch: the one container that flows between environments, sources and workflows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tree = Any  # a tensor, or a dict of trees; None is the empty tree
Infos = Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]]
# What of a batch is data: neither where it came from nor what is opaque.
COLUMNS = ("observations", "actions", "rewards", "terminated", "truncated", "next_observations", "extras")


def tree_map(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply a function to every leaf of a tree."""
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return {key: tree_map(function, value) for key, value in tree.items()}
    return function(tree)


def tree_zip(function: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply a function to the corresponding leaves of trees of one structure."""
    first = trees[0]
    for other in trees[1:]:
        if _keys(other) != _keys(first) or (other is None) != (first is None):
            raise ValueError(f"trees differ: {_described(first)} against {_described(other)}")
    if first is None:
        return None
    if isinstance(first, Mapping):
        return {key: tree_zip(function, *(tree[key] for tree in trees)) for key in first}
    return function(*trees)


def _keys(tree: Tree) -> Any:
    return tree.keys() if isinstance(tree, Mapping) else None


def _described(tree: Tree) -> str:
    return f"a mapping of {sorted(tree)}" if isinstance(tree, Mapping) else type(tree).__name__


def tree_leaves(tree: Tree) -> Iterator[Any]:
    """Yield the leaves of a tree, depth first."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from tree_leaves(value)
    elif tree is not None:
        yield tree


@dataclass(frozen=True, slots=True)
class Batch:
    """Transitions with a shared leading shape: [B] when flat, [T, B] when a trajectory.

    Row t holds the observation, the action decided on it, and the reward and flags that this action brought.
    The constructor checks the shared leading shape; operations on a valid batch do not check again.
    """

    observations: Tree
    actions: Tensor
    rewards: Tensor
    terminated: Tensor  # the world ended: no bootstrap
    truncated: Tensor  # we stopped looking: bootstrap
    next_observations: Tree | None = None  # the true successor, also across resets
    infos: Infos = ()  # opaque; on the Collector's output only, never stored
    extras: dict[str, Any] = field(default_factory=dict)  # algorithm columns: batch["log_probs"]
    rows: Tensor | None = None  # where in the source it came from

    def __post_init__(self) -> None:
        shape = tuple(self.rewards.shape)
        for name, column in self._columns():
            for leaf in tree_leaves(column):
                if tuple(leaf.shape[: len(shape)]) != shape:
                    raise ValueError(
                        f"column '{name}' has shape {tuple(leaf.shape)}; every column must lead with {shape}, "
                        "the shape of 'rewards'"
                    )

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Batch:
        """Build from a mapping of arrays. `dones` alone is taken as terminated; unknown names become extras.

        A list given as `next_observations` may hold None for entries without a successor: `has_next` masks them.
        """
        given = dict(columns)
        missing = {"observations", "actions", "rewards"} - given.keys()
        if missing:
            raise ValueError(f"a batch needs {sorted(missing)}; got the columns {sorted(given)}")
        dones = given.pop("dones", None)
        rewards = _tensor(given.pop("rewards")).float()
        nothing = torch.zeros(rewards.shape, dtype=torch.bool, device=rewards.device)
        terminated, truncated = given.pop("terminated", None), given.pop("truncated", None)
        if terminated is None:
            ended = nothing if dones is None else _flags(dones)
            terminated = ended if truncated is None else ended & ~_flags(truncated)
        if truncated is None:
            truncated = nothing if dones is None else _flags(dones) & ~_flags(terminated)
        observations = tree_map(_tensor, given.pop("observations"))
        successors = given.pop("next_observations", None)
        if isinstance(successors, (list, tuple)) and any(entry is None for entry in successors):
            given["has_next"] = torch.tensor([entry is not None for entry in successors])
            entries = [
                _entry(observations, i) if entry is None else tree_map(_tensor, entry)
                for i, entry in enumerate(successors)
            ]
            successors = tree_zip(lambda *leaves: torch.stack(leaves), *entries)
        return cls(
            observations=observations,
            actions=_tensor(given.pop("actions")),
            rewards=rewards,
            terminated=_flags(terminated),
            truncated=_flags(truncated),
            next_observations=tree_map(_tensor, successors),
            infos=given.pop("infos", ()),
            rows=given.pop("rows", None),
            extras={name: _tensor(value) for name, value in given.items()},
        )

    @property
    def dones(self) -> Tensor:
        """Where an episode ended, for either reason."""
        return self.terminated | self.truncated

    @property
    def has_next(self) -> Tensor:
        """Where `next_observations` holds a real successor."""
        if self.next_observations is None:
            return torch.zeros_like(self.terminated)
        return self.extras["has_next"] if "has_next" in self.extras else torch.ones_like(self.terminated)

    @property
    def shape(self) -> torch.Size:
        """The shared leading shape."""
        return self.rewards.shape

    def __len__(self) -> int:
        return self.rewards.shape[0]

    def __getitem__(self, name: str) -> Any:
        if name in self.extras:
            return self.extras[name]
        if name == "dones" or name in _FIELDS:
            return getattr(self, name)
        raise KeyError(f"no column '{name}'; this batch has {sorted([*_FIELDS, 'dones', *self.extras])}")

    def __contains__(self, name: str) -> bool:
        return name in self.extras or name == "dones" or name in _FIELDS

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply a function to every tensor."""
        return self._unchecked(
            **{name: tree_map(function, column) for name, column in self._fixed()},
            infos=self.infos,
            extras={name: tree_map(function, column) for name, column in self.extras.items()},
        )

    def select(self, indices: Any) -> Batch:
        """Take entries of the first dimension: integers (negative ones too), a boolean mask, or a slice."""
        if not isinstance(indices, slice):
            indices = torch.as_tensor(indices, device=self.rewards.device)
            if indices.numel() == 0:
                indices = indices.long()
            if indices.dim() == 0:
                indices = indices[None]
        selected = replace_unchecked(self, rows=self._own_rows()).map(lambda tensor: tensor[indices])
        return replace_unchecked(selected, infos=_select_infos(self.infos, indices, len(self)))

    def to(self, device: str | torch.device) -> Batch:
        """Move every tensor; infos stay where they are."""
        return self.map(lambda tensor: tensor.to(device) if isinstance(tensor, Tensor) else tensor)

    def flatten(self) -> Batch:
        """Join time and batch: [T, B] becomes [T * B]. A flat batch stays as it is."""
        if self.rewards.dim() == 1:
            return self
        flat = replace_unchecked(self, rows=self._own_rows(), infos=())
        return flat.map(lambda tensor: tensor.flatten(0, 1))

    def with_columns(self, **columns: Any) -> Batch:
        """Add or replace columns."""
        for name in ("dones", "extras"):
            if name in columns:
                raise ValueError(f"'{name}' is not a column: give terminated and truncated, or extra columns by name")
        fixed = {name: value for name, value in columns.items() if name in _FIELDS}
        extras = {name: value for name, value in columns.items() if name not in _FIELDS}
        return replace(self, **fixed, extras={**self.extras, **extras})

    @staticmethod
    def merge(batches: Sequence[Batch]) -> Batch:
        """Concatenate along the first dimension.

        Where only some have successors, the others' entries repeat the observation and `has_next` is false there.
        """
        return _join(batches, torch.cat, _merge_infos(batches))

    @staticmethod
    def stack(batches: Sequence[Batch]) -> Batch:
        """Stack steps [B] into a trajectory [T, B]; infos become one entry per step."""
        infos = [batch.infos for batch in batches]
        return _join(batches, torch.stack, infos if any(len(entry) for entry in infos) else ())  # type: ignore[arg-type]

    def _fixed(self) -> Iterator[tuple[str, Tree]]:
        for name in _FIELDS:
            if name not in ("infos", "extras"):
                yield name, getattr(self, name)

    def _columns(self) -> Iterator[tuple[str, Tree]]:
        for name, column in self._fixed():
            if name != "rows":  # a source may number its windows once for all their steps
                yield name, column
        yield from self.extras.items()

    def _own_rows(self) -> Tensor | None:
        # Numbers of whole windows say nothing about a part of them.
        leads = self.rows is not None and self.rows.shape[: self.rewards.dim()] == self.rewards.shape
        return self.rows if leads else None

    @staticmethod
    def _unchecked(**values: Any) -> Batch:
        batch = object.__new__(Batch)
        for name in _FIELDS:
            object.__setattr__(batch, name, values[name])
        return batch


_FIELDS = tuple(entry.name for entry in fields(Batch))


def replace_unchecked(batch: Batch, **changes: Any) -> Batch:
    """Return a copy with other field values, without checking the shapes again."""
    return Batch._unchecked(**({name: getattr(batch, name) for name in _FIELDS} | changes))


def _join(batches: Sequence[Batch], join: Callable[[list[Tensor]], Tensor], infos: Infos) -> Batch:
    if not batches:
        raise ValueError("cannot join an empty list of batches")
    complete = [batch.next_observations is not None and "has_next" not in batch.extras for batch in batches]
    absent = [batch.next_observations is None for batch in batches]
    if not all(complete) and not all(absent):
        batches = [
            batch.with_columns(
                next_observations=batch.observations if batch.next_observations is None else batch.next_observations,
                has_next=batch.has_next,
            )
            for batch in batches
        ]
    names = batches[0].extras.keys()
    for batch in batches[1:]:
        if batch.extras.keys() != names:
            raise ValueError(f"extra columns differ: {sorted(names)} against {sorted(batch.extras)}")

    def joined(column: Callable[[Batch], Tree]) -> Tree:
        return tree_zip(lambda *leaves: join(list(leaves)), *(column(batch) for batch in batches))

    if any(batch._own_rows() is None for batch in batches):
        batches = [replace_unchecked(batch, rows=None) for batch in batches]
    return Batch._unchecked(
        **{name: joined(lambda b, n=name: getattr(b, n)) for name, _ in batches[0]._fixed()},  # type: ignore[misc]
        infos=infos,
        extras={name: joined(lambda b, n=name: b.extras[n]) for name in names},  # type: ignore[misc]
    )


def _entry(tree: Tree, index: int) -> Tree:
    return tree_map(lambda column: column[index], tree)


def _tensor(value: Any) -> Tensor:
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        value = value.astype(np.float32)
    return torch.as_tensor(value)


def _flags(value: Any) -> Tensor:
    return torch.as_tensor(value).bool()


def _select_infos(infos: Infos, indices: Any, length: int) -> Infos:
    if not len(infos):
        return infos
    positions = torch.arange(length)[indices.cpu() if isinstance(indices, Tensor) else indices].tolist()
    if isinstance(infos, Mapping):
        return {key: [values[i] for i in positions] for key, values in infos.items()}
    return [infos[i] for i in positions]


def _merge_infos(batches: Sequence[Batch]) -> Infos:
    """Concatenate; entries of a batch that has no infos are empty, so that the others keep their place."""
    given = [batch.infos for batch in batches if len(batch.infos)]
    if not given:
        return ()
    if all(isinstance(infos, Mapping) for infos in given):
        keys: list[str] = list(given[0])  # type: ignore[arg-type]
        if any(set(infos) != set(keys) for infos in given):
            raise ValueError("infos have different keys; give them as a list of mappings")
        parts: list[Any] = [batch.infos or dict.fromkeys(keys, [None] * len(batch)) for batch in batches]
        return {key: [value for part in parts for value in part[key]] for key in keys}
    if any(isinstance(infos, Mapping) for infos in given):
        raise ValueError("cannot join infos given as a list with infos given as a mapping")
    parts = [batch.infos if len(batch.infos) else [{}] * len(batch) for batch in batches]
    return [entry for part in parts for entry in part]
