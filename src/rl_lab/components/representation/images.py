"""Image networks of Dreamer: pooled convolutions with norms (v3), strided ones (v1, v2), and their mirror images.

Encoders take uint8 images [R, C, H, W]; decoders return images as fractions of 255.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.fused import Resize, activate, fuses
from rl_lab.components.layers import (
    ACTIVATIONS,
    EPSILON,
    Activation,
    BlockLinear,
    Dense,
    Linear,
    Norm,
    initialize,
)
from rl_lab.core.errors import UserError
from rl_lab.core.ranges import Count

MULTIPLIERS = (2, 3, 4, 4)
FEW_CHANNELS = 4


class PooledEncoder(nn.Module):
    """Convolutions of stride one, each followed by max-pooling of 2 x 2, a norm over the channels and SiLU."""

    taps: Tensor

    def __init__(
        self, inputs: Sequence[Count], depth: Count, multipliers: Sequence[Count] = MULTIPLIERS, kernel: Count = 5
    ) -> None:
        super().__init__()
        widths, side = _levels(inputs, depth, multipliers)
        self.convolutions = nn.ModuleList(
            _convolution(a, b, kernel) for a, b in zip([inputs[0], *widths[:-1]], widths, strict=True)
        )
        self.norms = nn.ModuleList(Norm(width) for width in widths)
        self.outputs = widths[-1] * side[0] * side[1]
        self._folds = inputs[0] <= FEW_CHANNELS and kernel in (3, 5)
        self.register_buffer("taps", _taps(kernel) if self._folds else torch.empty(0), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Encode [R, C, H, W] as [R, outputs]."""
        layers = list(zip(self.convolutions, self.norms, strict=True))
        if self._folds and fuses(images):
            (convolution, norm), *layers = layers
            values = _activated(self._products(images, convolution.weight), convolution.bias, norm, "choose")
        else:
            values = _scaled(images).contiguous(memory_format=torch.channels_last)
        for convolution, norm in layers:
            if fuses(values):
                products = F.conv2d(values, convolution.weight, padding="same")
                values = _activated(products, convolution.bias, norm, "halve")
            else:
                values = _over_channels(norm, F.max_pool2d(convolution(values), 2))
        return values.permute(0, 2, 3, 1).flatten(1)

    def _products(self, images: Tensor, weight: Tensor) -> Tensor:
        """Convolve [R, C, H, W] to [R, 4 * outputs, H / 2, W / 2]: the four pixels of which the largest is kept.

        Tensor cores have no use for three channels. Four pixels taken for one have twelve, and the same sums are a
        convolution with kernels of 3 x 3; four more channels, of zero weight, make them sixteen.
        """
        folded = F.pixel_unshuffle(images, 2)
        missing = -folded.shape[1] % 8
        values = _scaled(F.pad(folded, (0, 0, 0, 0, 0, missing)).contiguous(memory_format=torch.channels_last))
        kernels = torch.einsum("oits,pryt,qzxs->pqoirzyx", weight, self.taps, self.taps).flatten(3, 5).flatten(0, 2)
        return F.conv2d(values, F.pad(kernels, (0, 0, 0, 0, 0, missing)), padding=1)


