"""Encoders and decoders of observations: vectors, images, dicts; sizes, units, losses."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.predictions import Bernoulli, SymlogError, UnitNormal
from rl_lab.components.representation.heads import Head
from rl_lab.components.representation.images import (
    DoublingConvolution,
    PooledDecoder,
    PooledEncoder,
    StridedDecoder,
    StridedEncoder,
)
from rl_lab.components.representation.observations import (
    ObservationDecoder,
    ObservationEncoder,
    VectorDecoder,
    VectorEncoder,
)
from rl_lab.components.twohot import SymexpTwoHot, TwoHot, symexp, symlog
from rl_lab.core.errors import UserError

DETER, FEATURES = 16, 24
VECTOR = {
    "vector": functools.partial(VectorEncoder, units=8, num_layers=2),
    "image": functools.partial(PooledEncoder, depth=4, multipliers=(2, 2)),
}
BACK = {
    "vector": functools.partial(VectorDecoder, units=8, num_layers=2),
    "image": functools.partial(PooledDecoder, deter=DETER, depth=4, units=8, multipliers=(2, 2)),
}


def images(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("leading", [(5,), (3, 5)])
@pytest.mark.parametrize("kind", ["vector", "image", "dict"])
def test_observations_of_any_kind_are_encoded_and_decoded(kind, leading):
    shapes = {
        "vector": 6,
        "image": [3, 16, 16],
        "dict": {"speed": 2, "left": [3, 16, 16], "right": [1, 16, 16], "x": 1},
    }
    seen = {
        "vector": torch.randn(*leading, 6),
        "image": images(*leading, 3, 16, 16),
        "dict": {
            "speed": torch.randn(*leading, 2),
            "left": images(*leading, 3, 16, 16),
            "right": images(*leading, 1, 16, 16),
            "x": torch.randn(*leading, 1),
        },
    }[kind]
    torch.manual_seed(0)
    encoder, decoder = ObservationEncoder(shapes[kind], **VECTOR), ObservationDecoder(FEATURES, shapes[kind], **BACK)
    embeddings = encoder(seen)
    assert embeddings.shape == (*leading, encoder.outputs)
    features = torch.randn(*leading, FEATURES)
    predictions = decoder(features)
    loss = decoder.loss(predictions, seen)
    assert loss.shape == leading
    loss.mean().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())
    decoded = decoder.decode(features)
    if kind == "dict":
        assert {name: leaf.shape for name, leaf in decoded.items()} == {name: leaf.shape for name, leaf in seen.items()}
        assert decoded["left"].dtype == torch.uint8
    else:
        assert decoded.shape == seen.shape
        assert decoded.dtype == seen.dtype


def test_image_errors_are_sums_over_pixels_as_fractions():
    decoder = ObservationDecoder(FEATURES, [3, 16, 16], **BACK, weight=0.5)
    seen = images(2, 3, 16, 16)
    predicted = torch.rand(2, 3, 16, 16)
    expected = 0.5 * (predicted - seen / 255.0).square().flatten(1).sum(1)
    torch.testing.assert_close(decoder.loss({"observation": predicted}, seen), expected)
    assert decoder.loss({"observation": seen / 255.0}, seen).abs().max() == 0


def test_vector_errors_are_sums_in_symlog_space():
    seen = torch.tensor([[1000.0, -3.0]])
    for compressed in (True, False):
        parts = BACK | {"vector": functools.partial(VectorDecoder, units=8, symlog=compressed)}
        decoder = ObservationDecoder(FEATURES, 2, **parts)
        target = symlog(seen) if compressed else seen
        predicted = torch.tensor([[1.0, 2.0]])
        torch.testing.assert_close(
            decoder.loss({"observation": predicted}, seen), (predicted - target).square().sum(-1)
        )
        features = torch.randn(1, FEATURES)
        raw = decoder(features)["observation"]
        torch.testing.assert_close(decoder.decode(features), symexp(raw) if compressed else raw)


def test_the_pooled_networks_have_the_shapes_of_the_paper():
    encoder = PooledEncoder([3, 64, 64], depth=16)
    assert [c.out_channels for c in encoder.convolutions] == [32, 48, 64, 64]
    assert encoder.outputs == 4 * 4 * 64
    decoder = PooledDecoder(2048 + 512, [3, 64, 64], deter=2048, depth=16, units=256)
    assert [c.convolution.out_channels for c in decoder.convolutions] == [64, 48, 32]
    pictures = decoder(torch.randn(2, 2560))
    assert pictures.shape == (2, 3, 64, 64)
    assert 0 <= pictures.min() <= pictures.max() <= 1


@pytest.mark.parametrize("kernel", [3, 5])
def test_four_pixels_taken_for_one_give_the_same_products(kernel):
    encoder = PooledEncoder([3, 16, 12], depth=4, multipliers=(2,), kernel=kernel)
    seen, weight = torch.randint(0, 256, (2, 3, 16, 12), dtype=torch.uint8), encoder.convolutions[0].weight
    expected = F.conv2d(seen.float() / 255.0 - 0.5, weight, padding="same")
    given = encoder._products(seen, weight).unflatten(1, (2, 2, -1))
    for row in range(2):
        for column in range(2):
            torch.testing.assert_close(given[:, row, column], expected[:, :, row::2, column::2])


@pytest.mark.parametrize("kernel", [3, 5])
def test_a_doubling_convolution_is_one_on_the_doubled_picture(kernel):
    torch.manual_seed(0)
    layer = DoublingConvolution(3, 4, kernel)
    nn.init.normal_(layer.convolution.bias)
    pictures = torch.randn(2, 3, 6, 5, requires_grad=True)
    upstream = torch.randn(2, 4, 12, 10)
    results = []
    for apply in (layer, lambda x: layer.convolution(F.interpolate(x, scale_factor=2.0))):
        output = apply(pictures)
        gradients = torch.autograd.grad((output * upstream).sum(), [pictures, *layer.parameters()])
        results.append([output, *gradients])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("side", "down", "up"), [(64, (4, 4, 4, 4), (5, 5, 6, 6)), (32, (4, 4, 4), (5, 6, 6))])
def test_the_strided_networks_have_the_shapes_of_the_paper(side, down, up):
    encoder = StridedEncoder([3, side, side], depth=32, kernels=down)
    decoder = StridedDecoder(FEATURES, [3, side, side], depth=32, kernels=up)
    assert encoder(images(2, 3, side, side)).shape == (2, encoder.outputs)
    assert decoder(torch.randn(2, FEATURES)).shape == (2, 3, side, side)
    if side == 64:
        assert encoder.outputs == 1024
        assert decoder.dense.outputs == 1024


def test_a_strided_decoder_is_a_chain_of_transposed_convolutions():
    torch.manual_seed(0)
    decoder = StridedDecoder(FEATURES, [3, 32, 32], depth=4, kernels=(5, 6, 6))
    for convolution in decoder.convolutions:
        nn.init.normal_(convolution.bias)
    features, upstream = torch.randn(2, FEATURES), torch.randn(2, 3, 32, 32)
    first, second, third = decoder.convolutions
    plain = third(F.relu(second(F.relu(first(decoder.dense(features)[..., None, None]))))) + 0.5
    answers = decoder(features), plain
    gradients = [torch.autograd.grad((answer * upstream).sum(), list(decoder.parameters())) for answer in answers]
    for ours, theirs in zip((answers[0], *gradients[0]), (answers[1], *gradients[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_images_that_do_not_fit_are_explained():
    with pytest.raises(UserError, match="multiples of 16"):
        PooledEncoder([3, 40, 40], depth=4)
    with pytest.raises(UserError, match="too small"):
        StridedEncoder([3, 16, 16], kernels=(4, 4, 4, 4))
    with pytest.raises(UserError, match="not of 32 x 32"):
        StridedDecoder(8, [3, 32, 32], kernels=(5, 5, 6, 6))
    with pytest.raises(ValueError, match="different sizes"):
        ObservationEncoder({"a": [3, 16, 16], "b": [3, 8, 8]}, **VECTOR)


def test_a_zero_output_predicts_exactly_zero():
    head = Head(8, SymexpTwoHot(), 16, 2, output_scale=0.0)
    outputs = head(torch.randn(7, 8))
    assert torch.equal(head.mean(outputs), torch.zeros(7))


@pytest.mark.parametrize("space", ["values", "symlog"])
def test_two_hot_codes_one_bin_at_a_time(space):
    """Bins of 2024 code the values themselves and average them, those of 2023 their symlogs."""
    twohot = SymexpTwoHot(num_bins=11, limit=3.0) if space == "values" else TwoHot(11, -3.0, 3.0)
    bins = [float(b) for b in twohot.bins.double()]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 11, generator=generator)
    on_bins = twohot.bins if space == "values" else symexp(twohot.bins)
    values = torch.cat([10.0 * torch.randn(27, generator=generator), on_bins, torch.tensor([1e6, -1e6])])
    coded = values if space == "values" else symlog(values)
    for row, value, loss in zip(logits, coded.tolist(), twohot.loss(logits, values).tolist(), strict=True):
        value = min(max(value, bins[0]), bins[-1])
        code = [0.0] * 11
        for i in range(10):
            if bins[i] <= value <= bins[i + 1]:
                share = (value - bins[i]) / (bins[i + 1] - bins[i])
                code = [0.0] * 11
                code[i], code[i + 1] = 1.0 - share, share
                break
        assert sum(code) == pytest.approx(1.0)
        expected = -sum(weight * log for weight, log in zip(code, row.log_softmax(-1).tolist(), strict=True))
        assert loss == pytest.approx(expected, rel=1e-4, abs=1e-4)
    averages = torch.tensor([sum(p * b for p, b in zip(row.softmax(-1).tolist(), bins, strict=True)) for row in logits])
    expected = averages if space == "values" else symexp(averages)
    torch.testing.assert_close(twohot.mean(logits), expected, rtol=1e-4, atol=1e-4)
    halved = twohot.loss(logits.bfloat16(), values)  # what a network in bfloat16 says is read in float32
    assert torch.equal(halved, twohot.loss(logits.bfloat16().float(), values))


def test_predictions_have_their_minimum_at_the_truth():
    for prediction, truth in ((UnitNormal(), 3.0), (SymlogError(), -40.0), (Bernoulli(), 0.9)):
        outputs = torch.linspace(-8, 8, 16_001).unsqueeze(-1)
        losses = prediction.loss(outputs, torch.full((16_001,), truth))
        assert prediction.mean(outputs)[losses.argmin()].item() == pytest.approx(truth, rel=1e-2)
    assert UnitNormal().loss(torch.tensor([[2.0]]), torch.tensor([0.0])).item() == 2.0


@pytest.mark.parametrize(("part", "missing"), [(ObservationEncoder, "image"), (ObservationDecoder, "vector")])
def test_a_part_that_observations_need_is_missed_by_its_name(part, missing):
    shapes = {"camera": [3, 16, 16], "joints": 5}
    sizes = (shapes,) if part is ObservationEncoder else (FEATURES, shapes)
    given = VECTOR if part is ObservationEncoder else BACK
    with pytest.raises(UserError) as caught:
        part(*sizes, **{name: value for name, value in given.items() if name != missing})
    assert caught.value.key == missing
    assert f"have {'an image' if missing == 'image' else 'a vector'}," in caught.value.problem
    only = {"image": [3, 16, 16], "vector": 5}["vector" if missing == "image" else "image"]
    sizes = (only,) if part is ObservationEncoder else (FEATURES, only)
    part(*sizes, **{name: value for name, value in given.items() if name != missing})  # which nothing needs here


@pytest.mark.parametrize("keeps_size", [False, True])
def test_a_norm_behind_few_numbers_hides_how_large_they_are_unless_biases_keep_it(keeps_size):
    torch.manual_seed(0)
    encoder = VectorEncoder(2, units=32, num_layers=1, symlog=False, keeps_size=keeps_size)
    small, large = encoder(torch.tensor([[0.2, -0.1], [0.8, -0.4]]))
    apart = (large - small).abs().mean() / large.abs().mean()
    assert apart > 0.3 if keeps_size else apart < 0.02
