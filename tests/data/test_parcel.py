import numpy as np
import pytest
import torch

from rl_lab.data.parcel import Parcel, Post

CPU = torch.device("cpu")


def entries():
    generator = np.random.default_rng(0)
    return [
        np.lib.stride_tricks.as_strided(np.array([7], np.int64), (1,), (0,)),  # a length of one may have any stride
        np.zeros((0, 5), np.float32),
        np.array([True, False, True]),
        generator.normal(size=(4, 6)).astype(np.float32)[:, ::2],
        generator.integers(0, 255, (2, 3, 4), dtype=np.uint8).transpose(2, 0, 1),
    ]


def test_what_arrives_is_what_was_sent():
    arrays = entries()
    kinds = [torch.int64, torch.float32, torch.bool, torch.float32, torch.uint8]
    sent = Post(CPU).send(arrays, kinds)
    for array, kind, tensor in zip(arrays, kinds, sent, strict=True):
        assert tensor.dtype == kind
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_bfloat16_travels_as_its_bits():
    values = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    (sent,) = Post(CPU).send([values.view(torch.int16).numpy()], [torch.bfloat16])
    assert torch.equal(sent, values)


def test_equal_shapes_use_the_same_memory_and_others_do_not():
    post = Post(CPU)
    (first,) = post.send([np.ones(3, np.float32)], [torch.float32])
    (other,) = post.send([np.full(4, 5.0, np.float32)], [torch.float32])
    (second,) = post.send([np.full(3, 2.0, np.float32)], [torch.float32])
    assert second.data_ptr() == first.data_ptr()
    assert first.tolist() == [2.0, 2.0, 2.0]
    assert other.tolist() == [5.0] * 4
    (count,) = post.send([np.ones(3, np.int32)], [torch.int32])
    assert count.tolist() == [1, 1, 1]  # equal shapes of another type are another parcel


def test_large_parcels_are_not_kept():
    post = Post(CPU)
    many = np.zeros(2**19, np.float32)
    (first,) = post.send([many], [torch.float32])
    (second,) = post.send([many + 1], [torch.float32])
    assert first.data_ptr() != second.data_ptr()
    assert first[0] == 0.0


def test_a_shape_that_does_not_fit_is_refused():
    parcel = Parcel([((2, 2), torch.float32)], CPU)
    with pytest.raises(ValueError, match="broadcast"):
        parcel.send([np.zeros((3, 2), np.float32)])
