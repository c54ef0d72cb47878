"""Our own NumPy worlds, natively batched, that render to arrays: cart-pole, pendulum, point mass, grid, swing-up."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from rl_lab.core.errors import UserError
from rl_lab.envs.world import World

# Constants of the hot loops are 0-d arrays, for speed (see World); Pendulum's torque is float32 as in Gymnasium.
_GRAVITY, _POLE_MASS, _TOTAL_MASS, _HALF_POLE = np.array(9.8), np.array(0.1), np.array(0.1 + 1.0), np.array(0.5)
_POLE_MOMENT, _FOUR_THIRDS, _CART_POLE_STEP = np.array(0.1 * 0.5), np.array(4.0 / 3.0), np.array(0.02)
_LEFT_END, _RIGHT_END = np.array(-2.4), np.array(2.4)
_PI, _TWO_PI, _FIFTEEN, _PENDULUM_STEP = np.array(np.pi), np.array(2 * np.pi), np.array(15.0), np.array(0.05)
_SPEED_COST, _TOP_SPEED, _BOTTOM_SPEED = np.array(0.1), np.array(8.0), np.array(-8.0)
_ONE, _MINUS_ONE, _TWO = np.array(1, np.float32), np.array(-1, np.float32), np.array(2, np.float32)
_THREE, _TORQUE_COST = np.array(3, np.float32), np.array(0.001, np.float32)
_FLOOR, _WALL = np.array([20, 22, 30], np.uint8), np.array([110, 116, 128], np.uint8)
_GOAL, _AGENT = np.array([60, 200, 90], np.uint8), np.array([230, 80, 60], np.uint8)


def _cart_pole_accelerations(
    force: np.ndarray, cos: np.ndarray, sin: np.ndarray, theta_dot: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the accelerations of cart and pole; the operations and their order are those of Gymnasium's cart-pole."""
    push = (force + _POLE_MOMENT * np.square(theta_dot) * sin) / _TOTAL_MASS
    theta_acceleration = (_GRAVITY * sin - cos * push) / (
        _HALF_POLE * (_FOUR_THIRDS - _POLE_MASS * np.square(cos) / _TOTAL_MASS)
    )
    return push - _POLE_MOMENT * theta_acceleration * cos / _TOTAL_MASS, theta_acceleration


class CartPole(World):
    """Balance a pole on a cart by pushing left (0) or right (1); equal to Gymnasium's `CartPole-v1` step for step.

    Observation: x, x_dot, theta, theta_dot (theta is 0 upright). Reward 1 per step. Terminated when the cart leaves
    +-2.4 or the pole leans by more than 12 degrees; truncated after 500 steps. Solved: mean return 475.
    """

    solved_return = 475.0

    def __init__(self, num_envs: int, *, max_episode_steps: int = 500) -> None:
        bounds = np.array([2.4, 12 * 2 * np.pi / 360])
        high = np.array([2 * bounds[0], np.inf, 2 * bounds[1], np.inf], dtype=np.float32)
        super().__init__(
            num_envs,
            spaces.Box(-high, high, dtype=np.float32),
            spaces.Discrete(2),
            num_variables=4,
            max_episode_steps=max_episode_steps,
        )
        self._forces = np.array([-10.0, 10.0])
        self._bounds = bounds[:, None]
        self._variables = tuple(self._state)  # views
        self._positions, self._velocities = self._state[0::2], self._state[1::2]

    def _initial(self, generator: np.random.Generator) -> np.ndarray:
        return generator.uniform(-0.05, 0.05, size=4)

    def _advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        _, x_dot, theta, theta_dot = self._variables
        x_acc, theta_acc = _cart_pole_accelerations(self._forces[actions], np.cos(theta), np.sin(theta), theta_dot)
        self._positions += _CART_POLE_STEP * self._velocities
        x_dot += _CART_POLE_STEP * x_acc
        theta_dot += _CART_POLE_STEP * theta_acc
        outside = np.abs(self._positions) > self._bounds
        return np.ones(self.num_envs, dtype=np.float32), outside[0] | outside[1]

    def _observe(self) -> np.ndarray:
        return self._state.T.astype(np.float32, order="C")

    def render_frames(self) -> np.ndarray:
        """Draw every row: uint8 [num_envs, 200, 300, 3]."""
        from rl_lab.envs import drawing

        return np.stack([drawing.cart_pole(x, theta) for x, theta in self._positions.T.tolist()])


