"""GPU kernels between the convolutions of pictures (`components/fused.py`), in Triton, which comes with torch for GPUs.

Between two convolutions lie a bias, a change of size, a norm over the channels of each pixel and SiLU. As operations of
their own each moves all pictures through memory; and a norm over so few channels is what torch's kernel does worst.
Pictures are [R, H, W, C] in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = tl = None


def _norm_pixels(  # type: ignore[no-untyped-def]
    values,
    biases,
    scales,
    answers,
    num_pixels,
    width,
    channels,
    eps,
    POOLS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    pixels = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (pixels < num_pixels)[:, None] & (columns < channels)[None, :]
    x, y = pixels % width, pixels // width  # pictures lie one below the other
    if POOLS:  # the largest of four pixels
        at = (2 * y * (2 * width) + 2 * x)[:, None] * channels + columns[None, :]
        entries = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
        for k in tl.static_range(1, 4):
            other = tl.load(values + at + (k // 2 * 2 * width + k % 2) * channels, mask=inside, other=0.0)
            entries = tl.maximum(entries, other.to(tl.float32))
    else:  # one of the four groups of channels of a pixel
        source = (y // 2 * (width // 2) + x // 2) * 4 + y % 2 * 2 + x % 2
        entries = tl.load(values + source[:, None] * channels + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(biases + columns, mask=columns < channels, other=0.0).to(tl.float32)
    entries = tl.where(inside, entries + bias[None, :], 0.0)
    root = 1.0 / tl.sqrt(tl.sum(entries * entries, 1) / channels + eps)
    kept = (entries * root[:, None]).to(answers.dtype.element_ty).to(tl.float32)
    scaled = kept * tl.load(scales + columns, mask=columns < channels, other=0.0).to(tl.float32)[None, :]
    tl.store(answers + pixels[:, None] * channels + columns[None, :], scaled * tl.sigmoid(scaled), mask=inside)


def _norm_pixels_backward(  # type: ignore[no-untyped-def]
    values,
    biases,
    scales,
    gradients,
    answers,
    bias_parts,
    scale_parts,
    num_pixels,
    num_blocks,
    width,
    channels,
    eps,
    POOLS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    bias = tl.load(biases + columns, mask=columns < channels, other=0.0).to(tl.float32)
    scale = tl.load(scales + columns, mask=columns < channels, other=0.0).to(tl.float32)
    of_bias, of_scale = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for i in range(num_blocks):
        pixels = (program * num_blocks + i) * ROWS + tl.arange(0, ROWS)
        inside = (pixels < num_pixels)[:, None] & (columns < channels)[None, :]
        x, y = pixels % width, pixels // width
        if POOLS:
            at = (2 * y * (2 * width) + 2 * x)[:, None] * channels + columns[None, :]
            entries = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
            largest = tl.zeros([ROWS, BLOCK], tl.int32)
            for k in tl.static_range(1, 4):
                other = tl.load(values + at + (k // 2 * 2 * width + k % 2) * channels, mask=inside, other=0.0)
                other = other.to(tl.float32)
                largest = tl.where(other > entries, k, largest)
                entries = tl.maximum(entries, other)
        else:
            source = (y // 2 * (width // 2) + x // 2) * 4 + y % 2 * 2 + x % 2
            at = source[:, None] * channels + columns[None, :]
            entries = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
        entries = tl.where(inside, entries + bias[None, :], 0.0)
        root = 1.0 / tl.sqrt(tl.sum(entries * entries, 1) / channels + eps)
        kept = (entries * root[:, None]).to(answers.dtype.element_ty).to(tl.float32)
        share = tl.sigmoid(kept * scale[None, :])
        gradient = tl.load(gradients + pixels[:, None] * channels + columns[None, :], mask=inside, other=0.0)
        gradient = gradient.to(tl.float32) * share * (1.0 + kept * scale[None, :] * (1.0 - share))
        of_scale += tl.sum(gradient * kept, 0)
        gradient = gradient * scale[None, :]
        mean = tl.sum(gradient * kept, 1) / channels
        gradient = root[:, None] * (gradient - kept * mean[:, None])
        of_bias += tl.sum(gradient, 0)
        if POOLS:
            for k in tl.static_range(4):
                place = answers + at + (k // 2 * 2 * width + k % 2) * channels
                tl.store(place, tl.where(largest == k, gradient, 0.0), mask=inside)
        else:
            tl.store(answers + at, gradient, mask=inside)
    tl.store(bias_parts + program * channels + columns, of_bias, mask=columns < channels)
    tl.store(scale_parts + program * channels + columns, of_scale, mask=columns < channels)


_AVAILABLE = triton is not None
_forth: Any = triton.jit(_norm_pixels) if _AVAILABLE else None
_back: Any = triton.jit(_norm_pixels_backward) if _AVAILABLE else None
_ENTRIES, _MAX_PROGRAMS = 1024, 2048


def norm_pixels(values: Tensor, bias: Tensor, scale: Tensor, eps: float, *, pools: bool) -> Tensor:
    """Return pictures [R, H, W, C] of the products of a convolution: resized, bias added, normalised, and SiLU.

    `pools` takes the largest of each four pixels of products [R, 2 H, 2 W, C]; otherwise products [R, H / 2, W / 2,
    4 C] hold four pixels each: of the even row, then of the odd one.
    """
    num_pictures, height, width, channels = values.shape
    shape = (height // 2, width // 2, channels) if pools else (2 * height, 2 * width, channels // 4)
    answers = torch.empty(num_pictures, *shape, dtype=values.dtype, device=values.device)
    block = triton.next_power_of_2(shape[-1])
    rows, num_pixels = max(1, _ENTRIES // block), answers[..., 0].numel()
    _forth[(triton.cdiv(num_pixels, rows),)](
        values,
        bias,
        scale,
        answers,
        num_pixels,
        shape[1],
        shape[-1],
        eps,
        POOLS=pools,
        BLOCK=block,
        ROWS=rows,
    )
    return answers


def norm_pixels_backward(
    values: Tensor, bias: Tensor, scale: Tensor, gradients: Tensor, eps: float, *, pools: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of values, bias and scale; the same in every call, for sums are formed in a fixed order."""
    answers, (_, _, width, channels) = torch.empty_like(values), gradients.shape
    block = triton.next_power_of_2(channels)
    rows, num_pixels = max(1, _ENTRIES // block), gradients[..., 0].numel()
    num_blocks = triton.cdiv(triton.cdiv(num_pixels, rows), _MAX_PROGRAMS)
    programs = triton.cdiv(num_pixels, rows * num_blocks)
    parts = torch.empty(2, programs, channels, device=values.device)
    _back[(programs,)](
        values,
        bias,
        scale,
        gradients,
        answers,
        parts[0],
        parts[1],
        num_pixels,
        num_blocks,
        width,
        channels,
        eps,
        POOLS=pools,
        BLOCK=block,
        ROWS=rows,
    )
    of_bias, of_scale = parts.sum(1)
    return answers, of_bias, of_scale
