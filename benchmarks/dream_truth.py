"""What a Dreamer agent dreams about sequences of actions, against what the simulator does with them.

    python benchmarks/dream_truth.py RUN [--starts 40] [--tail 120]

RUN is the folder of a run on a task of the control suite. From states of the agent's own episodes it dreams, and the
simulator carries out, two sequences of the policy's actions and six of each kind of perturbed ones; then the policy
goes on. Printed are rewards in dream and simulator, values and returns, and how well dreams order the sequences.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.envs.dmc import ControlSuite
from rl_lab.runs import load_agent

HORIZON, OF_EACH = 15, 6
KINDS = ("noise 0.3", "slow noise 0.7", "full actions")
NUM_SEQUENCES = 2 + OF_EACH * len(KINDS)  # the first two are the policy's own


class Simulator(ControlSuite):
    """A task of the control suite that can be put into any state, and goes on for ever."""

    def __init__(self, task: str, action_repeat: int) -> None:
        super().__init__(task)
        self._environment._step_limit, self._repeat = float("inf"), action_repeat

    def decide(self, action: np.ndarray) -> tuple[np.ndarray, float]:
        """Take one decision; return what is seen then, and the rewards on the way."""
        steps = [self.step(action) for _ in range(self._repeat)]
        return steps[-1][0], sum(step[1] for step in steps)

    def save(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the state of the physics, and what its solver starts from."""
        physics = self._environment.physics
        return physics.get_state().copy(), physics.data.qacc_warmstart.copy()

    def load(self, saved: tuple[np.ndarray, np.ndarray]) -> None:
        """Go on from a saved state."""
        self.reset()
        physics = self._environment.physics
        with physics.reset_context():
            physics.set_state(saved[0])
            physics.data.qacc_warmstart[:] = saved[1]


