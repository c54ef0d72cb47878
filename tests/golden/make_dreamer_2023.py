"""Compute one update of Dreamer v3 by the author's code of 2023, at toy size: run once, in a venv of its own.

pip install --no-deps dreamerv3==1.5.0; pip install "jax[cpu]<0.5" optax "tensorflow_probability<0.25" tf_keras-nightly
ruamel.yaml cloudpickle msgpack safetensors; then python tests/golden/make_dreamer_2023.py

Codes become the most probable ones and the noise of actions 0.5, so that the update is a function of its parameters.
The actor's is computed twice, by gradients through the model and by REINFORCE. Names and layouts are ours. The
author's weights of imagined steps begin at 1 and ours at the discount, so that his losses of actor and critic, and
their gradients, are multiplied by it. The head of the continuation says the discount everywhere.
"""

import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from dreamerv3 import agent, behaviors, embodied, jaxutils
from dreamerv3 import ninjax as nj
from safetensors.numpy import save_file
from tensorflow_probability.substrates import jax as tfp

OBSERVATION, ACTION, DETER, UNITS, VARIABLES, CLASSES, BINS, HORIZON = 5, 2, 32, 8, 4, 4, 255, 4
STEPS, BATCH, DISCOUNT = 6, 3, 1 - 1 / 333
STOCH = VARIABLES * CLASSES
FEATURES = DETER + STOCH
stop = jax.lax.stop_gradient


def most_probable(self, sample_shape=(), seed=None):
    """Return the code of the most probable class, with gradients straight through it."""
    probs = self.probs_parameter()
    code = jax.nn.one_hot(jnp.argmax(probs, -1), probs.shape[-1])
    return stop(code) + (probs - stop(probs))


jaxutils.OneHotDist.sample = most_probable
tfp.distributions.Independent.sample = lambda self, sample_shape=(), seed=None: self.distribution.sample(seed=seed)
tfp.distributions.Normal.sample = lambda self, sample_shape=(), seed=None: self.loc + 0.5 * self.scale


