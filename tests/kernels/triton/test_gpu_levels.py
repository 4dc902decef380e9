"""Codes of tables of levels on a GPU: looked up by the assembly as by the portable path, products of every shape,
layers. Run with `pytest -m gpu`."""

import copy

import pytest
import torch
from planar import TABLES, planar_table
from sums import excess

from compress.inference.layers.compressed_layers import lay_in_strips
from compress.inference.layers.linear import QuantLinear
from compress.kernels import reference, workspace
from compress.kernels.layouts.words import planar_weight
from compress.kernels.operators.words import weight_only_path, why_not_weight_only, words_linear
from compress.kernels.routes import levels_route

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def inputs(M, N, K, dtype):
    g = torch.Generator("cuda").manual_seed(M + N + K)
    x = torch.randn(M, K, generator=g, device="cuda").to(dtype)
    return x, torch.randn(N, generator=g, device="cuda").to(dtype)


def run(x, weight, bias, batch_invariant=False):
    table = weight.table
    sizes = (4, weight.group_size, None, batch_invariant)
    return words_linear(x, weight.words, weight.scale, None, bias, *sizes, table.values, table.signed)


def check(out, x, values, bias):
    """Levels are rounded to the dtype of x, and so is their product with a scale that is not applied to sums."""
    truth = x.double() @ values.t() + bias.double()
    rounded = torch.finfo(out.dtype).eps * (x.double().abs() @ values.abs().t())
    assert excess(out, truth, reference.tolerance(x.double(), values, truth, out.dtype) + rounded) <= 1


@pytest.mark.kernels("planar_gemm.planar_kernel")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("table", [*TABLES])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("M", [1, 17, 63, 130, 2050])
def test_product(M, group, table, dtype):
    weight, values = planar_table(1100, 1024, group, table, dtype, "cuda")
    x, bias = inputs(M, 1100, 1024, dtype)
    assert why_not_weight_only(x, weight) == []
    check(run(x, weight, bias), x, values, bias)


@pytest.mark.kernels("planar_gemm.planar_kernel")
@pytest.mark.parametrize(("N", "K", "group"), [(1, 16, 16), (130, 96, 32), (3, 4032, 64), (129, 4128, 16)])
@pytest.mark.parametrize("M", [1, 33, 257])
def test_tails(M, N, K, group):
    weight, values = planar_table(N, K, group, "fractions", torch.bfloat16, "cuda")
    x, bias = inputs(M, N, K, torch.bfloat16)
    check(run(x, weight, bias), x, values, bias)


@pytest.mark.kernels("planar_gemm.planar_kernel")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("M", [1, 64, 300])
def test_float32_scales(M, dtype):
    weight, values = planar_table(520, 1024, 64, "fractions", torch.float32, "cuda")
    x, bias = inputs(M, 520, 1024, dtype)
    assert weight_only_path(x, weight)[0] == "triton"
    check(run(x, weight, bias), x, values, bias)


@pytest.mark.kernels("planar_gemm.planar_kernel")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("table", [*TABLES])
@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("M", [1, 64, 200])
def test_assembly_equals_portable(M, group, table, dtype, monkeypatch):
    from compress.kernels.triton import planar_gemm

    weight, _ = planar_table(512, 1024, group, table, dtype, "cuda")
    x, bias = inputs(M, 512, 1024, dtype)
    fast = run(x, weight, bias)
    monkeypatch.setattr(planar_gemm, "ASSEMBLY", False)
    assert torch.equal(fast, run(x, weight, bias))


@pytest.mark.kernels("dequantize_gemm.dequantize_kernel")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("table", [*TABLES])
@pytest.mark.parametrize("group", [8, 16, 32, 96])
def test_dense_blocks_are_those_of_torch(group, table, dtype):
    from compress.kernels.triton import dequantize_gemm

    weight, _ = planar_table(700, 1152, group, table, dtype, "cuda")
    out = torch.full((700, 1152), float("nan"), dtype=dtype, device="cuda")
    dequantize_gemm.dequantize(weight, 1152, range(700), range(1152), out)
    assert torch.equal(out, planar_weight(weight, 1152))


