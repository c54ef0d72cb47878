"""Dreamer v3 by its author's code on a task of the control suite: trains, and writes what each episode returned.

Runs in an environment of its own and imports nothing of ours. Needs a checkout of github.com/danijar/dreamerv3 at
f8817c4, what it requires (ninjax 3.6.3 and jax 0.4.38 among it), and dm_control with mujoco<4:

MUJOCO_GL=disabled PYTHONPATH=CHECKOUT python benchmarks/peers/dreamer_v3.py CSV TASK SEED STEPS

STEPS are those of the simulator. Sizes and rates are those of our experiment dreamerv3_dmc_small. Model, losses and
optimiser are the author's; the loop, and a replay of uniform windows whose latents are refreshed, are written here.
"""

from __future__ import annotations

import csv
import inspect
import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import elements
import embodied.jax as parts
import jax
import jax.numpy as jnp
import ninjax as nj
import numpy as np
import optax
from dreamerv3 import agent, rssm

NUM_ENVS, REPEAT, BATCH, WINDOW, FIRST_UPDATE, UPDATES_PER_DECISION = 4, 2, 16, 17, 1088, 0.25
RATE, WARMUP, ACTOR_RATE = 5e-4, 200, 0.3
FLAGS = ("is_first", "is_last", "is_terminal")
SCALES = {"rew": 1.0, "con": 1.0, "dyn": 1.0, "rep": 0.1, "policy": 1.0, "value": 1.0, "repval": 0.3}
parts.nets.COMPUTE_DTYPE = jnp.float32


def learner(
    seen: dict[str, tuple[int, ...]],
    action: int,
    *,
    deter: int,
    units: int,
    variables: int,
    classes: int,
    layers: dict[str, int],
    free_nats: float = 1.0,
    imag_length: int = 15,
    horizon: int = 333,
    output_scales: dict[str, float],
) -> SimpleNamespace:
    """Return what the methods of the author's agent read of it."""
    observed = {name: elements.Space(np.float32, shape) for name, shape in seen.items()}
    actions = {"action": elements.Space(np.float32, (action,), -1, 1)}
    scalar, binary = elements.Space(np.float32, ()), elements.Space(bool, (), 0, 2)
    style = {"act": "silu", "norm": "rms", "winit": "trunc_normal_in"}

    def stack(name: str) -> dict[str, Any]:
        return {**style, "layers": layers[name], "units": units}

    def head(space: Any, output: Any, name: str, of: str, **knobs: Any) -> Any:
        return parts.MLPHead(space, output, **stack(of), outscale=output_scales.get(of, 1.0), **knobs, name=name)

    states = {"deter": deter, "hidden": units, "stoch": variables, "classes": classes, "blocks": 8}
    value = head(scalar, "symexp_twohot", "val", "val", bins=255)
    returns = {"slowtar": False, "lam": 0.95, "slowreg": 1.0}
    return SimpleNamespace(
        obs_space={**observed, "reward": scalar, **{name: elements.Space(bool) for name in FLAGS}},
        act_space=actions,
        enc=rssm.Encoder(observed, **stack("enc"), symlog=True, name="enc"),
        dyn=rssm.RSSM(actions, **style, **states, unimix=0.01, free_nats=free_nats, name="dyn"),
        dec=rssm.Decoder(observed, **stack("dec"), symlog=True, name="dec"),
        feat2tensor=lambda x: jnp.concatenate([x["deter"], x["stoch"].reshape((*x["stoch"].shape[:-2], -1))], -1),
        rew=head(scalar, "symexp_twohot", "rew", "rew", bins=255),
        con=head(binary, "binary", "con", "con"),
        pol=head(actions, {"action": "bounded_normal"}, "pol", "pol", minstd=0.1, maxstd=1.0),
        val=value,
        slowval=parts.SlowModel(head(scalar, "symexp_twohot", "slowval", "val", bins=255), source=value, rate=0.02),
        retnorm=parts.Normalize("perc", limit=1.0, debias=False, name="retnorm"),
        valnorm=parts.Normalize("none", name="valnorm"),
        advnorm=parts.Normalize("none", name="advnorm"),
        scales={**dict.fromkeys(seen, 1.0), **SCALES},
        config=SimpleNamespace(
            reward_grad=True,
            contdisc=True,
            horizon=horizon,
            imag_last=0,
            imag_length=imag_length,
            ac_grads=False,
            imag_loss={**returns, "actent": 3e-4},
            repval_loss=True,
            repval_grad=True,
            repl_loss=returns,
        ),
    )


def method(name: str) -> Any:
    """Return a method of the author's agent as a function."""
    return inspect.unwrap(getattr(agent.Agent, name))


def trained(theirs: SimpleNamespace) -> list[Any]:
    """Return the modules that learn."""
    return [theirs.dyn, theirs.enc, theirs.dec, theirs.rew, theirs.con, theirs.pol, theirs.val]


def optimizer(theirs: SimpleNamespace) -> Any:
    """Return the author's optimiser, whose rate is smaller for the actor."""

    def slower(updates: dict[str, Any], state: Any, params: Any = None) -> tuple[dict[str, Any], Any]:
        return {
            name: value * (ACTOR_RATE if name.startswith("pol/") else 1.0) for name, value in updates.items()
        }, state

    chain = optax.chain(
        method("_make_opt")(None, lr=RATE, warmup=WARMUP), optax.GradientTransformation(lambda _: (), slower)
    )
    return parts.Optimizer(trained(theirs), chain, name="opt")


