"""OfflineSource: a data set that is read once and only drawn from: .npz files, or the replay of a run."""

from __future__ import annotations

import glob
import hashlib
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_lab.core.batch import Batch, Tree, tree_leaves, tree_map, tree_zip
from rl_lab.core.errors import UserError
from rl_lab.data.replay import HISTORY, Ring
from rl_lab.data.sources import ReplaySource, Trajectory, new_ring
from rl_lab.data.storage import Rows

MakeRing = Callable[[int, int], Ring]  # of so many rows for each of so many environments
REQUIRED = ("observations", "actions", "rewards")
ENDS = (("terminated", "terminals", "dones"), ("truncated", "timeouts"))
ROUNDING = 1e-5  # by which rescaled actions may leave [-1, 1]
WRITING = "write it with numpy.savez(path, observations=..., actions=..., rewards=..., terminated=...)"


class SavedReplay(NamedTuple):
    """The ring of a run as its checkpoint holds it."""

    state: Mapping[str, Any]
    segments: Mapping[int, Any]
    pages: Mapping[int, Any]
    digest: str


class OfflineSource(ReplaySource):
    """A replay that is full from the beginning and takes nothing in.

    `files` are .npz files (or patterns such as `data/*.npz`) of consecutive steps: arrays [T, ...], or [T, N, ...]
    of N environments. They are named observations (`observations/camera` where these are a dict), actions, rewards,
    terminated (or terminals, or dones), and, if there are such, truncated (or timeouts) and next_observations. A file
    ends an episode, and so does a step that the next observation does not continue. `columns` are further arrays to
    keep. The lab reads `run: FOLDER` in place of `files`: the replay of a run's newest checkpoint.
    """

    def __init__(
        self,
        num_envs: int,
        generator: np.random.Generator,
        device: str,
        *,
        files: str | Sequence[str] = (),
        columns: Sequence[str] = (),
        batch_size: int,
        window: int | None = None,
        mode: str = "whole",
        pad: bool = False,
        storage: str = "cpu",
        folder: str | None = None,
        saved: SavedReplay | None = None,
    ) -> None:
        def make(rows_of_env: int, envs: int) -> Ring:
            return new_ring(envs, rows_of_env * envs, storage, folder, torch.device(device))

        if saved is not None:
            ring, self.digest = _from_run(saved, columns, make), saved.digest
        else:
            ring, self.digest = _from_files(_paths(files), columns, make)
        super().__init__(
            ring.num_envs, generator, device, batch_size=batch_size, window=window, mode=mode, pad=pad, ring=ring
        )
        self._given: dict[str, Tree] = {}  # columns that updates changed, as they were read
        if not self.ready:
            raise UserError(
                "no episode of the data set is long enough for one window",
                key="window",
                value=window,
                remedy="shorten the window",
            )

    def add(self, trajectory: Trajectory) -> None:
        """Refuse: a data set stays as it is."""
        raise ValueError("a data set takes nothing in: collect into another buffer")

    def write(self, rows: Rows, columns: Mapping[str, Tree]) -> None:
        """Write columns back; of those of the data set the given ones are kept."""
        self._keep_given(columns)
        super().write(rows, columns)

    def _keep_given(self, names: Iterable[str]) -> None:
        ring = self.ring
        for name in names:
            if name in ring.extras and name not in self._given:
                whole = lambda leaf: ring.storage.export(leaf, 0, ring.num_filled * ring.num_envs)  # noqa: E731
                self._given[name] = tree_map(whole, ring.extras[name])

    def close_open(self, env_mask: NDArray[np.bool_] | None = None) -> None:
        """Nothing is open here."""

    def get_state(self) -> dict[str, Any]:
        """Return which data set it is, and what updates wrote beside it."""
        return {"digest": self.digest, "written": self.ring.get_written()}

    def set_state(
        self,
        state: Mapping[str, Any],
        segments: Mapping[int, Any] | None = None,
        pages: Mapping[int, Any] | None = None,
    ) -> None:
        """Restore what updates wrote, if the data set is the same."""
        if state["digest"] != self.digest:
            raise UserError(
                "the data set is another one than when this run was saved",
                key="files",
                value=self.digest[:12],
                remedy=f"bring the files back whose digest begins with {str(state['digest'])[:12]}",
            )
        self._keep_given(state["written"]["rewritten"])
        self.ring.set_written({0: {"rewritten": self._given, "written": {}}})  # it may have been saved before an update
        self.ring.set_written({0: state["written"]})


