"""The compiled products of 2:4 weights: any shape against the values, and the values against those of torch."""

import pytest
import torch
from combinations import every
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sums import drawn, error

from compress.kernels import blocks, pack24, pairs24, sparse24
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.cpu import sparse24 as cpu24

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = ["numbers", "eight", "four"]
few = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def weight_of(kind, N, K, group, zero, dtype, seed=0):
    """(what the loops read, [N, K] its values): none, one or two of every four kept."""
    g, groups = drawn(seed), 1 if group == -1 else K // group
    order = torch.rand(N, K // 4, 4, generator=g).argsort(-1)
    kept = (order < torch.randint(3, (N, K // 4, 1), generator=g)).flatten(1)
    position = pairs24.positions_of(kept)
    words = pairs24.pack_positions(position)
    scale = (torch.randn(groups, N, generator=g) * 0.05).to(dtype)
    if kind == "numbers":
        values = (torch.randn(N, K, generator=g) * kept).to(dtype)
        weight = pairs24.Pairs(pairs24.take(values, position), words, None, None, -1)
        return pairs24.half_of(weight), pairs24.pairs_weight(weight)
    codes, zeros = (torch.randint(0, 256, (N, n), generator=g).to(torch.uint8) for n in (K, groups))
    if kind == "eight":
        weight = pairs24.Pairs(pairs24.take(codes, position), words, scale, zeros.t().contiguous(), group)
        return pairs24.half_of(weight), pairs24.pairs_weight(weight)
    found = pack24.pack24(codes % 16, kept)
    weight = pack24.Sparse24(*found, scale, (zeros % 16).t().contiguous() if zero else None, group)
    return sparse24.half_of(weight), pack24.sparse24_weight(weight, K)


@pytest.mark.parametrize("kind", KINDS)
@few
@given(data=st.data())
def test_any_shape(library, kind, data):
    dtype, other = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    # Pairs of codes are not rounded to the dtype of their scales, which `error` allows in that of x.
    other = dtype if kind == "eight" else other
    group, groups = data.draw(st.sampled_from([(32, 1), (32, 5), (64, 9), (96, 3), (128, 6), (-1, 7)]))
    K = group * groups if group > 0 else 4 * data.draw(st.integers(1, 180))
    M, N = data.draw(st.sampled_from([1, 2, 3, 7, 17])), data.draw(st.integers(1, 70))
    weight, values = weight_of(kind, N, K, group, data.draw(st.booleans()), dtype, seed=N)
    assert torch.equal(cpu24.expand(weight, K), values)
    g = drawn(M + K)
    x, bias = torch.randn(M, K, generator=g).to(other), torch.randn(N, generator=g).to(dtype)
    out = cpu24.product(x, weight, bias)
    assert out.dtype == other
    assert error(out, x, values.double(), bias) <= 1


@pytest.mark.parametrize("kind", KINDS)
@every("M", [3, 20])
def test_few_and_many_tokens(library, kind, M, monkeypatch):
    weight, values = weight_of(kind, 50, 256, 128, True, torch.bfloat16)
    monkeypatch.setattr(blocks, "UNPACKED_BYTES", 8 * blocks.BYTES_PER_WEIGHT * 256)
    assert cpu_gemm.by_rows("sparse24", M) == (M == 3)
    x, bias = torch.randn(M, 256, generator=drawn(M)).bfloat16(), torch.ones(50).bfloat16()
    assert error(cpu24.linear(x, weight, bias), x, values.double(), bias) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_place_is_seen(library, kind):
    """That the comparison above can fail: one of hundreds of weights, in the wrong column."""
    weight, values = weight_of(kind, 9, 512, -1, True, torch.float32)
    x = torch.randn(2, 512, generator=drawn(1))
    weight.kept[4, 3] ^= 1
    assert error(cpu24.product(x, weight), x, values.double()) > 1


def test_what_is_not_a_number_stays_in_its_row(library):
    weight, _ = weight_of("numbers", 6, 100, -1, True, torch.bfloat16)
    weight.held[4, -1] = torch.nan
    for M in (1, 5):
        out = cpu24.product(torch.ones(M, 100).bfloat16(), weight)
        assert out.isnan().all(0).tolist() == [n == 4 for n in range(6)]


def test_reasons():
    x = torch.zeros(1, 256)
    weight, _ = weight_of("eight", 4, 256, 16, True, torch.float32)
    assert cpu24.why_not(x, weight) == ["group size 16; allowed: multiples of 32, -1 (one scale per channel)"]
    weight, _ = weight_of("numbers", 4, 256, -1, True, torch.float32)
    assert "float64" in cpu24.why_not(x, weight._replace(held=weight.held.double()))[0]
