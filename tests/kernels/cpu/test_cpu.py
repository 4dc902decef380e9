"""The compiled CPU products: against dequantized operands, and what happens where they cannot be built."""

import pytest
import torch
from combinations import every
from planar import inputs, planar_of, within

from compress.base.errors import InputError
from compress.kernels import reference
from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.layouts import words as pack
from compress.kernels.operators import blocks
from compress.kernels.operators import words as ops
from compress.kernels.operators.int8_rows import w8a8_linear
from compress.kernels.operators.words import words_linear

TOKENS = (1, 2, 7, 17, 63, 130)
OUTPUTS = (1, 15, 48, 100)
GROUPS = ((32, 32), (96, 32), (200, -1), (256, 32), (256, 64), (256, 128), (640, 320), (640, 128), (640, -1))


@every("dtype", [torch.bfloat16, torch.float16, torch.float32])
@every("bits", [4, 8])
@every(("K", "group"), GROUPS)
def test_weight_only(library, K, group, bits, dtype):
    for N in OUTPUTS:
        for symmetric in (True, False):
            weight, _ = planar_of(N, K, bits, group, symmetric, dtype)
            values = pack.planar_weight(weight, K).double()
            for M in TOKENS:
                x, bias = inputs(M, K, N, dtype)
                out = cpu_gemm.words(x, weight, bias)
                assert out.dtype == dtype
                assert within(out, x.double(), values, bias, dtype), (M, N, symmetric)


@pytest.mark.full
@every("dtype", [torch.bfloat16, torch.float16, torch.float32])
@every("bits", [4, 8])
@every(("K", "group"), GROUPS)
def test_int8_activation(library, K, group, bits, dtype):
    for N, symmetric, input_group in ((100, True, -1), (48, False, -1), (15, False, 128), (1, True, 256)):
        weight, values = planar_of(N, K, bits, group, symmetric, dtype)
        for M in TOKENS:
            x, bias = inputs(M, K, N, dtype)
            codes, scale_MB = reference.quantize_token_blocks(x, input_group)
            width = K if input_group == -1 else input_group
            given = codes.double() * scale_MB.double().repeat_interleave(width, 1)[:, :K]
            out = cpu_gemm.words(x, weight, bias, input_group)
            assert out.dtype == dtype
            assert within(out, given, values, bias, dtype), (M, N, symmetric, input_group)


@every("symmetric", [True, False])
@every("static", [True, False])
@every("K", [50, 96, 640, 1000])
def test_w8a8_is_the_reference_bit_for_bit(library, K, static, symmetric):
    for N in OUTPUTS:
        g = torch.Generator().manual_seed(K + N)
        weight, scale = torch.randint(-128, 128, (N, K), generator=g, dtype=torch.int8), torch.rand(N, generator=g)
        row_sum = reference.row_sums(weight)
        for M in TOKENS:
            x, bias = inputs(M, K, N, torch.float32)
            x_scale, x_zero = torch.tensor([0.03]), None if symmetric else torch.tensor([5], dtype=torch.int32)
            codes = reference.quantize_static(x, x_scale, x_zero)
            if not static:
                codes, x_scale, x_zero = reference.quantize_tokens(x, symmetric)
            expected = reference.w8a8(codes, x_scale, x_zero, weight, scale, bias)
            fixed = (x_scale, x_zero) if static else (None, None)
            out = cpu_gemm.w8a8(x, weight, scale, None if symmetric else row_sum, bias, *fixed, symmetric)
            assert torch.equal(out, expected), (M, N)


def test_sums_at_the_extremes_are_exact(library):
    K = 2**16 - 1
    x, weight = torch.full((3, K), -1.0), torch.full((2, K), -128, dtype=torch.int8)
    out = cpu_gemm.w8a8(x, weight, torch.ones(2), None, None, torch.tensor([1 / 128]), None, True)
    assert (out == 128 * 128 * K / 128).all()


@every("dtype", [torch.bfloat16, torch.float16, torch.float32])
@every("symmetric", [True, False])
def test_activations_are_rounded_as_in_the_reference(library, dtype, symmetric):
    x = torch.randn(9, 203, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] = 0
    x[1] = torch.arange(203) - 100  # ties
    x[2] *= 1e-5
    codes, scale, zero = cpu_gemm.quantize_tokens(x, symmetric)
    expected = reference.quantize_tokens(x, symmetric)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scale[:, 0], expected[1])
    assert symmetric or torch.equal(zero, expected[2])
    codes, scale, _ = cpu_gemm.quantize_tokens(x, True, 128)
    blocks = reference.quantize_token_blocks(x, 128)
    assert torch.equal(codes, blocks[0])
    assert torch.equal(scale, blocks[1])


def op_arguments(dtype=torch.bfloat16, bits=4, group=64, bias=True, gradient=False, input_group=-1):
    weight, _ = planar_of(48, 256, bits, group, False, dtype)
    x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_(gradient)
    return x, weight.words, weight.scale, weight.zero, torch.ones(48) if bias else None, bits, group, input_group


@pytest.mark.parametrize(("bias", "gradient"), [(True, True), (False, False)])
def test_contract(bias, gradient):
    torch.library.opcheck(words_linear.registered, op_arguments(bias=bias, gradient=gradient))


