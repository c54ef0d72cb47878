"""The process that steps some rows of a WorkerPool: `python -m rl_lab.envs.worker SOCKET PARENT`.

Started by the pool only. It does what it is asked and answers, one answer to each request, until the connection ends.
It does not import torch, so that it starts fast and stays small.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from rl_lab.core.errors import UserError
from rl_lab.envs import wire
from rl_lab.envs.make import make_env

_PR_SET_PDEATHSIG = 1
_MAX_OUTPUT = 1 << 20
_MAX_DETAIL = 4000

Answer = tuple[list[np.ndarray], dict[str, Any]]  # columns that lead with the rows asked for, and infos


class _LieError(Exception):
    """An environment returned something other than its spaces say."""


class _Rows:
    """The environments of one worker, one object for each row, so that a row can be restored without the others."""

    def __init__(self, id: str, num_rows: int, settings: Mapping[str, Any]) -> None:
        self.current = 0  # the row that is at work, for the report of a fault
        self._envs: list[VectorEnv] = [make_env(id, 1, **settings) for _ in range(num_rows)]
        self._space = self._envs[0].single_observation_space
        self._leaf_spaces = wire.leaf_spaces(self._space)
        self._columns: dict[int, list[np.ndarray]] = {}

    def describe(self) -> dict[str, Any]:
        """Return what the pool must know of the environments."""
        env = self._envs[0]
        return {
            "observation_space": wire.told_space(self._space),
            "action_space": wire.told_space(env.single_action_space),
            "render_mode": env.render_mode,
            "metadata": {key: env.metadata[key] for key in ("render_modes", "render_fps") if key in env.metadata},
        }

    def reset(self, rows: Sequence[int], seeds: Sequence[int | None], options: Any) -> Answer:
        """Start new episodes in some rows; return their observations and infos."""
        columns = self._columns_of(len(rows))[:-3]
        merged: dict[str, Any] = {}
        for place, row in enumerate(rows):
            self.current = row
            observations, infos = self._envs[row].reset(seed=[seeds[place]], options=options)
            self._store(columns, place, observations)
            wire.merge_infos(merged, [place], infos, len(rows))
        return columns, merged

    def step(self, rows: Sequence[int], actions: np.ndarray) -> Answer:
        """Step some rows; return observations, rewards, terminated and truncated, and infos."""
        columns = self._columns_of(len(rows))
        merged: dict[str, Any] = {}
        for place, row in enumerate(rows):
            self.current = row
            observations, *flags, infos = self._envs[row].step(actions[place : place + 1])
            self._store(columns, place, observations)
            for column, name, value in zip(columns[-3:], ("rewards", "terminated", "truncated"), flags, strict=True):
                if value.shape != (1,) or value.dtype != column.dtype:
                    raise _LieError(f"{name} are {value.dtype} {list(value.shape)}, not {column.dtype} [1]")
                column[place] = value[0]
            wire.merge_infos(merged, [place], infos, len(rows))
        return columns, merged

    def render(self, rows: Sequence[int]) -> Answer:
        """Draw some rows."""
        frames = []
        for row in rows:
            self.current = row
            frames.append(self._envs[row].render_frames())
        return [np.concatenate(frames)], {}

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            env.close()

    def _store(self, columns: list[np.ndarray], place: int, observations: Any) -> None:
        for column, space, leaf in zip(
            columns, self._leaf_spaces, wire.leaves(self._space, observations), strict=False
        ):
            if leaf.dtype != space.dtype or leaf.shape != (1, *space.shape):
                told, seen = f"{space.dtype} {[1, *space.shape]}", f"{leaf.dtype} {list(leaf.shape)}"
                raise _LieError(f"an observation is {seen}, the space says {told}")
            column[place] = leaf[0]

    def _columns_of(self, num_rows: int) -> list[np.ndarray]:
        """Return the arrays of an answer about so many rows, to be written over: made once."""
        if num_rows not in self._columns:
            shapes = [((num_rows, *space.shape), space.dtype) for space in self._leaf_spaces]
            flags = [((num_rows,), dtype) for dtype in (np.float32, np.bool_, np.bool_)]
            self._columns[num_rows] = [np.zeros(shape, dtype) for shape, dtype in [*shapes, *flags]]
        return self._columns[num_rows]


def serve(connection: socket.socket) -> None:
    """Answer requests until the other side ends the connection."""
    reader = wire.Reader(connection)
    rows: _Rows | None = None
    while True:
        try:
            told, start, end = reader.read()
        except (EOFError, ConnectionError):
            break
        request = json.loads(told)
        try:
            if request["do"] == "make":
                rows = _Rows(request["id"], request["num_rows"], request["settings"])
                header, arrays = wire.encode(rows.describe()), []
            else:
                assert rows is not None
                if request["do"] == "step":
                    columns, infos = rows.step(request["rows"], *reader.arrays(request["arrays"], start, end))
                elif request["do"] == "reset":
                    columns, infos = rows.reset(request["rows"], request["seeds"], request["options"])
                else:
                    columns, infos = rows.render(request["rows"])
                entries, more = wire.told_infos(infos)
                header, arrays = wire.encode({"arrays": wire.layout_of(columns), "infos": entries}), [*columns, *more]
        except Exception as error:
            header, arrays = wire.encode(_told(error, request["do"], 0 if rows is None else rows.current)), []
        wire.send(connection, header, arrays)
        _bound_output()
    if rows is not None:
        rows.close()


def _told(error: Exception, request: str, row: int) -> dict[str, Any]:
    """Describe an exception: a mistake of the user's where it is one, a fault of the environment else."""
    if isinstance(error, UserError) and request in ("make", "render"):
        told = {"problem": error.problem, "key": error.key, "valid": error.valid, "remedy": error.remedy}
        if error.value is not None:
            told["value"] = error.value if isinstance(error.value, (str, int, float, list, dict)) else repr(error.value)
        return {"mistake": told}
    if isinstance(error, _LieError):
        return {"fault": str(error), "row": row, "detail": ""}
    problem = f"raised {type(error).__name__}: {error}"
    return {"fault": problem[:_MAX_DETAIL], "row": row, "detail": traceback.format_exc()[-_MAX_DETAIL:]}


def _bound_output() -> None:
    """Forget what was printed when it grows: output goes to a file that the pool reads after a crash."""
    if os.fstat(2).st_size > _MAX_OUTPUT:
        os.ftruncate(2, 0)


def _die_with(parent: int) -> None:
    """End this process when the pool's process ends, however that happens and whatever this one is doing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _leave_to_parent(number: int, frame: Any) -> None:
    """Do nothing: signals reach the whole process group, and the pool's process decides."""


def main() -> None:
    """Serve on the socket whose number is the first argument."""
    _die_with(int(sys.argv[2]))
    # Handlers rather than SIG_IGN, which programs started by an environment would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave_to_parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.set_inheritable(False)  # a program started by an environment must not keep it open
        serve(connection)


if __name__ == "__main__":
    main()
