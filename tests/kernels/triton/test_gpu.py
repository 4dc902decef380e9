"""What only a GPU can show: the assembly path equals the portable one, split K is deterministic and survives CUDA
graphs, every shape agrees with the reference, tuning times real kernels. Run with `pytest -m gpu`."""

from itertools import pairwise

import pytest
import torch
from sums import excess

from compress.kernels import reference, workspace
from compress.kernels.layouts import words as pack
from compress.kernels.layouts.scale_blocks import spread
from compress.kernels.operators import fp8, fp8_blocks, grouped
from compress.kernels.operators import words as ops
from compress.kernels.operators.int8_rows import w8a8_linear
from compress.kernels.operators.words import why_not_int8, words_linear
from compress.kernels.tuning import choose as shapes
from compress.kernels.tuning import table
from compress.recipes.studies.kernels import tune

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
    return ops.words_linear(x, planar.words, planar.scale, planar.zero, bias, planar.bits, planar.group_size)


def check(out, x, weight, bias):
    """Weights scaled before the product are rounded to the dtype of x, as `weight` is; others are not."""
    x, weight = x.double(), weight.double()
    truth = x @ weight.t() + bias.double()
    rounded = torch.finfo(out.dtype).eps / 2 * (x.abs() @ weight.abs().t())
    assert excess(out, truth, reference.tolerance(x, weight, truth, out.dtype) + rounded) <= 1


@pytest.mark.kernels("planar_gemm.planar_kernel", "dequantize_gemm.dequantize_kernel")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group", "zero"), [(32, True), (64, False), (128, True), (-1, True)])
@pytest.mark.parametrize("M", [1, 17, 63, 130, 2050])
def test_weight_only(M, group, zero, bits, dtype):
    x, planar, bias = operands(M, 1100, 1024, bits, group, zero, dtype)
    assert ops.why_not_weight_only(x, planar) == []
    check(run(x, planar, bias), x, pack.planar_weight(planar, 1024), bias)


@pytest.mark.kernels("planar_gemm.planar_kernel")
@pytest.mark.parametrize(("N", "K", "group"), [(1, 1, -1), (130, 96, 32), (3, 4000, -1), (129, 4128, 32)])
@pytest.mark.parametrize("M", [1, 33, 257])
def test_tails(M, N, K, group):
    x, planar, bias = operands(M, N, K, 4, group, True, torch.bfloat16)
    check(run(x, planar, bias), x, pack.planar_weight(planar, K), bias)


def float8_codes(N, K, generator):
    """Float8 codes [N, K] of finite numbers."""
    wide = torch.randn(N, K, generator=generator, device="cuda").mul(100)
    return wide.clamp(-fp8.E4M3_MAX, fp8.E4M3_MAX).to(fp8.E4M3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 16, 16), (17, 1104, 1024), (2050, 256, 4096)])
def test_float8(M, N, K, static, dtype):
    g = torch.Generator("cuda").manual_seed(M + N + K)
    x = torch.randn(M, K, generator=g, device="cuda").to(dtype)
    weight = float8_codes(N, K, g)
    scale, bias = torch.rand(N, generator=g, device="cuda") * 0.01, torch.randn(N, generator=g, device="cuda").to(dtype)
    reasons = fp8.why_not_fp8(x, weight)
    assert (reasons == []) == (torch.cuda.get_device_capability() >= fp8.OLDEST_CAPABILITY)
    fixed = torch.full((1,), 0.01, device="cuda") if static else None
    out = fp8.fp8_linear(x, weight.view(torch.uint8), scale, bias, fixed)
    codes, x_scale = (fp8.quantize_static(x, fixed), fixed) if static else fp8.quantize_tokens(x)
    truth = fp8.reference(codes, x_scale, weight, scale, bias)
    given, values = codes.double() * x_scale.double()[:, None], weight.double() * scale.double()[:, None]
    allowed = reference.tolerance(given, values, truth, dtype)
    allowed += fp8_blocks.SHORT_SUMS * (given.abs() @ values.abs().t())
    assert excess(out, truth, allowed) <= 1


