"""Layers of recurrent world models: linear maps, linear maps in blocks, norms; and their gradients over a whole scan.

A scan that calls a layer at each of T steps would form its weight gradient T times and add them up. With a `Tape` the
steps use detached weights and add an offset of zeros to each output; the gradient of all offsets together is that of
all outputs, so each weight gradient is one product over T * B rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_lab.components.fused import activate, attach, fuses, is_written_out
from rl_lab.core.products import linear, weight_gradient
from rl_lab.core.ranges import Count, Natural, NonNegative

Activation = Literal["silu", "elu", "relu", "tanh", "gelu"]
Normalization = Literal["rms", "layer", "none"]
Initialization = Literal["truncated", "glorot"]
ACTIVATIONS = {"silu": F.silu, "elu": F.elu, "relu": F.relu, "tanh": torch.tanh, "gelu": F.gelu}
Weights = Mapping[str, Sequence[Tensor]]  # of layers, by their keys
EPSILON = {"rms": 1e-4, "layer": 1e-3}


def initialize(weight: Tensor, fan_in: int, kind: Initialization, scale: float = 1.0) -> None:
    """Fill a weight: a normal distribution cut at two sigma of variance 1 / fan_in, or Glorot's uniform one."""
    if kind == "truncated":
        spread = 1.1368 * fan_in**-0.5  # cutting the tails shrinks the variance: this makes it up
        nn.init.trunc_normal_(weight, std=spread, a=-2.0 * spread, b=2.0 * spread)
    else:
        nn.init.xavier_uniform_(weight)
    with torch.no_grad():
        weight.mul_(scale)


def customary(norm: Normalization) -> Initialization:
    """Return how the weights of networks with this norm begin: in v3 of 2024, or in the versions before it."""
    return "truncated" if norm == "rms" else "glorot"


class Tape:
    """What the layers of one step of a scan use instead of their parameters, and what they saw.

    Without offsets the weights are constants, and nothing is recorded.
    """

    def __init__(self, weights: Weights, offsets: Mapping[str, Tensor] | None = None) -> None:
        self.weights, self.offsets = weights, offsets
        self.seen: dict[str, Tensor] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The type that the layers compute in."""
        return next(iter(self.weights.values()))[0].dtype

    def record(self, key: str, seen: Tensor, output: Tensor) -> Tensor:
        """Remember what a layer saw, and return its output with the offset added."""
        if self.offsets is None:
            return output
        self.seen[key] = seen.detach()
        return attach(output, self.offsets[key])


def fuses_with(values: Tensor, tape: Tape | None) -> bool:
    """Return whether a layer may use kernels: they record nothing on a tape."""
    return fuses(values) and (tape is None or tape.offsets is None)


class ScanLayer(nn.Module):
    """A layer that a scan may use with a tape; the recurrence that owns it gives it a `key`."""

    key = ""
    outputs: int

    def scanned(self) -> tuple[Tensor, ...]:
        """Return the weights that the steps of a scan use."""
        raise NotImplementedError

    def gradients(self, seen: Tensor, outputs: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of `scanned` from what was seen [R, ...] and the gradients of the outputs [R, ...]."""
        raise NotImplementedError


