"""Small Dreamers of all three papers, and of the third as it was first published, for tests."""

import functools

import torch

from rl_lab.components.controllers.dreamer import DreamerActor
from rl_lab.components.laprop import LaProp
from rl_lab.components.normalizers import PercentileScale
from rl_lab.components.policies import BoundedNormal, OneHot, TanhNormal, TruncatedNormal
from rl_lab.components.predictions import Bernoulli, UnitNormal
from rl_lab.components.representation.cells import GRU, BlockGRU
from rl_lab.components.representation.heads import Head
from rl_lab.components.representation.images import PooledDecoder, PooledEncoder, StridedDecoder, StridedEncoder
from rl_lab.components.representation.observations import (
    ObservationDecoder,
    ObservationEncoder,
    VectorDecoder,
    VectorEncoder,
)
from rl_lab.components.representation.rssm import RSSM
from rl_lab.components.representation.variables import Categoricals, Gaussians
from rl_lab.components.twohot import SymexpTwoHot, TwoHot
from rl_lab.core.optim import Optimizer
from rl_lab.workflows.dreamer import DreamerWorkflow

PAPERS = ("v1", "v2", "v3", "v3 of 2023")
DETER = 32
POLICIES = {
    "v1": functools.partial(TanhNormal, initial_std=0.5),
    "v2": TruncatedNormal,
    "v3": BoundedNormal,
    "v3 of 2023": BoundedNormal,
}
STYLES = {
    "v1": {"activation": "elu", "norm": "none"},
    "v2": {"activation": "elu", "norm": "none"},
    "v3": {},
    "v3 of 2023": {"norm": "layer"},
}
CELLS = {
    "v1": GRU,
    "v2": functools.partial(GRU, norm="layer"),
    "v3": BlockGRU,
    "v3 of 2023": functools.partial(GRU, activation="silu", norm="layer", input_norm="layer"),
}
SCALARS = {
    "v1": UnitNormal,
    "v2": UnitNormal,
    "v3": SymexpTwoHot,
    "v3 of 2023": functools.partial(TwoHot, 255, -20.0, 20.0),
}
KNOBS = {
    "v1": {
        "free_nats": 1.0,
        "free_average": True,
        "representation_weight": 1.0,
        "replay_value_weight": 0.0,
        "actor_gradient": "dynamics",
        "entropy_weight": 1e-3,
        "slow_rate": 1.0,
        "slow_weight": 0.0,
        "stored_latents": False,
    },
    "v2": {
        "free_nats": 1.0,
        "free_average": True,
        "dynamics_weight": 0.8,
        "representation_weight": 0.2,
        "replay_value_weight": 0.0,
        "entropy_weight": 1e-3,
        "slow_rate": 1.0,
        "slow_every": 10,
        "slow_weight": 0.0,
        "slow_targets": True,
        "stored_latents": False,
    },
    "v3": {"free_nats": 0.3, "slow_rate": 0.1},
    "v3 of 2023": {
        "free_nats": 0.3,
        "dynamics_weight": 0.5,
        "replay_value_weight": 0.0,
        "actor_gradient": "dynamics",
        "slow_rate": 0.1,
        "stored_latents": False,
    },
}


def build(paper, observation, action, seeds, *, discrete=True, lr=3e-3, units=32, **knobs):
    """Build a workflow; `observation` is a length or an image's shape."""
    torch.manual_seed(0)
    recent, style = paper.startswith("v3"), STYLES[paper]
    variable = Gaussians(8) if paper == "v1" else Categoricals(4, 4, 0.01 if recent else 0.0)
    features = DETER + variable.size
    cell = CELLS[paper](DETER, variable.size, action, units)
    if recent:
        pictures = functools.partial(PooledEncoder, depth=4, multipliers=(2, 4))
        back = functools.partial(PooledDecoder, deter=DETER, depth=4, units=units, multipliers=(2, 4))
    else:
        pictures = functools.partial(StridedEncoder, depth=8, kernels=(4, 4, 4), activation="elu")
        back = functools.partial(StridedDecoder, depth=8, kernels=(5, 6, 6), activation="elu")
    vectors = functools.partial(VectorEncoder, units=units, num_layers=2, symlog=recent, **style)
    encoder = ObservationEncoder(observation, vector=vectors, image=pictures)
    vector_back = functools.partial(VectorDecoder, units=units, num_layers=2, symlog=recent, **style)
    policy = OneHot(action) if discrete else POLICIES[paper](action)
    head = functools.partial(Head, features, units=units, num_layers=2, **style)
    scalar = SCALARS[paper]
    parts = {
        "rssm": RSSM(encoder, cell, variable, units, prior_layers=2 if paper == "v3" else 1, **style),
        "decoder": ObservationDecoder(features, observation, vector_back, back, 1.0 if recent else 0.5),
        "reward": head(scalar(), output_scale=0.0 if recent else 1.0),
        "continuation": head(Bernoulli()),
        "actor": DreamerActor(features, policy, units, 2, **style),
        "critic": head(scalar(), output_scale=0.0 if recent else 1.0),
    }
    if paper == "v3":
        trained = [parameter for part in parts.values() for parameter in part.parameters()]
        optimizers = {"model_optimizer": Optimizer(trained, functools.partial(LaProp, lr=lr))}
    else:
        adam = functools.partial(torch.optim.Adam, lr=lr, eps=1e-5)
        slowly = functools.partial(torch.optim.Adam, lr=0.2 * lr, eps=1e-5)  # the papers' actors learn more slowly, too
        model = [p for name, part in parts.items() if name not in ("actor", "critic") for p in part.parameters()]
        optimizers = {
            "model_optimizer": Optimizer(model, adam, max_grad_norm=100.0),
            "actor_optimizer": Optimizer(parts["actor"].parameters(), slowly, max_grad_norm=100.0),
            "critic_optimizer": Optimizer(parts["critic"].parameters(), adam, max_grad_norm=100.0),
        }
    if recent:
        parts["return_scale"] = PercentileScale(floor_first=False)
    own = KNOBS[paper] | ({"actor_gradient": "dynamics"} if paper == "v2" and not discrete else {})
    return DreamerWorkflow(**parts, **optimizers, generator=seeds.generator("workflow"), **(own | knobs))
