"""WorkerPool: expensive environments in supervised processes of their own; no fault of one costs a transition.

A worker that crashes, hangs, raises or lies is replaced: its rows are restored from the seed of their last reset and
the actions since, what they show then is compared with what was handed out last, and the step is repeated once.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rl_lab.core.errors import UserError
from rl_lab.envs import wire
from rl_lab.envs.worker_process import Answer, Request, WorkerError, WorkerProcess
from rl_lab.envs.world import Seeds, reset_rows, row_seeds

_END_SECONDS = 2.0  # to close environments, before the process is killed


class EnvironmentFault(RuntimeError):  # noqa: N818
    """An environment failed twice at the same step, or did not come back as it was: the run has to stop."""

    def __init__(
        self, problem: str, *, environment: int, seed: int | None, action: Any, steps: int, detail: str = ""
    ) -> None:
        self.problem, self.environment, self.seed, self.action = problem, environment, seed, action
        self.steps, self.detail = steps, detail
        lines = [
            problem,
            f"  environment:  {environment}",
            f"  seed:         {seed}",
            f"  last action:  {action}",
            f"  steps before: {steps} since the reset",
        ]
        if detail.strip():
            lines += ["  it said:", *(f"    {line}" for line in detail.rstrip().splitlines()[-12:])]
        super().__init__("\n".join(lines))


class WorkerPool(VectorEnv):
    """A vector environment of the seam whose rows live in worker processes: equal, bit for bit, to the serial one.

    Every worker makes its share of the rows with `make_env(id, **settings)`; settings are JSON values. An answer that
    takes longer than `timeout` seconds is a fault. `restarts` counts replaced workers, `incidents` says why.
    The processes end with the pool and with this process, however it ends (on Linux: with the thread that made them).
    """

    def __init__(
        self,
        id: str,
        num_envs: int,
        *,
        workers: int,
        timeout: float = 60.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.num_envs = num_envs
        self.restarts = 0
        self.incidents: list[str] = []
        self._owner = os.getpid()
        self._workers: list[WorkerProcess] = []
        self._timeout = timeout
        self._setup = {"id": id, "settings": _plain(settings or {})}
        try:
            for rows in np.array_split(range(num_envs), min(workers, num_envs)):
                self._workers.append(WorkerProcess(range(rows[0], rows[-1] + 1), self._setup, timeout))
            told = [worker.ready() for worker in self._workers]
        except WorkerError as error:
            self.close()
            problem = f"a worker process did not start: it {error}"
            raise EnvironmentFault(
                problem, environment=0, seed=None, action=None, steps=0, detail=error.detail
            ) from None
        except BaseException:
            self.close()
            raise
        self.single_observation_space = wire.space_of(told[0]["observation_space"])
        self.single_action_space = wire.space_of(told[0]["action_space"])
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.render_mode = told[0]["render_mode"]
        self.metadata = {**told[0]["metadata"], "autoreset_mode": AutoresetMode.DISABLED}
        self._history = _History(num_envs, self.single_action_space)
        # What was handed out last, and the rewards since the last seed: what a restored row must show again.
        leaf_spaces = wire.leaf_spaces(self.single_observation_space)
        self._shown = [np.zeros((num_envs, *space.shape), space.dtype) for space in leaf_spaces]
        self._returns = np.zeros(num_envs)

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start new episodes in the rows of `options["reset_mask"]` (all without it); return all observations.

        A row that is reset without a seed goes on with its generator; until it gets one, everything since the last
        seed has to be kept.
        """
        mask = reset_rows(options, self.num_envs)
        seeds = row_seeds(seed, self.num_envs)
        others = None if options is None else _plain({key: options[key] for key in options if key != "reset_mask"})
        requests = {}
        for index, worker in enumerate(self._workers):
            rows = [row for row in worker.rows if mask[row]]
            for row in rows:
                if seeds[row] is None and not self._history.knows(row):
                    seeds[row] = secrets.randbits(32)  # chance, but known to us
            if rows:
                requests[index] = Request("reset", rows, seeds=[seeds[row] for row in rows], options=others)
        answers = self._ask(requests)
        infos = self._merged_infos(requests, answers)
        for index, request in requests.items():
            for shown, column in zip(self._shown, answers[index].columns, strict=True):
                shown[request.rows] = column
            for row in request.rows:
                self._history.reset(row, seeds[row], others)
                if seeds[row] is not None:
                    self._returns[row] = 0.0
            self._workers[index].in_step = True
        return wire.tree_of(self.single_observation_space, (shown.copy() for shown in self._shown)), infos

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step every row; the workers work at the same time."""
        actions = self._checked(actions)
        requests = {
            index: Request("step", worker.rows, actions[worker.rows.start : worker.rows.stop])
            for index, worker in enumerate(self._workers)
        }
        answers = self._ask(requests)
        infos = self._merged_infos(requests, answers)
        columns = [np.concatenate(parts) for parts in zip(*(answers[i].columns for i in requests), strict=True)]
        rewards, terminated, truncated = columns[-3:]
        # From here on the step has happened.
        self._history.step(actions)
        for shown, column in zip(self._shown, columns, strict=False):
            np.copyto(shown, column)
        self._returns += rewards
        for worker in self._workers:
            worker.in_step = True
        return wire.tree_of(self.single_observation_space, iter(columns)), rewards, terminated, truncated, infos

    def render_frames(self) -> np.ndarray:
        """Draw every row: uint8 [num_envs, H, W, 3]."""
        answers = self._ask({index: Request("render", worker.rows) for index, worker in enumerate(self._workers)})
        for worker in self._workers:
            worker.in_step = True
        return np.concatenate([answers[index].columns[0] for index in range(len(self._workers))])

    def render(self) -> tuple[np.ndarray, ...]:
        """Draw every row, as Gymnasium's vector environments return it."""
        return tuple(self.render_frames())

    @property
    def pids(self) -> list[int]:
        """The numbers of the workers' processes."""
        return [worker.pid for worker in self._workers]

    def close_extras(self) -> None:
        """End the processes; those that do not end by themselves are killed."""
        if os.getpid() != self._owner:  # a fork's copy: the processes are not ours to end
            for worker in self._workers:
                worker.forget()
            return
        for worker in self._workers:
            worker.hang_up()
        deadline = time.monotonic() + _END_SECONDS
        for worker in self._workers:
            worker.wait(deadline - time.monotonic())
            worker.kill()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def _checked(self, actions: Any) -> np.ndarray:
        space = self.single_action_space
        given = np.asarray(actions)
        if given.shape != (self.num_envs, *space.shape) or not np.can_cast(given.dtype, space.dtype, "same_kind"):
            wanted = f"{space.dtype} {[self.num_envs, *space.shape]}"
            raise ValueError(f"actions are {given.dtype} {list(given.shape)}, not {wanted}")
        if not self._history.complete:
            raise gymnasium.error.ResetNeeded("every environment has to be reset before the first step")
        return np.ascontiguousarray(given, dtype=space.dtype)

    def _merged_infos(self, requests: Mapping[int, Request], answers: Mapping[int, Answer]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for index, request in requests.items():
            wire.merge_infos(merged, request.rows, answers[index].infos, self.num_envs)
        return merged

    def _ask(self, requests: Mapping[int, Request]) -> dict[int, Answer]:
        """Send all requests, collect all answers, then recover what failed; the others' answers stand.

        A worker that was asked is out of step until the caller has taken note of the answers.
        """
        if self.closed:
            raise gymnasium.error.ClosedEnvironmentError("the pool is closed")
        answers: dict[int, Answer] = {}
        failures: dict[int, WorkerError] = {}
        mistakes: list[UserError] = []
        began = time.monotonic()
        for index, request in requests.items():
            worker = self._workers[index]
            try:
                if not worker.in_step:
                    raise WorkerError("was interrupted")
                worker.in_step = False
                worker.send(request)
            except WorkerError as failure:
                failures[index] = failure
        for index, request in requests.items():
            if index not in failures:
                try:
                    late = time.monotonic() - began > self._timeout
                    answers[index] = self._workers[index].receive(request, late=late)
                except WorkerError as failure:
                    failures[index] = failure
                except UserError as mistake:  # it cannot draw: nothing has happened
                    mistakes.append(mistake)
        for index, failure in failures.items():
            answers[index] = self._recover(index, requests[index], failure)
        if mistakes:
            for index in requests:
                self._workers[index].in_step = True
            raise mistakes[0]
        return answers

    def _recover(self, index: int, request: Request, failure: WorkerError) -> Answer:
        """Replace a worker and repeat the request, one row at a time, so that a second failure has a name."""
        began = time.monotonic()
        try:
            num_steps = self._replace(index, request)
        except WorkerError:
            try:
                num_steps = self._replace(index, request)
            except WorkerError as again:
                problem = f"an environment could not be restored: its worker {failure}, and in the replay it {again}"
                raise self._fault(problem, again.request or next(request.of_each_row()), again.detail) from None
        parts, infos = [], {}
        for place, single in enumerate(request.of_each_row()):
            try:
                answer = self._workers[index].ask(single)
            except WorkerError as again:
                problem = f"an environment failed twice at the same {request.do}: its worker {failure}, then {again}"
                raise self._fault(problem, single, again.detail or failure.detail) from None
            parts.append([column.copy() for column in answer.columns])
            wire.merge_infos(infos, [place], answer.infos, len(request.rows))
        rows = self._workers[index].rows
        self.incidents.append(
            f"worker {index} (environments {rows[0]} to {rows[-1]}) {failure}: replaced, {num_steps} steps replayed, "
            f"the {request.do} repeated, in {time.monotonic() - began:.1f} s"
        )
        return Answer([np.concatenate(columns) for columns in zip(*parts, strict=True)], infos)

    def _replace(self, index: int, request: Request) -> int:
        """Start a worker anew and restore the rows whose past still matters; return how many steps that took."""
        rows = self._workers[index].rows
        self._workers[index].kill()
        self.restarts += 1
        self._workers[index] = worker = WorkerProcess(rows, self._setup, self._timeout)
        worker.in_step = False
        worker.ready()
        needed = [row for row in rows if self._history.knows(row) and not request.starts_afresh(row)]
        return sum(self._restore(worker, row) for row in needed)

    def _restore(self, worker: WorkerProcess, row: int) -> int:
        """Replay a row since its last seed and compare it with what was handed out; return the number of steps."""
        total, num_steps = 0.0, 0
        for seed, options, actions in self._history.episodes(row):
            request = Request("reset", [row], seeds=[seed], options=options)
            answer = worker.ask(request)
            for step in range(len(actions)):
                request = Request("step", [row], actions[step : step + 1])
                answer = worker.ask(request)
                total += float(answer.columns[-3][0])
            num_steps += len(actions)
        same = all(
            column[0].tobytes() == shown[row].tobytes()
            for column, shown in zip(answer.columns, self._shown, strict=False)
        )
        if not same or total != self._returns[row]:
            what = "gives other rewards" if same else "shows another observation"
            problem = (
                f"an environment that was replayed after its worker failed {what} than before; "
                "it does not depend on its seed and actions alone"
            )
            raise self._fault(problem, request)
        return num_steps

    def _fault(self, problem: str, request: Request, detail: str = "") -> EnvironmentFault:
        """Return the error about a request for one row."""
        row = request.rows[0]
        seed = self._history.seed(row) if request.do != "reset" or request.seeds[0] is None else request.seeds[0]
        action = None if request.actions is None else request.actions[0].tolist()
        steps = self._history.num_steps(row)
        return EnvironmentFault(problem, environment=row, seed=seed, action=action, steps=steps, detail=detail)


class _History:
    """What brings every row back: the seed of its last reset and the actions since, of running episodes only."""

    def __init__(self, num_envs: int, space: spaces.Space) -> None:
        self._actions = np.empty((256, num_envs, *space.shape), space.dtype)
        self._length = 0
        # Of each row (position, seed, options): its last seeded reset, and those without a seed after it.
        self._resets: list[list[tuple[int, int | None, Any]]] = [[] for _ in range(num_envs)]
        self.complete = False  # whether every row was reset

    def reset(self, row: int, seed: int | None, options: Any) -> None:
        """Note the reset of a row."""
        entry = (self._length, seed, options)
        self._resets[row] = [entry] if seed is not None else [*self._resets[row], entry]
        self.complete = self.complete or all(self._resets)

    def step(self, actions: np.ndarray) -> None:
        """Note the actions of all rows."""
        if self._length == len(self._actions):
            self._make_room()
        self._actions[self._length] = actions
        self._length += 1

    def knows(self, row: int) -> bool:
        """Whether the row was ever reset."""
        return bool(self._resets[row])

    def seed(self, row: int) -> int | None:
        """Return the seed that the row was given last."""
        return self._resets[row][0][1] if self._resets[row] else None

    def num_steps(self, row: int) -> int:
        """Return how many steps the row took since its last reset."""
        return self._length - self._resets[row][-1][0] if self._resets[row] else 0

    def episodes(self, row: int) -> Iterator[tuple[int | None, Any, np.ndarray]]:
        """Return (seed, options, actions) of every reset since the last seed."""
        resets = self._resets[row]
        ends = [position for position, _, _ in resets[1:]] + [self._length]
        for (position, seed, options), end in zip(resets, ends, strict=True):
            yield seed, options, self._actions[position:end, row]

    def _make_room(self) -> None:
        """Drop what no row needs any more, or double the space."""
        oldest = min(resets[0][0] for resets in self._resets)
        kept = self._actions[oldest : self._length]
        if 2 * oldest < len(self._actions):
            self._actions = np.empty((2 * len(self._actions), *self._actions.shape[1:]), self._actions.dtype)
        self._actions[: len(kept)] = kept
        self._length = len(kept)
        self._resets = [
            [(position - oldest, seed, options) for position, seed, options in resets] for resets in self._resets
        ]


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that reach a worker unchanged; refuse others."""
    for key, value in settings.items():
        try:
            same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            raise UserError(
                "a worker process can be told only numbers, texts, lists and mappings of these",
                key=f"environment.{key}",
                value=value,
                remedy="write it so, or leave environment.workers at 0",
            )
    return dict(settings)
