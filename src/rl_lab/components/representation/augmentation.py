"""Augmentation of images by random shifts (Yarats et al. 2021, "DrQ")."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn

from rl_lab.core import noise
from rl_lab.core.batch import Tree, tree_leaves, tree_map
from rl_lab.core.ranges import Range


class RandomShift(nn.Module):
    """Moves each image by up to `pad` pixels in either direction; pixels from beyond an edge repeat that edge.

    Vectors stay as they are. Images of one observation move together.
    """

    def __init__(self, pad: Annotated[int, Range(1, 1_024)] = 3) -> None:
        super().__init__()
        self.pad = pad

    def forward(self, observations: Tree, offsets: Tensor) -> Tree:
        """Move the images [..., C, H, W] of observations by offsets [..., 2], which count from 0 to twice the pad."""
        return tree_map(lambda leaf: self._shift(leaf, offsets) if is_image(leaf) else leaf, observations)

    def sample(self, observations: Tree, generator: torch.Generator | None) -> Tree:
        """Move the images by offsets that are drawn for each of them."""
        images = [leaf for leaf in tree_leaves(observations) if is_image(leaf)]
        if not images:
            return observations
        shape = (*images[0].shape[:-3], 2)
        return self(observations, noise.integers(2 * self.pad + 1, shape, images[0], generator))

    def _shift(self, images: Tensor, offsets: Tensor) -> Tensor:
        channels, height, width = images.shape[-3:]
        flat, moves = images.reshape(-1, channels, height, width), offsets.reshape(-1, 2, 1) - self.pad
        # Padding by repetition and cropping is reading with indices that stop at the edges.
        rows = (torch.arange(height, device=images.device) + moves[:, 0]).clamp(0, height - 1)  # [N, H]
        columns = (torch.arange(width, device=images.device) + moves[:, 1]).clamp(0, width - 1)
        flat = flat.gather(2, rows[:, None, :, None].expand(-1, channels, -1, width))
        return flat.gather(3, columns[:, None, None, :].expand(-1, channels, height, -1)).reshape(images.shape)


def is_image(leaf: Tensor) -> bool:
    """Whether a part of an observation is an image: those come as whole numbers below 256."""
    return leaf.dtype == torch.uint8
