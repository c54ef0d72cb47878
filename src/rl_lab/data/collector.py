"""RolloutCollector: steps environments with any `act`; owns resets, final observations and episode statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_lab.core.batch import Batch, Tree, tree_leaves, tree_map, tree_zip
from rl_lab.core.seeding import SeedTree
from rl_lab.core.workflow import Act, ActFunction, CollectResult
from rl_lab.data.episodes import EpisodeRecord

FollowFunction = Callable[..., Act]  # like Workflow.follow


class RolloutCollector:
    """Turns environments and decisions into trajectories.

    Environments run with autoreset disabled: what `step` returns is the true successor, then finished rows are
    reset with a seed of their own, derived from (run seed, environment, episode).
    """

    def __init__(
        self,
        environments: Any,
        seeds: SeedTree,
        *,
        stream: str = "collect",
        device: str = "cpu",
        initial_state: Tree = None,
    ) -> None:
        mode = str(environments.metadata.get("autoreset_mode"))
        if "DISABLED" not in mode.upper():
            raise ValueError(f"the Collector resets environments itself: autoreset must be disabled, not {mode}")
        self.environments = environments
        self.num_envs: int = environments.num_envs
        self.seeds, self.stream, self.device = seeds, stream, device
        self.generator = seeds.generator(f"{stream}/act", device)
        self._action_generator = seeds.numpy(f"{stream}/random_actions")
        self._initial_state = initial_state
        self.episode_index = np.zeros(self.num_envs, dtype=np.int64)
        self.frames = 0  # of the simulator that `step` has taken, action repeat included
        self.reset()

    def reset(self) -> Tree:
        """Start a new episode in every environment."""
        self.state = tree_map(Tensor.clone, self._initial_state)
        self.running_returns = np.zeros(self.num_envs)
        self.running_lengths = np.zeros(self.num_envs, dtype=np.int64)
        self._actions: list[np.ndarray] = []  # joint actions, at least since the oldest running episode began
        observations, _ = self.environments.reset(seed=[self._episode_seed(i) for i in range(self.num_envs)])
        self.observations: Tree = observations
        return observations

    def reset_episodes(self) -> None:
        """Give up every running episode and begin new ones."""
        self.episode_index += 1
        self.reset()

    def collect(self, act: ActFunction, num_steps: int, *, follow: FollowFunction | None = None) -> CollectResult:
        """Take `num_steps` decisions in every environment and return them as a [T, N] trajectory.

        With `follow`, actions are drawn at random, and it is asked for state and columns in place of `act`.
        """
        infos: list[Mapping[str, Any]] = []
        returns: list[float] = []
        lengths: list[int] = []
        extras: dict[str, Tensor] = {}
        env_steps = 0
        num_envs = self.num_envs
        observations = tree_map(lambda leaf: np.empty((num_steps, *leaf.shape), leaf.dtype), self.observations)
        successors = tree_map(np.empty_like, observations)
        rewards = np.empty((num_steps, num_envs), np.float32)
        terminated = np.empty((num_steps, num_envs), np.bool_)
        truncated = np.empty((num_steps, num_envs), np.bool_)
        visible = tree_map(torch.from_numpy, observations)
        single = isinstance(observations, np.ndarray)
        rows = visible.unbind() if single else [_row(visible, t) for t in range(num_steps)]
        on_cpu = self.device == "cpu"
        for t, seen in enumerate(rows):
            if single:
                observations[t] = self.observations
            else:
                _store(observations, t, self.observations)
            if not on_cpu:
                seen = tree_map(lambda leaf: leaf.to(self.device, non_blocking=True), seen)
            if follow is None:
                said = act(seen, self.state, explore=True, generator=self.generator)
                taken = said.actions.cpu().numpy()
            else:
                taken = self._random_actions()
                drawn = torch.from_numpy(taken).to(self.device)
                said = follow(act, seen, self.state, drawn, generator=self.generator)
            if t == 0:
                actions = np.empty((num_steps, *taken.shape), taken.dtype)
                for name, column in said.extras.items():
                    extras[name] = torch.empty((num_steps, *column.shape), dtype=column.dtype)
            actions[t] = taken
            if said.extras.keys() != extras.keys():
                raise ValueError(
                    f"the extras of a policy must be the same columns at every step: they were {sorted(extras)} and "
                    f"are now {sorted(said.extras)}; return all of them always, zeros where there is nothing to say"
                )
            for name, column in said.extras.items():
                extras[name][t] = column
            if said.state is not None:
                self.state = tree_map(Tensor.clone, said.state)
                if self._initial_state is None:
                    raise ValueError(
                        "this policy keeps a state, but the Collector does not know how an episode begins; "
                        "give it initial_state=workflow.initial_state(num_envs)"
                    )
            self._actions.append(taken.copy())  # a policy may use its memory again
            successor, reward, ended, cut, info = self.environments.step(taken)
            rewards[t], terminated[t], truncated[t] = reward, ended, cut
            if single:
                successors[t] = successor
            else:
                _store(successors, t, successor)
            if info:
                infos.append(info)
            env_steps += self._count_frames(info)
            self._finish_step(successor, reward, ended, cut, returns, lengths)
        trajectory = Batch(
            observations=visible,
            actions=torch.from_numpy(actions),
            rewards=torch.from_numpy(rewards),
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            next_observations=tree_map(torch.from_numpy, successors),
            infos=infos if len(infos) == num_steps else (),
            extras=extras,
        )
        metrics = {}
        if returns:
            metrics = {
                "episode_return": sum(returns) / len(returns),
                "episode_length": sum(lengths) / len(lengths),
            }
        return CollectResult(
            steps=num_steps * num_envs,
            episodes=len(returns),
            metrics=metrics,
            trajectory=trajectory,
            extras={"env_steps": env_steps, "episode_returns": returns, "episode_lengths": lengths},
        )

    def collect_episodes(
        self,
        act: ActFunction,
        num_episodes: int,
        *,
        explore: bool = False,
        on_step: Callable[[], None] | None = None,
        record: EpisodeRecord | None = None,
    ) -> tuple[list[float], list[int]]:
        """Play whole episodes from a fresh start and return their returns and lengths, in a fixed order.

        Environment i plays the episodes i, i + N, i + 2N, ...: short episodes are not preferred. What an environment
        plays after its last one is neither counted nor recorded.
        """
        self.episode_index = np.zeros(self.num_envs, dtype=np.int64)
        self.reset()
        played: list[list[tuple[float, int]]] = [[] for _ in range(self.num_envs)]
        quotas = [len(range(i, num_episodes, self.num_envs)) for i in range(self.num_envs)]
        while any(len(own) < quota for own, quota in zip(played, quotas, strict=True)):
            if on_step is not None:
                on_step()
            seen = tree_map(lambda leaf: torch.from_numpy(leaf).to(self.device), self.observations)
            said = act(seen, self.state, explore=explore, generator=self.generator)
            if said.state is not None:
                self.state = tree_map(Tensor.clone, said.state)
            taken = said.actions.cpu().numpy()
            successor, rewards, terminated, truncated, _ = self.environments.step(taken)
            if record is not None:
                numbers = np.array([i + self.num_envs * len(own) for i, own in enumerate(played)])
                numbers[numbers >= num_episodes] = -1
                record.add(numbers, self.observations, taken, rewards, terminated, truncated, successor)
            self.running_returns += rewards
            self.running_lengths += 1
            done = terminated | truncated
            for i in np.flatnonzero(done):
                played[i].append((float(self.running_returns[i]), int(self.running_lengths[i])))
            self._reset_rows(successor, done)
        ordered = [played[i % self.num_envs][i // self.num_envs] for i in range(num_episodes)]
        return [episode[0] for episode in ordered], [episode[1] for episode in ordered]

    def step(self, actions: np.ndarray) -> tuple[Tree, np.ndarray, np.ndarray, np.ndarray, Mapping[str, Any]]:
        """Step once with given actions; `observations` moves on to the next episode where one ended."""
        self._actions.append(np.array(actions))
        successor, rewards, terminated, truncated, info = self.environments.step(actions)
        self._finish_step(successor, rewards, terminated, truncated, [], [])
        self.frames += self._count_frames(info)
        return successor, rewards, terminated, truncated, info

    def get_state(self) -> dict[str, Any]:
        """Return episode counters, partial statistics, observations, act state, and what restores the environments."""
        longest = int(self.running_lengths.max())
        recent = self._actions[len(self._actions) - longest :]
        return {
            "episode_index": self.episode_index.copy(),
            "running_returns": self.running_returns.copy(),
            "running_lengths": self.running_lengths.copy(),
            "observations": tree_map(np.copy, self.observations),
            "state": self.state,
            "actions": np.stack(recent) if recent else None,
        }

    def set_state(self, state: Mapping[str, Any]) -> bool:
        """Restore everything; the environments by re-seeding and replaying the actions since their last reset.

        Returns whether the environments came back exactly. Where they did not, the episode is given up: a new one
        begins there, and `replaced_rows` says where.
        """
        self.episode_index = np.array(state["episode_index"])
        lengths = np.array(state["running_lengths"])
        self.state = tree_map(lambda leaf: leaf.to(self.device), state["state"])
        observations = self._replay(lengths, state["actions"])
        self.running_returns = np.array(state["running_returns"])
        self.running_lengths = lengths
        self.observations = observations
        self._actions = [] if state["actions"] is None else list(state["actions"])
        different = np.zeros(self.num_envs, dtype=np.bool_)
        for restored, saved in zip(tree_leaves(observations), tree_leaves(state["observations"]), strict=True):
            equal = np.equal(restored, saved) | ((restored != restored) & (saved != saved))
            different |= ~equal.reshape(self.num_envs, -1).all(1)
        self.replaced_rows = different
        if different.any():
            self._reset_rows(observations, different)
        return not different.any()

    def _replay(self, lengths: np.ndarray, actions: np.ndarray | None) -> Tree:
        steps = [] if actions is None else list(actions)
        seeds: list[int | None] = [self._episode_seed(i) for i in range(self.num_envs)]
        observations, _ = self.environments.reset(seed=seeds)
        done = np.zeros(self.num_envs, dtype=np.bool_)
        for t, taken in enumerate([*steps, None]):  # at the end those begin that have taken no step
            # Rows whose episode began later idle until then; one that ends while idling is reset again.
            starting = lengths == len(steps) - t
            if t > 0 and (due := starting | done).any():
                masked = [seed if due[i] else None for i, seed in enumerate(seeds)]
                observations, _ = self.environments.reset(seed=masked, options={"reset_mask": due})
            if taken is not None:
                observations, _, terminated, truncated, _ = self.environments.step(taken)
                done = terminated | truncated
        return observations

    def _count_frames(self, info: Mapping[str, Any]) -> int:
        return int(info["frames"].sum()) if "frames" in info else self.num_envs

    def _finish_step(
        self,
        successor: Tree,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        returns: list[float],
        lengths: list[int],
    ) -> None:
        self.running_returns += rewards
        self.running_lengths += 1
        done = terminated | truncated
        if not np.count_nonzero(done):  # several times faster than any() on few entries
            self.observations = successor
            return
        returns += self.running_returns[done].tolist()
        lengths += self.running_lengths[done].tolist()
        self._reset_rows(successor, done)

    def _reset_rows(self, successor: Tree, done: np.ndarray) -> None:
        self.observations = successor
        if not done.any():
            return
        self.running_returns[done] = 0.0
        self.running_lengths[done] = 0
        if len(self._actions) > 4096:
            self._actions = self._actions[len(self._actions) - int(self.running_lengths.max()) :]
        self.episode_index[done] += 1
        seeds = [self._episode_seed(i) if done[i] else None for i in range(self.num_envs)]
        self.observations, _ = self.environments.reset(seed=seeds, options={"reset_mask": done})
        if self.state is not None:
            ended = torch.from_numpy(done)

            def begin(leaf: Tensor, first: Tensor) -> None:
                leaf[ended.to(leaf.device)] = first[ended.to(first.device)]

            tree_zip(begin, self.state, self._initial_state)

    def _episode_seed(self, index: int) -> int:
        return self.seeds.seed(f"{self.stream}/environment", index, int(self.episode_index[index]))

    def _random_actions(self) -> np.ndarray:
        space = self.environments.single_action_space
        if hasattr(space, "n"):
            return self._action_generator.integers(space.n, size=self.num_envs)
        return self._action_generator.uniform(-1.0, 1.0, (self.num_envs, *space.shape)).astype(np.float32)


def _store(columns: Tree, t: int, values: Tree) -> None:
    def assign(column: np.ndarray, value: np.ndarray) -> None:
        column[t] = value

    tree_zip(assign, columns, values)


def _row(columns: Tree, t: int) -> Tree:
    return tree_map(lambda column: column[t], columns)


class SteppedEnvironment:
    """The four-value view of the training environments for workflows that step them themselves.

    `step` returns observations of the next episode where one ended, rewards, dones and infos.
    """

    def __init__(self, collector: RolloutCollector) -> None:
        self._collector = collector
        self.num_envs = collector.num_envs
        self.observation_space = collector.environments.single_observation_space
        self.action_space = collector.environments.single_action_space

    @property
    def observations(self) -> Tree:
        """The current observations."""
        return tree_map(torch.from_numpy, self._collector.observations)

    def reset(self) -> Tree:
        """Start a new episode everywhere."""
        if self._collector.running_lengths.any():  # an episode that nobody has played is a new one
            self._collector.reset_episodes()
        return self.observations

    def step(self, actions: Any) -> tuple[Tree, Tensor, Tensor, Mapping[str, Any]]:
        """Step every environment once."""
        taken = actions.cpu().numpy() if isinstance(actions, Tensor) else np.asarray(actions)
        successor, rewards, terminated, truncated, info = self._collector.step(taken)
        dones = torch.from_numpy(terminated | truncated)
        infos = {**info, "terminated": terminated, "truncated": truncated, "final_observation": successor}
        return self.observations, torch.from_numpy(np.asarray(rewards)), dones, infos