class Linear(ScanLayer):
    """A linear map whose last `num_ahead` inputs are known before a scan: `project` maps them for all steps at once."""

    def __init__(
        self,
        inputs: Count,
        outputs: Count,
        *,
        num_ahead: Natural = 0,
        bias: bool = True,
        initialization: Initialization = "truncated",
        scale: NonNegative = 1.0,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.num_scanned = inputs, outputs, inputs - num_ahead
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        initialize(self.weight, inputs, initialization, scale)

    def project(self, ahead: Tensor, tape: Tape | None = None) -> Tensor:
        """Map the inputs that are known ahead."""
        if tape is not None:
            (weight,) = tape.weights[f"{self.key}.ahead"]
            return linear(ahead.to(weight.dtype), weight)
        return linear(ahead, self.ahead())

    def ahead(self) -> Tensor:
        """Return the weights of the inputs that are known ahead [outputs, ahead]."""
        return self.weight[:, self.num_scanned :]

    def forward(self, values: Tensor, tape: Tape | None = None) -> Tensor:
        """Map all inputs, or, where some are known ahead, the others."""
        if tape is not None:
            values = values.to(tape.weights[self.key][0].dtype)
            return tape.record(self.key, values, linear(values, *tape.weights[self.key]))
        return linear(values, *self.scanned())

    def scanned(self) -> tuple[Tensor, ...]:
        """Return the weights that the steps of a scan use."""
        weight = self.weight if self.num_scanned == self.inputs else self.weight[:, : self.num_scanned]
        return (weight,) if self.bias is None else (weight, self.bias)

    def gradients(self, seen: Tensor, outputs: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of `scanned`."""
        weight = weight_gradient(seen.to(outputs.dtype), outputs, self.weight)
        return (weight,) if self.bias is None else (weight, outputs.sum(0))


class BlockLinear(ScanLayer):
    """A linear map in blocks: each block of outputs reads its own block of inputs; both are flat, block after block."""

    def __init__(
        self, inputs: Count, outputs: Count, num_blocks: Count, *, initialization: Initialization = "truncated"
    ) -> None:
        super().__init__()
        if inputs % num_blocks or outputs % num_blocks:
            raise ValueError(f"{inputs} inputs and {outputs} outputs cannot be divided into {num_blocks} blocks")
        self.inputs, self.outputs, self.num_blocks = inputs, outputs, num_blocks
        self.weight = nn.Parameter(torch.empty(num_blocks, inputs // num_blocks, outputs // num_blocks))
        self.bias = nn.Parameter(torch.zeros(outputs))
        initialize(self.weight, inputs, initialization)

    def forward(self, values: Tensor, tape: Tape | None = None) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        if tape is not None:
            values = values.to(tape.weights[self.key][0].dtype)
            return tape.record(self.key, values, self._map(values, *tape.weights[self.key]))
        return self._map(values, *self.scanned())

    def _map(self, values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = values.reshape(-1, self.num_blocks, self.inputs // self.num_blocks).transpose(0, 1)  # [G, R, in]
        outputs = torch.bmm(rows, weight).transpose(0, 1)  # [R, G, out]
        return outputs.reshape(*values.shape[:-1], self.outputs) + bias

    def scanned(self) -> tuple[Tensor, ...]:
        """Return the weights that the steps of a scan use."""
        return self.weight, self.bias

    def gradients(self, seen: Tensor, outputs: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of `scanned`."""
        blocks = [tensor.unflatten(-1, (self.num_blocks, -1)) for tensor in (seen.to(outputs.dtype), outputs)]
        weight = torch.bmm(blocks[0].permute(1, 2, 0), blocks[1].transpose(0, 1))
        return weight, outputs.sum(0)


class SharedBlockLinear(ScanLayer):
    """A linear map in blocks whose blocks of outputs also read inputs that they share, the last of them known ahead."""

    def __init__(self, inputs: Count, shared: Count, ahead: Count, outputs: Count, num_blocks: Count) -> None:
        super().__init__()
        if inputs % num_blocks or outputs % num_blocks:
            raise ValueError(f"{inputs} inputs and {outputs} outputs cannot be divided into {num_blocks} blocks")
        self.outputs, self.num_blocks, self.num_shared = outputs, num_blocks, shared
        self.num_own = inputs // num_blocks
        self.weight = nn.Parameter(torch.empty(num_blocks, self.num_own + shared + ahead, outputs // num_blocks))
        self.bias = nn.Parameter(torch.zeros(outputs))
        initialize(self.weight, inputs + (shared + ahead) * num_blocks, "truncated")

    def project(self, ahead: Tensor, tape: Tape | None = None) -> Tensor:
        """Map the inputs that are known ahead."""
        weight = self.ahead() if tape is None else tape.weights[f"{self.key}.ahead"][0]
        return linear(ahead if tape is None else ahead.to(weight.dtype), weight.T)

    def forward(self, own: Tensor, shared: Tensor, ahead: Tensor, tape: Tape | None = None) -> Tensor:
        """Map the own inputs [..., inputs] and the shared ones, and add what `project` made of the others."""
        if tape is None:
            return self._map(own, shared, *self.scanned()) + ahead
        weights = tape.weights[self.key]
        own, shared = own.to(weights[0].dtype), shared.to(weights[0].dtype)
        return tape.record(self.key, torch.cat([own, shared], -1), self._map(own, shared, *weights)) + ahead

    def _map(self, own: Tensor, shared: Tensor, weight: Tensor, shared_weight: Tensor, bias: Tensor) -> Tensor:
        rows = own.reshape(-1, self.num_blocks, self.num_own).transpose(0, 1)  # [G, R, own]
        blocks = torch.bmm(rows, weight).transpose(0, 1).reshape(*own.shape[:-1], self.outputs)
        return blocks + linear(shared, shared_weight.T, bias)

    def scanned(self) -> tuple[Tensor, ...]:
        """Return the weights that the steps of a scan use: of the own inputs, of the shared ones, and the bias."""
        return self.weight[:, : self.num_own], self._dense(self.num_own, self.num_own + self.num_shared), self.bias

    def ahead(self) -> Tensor:
        """Return the weights of the inputs that are known ahead [ahead, outputs]."""
        return self._dense(self.num_own + self.num_shared, None)

    def _dense(self, start: int, stop: int | None) -> Tensor:
        return self.weight[:, start:stop].transpose(0, 1).reshape(-1, self.outputs)

    def gradients(self, seen: Tensor, outputs: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of `scanned`."""
        own, shared = seen.to(outputs.dtype).split([self.num_own * self.num_blocks, self.num_shared], -1)
        rows, blocks = own.unflatten(-1, (self.num_blocks, -1)), outputs.unflatten(-1, (self.num_blocks, -1))
        return torch.bmm(rows.permute(1, 2, 0), blocks.transpose(0, 1)), shared.T @ outputs, outputs.sum(0)


class Norm(ScanLayer):
    """Root-mean-square or layer norm over the last dimension, computed in float32, with a learned scale; or nothing."""

    def __init__(self, size: Count, kind: Normalization = "rms") -> None:
        super().__init__()
        self.outputs, self.kind = size, kind
        self.scale = nn.Parameter(torch.ones(size)) if kind != "none" else None
        self.shift = nn.Parameter(torch.zeros(size)) if kind == "layer" else None

    def forward(self, values: Tensor, tape: Tape | None = None) -> Tensor:
        """Normalise."""
        if self.scale is None:
            return values
        normalized = self._normalize(values).to(values.dtype)
        if tape is None:
            return self._scale(normalized, *self.scanned())
        return tape.record(self.key, normalized, self._scale(normalized, *tape.weights[self.key]))

    def activated(
        self,
        values: Tensor,
        activation: Callable[[Tensor], Tensor],
        tape: Tape | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Normalise values, to which a bias may be added, and activate them."""
        records = tape is not None and tape.offsets is not None
        if self.kind == "rms" and activation is F.silu and is_written_out(values) and not records:
            (scale,) = self.scanned() if tape is None else tape.weights[self.key]
            return activate(values, bias, scale, EPSILON["rms"])
        return activation(self(values if bias is None else values + bias, tape))

    def _normalize(self, values: Tensor) -> Tensor:
        # Both sum in float32, whatever the type of the values.
        if self.kind == "layer":
            return F.layer_norm(values, values.shape[-1:], eps=EPSILON["layer"])
        return F.rms_norm(values, values.shape[-1:], eps=EPSILON["rms"])

    @staticmethod
    def _scale(normalized: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        scaled = normalized * scale.to(normalized.dtype)
        return scaled if shift is None else scaled + shift.to(normalized.dtype)

    def scanned(self) -> tuple[Tensor, ...]:
        """Return the weights that the steps of a scan use."""
        return tuple(weight for weight in (self.scale, self.shift) if weight is not None)

    def gradients(self, seen: Tensor, outputs: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of `scanned`."""
        scale = (outputs * seen).sum(0)
        return (scale,) if self.shift is None else (scale, outputs.sum(0))


class Dense(nn.Module):
    """A linear map, a norm and an activation.

    A norm right behind a few numbers lets their direction through, not how large they are. With `keeps_size` biases
    begin as large as weights, as if a one stood beside the numbers, so that their size is kept, too.
    """

    def __init__(
        self,
        inputs: Count,
        outputs: Count,
        *,
        activation: Activation = "silu",
        norm: Normalization = "rms",
        num_ahead: Natural = 0,
        keeps_size: bool = False,
    ) -> None:
        super().__init__()
        bias = keeps_size or norm != "layer"  # which has a shift of its own
        self.linear = Linear(inputs, outputs, num_ahead=num_ahead, bias=bias, initialization=customary(norm))
        if self.linear.bias is not None and keeps_size:
            initialize(self.linear.bias, inputs, "truncated")
        self.norm = Norm(outputs, norm)
        self._activation = ACTIVATIONS[activation]
        self.is_plain = activation == "silu" and norm == "rms"

    def forward(self, values: Tensor, ahead: Tensor | None = None, tape: Tape | None = None) -> Tensor:
        """Map; `ahead` is what `linear.project` made of the inputs that were known ahead."""
        if self.is_plain and fuses_with(values, tape):  # one kernel adds the bias, too
            weight, bias = self.linear.scanned() if tape is None else tape.weights[self.linear.key]
            outputs = linear(values if tape is None else values.to(weight.dtype), weight)
        else:
            outputs, bias = self.linear(values, tape), None
        outputs = outputs if ahead is None else outputs + ahead
        return self.norm.activated(outputs, self._activation, tape, bias)


class Stack(nn.Module):
    """Dense layers of one width, and a plain linear map to the outputs if there are any.

    `output_scale` multiplies the initial weights of the last map: zero makes predictions begin at nothing.
    `keeps_size` is that of the first layer.
    """

    def __init__(
        self,
        inputs: Count,
        outputs: Natural,
        units: Count,
        num_layers: Natural,
        *,
        activation: Activation = "silu",
        norm: Normalization = "rms",
        output_scale: NonNegative = 1.0,
        keeps_size: bool = False,
    ) -> None:
        super().__init__()
        sizes = [inputs, *[units] * num_layers]
        self.layers = nn.ModuleList(
            Dense(a, b, activation=activation, norm=norm, keeps_size=keeps_size and i == 0)
            for i, (a, b) in enumerate(itertools.pairwise(sizes))
        )
        begin = customary(norm)
        self.output = Linear(sizes[-1], outputs, initialization=begin, scale=output_scale) if outputs else None
        self.outputs = outputs or sizes[-1]

    def forward(self, values: Tensor, tape: Tape | None = None) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        for layer in self.layers:
            values = layer(values, None, tape)
        return values if self.output is None else self.output(values, tape)


def keyed(module: nn.Module) -> dict[str, ScanLayer]:
    """Give the layers inside a module that have weights their names as keys, and return them."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, ScanLayer) and layer.scanned()}
    for name, layer in layers.items():
        layer.key = name
    return layers


def cast_weights(layers: Sequence[ScanLayer], dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Return the weights that the steps of a scan use as constants of a type."""
    return {layer.key: [weight.detach().to(dtype) for weight in layer.scanned()] for layer in layers}


def constants(layers: Sequence[ScanLayer], dtype: torch.dtype) -> Weights:
    """Return all weights of layers as constants of a type, also those of inputs that a scan knows ahead."""
    weights = cast_weights(layers, dtype)
    for layer in layers:
        if isinstance(layer, SharedBlockLinear) or (isinstance(layer, Linear) and layer.num_scanned < layer.inputs):
            weights[f"{layer.key}.ahead"] = [layer.ahead().detach().to(dtype)]
    return weights


class _Offsets(torch.autograd.Function):
    """Zeros that stand for the influence of a layer's weights on its outputs at all steps of a scan."""

    @staticmethod
    def forward(ctx: Any, layer: ScanLayer, seen: list[Tensor], zeros: Tensor, *weights: Tensor) -> Tensor:
        """Return the zeros [T, B, outputs]."""
        ctx.layer, ctx.seen = layer, seen
        ctx.dtypes = [weight.dtype for weight in weights]
        return zeros

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the weight gradients, each formed once for all steps."""
        seen = torch.stack(ctx.seen).flatten(0, -2)
        found = ctx.layer.gradients(seen, gradients[0].flatten(0, -2))
        return None, None, None, *(entry.to(dtype) for entry, dtype in zip(found, ctx.dtypes, strict=True))


class Tapes:
    """The tapes of all steps of a scan: weights cast once, offsets, and what the layers saw, in order."""

    def __init__(self, layers: Sequence[ScanLayer], num_steps: int, num_rows: int, dtype: torch.dtype) -> None:
        self._seen: dict[str, list[Tensor]] = {layer.key: [] for layer in layers}
        self.weights = cast_weights(layers, dtype)
        steps = {layer.key: self._offsets(layer, num_steps, num_rows, dtype).unbind() for layer in layers}
        self.offsets = [{key: offsets[t] for key, offsets in steps.items()} for t in range(num_steps)]

    def _offsets(self, layer: ScanLayer, num_steps: int, num_rows: int, dtype: torch.dtype) -> Tensor:
        weights = layer.scanned()
        zeros = torch.zeros(num_steps, num_rows, layer.outputs, dtype=dtype, device=weights[0].device)
        offsets: Tensor = _Offsets.apply(layer, self._seen[layer.key], zeros, *weights)
        return offsets

    def keep(self, seen: Mapping[str, Tensor]) -> None:
        """Remember what the layers saw at the next step."""
        for key, values in seen.items():
            self._seen[key].append(values)
