"""Evaluation: environments, act state and chance of its own, so that it never moves the training's streams."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from rl_lab.core.capture import uncompiled
from rl_lab.core.workflow import ActFunction, Inspection, Metrics
from rl_lab.data.collector import RolloutCollector
from rl_lab.data.episodes import EpisodeRecord

Inspect = Callable[..., Inspection]


@dataclass(frozen=True)
class Evaluation:
    """One test of the agent: where training stood, and every episode's return."""

    env_steps: int
    agent_steps: int
    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def return_mean(self) -> float:
        """The mean return."""
        return statistics.fmean(self.returns)

    def metrics(self) -> Metrics:
        """Return bare names and numbers for the log."""
        return {
            "return_mean": self.return_mean,
            "return_std": statistics.pstdev(self.returns),
            "length_mean": statistics.fmean(self.lengths),
        }

    def summary(self) -> dict[str, Any]:
        """Return plain data for summary.json."""
        return {
            "env_steps": self.env_steps,
            "agent_steps": self.agent_steps,
            "return_mean": self.return_mean,
            "returns": list(self.returns),
        }


def play_and_inspect(
    collector: RolloutCollector, act: ActFunction, episodes: int, inspect: Inspect | None, *, explore: bool = False
) -> tuple[list[float], list[int], Inspection]:
    """Play episodes; where the workflow inspects, keep them and let it look. The chance of both is the Collector's."""
    record = None if inspect is None else EpisodeRecord(episodes)
    returns, lengths = collector.collect_episodes(act, episodes, explore=explore, record=record)
    if inspect is None or record is None:
        return returns, lengths, Inspection()
    with uncompiled(), torch.no_grad():
        return returns, lengths, inspect(record.trajectory(collector.device), generator=collector.generator)


class Evaluator:
    """Plays the same episodes at every call: fixed environment seeds; chance of the policy by evaluation index."""

    def __init__(
        self,
        collector: RolloutCollector,
        act: ActFunction,
        episodes: int,
        *,
        counters: Callable[[], tuple[int, int]],
        inspect: Inspect | None = None,
        explore: bool = False,
    ) -> None:
        self.collector, self.act, self.episodes = collector, act, episodes
        self.inspect, self.explore = inspect, explore
        self._counters = counters  # env_steps, agent_steps
        self.history: list[Evaluation] = []
        self.inspection = Inspection()  # of the latest evaluation

    def __call__(self) -> Metrics:
        """Evaluate, remember it, and return its metrics."""
        seeds = self.collector.seeds
        self.collector.generator.manual_seed(seeds.seed(f"{self.collector.stream}/index", len(self.history)))
        returns, lengths, self.inspection = play_and_inspect(
            self.collector, self.act, self.episodes, self.inspect, explore=self.explore
        )
        env_steps, agent_steps = self._counters()
        self.history.append(Evaluation(env_steps, agent_steps, tuple(returns), tuple(lengths)))
        return {**self.inspection.metrics, **self.history[-1].metrics()}

    @property
    def last(self) -> Evaluation | None:
        """The latest evaluation."""
        return self.history[-1] if self.history else None

    @property
    def best(self) -> Evaluation | None:
        """The first evaluation with the highest mean."""
        return max(self.history, key=lambda evaluation: evaluation.return_mean, default=None)

    def get_state(self) -> dict[str, Any]:
        """Return the history, by column."""
        columns = [asdict(evaluation) for evaluation in self.history]
        return {name: np.array([entry[name] for entry in columns], kind) for name, kind in _COLUMNS.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the history."""
        columns = [np.asarray(state[name]).astype(kind).tolist() for name, kind in _COLUMNS.items()]
        self.history = [
            Evaluation(env_steps, agent_steps, tuple(returns), tuple(lengths))
            for env_steps, agent_steps, returns, lengths in zip(*columns, strict=True)
        ]
        if any(not evaluation.returns for evaluation in self.history):
            raise ValueError("an evaluation without an episode")


_COLUMNS = {"env_steps": np.int64, "agent_steps": np.int64, "returns": np.float64, "lengths": np.int64}