class World:
    """A task of the suite, which begins again when an episode has ended."""

    def __init__(self, task: str, seed: int) -> None:
        from dm_control import suite

        domain, name = task.split("-", 1)
        self.environment = suite.load(domain, name.replace("-", "_"), task_kwargs={"random": seed})
        self.action = self.environment.action_spec().shape[0]
        self.ended = True

    def step(self, action: np.ndarray) -> dict[str, Any]:
        """Act, twice; where an episode has ended, begin another instead."""
        reward, is_first = 0.0, self.ended
        if is_first:
            moment = self.environment.reset()
        else:
            for _ in range(REPEAT):
                moment = self.environment.step(np.clip(action, -1.0, 1.0))
                reward += moment.reward
                if moment.last():
                    break
        self.ended = moment.last()
        seen = {name: np.asarray(value, np.float32).reshape(-1) for name, value in moment.observation.items()}
        terminal = not is_first and moment.discount == 0
        flags = dict(zip(FLAGS, map(np.bool_, (is_first, self.ended, terminal)), strict=True))
        return {**seen, "reward": np.float32(reward), **flags}


class Replay:
    """All that happened, with the latents of each step: [NUM_ENVS, STEPS]."""

    def __init__(self, step: dict[str, np.ndarray], capacity: int, random: np.random.Generator) -> None:
        self.columns = {name: np.zeros((NUM_ENVS, capacity, *v.shape[1:]), v.dtype) for name, v in step.items()}
        self.random, self.size = random, 0

    def add(self, step: dict[str, np.ndarray]) -> None:
        """Take in a step of all worlds."""
        for name, value in step.items():
            self.columns[name][:, self.size] = value
        self.size += 1

    def sample(self) -> tuple[tuple[np.ndarray, np.ndarray], dict[str, np.ndarray]]:
        """Return windows [BATCH, WINDOW] and where they lie."""
        envs = self.random.integers(0, NUM_ENVS, BATCH)[:, None]
        rows = self.random.integers(0, self.size - WINDOW + 1, BATCH)[:, None] + np.arange(WINDOW)
        return (envs, rows), {name: column[envs, rows] for name, column in self.columns.items()}


def main() -> None:
    """Train once."""
    path, task, seed, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    random = np.random.default_rng(seed)
    worlds = [World(task, 1000 * seed + i) for i in range(NUM_ENVS)]
    num_actions = worlds[0].action
    observed = {name: np.asarray(v).size for name, v in worlds[0].environment.reset().observation.items()}
    theirs = learner(
        {name: (size,) for name, size in observed.items()},
        num_actions,
        **{"deter": 256, "units": 128, "variables": 16, "classes": 8, "horizon": 100},
        layers={"enc": 3, "dec": 3, "rew": 1, "con": 1, "pol": 3, "val": 3},
        output_scales={"rew": 0.0, "val": 0.0, "pol": 0.01},
    )
    opt = optimizer(theirs)

    def act(state: Any, action: Any, seen: Any) -> tuple[Any, Any]:
        is_first = seen["is_first"]
        _, _, tokens = theirs.enc({}, seen, is_first, training=False, single=True)
        state, _, features = theirs.dyn.observe(
            state, tokens, {"action": action}, is_first, training=False, single=True
        )
        policy = theirs.pol(theirs.feat2tensor(features), bdims=1)["action"]
        return state, policy.sample(nj.seed())

    def train(data: Any) -> Any:
        context = {name: data[name][:, 0] for name in ("deter", "stoch")}
        seen = {name: data[name][:, 1:] for name in theirs.obs_space}
        loss = partial(method("loss"), theirs)
        led = {"action": data["action"][:, :-1]}
        _, (_, entries, _, _) = opt(loss, ({}, context, {}), seen, led, training=True, has_aux=True)
        theirs.slowval.update()
        return entries[1]

    def key() -> np.ndarray:
        return random.integers(0, 2**31, 2).astype(np.uint32)

    state = jax.tree.map(np.asarray, theirs.dyn.initial(NUM_ENVS))
    actions = np.zeros((NUM_ENVS, num_actions), np.float32)
    weights: dict[str, Any] = {}
    jit_train, jit_act = jax.jit(nj.pure(train), donate_argnums=[0]), jax.jit(nj.pure(act))
    returns, owed, replay = np.zeros(NUM_ENVS), 0.0, None
    begin = time.perf_counter()
    with Path(path).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["env_steps", "episode_return", "seconds"])
        while replay is None or replay.size * NUM_ENVS * REPEAT < steps:
            moments = [world.step(action) for world, action in zip(worlds, actions, strict=True)]
            seen = {name: np.stack([moment[name] for moment in moments]) for name in moments[0]}
            if replay is None:
                latents = {name: np.zeros_like(value) for name, value in state.items()}
                replay = Replay({**seen, "action": actions, **latents}, steps // NUM_ENVS // REPEAT + 1, random)
                replay.size = WINDOW
                weights = nj.init(train)({}, replay.sample()[1], seed=key())
                replay.size = 0
            _, (state, sampled) = jit_act(weights, state, actions, seen, seed=key())
            actions = np.asarray(sampled) * ~seen["is_last"][:, None]
            replay.add({**seen, "action": actions, **state})
            returns = np.where(seen["is_first"], 0.0, returns) + seen["reward"]
            for i in np.flatnonzero(seen["is_last"]):
                where = replay.size * NUM_ENVS * REPEAT
                rows.writerow([where, round(float(returns[i]), 1), round(time.perf_counter() - begin)])
                file.flush()
            if replay.size * NUM_ENVS >= FIRST_UPDATE:
                owed += UPDATES_PER_DECISION * NUM_ENVS
            while owed >= 1.0:
                owed -= 1.0
                (envs, steps_at), data = replay.sample()
                weights, latents = jit_train(weights, data, seed=key())
                for name, column in latents.items():
                    replay.columns[name][envs, steps_at[:, 1:]] = column


if __name__ == "__main__":
    main()
