"""Gumbel tree search for discrete actions (Danihelka et al. 2022), batched over environments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from rl_lab.components.distributions import one_hot
from rl_lab.components.planners.mppi import Plan
from rl_lab.core import noise
from rl_lab.core.ranges import Count, NonNegative, Positive, Range

LOGITS, VISITS, REWARDS, DISCOUNTS, VALUES = range(5)  # of an edge; a discount is zero where the world ends
RAW, MEAN, COUNT = range(3)  # of a node: its own value estimate, the mean of what was found below it, its visits


class Tree(NamedTuple):
    """Nodes of all environments, one after another; an edge belongs to a node and the action taken there."""

    latents: Tensor  # [nodes, Z]
    nodes: Tensor  # [nodes, 3]
    edges: Tensor  # [nodes, 5, A]
    children: Tensor  # [nodes, A]: the node behind an edge, or -1
    roots: Tensor  # [E]: the nodes where the environments are


def halving(num_actions: int, num_simulations: int) -> list[int]:
    """Return, for every simulation, how often the root action that it takes was taken before (sequential halving).

    All actions get equally many visits in a round; then the better half goes on, to two at least.
    """
    if num_actions < 2:
        return list(range(num_simulations))
    num_rounds, left, seen = math.ceil(math.log2(num_actions)), num_actions, 0
    schedule: list[int] = []
    while len(schedule) < num_simulations:
        for _ in range(max(1, num_simulations // (num_rounds * left))):
            schedule += [seen] * left
            seen += 1
        left = max(2, left // 2)
    return schedule[:num_simulations]


class GumbelSearch:
    """Simulates a few action sequences where policy and value find them promising; improves the policy at the root.

    `Plan.mean` are the weights of the improved policy. Without exploration there is no noise at the root.
    """

    def __init__(
        self,
        action: Count,
        num_simulations: Annotated[int, Range(1, 10_000)] = 32,
        max_considered: Count = 16,
        max_depth: Annotated[int, Range(1, 1000)] = 16,
        gumbel_scale: NonNegative = 1.0,
        value_scale: Positive = 0.1,
        visit_offset: NonNegative = 50.0,
    ) -> None:
        self.action, self.num_simulations, self.max_depth = action, num_simulations, max_depth
        self.horizon = 1  # steps of the plan that the next one could start from
        self.gumbel_scale, self.value_scale, self.visit_offset = gumbel_scale, value_scale, visit_offset
        self._schedule = halving(min(max_considered, action), num_simulations)

    def initial_mean(self, num_envs: int, like: Tensor) -> Tensor:
        """Return zeros: every search begins anew."""
        return torch.zeros(num_envs, 1, self.action, dtype=like.dtype, device=like.device)

    @torch.no_grad()
    def plan(
        self,
        latents: Tensor,
        previous_mean: Tensor,
        *,
        dynamics: Callable[[Tensor, Tensor], Tensor],
        reward: Callable[[Tensor, Tensor], Tensor],
        value: Callable[[Tensor], Tensor],
        discount: float,
        policy: Any = None,
        termination: Callable[[Tensor], Tensor] | None = None,
        explore: bool = False,
        generator: torch.Generator | None = None,
    ) -> Plan:
        """Decide one action for each of the latents [E, Z]."""

        def logits_of(states: Tensor) -> Tensor:
            return states.new_zeros(len(states), self.action) if policy is None else policy.logits(states)

        tree = self._begin(latents, logits_of(latents), value(latents))
        gumbel = latents.new_zeros(len(latents), self.action)
        if explore:
            gumbel = -self.gumbel_scale * noise.exponential(tuple(gumbel.shape), gumbel, generator).log()
        for simulation in range(self.num_simulations):
            path = self._descend(tree, gumbel, simulation)
            parent, code, _ = path[-1]
            states = tree.latents.index_select(0, parent)
            following = dynamics(states, code)
            alive = 1.0 if termination is None else 1.0 - (termination(following) > 0.5).to(latents.dtype)
            children, taken = tree.children.index_select(0, parent), code > 0
            leaf = torch.where(taken, children, -1).amax(1)
            leaf = torch.where(leaf < 0, tree.roots + simulation + 1, leaf)  # at the greatest depth it may exist
            tree.children.index_copy_(0, parent, torch.where(taken, leaf.unsqueeze(1), children))
            edges, found = tree.edges.index_select(0, parent), value(following)
            gained = torch.stack([reward(states, code), discount * alive * torch.ones_like(found)], 1)
            edges[:, REWARDS : DISCOUNTS + 1] += code.unsqueeze(1) * (
                gained.unsqueeze(2) - edges[:, REWARDS : DISCOUNTS + 1]
            )
            tree.edges.index_copy_(0, parent, edges)
            tree.latents.index_copy_(0, leaf, following)
            tree.edges[:, LOGITS].index_copy_(0, leaf, logits_of(following))
            count = tree.nodes.index_select(0, leaf)[:, COUNT]
            tree.nodes.index_copy_(0, leaf, torch.stack([found, found, count + 1.0], 1))
            self._back_up(tree, path, found)
        scores, improved = self._root_scores(tree, gumbel)
        visits = tree.edges.index_select(0, tree.roots)[:, VISITS]
        best = scores.masked_fill(visits < visits.amax(1, keepdim=True), -torch.inf).argmax(1)
        weights = improved.softmax(-1).unsqueeze(1)
        values = tree.nodes.index_select(0, tree.roots)[:, MEAN : MEAN + 1]
        return Plan(one_hot(best, self.action), weights, torch.zeros_like(weights), values)

    def _begin(self, latents: Tensor, logits: Tensor, values: Tensor) -> Tree:
        num_nodes = len(latents) * (self.num_simulations + 1)
        roots = torch.arange(len(latents), device=latents.device) * (self.num_simulations + 1)
        tree = Tree(
            latents=latents.new_zeros(num_nodes, latents.shape[-1]),
            nodes=values.new_zeros(num_nodes, 3),
            edges=values.new_zeros(num_nodes, 5, self.action),
            children=torch.full((num_nodes, self.action), -1, device=latents.device),
            roots=roots,
        )
        tree.latents.index_copy_(0, roots, latents)
        tree.nodes.index_copy_(0, roots, torch.stack([values, values, torch.ones_like(values)], 1))
        tree.edges[:, LOGITS].index_copy_(0, roots, logits)
        return tree

    def _descend(self, tree: Tree, gumbel: Tensor, simulation: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return nodes, codes of actions and whether they belong to the path, from the root to an edge that is new.

        All environments take as many steps as the deepest may need; the others stay at their last edge.
        """
        node = tree.roots
        scores, _ = self._root_scores(tree, gumbel)
        wanted = tree.edges.index_select(0, node)[:, VISITS] == self._schedule[simulation]
        code = one_hot(scores.masked_fill(~wanted, -torch.inf).argmax(1), self.action)
        going = torch.ones_like(node, dtype=torch.bool)
        path = [(node, code, going)]
        for _ in range(1, min(simulation + 1, self.max_depth)):
            child = torch.where(code > 0, tree.children.index_select(0, node), -1).amax(1)
            going = going & (child >= 0)
            if going.device.type == "cpu" and not going.any():
                break  # a GPU is never waited for: there the steps that are left change nothing
            node = torch.where(going, child, node)
            code = torch.where(going.unsqueeze(1), self._interior(tree, node), code)
            path.append((node, code, going))
        return path

    def _back_up(self, tree: Tree, path: list[tuple[Tensor, Tensor, Tensor]], found: Tensor) -> None:
        """Tell every node on the path what was found at its end."""
        child_value = found
        for parent, code, on_path in reversed(path):
            edges, nodes = tree.edges.index_select(0, parent), tree.nodes.index_select(0, parent)
            here = on_path.to(found.dtype)
            gained = (code.unsqueeze(1) * edges[:, REWARDS : DISCOUNTS + 1]).sum(2)
            found = torch.where(on_path, gained[:, 0] + gained[:, 1] * found, found)
            taken = here.unsqueeze(1) * code
            edges[:, VISITS] += taken
            edges[:, VALUES] += taken * (child_value.unsqueeze(1) - edges[:, VALUES])
            nodes[:, MEAN] += here * (found - nodes[:, MEAN]) / (nodes[:, COUNT] + 1.0)
            nodes[:, COUNT] += here
            tree.edges.index_copy_(0, parent, edges)
            tree.nodes.index_copy_(0, parent, nodes)
            child_value = torch.where(on_path, nodes[:, MEAN], child_value)

    def _root_scores(self, tree: Tree, gumbel: Tensor) -> tuple[Tensor, Tensor]:
        """Return what ranks the root's actions, with noise, and the improved logits, without."""
        edges, nodes = tree.edges.index_select(0, tree.roots), tree.nodes.index_select(0, tree.roots)
        logits, completed = edges[:, LOGITS], self._completed_values(edges, nodes[:, RAW])
        ranked = gumbel + logits - logits.amax(-1, keepdim=True) + completed
        return ranked.clamp(min=-1e9), logits + completed

    def _interior(self, tree: Tree, node: Tensor) -> Tensor:
        """Choose so that visits come to follow the improved policy; return codes."""
        edges, raw_values = tree.edges.index_select(0, node), tree.nodes.index_select(0, node)[:, RAW]
        wanted = (edges[:, LOGITS] + self._completed_values(edges, raw_values)).softmax(-1)
        scores = wanted - edges[:, VISITS] / (1.0 + edges[:, VISITS].sum(-1, keepdim=True))
        return one_hot(scores.argmax(-1), self.action)

    def _completed_values(self, edges: Tensor, raw_values: Tensor) -> Tensor:
        """Return scaled action values; an action never tried gets the mix of the node's value and of those tried."""
        logits, visits, rewards, discounts, behind = edges.unbind(1)
        values, tried = rewards + discounts * behind, visits > 0
        total, least = visits.sum(-1), torch.finfo(visits.dtype).tiny
        prior = logits.softmax(-1).clamp(min=least) * tried
        of_tried = (prior * values).sum(-1) / prior.sum(-1).clamp(min=least)
        mixed = (raw_values + total * of_tried) / (total + 1.0)
        completed = torch.where(tried, values, mixed.unsqueeze(-1))
        low, high = completed.aminmax(dim=-1, keepdim=True)
        scale = self.value_scale * (self.visit_offset + visits.amax(-1, keepdim=True))
        return scale * (completed - low) / (high - low).clamp(min=1e-8)
