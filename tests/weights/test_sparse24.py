"""2:4 terms: exactly the values that they are made of, the bits that they take, and what is none."""

import re

import pytest
import torch
from halved import largest_two
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.base.errors import CheckpointError, InputError
from compress.weights.formats.dense import dense
from compress.weights.formats.sparse import sparse
from compress.weights.formats.sparse24 import PackedSparse24, Sparse24, sparse24
from compress.weights.grid import Grid, Quantized, quantize
from compress.weights.matrix import Term, Weight
from compress.weights.scheme import parts_of, scheme_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def halved(N: int, K: int, seed: int = 0, most: int = 2) -> torch.Tensor:
    """Weights of which the largest of every four are kept; every third row is zero."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed))
    weight[::3] = 0
    return weight * largest_two(weight, most)


def grid_of(bits: int, symmetric: bool, group: int) -> Grid:
    return Grid(bits=bits, symmetric=symmetric, granularity="group", group_size=group)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    N=st.integers(1, 40),
    groups=st.integers(1, 7),
    group=st.sampled_from([4, 12, 32]),
    most=st.integers(0, 2),
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_values_are_exactly_those_of_what_it_is_made_of(N, groups, group, most, bits, symmetric, dtype):
    weight = halved(N, group * groups, N, most)
    codes = quantize(weight, grid_of(bits, symmetric, group), dtype)
    for whole in (dense(weight.to(dtype)), codes):
        term = sparse24(whole)
        assert term.dequantize().dtype == dtype
        assert torch.equal(term.dequantize(), whole.dequantize())
        parts, scheme = parts_of(term), scheme_of(term)
        again = scheme.read(parts, N, group * groups)
        assert torch.equal(again.dequantize(), whole.dequantize())
        assert all(torch.equal(part, parts[name]) for name, part in parts_of(again).items())
        assert sparse24(term) is term


@pytest.mark.parametrize(
    ("bits", "symmetric", "taken"),
    [(16, True, 9), (4, True, 3.125), (4, False, 3.15625), (8, True, 5.125), (2, True, 2.125)],
)
def test_bits_of_a_weight(bits, symmetric, taken):
    weight = halved(128, 1024).bfloat16()
    whole: Term = dense(weight) if bits == 16 else quantize(weight, grid_of(bits, symmetric, 128))
    held = sum(part.nbytes for name, part in parts_of(sparse24(whole)).items() if name != "weight_shape")
    assert 8 * held / weight.numel() == taken


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_one_scale_and_scales_of_a_channel(bits):
    weight = halved(6, 16)
    for granularity in ("tensor", "channel"):
        whole = quantize(weight, Grid(bits=bits, granularity=granularity))
        term = sparse24(whole)
        found = scheme_of(term).read(parts_of(term), 6, 16)
        assert torch.equal(found.dequantize(), whole.dequantize())


def whole_of(bits: int, K: int = 8, **options: object) -> Quantized:
    return quantize(halved(4, K), Grid(bits=bits, **options))


@pytest.mark.parametrize(
    ("term", "says"),
    [
        (dense(torch.ones(2, 8)), "not 2:4: row 0 keeps 4 of columns 0 to 3, at most 2"),
        (quantize(torch.ones(2, 8), Grid(bits=4)), "not 2:4: row 0 keeps 4 of columns 0 to 3"),
        (dense(torch.zeros(2, 6)), "has 6 inputs, which are not whole groups of 4"),
        (
            whole_of(4, K=8, granularity="group", group_size=2),
            "has groups of 2 inputs, which are not",
        ),
        (whole_of(8, type="float"), "2:4 codes are signed integers"),
        (sparse(torch.ones(2, 8), torch.ones(2, 8).bool()), "stored as sparse-rows, which has no 2:4 form"),
    ],
)
def test_what_is_not_2_4_says_so_in_a_line(term, says):
    with pytest.raises(InputError, match=re.escape(says)) as refused:
        sparse24(term)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("whole", [dense(halved(4, 40)), whole_of(4, 40), whole_of(8, 40, symmetric=False)])
def test_a_damaged_position_names_the_part_and_the_place(whole):
    term = sparse24(whole)
    parts, scheme = parts_of(term), scheme_of(term)
    for words, found in ((0, [0, 0]), (0b0110, [2, 1]), (-1, [3, 3])):
        damaged = parts["position"].clone()
        damaged[2, 1] = words
        with pytest.raises(
            CheckpointError, match=re.escape(f"position holds {found} for inputs 32 to 35 of row 2; of")
        ):
            scheme.check({**parts, "position": damaged}, 4, 40)


def test_sizes_that_do_not_fit_are_a_problem():
    assert Sparse24().problem(4, 8) is None
    assert "has 10 inputs" in str(Sparse24().problem(4, 10))
    assert PackedSparse24(grid=grid_of(4, True, 8)).problem(4, 16) is None
    assert "groups of 8 do not fit" in str(PackedSparse24(grid=grid_of(4, True, 8)).problem(4, 12))


def test_rows_and_what_is_below_each_other():
    for whole in (dense(halved(9, 24)), whole_of(4, 24)):
        weight = Weight((sparse24(whole),))
        N = weight.terms[0].dequantize().shape[0]
        cut = [weight.rows(slice(0, 1)), weight.rows(slice(1, N))]
        assert torch.equal(Weight.stacked(cut).dequantize(), weight.dequantize())
