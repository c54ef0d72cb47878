"""Noise: the draws of algorithms, each from a generator that its caller owns; tests replace them by known numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw standard normal numbers on the device of a tensor, and of its type, but never of less than float32."""
    return _room(shape, like).normal_(generator=generator)


def uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw numbers in [0, 1)."""
    return _room(shape, like).uniform_(generator=generator)


def exponential(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw from the exponential distribution of rate one; minus its logarithm is Gumbel noise."""
    return _room(shape, like).exponential_(generator=generator)


def permutation(length: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw an order of 0 .. length - 1."""
    return torch.randperm(length, device=like.device, generator=generator)


def integers(bound: int, shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw whole numbers from 0 to bound - 1."""
    return torch.randint(bound, shape, device=like.device, generator=generator)


def _room(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
