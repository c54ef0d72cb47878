"""A replay on the host, on disk or on the device gives a GPU the same batches, also ahead and written back.

`pytest -m gpu tests/gpu`, or `python tests/gpu/test_replay.py` where pytest is not installed.
"""

import tempfile
from dataclasses import dataclass

import numpy as np
import torch

from rl_lab.core.batch import Batch
from rl_lab.core.capture import HookCapture, device_stream
from rl_lab.core.phase import Hook, Phase
from rl_lab.core.workflow import Update, Workflow
from rl_lab.data import sources
from rl_lab.data.sources import ReplaySource
from rl_lab.orchestration.loop import run_hook

PHASE = Phase("p", hooks=(Hook("collect"),), duration_steps=1)


@dataclass(eq=False)
class Summing(Workflow):
    """Sums up what it sees, with all digits, and rewrites the latents by what they were."""

    def __post_init__(self):
        self.seen = torch.zeros(6, dtype=torch.float64, device="cuda")

    def update_memory(self, batch, *, phase):
        weights = torch.arange(batch.rewards.numel(), device="cuda", dtype=torch.float64).view(batch.shape) + 1
        columns = (batch.observations.double().flatten(2).sum(2), batch.actions, batch.rewards)
        latents = (batch["deter"].double().sum(2), batch["stoch"].double().sum(2), batch["is_first"])
        self.seen.add_(torch.stack([(weights * column).sum() for column in (*columns, *latents)]))
        torch.cuda._sleep(2_000_000)  # the host is far ahead
        return Update({"seen": self.seen[3]}, {"deter": batch["deter"] * 0.5 + 1, "stoch": batch["stoch"] + 1})


def steps(generator, num_steps=40, num_envs=2):
    shape = (num_steps, num_envs)
    pictures = generator.integers(0, 256, (num_steps + 1, num_envs, 3, 16, 16), dtype=np.uint8)
    return Batch(
        observations=torch.from_numpy(pictures[:-1]),
        actions=torch.from_numpy(generator.integers(0, 5, shape)),
        rewards=torch.from_numpy(generator.random(shape, dtype=np.float32)),
        terminated=torch.from_numpy(generator.random(shape) < 0.05),
        truncated=torch.zeros(shape, dtype=torch.bool),
        next_observations=torch.from_numpy(pictures[1:]),
        extras={
            "deter": torch.from_numpy(generator.random((*shape, 7), dtype=np.float32)).bfloat16(),
            "stoch": torch.from_numpy(generator.integers(0, 16, (*shape, 4), dtype=np.uint8)),
        },
    )


def learned(storage, *, captured, ahead=True):
    """Return what a workflow has seen, and the latents in the end."""
    with tempfile.TemporaryDirectory() as folder, device_stream("cuda"):
        knobs = {"capacity": 150, "batch_size": 6, "window": 9, "mode": "running", "online": True}
        replay = ReplaySource(2, np.random.default_rng(0), "cuda", storage=storage, folder=folder, **knobs)
        if not ahead:
            replay.prefetch = lambda rows: None
        workflow, generator = Summing(), np.random.default_rng(1)
        capture = HookCapture(list) if captured else None
        for _ in range(4):
            replay.add(steps(generator))
            run_hook(
                Hook("update_memory", 8, source="replay"), PHASE, workflow, None, {"replay": replay}, capture=capture
            )
        torch.cuda.synchronize()
        written = replay.ring.get_written()["rewritten"]
        return workflow.seen.cpu(), {name: torch.as_tensor(column).float() for name, column in written.items()}


def check_storages(captured):
    smallest, sources.MIN_BYTES = sources.MIN_BYTES, 0
    try:
        seen, latents = learned("device", captured=captured)
        assert seen.abs().min() > 0
        for storage in ("cpu", "disk"):
            for ahead in (False, True):
                other, written = learned(storage, captured=captured, ahead=ahead)
                assert torch.equal(seen, other), (storage, ahead, captured, seen, other)
                for name, column in latents.items():
                    assert torch.equal(column, written[name]), (storage, ahead, captured, name)
    finally:
        sources.MIN_BYTES = smallest


def test_storages_agree_eagerly():
    check_storages(captured=False)


def test_storages_agree_captured():
    check_storages(captured=True)


def test_pictures_come_through_pinned_memory():
    replay = ReplaySource(2, np.random.default_rng(0), "cuda", capacity=150, batch_size=6, window=9, mode="running")
    replay.add(steps(np.random.default_rng(1)))
    rows = replay.draw()[0]
    staged = replay.ring.stage(rows, torch.device("cuda"), running=True)
    assert staged["observations"].is_pinned()
    assert torch.equal(replay.gather(rows).observations.cpu(), staged["observations"])


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"{name}: ok")
