"""Cells: how the deterministic part of a recurrent state moves on, given the stochastic part and an action.

What depends on the action alone is computed ahead of a scan by `ahead`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_lab.components.fused import fuses, is_written_out, mix
from rl_lab.components.layers import (
    ACTIVATIONS,
    Activation,
    BlockLinear,
    Dense,
    Linear,
    Norm,
    Normalization,
    SharedBlockLinear,
    Tape,
)
from rl_lab.core.ranges import Count


class GRU(nn.Module):
    """A gated recurrent unit (Cho et al. 2014) behind one dense layer, as Dreamer v1, v2 and the first v3 have it.

    `norm` is that of the gates, `input_norm` that of the dense layer.
    """

    def __init__(
        self,
        deter: Count,
        stoch: Count,
        action: Count,
        units: Count,
        activation: Activation = "elu",
        norm: Normalization = "none",
        input_norm: Normalization = "none",
        update_bias: float = -1.0,
    ) -> None:
        super().__init__()
        self.deter, self.stoch, self.action, self.update_bias = deter, stoch, action, update_bias
        self.dense = Dense(stoch + action, units, activation=activation, norm=input_norm, num_ahead=action)
        self.gates = Linear(units + deter, 3 * deter, bias=norm == "none", initialization="glorot")
        self.norm = Norm(3 * deter, norm)

    def ahead(self, actions: Tensor, tape: Tape | None = None) -> Tensor:
        """Prepare what depends on actions [..., A] alone; beyond [-1, 1] only their sign counts."""
        return self.dense.linear.project(_limited(actions), tape)

    def forward(self, deter: Tensor, stoch: Tensor, ahead: Tensor, tape: Tape | None = None) -> Tensor:
        """Move on."""
        inputs = self.dense(stoch, ahead, tape)
        gates = self.norm(self.gates(torch.cat([inputs, deter], -1), tape), tape)
        return gated(deter, gates, 1, self.update_bias)


class BlockGRU(nn.Module):
    """A gated recurrent unit with weights in blocks (Hafner et al. 2024): cheap, so that its state can be large."""

    update_bias = -1.0

    def __init__(
        self,
        deter: Count,
        stoch: Count,
        action: Count,
        units: Count,
        num_blocks: Count = 8,
        activation: Activation = "silu",
        norm: Normalization = "rms",
        keeps_size: bool = False,  # of actions: see Dense
    ) -> None:
        super().__init__()
        self.deter, self.stoch, self.action, self.num_blocks = deter, stoch, action, num_blocks
        self.from_deter = Dense(deter, units, activation=activation, norm=norm)
        self.from_stoch = Dense(stoch, units, activation=activation, norm=norm)
        self.from_action = Dense(action, units, activation=activation, norm=norm, keeps_size=keeps_size)
        self.hidden = SharedBlockLinear(deter, 2 * units, units, deter, num_blocks)
        self.hidden_norm = Norm(deter, norm)
        self.gates = BlockLinear(deter, 3 * deter, num_blocks)
        self._activation = ACTIVATIONS[activation]
        self.is_plain = self.from_deter.is_plain

    def ahead(self, actions: Tensor, tape: Tape | None = None) -> Tensor:
        """Prepare what depends on actions [..., A] alone; beyond [-1, 1] only their sign counts."""
        return self.hidden.project(self.from_action(_limited(actions), None, tape), tape)

    def forward(self, deter: Tensor, stoch: Tensor, ahead: Tensor, tape: Tape | None = None) -> Tensor:
        """Move on."""
        seen = deter if tape is None else deter.to(tape.dtype)  # once for both layers that read it
        shared = torch.cat([self.from_deter(seen, None, tape), self.from_stoch(stoch, None, tape)], -1)
        hidden = self.hidden_norm.activated(self.hidden(seen, shared, ahead, tape), self._activation, tape=tape)
        return gated(deter, self.gates(hidden, tape), self.num_blocks, self.update_bias)


def _limited(actions: Tensor) -> Tensor:
    if not (actions.requires_grad and torch.is_grad_enabled()):
        return actions.clamp(-1.0, 1.0)
    return actions / actions.detach().abs().clamp(min=1.0)  # the same, and a gradient beyond the limits, too


def gated(deter: Tensor, gates: Tensor, num_blocks: int, update_bias: float) -> Tensor:
    """Mix the old state with a candidate; a negative bias makes the unit remember at first.

    Each block of `gates` [..., 3 * D] holds reset, candidate and update of its share of the state.
    """
    # On a CPU autograd goes back through the operations below as fast.
    if fuses(gates) or (is_written_out(gates) and not torch.is_grad_enabled()):
        return mix(gates, deter, deter.shape[-1] // num_blocks, update_bias)
    blocks = gates.unflatten(-1, (num_blocks, -1)).chunk(3, -1)
    reset, candidate, update = (block.flatten(-2) for block in blocks)
    candidate = (reset.sigmoid() * candidate).tanh()
    update = (update + update_bias).sigmoid()
    return update * candidate + (1.0 - update) * deter
