"""Animations: frames of an episode as a looping GIF."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

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
    palette = _palette(frames)
    images = [_image(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
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


def _image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(pixels))


def _palette(frames: Sequence[np.ndarray]) -> Image.Image:
    chosen = np.linspace(0, len(frames) - 1, min(len(frames), _NUM_SAMPLES)).round().astype(int)
    montage = np.concatenate([frames[i] for i in chosen])
    colours = np.unique(montage.reshape(-1, 3), axis=0)
    if len(colours) > _NUM_COLOURS:
        return _image(montage).quantize(_NUM_COLOURS, dither=Image.Dither.NONE)
    exact = Image.new("P", (1, 1))
    exact.putpalette(np.resize(colours, (_NUM_COLOURS, 3)).tobytes())  # repeats colours to fill the palette
    return exact


def _durations(num_frames: int, fps: float) -> list[int]:
    """Return how long each frame is shown, in ms. A GIF counts hundredths and viewers slow down below two of them."""
    if fps >= 50:
        return [20] * num_frames
    edges = [round(100 * i / fps) for i in range(num_frames + 1)]
    return [10 * (end - start) for start, end in itertools.pairwise(edges)]
