"""What the kernels of a recurrent step and of activations compute, by operations of torch: on a CPU.

Autograd would keep every intermediate result and go back through each; here they are overwritten where they lie.
`core/cell_kernels.py` and `core/activation_kernels.py` have the same functions for a GPU, and say what they fill.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_lab.core.cell_kernels import CodeGradients, Normed, PassedCodes, PassedStates, StateGradients, Step


def gate(
    gates: Tensor, states: Tensor, width: int, update_bias: float, answers: Tensor, passed: PassedStates | None = None
) -> None:
    """Fill `answers` with new states [..., D] from gates [..., 3 * D] that come in blocks of `width` entries."""
    state = states.float()
    if passed is not None:
        state = state * passed.step.keeps.unsqueeze(-1)
    _, _, update, candidate = _opened(gates, width, update_bias, None if passed is None else passed.step)
    torch.lerp(_blocks(state, width), candidate, update, out=candidate)
    mixed = candidate.view(states.shape)
    answers.copy_(mixed)
    if passed is not None:
        passed.copies.copy_(mixed)
        torch.mul(mixed, passed.step.next_keeps.unsqueeze(-1), out=passed.masked)


def gate_backward(
    gates: Tensor,
    states: Tensor,
    gradients: Tensor,
    width: int,
    update_bias: float,
    answers: tuple[Tensor, Tensor],
    more: StateGradients | None = None,
) -> None:
    """Fill `answers` with the gradients of gates and states; in a scan as if nothing had been forgotten."""
    state, gradient = states.float(), gradients.float()
    if more is not None:
        state = state * more.step.keeps.unsqueeze(-1)
        passed = (more.later + more.later_read).mul_(more.step.next_keeps.unsqueeze(-1))
        gradient = passed.add_(gradient).add_(more.read)
    reset, raw, update, candidate = _opened(gates, width, update_bias, None if more is None else more.step)
    of_reset, of_raw, of_update = _apart(answers[0], width)
    taken = update.mul(_blocks(gradient, width))
    kept = torch.sub(gradient, taken.view(gradient.shape), out=answers[1])
    inner = torch.addcmul(taken, taken * candidate, candidate, value=-1.0)
    torch.mul(candidate.sub_(_blocks(state, width)).mul_(update), _blocks(kept, width), out=of_update)
    torch.mul(inner, reset, out=of_raw)
    torch.mul(inner.mul_(raw), torch.addcmul(reset, reset, reset, value=-1.0), out=of_reset)


def sample(logits: Tensor, draws: Tensor, unimix: float, answers: Tensor, passed: PassedCodes | None = None) -> None:
    """Fill `answers` with one-hot codes of logits [R, classes], by one number in [0, 1) for each row."""
    num_classes = logits.shape[-1]
    sums = _shares(logits).mul_(1.0 - unimix).add_(unimix / num_classes).cumsum(-1)
    # The class whose share of [0, 1) the number falls into; rounding may leave the shares a little short of 1.
    chosen = (sums <= draws.reshape(-1, 1)).sum(-1, keepdim=True).clamp_(max=num_classes - 1)
    ones = sums[:, -1:].mul(0.0).add_(1.0)  # what is not a number stays visible
    answers.view(logits.shape).zero_().scatter_(-1, chosen, ones)
    if passed is not None:
        torch.mul(answers, passed.step.next_keeps.unsqueeze(-1), out=passed.masked)


def sample_backward(
    logits: Tensor, gradients: Tensor, unimix: float, answers: Tensor, more: CodeGradients | None = None
) -> None:
    """Fill `answers` with the gradient of the logits, as if the codes were the probabilities."""
    shares, gradient = _shares(logits), gradients.float()
    if more is not None:
        gradient = torch.addcmul(gradient, more.later.float(), more.step.next_keeps.unsqueeze(-1))
    gradient = gradient.view(logits.shape)
    mean = torch.linalg.vecdot(gradient, shares).unsqueeze(-1)
    found = torch.sub(gradient, mean).mul_(shares).mul_(1.0 - unimix).view(answers.shape)
    answers.copy_(found if more is None else found.add_(more.logits))


def norm_silu(values: Tensor, ahead: Tensor | None, scale: Tensor, eps: float, normed: Normed) -> None:
    """Fill `normed` with SiLU of root-mean-square normalised rows [R, size], and what the way back needs."""
    size = values.shape[-1]
    rows = values.view(-1, scale.numel() // size, size)  # groups take turns
    if ahead is not None:
        rows = rows + (ahead if ahead.numel() < values.numel() else ahead.view(rows.shape))
    roots = _roots(rows, eps)
    normed.roots.view(roots.shape[:-1]).copy_(roots.squeeze(-1))
    normalized = normed.normalized.view(rows.shape)
    normalized.copy_(rows * roots)
    torch.ops.aten.silu.out(normalized * scale, out=normed.answers.view(rows.shape))


def norm_silu_backward(
    gradients: Tensor, scale: Tensor, normalized: Tensor, roots: Tensor, answers: tuple[Tensor, Tensor]
) -> None:
    """Fill `answers` with the gradients of what went into SiLU and of what was normalised."""
    size = normalized.shape[-1]
    kept = normalized.view(-1, scale.numel() // size, size)
    of_scaled, of_values = (answer.view(kept.shape) for answer in answers)
    torch.ops.aten.silu_backward.grad_input(gradients.view(kept.shape), kept * scale, grad_input=of_scaled)
    torch.mul(of_scaled, scale, out=of_values)
    _through_norm(of_values, kept, roots.view(kept.shape[:-1]).unsqueeze(-1))


def activate(values: Tensor, bias: Tensor | None, scale: Tensor, eps: float) -> Tensor:
    """Return values [..., C] with a bias added, normalised, and SiLU."""
    rows = values if bias is None else values + bias.to(values.dtype)
    scaled = (rows * _roots(rows, eps)).to(values.dtype).mul_(scale.to(values.dtype))
    return torch.nn.functional.silu(scaled, inplace=True)


def activate_backward(
    values: Tensor, bias: Tensor | None, scale: Tensor, gradients: Tensor, eps: float, *, learns: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of values and, unless they are constants, bias and scale."""
    rows, factors = values if bias is None else values + bias.to(values.dtype), scale.to(values.dtype)
    roots = _roots(rows, eps)
    kept = (rows * roots).to(values.dtype)
    gradient = torch.ops.aten.silu_backward(gradients, kept * factors)
    leading = tuple(range(values.dim() - 1))
    of_scale = (gradient * kept).sum(leading, dtype=torch.float32) if learns else None
    _through_norm(gradient.mul_(factors), kept, roots)
    of_bias = gradient.sum(leading, dtype=torch.float32) if learns and bias is not None else None
    return gradient, of_bias, of_scale


