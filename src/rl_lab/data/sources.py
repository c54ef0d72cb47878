"""Sources: where updates get their batches. StreamSource keeps the last rollout; ReplaySource draws from a ring."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_lab.core.batch import COLUMNS, Batch, Tree, replace_unchecked, tree_map, tree_zip
from rl_lab.core.errors import UserError
from rl_lab.data.disk import DiskStorage
from rl_lab.data.online import OnlineQueue
from rl_lab.data.prefetch import MIN_BYTES, Prefetch
from rl_lab.data.replay import Ring
from rl_lab.data.storage import Rows
from rl_lab.data.windows import Windows

MODES = ("whole", "running")
Trajectory = Batch | Mapping[str, Any]
_CPU = torch.device("cpu")


@runtime_checkable
class Source(Protocol):
    """What the loop and the workflows know of a source."""

    draw_ahead: bool  # whether several batches may be drawn before the first of them is used
    min_size: int  # decisions that must have been added before it is ready
    captures: bool  # whether `gather` and `write` stay on the device, so that a graph can hold them
    ring: Ring | None  # the rows that it draws from, which several sources may view

    @property
    def ready(self) -> bool:
        """Whether a batch can be drawn."""
        ...

    @property
    def batch_size(self) -> int:
        """Transitions, or windows, in a batch."""
        ...

    def add(self, trajectory: Trajectory) -> None:
        """Take in decisions [T, N]."""
        ...

    def close_open(self, env_mask: NDArray[np.bool_] | None = None) -> None:
        """End running episodes as truncated: what is added next does not continue them."""
        ...

    def draw(self, k: int = 1, batch_size: int | None = None) -> NDArray[np.int64]:
        """Choose the rows of k batches: [k, ...]."""
        ...

    def prefetch(self, rows: Rows) -> None:
        """Take note that these rows are gathered next, after what is written back to others until then."""
        ...

    def gather(self, rows: Rows) -> Batch:
        """Read the rows of one batch."""
        ...

    def write(self, rows: Rows, columns: Mapping[str, Tree]) -> None:
        """Write columns that an update made back to the rows of its batch."""
        ...

    def sample(self, batch_size: int | None = None) -> Batch:
        """Draw and gather one batch."""
        ...

    def advance(self, *, agent_steps: int, updates: int) -> None:
        """Bring schedules to these counters."""
        ...

    def __len__(self) -> int: ...

    @property
    def history(self) -> Ring | None:
        """What is saved in files of its own: segments that never change, pages of what updates write."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Return everything but the generator, and the segments and pages of `history`."""
        ...

    def set_state(
        self,
        state: Mapping[str, Any],
        segments: Mapping[int, Any] | None = None,
        pages: Mapping[int, Any] | None = None,
    ) -> None:
        """Restore what `get_state` returned, and the segments and pages of `history`."""
        ...


def as_trajectory(trajectory: Trajectory, num_envs: int) -> Batch:
    """Take a batch or a mapping of columns as decisions [T, N]; one step [N] gains a time dimension."""
    batch = trajectory if isinstance(trajectory, Batch) else Batch.from_columns(trajectory)
    if batch.rewards.dim() == 1:
        batch = batch.map(lambda leaf: leaf[None])
    if batch.rewards.dim() != 2 or batch.shape[1] != num_envs or not len(batch):
        raise ValueError(
            f"a trajectory must be [time, {num_envs}] (or one step, [{num_envs}]); its rewards are {list(batch.shape)}"
        )
    return batch


