"""Looking at a recurrent world model with real episodes: how long predictions hold, as numbers and as a filmstrip."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_lab.components.inspection import MAX_TAIL, calibration, last_rows, returns_to_go, spread_starts
from rl_lab.components.representation.observations import ONLY
from rl_lab.components.world_model import WorldModel
from rl_lab.core.batch import Batch, Tree, tree_map
from rl_lab.core.workflow import Inspection, Metrics

NUM_STARTS = 64  # open-loop predictions, spread over all episodes
NUM_CONTEXT = 5  # steps that are seen before
MAX_STEPS = 256  # of an episode that are looked at
HORIZONS = (1, 5, 10, 15, 30, 50)  # steps ahead whose errors are logged
PICTURE_SIDE = 64  # pixels of a frame in a filmstrip, at least
_PAPER, _TRUE, _PREDICTED = (248, 249, 251), (148, 158, 174), (49, 110, 181)


def inspect_world_model(
    trajectory: Batch,
    model: WorldModel,
    *,
    from_replay: Callable[[Tensor], Tensor],
    value: Callable[[Tensor], Tensor],
    generator: torch.Generator,
) -> Inspection:
    """Return what a model makes of evaluation episodes [T, E]; `value` is that of features, `from_replay` of actions.

    The model sees some steps, then goes on by the actions alone, and is compared with what happened.
    """
    trajectory = trajectory.select(slice(0, MAX_STEPS))
    valid, device = trajectory["valid"], trajectory.rewards.device
    codes = from_replay(trajectory.actions)
    led_here = torch.cat([torch.zeros_like(codes[:1]), codes[:-1]])
    is_first = torch.zeros_like(valid)
    is_first[0] = True
    draws = model.rssm.variable.draw(tuple(valid.shape), trajectory.rewards, generator)
    with model.computing(device):
        embeddings = model.rssm.encode(trajectory.observations)
        context = model.rssm.initial(valid.shape[1], device)
        observed = model.rssm.observe_sequence(context, led_here, embeddings, is_first, draws)
    features = model.rssm.features(observed.states)
    metrics: Metrics = {"latent_use": model.rssm.variable.usage(observed.posterior[valid])}
    metrics |= _value_metrics(trajectory, value(features), model.gamma)
    enough = _starts(valid)
    if not enough.any():
        return Inspection(metrics)
    rows, columns = spread_starts(enough, NUM_STARTS)
    horizon = int(min(max(HORIZONS), (valid.sum(0)[columns] - 1 - rows).max().item()))
    states = tree_map(lambda leaf: leaf[rows, columns], observed.states)
    dreamed = _open_loop(model, states, codes, rows, columns, horizon, generator)  # [H, S, F]
    ahead = rows + 1 + torch.arange(horizon, device=device)[:, None]
    at = ahead.clamp(max=len(valid) - 1)
    inside = (ahead < len(valid)) & valid[at, columns]
    truth = tree_map(lambda leaf: leaf[at, columns], trajectory.observations)
    with model.computing(device):
        predictions = model.decoder(dreamed)
        rewards = model.reward.mean(model.reward(dreamed))
    errors = model.decoder.loss(predictions, truth) / _num_entries(truth)
    for k in HORIZONS:
        if k <= horizon and inside[k - 1].any():
            metrics[f"open_loop_error_{k}"] = errors[k - 1][inside[k - 1]].mean().item()
    led_to = trajectory.rewards[at - 1, columns]
    metrics["open_loop_reward_error"] = (rewards - led_to)[inside].abs().mean().item()
    metrics |= _end_metrics(trajectory, model, observed.states, codes, generator)
    length = int(inside[:, 0].sum())
    shown = [rows[0] - NUM_CONTEXT + 1 + i for i in range(NUM_CONTEXT)]
    before = features[torch.stack(shown), columns[0]]
    whole = torch.cat([before, dreamed[:length, 0]])
    seen = tree_map(lambda leaf: leaf[shown[0] : shown[0] + len(whole), columns[0]], trajectory.observations)
    return Inspection(metrics, draw_dream(seen, model.decoder.decode(whole), NUM_CONTEXT))


def _starts(valid: Tensor) -> Tensor:
    """Return from which steps [T, E] a prediction can start: after the context, and as far ahead as possible."""
    lengths = valid.sum(0)
    for ahead in (max(HORIZONS), 15, 5, 1):
        rows = torch.arange(len(valid), device=valid.device)[:, None]
        enough = (rows >= NUM_CONTEXT - 1) & (rows + ahead < lengths)
        if enough.any():
            break
    return enough


def _open_loop(
    model: WorldModel,
    states: Mapping[str, Tensor],
    codes: Tensor,
    rows: Tensor,
    columns: Tensor,
    horizon: int,
    generator: torch.Generator,
) -> Tensor:
    """Return the features [H, S, F] after each of the episodes' own actions."""
    draws = model.rssm.variable.draw((horizon, len(rows)), states["deter"], generator)
    weights = model.rssm.constants(model.dtype)
    found = []
    for k in range(horizon):
        actions = codes[(rows + k).clamp(max=len(codes) - 1), columns]
        states = model.rssm.imagine_step(states, actions, draws[k], weights)
        found.append(model.rssm.features(states))
    return torch.stack(found)


