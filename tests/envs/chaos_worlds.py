"""Worlds that misbehave once, where they are told to: a file in a folder says when and how, and is used up by it.

Importable by worker processes: `tests.envs.chaos_worlds:Chaos-v0`, with `tests` allowed.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.envs import wire

MODULE = "tests.envs.chaos_worlds"
KINDS = ("kill", "exit", "raise", "hang", "observation", "reward", "shape", "babble", "forge")


def arm(folder, kind, seed, step, *, forever=False):
    """Let the world misbehave in the episode of this seed, at this step (0 is the reset): once, or every time."""
    place = Path(folder) / f"{seed}-{step}"
    place.with_suffix(".new").write_text(f"{kind} {'forever' if forever else 'once'}")
    place.with_suffix(".new").rename(place)


class Chaos(gymnasium.Env):
    """A noisy walk that uses its generator at every step, with a picture, a vector and infos to look at."""

    def __init__(self, folder=None, length=25):
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (6, 5, 3), dtype=np.uint8),
                "state": spaces.Box(-np.inf, np.inf, (3,), dtype=np.float32),
            }
        )
        self.action_space = spaces.Box(-2.0, 2.0, (2,), dtype=np.float32)
        self.folder, self.length = None if folder is None else Path(folder), length
        self.seed = None

    def fault(self):
        place = None if self.folder is None else self.folder / f"{self.seed}-{self.count}"
        if place is None or not place.exists():
            return None
        kind, times = place.read_text().split()
        if times == "once":
            place.rename(place.with_suffix(".done"))  # before the deed, which may be the last
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exit":
            print("leaving early")
            sys.exit(3)
        if kind == "raise":
            raise RuntimeError("the motor is off")
        if kind == "babble":
            os.write(int(sys.argv[1]), b"\xff" * 40)
        if kind == "forge":  # a frame as it should be, about more rows than there are
            rows = np.zeros((9, 3), np.float32)
            with socket.socket(fileno=os.dup(int(sys.argv[1]))) as connection:
                wire.send(connection, wire.encode({"arrays": wire.layout_of([rows]), "infos": []}), [rows])
        if kind in ("hang", "forge", "slow"):
            time.sleep(0.6 if kind == "slow" else 3600)
        return kind

    def see(self, fault=None):
        state = np.array([*self.position, self.count], dtype=np.float32)
        camera = np.zeros((6, 5, 3), dtype=np.uint8)
        camera[self.count % 6, int(abs(self.position[0]) * 10) % 5] = (self.count, 255, 7)
        if fault == "observation":
            state[1] = np.nan
        return {"camera": camera, "state": state[:2] if fault == "shape" else state}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed = self.seed if seed is None else seed
        self.count = 0
        self.position = self.np_random.normal(size=2) + (options or {}).get("offset", 0.0)
        return self.see(self.fault()), {"start": float(self.position[0])}

    def step(self, action):
        self.count += 1
        fault = self.fault()
        self.position = np.tanh(self.position + 0.3 * np.asarray(action) + 0.2 * self.np_random.normal(size=2))
        reward = np.inf if fault == "reward" else float(self.position.sum())
        info = {"energy": float(np.square(action).sum()), "note": f"step {self.count}"}
        if self.count % 5 == 0:
            info["rare"] = {"position": self.position.copy()}
        ended = bool(self.np_random.uniform() < 0.03)
        return self.see(fault), reward, ended, self.count >= self.length, info


class Unseeded(Chaos):
    """Looks at something other than its seed and its actions: it cannot be brought back."""

    def reset(self, *, seed=None, options=None):
        _, info = super().reset(seed=seed, options=options)
        self.position = self.position + int.from_bytes(os.urandom(2), "big") / 1e6
        return self.see(), info


class Moody(Chaos):
    """Shows the same, but rewards by chance."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward + int.from_bytes(os.urandom(2), "big") / 1e6, terminated, truncated, info


for world in (Chaos, Unseeded, Moody):
    if f"{world.__name__}-v0" not in gymnasium.registry:
        gymnasium.register(id=f"{world.__name__}-v0", entry_point=f"{MODULE}:{world.__name__}")
