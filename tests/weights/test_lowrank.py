"""A matrix of low rank as it is stored: two factors of numbers or codes, and what a product may be off by."""

import pytest
import torch
from torch import nn

from compress.base.errors import CheckpointError
from compress.inference.check.dense_twin import error
from compress.inference.layers.linear import QuantLinear
from compress.weights.formats.lowrank import LowRankFactors, factors, low_rank
from compress.weights.matrix import Weight
from compress.weights.scheme import check_parts, parts_of, scheme_of

ROWS, COLUMNS = 40, 96
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weight_of(rows: int = ROWS, columns: int = COLUMNS, size: float = 0.02) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows), dtype=torch.float64) * size


def basis_of(weight: torch.Tensor, rank: int) -> torch.Tensor:
    return torch.linalg.svd(weight, full_matrices=False)[0][:, :rank]


@pytest.mark.parametrize("size", [1e-4, 0.02, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_and_codes_stand_for_the_projection_as_exactly_as_their_bits_allow(dtype, size):
    weight = weight_of(size=size)
    basis = basis_of(weight, 7)
    best = basis @ basis.t() @ weight
    for bits, allowed in ((16, 4 * torch.finfo(dtype).eps), (8, 0.02)):
        term = low_rank(basis, weight, dtype, bits)
        assert term.dequantize().dtype == dtype
        off = (term.dequantize(torch.float64) - best).norm() / best.norm()
        assert off < allowed + (1e-3 if dtype == torch.float16 and size < 0.01 else 0), (bits, off)


def test_codes_of_eight_bits_take_half_the_bytes_and_one_scale_a_rank():
    weight = weight_of()
    sizes = {}
    for bits in (16, 8):
        parts = low_rank(basis_of(weight, 6), weight, torch.bfloat16, bits).parts()
        sizes[bits] = sum(part.numel() * part.element_size() for part in parts.values())
    assert sizes == {16: 2 * 6 * (ROWS + COLUMNS), 8: 6 * (ROWS + COLUMNS) + 2 * 6}


def test_the_right_factor_makes_up_for_how_the_left_one_is_stored():
    weight = weight_of()
    basis = basis_of(weight, 5)
    term = low_rank(basis, weight, torch.bfloat16)
    left, right = factors(term.parts(), torch.float64)
    plain = (basis.t() @ weight).to(torch.bfloat16).double()
    assert (weight - left @ right).norm() < (weight - left @ plain).norm()


@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (COLUMNS, ROWS)])
def test_rank_0_is_nothing_and_full_rank_is_the_weight(shape):
    weight = weight_of(*shape)
    nothing = low_rank(basis_of(weight, 0), weight, torch.float32)
    assert not nothing.dequantize().any()
    layer = QuantLinear.from_quantized(Weight((nothing,)))
    assert torch.equal(layer(torch.randn(3, shape[1])), torch.zeros(3, shape[0]))
    full = low_rank(basis_of(weight, min(shape)), weight, torch.float64)
    torch.testing.assert_close(full.dequantize(), weight)


@torch.no_grad()
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_is_within_what_is_allowed_and_one_that_is_slightly_off_is_not(dtype, bits):
    weight = weight_of()
    term = low_rank(basis_of(weight, 12), weight, dtype, bits)
    layer = QuantLinear.from_quantized(term, torch.randn(ROWS).to(dtype))
    x = torch.randn(17, COLUMNS).to(dtype)
    out = layer(x)
    assert error(layer, x, out) <= 1
    assert error(layer, x, nn.functional.linear(x, layer.dequantize(), layer.bias)) <= 1
    wrong = out.clone()
    wrong[3, 5] += 0.1 * out.float().std()
    assert error(layer, x, wrong) > 1
    assert error(layer, x, out * 1.1) > 1


def test_factors_that_hide_large_numbers_behind_a_small_sum_are_allowed_what_those_are_off_by():
    dtype = torch.bfloat16
    left = torch.cat([torch.full((4, 1), 100.0), torch.full((4, 1), -100.0)], 1).to(dtype)
    right = torch.cat([torch.ones(1, 8), torch.ones(1, 8) + 2**-7], 0).to(dtype)
    layer = QuantLinear.from_quantized(LowRankFactors(rank=2).read({"left": left, "right": right}, 4, 8))
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert error(layer, x, layer(x)) <= 1


@pytest.mark.parametrize(
    ("format_", "says"),
    [
        (LowRankFactors(rank=-1), "rank -1; there is none below 0"),
        (LowRankFactors(rank=3, bits=4), "factors of 4 bits; there are 16"),
    ],
)
def test_what_no_factors_are_is_refused(format_, says):
    term = low_rank(basis_of(weight_of(), 3), weight_of(), torch.float32)
    scheme = scheme_of(Weight((term,)))
    found = {key: (tuple(part.shape), part.dtype) for key, part in parts_of(term).items()}
    object.__setattr__(scheme, "terms", (format_,))
    with pytest.raises(CheckpointError, match=f"layer has .*{says}"):
        check_parts("layer", found, scheme, (ROWS, COLUMNS))


def test_words_name_rank_and_bits():
    assert str(scheme_of(low_rank(basis_of(weight_of(), 3), weight_of(), torch.float32, 8))) == "rank 3 of 8 bits"
    assert str(scheme_of(low_rank(basis_of(weight_of(), 3), weight_of(), torch.float32))) == "rank 3"
