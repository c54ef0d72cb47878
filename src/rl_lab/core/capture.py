"""Capture: one update, or one decision, as one replayed CUDA graph. Algorithms never mention it.

The first calls run eagerly and are real; then the call is recorded once and replayed. What a captured function may
read: device tensors that change in place, and constants. Python inside it is frozen when it is recorded.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.core.batch import Tree, tree_leaves, tree_map, tree_zip
from rl_lab.core.errors import RunError
from rl_lab.core.workflow import Act, Metrics

WARM_UP_CALLS = 3
_RECORDING = threading.Lock()
Answer = tuple[Metrics, Mapping[str, Tensor]]  # of an update hook: what to watch, and columns to write back


@contextmanager
def device_stream(device: str) -> Iterator[None]:
    """Issue everything of a run on one side stream: warm-up, capture and replay must share it."""
    if not device.startswith("cuda"):
        yield
        return
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def compile_parts(parts: Iterable[Any]) -> None:
    """Compile the methods that a part lists as `pure`, or a module that lists none; nothing there draws numbers."""
    torch._dynamo.config.recompile_limit = 256  # a part meets a few shapes: batches, plans, single observations
    for part in parts:
        pure = getattr(type(part), "pure", ())
        for name in pure:
            setattr(part, name, torch.compile(getattr(part, name), dynamic=False))
        if not pure and isinstance(part, nn.Module) and "forward" in vars(type(part)):
            part.compile(dynamic=False)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled parts as they are, for calls too rare to be worth compiling; no run records meanwhile."""
    with _RECORDING:
        if "torch._dynamo" not in sys.modules:  # nothing was compiled; importing it takes seconds
            yield
            return
        with torch.compiler.set_stance("force_eager"):
            yield


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keep the garbage collector away: it might destroy another graph, which would spoil one that is recorded."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Graph:
    """A function of trees of tensors: eager for the first calls, then recorded and replayed.

    Outputs are overwritten by the next call.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Tree],
        generators: Sequence[torch.Generator],
        *,
        compiled: bool = True,
    ) -> None:
        self._name, self._function = name, function
        self._exclusively = (lambda: _RECORDING) if compiled else uncompiled
        self._generators = [generator for generator in generators if generator.device.type == "cuda"]
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Tree = None
        self._outputs: Tree = None

    def __call__(self, *inputs: Tree) -> Tree:
        """Run the function on these inputs."""
        self._calls += 1
        if self._calls <= WARM_UP_CALLS:
            with self._exclusively():  # these calls may compile, which a process can do for one thread at a time
                return self._function(*inputs)
        if self._graph is None:
            self._inputs = tree_map(Tensor.clone, dict(enumerate(inputs)))
            self._record()
        else:
            given = dict(enumerate(inputs))
            tree_zip(lambda static, value: static.copy_(value, non_blocking=True), self._inputs, given)
        assert self._graph is not None
        self._graph.replay()
        return self._outputs

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        try:
            # Other runs in this process may go on meanwhile, but not record at the same time.
            with (
                self._exclusively(),
                _nothing_collected(),
                torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"),
            ):
                self._outputs = self._function(*self._inputs.values())
        except Exception as error:
            raise RunError(
                f"{self._name} cannot be captured as a CUDA graph: {_where(error)}. A captured hook must not wait for "
                "the host (.item(), printing, branching on a tensor) nor change shapes; training.capture=none runs "
                "it as it is"
            ) from error
        self._graph = graph


class HookCapture:
    """Runs update hooks as graphs and keeps the sums of their metrics on the device.

    `deferred` metrics wait there until the owner drains them; otherwise every event carries its own.
    """

    def __init__(self, generators: Callable[[], Sequence[torch.Generator]], *, deferred: bool = False) -> None:
        self._generators, self.deferred = generators, deferred
        self._graphs: dict[Hashable, Graph] = {}
        self._names: dict[Hashable, list[str]] = {}
        self._sums: dict[Hashable, Tensor] = {}
        self._counts: dict[tuple[str, Hashable, Hashable], int] = {}  # by hook, its key, and shapes
        self._acts: dict[bool, CapturedAct] = {}

    def act(self, act: Callable[..., Act], *, compiled: bool = True) -> CapturedAct:
        """Return a workflow's `act` as graphs; the same object at every call.

        What acts rarely, or with another number of environments, is not worth waiting for a compiler.
        """
        if compiled not in self._acts:
            self._acts[compiled] = CapturedAct(act, compiled=compiled)
        return self._acts[compiled]

    def run(self, key: Hashable, name: str, function: Callable[..., Answer], *inputs: Tree) -> Mapping[str, Tensor]:
        """Call a hook and return its columns; equal keys mean the same function on inputs of the same shapes."""
        shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves(dict(enumerate(inputs))))
        key = (name, key, shapes)
        if key not in self._graphs:
            self._graphs[key] = Graph(name, self._summing(key, function), self._generators())
        self._counts[key] = self._counts.get(key, 0) + 1
        columns: Mapping[str, Tensor] = self._graphs[key](*inputs)
        return columns

    def drain(self) -> Iterator[tuple[str, Metrics, int]]:
        """Yield hooks that ran since the last time, the means of their metrics (on the device) and their calls."""
        for key, count in self._counts.items():
            if count and key in self._sums:
                self._counts[key] = 0
                yield key[0], dict(zip(self._names[key], (self._sums[key] / count).unbind(), strict=True)), count
                self._sums[key].zero_()

    def clear(self) -> None:
        """Forget every graph: what they read has been replaced."""
        for part in (self._graphs, self._names, self._sums, self._counts):
            part.clear()
        for act in self._acts.values():
            act.clear()

    def _summing(self, key: Hashable, function: Callable[..., Answer]) -> Callable[..., Mapping[str, Tensor]]:
        def summed(*inputs: Tree) -> Mapping[str, Tensor]:
            metrics, columns = function(*inputs)
            if metrics:
                values = torch.stack([torch.as_tensor(value).detach().float() for value in metrics.values()])
                if key not in self._sums:
                    self._names[key], self._sums[key] = list(metrics), torch.zeros_like(values)
                self._sums[key].add_(values)
            return columns

        return summed


class CapturedAct:
    """`act` as graphs, one for each number of environments, way of acting and generator."""

    def __init__(self, act: Callable[..., Act], *, compiled: bool = True) -> None:
        self._act, self._compiled = act, compiled
        self._graphs: dict[Hashable, Graph] = {}

    def __call__(
        self, observations: Tree, state: Tree = None, *, explore: bool = True, generator: torch.Generator | None = None
    ) -> Act:
        """Decide; the next decision overwrites the answer."""
        shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves(observations))
        key = (shapes, explore, id(generator))
        if key not in self._graphs:

            def decide(observations: Tree, state: Tree = None) -> Any:
                said = self._act(observations, state or None, explore=explore, generator=generator)
                return {"actions": said.actions, "state": said.state, "extras": dict(said.extras)}

            generators = [] if generator is None else [generator]
            self._graphs[key] = Graph("act", decide, generators, compiled=self._compiled)
        said = self._graphs[key](observations, {} if state is None else state)
        return Act(said["actions"], said["state"], said["extras"])

    def clear(self) -> None:
        """Forget every graph."""
        self._graphs.clear()


def _where(error: BaseException) -> str:
    """Name the line of ours, or of the user's, that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "site-packages" not in frame.filename and "capture.py" not in frame.filename]
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if not ours:
        return reason
    frame = ours[-1]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno} `{frame.line}`: {reason}"