@pytest.mark.kernels("fp8_block_gemm.quantize_blocks_kernel")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_float8_tokens_bit_for_bit(dtype):
    """Also of numbers that become zero, which keep their sign."""
    from compress.kernels.triton.fp8_block_gemm import quantize_blocks

    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(33, 5000, generator=g, device="cuda")
    x = (x * 10 ** (-6 * torch.rand(33, 5000, generator=g, device="cuda"))).to(dtype)
    for found, right in zip(quantize_blocks(x), fp8_blocks.quantize_token_blocks(x.cpu()), strict=True):
        assert torch.equal(found.cpu().contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.kernels("fp8_block_gemm.fp8_block_kernel", "fp8_block_gemm.quantize_blocks_kernel")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 16, 16), (17, 1100, 1040), (64, 576, 7168), (2050, 256, 4096)])
def test_float8_blocks(M, N, K, dtype):
    """Sums of a block of columns may be short of float32."""
    g = torch.Generator("cuda").manual_seed(M + N + K)
    x = torch.randn(M, K, generator=g, device="cuda").to(dtype)
    weight = float8_codes(N, K, g)
    scale = torch.rand(-(-N // 128), -(-K // 128), generator=g, device="cuda") * 0.01
    bias = torch.randn(N, generator=g, device="cuda").to(dtype)
    reasons = fp8_blocks.why_not_fp8_blocks(x)
    assert (reasons == []) == (torch.cuda.get_device_capability() >= fp8.OLDEST_CAPABILITY)
    out = fp8_blocks.fp8_block_linear(x, weight.view(torch.uint8), scale, bias)
    codes, x_scale = fp8_blocks.quantize_token_blocks(x)
    truth = fp8_blocks.reference(codes, x_scale, weight, scale, bias)
    given = codes.double() * spread(x_scale.double(), codes.shape, (1, 128))
    values = weight.double() * spread(scale.double(), weight.shape, (128, 128))
    allowed = reference.tolerance(given, values, truth, dtype)
    allowed += fp8_blocks.SHORT_SUMS * (given.abs() @ values.abs().t())
    assert excess(out, truth, allowed) <= 1


@pytest.mark.kernels("planar_gemm.planar_kernel")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("M", [1, 64, 200])
def test_assembly_equals_portable(M, bits, dtype, monkeypatch):
    from compress.kernels.triton import planar_gemm

    x, planar, bias = operands(M, 512, 1024, bits, 128, True, dtype)
    fast = run(x, planar, bias)
    monkeypatch.setattr(planar_gemm, "ASSEMBLY", False)
    assert torch.equal(fast, run(x, planar, bias))


@pytest.mark.kernels("planar_gemm.planar_kernel")
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


@pytest.mark.kernels("dequantize_gemm.dequantize_kernel")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group", "zero"), [(16, True), (32, False), (96, True), (128, True), (-1, True)])
def test_dequantize_bit_for_bit(group, zero, bits, dtype):
    from compress.kernels.triton import dequantize_gemm

    _, planar, _ = operands(1, 700, 1152, bits, group, zero, dtype)
    out = torch.full((700, 1152), float("nan"), dtype=dtype, device="cuda")
    dequantize_gemm.dequantize(planar, 1152, range(700), range(1152), out)
    assert torch.equal(out, pack.planar_weight(planar, 1152))


@pytest.mark.kernels("dequantize_gemm.dequantize_kernel")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("M", "group"), [(1, 96), (300, 16), (2050, 128)])
def test_dequantized_product_and_gradient(M, group, dtype, monkeypatch):
    """By blocks of 1024 rows forward and of columns backward; outputs are compared before the bias is added."""
    from compress.kernels.triton import dequantize_gemm

    monkeypatch.setattr(dequantize_gemm, "WORKSPACE_BYTES", 1024 * 1152 * dtype.itemsize)
    x, planar, _ = operands(M, 2300, 1152, 4, group, True, dtype)
    bias = torch.zeros(2300, dtype=dtype, device="cuda")
    assert ops.weight_only_path(x, planar)[0] == "dequantize"
    x.requires_grad_()
    out = run(x, planar, bias)
    dense = pack.planar_weight(planar, 1152)
    check(out.detach(), x.detach(), dense, bias)
    grad = torch.randn_like(out)
    (back,) = torch.autograd.grad(out, x, grad)
    check(back, grad, dense.t(), torch.zeros(1152, device="cuda"))


@pytest.mark.kernels("planar_gemm.planar_kernel", "int8_gemm.w8a8_kernel")
@pytest.mark.parametrize(
    "problem",
    [
        tune.TunedProduct("weight_only", 1, 1024, 1024),
        tune.TunedProduct("weight_only", 128, 1024, 1024, 8, -1),
        tune.TunedProduct("w8a8", 64, 1024, 1024, 8, -1),
        tune.TunedProduct("w8a8", 512, 1024, 1024, 8, -1),
    ],
)
def test_tuning_finds_something_that_is_then_used(problem, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table.forget()
    device = torch.device("cuda", 0)
    (entry,) = tune.tune([problem], device)
    assert 0 < entry.measured["median_ms"] <= entry.measured["derived_ms"]
    assert not any("wrong" in reason for reason in entry.measured["left_out"])
    known = shapes.device_of(device)
    sizes = (problem.M, problem.N, problem.K)
    assert shapes.choose(problem.kind, *sizes, known) == entry.run
    table.forget()


@pytest.mark.kernels("int8_quantize.quantize_static_kernel")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("zero", [None, -128, 5])
def test_quantize_static_bit_for_bit(zero, dtype):
    from compress.kernels.triton import int8_quantize

    x = (torch.randn(33, 5000, generator=torch.Generator("cuda").manual_seed(0), device="cuda") * 3).to(dtype)
    zero = None if zero is None else torch.tensor([zero], dtype=torch.int32, device="cuda")
    scale = torch.tensor([0.1], device="cuda")
    assert torch.equal(int8_quantize.quantize_static(x, scale, zero), reference.quantize_static(x, scale, zero))


@pytest.mark.kernels("int8_quantize.quantize_tokens_kernel")
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantize_tokens_bit_for_bit(symmetric, dtype):
    from compress.kernels.triton import int8_quantize

    x = torch.randn(33, 14336, generator=torch.Generator("cuda").manual_seed(0), device="cuda").to(dtype)
    for mine, theirs in zip(
        int8_quantize.quantize_tokens(x, symmetric), reference.quantize_tokens(x, symmetric), strict=True
    ):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)


@pytest.mark.kernels("int8_planar_gemm.int8_planar_kernel")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group", "zero"), [(4, 32, True), (4, 128, True), (4, 128, False), (8, 128, False)])
@pytest.mark.parametrize("input_group", [-1, 128])
@pytest.mark.parametrize("M", [1, 17, 63, 130, 2050])
def test_int8_tokens(M, input_group, bits, group, zero, dtype):
    x, planar, bias = operands(M, 1100, 1024, bits, group, zero, dtype)
    assert why_not_int8(x, planar) == []
    out = words_linear(x, *planar[:3], bias, bits, group, input_group)
    codes, scale = reference.quantize_token_blocks(x, input_group)
    given = codes.double() * scale.double().repeat_interleave(1024 // scale.shape[1], 1)
    wide = [part.t().double().repeat_interleave(group, 1) for part in (planar.scale, planar.zero) if part is not None]
    centre = wide[1] if zero else 2 ** (bits - 1)
    weight = (pack.unpack_planar(planar.words, bits, 1024).double() - centre) * wide[0]
    truth = given @ weight.t() + bias.double()
    assert excess(out, truth, reference.tolerance(given, weight, truth, dtype)) <= 1


@pytest.mark.kernels("planar_gemm.planar_kernel", "int8_planar_gemm.int8_planar_kernel")
@pytest.mark.parametrize("input_group", [None, -1, 128])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (4, -1), (8, 128)])
def test_batch_invariant(bits, group, input_group):
    """Alone, in small and in large company, at any place."""
    x, planar, bias = operands(2050, 1100, 4096, bits, group, bits == 4, torch.bfloat16)

    def product(x):
        return words_linear(x, *planar[:3], bias, bits, group, input_group, True)

    whole = product(x)
    for first, last in ((0, 1), (7, 8), (0, 5), (3, 73), (64, 564), (2049, 2050)):
        assert torch.equal(product(x[first:last]), whole[first:last])


