"""WorkerProcess: the pool's side of one worker: starting it, asking it, doubting its answers, ending it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from rl_lab.core.errors import UserError
from rl_lab.envs import wire

_START_SECONDS = 120.0  # to import the environment's packages and to make it
_LATE_SECONDS = 0.05  # for an answer that should be there, because another worker has used up the time
_MAX_TAIL = 4000
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}


class WorkerError(Exception):
    """What went wrong with a worker, in words; what it said about it; and at which request to one row, if at one."""

    def __init__(self, problem: str, detail: str = "") -> None:
        super().__init__(problem)
        self.detail = detail
        self.request: Request | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """Something to be done with some rows of a worker; rows are numbered over the whole pool."""

    do: str  # "step", "reset" or "render"
    rows: Sequence[int]
    actions: np.ndarray | None = None  # of these rows
    seeds: Sequence[int | None] = ()
    options: Mapping[str, Any] | None = None

    def starts_afresh(self, row: int) -> bool:
        """Whether what the row did before does not matter any more."""
        return self.do == "reset" and row in self.rows and self.seeds[self.rows.index(row)] is not None

    def of_each_row(self) -> Iterator[Request]:
        """Return the same request for one row at a time."""
        for place, row in enumerate(self.rows):
            actions = None if self.actions is None else self.actions[place : place + 1]
            yield Request(self.do, [row], actions, self.seeds[place : place + 1], self.options)


@dataclass(frozen=True, slots=True)
class Answer:
    """Columns that lead with the rows asked for, and infos: views that are valid until the worker's next answer."""

    columns: list[np.ndarray]
    infos: dict[str, Any]


