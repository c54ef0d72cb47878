"""Optimizer against torch's own optimisers by hand; the guard against steps that are not finite."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rl_lab.core.optim import Optimizer
from rl_lab.core.schedules import Linear

FUSED = {
    "Adam": partial(torch.optim.Adam, lr=0.05),
    "Adam amsgrad": partial(torch.optim.Adam, lr=0.05, amsgrad=True, weight_decay=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.05),
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "SGD momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
}
NOT_FUSED = {
    "RMSprop": partial(torch.optim.RMSprop, lr=0.05, momentum=0.5),
    "Adam foreach": partial(torch.optim.Adam, lr=0.05, foreach=True),
}
EVERY = FUSED | NOT_FUSED


def network(seed=0):
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def losses_of(module, seed, scale=1.0):
    inputs = torch.randn(7, 3, generator=torch.Generator().manual_seed(seed))
    outputs = module(inputs) * scale
    return {
        "value": outputs[:, 0].square().mean(),
        "policy": outputs[:, 1].sin().mean(),
        "entropy": outputs.abs().mean(),
    }


def snapshot(optimizer):
    """Everything that a step may change, by value."""
    return (
        [parameter.detach().clone() for parameter in optimizer.parameters],
        copy.deepcopy(optimizer.torch_optimizer.state_dict()),
    )


def assert_equal_state(one, other):
    for a, b in zip(one[0], other[0], strict=True):
        assert torch.equal(a, b)
    assert one[1]["param_groups"] == other[1]["param_groups"]
    assert one[1]["state"].keys() == other[1]["state"].keys()
    for index, entries in one[1]["state"].items():
        assert entries.keys() == other[1]["state"][index].keys()
        for name, value in entries.items():
            assert value is None or torch.equal(value, other[1]["state"][index][name]), name


class NoHostSynchronisation(TorchDispatchMode):
    """Fails where a value of a tensor is asked for on the host."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{function} synchronises with the host")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("max_grad_norm", [None, 0.1, 100.0])
@pytest.mark.parametrize("name", ["Adam", "SGD", "SGD momentum", "RMSprop"])
def test_the_weighted_sum_is_minimised_as_by_hand(name, max_grad_norm):
    weights = {"policy": 0.5, "entropy": -0.01}
    ours, theirs = network(), network()
    optimizer = Optimizer(ours.parameters(), EVERY[name], max_grad_norm=max_grad_norm)
    by_hand = EVERY[name](theirs.parameters())
    assert optimizer.fused == (name in FUSED)
    for seed in range(5):
        metrics = optimizer.step(losses_of(ours, seed), weights)
        losses = losses_of(theirs, seed)
        total = losses["value"] + 0.5 * losses["policy"] - 0.01 * losses["entropy"]
        by_hand.zero_grad()
        total.backward()
        limit = float("inf") if max_grad_norm is None else max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
        by_hand.step()
        torch.testing.assert_close(metrics["loss"], total.detach())
        torch.testing.assert_close(metrics["grad_norm"], norm)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not optimizer.nonfinite


def test_every_loss_is_reported_unweighted_by_its_name_and_detached():
    module = network()
    optimizer = Optimizer(module.parameters(), FUSED["Adam"], max_grad_norm=1e-3)
    losses = losses_of(module, 0)
    metrics = optimizer.step(losses, {"value": 3.0})
    assert set(metrics) == {"value_loss", "policy_loss", "entropy_loss", "loss", "grad_norm"}
    for name, loss in losses.items():
        assert torch.equal(metrics[f"{name}_loss"], loss.detach())
    for value in metrics.values():
        assert value.dim() == 0
        assert not value.requires_grad
    assert metrics["grad_norm"] > 1e-3  # before clipping


def test_an_extra_loss_adds_its_gradient():
    """Defect 22: a custom loss contributes gradient and appears in the metrics."""
    with_extra, without = network(), network()
    for module, extra in ((with_extra, True), (without, False)):
        losses = losses_of(module, 0)
        if not extra:
            del losses["entropy"]
        metrics = Optimizer(module.parameters(), FUSED["SGD"]).step(losses)
        assert ("entropy_loss" in metrics) == extra
    assert not torch.equal(with_extra[0].weight, without[0].weight)


