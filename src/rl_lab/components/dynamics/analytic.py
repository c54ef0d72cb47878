"""Analytic dynamics: our worlds written in torch, batched over any leading dimensions, equal to them step for step.

A model has `encode` (observations to latents, [..., Z]), `step` (latents and actions to the next latents), `rewards`
(of actions in latents) and `ended` (the probability that latents are the end of an episode). Discrete actions are
indices, or vectors that stand for their largest entry. Latents are the observations unless a model says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rl_lab.core.ranges import NonNegative


def index_of(actions: Tensor) -> Tensor:
    """Return the indices that discrete actions mean: themselves, or the largest entry of vectors."""
    return actions.argmax(-1) if actions.is_floating_point() else actions


class AnalyticModel:
    """A world that is known: nothing to learn, and by default no end."""

    discrete = False
    num_particles = 1  # of a state while planning: more would not tell more

    def encode(self, observations: Tensor) -> Tensor:
        """Return the latents of observations."""
        return observations

    def step(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return the next latents."""
        raise NotImplementedError

    def rewards(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return the rewards of actions."""
        raise NotImplementedError

    def ended(self, latents: Tensor) -> Tensor:
        """Return the probability that the world has ended."""
        return torch.zeros(latents.shape[:-1], dtype=latents.dtype, device=latents.device)


def _cart_pole_accelerations(force: Tensor, cos: Tensor, sin: Tensor, theta_dot: Tensor) -> tuple[Tensor, Tensor]:
    push = (force + 0.05 * theta_dot.square() * sin) / 1.1
    theta_acceleration = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos.square() / 1.1))
    return push - 0.05 * theta_acceleration * cos / 1.1, theta_acceleration


class QuadraticValue:
    """`best` minus a weighted sum of the squares of latents: what a state at the horizon is worth to a planner.

    Where episodes end, `best` should be about what is still to be had, or ending early would pay.
    """

    def __init__(self, weights: Sequence[NonNegative], best: float = 0.0) -> None:
        self.weights, self.best = list(weights), best

    def __call__(self, latents: Tensor) -> Tensor:
        """Return values."""
        parts = [weight * entry.square() for weight, entry in zip(self.weights, latents.unbind(-1), strict=True)]
        return self.best - torch.stack(parts).sum(0)


class CartPoleModel(AnalyticModel):
    """`tiny/CartPole`: x, x_dot, theta, theta_dot; push left (0) or right (1); reward 1 until it falls."""

    discrete = True

    def step(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return the next latents."""
        x, x_dot, theta, theta_dot = latents.unbind(-1)
        force = 20.0 * index_of(actions).to(latents.dtype) - 10.0
        x_acc, theta_acc = _cart_pole_accelerations(force, theta.cos(), theta.sin(), theta_dot)
        following = (x + 0.02 * x_dot, x_dot + 0.02 * x_acc, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc)
        return torch.stack(following, -1)

    def rewards(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return 1 for every action, the last one too."""
        return torch.ones(latents.shape[:-1], dtype=latents.dtype, device=latents.device)

    def ended(self, latents: Tensor) -> Tensor:
        """Return 1 where the cart is outside or the pole has fallen."""
        return ((latents[..., 0].abs() > 2.4) | (latents[..., 2].abs() > 12 * 2 * math.pi / 360)).to(latents.dtype)


class PendulumModel(AnalyticModel):
    """`tiny/Pendulum`: cos, sin and speed of the angle; a torque in [-1, 1]."""

    def step(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return the next latents."""
        cos, sin, speed = latents.unbind(-1)
        torque = 2.0 * actions[..., 0].clamp(-1.0, 1.0)
        speed = (speed + (15.0 * sin + 3.0 * torque) * 0.05).clamp(-8.0, 8.0)
        turned = 0.05 * speed
        turn_cos, turn_sin = turned.cos(), turned.sin()
        return torch.stack((cos * turn_cos - sin * turn_sin, sin * turn_cos + cos * turn_sin, speed), -1)

    def rewards(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return minus the cost of angle, speed and torque before the step."""
        torque = 2.0 * actions[..., 0].clamp(-1.0, 1.0)
        angle = torch.atan2(latents[..., 1], latents[..., 0])
        return -(angle.square() + 0.1 * latents[..., 2].square() + 0.001 * torque.square())


class PointMassModel(AnalyticModel):
    """`tiny/PointMass`: position and velocity in the plane; a force in [-1, 1]^2."""

    def step(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return the next latents."""
        position, velocity = latents[..., :2], latents[..., 2:]
        velocity = velocity + 0.05 * (4.0 * actions.clamp(-1.0, 1.0) - 2.0 * velocity)
        position = position + 0.05 * velocity
        velocity = velocity * (position.abs() <= 1.5)
        return torch.cat((position.clamp(-1.5, 1.5), velocity), -1)

    def rewards(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return minus the distance to the origin after the step."""
        return -torch.linalg.vector_norm(self.step(latents, actions)[..., :2], dim=-1)


class SwingUpModel(AnalyticModel):
    """`tiny/CartPoleSwingUp`: x, x_dot, cos theta, sin theta, theta_dot; a push in [-1, 1]."""

    def step(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return the next latents."""
        x, x_dot, cos, sin, theta_dot = latents.unbind(-1)
        force = 10.0 * actions[..., 0].clamp(-1.0, 1.0)
        x_acc, theta_acc = _cart_pole_accelerations(force, cos, sin, theta_dot)
        x_dot, theta_dot = x_dot + 0.02 * x_acc, theta_dot + 0.02 * theta_acc
        x, turned = x + 0.02 * x_dot, 0.02 * theta_dot
        turn_cos, turn_sin = turned.cos(), turned.sin()
        return torch.stack(
            (
                x.clamp(-2.4, 2.4),
                x_dot * (x.abs() <= 2.4),
                cos * turn_cos - sin * turn_sin,
                sin * turn_cos + cos * turn_sin,
                theta_dot,
            ),
            -1,
        )

    def rewards(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return the reward of where the step leads."""
        return SwingUpReward()(self.step(latents, actions))


class SwingUpReward:
    """The known reward of `tiny/CartPoleSwingUp`, for planning with learned dynamics: that of having arrived."""

    of_arrival = True

    def __call__(self, latents: Tensor, actions: Tensor | None = None) -> Tensor:
        """Return the reward of having arrived at latents."""
        return (1.0 + latents[..., 2]) / 2 * (1.0 - (latents[..., 0] / 2.4).square() / 2)


class GridWorldModel(AnalyticModel):
    """`tiny/GridWorld`: latents are the rows and columns of agent and goal, read from the picture, in cells.

    `size`, `walls` and `step_penalty` are those of the world.
    """

    discrete = True

    def __init__(self, size: int = 8, walls: bool = False, step_penalty: NonNegative = 0.01) -> None:
        self.size, self.walls, self.step_penalty = size, walls, step_penalty

    def encode(self, observations: Tensor) -> Tensor:
        """Find agent and goal by their colours; a goal that the agent covers is where the agent is."""
        side = observations.shape[-1] // self.size
        red, green = observations[..., 0, ::side, ::side], observations[..., 1, ::side, ::side]
        is_agent, is_goal = (red > 200).flatten(-2), (green > 180).flatten(-2)
        agent = is_agent.to(torch.uint8).argmax(-1)
        goal = torch.where(is_goal.any(-1), is_goal.to(torch.uint8).argmax(-1), agent)
        cells = torch.stack((agent // self.size, agent % self.size, goal // self.size, goal % self.size), -1)
        return cells.to(torch.float32)

    def step(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return the next latents."""
        action = index_of(actions)
        row = latents[..., 0] + (action == 2).to(latents.dtype) - (action == 0).to(latents.dtype)
        column = latents[..., 1] + (action == 1).to(latents.dtype) - (action == 3).to(latents.dtype)
        row, column = row.clamp(0, self.size - 1), column.clamp(0, self.size - 1)
        if self.walls:
            middle = self.size // 2
            blocked = (column == middle) & (row != middle)
            row, column = torch.where(blocked, latents[..., 0], row), torch.where(blocked, latents[..., 1], column)
        return torch.stack((row, column, latents[..., 2], latents[..., 3]), -1)

    def rewards(self, latents: Tensor, actions: Tensor) -> Tensor:
        """Return 1 where the step reaches the goal, else minus the penalty."""
        reached = self.ended(self.step(latents, actions))
        return reached - self.step_penalty * (1.0 - reached)

    def ended(self, latents: Tensor) -> Tensor:
        """Return 1 where the agent is at the goal."""
        return (latents[..., :2] == latents[..., 2:]).all(-1).to(latents.dtype)
