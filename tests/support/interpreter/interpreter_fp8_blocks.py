"""The Triton kernels of float8 with scales of blocks, run as `interpreter_cases` runs the others."""

import pytest
import torch
from combinations import pairs
from interpreter_cases import guarded  # noqa: F401  every test here is held to `guarded`

from compress.kernels import reference, workspace
from compress.kernels.layouts.scale_blocks import INPUT_BLOCK, WEIGHT_BLOCK, spread
from compress.kernels.operators import fp8_blocks
from compress.kernels.operators.fp8 import E4M3
from compress.kernels.triton import fp8_block_gemm
from compress.kernels.tuning.table import Shape

POSITIVE = torch.arange(127, dtype=torch.uint8).view(E4M3).float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_inputs_are_rounded_as_torch_rounds_them(dtype):
    """Blocks at the right edge, of zeros, of numbers that saturate; more blocks than one program takes."""
    x = torch.randn(5, 17 * 128 + 44, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, :128], x[1] = 0, x[1] * 1e-4
    x[2, 130:133] = torch.tensor([6e4, -6e4, 1e-8])
    for given in (x, x[:, 128:], x[:, 1:300], x[:, ::2]):
        (codes, scale), (expected, scales) = (
            fp8_block_gemm.quantize_blocks(given),
            fp8_blocks.quantize_token_blocks(given),
        )
        assert torch.equal(scale, scales)
        assert torch.equal(codes.float(), expected.float())


def test_ties_go_to_the_even_code():
    """Every code, every middle between two and its neighbours, by scales of exactly 1."""
    middle, infinity = (POSITIVE[1:] + POSITIVE[:-1]) / 2, torch.tensor(float("inf"))
    nearly = [torch.nextafter(middle, infinity * sign) for sign in (-1, 1)]
    values = torch.cat([POSITIVE, middle, *nearly])
    values = torch.cat([values, -values, torch.zeros(-2 * len(values) % 127)]).view(-1, 127)
    x = torch.cat([values, torch.full((len(values), 1), 448.0)], 1).view(1, -1)
    codes, scale = fp8_block_gemm.quantize_blocks(x)
    assert (scale == 1).all()
    assert torch.equal(codes.float(), x.to(E4M3).float())


def operands(M, N, K):
    """Codes and scales of x and of a weight, whose scales differ from block to block by up to 2^6; a bias."""
    g = torch.Generator().manual_seed(M + N + K)
    x, scale = fp8_blocks.quantize_token_blocks(torch.randn(M, K, generator=g) * 2.0 ** torch.randn(M, 1, generator=g))
    weight = torch.randn(N, K, generator=g).mul(100).to(E4M3)
    weight_scale = 0.01 * 2.0 ** (6 * torch.rand(-(-N // 128), -(-K // 128), generator=g))
    return x, scale, weight, weight_scale, torch.randn(N, generator=g)


def allowed(x, scale, weight, weight_scale, truth, dtype):
    """`reference.tolerance`, of the values of the codes."""
    x = x.double() * spread(scale.double(), x.shape, INPUT_BLOCK)
    weight = weight.double() * spread(weight_scale.double(), weight.shape, WEIGHT_BLOCK)
    return reference.tolerance(x, weight, truth, dtype)


@pytest.mark.parametrize(
    ("sizes", "shape", "bias", "dtype"),
    pairs(
        [(1, 64, 128), (17, 130, 300), (63, 300, 257), (130, 20, 640), (5, 1, 1)],
        [None, Shape(16, 32, split_k=4), Shape(64, 128)],
        [False, True],
        [torch.float16, torch.bfloat16, torch.float32],
    ),
)
def test_product(sizes, shape, bias, dtype):
    """Tails of tokens, of rows and of columns; 4 splits of at most 2 blocks leave some programs without work."""
    *given, added = operands(*sizes)
    added = added.to(dtype) if bias else None
    out = fp8_block_gemm.fp8_block_gemm(*given, added, dtype, shape)
    truth = fp8_blocks.reference(*given, added)
    assert (out.dtype, out.shape) == (dtype, sizes[:2])
    assert ((out.double() - truth).abs() <= allowed(*given, truth, dtype)).all()
    assert workspace.counters(torch.device("cpu")).count_nonzero() == 0


def test_the_operator_takes_this_path():
    """Whatever float the scales are stored in, and not where rows of bytes are no units of 16."""
    *_, weight, scale, bias = operands(1, 130, 272)
    x = torch.randn(2, 3, 272, generator=torch.Generator().manual_seed(0)).half()
    assert fp8_blocks.why_not_fp8_blocks(x) == []
    assert fp8_blocks.why_not_fp8_blocks(x[..., :250]) == ["250 inputs; float8 products need a multiple of 16"]
    for stored in (scale, scale.bfloat16()):
        out = fp8_blocks.fp8_block_linear(x, weight.view(torch.uint8), stored, bias)
        given = (*fp8_blocks.quantize_token_blocks(x.view(6, 272)), weight, stored)
        truth = fp8_blocks.reference(*given, bias)
        assert ((out.double().view(6, 130) - truth).abs() <= allowed(*given, truth, torch.float16)).all()
