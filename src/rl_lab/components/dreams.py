"""Looking at a recurrent world model with real episodes: how long predictions hold, as numbers and as a filmstrip."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rl_lab.components.drawings import calibration_picture, draw_dream
from rl_lab.components.inspection import MAX_TAIL, calibration, last_rows, returns_to_go, spread_starts
from rl_lab.components.world_model import WorldModel
from rl_lab.core.batch import Batch, Tree, tree_map
from rl_lab.core.workflow import Inspection, Metrics

NUM_STARTS = 64  # open-loop predictions, spread over all episodes
NUM_CONTEXT = 5  # steps that are seen before
MAX_STEPS = 256  # of an episode that are looked at
HORIZONS = (1, 5, 10, 15, 30, 50)  # steps ahead whose errors are logged


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
    metrics |= _end_metrics(trajectory, model, observed.states, codes, generator)
    pictures = {}
    predicted, returned, tails = _known_returns(trajectory, value(features), model.gamma)
    if len(returned):
        metrics |= calibration("value", predicted, returned) | {"value_tail": tails.mean().item()}
        pictures["value_calibration"] = calibration_picture(predicted, returned, "return")
    dreams = _inspect_dreams(trajectory, model, observed.states, features, codes, generator)
    return Inspection(metrics | dreams.metrics, pictures | dreams.pictures)


def _inspect_dreams(
    trajectory: Batch,
    model: WorldModel,
    states: Mapping[str, Tensor],
    features: Tensor,
    codes: Tensor,
    generator: torch.Generator,
) -> Inspection:
    """Compare what the model dreams, from states [T, E] that it reached by seeing, with what happened."""
    valid, device = trajectory["valid"], trajectory.rewards.device
    enough = _starts(valid)
    if not enough.any():
        return Inspection({})
    rows, columns = spread_starts(enough, NUM_STARTS)
    horizon = int(min(max(HORIZONS), (valid.sum(0)[columns] - 1 - rows).max().item()))
    starts = tree_map(lambda leaf: leaf[rows, columns], states)
    dreamed = _open_loop(model, starts, codes, rows, columns, horizon, generator)  # [H, S, F]
    ahead = rows + 1 + torch.arange(horizon, device=device)[:, None]
    at = ahead.clamp(max=len(valid) - 1)
    inside = (ahead < len(valid)) & valid[at, columns]
    truth = tree_map(lambda leaf: leaf[at, columns], trajectory.observations)
    standing = tree_map(lambda leaf: leaf[rows, columns].unsqueeze(0), trajectory.observations)
    with model.computing(device):
        predictions = model.decoder(dreamed)
        rewards = model.reward.mean(model.reward(dreamed))
    metrics: Metrics = {}
    for name, guess in (("open_loop", predictions), ("unchanged", model.decoder.targets(standing))):
        errors = model.decoder.errors(guess, truth) / _num_entries(truth)
        for k in HORIZONS:
            if k <= horizon and inside[k - 1].any():
                metrics[f"{name}_error_{k}"] = errors[k - 1][inside[k - 1]].mean().item()
    predicted, brought = rewards[inside], trajectory.rewards[at - 1, columns][inside]
    metrics["open_loop_reward_error"] = (predicted - brought).abs().mean().item()
    metrics |= calibration("open_loop_reward", predicted, brought)
    pictures = {"reward_calibration": calibration_picture(predicted, brought, "reward")}
    length = int(inside[:, 0].sum())
    shown = [rows[0] - NUM_CONTEXT + 1 + i for i in range(NUM_CONTEXT)]
    before = features[torch.stack(shown), columns[0]]
    whole = torch.cat([before, dreamed[:length, 0]])
    seen = tree_map(lambda leaf: leaf[shown[0] : shown[0] + len(whole), columns[0]], trajectory.observations)
    return Inspection(metrics, pictures | draw_dream(seen, model.decoder.decode(whole), NUM_CONTEXT))


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


def _known_returns(trajectory: Batch, values: Tensor, discount: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, and what was returned from there on, of the steps for which that is known well enough.

    The third answer is the share of each return that is the critic's own guess.
    """
    valid = trajectory["valid"]
    last, episodes = last_rows(valid)
    ended = trajectory.terminated[last, episodes]
    guess = torch.where(ended, torch.zeros_like(values[0]), values[last, episodes])
    before = valid.clone()  # where an episode goes on, the value of its last step completes the returns before it
    before[last, episodes] &= ended
    returns, tails = returns_to_go(trajectory.rewards, trajectory.terminated, before, guess, discount)
    known = before & (tails <= MAX_TAIL)
    return values[known], returns[known], tails[known]


def _end_metrics(
    trajectory: Batch, model: WorldModel, states: Mapping[str, Tensor], codes: Tensor, generator: torch.Generator
) -> Metrics:
    """Return how ends are foreseen one step ahead: calibration, and shares of those missed and of others called so."""
    if model.continuation is None:
        return {}
    valid = trajectory["valid"]
    found = {name: leaf[valid] for name, leaf in states.items()}
    draws = model.rssm.variable.draw((int(valid.sum()),), found["deter"], generator)
    after = model.rssm.features(model.rssm.imagine_step(found, codes[valid], draws, model.rssm.constants(model.dtype)))
    with model.computing(after.device):
        chance = 1.0 - model.continuation.mean(model.continuation(after)) / model.gamma
    ended, foreseen = trajectory.terminated[valid], chance > 0.5
    metrics = calibration("termination", chance, ended.float())
    if ended.any():
        metrics["termination_missed"] = 1.0 - foreseen[ended].float().mean().item()
    if (~ended).any():
        metrics["termination_false"] = foreseen[~ended].float().mean().item()
    return metrics


def _num_entries(observations: Tree) -> int:
    leaves = observations.values() if isinstance(observations, Mapping) else [observations]
    return sum(leaf[0, 0].numel() for leaf in leaves)
