"""Policies outside the lab: an agent exported as a folder, and loaded again in three lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.build import build_agent, choose_device
from rl_lab.composition import parse_config, to_yaml
from rl_lab.core.batch import Tree, tree_leaves, tree_map
from rl_lab.core.errors import UserError
from rl_lab.core.workflow import Workflow
from rl_lab.orchestration.checkpoint import CheckpointError, CheckpointManager
from rl_lab.run_folder import read_summary, require_run
from rl_lab.runs import check_fits, saved_weights
from rl_lab.trust import load_saved

AGENT = "agent"  # the folder of weights inside an export


class Policy:
    """A trained agent: observations of one or several environments in, actions out."""

    def __init__(self, workflow: Workflow, device: str, card: dict[str, Any], seed: int = 0) -> None:
        self.workflow, self.device, self.card = workflow, device, card
        self._generator = torch.Generator(device).manual_seed(seed)
        self._state: Tree = None
        self._num_envs = 0

    def reset(self) -> None:
        """Forget recurrent state: a new episode begins everywhere."""
        self._num_envs = 0

    def act(self, observations: Any, *, explore: bool = False) -> np.ndarray:
        """Return one action per environment for observations [N, ...] (NumPy or torch, or a dict of them)."""
        seen = tree_map(lambda leaf: torch.as_tensor(leaf).to(self.device), observations)
        num_envs = len(next(tree_leaves(seen)))
        if num_envs != self._num_envs:
            self._num_envs, self._state = num_envs, self.workflow.initial_state(num_envs)
        with torch.no_grad():
            said = self.workflow.act(seen, self._state, explore=explore, generator=self._generator)
        self._state = said.state
        return np.asarray(said.actions.cpu())


def export_policy(folder: Path, out: Path, *, which: str = "best") -> dict[str, Any]:
    """Write the agent of a run as a folder of weights, configuration and card; return the card."""
    config_file = require_run(folder)
    composed = load_saved(config_file)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError("the folder to export to is not empty", key="OUT", value=str(out), remedy="name a new one")
    chosen = saved_weights(CheckpointManager(folder), folder, which)
    manifest = chosen.manifest
    summary = read_summary(folder) or {}
    card = {
        "name": parse_config(composed).experiment.name,
        "seed": parse_config(composed).experiment.seed,
        "environment": parse_config(composed).environment.id,
        "workflow": manifest["workflow_name"],
        "evaluation": manifest.get("evaluation"),
        "counters": manifest.get("counters"),
        "last_evaluation": summary.get("last_evaluation"),
        "versions": manifest["versions"],
        "commit": manifest.get("commit"),
    }
    text = to_yaml(composed)
    state = {name: chosen.state[name] for name in ("components", "controllers", "workflow_custom")}
    facts = {"card": card, "config": text, "workflow_name": manifest["workflow_name"]}
    CheckpointManager(out).save_agent(out / AGENT, state, facts)
    (out / "config.yaml").write_text(text)
    (out / "card.json").write_text(json.dumps(card, indent=1))
    return card


def load_policy(path: str | Path, *, device: str = "cpu", allow: Sequence[str] = ()) -> Policy:
    """Load an exported agent; every file is checked by its digest, and nothing in it can run code.

    ```python
    policy = rl_lab.load_policy("my_agent")
    actions = policy.act(observations)
    ```
    """
    folder = Path(path)
    if not (folder / AGENT / "manifest.json").is_file():
        raise UserError(
            "this is not an exported agent",
            key="path",
            value=str(folder),
            remedy="make one with `rl-lab export RUN OUT`",
        )
    composed = load_saved(folder / "config.yaml")
    device = choose_device(device)
    agent = build_agent(composed, device, allow=allow)
    try:
        checkpoint = CheckpointManager(folder).load(folder / AGENT, agent.max_bytes)
    except CheckpointError as error:
        raise UserError(f"the exported agent is damaged: {error}", key=str(folder)) from None
    if checkpoint.manifest.get("config") != (folder / "config.yaml").read_text():
        raise UserError("config.yaml is not the one that this agent was exported with", key=str(folder / "config.yaml"))
    check_fits(agent.parameters(), checkpoint.state, str(folder))
    agent.set_parameters(checkpoint.state)
    return Policy(agent.workflow, device, checkpoint.manifest["card"])
