"""RSSM: a recurrent state-space model (Hafner et al. 2019): a deterministic memory and stochastic variables.

Which paper's model it is depends on its parts: Gaussian variables and a gated recurrent unit make that of Dreamer v1,
categorical ones that of v2, categorical ones with a uniform share and a cell in blocks that of v3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_lab.components.layers import (
    Activation,
    Dense,
    Linear,
    Normalization,
    Stack,
    Tape,
    Tapes,
    Weights,
    constants,
    customary,
    keyed,
)
from rl_lab.components.representation.scan import Given, Parts, scan
from rl_lab.core.batch import Tree
from rl_lab.core.errors import UserError
from rl_lab.core.ranges import Count

State = dict[str, Tensor]  # "deter" [..., D] and "stoch" [..., S]


class Observed(NamedTuple):
    """What a model makes of a sequence: states, and the parameters of their variables."""

    states: State
    posterior: Tensor  # after seeing the observation
    prior: Tensor  # before


class RSSM(nn.Module):
    """The state after an observation depends on the state before, the action that led there, and the observation."""

    pure = ("encode", "predict", "step", "imagine_step")  # methods without chance, which may be compiled

    def __init__(
        self,
        encoder: nn.Module,  # observations to embeddings [..., encoder.outputs]
        cell: nn.Module,  # moves the deterministic part on
        variable: Any,  # what the stochastic part is
        units: Count,
        prior_layers: Count = 1,
        activation: Activation = "silu",
        norm: Normalization = "rms",
    ) -> None:
        super().__init__()
        if cell.stoch != variable.size:
            raise UserError(
                f"the variables are {variable.size} numbers together, but the cell takes {cell.stoch}",
                key="cell.stoch",
                value=cell.stoch,
                remedy=f"set _dims.stoch={variable.size}, or change the number of variables or classes",
            )
        self.encoder, self.cell, self.variable = encoder, cell, variable
        deter, num_embedded = cell.deter, encoder.outputs
        self.posterior = Dense(deter + num_embedded, units, activation=activation, norm=norm, num_ahead=num_embedded)
        self.posterior_output = Linear(units, variable.num_parameters, initialization=customary(norm))
        self.prior = Stack(deter, variable.num_parameters, units, prior_layers, activation=activation, norm=norm)
        layers = keyed(self)
        in_scan = ("cell.", "posterior")
        self._scanned = [
            layer
            for name, layer in layers.items()
            if name.startswith(in_scan) and not name.startswith("cell.from_action")
        ]
        self._imagined = [layer for name, layer in layers.items() if name.startswith(("cell.", "prior."))]

    @property
    def num_features(self) -> int:
        """How many numbers describe a state."""
        return self.cell.deter + self.variable.size

    def encode(self, observations: Tree) -> Tensor:
        """Return embeddings [..., E] of observations."""
        return self.encoder(observations)

    def initial(self, num_rows: int, device: torch.device | str) -> State:
        """Return the state before anything was seen: zeros."""
        sizes = {"deter": self.cell.deter, "stoch": self.variable.size}
        return {name: torch.zeros(num_rows, size, device=device) for name, size in sizes.items()}

    def observe(
        self, state: Mapping[str, Tensor], actions: Tensor, embeddings: Tensor, is_first: Tensor, draws: Tensor
    ) -> tuple[State, Tensor]:
        """Take in one observation; return the state and the parameters of its variables.

        `actions` [B, A] led to the observation. Where an episode begins neither they nor the state before count.
        """
        keep = (~is_first).unsqueeze(-1).float()
        ahead = self.cell.ahead(actions * keep)
        embedded = self.posterior.linear.project(embeddings)
        deter, stoch, parameters, _ = self.step(state["deter"], state["stoch"], ahead, embedded, keep, draws)
        return {"deter": deter, "stoch": stoch}, parameters

    def observe_sequence(
        self, state: Mapping[str, Tensor], actions: Tensor, embeddings: Tensor, is_first: Tensor, draws: Tensor
    ) -> Observed:
        """Take in observations [T, B] one after the other; equal to `observe` step by step, and faster.

        What the recurrence does not change is computed for all steps at once: projections of actions and embeddings
        before it, priors after it, weight gradients of its layers after the whole backward pass.
        """
        keep = (~is_first).unsqueeze(-1).float()
        ahead = self.cell.ahead(actions * keep)
        embedded = self.posterior.linear.project(embeddings)
        device = embeddings.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        ahead, embedded = ahead.to(dtype), embedded.to(dtype)
        deter, stoch = state["deter"], state["stoch"]
        parts = Parts(self.cell, self.posterior, self.posterior_output, self.variable)
        if parts.can_scan(deter, stoch):
            with torch.autocast(device, enabled=False):
                given = Given(deter, stoch, ahead, embedded, keep.squeeze(-1), draws)
                deters, stochs, posterior = scan(parts, given)
            return Observed({"deter": deters, "stoch": stochs}, posterior, self.predict(deters))
        steps: list[tuple[Tensor, Tensor, Tensor]] = []
        with torch.autocast(device, enabled=False):  # weights are cast once, not at every step
            tapes = Tapes(self._scanned, *is_first.shape, dtype)
            inputs = zip(ahead, embedded, keep, draws, tapes.offsets, strict=True)
            for ahead_now, embedded_now, keep_now, draws_now, offsets in inputs:
                deter, stoch, parameters, seen = self.step(
                    deter, stoch, ahead_now, embedded_now, keep_now, draws_now, tapes.weights, offsets
                )
                tapes.keep(seen)
                steps.append((deter, stoch, parameters))
        deters, stochs, posterior = (torch.stack(column) for column in zip(*steps, strict=True))
        return Observed({"deter": deters, "stoch": stochs}, posterior, self.predict(deters))

    def predict(self, deter: Tensor) -> Tensor:
        """Return the parameters of the variables before an observation is seen."""
        return self.prior(deter)

    def step(
        self,
        deter: Tensor,
        stoch: Tensor,
        ahead: Tensor,
        embedded: Tensor,
        keep: Tensor,
        draws: Tensor,
        weights: Weights | None = None,
        offsets: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Move on by one observation, with the parameters or with those of a tape; return also what the layers saw."""
        tape = None if weights is None or offsets is None else Tape(weights, offsets)
        deter = self.cell(deter * keep, stoch * keep, ahead, tape)
        parameters = self.posterior_output(self.posterior(deter, embedded, tape), tape)
        return deter, self.variable.sample(parameters, draws), parameters, {} if tape is None else tape.seen

    def constants(self, dtype: torch.dtype) -> Weights:
        """Return the weights that imagination uses as constants of a type, for many steps."""
        return constants(self._imagined, dtype)

    def imagine_step(
        self, state: Mapping[str, Tensor], actions: Tensor, draws: Tensor, weights: Weights | None = None
    ) -> State:
        """Move on by an action [..., A] without an observation; with `weights`, as if they were the parameters."""
        tape = None if weights is None else Tape(weights)
        deter = self.cell(state["deter"], state["stoch"], self.cell.ahead(actions, tape), tape)
        return {"deter": deter, "stoch": self.variable.sample(self.prior(deter, tape), draws)}

    def features(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return what heads and controllers read of a state: [..., num_features]."""
        return torch.cat([state["deter"], state["stoch"]], -1)

    def pack(self, state: Mapping[str, Tensor]) -> State:
        """Return a state as replay stores it."""
        return {"deter": state["deter"].to(torch.bfloat16), "stoch": self.variable.pack(state["stoch"])}

    def unpack(self, stored: Mapping[str, Tensor]) -> State:
        """Return a state that replay stored; where it stored none yet, that of an episode that begins."""
        return {"deter": stored["deter"].float(), "stoch": self.variable.unpack(stored["stoch"])}
