"""float8 with scales of blocks on a CPU: blocks and their edges, and the operator against float64."""

import pytest
import torch
from commands import Largest

from compress.base.errors import InputError
from compress.kernels import reference
from compress.kernels.layouts.scale_blocks import INPUT_BLOCK, WEIGHT_BLOCK, blocked, multiply_, spread
from compress.kernels.operators import fp8, fp8_blocks
from compress.kernels.routes import fp8_block_route

SIZES = [(3, 128, 128), (1, 300, 257), (6, 64, 96), (2, 1, 1)]


def operands(sizes=(6, 200, 300), dtype=torch.float32, gradient=False, bias=True, stored=torch.float32):
    M, N, K = sizes
    g = torch.Generator().manual_seed(M + N + K)
    x = (torch.randn(M, K, generator=g) * 2.0 ** torch.randn(M, 1, generator=g)).to(dtype).requires_grad_(gradient)
    weight = torch.randn(N, K, generator=g).mul(100).clamp(-fp8.E4M3_MAX, fp8.E4M3_MAX).to(fp8.E4M3).view(torch.uint8)
    scale = 0.01 * 2.0 ** (6 * torch.rand(-(-N // 128), -(-K // 128), generator=g))
    return x, weight, scale.to(stored), torch.randn(N, generator=g) if bias else None


def test_each_element_has_the_scale_of_its_block():
    x, scale = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)), torch.rand(3, 2)
    expected = torch.empty(300, 200)
    for n in range(300):
        for k in range(200):
            expected[n, k] = scale[n // 128, k // 128]
    assert torch.equal(spread(scale, x.shape, WEIGHT_BLOCK), expected)
    assert torch.equal(multiply_(x.clone(), scale, WEIGHT_BLOCK), x * expected)
    blocks = blocked(x, WEIGHT_BLOCK)
    assert blocks.shape == (3, 2, 128 * 128)
    for i, j in ((0, 0), (2, 1), (1, 1)):
        inside = x[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        assert torch.equal(blocks[i, j].view(128, 128)[: inside.shape[0], : inside.shape[1]], inside)
        assert blocks[i, j].count_nonzero() == inside.numel()


def test_inputs_are_fitted_128_columns_at_a_time():
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    x[0, 128:256] = 0
    codes, scale = fp8_blocks.quantize_token_blocks(x)
    for start in (0, 128, 256):
        part = slice(start, start + 128)
        expected, scales = fp8.quantize_tokens(x[:, part])
        assert torch.equal(codes[:, part].float(), expected.float())
        assert torch.equal(scale[:, start // 128], scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_product_is_the_reference(sizes, dtype, monkeypatch):
    """Also where the weight is made dense a block of rows at a time, and where its scales are 16-bit numbers."""
    monkeypatch.setattr(fp8, "BLOCK_BYTES", 1)
    for stored in (torch.float32, torch.bfloat16):
        x, weight, scale, bias = operands(sizes, dtype, bias=sizes[0] != 3, stored=stored)
        out = fp8_blocks.fp8_block_linear(x, weight, scale, bias)
        codes, x_scale = fp8_blocks.quantize_token_blocks(x)
        truth = fp8_blocks.reference(codes, x_scale, weight.view(fp8.E4M3), scale, bias)
        given = codes.double() * spread(x_scale.double(), codes.shape, INPUT_BLOCK)
        values = weight.view(fp8.E4M3).double() * spread(scale.double(), weight.shape, WEIGHT_BLOCK)
        torch.testing.assert_close(truth, given @ values.t() + (0 if bias is None else bias.double()))
        assert (out.dtype, out.shape) == (dtype, sizes[:2])
        assert ((out.double() - truth).abs() <= reference.tolerance(given, values, truth, dtype)).all()


def test_the_weight_is_never_dense_as_a_whole(monkeypatch):
    monkeypatch.setattr(fp8, "BLOCK_BYTES", 1)
    x, weight, scale, bias = operands((2, 600, 256))
    codes, x_scale = fp8_blocks.quantize_token_blocks(x)
    with Largest(codes=False) as largest:
        fp8_blocks.blocked_product(codes, x_scale, weight.view(fp8.E4M3), scale, bias, torch.bfloat16)
    assert largest.elements == 128 * 256


def test_any_leading_shape():
    _, *rest = operands()
    for shape in ((1, 300), (0, 300), (2, 0, 300), (300,)):
        assert fp8_blocks.fp8_block_linear(torch.randn(shape), *rest).shape == (*shape[:-1], 200)


@pytest.mark.parametrize("gradient", [False, True])
def test_contract(gradient):
    torch.library.opcheck(fp8_blocks.fp8_block_linear.registered, operands(gradient=gradient))


def test_the_gradient_goes_straight_through():
    x, weight, scale, bias = operands(gradient=True)
    grad = torch.randn(6, 200, generator=torch.Generator().manual_seed(3))
    fp8_blocks.fp8_block_linear(x, weight, scale, bias).backward(grad)
    values = weight.view(fp8.E4M3).float() * spread(scale, weight.shape, WEIGHT_BLOCK)
    torch.testing.assert_close(x.grad, grad @ values)


def test_reasons_name_what_was_given_and_what_is_needed(monkeypatch):
    reasons = fp8_blocks.why_not_fp8_blocks(torch.zeros(1, 100, dtype=torch.float64))
    assert [why.partition(";")[0] for why in reasons] == [
        "the device is cpu, not cuda",
        "x is torch.float64",
        "100 inputs",
    ]
    cpu = torch.device("cpu")
    assert fp8_block_route(4, 64, 96, torch.bfloat16, cpu) == ("torch", ("the device is cpu, not cuda",))
    # A GPU of compute capability 8.0 has Triton and no products of float8.
    old = ("compute capability 8.0; float8 products need 8.9",)
    monkeypatch.setattr(fp8_blocks, "why_not_triton", lambda device: ())
    monkeypatch.setattr(fp8, "_why_not_device", lambda device: old)
    x = torch.empty(1, 128, device="meta", dtype=torch.float16)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    assert fp8_blocks.why_not_fp8_blocks(x) == [*old]


def test_wrong_operands_are_refused():
    x, weight, scale, bias = operands()
    for given, message in (
        ((x[:, :90], weight, scale), "x has 90 columns, the weight 300"),
        ((x, weight.float(), scale), r"the weight is torch\.float32; allowed: uint8"),
        ((x, weight, scale[:1]), r"the scales are \(1, 3\); a weight \(200, 300\) has \(2, 3\)"),
    ):
        with pytest.raises(InputError, match=message):
            fp8_blocks.fp8_block_linear(*given, bias)