class Names:
    """Random parameters by our names, and where they are in the author's state."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.values: dict[str, np.ndarray] = {}
        self.theirs: dict[str, str] = {}

    def put(self, theirs: str, ours: str, value: np.ndarray) -> None:
        self.theirs[theirs], self.values[ours] = ours, value.astype(np.float32)

    def normed(self, theirs: str, weight: str, norm: str, inputs: int, outputs: int) -> None:
        self.put(f"{theirs}/kernel", weight, self.random.normal(0.0, inputs**-0.5, (outputs, inputs)))
        self.put(f"{theirs}/norm/scale", f"{norm}.scale", 1.0 + 0.2 * self.random.normal(size=outputs))
        self.put(f"{theirs}/norm/bias", f"{norm}.shift", 0.2 * self.random.normal(size=outputs))

    def dense(self, theirs: str, ours: str, inputs: int) -> None:
        self.normed(theirs, f"{ours}.linear.weight", f"{ours}.norm", inputs, UNITS)

    def linear(self, theirs: str, ours: str, outputs: int) -> None:
        self.put(f"{theirs}/kernel", f"{ours}.weight", self.random.normal(0.0, UNITS**-0.5, (outputs, UNITS)))
        self.put(f"{theirs}/bias", f"{ours}.bias", 0.2 * self.random.normal(size=outputs))

    def network(self, theirs: str, ours: str, inputs: int) -> None:
        self.dense(f"{theirs}/h0", f"{ours}.layers.0", inputs)
        self.dense(f"{theirs}/h1", f"{ours}.layers.1", UNITS)


def parameters() -> Names:
    """Return all parameters of model, actor and both critics."""
    names, rssm, behaviour = Names(), "wm/rssm", "task_behavior"
    names.network("wm/enc/mlp", "rssm/encoder.vector.network", OBSERVATION)
    names.dense(f"{rssm}/img_in", "rssm/cell.dense", STOCH + ACTION)
    names.normed(f"{rssm}/gru", "rssm/cell.gates.weight", "rssm/cell.norm", UNITS + DETER, 3 * DETER)
    names.dense(f"{rssm}/img_out", "rssm/prior.layers.0", DETER)
    names.linear(f"{rssm}/img_stats", "rssm/prior.output", STOCH)
    names.dense(f"{rssm}/obs_out", "rssm/posterior", DETER + UNITS)
    names.linear(f"{rssm}/obs_stats", "rssm/posterior_output", STOCH)
    names.network("wm/dec/mlp", "decoder/vector.network", FEATURES)
    names.linear("wm/dec/mlp/dist_observation/out", "decoder/vector.network.output", OBSERVATION)
    heads = [("wm/rew", "reward", BINS), ("wm/cont", "continuation", 1)]
    heads += [(f"{behaviour}/critic/net", "critic", BINS), (f"{behaviour}/critic/slow", "slow_critic", BINS)]
    for theirs, ours, outputs in heads:
        names.network(theirs, f"{ours}/network", FEATURES)
        names.linear(f"{theirs}/dist_out/out", f"{ours}/network.output", outputs)
    names.network(f"{behaviour}/ac/actor", "actor/network", FEATURES)
    for i, part in enumerate(("out", "std")):
        names.linear(f"{behaviour}/ac/actor/dist_out/{part}", f"actor/outputs.{i}", ACTION)
    names.values["continuation/network.output.weight"] *= 0.0
    names.values["continuation/network.output.bias"][:] = np.log(DISCOUNT / (1 - DISCOUNT))
    return names


def as_theirs(ours: str, value: np.ndarray) -> np.ndarray:
    """Return a parameter in the author's layout: inputs first, and the old state before the other inputs of gates."""
    if ours == "rssm/cell.gates.weight":
        value = np.concatenate([value[:, UNITS:], value[:, :UNITS]], 1)
    return value.T


def as_ours(ours: str, value: np.ndarray) -> np.ndarray:
    """Return a gradient in our layout."""
    value = np.asarray(value).T
    if ours == "rssm/cell.gates.weight":
        value = np.concatenate([value[:, DETER:], value[:, :DETER]], 1)
    return value


def configuration() -> embodied.Config:
    """Return the author's configuration for vectors of the control suite, at toy size."""
    config = embodied.Config(agent.Agent.configs["defaults"]).update(agent.Agent.configs["dmc_proprio"])
    sizes = {"rssm.deter": DETER, "rssm.stoch": VARIABLES, "rssm.classes": CLASSES, "imag_horizon": HORIZON}
    observed = {
        f"{name}.mlp_{what}": n for name in ("encoder", "decoder") for what, n in (("layers", 2), ("units", UNITS))
    }
    patterns = {r".*\.units$": UNITS, r".*\.bins$": BINS}
    return config.update({"jax.precision": "float32", "rssm.initial": "zeros", **sizes, **observed, **patterns})


