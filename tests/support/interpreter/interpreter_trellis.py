"""Products with trellis codes, run as `interpreter_cases` runs the others."""

import pytest
import torch
from combinations import each
from interpreter_cases import guarded  # noqa: F401  every test here is held to it
from trellises import arguments, trellis_of

from compress.kernels import reference
from compress.kernels.layouts.trellis import MULTIPLIERS, Code
from compress.kernels.layouts.trellis_strips import pack_trellis_strips
from compress.kernels.operators.trellis import trellis_gradient, trellis_linear, values_by_run, why_not_fused
from compress.kernels.triton import trellis_gemm
from compress.kernels.tuning.table import Shape
from compress.solvers.trellis import viterbi

HALF = [torch.float16, torch.bfloat16]
CODES = [(1, 16), (2, 12), (3, 12), (3, 16), (4, 14)]


def check(out, x, values, bias):
    truth = x.double() @ values.t() + (0 if bias is None else bias.double())
    assert out.dtype == x.dtype
    assert ((out.double() - truth).abs() <= reference.tolerance(x.double(), values, truth, x.dtype)).all()


def inputs(M, K, N, dtype):
    g = torch.Generator().manual_seed(M + K)
    return torch.randn(M, K, generator=g).to(dtype), torch.randn(N, generator=g).to(dtype)


@pytest.mark.parametrize(("code", "dtype", "shape"), each(CODES, HALF, [(1, 32, 288), (17, 150, 544), (3, 100, 64)]))
def test_product(code, dtype, shape):
    """Whole numbers in float32 under the interpreter; more than one run, a short one, and rows and inputs that fill no
    tile."""
    M, N, K = shape
    weight, values = trellis_of(*code, N, K, 64, dtype)
    x, bias = inputs(M, K, N, dtype)
    for split in (1, 2):
        check(trellis_gemm.trellis_gemm(x, weight, bias, Shape(32, 128, split, 8, 2)), x, values, bias)
    check(trellis_linear(*arguments(x, weight, None)), x, values, None)
    check(trellis_linear(*arguments(x, pack_trellis_strips(weight), None)), x, values, None)


@pytest.mark.parametrize(("code", "dtype", "run"), each(CODES, [torch.float32, torch.float16], [64, 20]))
def test_dense_blocks_are_those_of_torch(code, dtype, run):
    weight, _ = trellis_of(*code, 70, 96, run, dtype)
    whole = torch.cat([values for _, values in values_by_run(weight, dtype)])
    for rows, columns in ((range(70), range(96)), (range(30, 41), range(32, 96)), (range(5, 5), range(96))):
        out = torch.full((len(rows), len(columns)), float("nan"), dtype=dtype)
        trellis_gemm.dequantize(weight, rows, columns, out)
        assert torch.equal(out, whole[rows.start : rows.stop, columns.start : columns.stop])


def test_runs_that_no_segment_fits_and_many_tokens_take_dense_blocks():
    weight, _ = trellis_of(2, 12, 70, 64, 20, torch.float16)
    assert "runs of 20" in why_not_fused(weight.code, 70, torch.float16)[0]
    assert why_not_fused(weight.code, 20, torch.float16) == []
    for M in (2, 70):
        x, bias = inputs(M, 64, 70, torch.float16)
        dense = torch.cat([part for _, part in values_by_run(weight, torch.float16)]).double()
        check(trellis_linear(*arguments(x, weight, bias)), x, dense, bias)
    grad = torch.randn(3, 70, generator=torch.Generator().manual_seed(0)).half()
    _, words, before, scale, _, *code = arguments(x, weight)
    check(trellis_gradient(grad, (3, 64), words, before, scale, None, *code), grad, dense.t(), None)


@pytest.mark.parametrize(("bits", "states", "count", "run"), [(1, 6, 40, 64), (2, 7, 150, 64), (3, 8, 70, 32)])
def test_paths_are_those_of_torch(bits, states, count, run, monkeypatch):
    """Several sequences, a short one, costs taken off all states, and numbers of weight 0."""
    monkeypatch.setattr(viterbi, "REST", 16)
    code, g = Code(bits, states, MULTIPLIERS[12], run), torch.Generator().manual_seed(bits)
    x, d = torch.randn(count, generator=g), torch.rand(count, generator=g)
    d[5:9] = 0
    assert torch.equal(viterbi.best_states(x, d, code), viterbi.best_states_by_torch(x, d, code))
