"""Encoders: from observations (vectors, images, or a dict of both) to a latent, plain or made of simplices."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from rl_lab.components.nets import MLP, Activation
from rl_lab.components.normed import NormedMLP, simplex
from rl_lab.core.errors import UserError
from rl_lab.core.ranges import Count

SIDE_TO_KEEP = 4  # convolutions halve a picture as long as this much of it remains


class MLPEncoder(nn.Module):
    """Vectors to a latent."""

    def __init__(
        self, input_dim: Count, latent_dim: Count, hidden: Sequence[Count] = (64,), activation: Activation = "relu"
    ) -> None:
        super().__init__()
        self.network = MLP(input_dim, latent_dim, hidden, activation)

    def forward(self, observations: Tensor) -> Tensor:
        """Encode [..., input_dim] as [..., latent_dim]."""
        return self.network(observations)


class ConvEncoder(nn.Module):
    """Images [..., C, H, W] to a latent: the pixel encoder of TD-MPC2 (Hansen et al. 2024).

    Convolutions without padding, ReLU between them and none after the last. `strides` are 2 as long as four by four
    positions remain, then 1, unless they are stated. `simplex` normalises groups of entries of the latent. Pictures
    of 64 x 64 pixels become 512 features, which are the latent; where the numbers differ a linear layer follows, with
    a layer norm before simplices.
    """

    def __init__(
        self,
        input_dim: Sequence[Count],
        latent_dim: Count,
        channels: Sequence[Count] = (32, 32, 32, 32),
        kernels: Sequence[Count] = (7, 5, 3, 3),
        strides: Sequence[Count] | None = None,
        simplex: Count | None = None,
    ) -> None:
        super().__init__()
        if len(input_dim) != 3:
            raise UserError(
                "images are [C, H, W]",
                key="input_dim",
                value=list(input_dim),
                remedy="use an environment that gives images",
            )
        _check_simplex(latent_dim, simplex)
        side = min(input_dim[1:])
        strides = fitting_strides(side, kernels) if strides is None else strides
        if not len(channels) == len(kernels) == len(strides):
            raise UserError(
                f"{len(channels)} channels, {len(kernels)} kernels and {len(strides)} strides do not fit",
                key="kernels",
                value=list(kernels),
                remedy="give as many of each as there are convolutions",
            )
        if sides_after(side, kernels, strides)[-1] < 1:
            raise UserError(
                f"a picture of {input_dim[1]} x {input_dim[2]} pixels is too small for these convolutions",
                key="kernels",
                value=list(kernels),
                remedy="take fewer or smaller ones, such as [3, 3] with two channels",
            )
        widths = [input_dim[0], *channels]
        layers: list[nn.Module] = []
        for (before, after), kernel, stride in zip(itertools.pairwise(widths), kernels, strides, strict=True):
            layers += [nn.Conv2d(before, after, kernel, stride), nn.ReLU()]
        for layer in layers[::2]:  # torch's own start leaves pictures that differ in a few pixels all but equal
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        self.convolutions = nn.Sequential(*layers[:-1], nn.Flatten())
        height, width = (sides_after(length, kernels, strides)[-1] for length in input_dim[1:])
        features = channels[-1] * height * width
        self.head = nn.Identity() if features == latent_dim else _head(features, latent_dim, simplex)
        self.simplex = simplex

    def forward(self, observations: Tensor) -> Tensor:
        """Encode images as [..., latent_dim]."""
        leading = observations.shape[:-3]
        pixels = observations.reshape(-1, *observations.shape[-3:]).float() / 255.0 - 0.5
        latents = self.head(self.convolutions(pixels)).reshape(*leading, -1)
        return latents if self.simplex is None else simplex(latents, self.simplex)


class DictEncoder(nn.Module):
    """A dict of vectors and images to one latent: the sum of one encoder per entry; `simplex` as in `ConvEncoder`."""

    def __init__(
        self,
        input_dim: Mapping[str, Count | Sequence[Count]],
        latent_dim: Count,
        hidden: Sequence[Count] = (64,),
        channels: Sequence[Count] = (32, 32, 32, 32),
        kernels: Sequence[Count] = (7, 5, 3, 3),
        strides: Sequence[Count] | None = None,
        simplex: Count | None = None,
    ) -> None:
        super().__init__()
        _check_simplex(latent_dim, simplex)
        self.encoders = nn.ModuleDict(
            {
                name: NormedMLP(size, latent_dim, hidden)
                if isinstance(size, int)
                else ConvEncoder(size, latent_dim, channels, kernels, strides)
                for name, size in input_dim.items()
            }
        )
        self.simplex = simplex

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        """Encode every entry and add."""
        latents = sum(encoder(observations[name]) for name, encoder in self.encoders.items())
        return latents if self.simplex is None else simplex(latents, self.simplex)


def fitting_strides(side: int, kernels: Sequence[int]) -> list[int]:
    """Return strides of 2 as long as the convolutions behind leave enough of a picture, then of 1.

    64 pixels and the kernels 7, 5, 3, 3 give 2, 2, 2, 1.
    """
    strides: list[int] = []
    for _ in kernels:
        halved = [*strides, 2, *[1] * (len(kernels) - len(strides) - 1)]
        strides.append(2 if sides_after(side, kernels, halved)[-1] >= SIDE_TO_KEEP else 1)
    return strides


def sides_after(side: int, kernels: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the side of a picture after each convolution; below 1 where it does not fit."""
    sides = []
    for kernel, stride in zip(kernels, strides, strict=True):
        side = (side - kernel) // stride + 1
        sides.append(side)
    return sides


def _head(features: int, latent_dim: int, simplex: int | None) -> nn.Module:
    linear = nn.Linear(features, latent_dim)
    return linear if simplex is None else nn.Sequential(linear, nn.LayerNorm(latent_dim))


def _check_simplex(latent_dim: int, group: int | None) -> None:
    if group is not None and latent_dim % group:
        raise UserError(
            f"{latent_dim} entries cannot be divided into simplices of {group}",
            key="latent_dim",
            value=latent_dim,
            remedy=f"let the latent be a multiple of {group}",
        )
