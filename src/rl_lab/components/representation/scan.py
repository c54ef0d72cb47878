"""The scan of a block recurrent unit with categorical variables, written out: on a GPU twelve kernels a step, each way.

`RSSM.step`, one after the other, says what it computes. Here every step writes into its place in tensors for all steps,
so that no kernel copies, casts or adds between the products; weight gradients are formed once, after the last step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_lab.components.fused import is_written_out, pieces
from rl_lab.components.layers import EPSILON, Dense, Linear, ScanLayer, cast_weights
from rl_lab.components.representation.cells import BlockGRU
from rl_lab.components.representation.variables import Categoricals
from rl_lab.core.cell_kernels import (
    CodeGradients,
    Normed,
    PassedCodes,
    PassedStates,
    StateGradients,
    Step,
)
from rl_lab.core.products import add, fill


class Parts(NamedTuple):
    """What takes in an observation."""

    cell: Any
    posterior: Dense
    output: Linear
    variable: Any

    @property
    def layers(self) -> list[ScanLayer]:
        """The layers whose weights a scan uses."""
        cell, posterior = self.cell, self.posterior
        dense = [layer for part in (cell.from_deter, cell.from_stoch) for layer in (part.linear, part.norm)]
        return [*dense, cell.hidden, cell.hidden_norm, cell.gates, posterior.linear, posterior.norm, self.output]

    def can_scan(self, deter: Tensor, stoch: Tensor) -> bool:
        """Return whether `scan` knows these parts and can start from this state: a constant."""
        known = isinstance(self.cell, BlockGRU) and isinstance(self.variable, Categoricals)
        constant = not (deter.requires_grad or stoch.requires_grad)
        return known and constant and is_written_out(deter) and self.cell.is_plain and self.posterior.is_plain


class Given(NamedTuple):
    """What a scan starts from, and what is known ahead of it, in the type to compute in."""

    deter: Tensor  # [B, D]
    stoch: Tensor  # [B, S]
    ahead: Tensor  # [T, B, D]: from the actions
    embedded: Tensor  # [T, B, U]: from the observations
    keep: Tensor  # [T, B]: 0 where an episode begins, else 1
    draws: Tensor  # [T, B, variables]


def scan(parts: Parts, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """Return the deterministic and the stochastic states [T, B, ...] and the parameters of the variables."""
    weights = [weight for layer in parts.layers for weight in layer.scanned()]
    found: tuple[Tensor, Tensor, Tensor] = _Scan.apply(parts, *given, *weights)
    return found


class _Kept(NamedTuple):
    """What the way back needs."""

    given: Given
    keeps: Tensor  # [T + 1, B]
    seen: Tensor  # [T + 1, B, D]: states as layers see them
    codes: Tensor  # [T + 1, B, S]
    read: Tensor  # [T, B, D]: states as the posterior reads them
    shared: Normed  # [T, B, 2, U]: behind the layers of the state and of the codes
    hidden: Normed  # [T, B, D]
    gates: Tensor  # [T, B, 3 * D]
    posterior: Normed  # [T, B, U]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Parts, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = Given(*(tensor.contiguous() for tensor in tensors[:6]))
        ctx.parts, ctx.dtypes = parts, [weight.dtype for weight in tensors[6:]]
        ctx.weights = cast_weights(parts.layers, given.ahead.dtype)
        answers, ctx.kept = _forth(parts, given, ctx.weights)
        ctx.save_for_backward(*answers, *tensors[6:])  # autograd refuses weights that are changed before the way back
        return answers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        answers = ctx.saved_tensors[:3]
        found = _back(ctx.parts, ctx.kept, ctx.weights, answers, tuple(g.contiguous() for g in gradients))
        of_ahead, of_embedded, *of_weights = found
        cast = (entry.to(dtype) for entry, dtype in zip(of_weights, ctx.dtypes, strict=True))
        return None, None, None, of_ahead, of_embedded, None, None, *cast


def _forth(parts: Parts, given: Given, weights: Any) -> tuple[tuple[Tensor, Tensor, Tensor], _Kept]:
    cell, variable, like, step_by = parts.cell, parts.variable, given.ahead, pieces(given.ahead)
    num_steps, num_rows, size = given.ahead.shape
    units, cell_units = parts.posterior.linear.outputs, cell.from_deter.linear.outputs
    width, eps = size // cell.num_blocks, EPSILON["rms"]
    from_deter, bias_deter, scale_deter = *weights[cell.from_deter.linear.key], *weights[cell.from_deter.norm.key]
    from_stoch, bias_stoch, scale_stoch = *weights[cell.from_stoch.linear.key], *weights[cell.from_stoch.norm.key]
    own, shared_weight, hidden_bias = weights[cell.hidden.key]
    gate_weight, gate_bias = weights[cell.gates.key]
    posterior_weight, posterior_bias = weights[parts.posterior.linear.key]
    posterior_weight = posterior_weight.contiguous()  # not at every step
    output, output_bias = weights[parts.output.key]
    biases, scales = torch.stack([bias_deter, bias_stoch]), torch.stack([scale_deter, scale_stoch])

    def room(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=like.device)

    def normed(*shape: int) -> Normed:
        return Normed(room(*shape), room(*shape), room(*shape[:-1], dtype=torch.float32))

    keeps = F.pad(given.keep, (0, 0, 0, 1))
    kept = _Kept(
        given=given,
        keeps=keeps,
        seen=room(num_steps + 1, num_rows, size),
        codes=room(num_steps + 1, num_rows, variable.size),
        read=room(num_steps, num_rows, size),
        shared=normed(num_steps, num_rows, 2, cell_units),
        hidden=normed(num_steps, num_rows, size),
        gates=room(num_steps, num_rows, 3 * size),
        posterior=normed(num_steps, num_rows, units),
    )
    kept.seen[0] = given.deter * keeps[0].unsqueeze(-1)
    kept.codes[0] = given.stoch * keeps[0].unsqueeze(-1)
    hidden, embedded = given.ahead + hidden_bias, given.embedded + posterior_bias
    pair, read = room(num_rows, 2, cell_units), room(num_rows, units)
    deters = room(num_steps, num_rows, size, dtype=torch.float32)
    stochs = room(num_steps, num_rows, variable.size, dtype=torch.float32)
    logits = room(num_steps, num_rows, variable.size)
    state = given.deter
    for t in range(num_steps):
        fill(pair[:, 0], kept.seen[t], from_deter.T)
        fill(pair[:, 1], kept.codes[t], from_stoch.T)
        step_by.norm_silu(pair.view(-1, cell_units), biases, scales, eps, Normed(*(leaf[t] for leaf in kept.shared)))
        add(hidden[t], kept.shared.answers[t].flatten(1), shared_weight)
        _blocks(hidden[t], cell).baddbmm_(_blocks(kept.seen[t], cell), own)
        step_by.norm_silu(
            hidden[t], None, *weights[cell.hidden_norm.key], eps, Normed(*(leaf[t] for leaf in kept.hidden))
        )
        torch.bmm(_blocks(kept.hidden.answers[t], cell), gate_weight, out=_blocks(kept.gates[t], cell))
        step = Step(keeps[t], keeps[t + 1], gate_bias)
        passed = PassedStates(step, kept.read[t], kept.seen[t + 1])
        step_by.gate(kept.gates[t], state, width, cell.update_bias, deters[t], passed)
        state = deters[t]
        fill(read, kept.read[t], posterior_weight.T)
        normed_now = Normed(*(leaf[t] for leaf in kept.posterior))
        step_by.norm_silu(read, embedded[t], *weights[parts.posterior.norm.key], eps, normed_now)
        fill(logits[t], normed_now.answers, output.T, output_bias)
        rows = logits[t].view(-1, variable.num_classes)
        step_by.sample(rows, given.draws[t], variable.unimix, stochs[t], PassedCodes(step, kept.codes[t + 1]))
    return (deters, stochs, logits), kept


def _back(
    parts: Parts,
    kept: _Kept,
    weights: Any,
    answers: tuple[Tensor, ...],
    gradients: tuple[Tensor, ...],
) -> list[Tensor]:
    cell, variable, given, keeps = parts.cell, parts.variable, kept.given, kept.keeps
    (num_steps, num_rows, size), step_by = given.ahead.shape, pieces(given.ahead)
    deters, _, logits = answers
    of_deters, of_stochs, of_parameters = gradients
    from_deter, from_stoch = weights[cell.from_deter.linear.key][0], weights[cell.from_stoch.linear.key][0]
    scales = torch.stack([weights[cell.from_deter.norm.key][0], weights[cell.from_stoch.norm.key][0]])
    own, shared_weight, _ = weights[cell.hidden.key]
    gate_weight, gate_bias = weights[cell.gates.key]
    posterior_weight, output = weights[parts.posterior.linear.key][0].contiguous(), weights[parts.output.key][0]
    (hidden_scale,), (posterior_scale,) = weights[cell.hidden_norm.key], weights[parts.posterior.norm.key]

    def room(like: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(like), torch.empty_like(like)

    def at(pair: tuple[Tensor, Tensor], t: int) -> tuple[Tensor, Tensor]:
        return pair[0][t], pair[1][t]

    of_logits, of_gates = torch.empty_like(logits), torch.empty_like(kept.gates)
    # of what went into SiLU, and of what was normalised
    of_posterior, of_hidden = room(kept.posterior.answers), room(kept.hidden.answers)
    of_shared = room(kept.shared.answers)
    # of what a step takes from the one before; nothing follows the last
    of_seen, of_codes = torch.zeros_like(kept.seen), torch.zeros_like(kept.codes)
    of_state = torch.zeros(kept.seen.shape, device=keeps.device)
    read, active = torch.empty_like(kept.read[0]), torch.empty_like(kept.posterior.answers[0])
    hidden, shared = torch.empty_like(kept.hidden.answers[0]), torch.empty_like(kept.shared.answers[0])
    for t in reversed(range(num_steps)):
        step = Step(keeps[t], keeps[t + 1], gate_bias)
        rows, more = logits[t].view(-1, variable.num_classes), CodeGradients(step, of_parameters[t], of_codes[t + 1])
        step_by.sample_backward(rows, of_stochs[t], variable.unimix, of_logits[t], more)
        fill(active, of_logits[t], output)
        normalized, roots = kept.posterior.normalized[t], kept.posterior.roots[t]
        step_by.norm_silu_backward(active, posterior_scale, normalized, roots, at(of_posterior, t))
        fill(read, of_posterior[1][t], posterior_weight)
        state, width = deters[t - 1] if t else given.deter, size // cell.num_blocks
        others, found = StateGradients(step, read, of_state[t + 1], of_seen[t + 1]), (of_gates[t], of_state[t])
        step_by.gate_backward(kept.gates[t], state, of_deters[t], width, cell.update_bias, found, others)
        torch.bmm(_blocks(of_gates[t], cell), gate_weight.transpose(1, 2), out=_blocks(hidden, cell))
        normalized, roots = kept.hidden.normalized[t], kept.hidden.roots[t]
        step_by.norm_silu_backward(hidden, hidden_scale, normalized, roots, at(of_hidden, t))
        fill(shared.view(num_rows, -1), of_hidden[1][t], shared_weight.T)
        normalized, roots = kept.shared.normalized[t].flatten(0, 1), kept.shared.roots[t]
        step_by.norm_silu_backward(shared, scales, normalized, roots, at(of_shared, t))
        torch.bmm(_blocks(of_hidden[1][t], cell), own.transpose(1, 2), out=_blocks(of_seen[t], cell))
        add(of_seen[t], of_shared[1][t, :, 0], from_deter)
        fill(of_codes[t], of_shared[1][t, :, 1], from_stoch)
    seen, codes, active_shared = kept.seen[:-1], kept.codes[:-1], kept.shared.answers.flatten(2)
    met = [  # what each of `parts.layers` saw, and the gradient of what it made of that
        (seen, of_shared[1][:, :, 0]),
        (kept.shared.normalized[:, :, 0], of_shared[0][:, :, 0]),
        (codes, of_shared[1][:, :, 1]),
        (kept.shared.normalized[:, :, 1], of_shared[0][:, :, 1]),
        (torch.cat([seen, active_shared], -1), of_hidden[1]),
        (kept.hidden.normalized, of_hidden[0]),
        (kept.hidden.answers, of_gates),
        (kept.read, of_posterior[1]),
        (kept.posterior.normalized, of_posterior[0]),
        (kept.posterior.answers, of_logits),
    ]
    of_weights = [
        gradient
        for layer, (inputs, outputs) in zip(parts.layers, met, strict=True)
        for gradient in layer.gradients(inputs.flatten(0, 1), outputs.flatten(0, 1))
    ]
    return [of_hidden[1], of_posterior[1], *of_weights]


def _blocks(rows: Tensor, cell: Any) -> Tensor:
    """Return rows [B, G * width] as blocks [G, B, width], without a copy."""
    return rows.unflatten(-1, (cell.num_blocks, -1)).transpose(0, 1)
