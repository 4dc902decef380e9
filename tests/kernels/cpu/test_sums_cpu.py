"""The compiled products with sparse rows and with tiles: any shape against the values of all terms, added in fp64."""

import pytest
import torch
from combinations import every
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sums import entries_of, error, planar_of, tiles_of

from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.layouts import tiles as pack_tiles
from compress.kernels.layouts import words as pack
from compress.kernels.layouts.strips import pack_strips

pytestmark = pytest.mark.full

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOKENS = [1, 3, 16, 17, 65]
# One library for all examples of a test, whose outputs are NaN before.
few = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
shares = st.sampled_from([0.0, 0.01, 0.3, 1.0])


def inputs(M, K, N, dtype, bias):
    g = torch.Generator().manual_seed(M + K)
    return torch.randn(M, K, generator=g).to(dtype), torch.randn(N, generator=g).to(dtype) if bias else None


@few
@given(data=st.data())
def test_codes_and_entries(library, data):
    dtype, other = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    M, N = data.draw(st.sampled_from(TOKENS)), data.draw(st.integers(1, 70))
    group, groups = data.draw(st.sampled_from([(32, 1), (32, 3), (64, 5), (128, 2), (-1, 7)]))
    K = group * groups if group > 0 else data.draw(st.integers(1, 700))
    bits = data.draw(st.sampled_from([4, 8]))
    planar = planar_of(N, K, bits, group, data.draw(st.booleans()), dtype)
    entries, extra = entries_of(N, K, data.draw(shares), other)
    x, bias = inputs(M, K, N, dtype, data.draw(st.booleans()))
    out = cpu_gemm.words(x, planar, bias, entries=entries)
    assert out.dtype == dtype
    assert error(out, x, pack.planar_weight(planar, K).double() + extra, bias) <= 1


@few
@given(data=st.data())
def test_strips_and_entries(library, data):
    dtype, other = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    M, N, bits = (
        data.draw(st.sampled_from(TOKENS)),
        16 * data.draw(st.integers(1, 4)),
        data.draw(st.sampled_from([4, 8])),
    )
    group, groups = data.draw(st.sampled_from([(32, 1), (32, 3), (64, 5), (128, 2), (-1, 7)]))
    K = group * groups if group > 0 else data.draw(st.integers(1, 700))
    planar = planar_of(N, K, bits, group, data.draw(st.booleans()), dtype)
    entries, extra = entries_of(N, K, data.draw(shares), other)
    x, bias = inputs(M, K, N, dtype, data.draw(st.booleans()))
    out = cpu_gemm.words(x, pack_strips(planar, K), bias, entries=entries)
    assert out.dtype == dtype
    exact = planar._replace(scale=planar.scale.double())
    assert error(out, x, pack.planar_weight(exact, K) + extra, bias) <= 1


@few
@given(data=st.data())
def test_tiles(library, data):
    dtype, stored = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    M, N = data.draw(st.sampled_from(TOKENS)), 16 * data.draw(st.integers(1, 5))
    group = data.draw(st.sampled_from([16, 32, 48, 80]))
    K, rows = group * data.draw(st.integers(1, 20)), data.draw(st.sampled_from([1, 3, 16, 64]))
    bits, level_bits = data.draw(st.integers(2, 8)), data.draw(st.integers(2, 8))
    weight = tiles_of(N, K, bits, group, rows, level_bits, stored)
    entries, extra = entries_of(N, K, data.draw(shares), stored)
    given = data.draw(st.booleans())
    x, bias = inputs(M, K, N, dtype, data.draw(st.booleans()))
    laid = pack_tiles.pack_tile_strips(weight, K)
    again = pack_tiles.unpack_tile_strips(laid, K)
    assert all(torch.equal(one, other) for one, other in zip(again[:3], weight[:3], strict=True))
    out = cpu_gemm.tiles(x, laid, bias, entries if given else None)
    assert out.dtype == dtype
    exact = weight._replace(ranges=weight.ranges.float())
    assert error(out, x, pack_tiles.tile_weight(exact, K).double() + given * extra, bias) <= 1


@few
@given(data=st.data())
def test_sparse_rows(library, data):
    dtype, other = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    M, N, K = data.draw(st.sampled_from(TOKENS)), data.draw(st.integers(1, 70)), data.draw(st.integers(1, 300))
    entries, weight = entries_of(N, K, data.draw(shares), other)
    x, bias = inputs(M, K, N, dtype, data.draw(st.booleans()))
    out = cpu_gemm.sparse_rows(x, entries, bias)
    assert out.dtype == dtype
    assert error(out, x, weight, bias) <= 1


@every("M", [2, 20])
def test_wrong_entries_are_seen(library, M):
    """That the comparison above can fail: one entry of hundreds, off by a tenth."""
    N, K = 33, 200
    planar, (entries, extra) = planar_of(N, K, 4, -1, True, torch.float32), entries_of(N, K, 0.1, torch.float32)
    x, _ = inputs(M, K, N, torch.float32, False)
    values = pack.planar_weight(planar, K).double() + extra
    entries.value[7] *= 1.1
    assert error(cpu_gemm.words(x, planar, None, entries=entries), x, values) > 1


def test_columns_beyond_int16(library):
    K = 40_000
    entries, extra = entries_of(5, K, 1e-3, torch.bfloat16)
    assert entries.column.dtype == torch.int32
    planar = planar_of(5, K, 4, -1, False, torch.bfloat16)
    for M in (2, 20):
        x, _ = inputs(M, K, 5, torch.bfloat16, False)
        assert error(cpu_gemm.sparse_rows(x, entries), x, extra) <= 1
        values = pack.planar_weight(planar, K).double() + extra
        assert error(cpu_gemm.words(x, planar, None, entries=entries), x, values) <= 1


def test_what_is_not_a_number_stays_in_its_row(library):
    entries, _ = entries_of(6, 64, 0.3, torch.float32)
    entries.value[entries.row_start[4]] = torch.nan
    for M in (1, 20):
        x, _ = inputs(M, 64, 6, torch.float32, False)
        for out in (
            cpu_gemm.sparse_rows(x, entries),
            cpu_gemm.words(x, planar_of(6, 64, 4, 32, True, torch.float32), None, entries=entries),
        ):
            assert out.isnan().all(0).tolist() == [n == 4 for n in range(6)]


def test_reasons():
    x = torch.zeros(1, 256)
    assert cpu_gemm.why_not("tiles", x, x, 24) == ["group size 24; allowed: multiples of 16"]
    assert cpu_gemm.why_not("tiles", x, x.double(), 16) == [
        "scales are torch.float64; allowed: float32, float16, bfloat16"
    ]
    assert cpu_gemm.why_not("sparse_rows", x, x) == cpu_gemm.why_not("weight_only", x, x)
