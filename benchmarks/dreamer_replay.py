"""A replay of 64 x 64 pictures with the latents of a 12M model: bytes, and what a batch of 16 windows of 65 costs.

python benchmarks/dreamer_replay.py [--rows 1000000] [--storage cpu disk device] [--device cuda] [--folder .]

A batch is drawn, gathered on the device, used for as long as an update takes (--update milliseconds), and its latents
are written back. `waiting` is what the update waits for all this; with reading ahead, the next pictures are read
meanwhile.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise

import numpy as np
import torch

from rl_lab.core.batch import Batch
from rl_lab.data.sources import ReplaySource

WINDOW, BATCH = 65, 16
NUM_ENVS, CHUNK = 16, 256


def steps(generator: np.random.Generator) -> Batch:
    """Return decisions with pictures and latents."""
    shape = (CHUNK, NUM_ENVS)
    pictures = generator.integers(0, 256, (CHUNK + 1, NUM_ENVS, 3, 64, 64), dtype=np.uint8)
    ended = np.zeros(shape, bool)
    ended[-1] = True
    return Batch(
        observations=torch.from_numpy(pictures[:-1]),
        actions=torch.zeros(shape, dtype=torch.int64),
        rewards=torch.zeros(shape),
        terminated=torch.zeros(shape, dtype=torch.bool),
        truncated=torch.from_numpy(ended),
        next_observations=torch.from_numpy(pictures[1:]),
        extras={
            "deter": torch.zeros(*shape, 2048, dtype=torch.bfloat16),
            "stoch": torch.zeros(*shape, 32, dtype=torch.uint8),
        },
    )


def update(device: torch.device, milliseconds: float) -> None:
    """Keep the device, or this core, busy for about that long."""
    if device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * 1.7e6))
    else:
        time.sleep(milliseconds / 1e3)


def measure(source: ReplaySource, *, ahead: bool, milliseconds: float, num_batches: int) -> float:
    """Return the milliseconds from one update to the next."""
    device = source.device

    def run(count: int) -> None:
        drawn = [*source.draw(count), None]
        for rows, following in pairwise(drawn):
            batch = source.gather(rows)
            if ahead and following is not None:
                source.prefetch(following)
            update(device, milliseconds)
            source.write(batch.rows, {name: batch[name] for name in ("deter", "stoch")})

    run(4)
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run(num_batches)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / num_batches * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--storage", nargs="+", default=["cpu", "disk", "device"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", default=".")
    parser.add_argument("--update", type=float, default=15.0)
    parser.add_argument("--batches", type=int, default=100)
    arguments = parser.parse_args()
    print(f"{arguments.rows:,} rows, batches of {BATCH} windows of {WINDOW} on {arguments.device}")
    print("storage   bytes/row   total GB   add rows/s   waiting ms/update   with reading ahead")
    for storage in arguments.storage:
        source = ReplaySource(
            NUM_ENVS,
            np.random.default_rng(0),
            arguments.device,
            capacity=arguments.rows,
            batch_size=BATCH,
            window=WINDOW,
            mode="running",
            online=True,
            storage=storage,
            folder=arguments.folder,
        )
        chunk = steps(np.random.default_rng(1))
        start = time.perf_counter()
        num_chunks = -(-arguments.rows // (CHUNK * NUM_ENVS))
        for _ in range(num_chunks):
            source.add(chunk)
        rate = num_chunks * CHUNK * NUM_ENVS / (time.perf_counter() - start)
        ring, device = source.ring, source.device
        alone = time.perf_counter()
        for _ in range(arguments.batches):
            update(device, arguments.update)
        if device.type == "cuda":
            torch.cuda.synchronize()
        alone = (time.perf_counter() - alone) / arguments.batches * 1e3
        waits = [
            measure(source, ahead=ahead, milliseconds=arguments.update, num_batches=arguments.batches) - alone
            for ahead in (False, True)
        ]
        print(
            f"{storage:8}  {ring.nbytes / ring.size:9.0f}  {ring.nbytes / 1e9:9.2f}  {rate:11,.0f}"
            f"  {waits[0]:18.1f}  {waits[1]:18.1f}",
            flush=True,
        )
        del source, ring


if __name__ == "__main__":
    main()