@pytest.mark.kernels("int8_gemm.w8a8_kernel")
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 64, 256), (17, 1100, 4100), (63, 130, 33), (300, 20, 128), (2050, 512, 512)]
)
def test_w8a8(M, N, K, symmetric):
    g = torch.Generator("cuda").manual_seed(M)
    x = torch.randn(M, K, generator=g, device="cuda")
    weight = torch.randint(-128, 128, (N, K), generator=g, device="cuda", dtype=torch.int8)
    scale, bias = torch.rand(N, generator=g, device="cuda"), torch.randn(N, generator=g, device="cuda")
    out = w8a8_linear(x, weight, scale, reference.row_sums(weight), bias, None, None, symmetric)
    expected = reference.w8a8(*reference.quantize_tokens(x, symmetric), weight, scale, bias)
    # The multiply-add of scale and bias may be fused: one rounding of the product and one of the sum less.
    allowed = 2 * torch.finfo(torch.float32).eps * ((expected - bias).abs() + bias.abs())
    assert excess(out, expected, allowed) <= 1


@pytest.mark.kernels("planar_gemm.planar_kernel")
def test_compiles_with_graphs():
    arguments = operands(4, 4096, 4096, 4, 128, True, torch.bfloat16)
    workspace.prepare(torch.device("cuda", 0))
    compiled = torch.compile(lambda *a: torch.nn.functional.silu(run(*a)), fullgraph=True, mode="reduce-overhead")
    expected = torch.nn.functional.silu(run(*arguments))
    for _ in range(4):
        torch.testing.assert_close(compiled(*arguments).clone(), expected)


