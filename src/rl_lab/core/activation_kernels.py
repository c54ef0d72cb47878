"""GPU kernels behind products and convolutions (`components/fused.py`), in Triton, which comes with torch for GPUs.

What follows is a bias, for pictures a change of size, a root-mean-square norm over the channels, and SiLU. As
operations of their own each moves everything through memory; and a norm over the few channels of a pixel is what
torch's kernel does worst. Pictures are [R, H, W, C] in memory; rows [R, C] are pixels that stay as they are.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rl_lab.core.kernels import build_ahead, jit, tl, triton, wait_until_built


@jit
def _apart(k: tl.constexpr, width, RESIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Return how many pixels lie between the first and the k-th of the four of which the largest is taken."""
    return k // 2 * 2 * width + k % 2 if RESIZE == 1 else k


@jit
def _read(  # type: ignore[no-untyped-def]
    values,
    pixels,
    columns,
    inside,
    width,
    channels,
    RESIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    """Return the entries of resized pixels, where they were read (the first of four), and which was the largest."""
    x, y = pixels % width, pixels // width  # pictures lie one below the other
    largest = tl.zeros([ROWS, BLOCK], tl.int32)
    source = pixels
    if RESIZE == 1:  # the largest of four pixels
        source = 2 * y * (2 * width) + 2 * x
    if RESIZE == 2:  # one of the four groups of channels of a pixel
        source = (y // 2 * (width // 2) + x // 2) * 4 + y % 2 * 2 + x % 2
    if RESIZE == 3:  # the largest of the four groups
        source = pixels * 4
    at = source[:, None] * channels + columns[None, :]
    entries = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    if RESIZE == 1 or RESIZE == 3:
        for k in tl.static_range(1, 4):
            other = tl.load(values + at + _apart(k, width, RESIZE) * channels, mask=inside, other=0.0).to(tl.float32)
            largest = tl.where(other > entries, k, largest)
            entries = tl.maximum(entries, other, propagate_nan=tl.PropagateNan.ALL)
    return entries, at, largest


@jit
def _activate(  # type: ignore[no-untyped-def]
    values,
    biases,
    scales,
    answers,
    num_pixels,
    width,
    channels,
    eps,
    HAS_BIAS: tl.constexpr,  # noqa: N803
    RESIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    pixels = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (pixels < num_pixels)[:, None] & (columns < channels)[None, :]
    entries, _, _ = _read(values, pixels, columns, inside, width, channels, RESIZE, BLOCK, ROWS)
    if HAS_BIAS:
        bias = tl.load(biases + columns, mask=columns < channels, other=0.0).to(tl.float32)
        entries = tl.where(inside, entries + bias[None, :], 0.0)
    root = 1.0 / tl.sqrt(tl.sum(entries * entries, 1) / channels + eps)
    kept = (entries * root[:, None]).to(answers.dtype.element_ty).to(tl.float32)
    scaled = kept * tl.load(scales + columns, mask=columns < channels, other=0.0).to(tl.float32)[None, :]
    tl.store(answers + pixels[:, None] * channels + columns[None, :], scaled * tl.sigmoid(scaled), mask=inside)


@jit
def _activate_backward(  # type: ignore[no-untyped-def]
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
    HAS_BIAS: tl.constexpr,  # noqa: N803
    RESIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    bias = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        bias = tl.load(biases + columns, mask=columns < channels, other=0.0).to(tl.float32)
    scale = tl.load(scales + columns, mask=columns < channels, other=0.0).to(tl.float32)
    of_bias, of_scale = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for i in range(num_blocks):
        pixels = (program * num_blocks + i) * ROWS + tl.arange(0, ROWS)
        inside = (pixels < num_pixels)[:, None] & (columns < channels)[None, :]
        entries, at, largest = _read(values, pixels, columns, inside, width, channels, RESIZE, BLOCK, ROWS)
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
        if RESIZE == 1 or RESIZE == 3:
            for k in tl.static_range(4):
                place = answers + at + _apart(k, width, RESIZE) * channels
                tl.store(place, tl.where(largest == k, gradient, 0.0), mask=inside)
        else:
            tl.store(answers + at, gradient, mask=inside)
    tl.store(bias_parts + program * channels + columns, of_bias, mask=columns < channels)
    tl.store(scale_parts + program * channels + columns, of_scale, mask=columns < channels)


_RESIZE = {None: 0, "halve": 1, "double": 2, "choose": 3}
_ENTRIES, _MAX_PROGRAMS = 1024, 2048
Resize = Literal["halve", "double", "choose"]


def activate(values: Tensor, bias: Tensor | None, scale: Tensor, eps: float, resize: Resize | None = None) -> Tensor:
    """Return values [..., C] with a bias added, normalised, and SiLU.

    Pictures [R, H, W, C] can be resized first: halved, by the largest of each four pixels; doubled, if 4 C channels
    hold four pixels each: of the even row, then of the odd one; or the largest of these four can be chosen.
    """
    shape = list(values.shape)
    if resize is not None:
        num_pictures, height, width, channels = shape
        sizes = {"halve": (height // 2, width // 2, channels), "double": (2 * height, 2 * width, channels // 4)}
        shape = [num_pictures, *sizes.get(resize, (height, width, channels // 4))]
    answers = torch.empty(shape, dtype=values.dtype, device=values.device)
    constants, num_pixels = _divided(answers, bias, resize)
    _activate[(triton.cdiv(num_pixels, constants["ROWS"]),)](
        values,
        scale if bias is None else bias,
        scale,
        answers,
        num_pixels,
        1 if resize is None else shape[-2],
        shape[-1],
        eps,
        **constants,
    )
    return answers


def build_backward(
    values: Tensor, bias: Tensor | None, scale: Tensor, answers: Tensor, eps: float, resize: Resize | None = None
) -> None:
    """Begin to build the kernel of the way back from what the way forth got and gave."""
    constants, num_pixels = _divided(answers, bias, resize)
    beside, channels, parts = scale if bias is None else bias, answers.shape[-1], torch.float32
    kinds = (values.dtype, beside.dtype, scale.dtype, answers.dtype, values.dtype, parts, parts)
    sizes = (num_pixels, 1, 1, channels, eps)
    key = (kinds, channels, *constants.values())
    build_ahead(key, _activate_backward, values.device, *kinds, *sizes, **constants)


def activate_backward(
    values: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    gradients: Tensor,
    eps: float,
    resize: Resize | None = None,
    *,
    learns: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of values and, unless they are constants, bias and scale.

    They are the same in every call, for sums are formed in a fixed order.
    """
    answers, channels = torch.empty_like(values), gradients.shape[-1]
    constants, num_pixels = _divided(gradients, bias, resize)
    rows = constants["ROWS"]
    num_blocks = max(1, triton.cdiv(triton.cdiv(num_pixels, rows), _MAX_PROGRAMS))
    programs = triton.cdiv(num_pixels, rows * num_blocks)
    parts = torch.empty(2, programs, channels, device=values.device)
    wait_until_built()
    _activate_backward[(programs,)](
        values,
        scale if bias is None else bias,
        scale,
        gradients,
        answers,
        parts[0],
        parts[1],
        num_pixels,
        num_blocks,
        1 if resize is None else gradients.shape[-2],
        channels,
        eps,
        **constants,
    )
    if not learns:
        return answers, None, None
    of_bias, of_scale = parts.sum(1)
    return answers, None if bias is None else of_bias, of_scale


def _divided(answers: Tensor, bias: Tensor | None, resize: Resize | None) -> tuple[dict[str, int], int]:
    """Return what a kernel is built for: channels and pixels at a time, and so on; and how many pixels there are."""
    block = triton.next_power_of_2(answers.shape[-1])
    rows = max(1, _ENTRIES // block)
    constants = {"HAS_BIAS": bias is not None, "RESIZE": _RESIZE[resize], "BLOCK": block, "ROWS": rows}
    return constants, answers[..., 0].numel()
