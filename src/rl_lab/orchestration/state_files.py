"""State files: a nested state becomes safetensors and JSON, and back. Nothing in them can run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

MAX_HEADER_BYTES = 4 * 2**20
MAX_TENSORS = 20_000
# Plain data is small: numbers by the thousand are tensors. In memory, a container or a text takes up to 80 times its
# bytes in the file.
MAX_JSON_BYTES = 16 * 2**20
MAX_CONTAINERS = 250_000
MAX_TEXTS = 500_000
_MARKS = ("$tensor", "$array", "$tuple", "$items")


def encode(state: Any) -> tuple[bytes, bytes]:
    """Return (safetensors, JSON) of nested dicts, lists, tuples, numbers, texts, tensors and arrays."""
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(_encode(state, "", tensors), allow_nan=False).encode()
    _check_plain(plain)
    if len(tensors) > MAX_TENSORS:
        raise ValueError(f"a state has {len(tensors):,} tensors, more than the {MAX_TENSORS:,} that can be read again")
    return save_safetensors(tensors), plain


def decode(tensors: bytes, plain: bytes) -> Any:
    """Return the state that `encode` was given; tensors are on the CPU."""
    _check_header(tensors)
    return _decode(read_json(plain), load_safetensors(tensors))


def read_json(data: bytes) -> Any:
    """Read JSON that a stranger may have written; what would cost far more than its size is refused."""
    _check_plain(data)
    return json.loads(data, parse_constant=_refuse_constant)


def _check_plain(data: bytes) -> None:
    num_containers, num_texts = data.count(b"[") + data.count(b"{"), data.count(b'"') // 2
    if len(data) > MAX_JSON_BYTES or num_containers > MAX_CONTAINERS or num_texts > MAX_TEXTS:
        raise ValueError(f"there is too much plain data ({len(data):,} bytes): use tensors for numbers")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _check_header(data: bytes) -> None:
    """Refuse headers that would cost much to read before they are read."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, MAX_HEADER_BYTES):
        raise ValueError("a tensor file has an impossible header")
    header = read_json(data[8 : 8 + length])
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise ValueError(f"a tensor file lists more than {MAX_TENSORS:,} tensors")


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        # A copy: shared and strided memory cannot be written, and training goes on while we write.
        return {"$tensor": _keep(value.detach().to("cpu", copy=True).contiguous(), path, tensors)}
    if isinstance(value, np.ndarray):
        return {"$array": _keep(torch.from_numpy(np.array(value, order="C", copy=True)), path, tensors)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in _MARKS for key in value):
            return {key: _encode(entry, f"{path}/{key}", tensors) for key, entry in value.items()}
        return {"$items": [[_encode_key(k), _encode(v, f"{path}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [_encode(entry, f"{path}/{i}", tensors) for i, entry in enumerate(value)]}
    if isinstance(value, list):
        return [_encode(entry, f"{path}/{i}", tensors) for i, entry in enumerate(value)]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return {"$tensor": _keep(torch.tensor(value, dtype=torch.float64), path, tensors)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"state at '{path}' is a {type(value).__name__}, which cannot be saved: use tensors, arrays or plain data"
    )


def _keep(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    """Keep a tensor under its path, or one like it: keys with a slash, or 1 and "1", lead to the same."""
    while path in tensors:
        path += "'"
    tensors[path] = tensor
    return path


def _encode_key(key: Any) -> Any:
    if isinstance(key, (int, str)):
        return key
    raise TypeError(f"a state may have text and whole numbers as keys, not {key!r}")


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$array" in value:
        return tensors[value["$array"]].numpy()
    if "$tuple" in value:
        return tuple(_decode(entry, tensors) for entry in value["$tuple"])
    if "$items" in value:
        return {key: _decode(entry, tensors) for key, entry in value["$items"]}
    return {key: _decode(entry, tensors) for key, entry in value.items()}
