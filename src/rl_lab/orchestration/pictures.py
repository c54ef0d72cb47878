"""Pictures of a run: PNG files that are there completely or not at all, and the newest of each name only."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from rl_lab.orchestration.files import Files

MAX_KEPT = 50  # of each name
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


def png(pixels: Any) -> bytes:
    """Encode uint8 [H, W, 3], a tensor or an array."""
    array = pixels.cpu().numpy() if isinstance(pixels, Tensor) else np.asarray(pixels)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise ValueError(f"a picture is {array.dtype} {list(array.shape)}; it must be uint8 [H, W, 3]")
    written = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(array)).save(written, "PNG")
    return written.getvalue()


def write_picture(folder: Path, step: int, name: str, data: bytes, *, max_kept: int = MAX_KEPT) -> Path:
    """Write `<step>_<name>.png` and remove the oldest of this name beyond `max_kept`."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"the picture's name {name!r} must consist of letters, digits, - and _")
    files = Files()
    files.make_folder(folder)
    path = folder / f"{step:010d}_{name}.png"
    files.replace(path, data)
    same = [entry for entry in files.names(folder) if entry.partition("_")[2] == f"{name}.png" and entry[0] != "."]
    for entry in same[:-max_kept]:
        files.remove(folder / entry)
    return path
