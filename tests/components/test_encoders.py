"""Encoders of vectors, pictures and dicts of both; random shifts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.representation.augmentation import RandomShift
from rl_lab.components.representation.encoders import ConvEncoder, DictEncoder, MLPEncoder, fitting_strides, sides_after
from rl_lab.core.errors import UserError


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pictures(*leading: int, side: int = 16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (*leading, 3, side, side), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("leading", [(4,), (2, 4)])
def test_encoders_keep_leading_dimensions(leading):
    assert MLPEncoder(5, 7)(noise(*leading, 5)).shape == (*leading, 7)
    images = ConvEncoder((3, 16, 16), 7, channels=(4, 4, 4, 4))
    assert images(pictures(*leading)).shape == (*leading, 7)
    torch.testing.assert_close(
        images(pictures(*leading)).reshape(-1, 7), images(pictures(*leading).reshape(-1, 3, 16, 16))
    )
    mixed = DictEncoder({"speed": 2, "camera": [3, 16, 16]}, 8, simplex=4)
    assert mixed({"speed": noise(*leading, 2), "camera": pictures(*leading)}).shape == (*leading, 8)


def test_pictures_of_64_pixels_become_the_latent_of_the_paper():
    torch.manual_seed(0)
    encoder = ConvEncoder((9, 64, 64), 512, simplex=8)
    assert [
        (layer.kernel_size[0], layer.stride[0]) for layer in encoder.convolutions if isinstance(layer, nn.Conv2d)
    ] == [
        (7, 2),
        (5, 2),
        (3, 2),
        (3, 1),
    ]
    assert isinstance(encoder.head, nn.Identity)  # no linear layer, no norm
    assert not any(isinstance(module, nn.LayerNorm) for module in encoder.modules())
    images = torch.randint(256, (2, 9, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    values = images.float() / 255 - 0.5
    layers = [layer for layer in encoder.convolutions if isinstance(layer, nn.Conv2d)]
    for layer in layers[:-1]:
        values = F.conv2d(values, layer.weight, layer.bias, layer.stride).relu()
    values = F.conv2d(values, layers[-1].weight, layers[-1].bias, layers[-1].stride)  # no ReLU after the last
    expected = values.flatten(1).reshape(2, 64, 8).softmax(-1).reshape(2, 512)
    torch.testing.assert_close(encoder(images), expected)


@pytest.mark.parametrize("side", [15, 17, 20, 30, 32, 48, 64, 84])
def test_strides_fit_every_picture(side):
    strides = fitting_strides(side, (7, 5, 3, 3))
    left = sides_after(side, (7, 5, 3, 3), strides)[-1]
    assert left >= min(4, side - 14)
    halved = [[*strides[:i], 2, *strides[i + 1 :]] for i in range(4) if strides[i] == 1]
    assert all(sides_after(side, (7, 5, 3, 3), more)[-1] < 4 for more in halved)  # none could be halved as well


def test_pictures_that_differ_in_one_cell_have_different_latents():
    torch.manual_seed(0)
    encoder = ConvEncoder((3, 32, 32), 64, simplex=8)
    images = torch.full((16, 3, 32, 32), 40, dtype=torch.uint8)
    for i in range(16):
        images[i, :, 8 * (i // 4) : 8 * (i // 4) + 8, 8 * (i % 4) : 8 * (i % 4) + 8] = 220
    latents = encoder(images)
    torch.testing.assert_close(latents.unflatten(-1, (8, 8)).sum(-1), torch.ones(16, 8))
    assert latents.std(0).mean() > 0.02


def test_what_cannot_be_built_says_why():
    for arguments, key in [
        ({"input_dim": (3, 8, 8)}, "kernels"),
        ({"input_dim": (64,)}, "input_dim"),
        ({"strides": (2, 2)}, "kernels"),
        ({"latent_dim": 9, "simplex": 8}, "latent_dim"),
    ]:
        with pytest.raises(UserError) as caught:
            ConvEncoder(**{"input_dim": (3, 32, 32), "latent_dim": 16, **arguments})
        assert caught.value.key == key
        assert caught.value.remedy
    assert ConvEncoder((3, 8, 8), 4, channels=(4, 4), kernels=(3, 3))(pictures(2, side=8)).shape == (2, 4)


def test_dict_encoder_adds_one_encoder_per_entry_and_normalises_the_sum():
    torch.manual_seed(0)
    sizes = {"speed": 2, "camera": [3, 16, 16]}
    encoder = DictEncoder(sizes, 8)
    seen = {"camera": pictures(4), "speed": noise(4, 2)}
    added = encoder.encoders["speed"](seen["speed"]) + encoder.encoders["camera"](seen["camera"])
    torch.testing.assert_close(encoder(seen), added)
    with pytest.raises(KeyError, match="camera"):
        encoder({"speed": seen["speed"]})
    encoder(seen).sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())
    torch.manual_seed(0)
    torch.testing.assert_close(
        DictEncoder(sizes, 8, simplex=4)(seen), added.unflatten(-1, (2, 4)).softmax(-1).flatten(-2)
    )


def test_shift_is_padding_by_repetition_and_cropping():
    shift, images = RandomShift(2), pictures(25, side=6)
    offsets = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    moved = shift(images, offsets)
    padded = F.pad(images.float(), (2, 2, 2, 2), mode="replicate").to(torch.uint8)
    for i, (down, right) in enumerate(offsets.tolist()):
        assert torch.equal(moved[i], padded[i, :, down : down + 6, right : right + 6])
    assert torch.equal(moved[12], images[12])  # offsets of the pad move nothing
    assert moved.dtype == torch.uint8


def test_every_picture_is_shifted_on_its_own_and_vectors_never():
    shift = RandomShift(3)
    picture = pictures(1, side=12)
    seen = {"camera": picture.expand(3, 40, -1, -1, -1), "speed": noise(3, 40, 2)}
    moved = shift.sample(seen, torch.Generator().manual_seed(0))
    again = shift.sample(seen, torch.Generator().manual_seed(0))
    other = shift.sample(seen, torch.Generator().manual_seed(1))
    assert torch.equal(moved["camera"], again["camera"])  # all chance is the generator's
    assert not torch.equal(moved["camera"], other["camera"])
    assert torch.equal(moved["speed"], seen["speed"])
    assert len({image.numpy().tobytes() for image in moved["camera"].flatten(0, 1)}) > 30  # of 49 places
    vectors = noise(5, 3)
    assert shift.sample(vectors, None) is vectors


def test_pictures_of_one_observation_move_together():
    both = pictures(1, side=12).expand(20, -1, -1, -1)
    moved = RandomShift(3).sample({"left": both, "right": both}, torch.Generator().manual_seed(0))
    assert torch.equal(moved["left"], moved["right"])