class Pendulum(World):
    """Swing a rod up and hold it by a torque at its pivot; equal to Gymnasium's `Pendulum-v1` step for step.

    Observation: cos, sin and speed of the angle (0 is upright). The action in [-1, 1] is half the torque, which
    Gymnasium takes in [-2, 2]. Reward: minus (angle^2 + 0.1 speed^2 + 0.001 torque^2). Truncated after 200 steps, never
    terminated. A random policy gets about -1200; solved: mean return -250 (a good controller gets about -150).
    """

    solved_return = -250.0

    def __init__(self, num_envs: int, *, max_episode_steps: int = 200) -> None:
        high = np.array([1.0, 1.0, 8.0], dtype=np.float32)
        super().__init__(
            num_envs,
            spaces.Box(-high, high, dtype=np.float32),
            spaces.Box(-1.0, 1.0, (1,), dtype=np.float32),
            num_variables=2,
            max_episode_steps=max_episode_steps,
        )
        self._theta, self._speed = self._state  # views

    def _initial(self, generator: np.random.Generator) -> np.ndarray:
        high = np.array([np.pi, 1.0])
        return generator.uniform(low=-high, high=high)

    def _advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        theta, speed = self._theta, self._speed
        torque = _TWO * np.minimum(np.maximum(actions[:, 0], _MINUS_ONE), _ONE)
        angle = (theta + _PI) % _TWO_PI - _PI
        costs = np.square(angle) + _SPEED_COST * np.square(speed) + _TORQUE_COST * np.square(torque)
        speed += (_FIFTEEN * np.sin(theta) + _THREE * torque) * _PENDULUM_STEP
        np.minimum(np.maximum(speed, _BOTTOM_SPEED), _TOP_SPEED, out=speed)
        theta += speed * _PENDULUM_STEP
        return np.negative(costs).astype(np.float32), np.zeros(self.num_envs, dtype=bool)

    def _observe(self) -> np.ndarray:
        observations = np.empty((self.num_envs, 3), dtype=np.float32)
        observations[:, 0] = np.cos(self._theta)
        observations[:, 1] = np.sin(self._theta)
        observations[:, 2] = self._speed
        return observations

    def render_frames(self) -> np.ndarray:
        """Draw every row: uint8 [num_envs, 200, 300, 3]."""
        from rl_lab.envs import drawing

        return np.stack([drawing.pendulum(theta) for theta in self._theta.tolist()])


class PointMass(World):
    """Push a point in the plane to the origin and hold it there.

    Observation: position (in +-1.5, walls stop the point) and velocity (in +-2). The action in [-1, 1]^2 is a force
    against damping: velocity += 0.05 (4 action - 2 velocity), position += 0.05 velocity. Starts at rest, uniformly in
    [-1, 1]^2. Reward: minus the distance to the origin after the step. Truncated after 100 steps, never terminated.
    A random policy gets about -85, the controller `-4 position - velocity` about -7; solved: mean return -12.
    """

    solved_return = -12.0

    def __init__(self, num_envs: int, *, max_episode_steps: int = 100) -> None:
        high = np.array([1.5, 1.5, 2.0, 2.0], dtype=np.float32)
        super().__init__(
            num_envs,
            spaces.Box(-high, high, dtype=np.float32),
            spaces.Box(-1.0, 1.0, (2,), dtype=np.float32),
            num_variables=4,
            max_episode_steps=max_episode_steps,
        )
        self._position, self._velocity = self._state[:2], self._state[2:]  # views

    def _initial(self, generator: np.random.Generator) -> np.ndarray:
        return np.concatenate([generator.uniform(-1.0, 1.0, size=2), np.zeros(2)])

    def _advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        position, velocity = self._position, self._velocity
        force = np.minimum(np.maximum(actions.T, -1.0), 1.0)
        velocity += 0.05 * (4.0 * force - 2.0 * velocity)
        position += 0.05 * velocity
        velocity *= np.abs(position) <= 1.5
        np.minimum(np.maximum(position, -1.5), 1.5, out=position)
        distance = np.sqrt(np.square(position[0]) + np.square(position[1]))
        return np.negative(distance).astype(np.float32), np.zeros(self.num_envs, dtype=bool)

    def _observe(self) -> np.ndarray:
        return self._state.T.astype(np.float32, order="C")

    def render_frames(self) -> np.ndarray:
        """Draw every row: uint8 [num_envs, 200, 300, 3]."""
        from rl_lab.envs import drawing

        return np.stack([drawing.point_mass(*row) for row in self._state.T.tolist()])


