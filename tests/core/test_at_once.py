import torch

from rl_lab.core.at_once import AtOnce


def test_without_a_gpu_one_follows_the_other():
    order = []
    answers = AtOnce(torch.device("cpu"))(lambda: order.append("first") or 1, lambda: order.append("second") or "b")
    assert answers == (1, "b")
    assert order == ["first", "second"]
