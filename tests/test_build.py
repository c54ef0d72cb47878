"""What building an experiment settles for the process."""

import torch

from rl_lab.build import build_experiment
from rl_lab.composition import load_experiment


def test_denormal_numbers_are_flushed(tmp_path):
    possible = torch.set_flush_denormal(True)
    torch.set_flush_denormal(False)
    tiny = torch.full((8,), 1e-30)
    assert tiny.mul(1e-10).count_nonzero() == 8
    build_experiment(load_experiment("ppo_cartpole"), tmp_path).close()
    assert tiny.mul(1e-10).count_nonzero() == (0 if possible else 8)