@pytest.mark.kernels("planar_gemm.planar_kernel")
@pytest.mark.parametrize("group", [16, 32])
def test_graphs_and_company(group):
    """Split over K, the same result at every replay; where it is asked for, of a token in any company."""
    workspace.prepare(torch.device("cuda", 0))
    weight, _ = planar_table(4096, 4096, group, "whole numbers", torch.bfloat16, "cuda")
    x, bias = inputs(300, 4096, 4096, torch.bfloat16)
    expected = run(x[:1], weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x[:1], weight, bias)
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
    whole = run(x, weight, bias, True)
    for first, last in ((0, 1), (7, 8), (3, 73)):
        assert torch.equal(run(x[first:last], weight, bias, True), whole[first:last])


@pytest.mark.kernels("planar_gemm.planar_kernel")
@pytest.mark.parametrize("scheme", ["mxfp4a16", "nvfp4a16", "nf4a16", "iq4_nl"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_layers(scheme, dtype):
    """Made on a GPU and moved there; stored tensors come back, also on a CPU."""
    torch.manual_seed(0)
    on_cpu = QuantLinear.from_linear(torch.nn.Linear(192, 80, dtype=dtype), scheme)
    stored = on_cpu.state_dict()
    for layer in (copy.deepcopy(on_cpu).to("cuda"), QuantLinear.from_linear(torch.nn.Linear(192, 80).cuda(), scheme)):
        layer.to(dtype)
        layer.load_state_dict(stored)
        lay_in_strips(torch.nn.Sequential(layer))
        assert layer.lookup is not None
        assert layer.words.nbytes == 80 * 256 // 2
        assert all(torch.equal(value.cpu(), stored[name]) for name, value in layer.state_dict().items())
        for M in (1, 40, 300):
            x = torch.randn(M, 192, device="cuda").to(dtype).requires_grad_(M == 40)
            values = on_cpu.values().double().cuda()
            truth = x.double() @ values.t() + layer.bias.double()
            allowed = reference.tolerance(x.double(), values, truth, dtype) + layer.slack(x.double())
            allowed += reference.weight_rounding(x.double(), values, dtype)
            out = layer(x)
            assert excess(out, truth, allowed) <= 1
            if M == 40:
                out.float().square().sum().backward()
                exact = 2 * out.detach().double() @ values
                torch.testing.assert_close(x.grad.double(), exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))
        back = layer.to("cpu")
        assert all(torch.equal(value, stored[name]) for name, value in back.state_dict().items())
        x = torch.randn(3, 192).to(dtype)
        torch.testing.assert_close(back(x), on_cpu(x), rtol=0.02, atol=0.05)


def test_routes():
    cuda = torch.device("cuda", 0)
    assert levels_route(1, 4096, 4096, 16, torch.bfloat16, cuda) == ("triton", ())
    assert levels_route(1, 4096, 4096, 64, torch.bfloat16, cuda, torch.float32) == ("triton", ())
    assert levels_route(5000, 4096, 4096, 32, torch.bfloat16, cuda).kernel == "dequantize"
    assert "float32" in levels_route(1, 4096, 4096, 32, torch.float32, cuda).why_not[0]


@pytest.mark.kernels("planar_gemm.planar_kernel")
def test_compiles_with_graphs():
    weight, _ = planar_table(512, 1024, 16, "a factor", torch.bfloat16, "cuda")
    x, bias = inputs(4, 512, 1024, torch.bfloat16)
    workspace.prepare(torch.device("cuda", 0))
    compiled = torch.compile(lambda x: torch.nn.functional.silu(run(x, weight, bias)), fullgraph=True)
    expected = torch.nn.functional.silu(run(x, weight, bias))
    for _ in range(3):
        torch.testing.assert_close(compiled(x).clone(), expected)
