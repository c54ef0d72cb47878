"""Compute one update of Dreamer v3 by the author's code, at toy size: run once, in a venv of its own.

In a checkout of github.com/danijar/dreamerv3 (f8817c4) and with what benchmarks/peers/dreamer_v3.py needs:
PYTHONPATH=CHECKOUT:benchmarks/peers python tests/golden/make_dreamer_v3.py
Pictures are not covered; of the checkout it needs agent, rssm, and of embodied/jax nets, outs, heads, opt and utils.

Codes become the most probable ones and the noise of actions 0.5, so that the update is a function of its parameters.
An episode that terminates and one that is cut off lie inside the batch. Names and layouts are ours.
"""

from pathlib import Path

import dreamer_v3 as peer  # first: it keeps JAX on the CPU
import embodied.jax as parts
import jax
import jax.numpy as jnp
import ninjax as nj
import numpy as np
from safetensors.numpy import save_file

OBSERVATION, ACTION, DETER, UNITS, VARIABLES, CLASSES, BINS, HORIZON, BLOCKS = 5, 2, 32, 8, 4, 4, 255, 4, 8
STEPS, BATCH, LAYERS = 6, 3, 2
STOCH = VARIABLES * CLASSES
FEATURES = DETER + STOCH
RETURNS = (1.0, 5.0)  # their percentiles so far

parts.outs.OneHot.sample = lambda self, seed, shape=(): self.pred()
parts.outs.Normal.sample = lambda self, seed, shape=(): self.mean + 0.5 * self.stddev


class Names:
    """Random parameters by our names, and where they are in the author's state."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.values: dict[str, np.ndarray] = {}
        self.theirs: dict[str, str] = {}

    def put(self, theirs: str, ours: str, value: np.ndarray) -> None:
        self.theirs[theirs], self.values[ours] = ours, value.astype(np.float32)

    def linear(self, theirs: str, ours: str, inputs: int, outputs: int) -> None:
        self.put(f"{theirs}/kernel", f"{ours}.weight", self.random.normal(0.0, inputs**-0.5, (outputs, inputs)))
        self.put(f"{theirs}/bias", f"{ours}.bias", 0.2 * self.random.normal(size=outputs))

    def scale(self, theirs: str, ours: str, size: int) -> None:
        self.put(f"{theirs}/scale", f"{ours}.scale", 1.0 + 0.2 * self.random.normal(size=size))

    def dense(self, theirs: str, norm: str, ours: str, inputs: int) -> None:
        self.linear(theirs, f"{ours}.linear", inputs, UNITS)
        self.scale(norm, f"{ours}.norm", UNITS)

    def blocks(self, theirs: str, ours: str, inputs: int, outputs: int) -> None:
        shape = (BLOCKS, inputs // BLOCKS, outputs // BLOCKS)
        self.put(f"{theirs}/kernel", f"{ours}.weight", self.random.normal(0.0, (inputs // BLOCKS) ** -0.5, shape))
        self.put(f"{theirs}/bias", f"{ours}.bias", 0.2 * self.random.normal(size=outputs))

    def network(self, theirs: str, ours: str) -> None:
        for i in range(LAYERS):
            inputs = UNITS if i else FEATURES
            self.dense(f"{theirs}/mlp/linear{i}", f"{theirs}/mlp/norm{i}", f"{ours}.layers.{i}", inputs)


def parameters() -> Names:
    """Return all parameters of model, actor and both critics."""
    names = Names()
    for i in range(LAYERS):
        inputs = UNITS if i else OBSERVATION
        names.dense(f"enc/mlp{i}", f"enc/mlp{i}norm", f"rssm/encoder.vector.network.layers.{i}", inputs)
    for i, (kind, inputs) in enumerate((("deter", DETER), ("stoch", STOCH), ("action", ACTION))):
        names.dense(f"dyn/dynin{i}", f"dyn/dynin{i}norm", f"rssm/cell.from_{kind}", inputs)
    names.blocks("dyn/dynhid0", "rssm/cell.hidden", DETER + 3 * UNITS * BLOCKS, DETER)
    names.scale("dyn/dynhid0norm", "rssm/cell.hidden_norm", DETER)
    names.blocks("dyn/dyngru", "rssm/cell.gates", DETER, 3 * DETER)
    names.dense("dyn/obs0", "dyn/obs0norm", "rssm/posterior", DETER + UNITS)
    names.linear("dyn/obslogit", "rssm/posterior_output", UNITS, STOCH)
    for i in range(LAYERS):
        names.dense(f"dyn/prior{i}", f"dyn/prior{i}norm", f"rssm/prior.layers.{i}", UNITS if i else DETER)
    names.linear("dyn/priorlogit", "rssm/prior.output", UNITS, STOCH)
    names.network("dec", "decoder/vector.network")
    names.linear("dec/vec/observation/pred", "decoder/vector.network.output", UNITS, OBSERVATION)
    heads = (("rew", "reward", "logits", BINS), ("con", "continuation", "logit", 1))
    heads += (("val", "critic", "logits", BINS), ("slowval", "slow_critic", "logits", BINS))
    for theirs, ours, output, size in heads:
        names.network(theirs, f"{ours}/network")
        names.linear(f"{theirs}/head/{output}", f"{ours}/network.output", UNITS, size)
    for name in ("reward", "critic", "slow_critic"):  # values of some tens at most, as those of an agent
        names.values[f"{name}/network.output.bias"] -= (0.1 * (np.arange(BINS) - BINS // 2)) ** 2
    names.network("pol", "actor/network")
    for i, output in enumerate(("mean", "stddev")):
        names.linear(f"pol/head/action/{output}", f"actor/outputs.{i}", UNITS, ACTION)
    return names


def swapped(value: np.ndarray, first: int) -> np.ndarray:
    """Exchange the first columns with the others."""
    return np.concatenate([value[:, first:], value[:, :first]], 1)


def as_theirs(ours: str, value: np.ndarray) -> np.ndarray:
    """Return a parameter in the author's layout: inputs first; the decoder reads codes before the memory."""
    if ours == "decoder/vector.network.layers.0.linear.weight":
        value = swapped(value, DETER)
    return value.T if value.ndim == 2 else value


