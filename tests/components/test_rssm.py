"""The recurrent model against slow references: one block, one variable, one step at a time, plain autograd."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence

from rl_lab.components.layers import BlockLinear, Linear, Norm
from rl_lab.components.representation.cells import GRU, BlockGRU
from rl_lab.components.representation.rssm import RSSM
from rl_lab.components.representation.variables import Categoricals, Gaussians
from rl_lab.components.world_model import WorldModel

STEPS, BATCH, ACTION, DETER = 7, 5, 3, 16
PAPERS = ("v1", "v2", "v3", "v3 of 2023")


class Embedding(nn.Module):
    outputs = 6

    def forward(self, observations):
        return observations


def build(paper, seed=0):
    torch.manual_seed(seed)
    variable = {"v1": Gaussians(4), "v2": Categoricals(4, 5, unimix=0.0)}.get(paper, Categoricals(4, 5))
    if paper == "v3":
        model = RSSM(Embedding(), BlockGRU(DETER, variable.size, ACTION, 8), variable, 8, prior_layers=2)
    elif paper == "v3 of 2023":
        cell = GRU(DETER, variable.size, ACTION, 8, activation="silu", norm="layer", input_norm="layer")
        model = RSSM(Embedding(), cell, variable, 8, norm="layer")
    else:
        cell = GRU(DETER, variable.size, ACTION, 8, norm="layer" if paper == "v2" else "none")
        model = RSSM(Embedding(), cell, variable, 8, activation="elu", norm="none")
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def sequence(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(STEPS, BATCH, generator=generator) < 0.25
    first[2, 0] = True
    return {
        "state": {
            "deter": torch.randn(BATCH, DETER, generator=generator),
            "stoch": torch.randn(BATCH, model.variable.size, generator=generator),
        },
        "actions": 2.0 * torch.randn(STEPS, BATCH, ACTION, generator=generator),
        "embeddings": torch.randn(STEPS, BATCH, 6, generator=generator),
        "is_first": first,
        "draws": model.variable.draw((STEPS, BATCH), torch.zeros(()), generator),
    }


def step_by_step(model, state, actions, embeddings, is_first, draws):
    outputs = []
    for now in zip(actions, embeddings, is_first, draws, strict=True):
        state, parameters = model.observe(state, *now)
        outputs.append((state["deter"], state["stoch"], parameters, model.prior(state["deter"])))
    return [torch.stack(column) for column in zip(*outputs, strict=True)]


@pytest.mark.parametrize("paper", PAPERS)
def test_a_sequence_is_its_steps_and_so_are_its_gradients(paper):
    model = build(paper)
    given = sequence(model)
    weights = [torch.randn(STEPS, BATCH, size) for size in (DETER, *[model.variable.size], *[40] * 2)]
    results = []
    for scanned in (False, True):
        inputs = {
            name: {key: leaf.clone().requires_grad_() for key, leaf in value.items()}
            if name == "state"
            else value.clone().requires_grad_(name in ("actions", "embeddings"))
            for name, value in given.items()
        }
        if scanned:
            observed = model.observe_sequence(**inputs)
            outputs = [observed.states["deter"], observed.states["stoch"], observed.posterior, observed.prior]
        else:
            outputs = step_by_step(model, **inputs)
        model.zero_grad()
        sum((output * w[..., : output.shape[-1]]).sum() for output, w in zip(outputs, weights, strict=True)).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        gradients |= {"actions": inputs["actions"].grad, "embeddings": inputs["embeddings"].grad}
        gradients |= {name: leaf.grad for name, leaf in inputs["state"].items()}
        results.append((outputs, gradients))
    (outputs, gradients), (scanned_outputs, scanned_gradients) = results
    for expected, output in zip(outputs, scanned_outputs, strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    for name, expected in gradients.items():
        assert expected.abs().max() > 0, name
        torch.testing.assert_close(scanned_gradients[name], expected, rtol=2e-5, atol=1e-5, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("paper", PAPERS)
def test_an_episode_that_begins_forgets_state_and_action(paper):
    model = build(paper)
    given = sequence(model)
    given["is_first"][:] = False
    given["is_first"][3, 1] = True
    before = model.observe_sequence(**given)
    given["state"]["deter"][1] += 5.0
    given["actions"][:4, 1] = -7.0
    after = model.observe_sequence(**given)
    for name, states in before.states.items():
        assert torch.equal(states[3:, 1], after.states[name][3:, 1])
        assert torch.equal(states[:, 0], after.states[name][:, 0])
    assert not torch.allclose(before.states["deter"][:3, 1], after.states["deter"][:3, 1])
    fresh = {name: torch.zeros_like(value) for name, value in given["state"].items()}
    first = torch.zeros(BATCH, dtype=torch.bool)
    now = model.observe(fresh, torch.zeros(BATCH, ACTION), given["embeddings"][3], first, given["draws"][3])[0]
    torch.testing.assert_close(now["deter"][1], after.states["deter"][3, 1])  # the state that acting starts from


@pytest.mark.parametrize("paper", PAPERS)
def test_imagining_is_moving_on_without_looking(paper):
    model = build(paper)
    given = sequence(model)
    state, action, draws = given["state"], given["actions"][0], given["draws"][0]
    imagined = model.imagine_step(state, action, draws)
    observed, _ = model.observe(state, action, given["embeddings"][0], torch.zeros(BATCH, dtype=torch.bool), draws)
    torch.testing.assert_close(imagined["deter"], observed["deter"])
    expected = model.variable.sample(model.prior(observed["deter"]), draws)
    torch.testing.assert_close(imagined["stoch"], expected)
    assert model.features(imagined).shape == (BATCH, model.num_features)


@pytest.mark.parametrize("paper", PAPERS)
def test_stored_states_come_back(paper):
    model = build(paper)
    given = sequence(model)
    state, _ = model.observe(
        given["state"], given["actions"][0], given["embeddings"][0], *(given[n][0] for n in ("is_first", "draws"))
    )
    back = model.unpack(model.pack({name: leaf.detach() for name, leaf in state.items()}))
    assert back["deter"].dtype == back["stoch"].dtype == torch.float32
    torch.testing.assert_close(back["deter"], state["deter"].detach(), rtol=1e-2, atol=1e-2)
    tolerance = 1e-2 if paper == "v1" else 0.0
    torch.testing.assert_close(back["stoch"], state["stoch"].detach(), rtol=tolerance, atol=tolerance + 1e-6)
    if paper != "v1":
        assert model.pack(state)["stoch"].dtype == torch.uint8
        assert model.pack(state)["stoch"].shape == (BATCH, 4)


def test_block_gru_one_block_at_a_time():
    torch.manual_seed(0)
    cell = BlockGRU(16, 6, 2, 5, num_blocks=4)
    deter, stoch, action = torch.randn(3, 16), torch.randn(3, 6), torch.tensor([[0.5, -3.0], [2.0, 0.1], [0.0, -0.4]])

    def rms(values, scale):
        return values / (values.pow(2).mean(-1, keepdim=True) + 1e-4).sqrt() * scale

    def dense(layer, values):
        return F.silu(rms(values @ layer.linear.weight.T + layer.linear.bias, layer.norm.scale))

    shortened = torch.tensor([[0.5, -1.0], [1.0, 0.1], [0.0, -0.4]])
    shared = [dense(cell.from_deter, deter), dense(cell.from_stoch, stoch), dense(cell.from_action, shortened)]
    hidden = []
    for block in range(4):
        inputs = torch.cat([deter[:, 4 * block : 4 * block + 4], *shared], -1)
        hidden.append(inputs @ cell.hidden.weight[block] + cell.hidden.bias[4 * block : 4 * block + 4])
    hidden = F.silu(rms(torch.cat(hidden, -1), cell.hidden_norm.scale))  # the norm is over all blocks
    expected = []
    for block in range(4):
        gates = (
            hidden[:, 4 * block : 4 * block + 4] @ cell.gates.weight[block]
            + cell.gates.bias[12 * block : 12 * block + 12]
        )
        reset, candidate, update = gates[:, :4], gates[:, 4:8], gates[:, 8:]
        update = torch.sigmoid(update - 1.0)
        own = deter[:, 4 * block : 4 * block + 4]
        expected.append(update * torch.tanh(torch.sigmoid(reset) * candidate) + (1.0 - update) * own)
    torch.testing.assert_close(cell(deter, stoch, cell.ahead(action)), torch.cat(expected, -1))


def test_gated_unit_with_layer_norms_one_row_at_a_time():
    torch.manual_seed(0)
    cell = GRU(4, 6, 2, 5, activation="silu", norm="layer", input_norm="layer")
    for parameter in cell.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    deter, stoch, action = torch.randn(3, 4), torch.randn(3, 6), torch.tensor([[0.5, -3.0], [2.0, 0.1], [0.0, -0.4]])

    def normed(values, norm):
        centred = values - values.mean()
        return centred / (centred.square().mean() + 1e-3).sqrt() * norm.scale + norm.shift

    for row, limited in enumerate(torch.tensor([[0.5, -1.0], [1.0, 0.1], [0.0, -0.4]])):
        inputs = cell.dense.linear.weight @ torch.cat([stoch[row], limited])
        inputs = normed(inputs, cell.dense.norm)
        inputs = inputs * torch.sigmoid(inputs)
        gates = normed(cell.gates.weight @ torch.cat([inputs, deter[row]]), cell.norm)
        reset, candidate, update = torch.sigmoid(gates[:4]), gates[4:8], torch.sigmoid(gates[8:] - 1.0)
        expected = update * torch.tanh(reset * candidate) + (1.0 - update) * deter[row]
        torch.testing.assert_close(cell(deter, stoch, cell.ahead(action))[row], expected)
    assert cell.dense.linear.bias is None
    assert cell.gates.bias is None


def test_categorical_divergence_and_entropy_one_variable_at_a_time():
    generator = torch.Generator().manual_seed(0)
    left, right = (3.0 * torch.randn(2, 12, generator=generator) for _ in range(2))
    for unimix in (0.0, 0.01, 0.5):
        variable = Categoricals(3, 4, unimix)
        for row in range(2):
            divergence = entropy = 0.0
            for i in range(3):
                p, q = (
                    (1 - unimix) * torch.softmax(logits[row, 4 * i : 4 * i + 4].double(), 0) + unimix / 4
                    for logits in (left, right)
                )
                divergence += sum(p[k] * (p[k].log() - q[k].log()) for k in range(4)).item()
                entropy -= sum(p[k] * p[k].log() for k in range(4)).item()
            ours, other = variable.distribution(left), variable.distribution(right)
            assert variable.divergence(ours, other)[row].item() == pytest.approx(divergence, rel=1e-5)
            assert variable.entropy(ours)[row].item() == pytest.approx(entropy, rel=1e-5)


def test_gaussian_divergence():
    variable = Gaussians(3)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(4, 6, generator=generator) for _ in range(2))
    p, q = (Normal(x[:, :3], F.softplus(x[:, 3:]) + 0.1) for x in (left, right))
    ours, other = variable.distribution(left), variable.distribution(right)
    torch.testing.assert_close(variable.divergence(ours, other), kl_divergence(p, q).sum(-1))
    torch.testing.assert_close(variable.entropy(ours), p.entropy().sum(-1))


def test_free_nats_of_each_and_of_the_mean():
    variable = Gaussians(1, min_std=0.5)
    model = WorldModel(SimpleNamespace(variable=variable), None, None, None, 0.99, torch.float32)
    posterior = torch.tensor([[0.0, 0.0], [4.0, 0.0]], requires_grad=True)
    prior = torch.tensor([[0.1, 0.0], [0.0, 0.0]], requires_grad=True)
    plain = variable.divergence(*map(variable.distribution, (posterior, prior))).detach()
    assert plain[0] < 1 < plain[1]
    dynamics, representation, metrics = model.divergences(posterior, prior)
    assert dynamics.item() == representation.item() == pytest.approx((1 + plain[1].item()) / 2)
    assert metrics["divergence"].item() == pytest.approx(plain.mean().item())
    dynamics.backward()
    assert posterior.grad is None  # this one trains the prior,
    assert prior.grad[0].abs().sum() == 0  # where it is not free
    assert prior.grad[1].abs().sum() > 0
    prior.grad = None
    representation.backward()
    assert prior.grad is None
    assert posterior.grad[1].abs().sum() > 0
    model.free_average = True
    averaged, _, _ = model.divergences(posterior, prior)
    assert averaged.item() == pytest.approx(plain.mean().item())
    averaged.backward()
    assert prior.grad[0].abs().sum() > 0  # the mean is above the free nats, so each entry counts


def test_categorical_samples_have_the_probabilities_and_their_gradients():
    variable = Categoricals(2, 3, unimix=0.1)
    logits = torch.tensor([[2.0, 0.0, -1.0, 0.0, 0.0, 5.0]], requires_grad=True)
    draws = variable.draw((60_000,), torch.zeros(()), torch.Generator().manual_seed(0))
    samples = variable.sample(logits.expand(60_000, -1), draws)
    frequencies = samples.detach().mean(0).view(2, 3)
    torch.testing.assert_close(frequencies, variable.probs(logits)[0].detach(), rtol=0.05, atol=0.01)
    assert set(samples.detach().unique().tolist()) == {0.0, 1.0}
    weights = torch.arange(6.0)
    (variable.sample(logits, draws[:1]) * weights).sum().backward()
    given = logits.grad.clone()
    logits.grad = None
    (variable.probs(logits).flatten(1) * weights).sum().backward()
    torch.testing.assert_close(given, logits.grad)
    highest = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0)).expand(1, 2)
    assert variable.sample(logits, highest).view(2, 3).argmax(-1).tolist() == [2, 2]  # the last class, never none


def test_layers_of_a_scan_form_the_gradients_of_autograd():
    torch.manual_seed(0)
    layers = [(Linear(4, 3), 4), (BlockLinear(8, 12, 4), 8), (Norm(5), 5), (Norm(5, "layer"), 5)]
    for layer, inputs in layers:
        seen, upstream = torch.randn(9, inputs), torch.randn(9, layer.outputs)
        (layer(seen) * upstream).sum().backward()
        normalized = layer._normalize(seen) if isinstance(layer, Norm) else seen
        for parameter, gradient in itertools.zip_longest(layer.parameters(), layer.gradients(normalized, upstream)):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-5)


def test_norms_compute_in_float32():
    norm = Norm(64)
    values = (1000.0 * torch.randn(3, 64)).bfloat16()
    expected = F.rms_norm(values.float(), (64,), eps=1e-4)
    assert norm(values).dtype == torch.bfloat16
    torch.testing.assert_close(norm(values).float(), expected, rtol=1e-2, atol=1e-2)
