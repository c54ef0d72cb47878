"""Seeds: one tree per run, run -> stream name -> index. Every consumer draws from its own named generator."""

from __future__ import annotations

import functools
import hashlib
import random
from typing import Any

import numpy as np
import torch


class SeedTree:
    """Derives independent streams from one run seed and keeps the generators it gave out."""

    def __init__(self, seed: int) -> None:
        self.run_seed = int(seed)
        self._torch: dict[str, torch.Generator] = {}
        self._numpy: dict[str, np.random.Generator] = {}

    def sequence(self, name: str, *path: int) -> np.random.SeedSequence:
        """Return the node (run, name, *path) of the tree."""
        return np.random.SeedSequence(self.run_seed, spawn_key=(*_words(name), *path))

    def seed(self, name: str, *path: int) -> int:
        """Return a 32-bit seed for (run, name, *path): an environment's episode, an initialisation."""
        return int(self.sequence(name, *path).generate_state(1)[0])

    def generator(self, name: str, device: str | torch.device = "cpu") -> torch.Generator:
        """Return the named torch generator; the same object at every call."""
        if name not in self._torch:
            generator = torch.Generator(device)
            generator.manual_seed(_seed_of(self.sequence(name)))
            self._torch[name] = generator
        return self._torch[name]

    def numpy(self, name: str) -> np.random.Generator:
        """Return the named NumPy generator; the same object at every call."""
        if name not in self._numpy:
            self._numpy[name] = np.random.Generator(np.random.PCG64(self.sequence(name)))
        return self._numpy[name]

    def generators(self) -> list[torch.Generator]:
        """Return the torch generators given out so far."""
        return list(self._torch.values())

    def reseed(self, label: str, index: int) -> None:
        """Give every generator another stream, in place: what failed once must not be drawn again."""
        for name, generator in self._torch.items():
            generator.manual_seed(_seed_of(self.sequence(f"{label}/{name}", index)))
        for name, numpy_generator in self._numpy.items():
            numpy_generator.bit_generator.state = np.random.PCG64(self.sequence(f"{label}/{name}", index)).state

    def get_state(self) -> dict[str, Any]:
        """Return the state of every generator given out."""
        return {
            "seed": self.run_seed,
            "torch": {name: generator.get_state() for name, generator in self._torch.items()},
            "numpy": {name: generator.bit_generator.state for name, generator in self._numpy.items()},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore generators in place; those not yet asked for are created."""
        self.run_seed = int(state["seed"])
        for name, value in state["torch"].items():
            self.generator(name).set_state(value.cpu())
        for name, value in state["numpy"].items():
            self.numpy(name).bit_generator.state = value


def _seed_of(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


@functools.cache
def _words(name: str) -> tuple[int, ...]:
    """Return 128 bits of a name as four numbers."""
    return tuple(np.frombuffer(hashlib.sha256(name.encode()).digest()[:16], dtype=np.uint32).tolist())


def seed_all(seed: int, environment: Any = None) -> dict[str, Any]:
    """Seed Python, NumPy, torch (and an environment, through reset) and report the resulting states.

    The report is plain data for a checkpoint; taking it draws nothing.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if environment is not None:
        environment.reset(seed=seed)
    return global_states() | {"seed": seed}


def global_states() -> dict[str, Any]:
    """Report the states of the global generators without drawing from them."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": np.asarray(keys).tolist(),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.random.get_rng_state(),
    }


_NUM_WORDS = 624  # of the Mersenne twister


def restore_global_states(report: dict[str, Any]) -> None:
    """Put the global generators back to a report of `seed_all` or `global_states`."""
    python, array = report["python"], report["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    if not 0 <= array["position"] <= len(array["keys"]) == _NUM_WORDS:
        raise ValueError("this is no state of NumPy's generator")  # NumPy would read beyond its memory
    keys = np.asarray(array["keys"], dtype=np.uint32)
    np.random.set_state((array["name"], keys, array["position"], array["has_gauss"], array["cached"]))
    torch.random.set_rng_state(report["torch"].cpu())
