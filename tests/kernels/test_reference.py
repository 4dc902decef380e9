"""The reference against the grid, against loops of Python integers and against what it must be by definition."""

import pytest
import torch
from combinations import every

from compress.kernels import reference
from compress.kernels.layouts import words as pack
from compress.weights.grid import Grid, quantize


@every("bits", [2, 3, 4, 8])
@every("symmetric", [True, False])
@every("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dequantize_is_the_grids(bits, symmetric, dtype):
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(bits))
    quantized = quantize(x, Grid(bits=bits, symmetric=symmetric, granularity="group", group_size=32), dtype)
    ours = reference.dequantize(quantized.codes, quantized.scale, quantized.zero_point)
    assert ours.dtype == dtype
    assert torch.equal(ours, quantized.dequantize())


def test_weight_only_is_a_sum_over_dequantized_weights():
    g = torch.Generator().manual_seed(0)
    x, bias = torch.randn(3, 64, generator=g, dtype=torch.float64), torch.randn(5, generator=g, dtype=torch.float64)
    quantized = quantize(
        torch.randn(5, 64, generator=g, dtype=torch.float64),
        Grid(symmetric=False, granularity="group", group_size=32),
    )
    out = reference.weight_only(x, quantized.codes, quantized.scale, quantized.zero_point, bias)
    for m in range(3):
        for n in range(5):
            total = bias[n].item()
            for k in range(64):
                code = int(quantized.codes[n, k]) - int(quantized.zero_point[n, k // 32])
                total += x[m, k].item() * code * quantized.scale[n, k // 32].item()
            assert out[m, n].item() == pytest.approx(total, rel=1e-12, abs=1e-12)


def test_int8_matmul_is_exact_at_the_extremes():
    low = torch.full((3, 4096), -128, dtype=torch.int8)
    high = torch.full((2, 4096), 127, dtype=torch.int8)
    assert reference.int8_matmul(low, low)[0, 0].item() == 128 * 128 * 4096
    assert reference.int8_matmul(low, high)[2, 1].item() == -128 * 127 * 4096
    g = torch.Generator().manual_seed(1)
    x = torch.randint(-128, 128, (5, 33), generator=g, dtype=torch.int8)
    w = torch.randint(-128, 128, (7, 33), generator=g, dtype=torch.int8)
    assert torch.equal(reference.int8_matmul(x, w), x.int() @ w.int().t())


@every("symmetric", [True, False])
@every("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_quantize_tokens_is_the_grids(symmetric, dtype):
    x = torch.randn(9, 80, generator=torch.Generator().manual_seed(2)).mul(3).to(dtype)
    x[0] = 0
    x[1] = x[1].abs() + 1
    x[2] = -x[2].abs()
    codes, scale, zero = reference.quantize_tokens(x, symmetric)
    grid = Grid(bits=8, symmetric=symmetric, granularity="token")
    expected = quantize(x.float(), grid)
    assert torch.equal(codes, expected.codes)
    assert torch.equal(scale, expected.scale[:, 0])
    if symmetric:
        assert zero is None
    else:
        assert torch.equal(zero, expected.zero_point[:, 0].int())


@every("symmetric", [True, False])
def test_w8a8_is_the_product_of_what_the_codes_stand_for(symmetric):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(7, 100, generator=g) + 0.5
    weight = torch.randint(-128, 128, (11, 100), generator=g, dtype=torch.int8)
    scale = torch.randn(11, generator=g) * 0.01
    bias = torch.randn(11, generator=g)
    codes, x_scale, x_zero = reference.quantize_tokens(x, symmetric)
    out = reference.w8a8(codes, x_scale, x_zero, weight, scale, bias)
    zero = 0 if symmetric else x_zero.double()[:, None]
    x_value = (codes.double() - zero) * x_scale.double()[:, None]
    expected = x_value @ (weight.double() * scale.double()[:, None]).t() + bias.double()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=4 * torch.finfo(torch.float32).eps * 100)


@every("bits", [4, 8])
@every("columns", [1, 31, 32, 100, 128, 300])
def test_planar_words_come_back(bits, columns):
    codes = torch.randint(0, 2**bits, (5, columns), generator=torch.Generator().manual_seed(columns))
    words = pack.pack_planar(codes.to(torch.uint8), bits)
    assert words.dtype == torch.int16
    assert words.shape == (5, pack.planar_words(columns, bits))
    assert torch.equal(pack.unpack_planar(words, bits, columns), codes.to(torch.uint8))


def test_a_planar_word_holds_four_columns_32_apart():
    codes = torch.zeros(1, 256, dtype=torch.uint8)
    codes[0, [128 + 5, 128 + 37, 128 + 69, 128 + 101]] = torch.tensor([1, 2, 3, 15], dtype=torch.uint8)
    words = pack.pack_planar(codes, 4)
    assert words[0, 32 + 5].item() & 0xFFFF == 1 | 2 << 4 | 3 << 8 | 15 << 12
    assert words.count_nonzero() == 1


def test_a_planar_word_of_bytes_holds_two_columns_32_apart():
    codes = torch.zeros(1, 128, dtype=torch.uint8)
    codes[0, [64 + 7, 64 + 39]] = torch.tensor([200, 131], dtype=torch.uint8)
    words = pack.pack_planar(codes, 8)
    assert words[0, 32 + 7].item() & 0xFFFF == 200 | 131 << 8
    assert words.count_nonzero() == 1


@every("bits", [4, 8])
@every("grid", ["symmetric", "signed_scale", "asymmetric", "unsigned"])
@every("group", [32, 96, None])
def test_a_planar_weight_stands_for_the_same_values(bits, grid, group):
    kind = {
        "symmetric": {},
        "signed_scale": {"signed_scale": True},
        "asymmetric": {"symmetric": False},
        "unsigned": {"signed": False},
    }[grid]
    where = {"granularity": "group", "group_size": group} if group else {"granularity": "channel"}
    x = torch.randn(6, 192, generator=torch.Generator().manual_seed(bits))
    if grid == "unsigned":
        x = x.abs()
    quantized = quantize(x, Grid(bits=bits, **kind, **where), torch.float16)
    planar = pack.to_planar(quantized.codes, quantized.scale, quantized.zero_point, bits, torch.float16)
    assert planar.group_size == (group or -1)
    assert (planar.zero is None) == (grid in ("symmetric", "signed_scale"))
    assert torch.equal(pack.planar_weight(planar, 192), quantized.dequantize())


def test_a_per_tensor_scale_becomes_one_per_channel():
    quantized = quantize(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), Grid(granularity="tensor"))
    planar = pack.to_planar(quantized.codes, quantized.scale, quantized.zero_point, 4, torch.float32)
    assert planar.scale.shape == (1, 4)
    assert torch.equal(pack.planar_weight(planar, 64), quantized.dequantize())