def test_gradient_is_straight_through():
    arguments = op_arguments(torch.float32, gradient=True)
    grad = torch.randn(2, 3, 48, generator=torch.Generator().manual_seed(3))
    words_linear(*arguments).backward(grad)
    x, words, scale, zero, *_ = arguments
    torch.testing.assert_close(x.grad, grad @ pack.planar_weight(pack.CodeWords(words, scale, zero, 64, 4), 256))


def test_compiles_into_one_graph():
    def layer(*arguments):
        return torch.nn.functional.silu(words_linear(*arguments)).sum(-1)

    arguments = op_arguments(torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), layer(*arguments))


def test_any_leading_shape_and_stride():
    x, *weight = op_arguments(torch.float32)
    empty = words_linear(x[:0], *weight)
    assert empty.shape == (0, 3, 48)
    assert ops.words_linear(x[:, :0], *weight[:-1]).shape == (2, 0, 48)
    turned = x.transpose(0, 1)
    for op, arguments in ((words_linear, weight), (ops.words_linear, weight[:-1])):
        expected = op(turned.contiguous(), *arguments)
        assert torch.equal(op(turned, *arguments), expected)
        wide = torch.cat([turned, turned], -1)[..., :256]
        assert torch.equal(op(wide, *arguments), expected)


def test_wrong_inputs_are_refused():
    x, *weight = op_arguments()
    with pytest.raises(InputError, match="x has 100 columns"):
        words_linear(x[..., :100], *weight)
    with pytest.raises(InputError, match="input group 64; allowed: multiples of 128, -1"):
        words_linear(x, *weight[:-1], 64)


def test_reasons_name_what_was_given_and_what_is_allowed():
    x = torch.zeros(1, 256)
    assert cpu_gemm.why_not("weight_only", x.to("meta"), x) == ["the device is meta, not cpu"]
    assert any("group size 16" in reason for reason in cpu_gemm.why_not("weight_only", x, x, 16))
    assert any("x is torch.float64" in reason for reason in cpu_gemm.why_not("weight_only", x.double(), x))
    assert any("scales are torch.float64" in reason for reason in cpu_gemm.why_not("w8a8", x, x.double()))
    assert any("65536" in reason for reason in cpu_gemm.why_not("w8a8", torch.zeros(1, 2**16), x))


def test_routes(compiled):
    assert cpu_gemm.cpu_route("weight_only", 1, 4096, 4096) == "rows"
    assert cpu_gemm.cpu_route("weight_only", 512, 4096, 4096) == "slabs"
    assert cpu_gemm.cpu_route("weight_only", 1, 4096, 4096, group_size=16) == "torch"
    assert cpu_gemm.cpu_route("int8_activation", 1, 4096, 2**16) == "reference"


def results():
    """Every operator on the CPU, at the sizes of the tests of operators."""
    x, *weight = op_arguments(torch.float32)
    eight, scale = torch.arange(96).view(3, 32).to(torch.int8), torch.ones(3)
    return [
        ops.words_linear(x, *weight[:-1]),
        words_linear(x, *weight),
        words_linear(x, *weight[:-1], 128),
        w8a8_linear(x[0, :, :32], eight, scale, reference.row_sums(eight), None, None, None, False),
    ]


def test_without_kernels_torch_gives_the_same_numbers(fresh):
    expected = results()
    cpu._loaded.cache_clear()
    fresh.setenv("COMPRESS_CPU_KERNELS", "0")
    fresh.setattr(blocks, "UNPACKED_BYTES", blocks.BYTES_PER_WEIGHT * 256 * 7)  # seven rows at a time
    assert cpu.why_not() == ("COMPRESS_CPU_KERNELS=0 turns the compiled CPU kernels off",)
    assert cpu_gemm.cpu_route("weight_only", 1, 64, 64) == "torch"
    for one, other in zip(results(), expected, strict=True):
        torch.testing.assert_close(one, other)
    with torch.autocast("cpu", torch.bfloat16):  # which has no say in it
        found = results()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_instructions_can_be_chosen(fresh):
    fresh.setenv("COMPRESS_CPU", "avx2")
    if cpu.machine_reasons() or not cpu.compilers():
        pytest.skip("no compiled kernels here")
    assert cpu.why_not() == ()
    assert cpu.library().instructions() == b"avx2"
    fresh.setenv("COMPRESS_CPU", "avx9")
    cpu._loaded.cache_clear()
    with pytest.raises(InputError, match="COMPRESS_CPU=avx9; allowed: native, avx2, avx2-vnni"):
        cpu.why_not()


def test_a_group_that_the_kernels_do_not_take_is_unpacked():
    x, words, _, _, _, bits, _, _ = op_arguments(torch.float32)
    scale = torch.rand(16, 48, generator=torch.Generator().manual_seed(0))
    weight = pack.CodeWords(words, scale, None, 16, bits)
    expected = x @ pack.planar_weight(weight, 256).t()
    torch.testing.assert_close(ops.words_linear(x, *weight[:3], None, bits, 16), expected)


def test_no_compiler_is_a_reason(fresh, tmp_path):
    fresh.setenv("PATH", str(tmp_path))
    fresh.setenv("CXX", "absent")
    if cpu.machine_reasons():
        pytest.skip("; ".join(cpu.machine_reasons()))
    assert cpu.why_not() == ("no C++ compiler: none of $CXX, c++, g++, clang++ was found",)
    assert all(out.isfinite().all() for out in results())
