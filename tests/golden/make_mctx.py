"""Writes mctx.safetensors: Gumbel searches by mctx 0.0.71 in random tabular worlds.

pip install mctx safetensors; python tests/golden/make_mctx.py
"""

import jax
import jax.numpy as jnp
import mctx
import numpy as np
from safetensors.numpy import save_file

NUM_STATES, GAMMA = 40, 0.9
CASES = {  # actions, simulations, considered actions, depth
    "few": (4, 16, 16, 16),
    "halved": (6, 50, 4, 50),
    "shallow": (3, 24, 16, 2),
    "one": (5, 1, 16, 1),
    "many": (12, 40, 8, 10),
}


def main():
    numbers = {}
    for case, (num_actions, num_simulations, considered, depth) in CASES.items():
        draw = np.random.default_rng(len(case))
        world = {
            "successors": draw.integers(NUM_STATES, size=(NUM_STATES, num_actions)).astype(np.int32),
            "rewards": draw.normal(size=(NUM_STATES, num_actions)).astype(np.float32),
            "ended": (draw.uniform(size=NUM_STATES) < 0.2).astype(np.float32),
            "logits": draw.normal(size=(NUM_STATES, num_actions)).astype(np.float32),
            "values": draw.normal(size=NUM_STATES).astype(np.float32),
            "starts": np.arange(8, dtype=np.int32),
        }
        tables = {name: jnp.asarray(table) for name, table in world.items()}

        def recurrent(params, key, action, state, tables=tables):
            after = tables["successors"][state, action]
            output = mctx.RecurrentFnOutput(
                reward=tables["rewards"][state, action],
                discount=GAMMA * (1.0 - tables["ended"][after]),
                prior_logits=tables["logits"][after],
                value=tables["values"][after],
            )
            return output, after

        starts = tables["starts"]
        root = mctx.RootFnOutput(
            prior_logits=tables["logits"][starts], value=tables["values"][starts], embedding=starts
        )
        for scale in (0.0, 1.0):
            found = mctx.gumbel_muzero_policy(
                None,
                jax.random.PRNGKey(3),
                root,
                recurrent,
                num_simulations,
                max_depth=depth,
                max_num_considered_actions=considered,
                gumbel_scale=scale,
            )
            summary = found.search_tree.summary()
            kind = f"{case}/{'noisy' if scale else 'plain'}"
            numbers |= {
                f"{kind}/gumbel": np.array(found.search_tree.extra_data.root_gumbel),
                f"{kind}/action": np.array(found.action).astype(np.int64),
                f"{kind}/weights": np.array(found.action_weights),
                f"{kind}/visits": np.array(summary.visit_counts).astype(np.float32),
                f"{kind}/value": np.array(summary.value),
            }
        numbers |= {f"{case}/{name}": table for name, table in world.items()}
        numbers[f"{case}/knobs"] = np.array([num_actions, num_simulations, considered, depth], np.int64)
    save_file(numbers, "tests/golden/mctx.safetensors")


if __name__ == "__main__":
    main()