def _from_run(saved: SavedReplay, columns: Sequence[str], make: MakeRing) -> Ring:
    def wanted(part: Mapping[str, Any]) -> dict[str, Any]:
        return {name: column for name, column in part.items() if name in HISTORY or name in columns}

    def wanted_page(page: Mapping[str, Any]) -> dict[str, Any]:
        return {group: wanted(part) for group, part in page.items()}

    state, pages = saved.state, saved.pages
    num_rows, num_envs = state["shape"]
    if state["tail"] is None:
        raise UserError("this run has not stored anything", key="run", value=None, remedy="take another one")
    first = pages[min(pages)] if pages else {}
    known = {*state["tail"], *(name for part in first.values() for name in part)} - set(HISTORY)
    for name in columns:
        if name not in known:
            raise UserError("the replay of this run has no such column", key="columns", value=name, valid=known)
    ring = make(int(num_rows) - 1, int(num_envs))
    ring.set_state(
        {**state, "tail": wanted(state["tail"])}, _Changed(saved.segments, wanted), _Changed(pages, wanted_page)
    )
    return ring


class _Changed(Mapping[int, Any]):
    """Parts of a saved replay, each read and changed when it is wanted."""

    def __init__(self, parts: Mapping[int, Any], change: Callable[[Mapping[str, Any]], Any]) -> None:
        self._parts, self._change = parts, change

    def __getitem__(self, start: int) -> Any:
        return self._change(self._parts[start])

    def __iter__(self) -> Iterator[int]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _paths(files: str | Sequence[str]) -> list[Path]:
    patterns = [files] if isinstance(files, str) else list(files)
    if not patterns:
        raise UserError("a data set needs files", key="files", value=patterns, remedy="name .npz files, or a run")
    paths: list[Path] = []
    for pattern in patterns:
        found = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
        if not found or not Path(found[0]).is_file():
            raise UserError("there is no such file", key="files", value=pattern, remedy="correct the path")
        paths += map(Path, found)
    return paths


def _from_files(paths: Sequence[Path], columns: Sequence[str], make: MakeRing) -> tuple[Ring, str]:
    digest, num_rows, num_envs = hashlib.sha256(), 0, 0
    for path in paths:  # all of them before anything is stored: what is wrong, and how much there is
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
        ended = _read(path, columns).dones
        if num_envs and ended.shape[1] != num_envs:
            _refuse(path, f"it has {ended.shape[1]} environments, the files before it have {num_envs}")
        num_envs = ended.shape[1]
        num_rows += len(ended) + int(ended.sum(0).max()) + 1
    ring = make(num_rows, num_envs)
    for path in paths:
        try:
            ring.add(_read(path, columns))
        except ValueError as error:
            _refuse(path, f"it does not fit the files before it: {error}")
        ring.close_open()
    return ring, digest.hexdigest()


