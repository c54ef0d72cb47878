"""Animations: frames of an episode as a looping GIF."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

_NUM_COLOURS = 256
_NUM_SAMPLES = 16  # frames that the palette is made from


def write_gif(path: str | os.PathLike[str], frames: Sequence[np.ndarray], fps: float = 30) -> None:
    """Write frames, uint8 [H, W, 3], as a looping GIF; folders are made as needed.

    One palette serves all frames, so that colours do not flicker; up to 256 different colours are kept exactly.
    """
    if not len(frames):
        raise ValueError("no frames to write: the episode was empty")
    if not fps > 0:
        raise ValueError(f"fps is {fps}; it must be above 0")
    shape = np.shape(frames[0])
    for i, frame in enumerate(frames):
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or frame.shape != shape:
            raise ValueError(
                f"frame {i} is {frame.dtype} {frame.shape}; every frame must be uint8 [H, W, 3] like {shape}"
            )
    images = _exact(frames) or _approximate(frames)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.part")  # a reader never sees half an animation
    try:
        images[0].save(
            unfinished, "GIF", save_all=True, append_images=images[1:], duration=_durations(len(frames), fps), loop=0
        )
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _exact(frames: Sequence[np.ndarray]) -> list[Image.Image] | None:
    """Return the frames in all their colours; None if these are too many for a palette."""
    colours: set[Any] = set()
    for frame in frames:
        found = _image(frame).getcolors(_NUM_COLOURS)
        colours.update(colour for _, colour in found or ())
        if found is None or len(colours) > _NUM_COLOURS:
            return None
    palette = np.array(sorted(colours), np.uint8)
    # The lookup is ours because Pillow's takes neighbouring colours of a palette for one.
    images = [_image(np.searchsorted(_packed(palette), _packed(frame)).astype(np.uint8)) for frame in frames]
    for image in images:
        image.putpalette(palette.tobytes())
    return images


def _approximate(frames: Sequence[np.ndarray]) -> list[Image.Image]:
    """Return the frames in the best palette for a sample of them."""
    chosen = np.linspace(0, len(frames) - 1, min(len(frames), _NUM_SAMPLES)).round().astype(int)
    palette = _image(np.concatenate([frames[i] for i in chosen])).quantize(_NUM_COLOURS, dither=Image.Dither.NONE)
    return [_image(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]


def _image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(pixels))


def _packed(pixels: np.ndarray) -> np.ndarray:
    red, green, blue = np.moveaxis(pixels.astype(np.uint32), -1, 0)
    return (red << 16) | (green << 8) | blue


def _durations(num_frames: int, fps: float) -> list[int]:
    """Return how long each frame is shown, in ms. A GIF counts hundredths and viewers slow down below two of them."""
    if fps >= 50:
        return [20] * num_frames
    edges = [round(100 * i / fps) for i in range(num_frames + 1)]
    return [10 * (end - start) for start, end in itertools.pairwise(edges)]