def _value_metrics(trajectory: Batch, values: Tensor, discount: float) -> Metrics:
    """Compare values with what was returned, where that is known well enough."""
    valid = trajectory["valid"]
    last, episodes = last_rows(valid)
    ended = trajectory.terminated[last, episodes]
    guess = torch.where(ended, torch.zeros_like(values[0]), values[last, episodes])
    returns, tails = returns_to_go(trajectory.rewards, trajectory.terminated, valid, guess, discount)
    known = valid & (tails <= MAX_TAIL)
    return calibration(values[known], returns[known]) if known.any() else {}


def _end_metrics(
    trajectory: Batch, model: WorldModel, states: Mapping[str, Tensor], codes: Tensor, generator: torch.Generator
) -> Metrics:
    """Return the share of ends that the model does not foresee one step ahead, and of other steps taken for an end."""
    if model.continuation is None:
        return {}
    valid = trajectory["valid"]
    found = {name: leaf[valid] for name, leaf in states.items()}
    draws = model.rssm.variable.draw((int(valid.sum()),), found["deter"], generator)
    after = model.rssm.features(model.rssm.imagine_step(found, codes[valid], draws, model.rssm.constants(model.dtype)))
    with model.computing(after.device):
        foreseen = model.continuation.mean(model.continuation(after)) < 0.5 * model.gamma
    ended = trajectory.terminated[valid]
    metrics: Metrics = {}
    if ended.any():
        metrics["termination_missed"] = 1.0 - foreseen[ended].float().mean().item()
    if (~ended).any():
        metrics["termination_false"] = foreseen[~ended].float().mean().item()
    return metrics


def _num_entries(observations: Tree) -> int:
    leaves = observations.values() if isinstance(observations, Mapping) else [observations]
    return sum(leaf[0, 0].numel() for leaf in leaves)


def draw_dream(seen: Tree, dreamed: Tree, num_context: int) -> dict[str, Tensor]:
    """Draw what was seen [T, ...] above what the model decoded; it saw the first `num_context` steps only.

    Images become filmstrips with their difference below; vectors become curves.
    """
    named = seen if isinstance(seen, Mapping) else {ONLY: seen}
    decoded: Any = dreamed if isinstance(dreamed, Mapping) else {ONLY: dreamed}
    pictures = {}
    for name, true in named.items():
        title = "dream" if name == ONLY else f"dream_{name}"
        draw = filmstrip if true.dim() == 4 else curves
        pictures[title] = draw(true.cpu(), decoded[name].cpu(), num_context)
    return pictures


def filmstrip(true: Tensor, decoded: Tensor, num_context: int, num_frames: int = 16) -> Tensor:
    """Draw images uint8 [T, C, H, W]: seen, decoded, difference; the frames that the model saw have a bar above."""
    chosen = torch.arange(num_frames) * (len(true) - 1) // (num_frames - 1) if len(true) > num_frames else None
    places = torch.arange(len(true)) if chosen is None else chosen
    rows = [true[places].float(), decoded[places].float()]
    rows.append((rows[0] - rows[1]).abs())
    frames = torch.stack([_as_colours(row) for row in rows])  # [3, F, 3, H, W]
    scale = max(PICTURE_SIDE // frames.shape[-1], 1)
    frames = F.pad(frames.repeat_interleave(scale, -1).repeat_interleave(scale, -2), (2, 2, 4, 2), value=255.0)
    for column, place in enumerate(places.tolist()):
        colour = torch.tensor(_TRUE if place < num_context else _PREDICTED).float()[:, None, None]
        frames[:, column, :, :3, 2:-2] = colour
    return frames.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1).clamp(0, 255).to(torch.uint8)


def _as_colours(images: Tensor) -> Tensor:
    """Return images [F, C, H, W] with three channels: the newest of several frames, or grey."""
    return images[:, -3:] if images.shape[1] >= 3 else images[:, -1:].expand(-1, 3, -1, -1)


def curves(true: Tensor, decoded: Tensor, num_context: int, max_entries: int = 6, height: int = 48) -> Tensor:
    """Draw up to six entries of vectors [T, D], one below the other: seen in grey, decoded in blue."""
    width = max(4 * len(true), 64)
    panels = []
    for entry in range(min(true.shape[1], max_entries)):
        both = torch.stack([true[:, entry], decoded[:, entry]]).double()
        low, high = both.min(), both.max()
        levels = ((both - low) / (high - low).clamp(min=1e-9) * (height - 5)).round().long() + 2
        panel = torch.tensor(_PAPER, dtype=torch.uint8).repeat(height, width, 1)
        panel[:, 4 * num_context : 4 * num_context + 1] = torch.tensor(_TRUE, dtype=torch.uint8)
        for line, colour in zip(levels, (_TRUE, _PREDICTED), strict=True):
            for step, level in enumerate(line.tolist()):
                panel[height - 2 - level : height - level, 4 * step : 4 * step + 4] = torch.tensor(
                    colour, dtype=torch.uint8
                )
        panels.append(panel)
    return torch.cat(panels)
