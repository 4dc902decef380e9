"""The choice of a configuration: legal for every size, and what it is meant to be where it matters."""

import itertools

import pytest

from compress.kernels import workspace
from compress.kernels.tuning import choose as shapes
from compress.kernels.tuning import table

SIZES = (1, 3, 16, 17, 63, 64, 65, 128, 1000, 4096, 28672, 200000)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_choice_is_legal(bits, capability):
    for M, N, K, group in itertools.product(SIZES, SIZES, SIZES, (32, 128, -1)):
        shape = shapes.fused(M, N, K, bits, group, shapes.Device(capability=capability))
        assert shape.block_m in (16, 32, 64, 128)
        assert shape.block_m >= M or M > 64
        assert 1 <= shape.split_k <= shapes.SPLIT_LIMIT
        tiles = -(-M // shape.block_m) * -(-N // shape.block_n)
        if shape.split_k > 1:
            assert tiles <= workspace.SLICE
            assert tiles * shape.split_k <= 2 * shapes.PROCESSORS
        assert shape.block_m <= 64 or capability >= 90


def test_few_tokens_fill_the_processors():
    """Llama-3-8B at one token: 32 tiles of outputs become 256 programs, 224 tiles are enough as they are."""
    assert shapes.fused(1, 4096, 4096, 4, 128, shapes.Device()).split_k == 8
    assert shapes.fused(1, 28672, 4096, 4, 128, shapes.Device()).split_k == 1


@pytest.mark.parametrize(
    ("block_m", "group", "bits", "sums"),
    [
        (16, 128, 8, True),
        (32, 128, 8, True),
        (64, 256, 4, True),
        (64, 256, 8, False),
        (16, 32, 4, False),
        (128, 128, 4, False),
    ],
)
def test_where_the_scale_goes(block_m, group, bits, sums):
    assert table.Shape(block_m, 128).scales_sums(group, bits) == sums
    assert not table.Shape(block_m, 128).scales_sums(-1)


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_choices_of_planar_words_and_int8_tokens_are_legal(capability):
    for M, N, K in itertools.product(SIZES, SIZES, SIZES):
        shape = shapes.fused_int8(M, N, K, 4, 128, shapes.Device(capability=capability))
        assert min(M, 64) <= shape.block_m <= (128 if capability == 90 else 64)
        tiles = -(-M // shape.block_m) * -(-N // shape.block_n)
        assert shape.split_k == 1 or (M <= 64 and tiles * shape.split_k <= 2 * shapes.PROCESSORS)
        # A warp of 16 rows and 64 tokens more has sums and fp32 sums in all its registers.
        assert shape.block_m * shape.block_n <= 2048 * shape.num_warps


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_int8_choices_are_legal(capability):
    for M, N, K in itertools.product(SIZES, SIZES, SIZES):
        shape = shapes.fused_w8a8(M, N, K, shapes.Device(capability=capability))
        assert shape.block_m >= min(M, 64)
        assert shape.block_m <= (256 if capability == 90 else 128)
        tiles = -(-M // shape.block_m) * -(-N // shape.block_n)
        assert shape.split_k == 1 or (M <= 64 and tiles * shape.split_k <= 2 * shapes.PROCESSORS)


def test_few_tokens_of_int8_fill_the_processors():
    """32 tiles of 4096 outputs leave 100 of 132 processors without work, unless K is split."""
    for M in (1, 64):
        assert shapes.fused_w8a8(M, 4096, 4096, shapes.Device()).split_k == 8


def test_many_tokens_are_dequantized_where_nothing_was_measured():
    device, least = shapes.Device(), shapes.DEQUANTIZE_TOKENS
    kind = table.ProductKind("weight_only", 4, 128, False, "bfloat16")
    assert shapes.choose(kind, least, 4096, 4096, device) == table.DEQUANTIZE
    fused = shapes.fused(least - 1, 4096, 4096, 4, 128, device)
    assert shapes.choose(kind, least - 1, 4096, 4096, device) == fused


def test_each_architecture_gets_what_its_matrix_instruction_takes():
    """GeForce 50 is newer than Hopper and has Ampere's: Hopper's tiles would spill there."""

    def tile(capability, M):
        shape = shapes.fused(M, 28672, 4096, 4, 128, shapes.Device(capability=capability))
        return shape.block_m, shape.block_n, shape.num_warps

    for old, new in ((80, 89), (80, 86), (80, 120), (80, 121), (100, 103)):
        assert [tile(old, M) for M in (1, 64, 128)] == [tile(new, M) for M in (1, 64, 128)]
    assert [tile(capability, 128) for capability in (80, 90, 100)] == [(64, 256, 8), (128, 128, 4), (128, 128, 4)]
    assert [tile(capability, 1) for capability in (80, 90, 100)] == [(16, 128, 4), (16, 128, 4), (16, 64, 2)]


def test_there_are_tiles_for_however_tokens_are_spread():
    """The most that 40 pairs of 5 experts or none can need: as many experts as there can be, each with one pair too
    many for its last tile."""
    for pairs, block_m in itertools.product((1, 3, 40), (16, 2)):
        most = 0
        for used in range(1, min(6, pairs) + 1):
            counts = [1] * used
            for _ in range(pairs - used):
                fullest = [i for i, c in enumerate(counts) if c % block_m == 0]
                counts[fullest[0] if fullest else 0] += 1
            most = max(most, sum(-(-c // block_m) for c in counts))
        assert shapes.most_tiles(pairs, 5, block_m) == most


def test_experts_split_k_only_where_all_of_them_leave_processors_idle():
    device, single = shapes.Device(), shapes.fused(1, 1536, 4096, 4, 128, shapes.Device())
    assert shapes.grouped(single, 8, 8, 1536, 32, device).split_k == 2  # 96 tiles
    assert shapes.grouped(single, 512, 128, 1536, 32, device).split_k == 1
    many = shapes.fused_w8a8(4096, 1536, 4096, device)
    assert shapes.grouped(many, 2**15, 8, 1536, 32, device) == many
