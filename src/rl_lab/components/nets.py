"""Networks: multi-layer perceptrons, duelling heads and small convolutional networks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from rl_lab.components.rectified import Pass, rectified
from rl_lab.core.errors import UserError
from rl_lab.core.products import is_eager
from rl_lab.core.ranges import Count, NonNegative

Activation = Literal["tanh", "relu", "elu", "silu", "gelu"]
Initialization = Literal["torch", "orthogonal"]

ACTIVATIONS: dict[Activation, tuple[type[nn.Module], Callable[..., np.ndarray] | None]] = {
    "tanh": (nn.Tanh, np.tanh),
    "relu": (nn.ReLU, lambda x, out: np.maximum(x, 0.0, out=out)),
    "elu": (nn.ELU, None),
    "silu": (nn.SiLU, None),
    "gelu": (nn.GELU, None),
}
SMALL_BATCH = 32  # up to here NumPy's smaller overhead per call beats torch's faster kernels,
SMALL_PRODUCT = 2**18  # and up to so many multiplications in a layer


def build_mlp(
    inputs: Count,
    outputs: Count,
    hidden: Sequence[Count] = (64, 64),
    *,
    activation: Activation = "tanh",
    initialization: Initialization = "torch",
    output_gain: NonNegative = 1.0,
) -> nn.Sequential:
    """Build linear layers with an activation between them."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation '{activation}'; valid: {', '.join(ACTIVATIONS)}")
    if initialization not in get_args(Initialization):
        raise ValueError(f"unknown initialization '{initialization}'; valid: {', '.join(get_args(Initialization))}")
    sizes = [inputs, *hidden, outputs]
    layers: list[nn.Module] = []
    for i, (size_in, size_out) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(size_in, size_out)
        is_output = i == len(sizes) - 2
        if initialization == "orthogonal":
            nn.init.orthogonal_(linear.weight, output_gain if is_output else 2**0.5)
            nn.init.zeros_(linear.bias)
        layers += [linear] if is_output else [linear, ACTIVATIONS[activation][0]()]
    return nn.Sequential(*layers)


class MLP(nn.Module):
    """A multi-layer perceptron on vectors.

    Without gradients, small batches on the CPU are computed by NumPy on the same memory: acting on a few
    environments costs a fraction of torch's overhead per call. Callers need not know.
    """

    def __init__(
        self,
        inputs: Count,
        outputs: Count,
        hidden: Sequence[Count] = (64, 64),
        activation: Activation = "tanh",
        initialization: Initialization = "torch",
        output_gain: NonNegative = 1.0,
    ) -> None:
        super().__init__()
        self.layers = build_mlp(
            inputs, outputs, hidden, activation=activation, initialization=initialization, output_gain=output_gain
        )
        self._numpy_activation, self._is_rectified = ACTIVATIONS[activation][1], activation == "relu"
        self._linears = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        self._tables = [layer._parameters for layer in self._linears]  # looked up faster than through the module
        self._small_batch = min(SMALL_BATCH, SMALL_PRODUCT // max(layer.weight.numel() for layer in self._linears))
        self._views: list[tuple[np.ndarray, np.ndarray]] = []
        self._pointers: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        if (
            inputs.dim() == 2
            and inputs.shape[0] <= self._small_batch
            and self._numpy_activation is not None
            and not torch.is_grad_enabled()
            and inputs.device.type == "cpu"
            and inputs.dtype == torch.float32
        ):
            return self._forward_numpy(inputs)
        if self._is_rectified and inputs.dim() == 2 and is_eager(inputs):
            return rectified(inputs, *self._entries())
        return self.layers(inputs)

    def written(self, inputs: Tensor) -> Pass | None:
        """Return how [B, inputs] pass through the layers, or None where autograd has to follow them."""
        is_written = self._is_rectified and inputs.is_cpu and inputs.dim() == 2 and is_eager(inputs)
        return Pass(inputs, *self._entries()) if is_written else None

    def _entries(self) -> list[Tensor]:
        return [entry for table in self._tables for entry in table.values()]  # type: ignore[misc]

    def _forward_numpy(self, inputs: Tensor) -> Tensor:
        pointers = [parameter.data_ptr() for table in self._tables for parameter in table.values()]
        if pointers != self._pointers:  # moved or copied since: look at the new memory
            if self._linears[0].weight.dtype != torch.float32:
                return self.layers(inputs)  # torch says what does not fit
            self._views = [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in self._linears]
            self._pointers = pointers
        values = inputs.detach().numpy()
        if values.shape[1] != len(self._views[0][0]):
            return self.layers(inputs)  # torch says what does not fit
        for weight, bias in self._views[:-1]:
            values = np.dot(values, weight)  # faster than @ on small matrices
            values += bias
            self._numpy_activation(values, out=values)  # type: ignore[misc]
        weight, bias = self._views[-1]
        values = np.dot(values, weight)
        values += bias
        return torch.from_numpy(values)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has memory of its own, so views do not travel.
        return {**self.__dict__, "_views": [], "_pointers": []}


class DuelingMLP(nn.Module):
    """Value and advantage streams over a shared trunk (Wang et al. 2016): Q = V + A - mean(A)."""

    def __init__(
        self, inputs: Count, outputs: Count, hidden: Sequence[Count] = (64, 64), activation: Activation = "relu"
    ) -> None:
        super().__init__()
        if not hidden:
            raise UserError("a duelling network needs a hidden layer", key="hidden", value=[], remedy="such as [64]")
        *trunk, last = hidden
        self.trunk = MLP(inputs, last, trunk, activation)
        self.activation = ACTIVATIONS[activation][0]()
        self.heads = MLP(last, outputs + 1, (), activation)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return action values."""
        streams = self.heads(self.activation(self.trunk(inputs)))
        value, advantages = streams[..., :1], streams[..., 1:]
        return value + advantages - advantages.mean(-1, keepdim=True)


class ConvNet(nn.Module):
    """Strided convolutions and a perceptron, for uint8 images [..., C, H, W] of at least 8 x 8 pixels."""

    def __init__(
        self,
        inputs: Sequence[Count],
        outputs: Count,
        channels: Sequence[Count] = (16, 32),
        hidden: Sequence[Count] = (128,),
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        if len(inputs) != 3:
            raise UserError(
                "images are [C, H, W]", key="inputs", value=list(inputs), remedy="use an environment that gives images"
            )
        layers: list[nn.Module] = []
        depth = inputs[0]
        for width in channels:
            layers += [nn.Conv2d(depth, width, 3, stride=2, padding=1), ACTIVATIONS[activation][0]()]
            depth = width
        self.convolutions = nn.Sequential(*layers, nn.Flatten())
        with torch.no_grad():
            features = self.convolutions(torch.zeros(1, *inputs)).shape[1]
        self.head = build_mlp(features, outputs, hidden, activation=activation)

    def forward(self, images: Tensor) -> Tensor:
        """Map images to outputs, any number of leading dimensions."""
        leading = images.shape[:-3]
        pixels = images.reshape(-1, *images.shape[-3:]).float() / 255.0
        return self.head(self.convolutions(pixels)).reshape(*leading, -1)