class StreamSource:
    """The last rollout [T, N], whole. Sampling does not consume it: it stays until the next one is added."""

    draw_ahead = True
    min_size = 1
    captures = False  # the rollout is another one every time
    ring = None

    def __init__(self, num_envs: int, generator: np.random.Generator, device: str) -> None:
        self.num_envs, self.generator, self.device = num_envs, generator, torch.device(device)
        self.rollout: Batch | None = None

    @property
    def ready(self) -> bool:
        """Whether there is a rollout."""
        return self.rollout is not None

    @property
    def batch_size(self) -> int:
        """Transitions in the rollout."""
        return len(self)

    def __len__(self) -> int:
        return 0 if self.rollout is None else self.rollout.rewards.numel()

    def add(self, trajectory: Trajectory) -> None:
        """Replace the rollout."""
        rollout = replace_unchecked(as_trajectory(trajectory, self.num_envs), infos=(), rows=None)
        self.rollout = rollout if self.device == _CPU else rollout.to(self.device)

    def close_open(self, env_mask: NDArray[np.bool_] | None = None) -> None:
        """Forget the rollout if every episode is ended: nobody shall learn twice from it because the next was lost."""
        if env_mask is None:
            self.rollout = None

    def draw(self, k: int = 1, batch_size: int | None = None) -> NDArray[np.int64]:
        """Choose nothing, k times: there is one rollout. With a batch size: transitions [k, B], each at most once."""
        if batch_size is None:
            return np.empty((k, 0), np.int64)
        total = len(self)
        if batch_size > total:
            raise ValueError(f"{batch_size} transitions were asked of a rollout that has {total}")
        return np.stack([self.generator.choice(total, batch_size, replace=False, shuffle=False) for _ in range(k)])

    def prefetch(self, rows: Rows) -> None:
        """There is nothing to read ahead."""

    def gather(self, rows: Rows = None) -> Batch:
        """Return the rollout, or the transitions that were drawn from it."""
        if self.rollout is None:
            raise ValueError("there is no rollout yet: collect before an update")
        return self.rollout if rows is None or not len(rows) else self.rollout.flatten().select(rows)

    def write(self, rows: Rows, columns: Mapping[str, Tree]) -> None:
        """Keep columns [T, N] beside the rollout; priorities mean nothing here."""
        if rows is not None and len(rows):
            raise ValueError("columns can be written back to a whole rollout only, not to rows of it")
        if self.rollout is not None:
            kept = {name: tree_map(Tensor.detach, column) for name, column in columns.items() if name != "priority"}
            self.rollout = self.rollout.with_columns(**kept)

    def sample(self, batch_size: int | None = None) -> Batch:
        """Return the rollout, or some transitions of it."""
        return self.gather(self.draw(1, batch_size)[0])

    def advance(self, *, agent_steps: int, updates: int) -> None:
        """Nothing is scheduled here."""

    @property
    def history(self) -> None:
        """A rollout is saved whole."""
        return None

    def get_state(self) -> dict[str, Any]:
        """Return the columns of the rollout."""
        if self.rollout is None:
            return {"rollout": None}
        return {"rollout": {name: getattr(self.rollout, name) for name in COLUMNS}}

    def set_state(
        self,
        state: Mapping[str, Any],
        segments: Mapping[int, Any] | None = None,
        pages: Mapping[int, Any] | None = None,
    ) -> None:
        """Restore the rollout."""
        saved = state["rollout"]
        move = lambda leaf: torch.as_tensor(leaf).to(self.device)  # noqa: E731
        self.rollout = None if saved is None else Batch(**{name: tree_map(move, tree) for name, tree in saved.items()})


class Sequences(NamedTuple):
    """Windows with the batch first: one observation more than there are decisions."""

    observations: Tree  # [B, H + 1, ...]
    actions: Tensor  # [B, H, ...]
    rewards: Tensor  # [B, H, 1]
    terminated: Tensor  # [B, H, 1]


