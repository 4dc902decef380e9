"""Weights in strips: the layout, the products against dequantized operands, the operator."""

import pytest
import torch
from combinations import every
from emulated import TARGETS, products_for
from planar import inputs, planar_of, within

from compress.base.errors import InputError
from compress.kernels import reference
from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import direct
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.cpu.layouts import lay_in_strips, why_not_lay_in_strips
from compress.kernels.layouts import words as pack
from compress.kernels.layouts.strips import pack_strips, unpack_strips, why_not_strips
from compress.kernels.layouts.words import CodeWords
from compress.kernels.operators import words as ops

TOKENS = (1, 2, 3, 4, 7, 17, 63)
GROUPS = ((32, 32), (96, 32), (200, -1), (256, 64), (640, 320), (640, 128), (1000, -1), (1088, 544))


SLOW = [pytest.param("avx2-vnni", marks=pytest.mark.slow), *TARGETS]


@pytest.fixture(scope="module", params=["native", "avx2", *SLOW])
def compiled(request):
    with products_for(request.param) as library:
        yield library


@every("K", [8, 32, 50, 200])
@every("symmetric", [True, False])
@every("bits", [4, 8])
def test_layout(K, symmetric, bits, monkeypatch):
    group = 32 if K == 32 else -1
    weight, _ = planar_of(48, K, bits, group, symmetric, torch.bfloat16)
    monkeypatch.setattr("compress.kernels.layouts.words.CHUNK", 16 * K * 2)  # two strips of three at a time
    found = pack_strips(weight, K)
    codes = pack.unpack_planar(weight.words, bits, K)
    assert found.words.shape == (3, -(-K // 32) * bits, 64)
    for n, k in ((0, 0), (17, 3), (47, K - 1), (30, K // 2)):
        byte = found.words[n // 16, k // (32 // bits), n % 16 * 4 + k % 4]
        assert (byte >> (4 if k % 8 >= 4 else 0) & 15 if bits == 4 else byte) == codes[n, k]
        assert found.scale[n // 16, k // K, n % 16] == weight.scale[0, n]
    again = unpack_strips(found, K)
    assert (again.zero is None) == symmetric
    for one, other in zip(again, weight, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_what_is_not_laid_out_in_strips():
    assert why_not_strips(48, 4) == why_not_strips(48, 8) == []
    assert "codes are 2 bits" in why_not_strips(48, 2)[0]
    assert "40 outputs" in why_not_strips(40, 4)[0]
    assert any("group size 16" in reason for reason in why_not_lay_in_strips(48, 64, 4, 16, False))
    assert any("8 bits" in reason for reason in why_not_lay_in_strips(48, 64, 8, 32, True))
    assert any("65536 columns" in reason for reason in why_not_lay_in_strips(48, 2**16, 4, 32, True))
    weight, _ = planar_of(16, 32, 4, 32, True, torch.float32)
    assert lay_in_strips(weight._replace(words=weight.words.to("meta")), 32, True) is None


@every("bits", [4, 8])
@every("dtype", [torch.bfloat16, torch.float16, torch.float32])
@every(("K", "group"), GROUPS)
def test_exact_inputs(library, K, group, dtype, bits):
    for N, symmetric in ((16, True), (80, False), (48, True)):
        weight, values = planar_of(N, K, bits, group, symmetric, dtype)
        laid = pack_strips(weight, K)
        for M in TOKENS:
            x, bias = inputs(M, K, N, dtype)
            out = cpu_gemm.words(x, laid, bias)
            assert out.dtype == dtype
            assert within(out, x.double(), values, bias, dtype), (M, N, symmetric)


@every("bits", [4, 8])
@every("dtype", [torch.bfloat16, torch.float32])
def test_slabs_side_by_side_and_blocks_of_tokens(library, dtype, bits):
    N, K, M = 1040, 544, 300  # more slabs than one thread takes at once, chunks and token blocks that are not full
    for symmetric in (True, False):
        weight, values = planar_of(N, K, bits, 32, symmetric, dtype)
        x, bias = inputs(M, K, N, dtype)
        assert within(cpu_gemm.words(x, pack_strips(weight, K), bias), x.double(), values, bias, dtype)
        planar = cpu_gemm.words(x, weight, bias)
        assert within(planar, x.double(), pack.planar_weight(weight, K).double(), bias, dtype)


@every("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_no_number_stays_none(library, dtype):
    for symmetric in (True, False):
        weight, values = planar_of(32, 64, 4, 32, symmetric, dtype)
        for M in (1, 2, 9, 130):
            x, _ = inputs(M, 64, 32, dtype)
            x[0, 3], x[-1, 5] = float("nan"), float("inf")
            out, exact = cpu_gemm.words(x, pack_strips(weight, 64), None), x.double() @ values.T
            assert torch.equal(out.isnan(), exact.isnan())
            assert torch.equal(out.isinf(), exact.isinf())


@every("dtype", [torch.bfloat16, torch.float16, torch.float32])
@every(("K", "group"), GROUPS)
def test_int8_inputs(library, K, group, dtype):
    for N, symmetric, input_group in ((80, True, -1), (48, False, 128), (16, True, 256)):
        weight, values = planar_of(N, K, 4, group, symmetric, dtype)
        laid = pack_strips(weight, K)
        for M in TOKENS:
            x, bias = inputs(M, K, N, dtype)
            codes, scale_MB = reference.quantize_token_blocks(x, input_group)
            width = K if input_group == -1 else input_group
            given = codes.double() * scale_MB.double().repeat_interleave(width, 1)[:, :K]
            out = cpu_gemm.words(x, laid, bias, input_group)
            assert within(out, given, values, bias, dtype), (M, N, symmetric, input_group)


@every("value", [1.1, -1.1])
@every("zero", [0, 15])
def test_sums_at_the_extremes_are_exact(library, value, zero):
    """All codes 15 or 0 and all inputs 127 or -128: the largest sums of pairs, of parts and of a row."""
    K, code = 2**16 - 32, 15 - zero
    planar = pack.to_planar(torch.full((16, K), code, dtype=torch.uint8), torch.ones(16, 1), None, 4, torch.float32)
    planar = planar._replace(zero=torch.full((1, 16), zero, dtype=torch.uint8))
    given = 127 if value > 0 else -128
    for M in (1, 4, 9):
        x = torch.full((M, K), value)
        codes, scale, _ = reference.quantize_tokens(x)
        assert (codes == given).all()
        exact = (given * (code - zero) * K * scale.double()).float().unsqueeze(-1).expand(M, 16)
        out = cpu_gemm.words(x, pack_strips(planar, K), None, -1)
        torch.testing.assert_close(out, exact, rtol=1e-6, atol=0)
        # Planar words are multiplied by the same dots where tokens are many.
        torch.testing.assert_close(cpu_gemm.words(x, planar, None, -1), exact, rtol=1e-6, atol=0)


def arguments(input_group=None, bias=True, gradient=False, dtype=torch.float32, symmetric=False):
    weight, _ = planar_of(48, 256, 4, 64, symmetric, dtype)
    x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_(gradient)
    laid = pack_strips(weight, 256)
    return x, *laid[:3], torch.ones(48, dtype=dtype) if bias else None, 4, laid.group_size, input_group


@pytest.mark.parametrize(("input_group", "bias", "gradient"), [(None, True, True), (128, False, False)])
def test_contract(input_group, bias, gradient):
    torch.library.opcheck(ops.words_linear.registered, arguments(input_group, bias, gradient))


def test_the_gradient_is_that_of_planar_words():
    given = arguments(gradient=True)
    x, words, scale, zero, *_ = given
    weight = pack.planar_weight(unpack_strips(CodeWords(words, scale, zero, 64, 4), 256), 256)
    ops.words_linear(*given).square().sum().backward()
    other = x.detach().requires_grad_()
    (other @ weight.t() + 1).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


@every("input_group", [None, -1, 128])
def test_without_kernels_codes_are_laid_out_in_planar_words(input_group, monkeypatch):
    given = arguments(input_group)
    x, words, scale, zero, bias, _, group, _ = given
    planar = unpack_strips(CodeWords(words, scale, zero, group, 4), 256)
    monkeypatch.setattr(cpu, "why_not", lambda: ("none",))
    monkeypatch.setattr(direct, "product", lambda *_: None)
    assert torch.equal(ops.words_linear(*given), ops.words_linear(x, *planar[:3], bias, 4, group, input_group))


def test_any_leading_shape_and_stride():
    x, *weight = arguments()
    assert ops.words_linear(x[:0], *weight).shape == (0, 3, 48)
    turned = x.transpose(0, 1)
    assert torch.equal(ops.words_linear(turned, *weight), ops.words_linear(turned.contiguous(), *weight))


def test_wrong_inputs_are_refused():
    x, *weight = arguments()
    with pytest.raises(InputError, match="x has 100 columns; strips of 32 lines, codes of 4 bits,"):
        ops.words_linear(x[..., :100], *weight)
    with pytest.raises(InputError, match="input group 64; allowed: multiples of 128, -1"):
        ops.words_linear(x, *weight[:-1], 64)