def _read(path: Path, columns: Sequence[str]) -> Batch:
    """Return the steps of a file [T, N]; whatever is wrong with it is told."""
    arrays = _load(path)
    end, cut = (next((name for name in names if name in arrays), None) for names in ENDS)
    for name in (*REQUIRED, *columns):
        if not _has(arrays, name):
            _refuse(path, f"it lacks '{name}'", name, arrays)
    if end is None:
        _refuse(path, "it does not say where episodes end: it lacks 'terminated'", "terminated", arrays)
    lead = arrays["rewards"].shape
    if len(lead) not in (1, 2) or not all(lead):
        _refuse(path, f"rewards must be [T] or [T, N], not {list(lead)}")

    def column(name: str) -> Tree:
        below = {key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")}
        return tree_map(lambda leaf: tensor(name, leaf), below or arrays[name])

    def tensor(name: str, array: NDArray[Any]) -> Tensor:
        if array.shape[: len(lead)] != lead:
            _refuse(path, f"{name} is {list(array.shape)}, but rewards are {list(lead)}")
        numbers = torch.from_numpy(_numbers(path, name, array))
        return numbers if len(lead) == 2 else numbers.unsqueeze(1)

    def seen(name: str) -> Tree:
        pictures = (torch.uint8, 5)  # [T, N, C, H, W]
        return tree_map(lambda leaf: leaf if (leaf.dtype, leaf.dim()) == pictures else leaf.float(), column(name))

    observations, actions = seen("observations"), column("actions")
    if actions.is_floating_point() and actions.abs().max() > 1.0 + ROUNDING:
        _refuse(
            path,
            f"its actions lie in [{float(actions.min()):.4g}, {float(actions.max()):.4g}]",
            remedy="rescale real actions to [-1, 1]: 2 * (actions - low) / (high - low) - 1; write indices as integers",
        )
    terminated = column(end).bool()
    truncated = torch.zeros_like(terminated) if cut is None else column(cut).bool()
    successors = None
    if _has(arrays, "next_observations"):
        successors = seen("next_observations")
        truncated |= _is_broken(observations, successors) & ~terminated
    return Batch(
        observations=observations,
        actions=actions if actions.is_floating_point() else actions.long(),
        rewards=column("rewards").float(),
        terminated=terminated & ~truncated if end == "dones" else terminated,
        truncated=truncated,
        next_observations=successors,
        extras={name: column(name) for name in columns},
    )


def _has(arrays: Mapping[str, Any], name: str) -> bool:
    return name in arrays or any(key.startswith(f"{name}/") for key in arrays)


def _is_broken(observations: Tree, successors: Tree) -> Tensor:
    """Where the observation that follows is not the successor: the steps were cut there, or shuffled."""

    def differs(seen: Tensor, then: Tensor) -> Tensor:
        return (seen[1:] != then[:-1]).reshape(len(seen) - 1, seen.shape[1], -1).any(2)

    parts = list(tree_leaves(tree_zip(differs, observations, successors)))
    broken = torch.stack(parts).any(0)
    return torch.cat([broken, broken.new_zeros(1, broken.shape[1])])  # what follows the last step is not known


def _load(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file. Their headers are read here, so that objects are refused and not unpickled."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {entry.filename.removesuffix(".npy"): _array(archive, entry) for entry in archive.infolist()}
    except zipfile.BadZipFile as error:
        _refuse(path, f"it is no .npz file, or damaged: {error}")
    except (OSError, ValueError, EOFError, zlib.error, NotImplementedError, RuntimeError, MemoryError) as error:
        _refuse(path, str(error).partition("\n")[0] or type(error).__name__)


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> NDArray[Any]:
    layout = np.lib.format
    headers = {(1, 0): layout.read_array_header_1_0, (2, 0): layout.read_array_header_2_0}
    with archive.open(entry) as file:
        version = layout.read_magic(file)
        if version not in headers:
            raise ValueError(f"{entry.filename} is written in a way that is not known")
        shape, by_column, kind = headers[version](file)
        if kind.hasobject:
            raise ValueError(f"{entry.filename} holds Python objects, and unpickling them could run code")
        if math.prod(shape) * kind.itemsize != entry.file_size - file.tell():
            raise ValueError(f"{entry.filename} has another size than it says")
        array = np.empty(shape[::-1] if by_column else shape, kind)
        data = file.read()  # to the end, where its checksum is compared
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
        return array.transpose() if by_column else array


def _numbers(path: Path, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as the lab holds it: floats in single precision, all of them finite."""
    if array.dtype.kind not in "biuf":
        _refuse(path, f"{name} is of type {array.dtype}, but numbers are expected")
    if array.dtype.kind != "f":
        return np.ascontiguousarray(array)
    if not np.isfinite(array).all():
        _refuse(path, f"{name} has numbers that are not finite")
    return np.ascontiguousarray(array, np.float32)


def _refuse(path: Path, problem: str, value: Any = None, valid: Iterable[str] = (), remedy: str = WRITING) -> NoReturn:
    raise UserError(
        f"{path} cannot be used: {problem}",
        key="files",
        value=str(path) if value is None else value,
        valid=valid,
        remedy=remedy,
    )