def test_weights_may_be_tensors():
    one, other = network(), network()
    Optimizer(one.parameters(), FUSED["SGD"]).step(losses_of(one, 0), {"value": torch.tensor(0.25)})
    Optimizer(other.parameters(), FUSED["SGD"]).step(losses_of(other, 0), {"value": 0.25})
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_weight_without_a_loss_is_refused_before_anything_changes():
    module = network()
    optimizer = Optimizer(module.parameters(), FUSED["SGD"])
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"\['entropi'\].*\['entropy', 'policy', 'value'\]"):
        optimizer.step(losses_of(module, 0), {"entropi": 0.01})
    assert_equal_state(snapshot(optimizer), before)
    with pytest.raises(ValueError, match="no losses"):
        optimizer.step({})


def test_parameters_that_are_frozen_or_absent():
    module = network()
    module[0].requires_grad_(False)
    optimizer = Optimizer(module.parameters(), FUSED["Adam"])
    assert len(optimizer.parameters) == 2
    frozen = module[0].weight.clone()
    optimizer.step(losses_of(module, 0))
    assert torch.equal(module[0].weight, frozen)
    module[2].requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        Optimizer(module.parameters(), FUSED["Adam"])


@pytest.mark.parametrize("name", ["Adam", "Adam amsgrad", "AdamW"])
def test_adam_moves_bit_for_bit_as_by_its_own_step(name):
    """Our Adam step calls the kernel without what torch does around it."""
    ours, theirs = network(), network()
    rates = {ours[0].weight: 0.3, ours[0].bias: 0.3}
    optimizer = Optimizer(ours.parameters(), EVERY[name], rates=rates)
    groups = [{"params": theirs[0].parameters(), "lr": 0.05 * 0.3}, {"params": theirs[2].parameters()}]
    by_hand = EVERY[name](groups, fused=True)
    for seed in range(6):
        optimizer.step(losses_of(ours, seed))
        by_hand.zero_grad()
        sum(losses_of(theirs, seed).values()).backward()
        by_hand.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    for mine, other in zip(optimizer.torch_optimizer.state.values(), by_hand.state.values(), strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[key], other[key]) for key in mine)


@pytest.mark.parametrize("name", EVERY)
def test_a_parameter_without_a_gradient_is_left_alone(name):
    module = network()
    rates = dict.fromkeys(module[0].parameters(), 0.5)  # a group of its own, then without any gradient
    optimizer = Optimizer(module.parameters(), EVERY[name], max_grad_norm=1.0, rates=rates)
    for seed in range(2):
        optimizer.step(losses_of(module, seed))
    before = snapshot(optimizer)
    optimizer.step({"last": module[2](torch.ones(1, 5)).sum()})
    after = snapshot(optimizer)
    for i in (0, 1):
        assert torch.equal(after[0][i], before[0][i])
        for key, value in before[1]["state"].get(i, {}).items():
            assert value is None or torch.equal(after[1]["state"][i][key], value)
    assert not torch.equal(after[0][2], before[0][2])


def test_a_loss_with_weight_zero_is_reported_and_does_nothing():
    with_zero, without = network(), network()
    losses = losses_of(with_zero, 0)
    metrics = Optimizer(with_zero.parameters(), FUSED["Adam"]).step(losses, {"entropy": 0.0})
    assert torch.equal(metrics["entropy_loss"], losses["entropy"].detach())
    others = losses_of(without, 0)
    del others["entropy"]
    assert torch.equal(Optimizer(without.parameters(), FUSED["Adam"]).step(others)["loss"], metrics["loss"])
    for a, b in zip(with_zero.parameters(), without.parameters(), strict=True):
        assert torch.equal(a, b)
    nothing = network()
    Optimizer(nothing.parameters(), FUSED["SGD"]).step(losses_of(nothing, 0), dict.fromkeys(losses, 0))
    assert torch.equal(nothing[0].weight, network()[0].weight)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("name", EVERY)
def test_a_step_that_is_not_finite_is_never_applied(name, steps_before, poison):
    module, twin = network(), network()
    optimizer = Optimizer(module.parameters(), EVERY[name], max_grad_norm=1.0)
    undisturbed = Optimizer(twin.parameters(), EVERY[name], max_grad_norm=1.0)
    for seed in range(steps_before):
        optimizer.step(losses_of(module, seed))
        undisturbed.step(losses_of(twin, seed))
    before = snapshot(optimizer)
    assert not optimizer.nonfinite
    metrics = optimizer.step(losses_of(module, 50, scale=poison))
    assert optimizer.nonfinite
    assert not torch.isfinite(metrics["loss"])
    after = snapshot(optimizer)
    if steps_before:
        assert_equal_state(after, before)
    else:
        for a, b in zip(after[0], before[0], strict=True):
            assert torch.equal(a, b)
        for entries in after[1]["state"].values():
            for value in entries.values():
                assert value is None or not value.any()
    optimizer.step(losses_of(module, 99))
    undisturbed.step(losses_of(twin, 99))
    assert optimizer.nonfinite  # sticky: the host reads it when it likes
    assert not undisturbed.nonfinite
    for a, b in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert not torch.equal(module[0].weight, before[0][0])


