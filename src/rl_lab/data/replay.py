"""Ring: the time-major replay ring, with a write head per environment and rows that never move.

An episode of T decisions occupies T + 1 rows: the last one holds the final observation, a zero action, a zero reward
and `is_last`, so the successor of a decision is always the next row. The row at the head is *open* while an episode
runs: it holds the latest observation, which can be read as a successor, and becomes the next decision.

A position counts the rows of one environment since the start; a row number is `position % num_rows * num_envs + env`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rl_lab.core.batch import Batch, Tree, tree_leaves, tree_map, tree_zip
from rl_lab.core.errors import UserError, is_out_of_memory
from rl_lab.data.storage import DeviceStorage, HostStorage, Rows, Storage, sent

_GIVEN = ("observations", "actions", "rewards")
_ENDS = ("terminated", "truncated")
_FLAGS = ("is_first", "is_last")
_DECISION = ("actions", "rewards", *_ENDS)
_FIXED = ("observations", *_DECISION, *_FLAGS)
HISTORY = ("steps", "last", *_FIXED)  # what is read and saved of a row whatever the algorithm adds
_CPU = torch.device("cpu")
_LATEST = itemgetter(-1)


class Ring:
    """Rows of all environments: columns of [num_rows * num_envs, ...], allocated by the first trajectory.

    `device` None keeps NumPy arrays on the host, or where `storage` has them; otherwise columns are torch tensors
    there. What decides which rows may be drawn (`heads`, `opened`, `steps`, `last`) is always on the host.
    """

    segment_bytes = 16 * 2**20

    def __init__(
        self, num_envs: int, capacity: int, device: torch.device | None = None, storage: Storage | None = None
    ) -> None:
        self.num_envs, self.capacity, self.device = num_envs, capacity, device
        self.num_rows = -(-capacity // num_envs) + 1  # one more than is stored: the open row
        self.size = self.num_rows * num_envs
        self.storage: Storage = storage or (HostStorage() if device is None else DeviceStorage(device))
        self.columns: dict[str, Tree] = {}
        self.extras: dict[str, Tree] = {}  # columns of the algorithm that arrive with every trajectory
        self.written: dict[str, Tree] = {}  # columns that updates made
        self.rewritten: set[str] = set()  # extras that updates changed
        self.heads = np.zeros(num_envs, np.int64)  # the position of the next decision
        self.ages = np.zeros(num_envs, np.int64)  # decisions so far in the running episode; 0: the next one is first
        self.opened = np.zeros(num_envs, np.bool_)  # the row at the head holds the observation of the next decision
        try:
            self.steps = np.zeros(self.size, np.int32)  # of each row, its place in its episode
            self.last = np.zeros(self.size, np.bool_)  # rows that hold a final observation
        except MemoryError:
            raise self._no_room(5) from None
        self.added = 0  # decisions since the start
        self.version = 0  # changes with the contents
        self.restored = 0  # times that the contents were replaced as a whole
        self._envs = np.arange(num_envs)
        self._all_open = np.ones(num_envs, np.bool_)
        self._head_rows = self.rows(self.heads)

    def __len__(self) -> int:
        """Return how many decisions are stored."""
        return int(np.minimum(self.heads, self.num_rows - 1).sum()) - int(np.count_nonzero(self.last))

    @property
    def nbytes(self) -> int:
        """How much memory all rows take, written or not."""
        leaves = (*tree_leaves(self.columns), *tree_leaves(self.extras), *tree_leaves(self.written))
        return sum(leaf.nbytes for leaf in (*leaves, self.steps, self.last))

    @property
    def history_bytes(self) -> int:
        """How much of a row the environment said."""
        return sum(leaf.nbytes for leaf in tree_leaves(self.columns)) // self.size

    @property
    def num_filled(self) -> int:
        """How many rows per environment have been written, at most."""
        return min(int(self.heads.max()) + 1, self.num_rows)

    def rows(self, positions: NDArray[np.int64], env: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Return the flat row numbers of positions [..., N], or of positions of given environments."""
        rows = positions % self.num_rows
        if self.num_envs > 1:
            rows = rows * self.num_envs + (self._envs if env is None else env)
        return rows.reshape(-1)

    def successors(self, rows: Rows) -> Rows:
        """Return the next row of the same environment."""
        return (rows + self.num_envs) % self.size

    def add(self, trajectory: Batch) -> None:
        """Append [T, N] decisions that go on where the last ones ended (`close_open` first if they do not).

        Without `next_observations` a successor is the next added observation; an episode that ended without a
        known final observation repeats its last one.
        """
        if not self.columns:
            self._allocate(trajectory)
        self._check(trajectory)
        ended = trajectory.terminated.numpy(force=True) | trajectory.truncated.numpy(force=True)
        any_ended = bool(np.count_nonzero(ended))  # several times faster than any() on few entries
        positions, steps = self._layout(ended) if any_ended else self._continued(len(ended))
        heads = positions[-1] + 1
        if any_ended:
            heads += ended[-1]
        rows = self._head_rows if len(ended) == 1 else self.rows(positions)
        flat_steps, keep = steps.reshape(-1), None
        if 2 * len(ended) >= self.num_rows:  # more than the ring may hold: only the newest rows are written
            keep = (positions > heads - self.num_rows).reshape(-1)
            rows, flat_steps = rows[keep], flat_steps[keep]
        self.steps[rows] = flat_steps
        self.last[rows] = False
        self._put_decisions(rows, trajectory, any_ended, keep, fresh=bool(heads.max() < self.num_rows))
        known = trajectory.next_observations is not None
        successors = trajectory.next_observations if known else trajectory.observations
        if any_ended:
            time, env = np.nonzero(ended & (positions + 1 > heads - self.num_rows))
            finals = self.rows(positions[time, env] + 1, env)
            self.steps[finals] = steps[time, env] + 1
            self._close(finals, tree_map(lambda leaf: leaf[time, env], successors))
        self.heads, self.ages = heads, steps[-1] + 1
        self.opened = self._all_open if known else ~self._all_open
        if "has_next" in trajectory.extras:
            self.opened = self.opened & trajectory.extras["has_next"][-1].numpy(force=True)
        if any_ended:
            self.ages[ended[-1]] = 0
            self.opened = self.opened & ~ended[-1]
        self._open(successors)
        self.storage.flush()
        self.added += ended.size
        self.version += 1

    def close_open(self, env_mask: NDArray[np.bool_] | None = None) -> None:
        """End running episodes as truncated: their next observation will not be the one that is added next."""
        mask = self.ages > 0 if env_mask is None else np.asarray(env_mask) & (self.ages > 0)
        env = np.flatnonzero(mask)
        if not len(env):
            return
        finals, decisions = self.rows(self.heads[env], env), self.rows(self.heads[env] - 1, env)
        self.storage.fill(self.columns["truncated"], decisions, True)
        seen = np.where(self.opened[env], finals, decisions)
        self.steps[finals] = self.ages[env]
        self._close(finals, self._take(self.columns["observations"], self.storage.index(seen), _CPU))
        self.heads = self.heads + mask
        self.ages = np.where(mask, 0, self.ages)
        self.opened = self.opened & ~mask
        self._head_rows = self.rows(self.heads)
        self.last[self._head_rows] = False
        self.storage.flush()
        self.version += 1

    def gather(
        self,
        rows: Rows,
        device: torch.device = _CPU,
        *,
        running: bool = False,
        padded: bool = False,
        staged: dict[str, Tree] | None = None,
    ) -> Batch:
        """Read transitions [B] or windows [L, B]; pure indexing.

        Running windows carry `is_first` and `is_last` instead of successors; padded ones repeat rows. What was
        `staged` of these rows is not read again.
        """
        index = self.storage.index(rows)
        if staged is None:
            staged = self._read(index, self._take, device, running=running, padded=padded)
        else:
            staged = tree_map(lambda leaf: sent(leaf, device), staged)
        extras = {name: self._take(column, index, device) for name, column in self.extras.items()}
        extras |= {name: self._take(column, index, device) for name, column in self.written.items()}
        extras |= {name: staged.pop(name) for name in _FLAGS if running}
        return Batch._unchecked(
            **staged, infos=(), extras=extras, rows=torch.from_numpy(index) if isinstance(index, np.ndarray) else index
        )

    def stage(
        self, rows: Rows, device: torch.device = _CPU, *, running: bool = False, padded: bool = False
    ) -> dict[str, Tree]:
        """Read what the environment said in these rows, which no update changes, on its way to a device."""
        take = lambda column, index, device: tree_map(  # noqa: E731
            lambda leaf: self.storage.stage(leaf, index, device), column
        )
        return self._read(self.storage.index(rows), take, device, running=running, padded=padded)

    def _read(
        self, index: Rows, take: Callable[..., Tree], device: torch.device, *, running: bool, padded: bool
    ) -> dict[str, Tree]:
        seen, successors = self.columns["observations"], None
        if running:
            observations = take(seen, index, device)
        elif index.ndim == 1 or padded:
            observations = take(seen, index, device)
            successors = take(seen, self.successors(index), device)
        else:  # neighbours share a row: read it once
            join = np.concatenate if isinstance(index, np.ndarray) else torch.cat
            all_seen = take(seen, join([index, self.successors(index[-1:])]), device)
            observations = tree_map(lambda leaf: leaf[:-1], all_seen)
            successors = tree_map(lambda leaf: leaf[1:], all_seen)
        names = (*_DECISION, *_FLAGS) if running else _DECISION
        others = {name: take(self.columns[name], index, device) for name in names}
        return {"observations": observations, "next_observations": successors, **others}

    def write(self, rows: Rows, columns: Mapping[str, Tree]) -> None:
        """Write columns of algorithms back at rows [B] or [L, B]; a new one is allocated.

        Where a row is given more than once (windows overlap), the later in the window wins, then the later in the
        batch. What the environment said is never rewritten.
        """
        index = self.storage.index(rows)
        for name, values in columns.items():
            if name in self.columns or name in _FIXED:
                raise ValueError(f"column '{name}' is history: an update may only write columns of its own")
            if wrong := [list(leaf.shape) for leaf in tree_leaves(values) if leaf.shape[: index.ndim] != index.shape]:
                raise ValueError(
                    f"column '{name}' has the shape {wrong[0]}, but its batch has {list(index.shape)}: "
                    "return one entry for every row of the batch, in the batch's order"
                )
        for name, values in columns.items():
            if name not in self.extras and name not in self.written:
                self.written[name] = self.zeros(values, index.ndim)
            if name in self.extras:
                self.rewritten.add(name)
            column = self.extras[name] if name in self.extras else self.written[name]
            overwrite = partial(self.storage.overwrite, name, rows=index)
            tree_zip(lambda leaf, value: overwrite(leaf, values=value), column, values)  # noqa: B023

    @property
    def oldest(self) -> int:
        """The smallest position that is still stored."""
        return max(int(self.heads.min()) - self.num_rows + 1, 0)

    def segments(self) -> list[tuple[int, int]]:
        """Return (start, stop) of the blocks of positions, about `segment_bytes` each, that will never change again.

        They are cut by position alone, so that they are the same whenever one asks.
        """
        if not self.columns:
            return []
        leaves = (*tree_leaves(self.columns), *tree_leaves(self.extras))
        per_position = sum(leaf[: self.num_envs].nbytes for leaf in leaves)
        length = max(self.segment_bytes // per_position, 1)
        end = max(int(self.heads.min()) - 1, 0) // length * length  # closing an episode may change the last decision
        return [(start, start + length) for start in range(self.oldest // length * length, end, length)]

    def read(self, start: int, stop: int) -> dict[str, Any]:
        """Return rows by position, [stop - start, num_envs, ...], in host memory; what was overwritten is arbitrary."""
        rows = self.rows(np.arange(start, stop)[:, None] + np.zeros(self.num_envs, np.int64))
        shape = (stop - start, self.num_envs)
        index = self.storage.index(rows)
        history = {
            name: tree_map(lambda leaf: self.storage.take(leaf, index, _CPU).reshape(*shape, *leaf.shape[1:]), column)
            for name, column in self._history_columns()
        }
        return {"steps": self.steps[rows].reshape(shape), "last": self.last[rows].reshape(shape), **history}

    def pages(self) -> list[tuple[int, int]]:
        """Return (start, stop) of blocks of filled rows: about `segment_bytes` each of what updates wrote to them."""
        leaves = [*tree_leaves(self.written), *(leaf for n in self.rewritten for leaf in tree_leaves(self.extras[n]))]
        if not leaves:
            return []
        length = max(self.segment_bytes * self.size // sum(leaf.nbytes for leaf in leaves), 1)
        end = self.num_filled * self.num_envs
        return [(start, min(start + length, end)) for start in range(0, end, length)]

    def read_page(self, start: int, stop: int) -> dict[str, Any]:
        """Return a copy of the columns that updates made or changed, of consecutive rows, in host memory."""
        part = lambda leaf: self.storage.export(leaf, start, stop)  # noqa: E731
        return {
            "rewritten": {name: tree_map(part, self.extras[name]) for name in sorted(self.rewritten)},
            "written": tree_map(part, self.written),
        }

    def get_written(self) -> dict[str, Any]:
        """Return a copy of the columns that updates made or changed, as far as rows are filled."""
        return self.read_page(0, self.num_filled * self.num_envs)

    def set_written(self, saved: Mapping[int, Any]) -> None:
        """Restore what updates wrote beside the rows that are here; `saved` are pages by their first row."""
        self.written, self.rewritten = {}, set()
        for start in sorted(saved):
            page = saved[start]
            for group, columns in ((self.extras, page["rewritten"]), (self.written, page["written"])):
                for name, column in columns.items():
                    values = tree_map(torch.as_tensor, column)
                    if start == min(saved):
                        group[name] = self.zeros(values, 1)
                    rows = int(start) + np.arange(len(next(tree_leaves(values))))
                    if len(rows) and rows[-1] >= self.size:
                        raise ValueError(f"column '{name}' has more rows than the ring")
                    self._put(name, group[name], rows, values)
            self.rewritten |= set(page["rewritten"])
            self.storage.flush()

    def get_state(self, since: int = 0, *, written: bool = True) -> dict[str, Any]:
        """Return a copy of everything from a position on: what is before it, in `segments`, never changes.

        What updates wrote comes as one page, or not at all: then it is in `pages`.
        """
        start = max(since, self.oldest)
        return {
            "shape": [self.num_rows, self.num_envs],
            "size": len(self),
            "added": self.added,
            "heads": self.heads.copy(),
            "ages": self.ages.copy(),
            "opened": self.opened.copy(),
            "start": start,
            "tail": self.read(start, int(self.heads.max()) + 1) if self.columns else None,
            "written": self.get_written() if written else None,
        }

    def set_state(
        self,
        state: Mapping[str, Any],
        segments: Mapping[int, Any] | None = None,
        pages: Mapping[int, Any] | None = None,
    ) -> None:
        """Restore in place what `get_state` returned, the segments before it and the pages beside it."""
        if list(state["shape"]) != [self.num_rows, self.num_envs]:
            raise ValueError(
                f"the saved ring has {state['shape'][0]} rows of {state['shape'][1]} environments, "
                f"this one {self.num_rows} of {self.num_envs}"
            )
        self.added = int(state["added"])
        self.heads, self.ages, self.opened = (np.array(state[name]) for name in ("heads", "ages", "opened"))
        self._head_rows = self.rows(self.heads)
        self.steps[:], self.last[:] = 0, False
        self.columns, self.extras = {}, {}
        segments, pages = segments or {}, ({0: state["written"]} if state["written"] is not None else pages or {})
        self.rewritten = set(pages[min(pages)]["rewritten"]) if pages else set()
        if state["tail"] is not None:
            for start in sorted(segments):  # one after the other: together they may be more than memory holds
                self._restore(int(start), segments[start])
            self._restore(int(state["start"]), state["tail"])
        self.set_written(pages)
        self.version += 1
        self.restored += 1

    def _restore(self, start: int, part: Mapping[str, Any]) -> None:
        """Put rows by position back, where they are still stored."""
        positions = start + np.arange(len(part["steps"]))[:, None] + np.zeros(self.num_envs, np.int64)
        stored = ((positions > self.heads - self.num_rows) & (positions <= self.heads)).reshape(-1)
        rows = self.rows(positions)[stored]
        self.steps[rows], self.last[rows] = (np.asarray(part[name]).reshape(-1)[stored] for name in ("steps", "last"))
        for name, saved in part.items():
            if name in ("steps", "last") or name in self.rewritten:
                continue
            group = self.columns if name in _FIXED else self.extras
            values = tree_map(torch.as_tensor, saved)
            if name not in group:
                group[name] = self.zeros(values, 2)
            self._put(name, group[name], rows, values, stored)
        self.storage.flush()

    def _history_columns(self) -> Iterator[tuple[str, Tree]]:
        """Yield the columns that never change once a row is written."""
        yield from self.columns.items()
        yield from ((name, column) for name, column in self.extras.items() if name not in self.rewritten)

    def _check(self, trajectory: Batch) -> None:
        if trajectory.shape[1] != self.num_envs:
            raise ValueError(
                f"a trajectory of shape {tuple(trajectory.shape)} (time, environments) was added to a replay "
                f"of {self.num_envs} environments"
            )
        given = trajectory.extras.keys()
        if given != self.extras.keys() and given - {"has_next"} != self.extras.keys():
            raise ValueError(f"a trajectory has the extra columns {sorted(given)}, those before {sorted(self.extras)}")

    def _allocate(self, trajectory: Batch) -> None:
        if taken := trajectory.extras.keys() & set(_FIXED):
            raise ValueError(f"extra columns may not be named {sorted(taken)}: replay has columns of that name")
        for name in (*_GIVEN, *_ENDS):
            self.columns[name] = self.zeros(getattr(trajectory, name), 2)
        for name in _FLAGS:
            self.columns[name] = self.zeros(trajectory.terminated, 2)
        self.extras = {name: self.zeros(column, 2) for name, column in trajectory.extras.items() if name != "has_next"}

    def zeros(self, values: Tree, num_leading: int) -> Tree:
        """Return a column of zeros for rows like those of `values`, whose first dimensions are not of a row."""
        try:
            return tree_map(lambda leaf: self.storage.allocate(self.size, leaf, num_leading), values)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            sizes = (leaf[(0,) * num_leading].nbytes for leaf in tree_leaves(values))
            raise self._no_room(sum(sizes)) from None

    def _no_room(self, row_bytes: int) -> UserError:
        return UserError(
            f"no room in memory: this replay needs at least {row_bytes * self.size:,} bytes",
            key="capacity",
            value=self.capacity,
            remedy="lower it, or keep the replay in files: storage: disk",
        )

    def _continued(self, num_steps: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return positions and steps [T, N] of decisions that end no episode."""
        if num_steps == 1:
            return self.heads[None], self.ages[None]
        time = np.arange(num_steps)[:, None]
        return self.heads + time, self.ages + time

    def _layout(self, ended: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return positions and steps [T, N] of decisions; after each end one row is left for the final observation."""
        time = np.arange(len(ended))[:, None]
        before: NDArray[np.int64] = np.cumsum(ended, axis=0) - ended
        start = np.empty(ended.shape, np.int64)  # when the episode began, in time of this chunk
        start[0] = -self.ages
        start[1:] = np.where(ended[:-1], time[1:], start[0])
        return self.heads + time + before, time - np.maximum.accumulate(start, axis=0)

    def _put(
        self, name: str, column: Tree, rows: NDArray[np.int64], values: Tree, keep: NDArray[np.bool_] | None = None
    ) -> None:
        if isinstance(column, dict):
            tree_zip(lambda leaf, value: self.storage.put(name, leaf, rows, value, keep), column, values)
        else:
            self.storage.put(name, column, rows, values, keep)

    def _take(self, column: Tree, index: Rows, device: torch.device) -> Tree:
        if isinstance(column, dict):
            return tree_map(lambda leaf: self.storage.take(leaf, index, device), column)
        return self.storage.take(column, index, device)

    def _put_decisions(
        self,
        rows: NDArray[np.int64],
        trajectory: Batch,
        any_ended: bool,
        keep: NDArray[np.bool_] | None,
        *,
        fresh: bool,
    ) -> None:
        """Write decisions; `fresh` rows were never written before, so that what is zero there may stay."""
        storage = self.storage
        for name in (*_GIVEN, *_ENDS) if any_ended else _GIVEN:
            self._put(name, self.columns[name], rows, getattr(trajectory, name), keep)
        for name, column in self.extras.items():
            self._put(name, column, rows, trajectory.extras[name], keep)
        zeros = _FLAGS if any_ended else (*_ENDS, *_FLAGS)  # filling is cheaper than writing only False
        for name in () if fresh else zeros:
            storage.fill(self.columns[name], rows, False)
        steps = self.steps[rows]
        if np.count_nonzero(steps) < len(rows):
            storage.fill(self.columns["is_first"], rows[steps == 0], True)
        if self.written and not fresh:  # what updates wrote belonged to the rows that were here before
            tree_map(lambda leaf: storage.fill(leaf, rows, 0), self.written)

    def _close(self, rows: NDArray[np.int64], observations: Tree) -> None:
        """Make these the last rows of their episodes."""
        self.last[rows] = True
        empty = [self.columns[name] for name in (*_DECISION, "is_first")]
        for column in (*empty, *self.extras.values(), *self.written.values()):
            tree_map(lambda leaf: self.storage.fill(leaf, rows, 0), column)
        self.storage.fill(self.columns["is_last"], rows, True)
        self._put("observations", self.columns["observations"], rows, observations)

    def _open(self, successors: Tree) -> None:
        """Show the latest observations, where they are known, in the rows at the heads."""
        rows = self._head_rows = self.rows(self.heads)
        self.steps[rows] = self.ages
        self.last[rows] = False
        if np.count_nonzero(self.opened) == self.num_envs:
            latest = tree_map(_LATEST, successors)
        else:
            env = np.flatnonzero(self.opened)
            rows, latest = rows[env], tree_map(lambda leaf: leaf[-1, env], successors)
        self._put("observations", self.columns["observations"], rows, latest)
