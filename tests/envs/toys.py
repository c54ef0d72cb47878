"""Small Gymnasium environments, good and broken, and a fixture's way to register them for one test."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Toy(gymnasium.Env):
    """A number that the actions move, with dict observations: a picture [H, W, C] and a float64 vector."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (6, 4, 3), dtype=np.uint8),
                "state": spaces.Box(-np.inf, np.inf, (2,), dtype=np.float64),
            }
        )
        self.action_space = spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float64)
        self.taken = []

    def _see(self):
        camera = np.full((6, 4, 3), int(abs(self.value)) % 256, dtype=np.uint8)
        camera[0, 1] = (10, 20, 30)
        return {"camera": camera, "state": np.array([self.value, self.value / 3])}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.value = float(self.np_random.uniform(0, 100))
        return self._see(), {}

    def step(self, action):
        self.taken.append(np.array(action))
        self.value += float(np.sum(action))
        return self._see(), self.value, self.value > 300, False, {}

    def render(self):
        return np.full((5, 7, 3), 9, dtype=np.uint8)


class Vector(gymnasium.Env):
    """A bounded number in [-1, 1]; subclasses break one promise each."""

    def __init__(self):
        self.observation_space = spaces.Box(-1.0, 1.0, (1,), dtype=np.float32)
        self.action_space = spaces.Discrete(2, start=3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        self.value = float(self.np_random.uniform(-0.1, 0.1))
        return self.see(), {}

    def see(self):
        return np.array([self.value], dtype=np.float32)

    def step(self, action):
        assert action in (3, 4)
        self.count += 1
        self.value = float(np.clip(self.value + 0.01 * (action - 3.5), -1, 1))
        return self.see(), self.reward(), self.count >= 30, False, {}

    def reward(self):
        return 1.0


class Unseeded(Vector):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.value = float(np.random.default_rng().uniform(-0.1, 0.1))
        return self.see(), {}


class NotFinite(Vector):
    def see(self):
        return np.array([np.nan if self.count == 7 else self.value], dtype=np.float32)


class Outside(Vector):
    def see(self):
        return np.array([2.0 if self.count == 7 else self.value], dtype=np.float32)


class InfiniteReward(Vector):
    def reward(self):
        return np.inf if self.count == 3 else 1.0


class Shared(Vector):
    """All instances move one number."""

    total = 0

    def reset(self, *, seed=None, options=None):
        Shared.total = 0
        return super().reset(seed=seed)

    def see(self):
        return np.array([np.tanh(self.value + 0.01 * Shared.total)], dtype=np.float32)

    def step(self, action):
        Shared.total += 1
        return super().step(action)


class Remembering(Vector):
    """A reset does not forget everything: replaying an episode does not bring it back."""

    lives = 0

    def reset(self, *, seed=None, options=None):
        self.lives += 1
        return super().reset(seed=seed)

    def reward(self):
        return float(self.lives)


class Raising(Vector):
    def step(self, action):
        raise RuntimeError("the motor is off")


class WrongShape(Vector):
    def see(self):
        return np.zeros(3, dtype=np.float32)


class WrongDtype(Vector):
    """Says float32, gives float64: only Gymnasium's own checker can see it."""

    def see(self):
        return np.array([self.value], dtype=np.float64)


class Unbounded(Vector):
    def __init__(self):
        super().__init__()
        self.action_space = spaces.Box(-np.inf, np.inf, (1,), dtype=np.float32)


class ManyDiscrete(Vector):
    def __init__(self):
        super().__init__()
        self.action_space = spaces.MultiDiscrete([2, 3])


class TextSeen(Vector):
    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Dict({"mission": spaces.Text(10), "x": spaces.Box(0, 1, (1,))})