@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
def test_a_gradient_alone_or_a_loss_alone_that_is_not_finite_is_seen(name):
    parameter = nn.Parameter(torch.tensor([0.0, 1.0]))
    optimizer = Optimizer([parameter], EVERY[name])
    metrics = optimizer.step({"root": parameter.sqrt().sum()})  # finite, but its slope at 0 is not
    assert torch.isfinite(metrics["loss"])
    assert optimizer.nonfinite
    assert parameter.tolist() == [0.0, 1.0]

    optimizer = Optimizer([parameter], EVERY[name])
    metrics = optimizer.step({"offset": parameter.sum() + float("inf")})
    assert torch.isfinite(metrics["grad_norm"])
    assert optimizer.nonfinite
    assert parameter.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
def test_zero_grad_and_step_without_losses(name):
    ours, theirs = network(), network()
    optimizer = Optimizer(ours.parameters(), EVERY[name], max_grad_norm=0.5)
    by_hand = EVERY[name](theirs.parameters())
    for seed in range(3):
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in ours.parameters())
        losses_of(ours, seed)["value"].backward()
        metrics = optimizer.step()
        by_hand.zero_grad()
        losses_of(theirs, seed)["value"].backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        by_hand.step()
        assert set(metrics) == {"grad_norm"}
        torch.testing.assert_close(metrics["grad_norm"], norm)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="received a gradient"):
        optimizer.step()


def test_losses_whose_gradients_are_there_already():
    ours, theirs = network(), network()
    optimizer, usual = Optimizer(ours.parameters(), torch.optim.Adam), Optimizer(theirs.parameters(), torch.optim.Adam)
    for seed in range(3):
        ours.zero_grad()
        loss = losses_of(ours, seed)["value"]
        loss.backward()
        metrics = optimizer.step({"value": loss.detach()}, backward=False)
        expected = usual.step({"value": losses_of(theirs, seed)["value"]})
        assert set(metrics) == set(expected)
        for name, value in metrics.items():
            torch.testing.assert_close(value, expected[name])
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)
    assert not optimizer.nonfinite
    before = copy.deepcopy(ours)
    optimizer.step({"value": torch.tensor(float("nan"))}, backward=False)
    assert optimizer.nonfinite
    assert all(map(torch.equal, ours.parameters(), before.parameters()))


def test_gradients_do_not_add_up_over_steps():
    module = network()
    optimizer = Optimizer(module.parameters(), partial(torch.optim.SGD, lr=0.0))
    first = optimizer.step(losses_of(module, 0))["grad_norm"]
    second = optimizer.step(losses_of(module, 0))["grad_norm"]
    assert torch.equal(first, second)


def test_the_learning_rate_follows_its_schedule():
    parameter = nn.Parameter(torch.zeros(()))
    schedule = Linear(1.0, 0.0, steps=100, of="updates")
    optimizer = Optimizer([parameter], FUSED["SGD"], learning_rate=schedule)
    moved = []
    for updates in (0, 50, 75, 100, 1000):
        optimizer.advance(agent_steps=10**6, updates=updates)
        before = parameter.item()
        optimizer.step({"slope": parameter})
        moved.append(before - parameter.item())
    assert moved == pytest.approx([1.0, 0.5, 0.25, 0.0, 0.0], abs=1e-6)

    of_steps = Optimizer([parameter], FUSED["SGD"], learning_rate=Linear(1.0, 0.0, steps=100))
    of_steps.advance(agent_steps=50, updates=0)
    assert of_steps.torch_optimizer.param_groups[0]["lr"] == 0.5


