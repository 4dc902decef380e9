"""The Triton kernels of experts, run as `interpreter_cases` runs the others."""

import pytest
import torch
from combinations import each
from experts import combined_by_loop, experts_of, routings
from interpreter_cases import guarded  # noqa: F401  every test here is held to it

from compress.kernels import reference, workspace
from compress.kernels.operators import grouped
from compress.kernels.triton import grouped_gemm, grouped_int8
from compress.kernels.tuning.table import Shape


def check(out, x, values, routing, bias):
    """Against dense products, in fp64; what has no expert is zero."""
    truth = grouped.reference(x.double(), values, routing.token, routing.start, None if bias is None else bias.double())
    for e, (first, last) in enumerate(zip(routing.start[:-1], routing.start[1:], strict=True)):
        part, given = slice(first, last), x[routing.token[first:last].long()].double()
        allowed = reference.tolerance(given, values[e], truth[part], x.dtype)
        assert ((out[part].double() - truth[part]).abs() <= allowed).all()
    assert torch.equal(out[routing.start[-1] :], torch.zeros_like(out[routing.start[-1] :]))


@pytest.mark.parametrize(
    ("routed", "sizes", "bits", "zero", "shape", "dtype"),
    each(
        list(routings()),
        [(70, 256, 64), (33, 200, -1)],
        [4, 8],
        [True, False],
        [None, Shape(16, 32), Shape(16, 64, split_k=3)],
        [torch.float16, torch.bfloat16],
    ),
)
def test_weight_only(routed, sizes, bits, zero, shape, dtype):
    expert, experts = routings()[routed]
    routing = grouped.sort_by_expert(expert, experts)
    x, weight, values, bias = experts_of(experts, len(expert), *sizes, bits, zero, dtype)
    given = bias if zero else None
    out = grouped_gemm.grouped_gemm(x, routing.token, routing.start, weight, given, shape)
    assert out.dtype == dtype
    check(out, x, values, routing, given)
    assert workspace.counters(torch.device("cpu")).count_nonzero() == 0


@pytest.mark.parametrize(
    ("routed", "K", "symmetric", "shape"),
    each(list(routings()), [256, 100], [True, False], [None, Shape(32, 32), Shape(16, 64, split_k=2)]),
)
def test_int8(routed, K, symmetric, shape):
    expert, experts = routings()[routed]
    routing = grouped.sort_by_expert(expert, experts)
    g = torch.Generator().manual_seed(K)
    x = torch.randn(len(expert), K, generator=g)
    weight = torch.randint(-128, 128, (experts, 40, K), generator=g, dtype=torch.int8)
    scale, bias = torch.rand(experts, 40, generator=g), torch.randn(experts, 40, generator=g)
    codes, x_scale, x_zero = reference.quantize_tokens(x, symmetric)
    row_sum = weight.sum(-1, dtype=torch.int32)
    tokens = (codes, routing.token, routing.start, x_scale, x_zero)
    out = grouped_int8.grouped_int8_gemm(*tokens, weight, scale, row_sum, bias, torch.float32, shape)
    expected = torch.zeros_like(out)
    for e, (first, last) in enumerate(zip(routing.start[:-1], routing.start[1:], strict=True)):
        mine = routing.token[first:last].long()
        zero = None if x_zero is None else x_zero[mine]
        expected[first:last] = reference.w8a8(codes[mine], x_scale[mine], zero, weight[e], scale[e], bias[e])
    assert torch.equal(out, expected)
    assert workspace.counters(torch.device("cpu")).count_nonzero() == 0


def test_the_operators_take_this_path(monkeypatch):
    for product in ("words_linear", "w8a8_linear"):
        monkeypatch.setattr(grouped, product, lambda *_: pytest.fail("a loop over experts"))
    expert, experts = routings()["uneven"]
    routing = grouped.sort_by_expert(expert, experts)
    x, weight, values, bias = experts_of(experts, len(expert), 48, 128, 32, 4, True, torch.float16)
    out = grouped.grouped_words(x, *weight[:3], bias, *routing[:2], 4, 32)
    check(out, x, values, routing, bias)
    share = torch.rand(expert.shape, generator=torch.Generator().manual_seed(0))
    expected = combined_by_loop(x.double(), values, bias.double(), expert, share.double())
    torch.testing.assert_close(grouped.combine(out, routing, share).double(), expected, rtol=4e-3, atol=4e-3)
    codes = torch.randint(-128, 128, (experts, 48, 128), dtype=torch.int8)
    eight = grouped.grouped_w8a8(x, codes, torch.ones(experts, 48), None, None, None, None, *routing[:2], True)
    assert eight.shape == out.shape
    assert eight.isfinite().all()
