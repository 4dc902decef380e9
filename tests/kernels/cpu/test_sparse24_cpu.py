"""2:4 weights in strips: the layout, the products of any shape against the values, the operator."""

import pytest
import torch
from combinations import every
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sums import drawn, error, rows_of

from compress.base.errors import InputError
from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.layouts import pairs24 as pack_pairs24
from compress.kernels.layouts.strips24 import pack_pairs, pack_words24, unpack_pairs, unpack_words24
from compress.kernels.operators import sparse24

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = ["numbers", "eight", "four"]
few = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def weight_of(kind, N, K, *how):
    """(the same in strips, its values)."""
    rows, values = rows_of(kind, N, K, *how)
    return pack_words24(rows, K) if kind == "four" else pack_pairs(rows), values


@pytest.mark.parametrize("kind", KINDS)
@every("K", [4, 32, 100, 288])
@every("dtype", DTYPES)
def test_layout(kind, K, dtype):
    rows, _ = rows_of(kind, 48, K, -1, True, dtype, 0, 2)
    if kind == "four":
        laid = pack_words24(rows, K)
        again = unpack_words24(laid, K)
    else:
        laid = pack_pairs(rows)
        again = unpack_pairs(laid, K)
        position = pack_pairs24.unpack_positions(rows.position, K)
        assert laid.position[2, 0, 3] & 15 == position[35, 0] | position[35, 1] << 2
    for one, other in zip(again, rows, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    if kind == "numbers":
        assert laid.held[2, 0, 1, 3] == rows.held[35, 1]
    elif kind == "eight":
        assert laid.held[2, 0, 4 * 3 + 2] == rows.held[35, 1]


@pytest.mark.first
@pytest.mark.parametrize("kind", KINDS)
@few
@given(data=st.data())
def test_any_shape(library, kind, data):
    dtype, other = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    group, groups = data.draw(st.sampled_from([(32, 1), (32, 5), (64, 9), (96, 3), (128, 6), (-1, 7)]))
    K = group * groups if group > 0 else 4 * data.draw(st.integers(1, 180))
    M, N = data.draw(st.sampled_from([1, 2, 3, 7, 17, 30])), 16 * data.draw(st.integers(1, 5))
    weight, values = weight_of(kind, N, K, group, data.draw(st.booleans()), dtype, N)
    g = drawn(M + K)
    x, bias = torch.randn(M, K, generator=g).to(other), torch.randn(N, generator=g).to(dtype)
    out = cpu_gemm.strips24(x, weight, bias)
    assert out.dtype == other
    assert error(out, x, values.double(), bias) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_place_is_seen(library, kind):
    """That the comparison above can fail: one of thousands of weights, in the wrong column."""
    weight, values = weight_of(kind, 16, 512, -1, True, torch.float32, 0, 2)
    x = torch.randn(2, 512, generator=drawn(1))
    weight.position[0, 3, 4] ^= 1
    assert error(cpu_gemm.strips24(x, weight), x, values.double()) > 1


def test_what_is_not_a_number_stays_in_its_row(library):
    weight, _ = weight_of("numbers", 16, 100, -1, True, torch.bfloat16)
    weight.held[0, 24, 1, 4] = torch.nan
    for M in (1, 5):
        out = cpu_gemm.strips24(torch.ones(M, 100).bfloat16(), weight)
        assert out.isnan().all(0).tolist() == [n == 4 for n in range(16)]


def arguments(kind, gradient=False):
    weight, values = weight_of(kind, 48, 256, 64, True, torch.float32)
    x = torch.randn(2, 3, 256, generator=drawn(1)).requires_grad_(gradient)
    return (x, *weight[:4], torch.ones(48), *weight[4:]), values.double()


@pytest.mark.first
@pytest.mark.parametrize("kind", KINDS)
def test_contract_and_gradient(kind):
    given, values = arguments(kind, gradient=True)
    torch.library.opcheck(sparse24.sparse24_linear.registered, given)
    grad = torch.randn(2, 3, 48, generator=drawn(2))
    sparse24.sparse24_linear(*given).backward(grad)
    torch.testing.assert_close(given[0].grad, (grad.double() @ values).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_without_kernels_pairs_are_laid_out(kind, monkeypatch):
    given, values = arguments(kind)
    monkeypatch.setattr(cpu, "why_not", lambda: ("none",))
    out = sparse24.sparse24_linear(*given)
    assert error(out.view(6, 48), given[0].view(6, 256), values, given[5]) <= 1


def test_reasons():
    x = torch.zeros(1, 256)
    assert sparse24.why_not_lay_in_strips24(40, 256, 16) == [
        "40 outputs are not whole strips of 16",
        "group size 16; allowed: multiples of 32, -1 (one scale per channel)",
    ]
    assert "float64" in cpu_gemm.why_not("sparse24", x, x.double())[0]
    given, _ = arguments("numbers")
    with pytest.raises(InputError, match="x has 100 columns; 8 blocks of 32"):
        sparse24.sparse24_linear(given[0][..., :100], *given[1:])