def test_rates_are_factors_of_a_schedule_too():
    slow, fast = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
    schedule = Linear(1.0, 0.0, steps=100, of="updates")
    optimizer = Optimizer([slow, fast], FUSED["SGD"], learning_rate=schedule, rates={slow: 0.25})
    optimizer.advance(agent_steps=0, updates=50)
    optimizer.step({"slope": slow + fast})
    assert (slow.item(), fast.item()) == pytest.approx((-0.125, -0.5))


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
def test_scales_multiply_gradients_before_they_are_clipped_together(name):
    ours, theirs = network(), network()
    scales = dict.fromkeys(ours[0].parameters(), 0.125)
    optimizer = Optimizer(ours.parameters(), EVERY[name], max_grad_norm=0.5, scales=scales)
    by_hand = EVERY[name](theirs.parameters())
    for seed in range(4):
        norm = optimizer.step(losses_of(ours, seed))["grad_norm"]
        by_hand.zero_grad()
        sum(losses_of(theirs, seed).values()).backward()
        for parameter in theirs[0].parameters():
            parameter.grad *= 0.125
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        by_hand.step()
        torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(optimizer.torch_optimizer.param_groups) == 1  # what is saved does not depend on them


def test_a_learning_rate_held_as_a_tensor_changes_in_place():
    rate = torch.tensor(0.1)
    optimizer = Optimizer(
        [nn.Parameter(torch.zeros(()))], partial(torch.optim.Adam, lr=rate), learning_rate=Linear(1.0, 0.0, steps=4)
    )
    optimizer.advance(agent_steps=1, updates=0)
    assert optimizer.torch_optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.75


def test_without_a_schedule_advance_changes_nothing():
    optimizer = Optimizer([nn.Parameter(torch.zeros(()))], FUSED["Adam"])
    optimizer.advance(agent_steps=10, updates=10)
    assert optimizer.torch_optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("name", EVERY)
def test_a_restored_optimiser_takes_the_same_next_steps(name):
    module = network()
    optimizer = Optimizer(module.parameters(), EVERY[name], max_grad_norm=1.0)
    for seed in range(3):
        optimizer.step(losses_of(module, seed))
    twin = copy.deepcopy(module)
    restored = Optimizer(twin.parameters(), EVERY[name], max_grad_norm=1.0)
    restored.set_state(optimizer.get_state())
    # One after the other: moments that both shared would be moved twice.
    for seed in range(3, 6):
        optimizer.step(losses_of(module, seed))
    for seed in range(3, 6):
        restored.step(losses_of(twin, seed))
    assert_equal_state(snapshot(restored), snapshot(optimizer))


def test_the_sticky_flag_is_part_of_the_state():
    optimizer = Optimizer([nn.Parameter(torch.ones(()))], FUSED["Adam"])
    parameter = optimizer.parameters[0]
    good = copy.deepcopy(optimizer.get_state())
    optimizer.step({"bad": parameter * float("nan")})
    bad = copy.deepcopy(optimizer.get_state())
    flag = optimizer.nonfinite
    optimizer.set_state(good)
    assert not optimizer.nonfinite
    optimizer.set_state(bad)
    assert optimizer.nonfinite
    assert optimizer.nonfinite is flag  # changed in place


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_step_never_synchronises_with_the_host(name):
    module = network()
    optimizer = Optimizer(module.parameters(), FUSED[name], max_grad_norm=0.5)
    with NoHostSynchronisation():
        for seed in range(3):
            optimizer.step(losses_of(module, seed), {"policy": 0.5})
        optimizer.step(losses_of(module, 3, scale=float("nan")))
    assert optimizer.nonfinite


def test_the_watch_for_synchronisation_sees_one():
    module = network()
    optimizer = Optimizer(module.parameters(), NOT_FUSED["RMSprop"])
    losses = losses_of(module, 0)
    with NoHostSynchronisation(), pytest.raises(AssertionError, match="synchronises"):
        optimizer.step(losses)
    with NoHostSynchronisation(), pytest.raises(AssertionError, match="synchronises"):
        torch.ones(()).item()


def test_moments_of_any_memory_layout_go_on_where_they_were():
    runs = []
    for stop in (None, 2):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
        optimizer = Optimizer([weight], partial(torch.optim.Adam, lr=0.1))
        for step in range(4):
            if step == stop:
                saved = optimizer.get_state()
                saved["optimizer"]["state"] = {  # as a file gives it back
                    key: {name: value.contiguous() for name, value in entry.items()}
                    for key, entry in saved["optimizer"]["state"].items()
                }
                optimizer = Optimizer([weight], partial(torch.optim.Adam, lr=0.1))
                optimizer.set_state(saved)
            optimizer.step({"x": (weight * torch.arange(48.0).view(4, 3, 2, 2).sin()).square().sum()})
        runs.append(weight.data.clone())
    assert torch.equal(*runs)