class WorkerProcess:
    """One process that steps the rows of `rows`, and the connection to it."""

    def __init__(self, rows: range, setup: Mapping[str, Any], timeout: float) -> None:
        """Start the process and tell it what to make, without waiting for it."""
        self.rows, self._timeout = rows, timeout
        self.in_step = True  # whether the process has done what the pool knows of, and nothing else
        self._leaf_spaces: list[spaces.Space] = []
        self._answers: dict[tuple[Any, ...], Answer] = {}
        self._step_of_all = b""  # the words of the request that is made at every step
        self._connection, theirs = socket.socketpair()
        self._reader = wire.Reader(self._connection)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (what it prints; closed by `forget`)
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)
        search_path = os.pathsep.join(dict.fromkeys(os.path.abspath(entry) for entry in sys.path))
        # -P: Python would look for modules in the working directory first, which our own path may not hold.
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", "rl_lab.envs.worker"]
        # A Ctrl-C during its start waits until the worker has learnt to leave signals to us.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **_ONE_THREAD, "PYTHONPATH": search_path},
                )
        except OSError as error:
            self.forget()
            raise WorkerError(f"could not be started: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with contextlib.suppress(OSError):  # if it is gone already, `ready` says so
            wire.send(self._connection, wire.encode({"do": "make", "num_rows": len(rows), **setup}))

    def ready(self) -> dict[str, Any]:
        """Wait until the environments are made; return their description."""
        header = self._parse(self._read(max(_START_SECONDS, self._timeout))[0])
        self._leaf_spaces = wire.leaf_spaces(wire.space_of(header["observation_space"]))
        return header

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def ask(self, request: Request) -> Answer:
        """Send a request about one row and wait for its answer."""
        try:
            self.send(request)
            return self.receive(request)
        except WorkerError as error:
            error.request = request
            raise

    def send(self, request: Request) -> None:
        """Send a request."""
        arrays = [] if request.actions is None else [request.actions]
        header = self._step_of_all if request.do == "step" and request.rows is self.rows else b""
        if not header:
            rows = [row - self.rows.start for row in request.rows]
            told: dict[str, Any] = {"do": request.do, "rows": rows, "arrays": wire.layout_of(arrays)}
            if request.do == "reset":
                told |= {"seeds": request.seeds, "options": request.options}
            header = wire.encode(told)
            if request.do == "step" and request.rows is self.rows:
                self._step_of_all = header
        self._connection.settimeout(self._timeout)
        try:
            wire.send(self._connection, header, arrays)
        except TimeoutError:
            raise self._hang() from None
        except OSError:
            raise self._crash() from None

    def receive(self, request: Request, *, late: bool = False) -> Answer:
        """Wait for the answer to a request and check every part of it."""
        header, start, end = self._read(_LATE_SECONDS if late else self._timeout)
        key = (header, request.do, len(request.rows))
        answer = self._answers.get(key)
        if answer is None:  # the same words mean the same places in the same buffer
            if len(self._answers) >= 8:
                self._answers.clear()
            answer = self._answers[key] = self._interpret(request, header, start, end)
        for column in answer.columns:
            if column.dtype.kind == "f" and not np.isfinite(column).all():
                self._raise_not_finite(request, answer)
        return answer

    def hang_up(self) -> None:
        """Ask the process to close its environments and to end."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def wait(self, seconds: float) -> None:
        """Wait for the process to end, and reap it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(seconds, 0.0))

    def kill(self) -> None:
        """End the process whatever it does, reap it and close what belongs to it."""
        self._process.kill()
        self.wait(10.0)
        self.forget()

    def forget(self) -> None:
        """Close our ends without touching the process."""
        self._connection.close()
        self._output.close()

    def _read(self, timeout: float) -> tuple[bytes, int, int]:
        self._connection.settimeout(timeout)
        buffer = self._reader.buffer
        try:
            return self._reader.read()
        except TimeoutError:
            raise self._hang() from None
        except wire.WireError as error:
            raise WorkerError(f"answered with nonsense: {error}", self._tail()) from None
        except (EOFError, OSError):
            raise self._crash() from None
        finally:
            if self._reader.buffer is not buffer:
                self._answers.clear()

    def _parse(self, header: bytes) -> dict[str, Any]:
        told = json.loads(header)
        if "mistake" in told:
            raise UserError(**told["mistake"])
        if "fault" in told:
            raise WorkerError(f"{told['fault']} (environment {self.rows[told['row']]})", told["detail"])
        return told

    def _interpret(self, request: Request, header: bytes, start: int, end: int) -> Answer:
        num_rows = len(request.rows)
        try:
            told = self._parse(header)
            layout, entries = told["arrays"], told["infos"]
            numbers = [(code, values) for _, code, values in entries if code is not None]
            views = self._reader.arrays([*layout, *numbers], start, end)
            if not self._fits(request, layout):
                raise WorkerError(f"answered with arrays {layout} for {num_rows} rows")
            infos = wire.infos_of(entries, iter(views[len(layout) :]))
        except (wire.WireError, ValueError, KeyError, TypeError) as error:
            raise WorkerError(f"answered with nonsense: {error}") from None
        return Answer(views[: len(layout)], infos)

    def _fits(self, request: Request, layout: list[Any]) -> bool:
        num_rows = len(request.rows)
        if request.do == "render":
            [(code, shape)] = layout
            return code == "|u1" and len(shape) == 4 and shape[0] == num_rows and shape[3] == 3
        wanted = [[space.dtype.str, [num_rows, *space.shape]] for space in self._leaf_spaces]
        if request.do == "step":
            wanted += [[np.dtype(kind).str, [num_rows]] for kind in (np.float32, np.bool_, np.bool_)]
        return layout == wanted

    def _raise_not_finite(self, request: Request, answer: Answer) -> None:
        for number, column in enumerate(answer.columns):
            good = np.isfinite(column).reshape(len(column), -1).all(1)
            if not good.all():
                what = "an observation" if number < len(self._leaf_spaces) else "a reward"
                row = request.rows[int(good.argmin())]
                raise WorkerError(f"returned {what} that is not finite (environment {row})")

    def _hang(self) -> WorkerError:
        return WorkerError(f"hung for more than {self._timeout:g} s", self._tail())

    def _crash(self) -> WorkerError:
        self.wait(1.0)  # the connection ends a little before the process
        code = self._process.returncode
        if code is None:
            words = "closed the connection"
        elif code >= 0:
            words = f"exited with code {code}"
        else:
            names = {number.value: number.name for number in signal.Signals}
            words = f"was killed by {names.get(-code, f'signal {-code}')}"
        return WorkerError(words, self._tail())

    def _tail(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), _MAX_TAIL, max(0, size - _MAX_TAIL)).decode(errors="replace")