class Agent:
    """A trained workflow that acts in many simulators at once."""

    def __init__(self, workflow: Any) -> None:
        self.workflow, self.device = workflow, workflow._device
        self.generator = torch.Generator(self.device).manual_seed(1)

    def tensor(self, rows: Any) -> torch.Tensor:
        """Return rows where the agent computes."""
        return torch.as_tensor(np.stack(rows), dtype=torch.float32, device=self.device)

    def play(
        self, worlds: list[Simulator], observations: list[np.ndarray], state: Any, length: int, forced: Any = None
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], Any, torch.Tensor]:
        """Act for some decisions; return rewards and actions [T, N], where it ended, and the values at the start."""
        rewards, taken, first = np.zeros((length, len(worlds)), np.float32), [], torch.zeros(0)
        for t in range(length):
            said = self.workflow.act(self.tensor(observations), state, explore=True, generator=self.generator)
            actions, state = said.actions.cpu().numpy(), said.state
            if t == 0:
                first = self.values(self.workflow.rssm.features(state))
            if forced is not None:
                actions, state = forced[t], {**state, "action": self.tensor(forced[t])}
            taken.append(actions)
            for i, world in enumerate(worlds):
                observations[i], rewards[t, i] = world.decide(actions[i])
        return rewards, np.stack(taken), observations, state, first

    @torch.no_grad()
    def values(self, features: torch.Tensor) -> torch.Tensor:
        """Return what the critic thinks."""
        return self.workflow._behaviour.values(features)

    @torch.no_grad()
    def dream(self, state: Any, observations: list[np.ndarray], forced: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return rewards [T, N] of forced actions, the values at their ends, and the rewards of the actor's own."""
        flow = self.workflow
        start, _ = flow._model.look(self.tensor(observations), state, self.generator)
        states, rewards = start, []
        draws = flow.rssm.variable.draw(forced.shape[:2], start["deter"], self.generator)
        for actions, draw in zip(self.tensor(forced), draws, strict=True):
            states = flow.rssm.imagine_step(states, actions, draw)
            rewards.append(flow.reward.mean(flow.reward(flow.rssm.features(states))))
        own = flow._behaviour.imagine(start, len(forced), self.generator).rewards
        ends = self.values(flow.rssm.features(states))
        return torch.stack(rewards).cpu().numpy(), ends.cpu().numpy(), own.cpu().numpy()


def starts(agent: Agent, worlds: list[Simulator], rng: np.random.Generator) -> tuple[list[Any], list[np.ndarray], Any]:
    """Return states of the physics, observations and recurrent states in the midst of an episode in each world."""
    observations = [world.reset(seed=seed)[0] for seed, world in enumerate(worlds)]
    state, ages = agent.workflow.initial_state(len(worlds)), 60 + rng.integers(0, 120, len(worlds))
    saved: list[Any] = [None] * len(worlds)
    seen, states = list(observations), {name: leaf.clone() for name, leaf in state.items()}
    for age in range(int(ages.max()) + 1):
        for i in np.flatnonzero(ages == age):
            saved[i], seen[i] = worlds[i].save(), observations[i]
            for name, leaf in state.items():
                states[name][i] = leaf[i]
        _, _, observations, state, _ = agent.play(worlds, observations, state, 1)
    return saved, seen, states


def perturbed(own: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return sequences [T, S, K, A]: two of the policy [T, S, 2, A], then those of each kind around the first."""
    base = own[:, :, :1]
    shape = (*base.shape[:2], OF_EACH, base.shape[-1])
    slow = rng.standard_normal(shape)
    for t in range(1, len(slow)):
        slow[t] = 0.9 * slow[t - 1] + np.sqrt(1.0 - 0.9**2) * slow[t]
    full = np.sign(rng.standard_normal(shape))[::3].repeat(3, 0)[: len(base)]
    around = [base + 0.3 * rng.standard_normal(shape), base + 0.7 * slow, full]
    return np.clip(np.concatenate([own, *around], 2), -1.0, 1.0).astype(np.float32)


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return the correlation inside the rows [S, K] of two tables."""
    one, other = one - one.mean(1, keepdims=True), other - other.mean(1, keepdims=True)
    return float((one * other).sum() / max(np.sqrt((one**2).sum() * (other**2).sum()), 1e-9))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--starts", type=int, default=40, help="states to begin in")
    parser.add_argument("--tail", type=int, default=120, help="decisions of the policy after each sequence")
    arguments = parser.parse_args()
    experiment = load_agent(arguments.run, which="last")
    environment, agent, rng = experiment.config.environment, Agent(experiment.workflow), np.random.default_rng(0)
    gamma, count = experiment.workflow.gamma, arguments.starts
    worlds = [Simulator(environment.id, environment.action_repeat) for _ in range(count * NUM_SEQUENCES)]
    saved, seen, state = starts(agent, worlds[:count], rng)

    def begin(each: int) -> tuple[list[Simulator], list[np.ndarray], Any]:
        chosen = worlds[: count * each]
        for i, world in enumerate(chosen):
            world.load(saved[i // each])
        states = {name: leaf.repeat_interleave(each, 0) for name, leaf in state.items()}
        return chosen, [seen[i // each] for i in range(len(chosen))], states

    own = agent.play(*begin(2), HORIZON)[1]
    forced = perturbed(own.reshape(HORIZON, count, 2, -1), rng).reshape(HORIZON, len(worlds), -1)
    chosen, observations, states = begin(NUM_SEQUENCES)
    dreamed, dreamed_ends, actors = agent.dream(states, observations, forced)
    rewards, _, observations, states, values = agent.play(chosen, observations, states, HORIZON, forced)
    after = agent.play(chosen, observations, states, arguments.tail)[0]
    experiment.close()
    discounts = gamma ** np.arange(max(HORIZON, arguments.tail))[:, None]
    # What follows the tail is taken to be like the tail.
    ends = (discounts[: arguments.tail] * after).sum(0) / (1.0 - gamma**arguments.tail)

    def table(numbers: np.ndarray) -> np.ndarray:
        return numbers.reshape(count, NUM_SEQUENCES)

    real = table((discounts[:HORIZON] * rewards).sum(0) + gamma**HORIZON * ends)
    guess = table((discounts[:HORIZON] * dreamed).sum(0) + gamma**HORIZON * dreamed_ends)
    policy = real[:, :2].mean(1)
    mean = rewards.reshape(HORIZON, count, NUM_SEQUENCES)[:, :, :2].mean()
    print(f"{environment.id}: rewards of the policy {mean:.2f}, in its dreams {actors.mean():.2f}")
    print(f"critic {table(values.cpu().numpy())[:, :2].mean():.1f}, real return {policy.mean():.1f}\n")
    print("| sequences | correlation of rewards | of returns | best of them - policy | the dream's choice - policy |")
    print("|---|---|---|---|---|")
    for i, kind in enumerate(KINDS):
        own_columns = slice(2 + OF_EACH * i, 2 + OF_EACH * (i + 1))
        of_rewards = correlation(table(dreamed.sum(0))[:, own_columns], table(rewards.sum(0))[:, own_columns])
        truth, said = real[:, own_columns], guess[:, own_columns]
        choice = truth[np.arange(count), said.argmax(1)]
        print(
            f"| {kind} | {of_rewards:.2f} | {correlation(said, truth):.2f} | {(truth.max(1) - policy).mean():.1f} "
            f"| {(choice - policy).mean():.1f} |"
        )


if __name__ == "__main__":
    main()
