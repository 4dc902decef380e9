"""The Triton kernel of planar words and int8 tokens, run as `interpreter_cases` runs the others."""

import pytest
import torch
import triton
import triton.language as tl
from combinations import each
from interpreter_cases import guarded, weight_and_truth  # noqa: F401  every test here is held to `guarded`

from compress.inference.check.dense_twin import error
from compress.inference.layers.linear import QuantLinear
from compress.kernels import reference, workspace
from compress.kernels.operators.devices import path_of
from compress.kernels.operators.words import why_not_int8, words_linear
from compress.kernels.triton import int8_planar_gemm
from compress.kernels.triton.int8_planar_gemm import RAISED, unpack_bytes, unpack_less
from compress.kernels.tuning.table import Shape
from compress.weights.grid import quantize
from compress.weights.scheme import scheme_named

CPU = torch.device("cpu")


def check(M, N, K, bits, group, zero, input_group, dtype, shape=None, batch_invariant=False, scale=1.0):
    """A product of the operator, or of one configuration, against fp64: integers are exact, so that what is off are
    sums in fp32 and one rounding to the dtype."""
    g = torch.Generator().manual_seed(M + N + K)
    x, bias = (scale * torch.randn(M, K, generator=g)).to(dtype), torch.randn(N, generator=g).to(dtype)
    planar, weight = weight_and_truth(bits, N, K, group, zero, dtype, seed=M)
    if shape is None:
        out = words_linear(x, *planar[:3], bias, bits, group, input_group, batch_invariant)
    else:
        out = int8_planar_gemm.int8_planar_gemm(x, planar, bias, input_group, shape)
    codes, scales = reference.quantize_token_blocks(x, input_group)
    width = K if input_group == -1 else input_group
    given = codes.double() * scales.double().repeat_interleave(width, 1)[:, :K]
    truth = given @ weight.t() + bias.double()
    assert out.dtype == dtype
    assert ((out.double() - truth).abs() <= reference.tolerance(given, weight, truth, dtype)).all()
    assert workspace.counters(CPU).count_nonzero() == 0
    return out


@pytest.mark.parametrize(
    ("M", "group", "zero", "input_group", "dtype"),
    each([1, 17, 20], [32, 64, 128, 256, -1], [False, True], [-1, 128], [torch.float16, torch.bfloat16]),
)
def test_four_bits(M, group, zero, input_group, dtype):
    check(M, 40, 512, 4, group, zero, input_group, dtype)


@pytest.mark.parametrize(
    ("group", "input_group", "dtype"), each([32, 64, 128, -1], [-1, 128], [torch.float16, torch.float32])
)
def test_eight_bits(group, input_group, dtype):
    check(5, 40, 256, 8, group, False, input_group, dtype)


@pytest.mark.parametrize(
    ("sizes", "bits", "input_group"),
    each([(1, 130, 96, 32), (17, 3, 224, 32), (70, 20, 200, -1), (5, 1, 1, -1)], [4, 8], [-1, 128]),
)
def test_tails_of_every_dimension(sizes, bits, input_group):
    M, N, K, group = sizes
    check(M, N, K, bits, group, bits == 4, input_group, torch.float16)


@pytest.mark.parametrize(("zero", "group", "split_k"), each([True, False], [32, -1], [2, 8]))
def test_split_k(zero, group, split_k):
    """8 splits of 5 blocks leave some programs without work; they must count all the same."""
    given = (5, 40, 608, 4, group, zero, -1, torch.float16, Shape(16, 64, split_k=split_k))
    assert torch.equal(check(*given), check(*given))


def test_sums_are_exact_at_the_extremes():
    """Codes of -128 times u - z of -15, and 16 (u - 8) of -128: the largest sums of a segment, and of all columns."""
    for group, K in ((128, 128), (-1, 4096)):
        for zero in (True, False):
            planar, _ = weight_and_truth(4, 16, K, group, zero, torch.float32, seed=0)
            planar = planar._replace(words=planar.words * 0, scale=torch.ones_like(planar.scale))
            planar = planar._replace(zero=torch.full_like(planar.scale, 15, dtype=torch.uint8) if zero else None)
            x = torch.full((1, K), -127.5)
            out = int8_planar_gemm.int8_planar_gemm(x, planar, None, -1, Shape(16, 16))
            assert (out == 128 * K * (15 if zero else 8)).all()


