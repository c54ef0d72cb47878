"""Policies outside the lab: an agent exported as a folder, and loaded again in three lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from rl_lab.orchestration.run_parts import WEIGHTS
from rl_lab.orchestration.state_files import read_json
from rl_lab.run_folder import read_summary, require_run
from rl_lab.runs import saved_weights, set_weights
from rl_lab.trust import load_saved, read_text

AGENT = "agent"  # the folder of weights inside an export
MAX_TEXT_BYTES = 2**24


class Policy:
    """A trained agent: observations of one or several environments in, actions out."""

    def __init__(self, workflow: Workflow, device: str, card: dict[str, Any], *, shape: Any) -> None:
        self.workflow, self.device, self.card = workflow, device, card
        self._shape = shape  # of an observation: length, [C, H, W], or a dict of these; None: nobody knows
        self._generator = torch.Generator(device).manual_seed(0)
        self._state: Tree = None
        self._num_envs = 0

    def reset(self) -> None:
        """Forget recurrent state: a new episode begins everywhere."""
        self._num_envs = 0

    def act(self, observations: Any, *, explore: bool = False) -> np.ndarray:
        """Return one action per environment for observations [N, ...] (NumPy or torch, or a dict of them).

        Observations and actions are those of `make_env`: images are uint8 [C, H, W], continuous actions lie in [-1, 1].
        """
        known = observations if self._shape is None else as_seen(observations, self._shape)
        seen = tree_map(self._seen, known)
        num_envs = len(next(tree_leaves(seen)))
        if num_envs != self._num_envs:
            self._num_envs, self._state = num_envs, self.workflow.initial_state(num_envs)
        with torch.no_grad():
            said = self.workflow.act(seen, self._state, explore=explore, generator=self._generator)
        self._state = said.state
        return np.asarray(said.actions.cpu())

    def _seen(self, leaf: Any) -> torch.Tensor:
        tensor = torch.as_tensor(leaf)
        return tensor.to(self.device, torch.float32 if tensor.is_floating_point() else tensor.dtype)


def as_seen(observations: Any, shape: Any, key: str = "observations") -> Tree:
    """Return observations as tensors of the kind that an agent was made for; others are refused."""
    if isinstance(shape, Mapping):
        given = observations if isinstance(observations, Mapping) else {}
        for name in shape:
            if name not in given:
                raise UserError(
                    "a part of the observations is missing",
                    key=f"{key}.{name}",
                    value=list(given) if given else type(observations).__name__,
                    remedy=f"give a dict with all of these parts: {', '.join(shape)}",
                )
        seen = {name: as_seen(given[name], part, f"{key}.{name}") for name, part in shape.items()}
        numbers = {name: len(leaf) for name, leaf in seen.items()}
        if len(set(numbers.values())) > 1:
            raise UserError(
                "the parts are of different numbers of environments",
                key=key,
                value=numbers,
                remedy="give N rows of each",
            )
        return seen
    expected, kind = ([shape], "real numbers") if isinstance(shape, int) else (list(shape), "uint8 0-255")
    try:
        tensor = torch.as_tensor(observations)
        found, given = list(tensor.shape), f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    except (TypeError, ValueError, RuntimeError):  # a dict, a ragged list
        tensor, found, given = torch.empty(0), [], type(observations).__name__
    is_image = len(expected) == 3
    if found[1:] == expected and (tensor.dtype == torch.uint8 or not is_image):
        return tensor if is_image else tensor.float()
    raise UserError(
        f"this agent was made for [N, {', '.join(map(str, expected))}], {kind}",
        key=key,
        value=given,
        remedy=_mend(found, expected) or "give uint8 from 0 to 255, not fractions",
    )


def _mend(found: list[int], expected: list[int]) -> str | None:
    """Return what makes a shape fit; None where it does."""
    last = [*expected[1:], expected[0]]  # channels last
    if found == expected:
        return "add a leading dimension: observations[None]"
    if len(expected) == 3 and found[1:] == last:
        return "move channels first: np.moveaxis(observations, -1, 1)"
    if len(expected) == 3 and found == last:
        return "move channels first and add a leading dimension: np.moveaxis(observations, -1, 0)[None]"
    return None if found[1:] == expected else "give what rl_lab.make_env shows of the environment on the agent's card"


def export_policy(
    folder: str | Path, out: str | Path, *, which: str = "best", allow: Sequence[str] = ()
) -> dict[str, Any]:
    """Write the agent of a run as a folder of weights, configuration and card; return the card."""
    folder, out = Path(folder), Path(out)
    composed = load_saved(require_run(folder), allow)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError("the folder to export to is not empty", key="OUT", value=str(out), remedy="name a new one")
    config = parse_config(composed)
    agent = build_agent(composed, "cpu", allow=allow)
    chosen = saved_weights(CheckpointManager(folder), folder, which, agent.max_bytes)
    set_weights(agent, chosen)  # what could not be loaded is not exported
    manifest, summary = chosen.manifest, read_summary(folder) or {}
    card = {
        "name": config.experiment.name,
        "seed": config.experiment.seed,
        "environment": config.environment.id,
        "workflow": type(agent.workflow).__name__,
        "evaluation": manifest.get("evaluation"),
        "counters": manifest.get("counters"),
        "last_evaluation": summary.get("last_evaluation"),
        "versions": manifest["versions"],
        "commit": manifest.get("commit"),
    }
    texts = {"config.yaml": to_yaml(composed), "card.json": json.dumps(card, indent=1)}
    CheckpointManager(out).save_agent(out / AGENT, chosen.state, {"texts": texts})
    for name, text in texts.items():
        (out / name).write_text(text)
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
    composed = load_saved(folder / "config.yaml", allow)
    device = choose_device(device)
    agent = build_agent(composed, device, allow=allow)
    try:
        checkpoint = CheckpointManager(folder).load(folder / AGENT, agent.max_bytes, WEIGHTS)
    except CheckpointError as error:
        raise UserError(f"the exported agent is damaged: {error}", key=str(folder)) from None
    card = _read_card(folder, checkpoint.manifest)
    set_weights(agent, checkpoint)
    return Policy(agent.workflow, device, card, shape=parse_config(composed).dims.get("observation"))


def _read_card(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the card; an export whose card or configuration is not the one that it was made with is refused."""
    for name in ("config.yaml", "card.json"):
        try:
            same = read_text(folder / name, MAX_TEXT_BYTES) == manifest["texts"][name]
        except (OSError, ValueError, LookupError, TypeError):
            same = False
        if not same:
            raise UserError(f"{name} is not the one that this agent was exported with", key=str(folder / name))
    try:
        card = read_json(manifest["texts"]["card.json"].encode())
    except (ValueError, RecursionError):
        card = None
    if not isinstance(card, dict):
        raise UserError("the card is none", key=str(folder / "card.json"), remedy="export the agent again")
    return card
