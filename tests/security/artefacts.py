"""Runs and exports to be tampered with, and seals: a stranger can compute digests as well as the store does."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_lab import cli
from rl_lab.data.replay import Ring

SMALL = (
    *(
        "evaluation.episodes=1",
        "evaluation.every=100000",
        "environment.max_episode_steps=20",
        "logging.tensorboard=false",
    ),
    *("experiment.device=cpu", "checkpoint.every_steps=1"),
)
DQN = ("dqn_cartpole", "buffer.min_size=32", "buffer.batch_size=16", "components.q_network.hidden=[16]", *SMALL)
PPO = ("ppo_cartpole", "environment.num_envs=2", "workflow.minibatch_size=32", "workflow.num_epochs=1", *SMALL)
STEPS = 128  # two cycles: the last two checkpoints are after each of them


def make_runs(folder: Path) -> int:
    """Train DQN and PPO for a moment and export both agents."""
    Ring.segment_bytes = 1024  # so that so short a replay has segments
    for name, words in (("dqn", DQN), ("ppo", PPO)):
        run, out = str(folder / name), str(folder / f"{name}_export")
        for arguments in (
            ["train", *words, f"training.total_timesteps={STEPS}", "--run-dir", run, "--quiet"],
            ["export", run, out],
        ):
            if status := cli.main(arguments):
                return status
    return 0


def newest(run: Path) -> Path:
    """Return the newest checkpoint of a run."""
    return max((run / "checkpoints").glob("0*"))


def seal(folder: Path, edit: Callable[[dict[str, Any]], None] = lambda manifest: None) -> None:
    """Write the manifest of a checkpoint anew, as the store does, so that every digest is right again."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, entry in manifest["files"].items():
        if (folder / name).is_file():
            data = (folder / name).read_bytes()
            entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    del manifest["sha256"]
    edit(manifest)
    path.unlink()
    path.write_bytes(sealed(manifest))


def sealed(manifest: dict[str, Any]) -> bytes:
    """Return a manifest with the digest of itself."""
    digest = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1).encode()


def seal_segment(run: Path, data: bytes, edit: Callable[[dict[str, Any]], None] = lambda entry: None) -> None:
    """Replace the first replay segment of the newest checkpoint, with right digests."""
    folder = newest(run)
    segments = json.loads((folder / "manifest.json").read_text())["segments"]
    (buffer, entries), digest = next(iter(segments.items())), hashlib.sha256(data).hexdigest()
    entry = entries[0]
    (run / "replay" / buffer / entry["file"]).unlink()
    entry |= {"file": f"{entry['start']:012d}-{digest[:12]}.safetensors", "size": len(data), "sha256": digest}
    (run / "replay" / buffer / entry["file"]).write_bytes(data)
    edit(entry)
    seal(folder, lambda manifest: manifest.update(segments=segments))


def safetensors(header: Any, data: bytes = b"") -> bytes:
    """Return a safetensors file with any header: a text, bytes or what JSON can say."""
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


def read_safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return header and data of a safetensors file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def set_config(folder: Path, text: str) -> None:
    """Give a run or an export another configuration; an export is sealed again."""
    (folder / "config.yaml").write_text(text)
    if (folder / "agent").is_dir():
        seal(folder / "agent", lambda manifest: manifest["texts"].update({"config.yaml": text}))


def copy(folder: Path, to: Path) -> Path:
    """Copy a run or an export to tamper with it."""
    return Path(shutil.copytree(folder, to, symlinks=True))