@pytest.mark.kernels("planar_gemm.planar_kernel")
def test_a_graph_takes_one_slice_of_counters_and_gives_it_back():
    device = torch.device("cuda", 0)
    workspace.prepare(device)
    arguments = operands(1, 4096, 4096, 4, 128, True, torch.bfloat16)
    expected = run(*arguments)
    before = dict(workspace._taken)
    with workspace.borrowed():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [run(*arguments) for _ in range(5)]
        (owner,) = workspace._taken.keys() - before.keys()
        assert owner.capture > 0
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outputs)
    assert workspace._taken == before


@pytest.mark.kernels("grouped_gemm.grouped_kernel", "grouped_int8.grouped_int8_kernel")
@pytest.mark.parametrize("tokens", [1, 40, 3000])
@pytest.mark.parametrize("experts", [8, 100])
def test_experts(tokens, experts):
    """One launch against a product per expert; some tokens have none. Captured: nothing waits for the CPU."""
    g = torch.Generator("cuda").manual_seed(tokens)
    expert = torch.randint(experts + 1, (tokens, 4), generator=g, device="cuda")
    each = [operands(1, 300, 512, 4, 128, True, torch.bfloat16)[1] for _ in range(experts)]
    words, scale, zero = (torch.stack(parts) for parts in list(zip(*each, strict=True))[:3])
    x = torch.randn(tokens, 512, generator=g, device="cuda").bfloat16()
    bias = torch.randn(experts, 300, generator=g, device="cuda").bfloat16()
    routing = grouped.sort_by_expert(expert, experts)
    out = grouped.grouped_words(x, words, scale, zero, bias, *routing[:2], 4, 128)
    weight = torch.randint(-128, 128, (experts, 300, 512), generator=g, device="cuda", dtype=torch.int8)
    scale8 = torch.rand(experts, 300, generator=g, device="cuda")
    eight = grouped.grouped_w8a8(x, weight, scale8, None, None, None, None, *routing[:2], True)
    starts = routing.start.tolist()
    for e, (first, last) in enumerate(pairwise(starts)):
        mine = x[routing.token[first:last].long()]
        check(out[first:last], mine, pack.planar_weight(each[e], 512), bias[e])
        torch.testing.assert_close(
            eight[first:last], w8a8_linear(mine, weight[e], scale8[e], None, None, None, None, True)
        )
    assert out[starts[-1] :].count_nonzero() == 0
    workspace.prepare(torch.device("cuda", 0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = grouped.grouped_words(x, words, scale, zero, bias, *grouped.sort_by_expert(expert, experts)[:2], 4, 128)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(again, out)
