"""Observations in and out of a world model: vectors, images, or a dict of both, encoded and decoded together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_lab.components.layers import Activation, Normalization, Stack
from rl_lab.components.twohot import symexp, symlog
from rl_lab.core.batch import Tree
from rl_lab.core.errors import UserError
from rl_lab.core.ranges import Count, NonNegative

Shape = Count | Sequence[Count]  # a vector's length, or [C, H, W]
Part = Callable[..., nn.Module]
ONLY = "observation"  # the name of an observation that is not a dict


class VectorEncoder(nn.Module):
    """A stack of dense layers on vectors, which `symlog` may compress first.

    `keeps_size`: a norm behind the first layer lets the direction of a vector through, not its length ('Dense').
    """

    def __init__(
        self,
        inputs: Count,
        units: Count,
        num_layers: Count = 3,
        symlog: bool = True,
        activation: Activation = "silu",
        norm: Normalization = "rms",
        keeps_size: bool = False,
    ) -> None:
        super().__init__()
        self.symlog = symlog
        self.network = Stack(inputs, 0, units, num_layers, activation=activation, norm=norm, keeps_size=keeps_size)
        self.outputs = units

    def forward(self, vectors: Tensor) -> Tensor:
        """Encode [..., inputs] as [..., outputs]."""
        return self.network(symlog(vectors) if self.symlog else vectors)


class VectorDecoder(nn.Module):
    """A stack of dense layers to vectors, which are predicted in symlog space if `symlog` says so."""

    def __init__(
        self,
        inputs: Count,
        outputs: Count,
        units: Count,
        num_layers: Count = 3,
        symlog: bool = True,
        activation: Activation = "silu",
        norm: Normalization = "rms",
    ) -> None:
        super().__init__()
        self.symlog = symlog
        self.network = Stack(inputs, outputs, units, num_layers, activation=activation, norm=norm)

    def forward(self, features: Tensor) -> Tensor:
        """Return predictions [..., outputs]."""
        return self.network(features).float()

    def target(self, vectors: Tensor) -> Tensor:
        """Return what is to be predicted of vectors."""
        return symlog(vectors) if self.symlog else vectors

    def observation(self, predictions: Tensor) -> Tensor:
        """Return the vectors that predictions mean."""
        return symexp(predictions) if self.symlog else predictions


class ObservationEncoder(nn.Module):
    """One network for all vectors of an observation side by side, one for all its images."""

    def __init__(
        self,
        inputs: Shape | Mapping[str, Shape],
        vector: Part | None = None,  # vector(inputs=12), such as a partial VectorEncoder
        image: Part | None = None,  # image(inputs=[3, 64, 64]), such as a partial PooledEncoder
    ) -> None:
        super().__init__()
        self.vectors, self.images = sort(inputs)
        self.vector = made(vector, "vector", inputs=sum(self.vectors.values())) if self.vectors else None
        self.image = made(image, "image", inputs=joined_shape(self.images)) if self.images else None
        self.outputs = sum(part.outputs for part in (self.vector, self.image) if part is not None)

    def forward(self, observations: Tree) -> Tensor:
        """Encode observations with any leading dimensions as [..., outputs]."""
        seen = observations if isinstance(observations, Mapping) else {ONLY: observations}
        parts = []
        if self.vector is not None:
            parts.append(self.vector(torch.cat([seen[name].float() for name in self.vectors], -1)))
        if self.image is not None:
            images = torch.cat([seen[name] for name in self.images], -3)
            parts.append(self.image(images.flatten(0, -4)).unflatten(0, images.shape[:-3]))
        return parts[0] if len(parts) == 1 else torch.cat([part.to(parts[0].dtype) for part in parts], -1)


class ObservationDecoder(nn.Module):
    """One network that predicts all vectors of an observation, one that predicts all its images.

    `weight` multiplies the squared errors: a half makes them those of Gaussians of variance one.
    """

    pure = ("loss",)  # methods without chance, which may be compiled

    def __init__(
        self,
        inputs: Count,
        outputs: Shape | Mapping[str, Shape],
        vector: Part | None = None,  # vector(inputs=512, outputs=12), such as a partial VectorDecoder
        image: Part | None = None,  # image(inputs=512, outputs=[3, 64, 64]), such as a partial PooledDecoder
        weight: NonNegative = 1.0,
    ) -> None:
        super().__init__()
        self.vectors, self.images = sort(outputs)
        self.single = not isinstance(outputs, Mapping)
        sizes, shapes = self.vectors.values(), self.images
        self.vector = made(vector, "vector", inputs=inputs, outputs=sum(sizes)) if self.vectors else None
        self.image = made(image, "image", inputs=inputs, outputs=joined_shape(shapes)) if self.images else None
        self.weight = weight

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        """Return raw predictions by name: images as fractions of 255, vectors in the space of their targets."""
        predictions: dict[str, Tensor] = {}
        if self.vector is not None:
            parts = self.vector(features).split(list(self.vectors.values()), -1)
            predictions |= dict(zip(self.vectors, parts, strict=True))
        if self.image is not None:
            images = self.image(features.flatten(0, -2)).unflatten(0, features.shape[:-1])
            channels = [shape[0] for shape in self.images.values()]
            predictions |= dict(zip(self.images, images.split(channels, -3), strict=True))
        return predictions

    def targets(self, observations: Tree) -> dict[str, Tensor]:
        """Return what is to be predicted of observations, by name."""
        seen = observations if isinstance(observations, Mapping) else {ONLY: observations}
        targets = {name: seen[name].float() / 255.0 for name in self.images}
        if self.vector is not None:
            targets |= {name: self.vector.target(seen[name].float()) for name in self.vectors}
        return targets

    def errors(self, predictions: Mapping[str, Tensor], observations: Tree) -> Tensor:
        """Return squared errors, summed over everything that was observed."""
        targets = self.targets(observations)
        found = [
            (predicted - targets[name]).square().sum((-3, -2, -1) if name in self.images else -1)
            for name, predicted in predictions.items()
        ]
        return sum(found[1:], found[0])

    def loss(self, predictions: Mapping[str, Tensor], observations: Tree) -> Tensor:
        """Return the weighed errors."""
        return self.weight * self.errors(predictions, observations)

    def decode(self, features: Tensor) -> Tree:
        """Return the observations that features mean: images uint8, vectors in their own units."""
        decoded = {}
        for name, predicted in self(features).items():
            if name in self.images:
                decoded[name] = (predicted * 255.0).round().clamp(0.0, 255.0).to(torch.uint8)
            else:
                assert self.vector is not None
                decoded[name] = self.vector.observation(predicted)
        return decoded[ONLY] if self.single else decoded


def sort(shapes: Shape | Mapping[str, Shape]) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Return the vectors and the images of an observation by name."""
    named = shapes if isinstance(shapes, Mapping) else {ONLY: shapes}
    vectors = {name: shape for name, shape in named.items() if isinstance(shape, int)}
    images = {name: list(shape) for name, shape in named.items() if not isinstance(shape, int)}
    return vectors, images


def made(part: Part | None, kind: str, **sizes: Any) -> nn.Module:
    """Make the part for vectors or images, which must be there where observations have some."""
    if part is None:
        raise UserError(
            f"the observations have {'an' if kind == 'image' else 'a'} {kind}, and no part is given for it",
            key=kind,
            remedy="give one, as a partial",
        )
    try:
        return part(**sizes)
    except UserError as error:
        raise error.under(kind) from error


def joined_shape(images: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the shape of all images side by side in their channels."""
    shapes = list(images.values())
    if any(list(shape[1:]) != list(shapes[0][1:]) for shape in shapes):
        raise ValueError(f"images of different sizes cannot be read together: {dict(images)}")
    return [sum(shape[0] for shape in shapes), *shapes[0][1:]]
