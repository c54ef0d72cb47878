"""Buffers from a configuration: the sources that the phases name."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_lab.config import RunConfig
from rl_lab.core.errors import RunError, UserError
from rl_lab.core.seeding import SeedTree
from rl_lab.data.offline import SavedReplay
from rl_lab.data.sources import ReplaySource, Source
from rl_lab.instantiate import instantiate
from rl_lab.orchestration.checkpoint import Checkpoint, CheckpointError, CheckpointManager
from rl_lab.parsing import parse


def build_sources(
    config: RunConfig, seeds: SeedTree, device: str, folder: Path, allow: Sequence[str]
) -> dict[str, Source]:
    """Build the named buffers; a single `buffer` is the one named 'replay'. Files of theirs go to the run folder."""
    nodes = dict(config.buffers)
    if config.buffer is not None:
        if "replay" in nodes:
            raise UserError(
                "'buffer' is the buffer named 'replay', which is there already", key="buffers.replay", remedy="keep one"
            )
        nodes["replay"] = config.buffer
    sources: dict[str, Source] = {}
    for name, node in sorted(nodes.items(), key=lambda entry: _shares(entry[1])):  # what owns a ring comes first
        key = config.buffer_key(name)
        if not re.fullmatch(r"[\w-]+", name):
            raise UserError(
                "the name of a buffer is that of a folder, too",
                key=key,
                value=name,
                remedy="use letters, digits, - and _",
            )
        given = {"num_envs": config.environment.num_envs, "generator": seeds.numpy(f"source/{name}"), "device": device}
        if _shares(node):
            given["ring"] = _shared_ring(node["shares"], f"{key}.shares", sources)
            node = {argument: value for argument, value in node.items() if argument != "shares"}
        if isinstance(node, Mapping) and "run" in node:
            given["saved"] = _saved_replay(node["run"], node.get("run_buffer"), key)
            node = {argument: value for argument, value in node.items() if argument not in ("run", "run_buffer")}
        if isinstance(node, Mapping) and "folder" not in node:
            given["folder"] = str(folder)
        sources[name] = instantiate(node, key, given=given, allow=allow, kind=Source)
    return sources


def _shares(node: Any) -> bool:
    return isinstance(node, Mapping) and "shares" in node


def _shared_ring(shares: Any, key: str, sources: Mapping[str, Source]) -> Any:
    rings = {name: source.ring for name, source in sources.items() if isinstance(source, ReplaySource)}
    if parse(str, shares, key) not in rings:
        raise UserError(
            "no buffer with a ring of its own has this name",
            key=key,
            value=shares,
            valid=rings,
            remedy="name the buffer that owns the ring",
        )
    return rings[shares]


def _saved_replay(run: Any, buffer: Any, key: str) -> SavedReplay:
    """Read the replay of a run, or of one of its checkpoints; nothing of the run is touched."""
    folder = Path(parse(str, run, f"{key}.run"))
    checkpoint = _newest_checkpoint(folder, f"{key}.run")
    rings = {name: state["ring"] for name, state in checkpoint.state["sources"].items() if "ring" in state}
    if buffer is None and len(rings) == 1:
        buffer = next(iter(rings))
    if buffer not in rings:
        raise UserError(
            "this run has no replay of this name" if buffer else "this run has several replays, or none",
            key=f"{key}.run_buffer",
            value=buffer,
            valid=rings,
            remedy="name one of them",
        )
    digests = [checkpoint.manifest[name] for name in ("files", "segments", "pages")]
    digest = hashlib.sha256(json.dumps(digests).encode()).hexdigest()
    return SavedReplay(rings[buffer], *checkpoint.histories[buffer], digest)


def _newest_checkpoint(folder: Path, key: str) -> Checkpoint:
    single = folder.parent.name == "checkpoints"
    manager = CheckpointManager(folder.parent.parent if single else folder)
    damage = "it has no checkpoint"
    for path in [folder] if single else reversed(manager.numbered()):
        try:
            return manager.load(path, sections=("sources",), replay=True)
        except (CheckpointError, RunError) as error:
            damage = f"checkpoint {path.name}: {error}"
    raise UserError(
        f"the replay of this run cannot be read: {damage}",
        key=key,
        value=str(folder),
        remedy="name the folder of a run, or one below its checkpoints/",
    )