def main() -> None:
    config = configuration()
    flags = {name: embodied.Space(bool) for name in ("is_first", "is_last", "is_terminal")}
    seen = {"observation": embodied.Space(np.float32, (OBSERVATION,)), "reward": embodied.Space(np.float32), **flags}
    actions = {"action": embodied.Space(np.float32, (ACTION,), -1, 1)}
    model = agent.WorldModel(seen, actions, config, name="wm")
    learner = behaviors.Greedy(model, actions["action"], config, name="task_behavior").ac
    critic = learner.critics["extr"]
    random = np.random.default_rng(1)
    batch = {
        "observations": 2.0 * random.normal(size=(STEPS, BATCH, OBSERVATION)),
        "actions": 1.5 * random.normal(size=(STEPS, BATCH, ACTION)),
        "rewards": 2.0 * random.random((STEPS, BATCH)),
        "is_first": np.zeros((STEPS, BATCH)),
    }
    batch["is_first"][0] = batch["is_first"][3, 1] = 1.0
    batch["rewards"] *= 1.0 - batch["is_first"]  # nothing brought an episode's first observation
    batch = {name: column.astype(np.float32) for name, column in batch.items()}
    data = {"observation": "observations", "action": "actions", "reward": "rewards", "is_first": "is_first"}
    data = {theirs: jnp.asarray(np.swapaxes(batch[ours], 0, 1)) for theirs, ours in data.items()}
    nothing = jnp.zeros((BATCH, STEPS))
    data |= {"is_last": nothing, "is_terminal": nothing, "cont": nothing + 1.0}

    def update(data):
        def model_loss(data):
            _, (_, outs, _) = model.loss(data, model.initial(BATCH))
            losses = {name: outs[f"{name}_loss"].mean() for name in ("observation", "reward", "dyn", "rep")}
            total = losses["observation"] + losses["reward"] + 0.5 * losses["dyn"] + 0.1 * losses["rep"]
            return total, (outs["post"], losses)

        def actor_loss(start):
            def policy(state):
                return learner.actor(jax.tree_util.tree_map(stop, state)).sample(seed=nj.rng())

            dream = model.imagine(policy, start, config.imag_horizon)
            return learner.loss(dream)[0], dream

        def critic_loss(dream, targets):
            return critic.loss(dream, targets)[0], None

        parts = [model.encoder, model.rssm, *model.heads.values()]
        _, _, of_model, (states, losses) = nj.grad(model_loss, parts, has_aux=True)(data)
        start = {**data, **states}
        start = jax.tree_util.tree_map(lambda leaf: stop(leaf).reshape([-1, *leaf.shape[2:]]), start)
        of_actor = {}
        for learner.grad, kind in (("backprop", "dynamics"), ("reinforce", "reinforce")):
            losses[kind], _, of_actor[kind], dream = nj.grad(actor_loss, [learner.actor], has_aux=True)(start)
        targets = stop(critic.score(dream)[1])
        losses["critic"], _, of_critic, _ = nj.grad(critic_loss, [critic.net], has_aux=True)(dream, targets)
        return losses, of_model, of_actor, of_critic

    names, pure = parameters(), nj.pure(update)
    _, state = pure({}, jax.random.PRNGKey(0), data, create=True, modify=True)
    state = {name: jnp.zeros_like(value) if "retnorm" in name else value for name, value in state.items()}
    state |= {theirs: jnp.asarray(as_theirs(ours, names.values[ours])) for theirs, ours in names.theirs.items()}
    (losses, of_model, of_actor, of_critic), _ = pure(state, jax.random.PRNGKey(0), data, create=False, modify=True)
    ours = {"observation": "reconstruction", "dyn": "dynamics_of_model", "rep": "representation"}
    of_dreams = ("dynamics", "reinforce", "critic")
    numbers = {f"batch/{name}": column for name, column in batch.items()}
    numbers |= {f"before/{name}": value for name, value in names.values.items()}
    for name, loss in losses.items():
        numbers[f"loss/{ours.get(name, name)}"] = np.asarray(loss) * (DISCOUNT if name in of_dreams else 1.0)
    found = [("gradient", 1.0, of_model), ("gradient", DISCOUNT, of_critic)]
    found += [(f"gradient/{kind}", DISCOUNT, gradients) for kind, gradients in of_actor.items()]
    for place, factor, gradients in found:
        for theirs, gradient in gradients.items():
            name = names.theirs[theirs]
            if not name.startswith("continuation"):
                numbers[f"{place}/{name}"] = factor * as_ours(name, gradient)
    path = Path(__file__).parent / "dreamer_2023.safetensors"
    save_file({name: np.array(value, np.float32, order="C") for name, value in numbers.items()}, path)
    print({name: float(value) for name, value in numbers.items() if name.startswith("loss/")})


if __name__ == "__main__":
    main()