class CartPoleSwingUp(World):
    """Swing the pole of a cart-pole up from hanging and hold it, with a continuous push of up to 10 newtons.

    Observation: x, x_dot, cos theta, sin theta, theta_dot (cos is 1 upright, at index 2). Reward in [0, 1]:
    (1 + cos theta) / 2, times 1 - (x / 2.4)^2 / 2. Walls at +-2.4 stop the cart. Truncated after 500 steps, never
    terminated. A random policy gets about 20, pumping energy and then balancing about 440; solved: mean return 400.
    """

    solved_return = 400.0

    def __init__(self, num_envs: int, *, max_episode_steps: int = 500) -> None:
        high = np.array([2.4, np.inf, 1.0, 1.0, np.inf], dtype=np.float32)
        super().__init__(
            num_envs,
            spaces.Box(-high, high, dtype=np.float32),
            spaces.Box(-1.0, 1.0, (1,), dtype=np.float32),
            num_variables=4,
            max_episode_steps=max_episode_steps,
        )
        self._variables = tuple(self._state)  # views
        self._positions, self._velocities = self._state[0::2], self._state[1::2]

    def _initial(self, generator: np.random.Generator) -> np.ndarray:
        return np.array([0.0, 0.0, np.pi, 0.0]) + generator.uniform(-0.05, 0.05, size=4)

    def _advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x, x_dot, theta, theta_dot = self._variables
        force = 10.0 * np.minimum(np.maximum(actions[:, 0], -1.0), 1.0)
        x_acc, theta_acc = _cart_pole_accelerations(force, np.cos(theta), np.sin(theta), theta_dot)
        # Velocities first: with Gymnasium's order a free pole would gain energy until it swings over by itself.
        x_dot += _CART_POLE_STEP * x_acc
        theta_dot += _CART_POLE_STEP * theta_acc
        self._positions += _CART_POLE_STEP * self._velocities
        x_dot *= np.abs(x) <= _RIGHT_END
        np.minimum(np.maximum(x, _LEFT_END), _RIGHT_END, out=x)
        rewards = (1.0 + np.cos(theta)) / 2 * (1.0 - np.square(x / 2.4) / 2)
        return rewards.astype(np.float32), np.zeros(self.num_envs, dtype=bool)

    def _observe(self) -> np.ndarray:
        theta = self._positions[1]
        observations = np.empty((self.num_envs, 5), dtype=np.float32)
        observations[:, :2] = self._state[:2].T
        observations[:, 2] = np.cos(theta)
        observations[:, 3] = np.sin(theta)
        observations[:, 4] = self._velocities[1]
        return observations

    def render_frames(self) -> np.ndarray:
        """Draw every row: uint8 [num_envs, 200, 300, 3]."""
        from rl_lab.envs import drawing

        return np.stack([drawing.cart_pole(x, theta) for x, theta in self._positions.T.tolist()])


class GridWorld(World):
    """Walk on a grid of `size` x `size` cells to the goal, seen as a picture uint8 [3, H, W] of at most 32 x 32 pixels.

    Actions: 0 up, 1 right, 2 down, 3 left; walls and edges stop the agent. Reaching the goal brings 1 and terminates;
    every other step costs `step_penalty`. Truncated after 100 steps. The agent starts on a random free cell, the goal
    is the lower right corner, or another random free cell with `random_goal`. `walls` puts a wall with one gap across
    the middle. At the defaults a random policy gets about -0.55, the shortest way 0.94; solved: mean return 0.9.
    """

    solved_return = 0.9

    def __init__(
        self,
        num_envs: int,
        *,
        size: int = 8,
        walls: bool = False,
        random_goal: bool = False,
        step_penalty: float = 0.01,
        max_episode_steps: int = 100,
    ) -> None:
        if not 2 <= size <= 32:
            raise UserError(
                "a grid has 2 to 32 cells on a side", key="environment.kwargs.size", value=size, remedy="such as 8"
            )
        side = size * (32 // size)
        super().__init__(
            num_envs,
            spaces.Box(0, 255, (3, side, side), dtype=np.uint8),
            spaces.Discrete(4),
            num_variables=4,
            max_episode_steps=max_episode_steps,
            dtype=np.int64,
        )
        self._walls = np.zeros((size, size), dtype=bool)
        if walls:
            self._walls[:, size // 2] = True
            self._walls[size // 2, size // 2] = False
        self._random_goal, self._penalty = random_goal, np.float32(step_penalty)
        self._cells = [(row, column) for row, column in np.argwhere(~self._walls).tolist()]
        self._moves = np.array([[-1, 0, 1, 0], [0, 1, 0, -1]])
        self._rows = np.arange(num_envs)
        self._agent, self._goal = self._state[:2], self._state[2:]  # views
        paint = np.where(self._walls, _WALL[:, None, None], _FLOOR[:, None, None]).astype(np.uint8)
        self._background = np.repeat(np.repeat(paint, side // size, axis=1), side // size, axis=2)

    def _initial(self, generator: np.random.Generator) -> np.ndarray:
        goal = len(self._cells) - 1
        if self._random_goal:
            goal = int(generator.integers(len(self._cells)))
        start = int(generator.integers(len(self._cells) - 1))
        return np.array([*self._cells[start + (start >= goal)], *self._cells[goal]])

    def _advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        target = np.clip(self._agent + self._moves[:, actions], 0, len(self._walls) - 1)
        self._agent[:] = np.where(self._walls[target[0], target[1]], self._agent, target)
        reached = (self._agent == self._goal).all(axis=0)
        return np.where(reached, np.float32(1.0), -self._penalty), reached

    def _observe(self) -> np.ndarray:
        size, side = len(self._walls), self._background.shape[-1]
        images = np.repeat(self._background[None], self.num_envs, axis=0)
        cells = images.reshape(self.num_envs, 3, size, side // size, size, side // size)
        cells[self._rows, :, self._goal[0], :, self._goal[1], :] = _GOAL[:, None, None]
        cells[self._rows, :, self._agent[0], :, self._agent[1], :] = _AGENT[:, None, None]
        return images

    def render_frames(self) -> np.ndarray:
        """Draw every row: uint8 [num_envs, 200, 200, 3]."""
        from rl_lab.envs import drawing

        return np.stack([drawing.grid(row[:2], row[2:], self._walls) for row in self._state.T.tolist()])