def _opened(gates: Tensor, width: int, update_bias: float, step: Step | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return reset, candidate before reset, update, and candidate, in blocks; all but the second the caller's own."""
    reset, raw, update = _apart(gates.float() if step is None else gates.float() + step.biases, width)
    reset, update = reset.sigmoid(), (update + update_bias).sigmoid_()
    candidate = (reset * raw).mul_(2.0).sigmoid_().mul_(2.0).sub_(1.0)  # torch's tanh takes five times as long
    return reset, raw, update, candidate


def _apart(gates: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views [..., blocks, width] of the three gates."""
    reset, raw, update = gates.view(*gates.shape[:-1], -1, 3, width).unbind(-2)
    return reset, raw, update


def _blocks(values: Tensor, width: int) -> Tensor:
    return values.view(*values.shape[:-1], -1, width)


def _shares(logits: Tensor) -> Tensor:
    """Return the softmax of each row; over few classes torch's own takes six times longer."""
    shares = (logits.float() - logits.amax(-1, keepdim=True)).exp_()
    return shares.div_(shares.sum(-1, keepdim=True))


def _roots(rows: Tensor, eps: float) -> Tensor:
    """Return what rows [..., size] are normalised by, in float32."""
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32)
    return norms.square_().div_(rows.shape[-1]).add_(eps).rsqrt_()


def _through_norm(gradient: Tensor, normalized: Tensor, roots: Tensor) -> None:
    """Turn the gradient of what was normalised, in place, into that of what was there before."""
    mean = torch.linalg.vecdot(gradient, normalized).div_(normalized.shape[-1]).unsqueeze(-1)
    gradient.addcmul_(normalized, mean, value=-1.0).mul_(roots)
