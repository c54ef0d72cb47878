"""What building an experiment settles: for the process, and between its parts."""

import pytest
import torch

from rl_lab.build import build_experiment
from rl_lab.composition import load_experiment
from rl_lab.core.errors import UserError


def test_denormal_numbers_are_flushed(tmp_path):
    possible = torch.set_flush_denormal(True)
    torch.set_flush_denormal(False)
    tiny = torch.full((8,), 1e-30)
    assert tiny.mul(1e-10).count_nonzero() == 8
    build_experiment(load_experiment("ppo_cartpole"), tmp_path).close()
    assert tiny.mul(1e-10).count_nonzero() == (0 if possible else 8)


VIEW = "+buffers.large={_target_: rl_lab.data.sources.ReplaySource, shares: %s, batch_size: 16}"


def test_another_buffer_may_view_the_ring_of_the_single_one(tmp_path):
    experiment = build_experiment(load_experiment("dqn_cartpole", [VIEW % "replay"]), tmp_path)
    assert experiment.sources["large"].ring is experiment.sources["replay"].ring
    assert experiment.sources["replay"].owns_ring
    assert not experiment.sources["large"].owns_ring
    experiment.close()


def test_a_ring_that_nobody_owns_is_named(tmp_path):
    with pytest.raises(UserError, match=r"buffers\.large\.shares") as refused:
        build_experiment(load_experiment("dqn_cartpole", [VIEW % "reply"]), tmp_path)
    assert "replay" in str(refused.value)


def test_statistics_may_be_infinite_but_never_unknown(tmp_path):
    experiment = build_experiment(load_experiment("dqn_cartpole"), tmp_path)
    parts, network = experiment.parts(), experiment.components["q_network"]
    network.register_buffer("mask", torch.tensor([0.0, float("-inf")]))  # as attention has it
    network.register_buffer("count", torch.tensor(3))
    assert parts.nonfinite_part() is None
    network.mask[0] = float("nan")
    assert parts.nonfinite_part() == "q_network"
    experiment.close()


def test_one_that_only_plays_needs_no_windows(tmp_path):
    composed = load_experiment("dreamer_cartpole", ["buffer.window=2"])
    with pytest.raises(UserError, match="at least 3 rows"):
        build_experiment(composed, tmp_path)
    build_experiment(composed, tmp_path, learns=False).close()
