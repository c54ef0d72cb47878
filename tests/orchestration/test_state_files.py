"""State files: what comes back is what was given."""

import numpy as np
import pytest
import torch

from rl_lab.orchestration.state_files import decode, encode


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b/c": torch.ones(2)}, "a/b": {"c": torch.zeros(2)}},
        {1: torch.ones(2), "1": torch.zeros(2)},
        {"a'": torch.ones(1), "a": {"": torch.zeros(1)}, "a/": np.full(1, 2.0), "a/'": float("inf")},
    ],
)
def test_tensors_whose_paths_read_alike_are_kept_apart(state):
    def listed(tree):
        if isinstance(tree, dict):
            return {key: listed(value) for key, value in tree.items()}
        return np.asarray(tree).tolist()

    assert listed(decode(*encode(state))) == listed(state)
