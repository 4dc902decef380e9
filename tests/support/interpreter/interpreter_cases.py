"""The Triton kernels, run on the CPU by Triton's interpreter. Needs TRITON_INTERPRET=1 before the first import:
`test_kernels_interpreter.py` runs this file that way, and so can you.

Every output is allocated full of NaN between two guard zones, so that an element that is never written and a write
beyond the end both show. The interpreter multiplies in fp32, so the weights are exact here.
"""

import math

import pytest
import torch
import triton
import triton.language as tl
from combinations import pairs

from compress.base.errors import CompressError
from compress.inference.check.dense_twin import error
from compress.inference.layers.linear import QuantLinear
from compress.kernels import reference, workspace
from compress.kernels.layouts import words as pack
from compress.kernels.operators import words as ops
from compress.kernels.operators.int8_rows import w8a8_linear
from compress.kernels.triton import dequantize_gemm, int8_gemm, int8_quantize, planar_gemm
from compress.kernels.triton.int8_gemm import power8, unpack8
from compress.kernels.triton.unpack import power4, raise4, unpack4
from compress.kernels.tuning import choose as shapes
from compress.kernels.tuning.table import Shape
from compress.recipes.studies.kernels import tune
from compress.weights.formats.sparse24 import sparse24 as two_of_four
from compress.weights.grid import Grid, quantize

GUARD = 4096
POISON = 77


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    assert planar_gemm.INTERPRET, "set TRITON_INTERPRET=1"
    zones = []

    def empty(*size, dtype, device):
        count = math.prod(size)
        fill = float("nan") if dtype.is_floating_point else POISON
        whole = torch.full((count + 2 * GUARD,), fill, dtype=dtype, device=device)
        zones.append((whole[:GUARD], whole[-GUARD:], fill))
        return whole[GUARD:-GUARD].view(*size)

    monkeypatch.setattr(torch, "empty", empty)
    yield
    for before, after, fill in zones:
        for zone in (before, after):
            assert (zone.isnan() if fill != fill else zone == fill).all(), "a write outside of the output"


