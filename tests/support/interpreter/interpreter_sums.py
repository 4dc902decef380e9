"""The Triton kernels of sparse rows and of tiles, run as `interpreter_cases` runs the others."""

import pytest
import torch
from combinations import pairs
from interpreter_cases import guarded  # noqa: F401  every test here is held to it
from sums import entries_of, error, planar_of, tiles_of

from compress.kernels.layouts import tiles as pack_tiles
from compress.kernels.layouts import words as pack
from compress.kernels.operators import sparse, tiles
from compress.kernels.operators import words as ops
from compress.kernels.triton import dequantize_gemm, sparse_kernels, sparse_rows, tile_gemm
from compress.kernels.tuning.table import Shape

HALF = (torch.float16, torch.bfloat16)
CPU = torch.device("cpu")


def inputs(M, K, N, dtype, bias=True):
    g = torch.Generator().manual_seed(M + K)
    return torch.randn(M, K, generator=g).to(dtype), torch.randn(N, generator=g).to(dtype) if bias else None


@pytest.fixture
def one_grain(monkeypatch):
    """Dense blocks of the least size, so that a small weight is several."""
    monkeypatch.setattr(dequantize_gemm, "WORKSPACE_BYTES", 1)


@pytest.mark.parametrize(
    ("M", "share", "dtype", "bias"), pairs([1, 3, 16, 17], [0.0, 0.3], [*HALF, torch.float32], [True, False])
)
def test_sparse_rows(M, share, dtype, bias, one_grain):
    N, K = 7, 150
    entries, weight = entries_of(N, K, share, dtype)
    x, added = inputs(M, K, N, dtype, bias)
    out = sparse_rows.sparse_product(x, entries, added)
    assert out.dtype == dtype
    assert error(out, x, weight, added) <= 1
    assert error(out * 1.1, x, weight, added) > 1 or share == 0


def test_columns_beyond_int16():
    entries, weight = entries_of(4, 40_000, 1e-3, torch.float32)
    x, _ = inputs(2, 40_000, 4, torch.float32)
    assert entries.column.dtype == torch.int32
    assert error(sparse_rows.sparse_product(x, entries), x, weight) <= 1


def test_entries_are_added_to_any_block():
    entries, weight = entries_of(20, 200, 0.3, torch.float32)
    before = torch.randn(20, 200, generator=torch.Generator().manual_seed(1))
    for rows, columns in ((range(20), range(200)), (range(3, 9), range(128, 200)), (range(5, 5), range(200))):
        block = before[rows.start : rows.stop, columns.start : columns.stop].clone()
        sparse_kernels.add_entries(entries, rows, columns, block)
        whole = before + weight.float()
        assert torch.equal(block, whole[rows.start : rows.stop, columns.start : columns.stop])


@pytest.mark.parametrize(("M", "bits", "group", "dtype"), pairs([1, 17], [4, 8], [32, 48], HALF))
def test_codes_and_entries(M, bits, group, dtype, one_grain):
    """The operator's choice: two kernels for few tokens, dense blocks for many and for groups that only they take."""
    N, K = 40, 192
    planar, (entries, extra) = planar_of(N, K, bits, group, True, dtype), entries_of(N, K, 0.1, dtype)
    x, bias = inputs(M, K, N, dtype)
    assert sparse.why_not_sparse(x, entries.value) == []
    out = ops.words_linear(x, *planar[:3], bias, bits, group, None, False, None, False, *entries)
    assert error(out, x, pack.planar_weight(planar, K).double() + extra, bias) <= 2  # rounded once more, or truncated


TILES = pairs([(40, 256), (7, 80), (33, 192)], [(3, 16, 16, 3), (8, 16, 3, 8), (4, 16, 8, 4)], HALF, [True, False])


@pytest.mark.parametrize(("sizes", "kind", "dtype", "wide"), TILES)
def test_tiles(sizes, kind, dtype, wide):
    """Ranges in the dtype of x, or in float32 beside it."""
    (N, K), (bits, group, rows, level_bits) = sizes, kind
    weight = tiles_of(N, K, bits, group, rows, level_bits, torch.float32 if wide else dtype)
    x, bias = inputs(3, K, N, dtype)
    out = tile_gemm.tile_gemm(x, weight, bias, Shape(16, 32, split_k=2 if N == 40 else 1))
    assert out.dtype == dtype
    assert error(out, x, pack_tiles.tile_weight(weight._replace(ranges=weight.ranges.float()), K).double(), bias) <= 1


@pytest.mark.parametrize(("N", "K", "group", "rows"), [(40, 256, 16, 16), (33, 192, 32, 5), (1, 64, 64, 1)])
@pytest.mark.parametrize(("bits", "level_bits"), [(3, 3), (6, 5)])
def test_dequantized_tiles_bit_for_bit(N, K, group, rows, bits, level_bits):
    weight = tiles_of(N, K, bits, group, rows, level_bits, torch.float32)
    out = torch.empty(N, K, dtype=torch.float32, device=CPU)
    tile_gemm.dequantize(weight, K, range(N), range(K), out)
    dense = pack_tiles.tile_weight(weight, K)
    assert torch.equal(out, dense)
    block = pack.planar_block(weight.bits)
    if block < K:  # of several blocks of words
        part = torch.empty(N - 2, K - block, dtype=torch.float32, device=CPU)
        tile_gemm.dequantize(weight, K, range(2, N), range(block, K), part)
        assert torch.equal(part, dense[2:, block:])


@pytest.mark.parametrize(
    ("M", "dtype", "stored"),
    [
        (2, torch.float16, torch.float16),
        (17, torch.float32, torch.float32),
        (2, torch.bfloat16, torch.float32),
        (17, torch.bfloat16, torch.float32),
    ],
)
def test_operators_take_this_path_and_their_gradients(M, dtype, stored, one_grain):
    N, K = 33, 192
    weight, (entries, extra) = tiles_of(N, K, 3, 16, 16, 3, stored), entries_of(N, K, 0.1, stored)
    x, bias = inputs(M, K, N, dtype)
    assert tiles.why_not_dequantize_tiles(x, weight) == []
    assert (tiles.why_not_tiles(x, weight) == []) == (M == 2)
    values = pack_tiles.tile_weight(weight, K).double()
    x.requires_grad_()
    for given, truth in ((entries, values + extra), ((None,) * 3, values)):
        out = tiles.tiles_linear(x, *weight[:3], bias, *weight[3:], *given)
        assert error(out.detach(), x.detach(), truth, bias) <= 2
        (back,) = torch.autograd.grad(out, x, out.detach())
        assert error(back, out.detach(), truth.t().contiguous()) <= 4
    alone = sparse.sparse_linear(x, *entries, None, K)
    (back,) = torch.autograd.grad(alone, x, alone.detach())
    assert error(back, alone.detach(), extra.t().contiguous()) <= 1


def test_no_tokens():
    weight, (entries, _) = tiles_of(8, 64, 3, 16, 8, 3, torch.float16), entries_of(8, 64, 0.1, torch.float16)
    x = torch.zeros(0, 64).half()
    assert tiles.tiles_linear(x, *weight[:3], None, *weight[3:], *entries).shape == (0, 8)
    assert sparse.sparse_linear(x, *entries, None, 64).shape == (0, 8)
    planar = planar_of(8, 64, 4, 32, False, torch.float16)
    assert ops.words_linear(x, *planar[:3], None, 4, 32, None, False, None, False, *entries).shape == (0, 8)
    assert ops.why_not_weight_only(x, planar) == []
