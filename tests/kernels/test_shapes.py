"""The choice of a configuration: legal for every size, and what it is meant to be where it matters."""

import itertools

import pytest

from compress.kernels.triton import workspace
from compress.kernels.tuning import choose as shapes
from compress.kernels.tuning import table

SIZES = (1, 3, 16, 17, 63, 64, 65, 128, 1000, 4096, 28672, 200000)


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_choice_is_legal(bits, hopper):
    for M, N, K, group in itertools.product(SIZES, SIZES, SIZES, (32, 128, -1)):
        shape = shapes.fused(M, N, K, bits, group, shapes.Device(hopper=hopper))
        assert shape.block_m in (16, 32, 64, 128)
        assert shape.block_m >= M or M > 64
        assert 1 <= shape.split_k <= shapes.SPLIT_LIMIT
        tiles = -(-M // shape.block_m) * -(-N // shape.block_n)
        if shape.split_k > 1:
            assert tiles <= workspace.SLICE
            assert tiles * shape.split_k <= 2 * shapes.PROCESSORS
        assert shape.block_m <= 64 or hopper


def test_few_tokens_fill_the_processors():
    """Llama-3-8B at one token: 32 tiles of outputs become 256 programs, 224 tiles are enough as they are."""
    assert shapes.fused(1, 4096, 4096, 4, 128, shapes.Device()).split_k == 8
    assert shapes.fused(1, 28672, 4096, 4, 128, shapes.Device()).split_k == 1


@pytest.mark.parametrize(
    ("block_m", "group", "sums"), [(16, 128, True), (32, 128, True), (64, 256, False), (16, 32, False)]
)
def test_where_the_scale_goes(block_m, group, sums):
    assert table.Shape(block_m, 128).scales_sums(group) == sums
    assert not table.Shape(block_m, 128).scales_sums(-1)


@pytest.mark.parametrize("hopper", [True, False])
def test_int8_choices_are_legal(hopper):
    for M, N, K in itertools.product(SIZES, SIZES, SIZES):
        shape = shapes.fused_w8a8(M, N, K, shapes.Device(hopper=hopper))
        assert shape.block_m >= min(M, 64)
        assert shape.block_m <= (256 if hopper else 128)
        tiles = -(-M // shape.block_m) * -(-N // shape.block_n)
        assert shape.split_k == 1 or (M <= 64 and tiles * shape.split_k <= 2 * shapes.PROCESSORS)


def test_few_tokens_of_int8_fill_the_processors():
    """32 tiles of 4096 outputs leave 100 of 132 processors without work, unless K is split."""
    for M in (1, 64):
        assert shapes.fused_w8a8(M, 4096, 4096, shapes.Device()).split_k == 8


@pytest.mark.parametrize("hopper", [True, False])
def test_24_choices_are_legal(hopper):
    for M, N, steps in itertools.product(SIZES, SIZES, (1, 8, 400)):
        shape = shapes.fused24(M, N, steps, shapes.Device(hopper=hopper))
        assert shape.block_m >= min(M, 64 if hopper else 32)
        tiles = -(-M // shape.block_m) * -(-N // shape.block_n)
        assert shape.split_k <= min(shapes.SPLIT_LIMIT, steps)
        assert shape.split_k == 1 or tiles <= workspace.SLICE


def test_many_tokens_are_dequantized_where_nothing_was_measured():
    device, least = shapes.Device(), shapes.DEQUANTIZE_TOKENS
    kind = table.Kind("weight_only", 4, 128, False, "bfloat16")
    assert shapes.choose(kind, least, 4096, 4096, device) == table.DEQUANTIZE
    fused = shapes.fused(least - 1, 4096, 4096, 4, 128, device)
    assert shapes.choose(kind, least - 1, 4096, 4096, device) == fused
