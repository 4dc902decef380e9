"""Trellis codes on a GPU: decoded bit for bit, products of every width and shape, gradients, layers. Run with
`pytest -m gpu`."""

import pytest
import torch
from sums import excess
from trellises import arguments, trellis_of

from compress.inference.layers.linear import QuantLinear
from compress.kernels import reference, workspace
from compress.kernels.layouts.trellis import MULTIPLIERS, Code, run_blocks
from compress.kernels.operators.trellis import FEW_ON_GPU, trellis_linear, values_by_run, why_not_trellis
from compress.solvers.trellis.viterbi import best_states
from compress.weights.formats.trellis import TrellisCodes
from compress.weights.scheme import Scheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HALF = [torch.float16, torch.bfloat16]
CODES = [(1, 12), (1, 16), (2, 12), (2, 16), (3, 12), (3, 16), (4, 12), (4, 14)]


def inputs(M, N, K, dtype):
    g = torch.Generator("cuda").manual_seed(M + N + K)
    x = torch.randn(M, K, generator=g, device="cuda").to(dtype)
    return x, torch.randn(N, generator=g, device="cuda").to(dtype)


def check(out, x, values, bias=None):
    """Levels, or their values, are rounded once to the dtype of x."""
    truth = x.double() @ values.t() + (0 if bias is None else bias.double())
    rounded = torch.finfo(out.dtype).eps / 2 * (x.double().abs() @ values.abs().t())
    assert excess(out, truth, reference.tolerance(x.double(), values, truth, out.dtype) + rounded) <= 1


@pytest.mark.kernels("trellis_gemm.trellis_kernel")
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize(("bits", "states"), CODES)
@pytest.mark.parametrize("M", [1, 16, 17, FEW_ON_GPU, 65, 600])
def test_product(M, bits, states, dtype):
    weight, values = trellis_of(bits, states, 1100, 544, 256, dtype, "cuda")
    assert why_not_trellis(weight.code, dtype, weight.words.device) == []
    x, bias = inputs(M, 1100, 544, dtype)
    check(trellis_linear(*arguments(x, weight, bias)), x, values, bias)


@pytest.mark.kernels("trellis_gemm.trellis_kernel")
@pytest.mark.parametrize(("N", "K", "run"), [(1, 32, 8), (130, 96, 128), (100, 4064, 20), (2056, 288, 1024)])
@pytest.mark.parametrize("M", [1, 33])
def test_tails(M, N, K, run):
    weight, values = trellis_of(3, 12, N, K, run, torch.bfloat16, "cuda")
    x, bias = inputs(M, N, K, torch.bfloat16)
    check(trellis_linear(*arguments(x, weight, bias)), x, values, bias)


@pytest.mark.kernels("trellis_gemm.dequantize_trellis_kernel")
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize(("bits", "states"), CODES)
def test_dense_blocks_are_those_of_torch(bits, states, dtype):
    from compress.kernels.triton import trellis_gemm

    for run in (256, 100):
        weight, _ = trellis_of(bits, states, 700, 544, run, dtype, "cuda")
        whole = torch.cat([values for _, values in values_by_run(weight, dtype)])
        for rows, columns in ((range(700), range(544)), (range(90, 441), range(32, 96))):
            out = torch.full((len(rows), len(columns)), float("nan"), dtype=dtype, device="cuda")
            trellis_gemm.dequantize(weight, rows, columns, out)
            assert torch.equal(out, whole[rows.start : rows.stop, columns.start : columns.stop])


@pytest.mark.kernels("trellis_gemm.trellis_kernel")
@pytest.mark.parametrize(("bits", "states"), CODES)
def test_the_fused_kernel_decodes_exactly(bits, states):
    """Tokens that are columns of the identity, in float16, which has all levels."""
    weight, _ = trellis_of(bits, states, 520, 512, 256, torch.float16, "cuda")
    weight = weight._replace(scale=torch.ones_like(weight.scale))
    levels = torch.cat([part for _, part in run_blocks(weight)])
    eye = torch.eye(512, device="cuda", dtype=torch.float16)
    for first in range(0, 512, 64):
        found = trellis_linear(*arguments(eye[first : first + 64], weight))
        assert torch.equal(found.float(), levels[:, first : first + 64].t())


@pytest.mark.kernels("trellis_gemm.trellis_kernel")
def test_split_k_is_deterministic_also_in_graphs():
    workspace.prepare(torch.device("cuda", 0))
    weight, values = trellis_of(2, 12, 4096, 4096, 1024, torch.bfloat16, "cuda")
    x, bias = inputs(4, 4096, 4096, torch.bfloat16)
    expected = trellis_linear(*arguments(x, weight, bias))
    check(expected, x, values, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = trellis_linear(*arguments(x, weight, bias))
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


@pytest.mark.kernels("trellis_gemm.dequantize_trellis_kernel")
@pytest.mark.parametrize("M", [3, 300])
def test_gradients(M):
    weight, values = trellis_of(3, 12, 1100, 544, 256, torch.bfloat16, "cuda")
    x, _ = inputs(M, 1100, 544, torch.bfloat16)
    x.requires_grad_()
    grad, _ = inputs(M, 1, 1100, torch.bfloat16)
    trellis_linear(*arguments(x, weight)).backward(grad)
    check(x.grad, grad, values.t())


@pytest.mark.kernels("trellis_gemm.trellis_kernel")
def test_layers():
    format_ = TrellisCodes(bits=3, run=128)
    weight, values = trellis_of(3, 12, 300, 256, 128, torch.bfloat16)
    parts = {"weight_packed": weight.words, "weight_scale": weight.scale}
    layer = QuantLinear.from_parts(parts, Scheme(terms=(format_,)), (300, 256))
    on_gpu = QuantLinear.from_parts(parts, Scheme(terms=(format_,)), (300, 256))
    on_gpu.lay_in_strips()  # where a CPU has them
    on_gpu.to("cuda")
    assert torch.equal(on_gpu.values().cpu(), layer.values())
    for M, kernel in ((1, "triton"), (300, "dequantize")):
        x = torch.randn(M, 256).bfloat16()
        check(on_gpu(x.cuda()).cpu(), x, values)
        assert type(layer).route(layer.scheme, M, (300, 256), x.dtype, torch.device("cuda", 0)).kernel == kernel


@pytest.mark.kernels("trellis_paths.paths_kernel")
@pytest.mark.parametrize(("bits", "states"), [(1, 8), (2, 12), (3, 12), (4, 12), (2, 14)])
@pytest.mark.parametrize(("count", "run"), [(1, 1024), (150, 1024), (700, 256), (1100, 1024)])
def test_paths_are_those_of_a_cpu(count, run, bits, states):
    code, g = Code(bits, states, MULTIPLIERS[max(states, 12)], run), torch.Generator().manual_seed(count)
    x, d = torch.randn(count, generator=g), torch.rand(count, generator=g)
    found = best_states(x.cuda(), d.cuda(), code)
    assert found.is_cuda
    assert torch.equal(found.cpu(), best_states(x, d, code))