class ReplaySource:
    """Uniform draws from a ring: transitions [B], or windows [L, B] where `window` says how long.

    Ready when `min_size` decisions have been added and at least one window is complete. `storage` is "cpu" (NumPy
    in host memory), "disk" (memory-mapped files in `folder`; the lab gives the run's), "device" (torch, where the
    batches go) or the name of a torch device. With `online`, running windows that were never drawn come first. With
    `ring` it views the rows of another source; whoever collects adds to one of them.
    """

    draw_ahead = True

    def __init__(
        self,
        num_envs: int,
        generator: np.random.Generator,
        device: str,
        *,
        capacity: int | None = None,
        batch_size: int,
        min_size: int = 1,
        window: int | None = None,
        mode: str = "whole",
        pad: bool = False,
        online: bool = False,
        storage: str = "cpu",
        folder: str | None = None,
        ring: Ring | None = None,
    ) -> None:
        self.num_envs, self.generator, self.device = num_envs, generator, torch.device(device)
        self.owns_ring = ring is None
        if ring is None:
            if capacity is None or capacity < 1:
                raise UserError(
                    "a replay needs a capacity of at least one transition",
                    key="capacity",
                    value=capacity,
                    remedy="say how many transitions to keep, such as 100000",
                )
            ring = new_ring(num_envs, capacity, storage, folder, self.device)
        elif capacity not in (None, ring.capacity):
            raise UserError(
                f"a source that views another's ring has its capacity, {ring.capacity}",
                key="capacity",
                value=capacity,
                remedy="remove it",
            )
        self.ring, self.min_size, self.window = ring, min_size, window
        self.captures = ring.device is not None and ring.device == self.device
        self.running, self.padded = mode == "running", pad
        self._batch_size = batch_size
        self._check(mode, online)
        self.windows = Windows(ring, window or 1, running=self.running, padded=pad)
        self.online = OnlineQueue(ring, self.windows.length) if online else None
        self._ahead = Prefetch()
        self._windows_of: dict[int, Windows] = {}  # by length, for sequences that are asked for

    @property
    def buffer_device(self) -> torch.device:
        """Where the rows lie, as `storage` says; batches go to `device`."""
        return self.ring.device or _CPU

    @property
    def ready(self) -> bool:
        """Whether enough was added and a window is complete."""
        if self.ring.added < self.min_size:
            return False
        self._sync()
        return self.windows.count > 0

    @property
    def batch_size(self) -> int:
        """Transitions, or windows, in a batch."""
        return self._batch_size

    def __len__(self) -> int:
        """Return how many decisions are stored."""
        return len(self.ring)

    def add(self, trajectory: Trajectory) -> None:
        """Append decisions to the ring."""
        self.ring.add(as_trajectory(trajectory, self.num_envs))

    def close_open(self, env_mask: NDArray[np.bool_] | None = None) -> None:
        """End running episodes as truncated: what is added next does not continue them."""
        self.ring.close_open(env_mask)

    def draw(self, k: int = 1, batch_size: int | None = None) -> NDArray[np.int64]:
        """Choose rows on the host: [k, B], or [k, L, B] for windows."""
        self._sync()
        starts = self._draw_starts(k, batch_size or self._batch_size)
        return starts if self.window is None else self.windows.expand(starts)

    def prefetch(self, rows: Rows) -> None:
        """Begin to read what the environment said in these rows, if that is much and not on a device."""
        ring = self.ring
        if ring.device is None and rows.size * ring.history_bytes >= MIN_BYTES:
            read = partial(ring.stage, rows, self.device, running=self.running, padded=self.padded)
            self._ahead.begin(rows, ring.version, read)

    def gather(self, rows: Rows) -> Batch:
        """Read the rows of one batch; whole windows come with successors, running ones with their flags."""
        staged = self._ahead.result(rows, self.ring.version)
        return self.ring.gather(rows, self.device, running=self.running, padded=self.padded, staged=staged)

    def write(self, rows: Rows, columns: Mapping[str, Tree]) -> None:
        """Write columns back; priorities mean nothing to uniform draws, so that sources can be swapped."""
        self.ring.write(rows, {name: column for name, column in columns.items() if name != "priority"})

    def sample(self, batch_size: int | None = None) -> Batch:
        """Draw and gather one batch."""
        return self.gather(self.draw(1, batch_size)[0])

    def sample_sequences(self, batch_size: int, horizon: int) -> Sequences | None:
        """Draw sequences of any length inside one episode; None while no episode is that long."""
        if horizon >= self.ring.num_rows or not self.ring.columns:
            return None
        if horizon not in self._windows_of:
            self._windows_of[horizon] = Windows(self.ring, horizon)
        windows = self._windows_of[horizon]
        windows.sync()
        if not windows.count:
            return None
        batch = self.ring.gather(windows.expand(windows.draw(self.generator, batch_size)), self.device)
        last = tree_map(lambda leaf: leaf[-1:], batch.next_observations)
        seen = tree_zip(lambda a, b: torch.cat([a, b]).transpose(0, 1), batch.observations, last)
        columns = (column.transpose(0, 1) for column in (batch.actions, batch.rewards, batch.terminated))
        actions, rewards, terminated = columns
        return Sequences(seen, actions, rewards.unsqueeze(-1), terminated.unsqueeze(-1))

    def advance(self, *, agent_steps: int, updates: int) -> None:
        """Nothing is scheduled here."""

    @property
    def history(self) -> Ring | None:
        """The ring, unless it is another source's."""
        return self.ring if self.owns_ring else None

    def get_state(self) -> dict[str, Any]:
        """Return the ring without segments and pages, unless it is another source's, and the online queue."""
        state = {} if self.online is None else {"online": self.online.get_state()}
        if not self.owns_ring:
            return state
        segments = self.ring.segments()
        return {"ring": self.ring.get_state(since=segments[-1][1] if segments else 0, written=False), **state}

    def set_state(
        self,
        state: Mapping[str, Any],
        segments: Mapping[int, Any] | None = None,
        pages: Mapping[int, Any] | None = None,
    ) -> None:
        """Restore ring and queue in place."""
        if self.online is not None:
            self.online.set_state(state["online"])
        if self.owns_ring:
            self.ring.set_state(state["ring"], segments, pages)

    def _sync(self) -> None:
        self.windows.sync()

    def _draw_starts(self, k: int, batch_size: int) -> NDArray[np.int64]:
        count = k * batch_size
        if self.online is None:
            return self.windows.draw(self.generator, count).reshape(k, batch_size)
        new = self.online.take(count)
        if len(new) < count:
            new = np.concatenate([new, self.windows.draw(self.generator, count - len(new))])
        return new.reshape(k, batch_size)

    def _check(self, mode: str, online: bool) -> None:
        if mode not in MODES:
            raise UserError("unknown window mode", key="mode", value=mode, valid=MODES, remedy="choose one")
        if self._batch_size < 1:
            raise UserError(
                "a batch needs at least one entry", key="batch_size", value=self._batch_size, remedy="such as 64"
            )
        if not 0 <= self.min_size <= self.ring.capacity:
            raise UserError(
                f"the source could never be ready: its capacity is {self.ring.capacity}",
                key="min_size",
                value=self.min_size,
                remedy="raise capacity, or lower min_size",
            )
        if self.window is None and (self.running or self.padded):
            raise UserError(
                f"{'running windows' if self.running else 'padding'} needs a window",
                key="window",
                value=None,
                remedy="say how many steps a window has",
            )
        if online and not self.running:
            raise UserError(
                "only running windows are cut one after the other", key="online", value=True, remedy="use mode: running"
            )
        if self.running and self.padded:
            raise UserError("only whole windows are padded", key="pad", value=True, remedy="use mode: whole")
        if self.window is not None and not 1 <= self.window < self.ring.num_rows:
            raise UserError(
                f"a window must have from 1 to {self.ring.num_rows - 1} steps: each of the {self.num_envs} "
                f"environments has that many rows of the capacity of {self.ring.capacity}",
                key="window",
                value=self.window,
                remedy="shorten the window, or raise capacity",
            )


def new_ring(num_envs: int, capacity: int, storage: str, folder: str | None, device: torch.device) -> Ring:
    """Return an empty ring whose rows lie where `storage` says."""
    if folder is not None and storage != "disk":
        folder = None  # the lab names one to every replay
    if storage == "cpu":
        return Ring(num_envs, capacity)
    if storage == "disk":
        if folder is None:
            raise UserError(
                "a replay on disk needs a folder for its files", key="folder", value=None, remedy="name one"
            )
        return Ring(num_envs, capacity, storage=DiskStorage(folder))
    try:
        return Ring(num_envs, capacity, device if storage == "device" else torch.device(storage))
    except RuntimeError:
        raise UserError(
            "unknown storage",
            key="storage",
            value=storage,
            valid=("cpu", "disk", "device", "cuda", "cuda:0"),
            remedy="cpu keeps it in host memory, disk in files, device where the batches go",
        ) from None
