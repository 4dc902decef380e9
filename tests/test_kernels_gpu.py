"""What only a GPU can show: the assembly path equals the portable one, split K is deterministic and survives CUDA
graphs, every shape agrees with the reference. Run with `pytest -m gpu`."""

import pytest
import torch

from compress.kernels import ops, pack, reference, shapes, workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def operands(M, N, K, bits, group, zero, dtype):
    g = torch.Generator("cuda").manual_seed(M + N + K + bits)
    codes = torch.randint(0, 2**bits, (N, K), generator=g, device="cuda", dtype=torch.uint8)
    groups = 1 if group == -1 else K // group
    scale = (torch.randn(N, groups, generator=g, device="cuda") * 0.05).to(dtype)
    zeros = torch.randint(0, 2**bits, (N, groups), generator=g, device="cuda", dtype=torch.uint8)
    if not zero:
        zeros.fill_(2 ** (bits - 1))
    planar = pack.to_planar(codes, scale, zeros, bits, dtype)
    x = torch.randn(M, K, generator=g, device="cuda").to(dtype)
    bias = torch.randn(N, generator=g, device="cuda").to(dtype)
    return x, (planar if zero else planar._replace(zero=None)), bias


def run(x, planar, bias):
    return ops.weight_only_linear(x, planar.words, planar.scale, planar.zero, bias, planar.bits, planar.group_size)


def check(out, x, weight, bias):
    """Weights scaled before the product are rounded to the dtype of x, as `weight` is; others are not."""
    x, weight = x.double(), weight.double()
    truth = x @ weight.t() + bias.double()
    rounded = torch.finfo(out.dtype).eps / 2 * (x.abs() @ weight.abs().t())
    assert ((out.double() - truth).abs() <= reference.tolerance(x, weight, truth, out.dtype) + rounded).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group", "zero"), [(32, True), (64, False), (128, True), (-1, True)])
@pytest.mark.parametrize("M", [1, 17, 63, 130, 2050])
def test_weight_only(M, group, zero, bits, dtype):
    x, planar, bias = operands(M, 1100, 1024, bits, group, zero, dtype)
    assert ops.why_not_weight_only(x, planar) == []
    check(run(x, planar, bias), x, pack.planar_weight(planar, 1024), bias)


@pytest.mark.parametrize(("N", "K", "group"), [(1, 1, -1), (130, 96, 32), (3, 4000, -1), (129, 4128, 32)])
@pytest.mark.parametrize("M", [1, 33, 257])
def test_tails(M, N, K, group):
    x, planar, bias = operands(M, N, K, 4, group, True, torch.bfloat16)
    check(run(x, planar, bias), x, pack.planar_weight(planar, K), bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("M", [1, 64, 200])
def test_assembly_equals_portable(M, bits, dtype, monkeypatch):
    from compress.kernels import planar_gemm

    x, planar, bias = operands(M, 512, 1024, bits, 128, True, dtype)
    fast = run(x, planar, bias)
    monkeypatch.setattr(planar_gemm, "ASSEMBLY", False)
    assert torch.equal(fast, run(x, planar, bias))


def test_split_k_is_deterministic_also_in_graphs_that_run_side_by_side():
    workspace.prepare(torch.device("cuda", 0))
    sets = [operands(M, 4096, 4096, 4, 128, True, torch.bfloat16) for M in (1, 16)]
    assert all(shapes.fused(len(x), 4096, 4096, 4, 128, shapes.Device()).split_k > 1 for x, _, _ in sets)
    expected = [run(*arguments) for arguments in sets]
    graphs, outputs = [], []
    for arguments in sets:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append(run(*arguments))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(200):
        for out in outputs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, right) for out, right in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantize_tokens_bit_for_bit(symmetric, dtype):
    from compress.kernels import int8_quantize

    x = torch.randn(33, 14336, generator=torch.Generator("cuda").manual_seed(0), device="cuda").to(dtype)
    for mine, theirs in zip(
        int8_quantize.quantize_tokens(x, symmetric), reference.quantize_tokens(x, symmetric), strict=True
    ):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 64, 256), (17, 1100, 4100), (63, 130, 33), (300, 20, 128), (2050, 512, 512)]
)
def test_w8a8(M, N, K, symmetric):
    g = torch.Generator("cuda").manual_seed(M)
    x = torch.randn(M, K, generator=g, device="cuda")
    weight = torch.randint(-128, 128, (N, K), generator=g, device="cuda", dtype=torch.int8)
    scale, bias = torch.rand(N, generator=g, device="cuda"), torch.randn(N, generator=g, device="cuda")
    out = ops.w8a8_linear(x, weight, scale, reference.row_sums(weight), bias, None, None, symmetric)
    expected = reference.w8a8(*reference.quantize_tokens(x, symmetric), weight, scale, bias)
    # The multiply-add of scale and bias may be fused: one rounding of the product and one of the sum less.
    allowed = 2 * torch.finfo(torch.float32).eps * ((expected - bias).abs() + bias.abs())
    assert ((out - expected).abs() <= allowed).all()


def test_compiles_with_graphs():
    arguments = operands(4, 4096, 4096, 4, 128, True, torch.bfloat16)
    workspace.prepare(torch.device("cuda", 0))
    compiled = torch.compile(lambda *a: torch.nn.functional.silu(run(*a)), fullgraph=True, mode="reduce-overhead")
    expected = torch.nn.functional.silu(run(*arguments))
    for _ in range(4):
        torch.testing.assert_close(compiled(*arguments).clone(), expected)