@triton.jit
def _unpack_kernel(words_ptr, zero_ptr, out_ptr, BITS: tl.constexpr, COUNT: tl.constexpr, ZERO: tl.constexpr):
    row = tl.arange(0, COUNT)[:, None]
    words = tl.load(words_ptr + row)
    if ZERO:
        z = tl.load(zero_ptr + row)
        parts = unpack_less(words, (z, z, z, z), False)
    else:
        parts = unpack_bytes(words, BITS, False)
    for plane in tl.static_range(16 // BITS):
        tl.store(out_ptr + plane * COUNT + row, parts[plane])


@pytest.mark.parametrize(("bits", "zero"), [(4, False), (4, True), (8, False)])
def test_portable_unpacking_of_every_word(bits, zero):
    """The inline assembly is held to the same bytes in test_ptx.py."""
    words = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    zeros = (torch.arange(2**16) * 7 % 16).to(torch.uint8)
    out = torch.full((16 // bits, 2**16), 77, dtype=torch.int8)
    _unpack_kernel[(1,)](words.to(torch.int16), zeros, out, BITS=bits, COUNT=2**16, ZERO=zero)
    for plane, found in enumerate(out):
        code = words >> bits * plane & 2**bits - 1
        expected = code - zeros if zero else (code - 2 ** (bits - 1)) * (RAISED if bits == 4 else 1)
        assert torch.equal(found.int(), expected.int())


def test_batch_invariant(monkeypatch):
    monkeypatch.setattr(workspace, "SLICE", 1)  # one tile of tokens at a time
    N, K, g = 20, 256, torch.Generator().manual_seed(0)
    planar, _ = weight_and_truth(4, N, K, 128, True, torch.bfloat16, seed=0)
    x = torch.randn(65, K, generator=g).bfloat16()
    launched, launch = set(), int8_planar_gemm._launch
    monkeypatch.setattr(int8_planar_gemm, "_launch", lambda *given: launched.add(given[-1]) or launch(*given))

    def product(x):
        return words_linear(x, *planar[:3], None, 4, 128, 128, True)

    whole = product(x)
    assert torch.equal(product(x[:1]), whole[:1])
    assert len(launched) == 1


@pytest.mark.parametrize("scheme", ["w4a8", "w4a16"])
def test_layers_take_it(scheme, monkeypatch):
    monkeypatch.setattr(reference, "int8_activation", lambda *_: pytest.fail("the reference"))
    g, found = torch.Generator().manual_seed(0), scheme_named(scheme, 64, 192)
    weight = quantize(torch.randn(40, 192, generator=g), found.weights, torch.bfloat16)
    layer = QuantLinear.from_quantized(weight, scheme=found)
    if scheme == "w4a16":
        layer.input_group = 128  # as `compress.load(..., int8_activations=True)` has it
    x = torch.randn(2, 3, 192, generator=g).bfloat16()
    assert error(layer, x, layer(x)) <= 1


def test_what_it_cannot_take_goes_to_the_reference():
    planar, _ = weight_and_truth(8, 40, 192, 64, True, torch.float16, seed=0)
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(0)).half()
    assert why_not_int8(x, planar) == ["codes of 8 bits less a zero point do not fit int8"]
    assert path_of(torch.device("cuda"), why_not_int8(x, planar)) == "reference"
    odd, _ = weight_and_truth(4, 40, 192, 96, True, torch.float64, seed=0)
    reasons = why_not_int8(x.double().expand(3, 192), odd)
    assert [reason.split(";")[0] for reason in reasons] == [
        "x is torch.float64",
        "scales are torch.float64",
        "group size 96",
    ]


def test_no_tokens():
    planar, _ = weight_and_truth(4, 32, 128, 32, True, torch.float16, seed=0)
    assert words_linear(torch.zeros(0, 128).half(), *planar[:3], None, 4, 32, -1).shape == (0, 32)