def as_ours(ours: str, value: np.ndarray) -> np.ndarray:
    """Return a gradient in our layout."""
    value = np.asarray(value)
    value = value.T if value.ndim == 2 else value
    return swapped(value, STOCH) if ours == "decoder/vector.network.layers.0.linear.weight" else value


def windows() -> dict[str, np.ndarray]:
    """Return observations with what brought them [T, B], and the states before the first of them."""
    random = np.random.default_rng(1)
    flag = np.zeros((STEPS, BATCH), bool)
    first, last, terminal = flag.copy(), flag.copy(), flag.copy()
    first[0, 2] = first[3, 1] = first[5, 0] = True
    last[2, 1] = last[4, 0] = terminal[2, 1] = True
    kept = ~first
    return {
        "observations": 2.0 * random.normal(size=(STEPS, BATCH, OBSERVATION)),
        "previous_actions": 1.5 * random.normal(size=(STEPS, BATCH, ACTION)) * kept[..., None],
        "rewards": 2.0 * random.random((STEPS, BATCH)) * kept,
        "is_first": first,
        "is_last": last,
        "is_terminal": terminal,
        "deter": np.tanh(random.normal(size=(BATCH, DETER))).astype(jnp.bfloat16),  # as replay keeps it
        "stoch": random.integers(0, CLASSES, (BATCH, VARIABLES)),
    }


def main() -> None:
    names, given = parameters(), windows()
    theirs = peer.learner(
        {"observation": (OBSERVATION,)},
        ACTION,
        **{"deter": DETER, "units": UNITS, "variables": VARIABLES, "classes": CLASSES},
        layers=dict.fromkeys(("enc", "dec", "rew", "con", "pol", "val"), LAYERS),
        **{"free_nats": 0.3, "imag_length": HORIZON},
        output_scales={},
    )
    columns = {"observation": "observations", "reward": "rewards"}
    columns |= {name: name for name in ("is_first", "is_last", "is_terminal")}
    seen = {name: jnp.asarray(np.swapaxes(given[ours], 0, 1)) for name, ours in columns.items()}
    seen = {name: column if column.dtype == bool else column.astype(jnp.float32) for name, column in seen.items()}
    actions = {"action": jnp.asarray(np.swapaxes(given["previous_actions"], 0, 1), jnp.float32)}
    codes = jax.nn.one_hot(given["stoch"], CLASSES)
    context = ({}, {"deter": jnp.asarray(given["deter"], jnp.float32), "stoch": codes}, {})

    def loss():
        total, (_, _, outputs, _) = peer.method("loss")(theirs, context, seen, actions, training=True)
        return total, {name: value.mean() for name, value in outputs["losses"].items()}

    state = nj.init(loss)({}, seed=0)
    chosen = {name: jnp.asarray(as_theirs(ours, names.values[ours])) for name, ours in names.theirs.items()}
    chosen |= {f"retnorm/{name}/value": jnp.float32(x) for name, x in zip(("lo", "hi"), RETURNS, strict=True)}
    assert state.keys() == chosen.keys(), state.keys() ^ chosen.keys()
    gradients = nj.pure(lambda: nj.grad(loss, peer.trained(theirs), has_aux=True)())
    _, (total, _, found, losses) = gradients(chosen, seed=0)
    numbers = {f"batch/{name}": np.asarray(column, np.float32) for name, column in given.items()}
    numbers |= {f"before/{name}": value for name, value in names.values.items()}
    numbers |= {f"loss/{name}": np.asarray(value) for name, value in losses.items()} | {"loss/total": np.asarray(total)}
    for name, gradient in found.items():
        numbers[f"gradient/{names.theirs[name]}"] = as_ours(names.theirs[name], gradient)
    path = Path(__file__).parent / "dreamer_v3.safetensors"
    save_file({name: np.array(value, np.float32, order="C") for name, value in numbers.items()}, path)
    print(len(found), {name: float(value) for name, value in numbers.items() if name.startswith("loss/")})


if __name__ == "__main__":
    main()