class PooledDecoder(nn.Module):
    """The mirror image: each convolution doubles the size of the picture.

    The small picture at the start comes from the deterministic part in blocks and from the stochastic part through
    two layers.
    """

    def __init__(
        self,
        inputs: Count,
        outputs: Sequence[Count],
        deter: Count,
        depth: Count,
        units: Count,
        multipliers: Sequence[Count] = MULTIPLIERS,
        kernel: Literal[3, 5] = 5,
        num_blocks: Count = 8,
    ) -> None:
        super().__init__()
        widths, (height, width) = _levels(outputs, depth, multipliers)
        self._deter, self._shape = deter, (num_blocks, height, width, widths[-1] // num_blocks)
        if widths[-1] % num_blocks:
            raise ValueError(f"{widths[-1]} channels cannot be divided into {num_blocks} blocks")
        size = height * width * widths[-1]
        self.from_deter = BlockLinear(deter, size, num_blocks)
        self.from_stoch = Dense(inputs - deter, 2 * units)
        self.place = Linear(2 * units, size)
        self.norm = Norm(widths[-1])
        self.convolutions = nn.ModuleList(
            DoublingConvolution(a, b, kernel) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.norms = nn.ModuleList(Norm(width) for width in widths[-2::-1])
        self.output = DoublingConvolution(widths[0], outputs[0], kernel)

    def forward(self, features: Tensor) -> Tensor:
        """Return images [R, C, H, W] of features [R, F]."""
        deter, stoch = features.split([self._deter, features.shape[-1] - self._deter], -1)
        blocks = self.from_deter(deter).unflatten(-1, self._shape).movedim(1, 3).flatten(3)  # [R, H, W, channels]
        values = blocks + self.place(self.from_stoch(stoch)).view_as(blocks)
        values = self.norm.activated(values, F.silu).permute(0, 3, 1, 2)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            if fuses(values):
                values = _activated(convolution.products(values), convolution.convolution.bias, norm, "double")
            else:
                values = _over_channels(norm, convolution(values))
        return self.output(values).float().sigmoid()


class DoublingConvolution(nn.Module):
    """A convolution of stride one on a picture whose pixels were doubled, without ever making that picture.

    An output pixel sees each pixel of the small picture once or twice, in a pattern that depends only on whether its
    row and column are even: so the same sums are four convolutions with kernels of 3 x 3, made by adding up entries.
    """

    taps: Tensor

    def __init__(self, inputs: Count, outputs: Count, kernel: Literal[3, 5] = 5) -> None:
        super().__init__()
        self.convolution = _convolution(inputs, outputs, kernel)
        taps = _taps(kernel).sum(1)  # [parity, offset in the small picture + 1, entry of the kernel]
        self.register_buffer("taps", taps, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Map [R, inputs, H, W] to [R, outputs, 2 H, 2 W]."""
        assert self.convolution.bias is not None
        values = self.products(images, self.convolution.bias.repeat(4)).permute(0, 2, 3, 1)
        rows = values.unflatten(-1, (2, 2, -1)).transpose(2, 3)  # [R, H, 2, W, 2, outputs]
        return rows.flatten(3, 4).flatten(1, 2).permute(0, 3, 1, 2)

    def products(self, images: Tensor, bias: Tensor | None = None) -> Tensor:
        """Map [R, inputs, H, W] to [R, 4 * outputs, H, W]: four pixels, of the even row, then of the odd one."""
        weight = self.convolution.weight
        kernels = torch.einsum("oits,pyt,qxs->pqoiyx", weight, self.taps, self.taps).flatten(0, 2)
        return F.conv2d(images, kernels, bias, padding=1)


class StridedEncoder(nn.Module):
    """Convolutions of stride two without padding; the number of channels doubles with each."""

    def __init__(
        self,
        inputs: Sequence[Count],
        depth: Count = 32,
        kernels: Sequence[Count] = (4, 4, 4, 4),
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        widths = [depth * 2**i for i in range(len(kernels))]
        self.convolutions = nn.ModuleList(
            _convolution(a, b, kernel, stride=2)
            for a, b, kernel in zip([inputs[0], *widths[:-1]], widths, kernels, strict=True)
        )
        sides = list(inputs[1:])
        for kernel in kernels:
            sides = [(side - kernel) // 2 + 1 for side in sides]
        if min(sides) < 1:
            raise UserError(
                f"images of {inputs[1]} x {inputs[2]} pixels are too small for these kernels",
                key="kernels",
                value=list(kernels),
                remedy="use fewer of them",
            )
        self.outputs = widths[-1] * sides[0] * sides[1]
        self._activation = ACTIVATIONS[activation]

    def forward(self, images: Tensor) -> Tensor:
        """Encode [R, C, H, W] as [R, outputs]."""
        values = images.float() / 255.0 - 0.5
        for convolution in self.convolutions:
            values = self._activation(convolution(values))
        return values.flatten(1)


class StridedDecoder(nn.Module):
    """Transposed convolutions of stride two from a picture of one pixel; `kernels` decide how large it becomes."""

    def __init__(
        self,
        inputs: Count,
        outputs: Sequence[Count],
        depth: Count = 32,
        kernels: Sequence[Count] = (5, 5, 6, 6),
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        widths = [depth * 2**i for i in reversed(range(len(kernels) - 1))]
        first = 2 * depth * 2 ** len(kernels)
        side = 1
        for kernel in kernels:
            side = 2 * (side - 1) + kernel
        if list(outputs[1:]) != [side, side]:
            raise UserError(
                f"these kernels make images of {side} x {side} pixels, not of {outputs[1]} x {outputs[2]}",
                key="kernels",
                value=list(kernels),
                remedy="[5, 5, 6, 6] makes 64 x 64, [5, 6, 6] makes 32 x 32; environment.resize changes the images",
            )
        self.dense = Linear(inputs, first, initialization="glorot")
        self.convolutions = nn.ModuleList(
            nn.ConvTranspose2d(a, b, kernel, stride=2)
            for a, b, kernel in zip([first, *widths], [*widths, outputs[0]], kernels, strict=True)
        )
        for convolution in self.convolutions:
            nn.init.xavier_uniform_(convolution.weight)
            nn.init.zeros_(convolution.bias)
        self._activation = ACTIVATIONS[activation]

    def forward(self, features: Tensor) -> Tensor:
        """Return images [R, C, H, W] of features [R, F]."""
        first, *others = self.convolutions
        products = self.dense(features) @ first.weight.flatten(1)  # a single pixel leaves nothing to sum over
        values = products.unflatten(-1, first.weight.shape[1:]) + first.bias[:, None, None]
        for convolution in others:
            values = convolution(self._activation(values))
        return values.float() + 0.5


def _taps(kernel: int) -> Tensor:
    """Return which entry of a kernel sees what, if four pixels are one: [parity, parity there, offset + 1, entry]."""
    taps = torch.zeros(2, 2, 3, kernel)
    for parity in range(2):
        for entry in range(kernel):
            offset, there = divmod(parity + entry - kernel // 2, 2)
            taps[parity, there, offset + 1, entry] = 1.0
    return taps


def _scaled(images: Tensor) -> Tensor:
    return images.float() / 255.0 - 0.5


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution: of stride one it keeps the size, of stride two it has no padding."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding="same" if stride == 1 else 0)
    initialize(convolution.weight, inputs * kernel**2, "truncated" if stride == 1 else "glorot")
    assert convolution.bias is not None
    nn.init.zeros_(convolution.bias)
    return convolution


def _activated(products: Tensor, bias: Tensor, norm: Norm, resize: Resize) -> Tensor:
    """Return pictures [R, C, H, W] of the products of a convolution, by one kernel."""
    return activate(products.permute(0, 2, 3, 1), bias, norm.scale, EPSILON["rms"], resize).permute(0, 3, 1, 2)


def _over_channels(norm: Norm, values: Tensor) -> Tensor:
    return norm.activated(values.permute(0, 2, 3, 1), F.silu).permute(0, 3, 1, 2)


def _levels(shape: Sequence[int], depth: int, multipliers: Sequence[int]) -> tuple[list[int], tuple[int, int]]:
    """Return the number of channels at each level, and the size of the smallest picture."""
    scale = 2 ** len(multipliers)
    if len(shape) != 3 or shape[1] % scale or shape[2] % scale:
        raise UserError(
            f"{len(multipliers)} levels need images whose sides are multiples of {scale} pixels, not {list(shape)}",
            key="multipliers",
            value=list(multipliers),
            remedy="use fewer levels, or set environment.resize, such as [64, 64]",
        )
    return [depth * multiplier for multiplier in multipliers], (shape[1] // scale, shape[2] // scale)