def weight_and_truth(bits, N, K, group, zero, dtype, seed):
    """(Words, fp64 [N, K] values) with scales of both signs."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (N, K), generator=g).to(torch.uint8)
    groups = 1 if group == -1 else K // group
    scale = (torch.randn(N, groups, generator=g) * 0.05).to(dtype)
    zeros = torch.randint(0, 2**bits, (N, groups), generator=g).to(torch.uint8)
    if not zero:
        zeros.fill_(2 ** (bits - 1))
    wide = [t.double().repeat_interleave(K // groups, 1) for t in (zeros, scale)]
    truth = (codes.double() - wide[0]) * wide[1]
    planar = pack.to_planar(codes, scale, zeros, bits, dtype)
    return (planar if zero else planar._replace(zero=None)), truth


def check_weight_only(M, N, K, bits, group, zero, bias, dtype, shape=None):
    g = torch.Generator().manual_seed(M + N + K)
    x = torch.randn(M, K, generator=g).to(dtype)
    added = torch.randn(N, generator=g).to(dtype) if bias else None
    planar, weight = weight_and_truth(bits, N, K, group, zero, dtype, seed=M)
    out = planar_gemm.planar_gemm(x, planar, added, shape)
    truth = x.double() @ weight.t() + (added.double() if bias else 0)
    assert out.dtype == dtype
    assert out.shape == (M, N)
    assert ((out.double() - truth).abs() <= reference.tolerance(x.double(), weight, truth, dtype)).all()
    return out


@pytest.mark.parametrize(
    ("M", "group", "zero", "bits", "dtype"),
    pairs([1, 17, 63], [32, 64, 128, -1], [False, True], [4, 8], [torch.float16, torch.bfloat16]),
)
def test_weight_only(M, group, zero, bits, dtype):
    check_weight_only(M, 64, 256, bits, group, zero, bias=M == 17, dtype=dtype)


@pytest.mark.parametrize(
    ("sizes", "bits", "zero"),
    pairs([(1, 130, 96, 32), (17, 3, 224, 32), (63, 100, 200, -1), (5, 1, 1, -1)], [4, 8], [False, True]),
)
def test_tails_of_every_dimension(sizes, bits, zero):
    M, N, K, group = sizes
    check_weight_only(M, N, K, bits, group, zero, bias=True, dtype=torch.float16)


@pytest.mark.parametrize("M", [65, 130])
def test_many_tokens(M):
    check_weight_only(M, 140, 256, 4, 64, True, bias=True, dtype=torch.float16)


@pytest.mark.parametrize("group", [256, 384])
def test_a_group_may_span_blocks(group):
    check_weight_only(3, 32, 768, 4, group, True, bias=False, dtype=torch.float16, shape=Shape(16, 32, split_k=2))


@pytest.mark.parametrize(("M", "split_k", "bits"), [(17, 2, 4), (5, 3, 8), (5, 8, 4)])
def test_split_k(M, split_k, bits):
    """8 splits of 5 blocks leave some programs without work; they must count all the same."""
    K = 5 * pack.planar_block(bits) - 32
    shape = Shape(16, 64, split_k=split_k)
    first = check_weight_only(M, 64, K, bits, 32, True, bias=True, dtype=torch.float16, shape=shape)
    assert workspace.counters(torch.device("cpu")).count_nonzero() == 0
    again = check_weight_only(M, 64, K, bits, 32, True, bias=True, dtype=torch.float16, shape=shape)
    assert torch.equal(first, again)


def test_split_k_is_chosen_and_right():
    assert shapes.fused(1, 32, 2048, 4, 128, shapes.Device()).split_k == 4
    check_weight_only(1, 32, 2048, 4, 128, False, bias=True, dtype=torch.float16)


def test_x_may_be_a_slice_of_something_wider():
    planar, weight = weight_and_truth(4, 32, 128, 32, True, torch.float16, seed=0)
    wide = torch.randn(9, 300, generator=torch.Generator().manual_seed(0)).half()
    x = wide[::2, 100:228]
    out = planar_gemm.planar_gemm(x, planar)
    assert torch.equal(out, planar_gemm.planar_gemm(x.contiguous(), planar))
    truth = x.double() @ weight.t()
    assert ((out.double() - truth).abs() <= reference.tolerance(x.double(), weight, truth, torch.float16)).all()


def test_no_tokens():
    planar, _ = weight_and_truth(4, 32, 128, 32, True, torch.float16, seed=0)
    assert planar_gemm.planar_gemm(torch.zeros(0, 128).half(), planar).shape == (0, 32)


@pytest.mark.parametrize(
    ("sizes", "zero", "bits", "dtype"),
    pairs(
        [(40, 256, 128), (3, 224, 32), (33, 200, -1), (5, 192, 96), (17, 144, 16)],
        [False, True],
        [4, 8],
        [torch.float16, torch.float32],
    ),
)
def test_dequantize_bit_for_bit(sizes, zero, bits, dtype):
    N, K, group = sizes
    planar, _ = weight_and_truth(bits, N, K, group, zero, dtype, seed=N)
    out = torch.empty(N, K, dtype=dtype, device=torch.device("cpu"))
    dequantize_gemm.dequantize(planar, K, range(N), range(K), out)
    dense = pack.planar_weight(planar, K)
    assert torch.equal(out, dense)
    block = pack.planar_block(bits)
    part = torch.empty(N - 2, K - block, dtype=torch.float32, device=torch.device("cpu"))
    dequantize_gemm.dequantize(planar, K, range(2, N), range(block, K), part)
    assert torch.equal(part, dense[2:, block:].float())


def test_dequantize_to_bfloat16():
    """The interpreter truncates to bf16 where a GPU rounds: one unit in the last place apart at most."""
    planar, truth = weight_and_truth(4, 40, 256, 64, True, torch.bfloat16, seed=0)
    out = torch.empty(40, 256, dtype=torch.bfloat16, device=torch.device("cpu"))
    dequantize_gemm.dequantize(planar, 256, range(40), range(256), out)
    assert ((out.double() - truth).abs() <= torch.finfo(torch.bfloat16).eps * truth.abs()).all()


@pytest.mark.parametrize(
    ("M", "N", "K", "group", "bits"), [(1, 300, 192, 96, 4), (5, 140, 256, 64, 8), (70, 7, 48, 16, 4)]
)
def test_dequantized_product_and_gradient_by_blocks(M, N, K, group, bits, monkeypatch):
    """A workspace of one grain: several blocks of rows forward, of columns backward."""
    monkeypatch.setattr(dequantize_gemm, "WORKSPACE_BYTES", 1)
    planar, weight = weight_and_truth(bits, N, K, group, True, torch.float32, seed=M)
    g = torch.Generator().manual_seed(M)
    x, bias = torch.randn(M, K, generator=g), torch.randn(N, generator=g)
    out = dequantize_gemm.dequantize_gemm(x, planar, bias)
    torch.testing.assert_close(out, (x.double() @ weight.t() + bias).float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(dequantize_gemm.dequantize_gemm(x, planar), out - bias, rtol=1e-5, atol=1e-4)
    grad = torch.randn(M, N, generator=g)
    back = dequantize_gemm.input_gradient(grad, planar, K)
    torch.testing.assert_close(back, (grad.double() @ weight).float(), rtol=1e-5, atol=1e-4)


def test_blocks_cover_and_fit():
    for length, width, itemsize in ((4096, 4096, 2), (57344, 8192, 2), (1, 1, 4), (1000, 28672, 4)):
        parts = dequantize_gemm.blocks(length, width, itemsize)
        assert [i for part in parts for i in (part.start, part.stop)][1:-1:2] == [p.start for p in parts[1:]]
        assert (parts[0].start, parts[-1].stop) == (0, length)
        assert all(len(part) % dequantize_gemm.GRAIN == 0 for part in parts[:-1])
        assert max(map(len, parts)) * width * itemsize <= dequantize_gemm.WORKSPACE_BYTES


@triton.jit
def _unpack_kernel(words_ptr, out_ptr, BITS: tl.constexpr, COUNT: tl.constexpr, DT: tl.constexpr):
    at = tl.arange(0, COUNT)
    words = tl.load(words_ptr + at)
    parts = unpack4(words, DT, False) if BITS == 4 else unpack8(words, DT, False)
    for plane in tl.static_range(16 // BITS):
        tl.store(out_ptr + plane * COUNT + at, parts[plane])


@pytest.mark.parametrize("bits", [4, 8])
def test_portable_unpacking_of_every_word(bits):
    """The inline assembly is held to the same numbers, bit for bit, in test_kernels_ptx.py."""
    words = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    out = torch.full((16 // bits, 2**16), float("nan"), dtype=torch.float16)
    _unpack_kernel[(1,)](words.to(torch.int16), out, BITS=bits, COUNT=2**16, DT=tl.float16)
    for plane, values in enumerate(out):
        power = power4(plane, tl.float16) if bits == 4 else power8(tl.float16)
        assert torch.equal(values, ((words >> bits * plane & 2**bits - 1) + power).half())


@triton.jit
def _raise_kernel(zero_ptr, out_ptr, PLANE: tl.constexpr):
    at = tl.arange(0, 16)
    tl.store(out_ptr + at, raise4(tl.load(zero_ptr + at), PLANE, tl.float16, True))


@pytest.mark.parametrize("plane", range(4))
def test_zero_points_are_raised_like_codes(plane):
    out = torch.full((16,), float("nan"), dtype=torch.float16)
    _raise_kernel[(1,)](torch.arange(16, dtype=torch.uint8), out, PLANE=plane)
    assert torch.equal(out, torch.arange(16) + torch.tensor(power4(plane, tl.float16)).half())


def test_zero_points_are_raised_to_bfloat16():
    """The interpreter has no bf16 arithmetic: the constant is checked instead."""
    zeros = torch.arange(16, dtype=torch.int16)
    assert torch.equal((zeros | 0x4300).view(torch.bfloat16), (zeros + power4(0, tl.bfloat16)).bfloat16())


@triton.jit
def _groups_kernel(ptr, out_ptr, block, N, K, ROWS: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr):
    n = tl.arange(0, ROWS)
    parts = planar_gemm.load_groups(ptr, block, n, N, K, 128, GROUP, COUNT)
    for i in tl.static_range(COUNT):
        tl.store(out_ptr + i * ROWS + n, parts[i])


@pytest.mark.parametrize(("group", "count"), [(32, 4), (64, 2), (128, 1), (384, 1)])
def test_groups_are_never_read_past_the_last(group, count):
    """The scales of the step after the last one are loaded too: they must come from inside of the array."""
    K = 3 * 384 - (group if group < 128 else 0)
    groups, rows = K // group, 4
    scale_GN = torch.arange(groups * 3, dtype=torch.float32).view(groups, 3)
    for block in range(11):
        out = torch.full((count, rows), float("nan"))
        _groups_kernel[(1,)](scale_GN, out, block, 3, K, ROWS=rows, GROUP=group, COUNT=count)
        columns = [block * 128 + i * (128 // count) for i in range(count)]
        expected = scale_GN[[min(column // group, groups - 1) for column in columns]]
        assert torch.equal(out[:, :3], expected)
        assert (out[:, 3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantize_tokens_bit_for_bit(symmetric, dtype):
    x = (torch.randn(5, 100, generator=torch.Generator().manual_seed(1)) * 3 + 1).to(dtype)
    x[0] = 0
    x[1] = -x[1].abs()
    x[2] = x[2].abs() * 1e-6
    ours = int8_quantize.quantize_tokens(x, symmetric)
    for mine, theirs in zip(ours, reference.quantize_tokens(x, symmetric), strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)


def test_quantize_tokens_of_a_row_in_pieces(monkeypatch):
    monkeypatch.setattr(int8_quantize, "ROW_BLOCK", 64)
    x = torch.randn(2, 200, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(int8_quantize.quantize_tokens(x, False), reference.quantize_tokens(x, False), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("zero", [None, -128, 5])
def test_quantize_static_bit_for_bit(zero, dtype):
    x = (torch.randn(5, 2 * int8_quantize.STATIC_BLOCK + 3, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    x[0, :4] = torch.tensor([0.15, -0.25, 1e9 if dtype != torch.float16 else 6e4, -6e4])
    zero = None if zero is None else torch.tensor([zero], dtype=torch.int32)
    scale = torch.tensor([0.1])
    assert torch.equal(int8_quantize.quantize_static(x, scale, zero), reference.quantize_static(x, scale, zero))
    wide = x[:, 1:100]
    assert torch.equal(int8_quantize.quantize_static(wide, scale, zero), reference.quantize_static(wide, scale, zero))


@pytest.mark.parametrize(
    ("sizes", "symmetric", "static"),
    pairs([(1, 64, 256), (17, 100, 200), (63, 130, 33), (300, 20, 128)], [True, False], [True, False]),
)
def test_w8a8(sizes, symmetric, static):
    M, N, K = sizes
    g = torch.Generator().manual_seed(M)
    x = torch.randint(-128, 128, (M, K), generator=g, dtype=torch.int8)
    weight = torch.randint(-128, 128, (N, K), generator=g, dtype=torch.int8)
    count = 1 if static else M
    x_scale, weight_scale = torch.rand(count, generator=g), torch.randn(N, generator=g)
    x_zero = None if symmetric else torch.randint(-128, 128, (count,), generator=g, dtype=torch.int32)
    bias = torch.randn(N, generator=g)
    operands = (x, x_scale, x_zero, weight, weight_scale, reference.row_sums(weight), bias, torch.float32)
    expected = reference.w8a8(x, x_scale, x_zero, weight, weight_scale, bias)
    assert torch.equal(int8_gemm.w8a8_gemm(*operands), expected)
    # 4 splits of at most 2 steps leave some programs without work.
    assert torch.equal(int8_gemm.w8a8_gemm(*operands, Shape(32, 64, split_k=4)), expected)
    assert workspace.counters(torch.device("cpu")).count_nonzero() == 0


def test_int8_sums_are_exact_at_the_extremes():
    x = torch.full((1, 1024), -128, dtype=torch.int8)
    one = torch.ones(1)
    out = int8_gemm.w8a8_gemm(x, one, None, x, one, None, None, torch.float32)
    assert out.item() == 128 * 128 * 1024


def test_the_operators_take_this_path():
    planar, _ = weight_and_truth(4, 32, 128, 32, True, torch.float16, seed=0)
    x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(0)).half()
    assert ops.why_not_weight_only(x, planar) == []
    out = ops.words_linear(x, planar.words, planar.scale, planar.zero, None, 4, 32)
    assert torch.equal(out, planar_gemm.planar_gemm(x.view(6, 128), planar).view(2, 3, 32))
    codes = torch.randint(-128, 128, (7, 128), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    given = (x, codes, torch.ones(7), None, None, torch.tensor([0.05]), None, True)
    fixed = reference.quantize_static(x.view(6, 128), given[5])
    expected = reference.w8a8(fixed, given[5], None, codes, torch.ones(7), dtype=torch.float32)
    torch.testing.assert_close(w8a8_linear(*given).view(6, 7).float(), expected, rtol=1e-3, atol=0)
    out = w8a8_linear(x, codes, torch.ones(7), reference.row_sums(codes), None, None, None, False)
    xq, scale, zero = reference.quantize_tokens(x.view(6, 128), False)
    expected = reference.w8a8(xq, scale, zero, codes, torch.ones(7), dtype=torch.float32)
    torch.testing.assert_close(out.view(6, 7).float(), expected, rtol=torch.finfo(torch.float16).eps, atol=0)


@pytest.mark.parametrize(("dtype", "group"), [(torch.float32, 64), (torch.float16, 96), (torch.float16, 16)])
def test_the_operator_dequantizes_what_the_fused_kernel_refuses(dtype, group):
    planar, weight = weight_and_truth(4, 32, 192, group, True, dtype, seed=0)
    x = torch.randn(2, 3, 192, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    assert ops.why_not_weight_only(x, planar) != []
    assert ops.weight_only_path(x.detach().view(6, 192), planar) == ("dequantize", None)
    out = ops.words_linear(x, planar.words, planar.scale, planar.zero, None, 4, group)
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 20 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out.view(6, 32), (x.detach().view(6, 192).double() @ weight.t()).to(dtype), **close)
    out.backward(out.detach())
    torch.testing.assert_close(x.grad.view(6, 192), (out.detach().view(6, 32).double() @ weight).to(dtype), **close)


def test_many_tokens_are_dequantized(monkeypatch):
    planar, _ = weight_and_truth(4, 32, 128, 32, True, torch.float16, seed=0)
    many = shapes.DEQUANTIZE_TOKENS
    assert ops.weight_only_path(torch.zeros(many, 128).half(), planar) == ("dequantize", None)
    path, shape = ops.weight_only_path(torch.zeros(many - 1, 128).half(), planar)
    assert (path, shape) == ("triton", shapes.fused(many - 1, 32, 128, 4, 32, shapes.Device()))


@pytest.mark.parametrize(("bits", "symmetric", "dtype"), [(4, True, torch.float16), (3, False, torch.bfloat16)])
def test_sparse24_layers_take_it_too(bits, symmetric, dtype, monkeypatch):
    """What a checkpoint stores, some quads of it without a weight."""
    draw = torch.Generator().manual_seed(bits)
    order = torch.rand(40, 48, 4, generator=draw).argsort(-1)
    weight = torch.randn(40, 192, generator=draw)
    weight *= (order < torch.randint(3, (40, 48, 1), generator=draw)).flatten(1)
    grid = Grid(bits=bits, symmetric=symmetric, granularity="group", group_size=32)
    layer = QuantLinear.from_quantized(two_of_four(quantize(weight, grid, dtype)))
    monkeypatch.setattr(ops, "product_of_blocks", lambda *_: pytest.fail("torch"))
    x = torch.randn(5, 192, generator=draw).to(dtype)
    assert error(layer, x, layer(x)) <= 1


@pytest.mark.parametrize(
    "problem",
    [
        tune.TunedProduct("weight_only", 2, 64, 512, 4, 128, zero=True, dtype=torch.float16),
        tune.TunedProduct("int8_activation", 2, 32, 256, 4, 128, zero=True, dtype=torch.float16),
        tune.TunedProduct("w8a8", 3, 40, 256, 8, -1, zero=True, dtype=torch.float32),
    ],
)
def test_tuning_verifies_what_it_times(problem, monkeypatch):
    monkeypatch.setattr(tune.products, "CACHE_BYTES", 1)
    operands = tune.TuningOperands(problem, torch.device("cpu"))
    timed = []
    entry = tune.tune_one(
        problem,
        operands,
        shapes.Device(),
        tune.HOPPER_SHARED,
        lambda calls: timed.extend(calls) or dict.fromkeys(calls, 1),
    )
    assert entry.run == problem.derived(shapes.Device())
    assert entry.measured["left_out"] == []
    assert len(set(timed)) == entry.measured["tried"] >= 2
    operands.truth += operands.allowed * 3
    with pytest.raises(CompressError, match="wrong result"):
        tune.tune_one(problem, operands, shapes.Device(), tune.HOPPER_SHARED, lambda calls: {})


def test_tuning_dequantizes_too(monkeypatch):
    monkeypatch.setattr(tune.products, "CACHE_BYTES", 1)
    problem = tune.TunedProduct("weight_only", 64, 16, 128, 4, 32, dtype=torch.float16)
    operands = tune.TuningOperands(problem, torch.device("cpu"))
    calls, reason = tune.checked(operands, "dequantize")
    assert (len(calls), reason) == (operands.copies, "")
