"""The grid: what holds for every bit width, kind, granularity and scale dtype, and what is refused."""

from dataclasses import replace
from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from combinations import every
from hypothesis import assume, given, settings

from compress.base.errors import InputError
from compress.weights.grid import (
    Grid,
    Quantized,
    decode,
    encode,
    fake_quantize,
    fit,
    fit_matrix,
    grouped,
    quantize,
    usual_group,
)
from compress.weights.scale_numbers import round_scale, scale_limits

KINDS = {
    "asymmetric": {"symmetric": False},
    "asymmetric unsigned": {"symmetric": False, "signed": False},
    "asymmetric narrow": {"symmetric": False, "narrow": True},
    "symmetric": {},
    "symmetric unsigned": {"signed": False},
    "narrow": {"narrow": True},
    "signed scale": {"signed_scale": True},
}
SCALE_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GRANULARITIES = ["tensor", "channel", "group", "token"]
GROUP = 8
WIDTHS = [8, 24, 40]
BITS = st.integers(2, 8)
# The search and the quotient run in float32: eight bits of code leave 16 of its 24.
FLOAT32_STEPS = 2**-14

examples = settings(deadline=None, max_examples=60, derandomize=True)


def unit(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to a dtype."""
    return torch.finfo(dtype).eps / 2


def make_grid(kind: str, bits: int, granularity: str = "channel", **options) -> Grid:
    return Grid(
        bits=bits,
        granularity=granularity,
        group_size=GROUP if granularity == "group" else None,
        **KINDS[kind],
        **options,
    )


grids = st.builds(make_grid, st.sampled_from(sorted(KINDS)), BITS, st.sampled_from(GRANULARITIES))
scale_dtypes = st.sampled_from(SCALE_DTYPES)


@st.composite
def matrices(draw) -> torch.Tensor:
    """Float32 [1..3, 8..40]: normal, one-sided, heavy-tailed or drawn element by element; magnitudes 1e-5 to 1e3."""
    shape = draw(st.integers(1, 3)), draw(st.sampled_from(WIDTHS))
    style = draw(st.sampled_from(["normal", "positive", "negative", "heavy", "sparse", "elements"]))
    if style == "elements":
        few = draw(st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=12))
        repeated = torch.tensor(few).repeat(shape[0] * shape[1])
        return repeated[: shape[0] * shape[1]].reshape(shape)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    x = torch.randn(shape, generator=generator)
    if style == "positive":
        x = x.abs()
    elif style == "negative":
        x = -x.abs()
    elif style == "heavy":
        x = x.sign() * x.abs() ** 3
    elif style == "sparse":
        x = x * (torch.rand(shape, generator=generator) < 0.3)
    return x * 10.0 ** draw(st.integers(-4, 1))


def pieces(quantized: Quantized) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, zero points, scales, values), each [R, G, g] (one R and one G per tensor) in float64."""
    shape = (*quantized.scale.shape, -1)
    codes = quantized.codes.double().reshape(shape)
    zero = torch.zeros(()) if quantized.zero_point is None else quantized.zero_point.unsqueeze(-1).double()
    scale = quantized.scale.double().unsqueeze(-1)
    return codes, zero.expand_as(codes), scale.expand_as(codes), quantized.dequantize().double().reshape(shape)


@examples
@given(grids, scale_dtypes, matrices())
def test_error_is_at_most_half_a_step_inside_the_representable_range(grid, dtype, x):
    x = x.abs() if grid.symmetric and not grid.signed else x
    _, zero, scale, values = pieces(quantize(x, grid, dtype))
    x = x.double().reshape(values.shape)
    ends = torch.stack([(grid.qmin - zero) * scale, (grid.qmax - zero) * scale])
    inside = (x >= ends.amin(0)) & (x <= ends.amax(0))
    assume(bool(inside.any()))
    # The product is rounded once to the scale's dtype: at most one unit roundoff of the value before rounding.
    slack = scale.abs() * FLOAT32_STEPS + (x.abs() + scale.abs()) * unit(dtype)
    assert torch.all(((values - x).abs() <= scale.abs() / 2 + slack)[inside])


@examples
@given(st.sampled_from(["asymmetric", "asymmetric unsigned", "symmetric", "narrow"]), BITS, scale_dtypes, matrices())
def test_min_max_range_keeps_every_element_within_half_a_step(kind, bits, dtype, x):
    grid = make_grid(kind, bits, "group")
    _, _, scale, values = pieces(quantize(x, grid, dtype))
    x = x.double().reshape(values.shape)
    # Rounding the scale moves either end of the range by at most 2^bits steps times the unit roundoff.
    slack = scale * (FLOAT32_STEPS + 2**bits * unit(dtype)) + (x.abs() + scale) * unit(dtype)
    assert torch.all((values - x).abs() <= scale / 2 + slack)


@examples
@given(grids, scale_dtypes, matrices())
def test_codes_stay_within_the_grid(grid, dtype, x):
    quantized = quantize(x, grid, dtype)
    assert quantized.codes.dtype == grid.storage == (torch.int8 if grid.signed else torch.uint8)
    assert quantized.codes.shape == x.shape
    codes = quantized.codes.int()
    assert grid.qmin <= codes.min()
    assert codes.max() <= grid.qmax
    assert grid.qmax - grid.qmin == 2**grid.bits - 1 - grid.narrow
    if quantized.zero_point is not None:
        assert quantized.zero_point.dtype == grid.storage
        assert quantized.zero_point.shape == quantized.scale.shape
        assert grid.qmin <= quantized.zero_point.int().min()
        assert quantized.zero_point.int().max() <= grid.qmax


@every("bits", range(2, 9))
@every("kind", sorted(KINDS))
def test_values_out_of_range_saturate_at_the_last_code(kind, bits):
    grid = make_grid(kind, bits)
    zero = torch.tensor([[float(grid.qmin + 1)]]) if kind.startswith("asymmetric") else None
    codes = quantize(torch.tensor([[-1e6, 1e6]]), grid, scale=torch.tensor([[0.5]]), zero_point=zero).codes
    assert codes.tolist() == [[grid.qmin, grid.qmax]]


@examples
@given(grids, scale_dtypes, matrices(), st.sampled_from(["minmax", "mse"]), st.integers(-20, 14))
def test_scales_of_float16_are_numbers_of_both_dtypes(grid, dtype, x, search, exponent):
    found = quantize(x * 2.0**exponent, replace(grid, scales="float16", range_choice=search), dtype).scale
    assert found.dtype == dtype
    assert torch.equal(found.half().to(dtype), found)


@every("dtype", SCALE_DTYPES)
def test_limits_of_scales_of_float16_are_numbers_of_both_dtypes(dtype):
    least, largest = scale_limits(dtype, "float16")
    assert [float(torch.tensor(limit, dtype=dtype).half()) for limit in (least, largest)] == [least, largest]
    sizes = torch.tensor([least / 4, -least, largest, -largest * 2])
    assert round_scale(sizes, dtype, "float16").tolist() == [least, -least, largest, -largest]


@examples
@given(grids, scale_dtypes, matrices(), st.integers(0, 7))
def test_zero_is_exact(grid, dtype, x, column):
    x = x.clone()
    x[:, column] = 0.0
    assert torch.all(quantize(x, grid, dtype).dequantize()[:, column] == 0)


@examples
@given(grids, scale_dtypes, matrices())
def test_quantizing_the_dequantized_matrix_again_gives_the_same_codes(grid, dtype, x):
    first = quantize(x, grid, dtype)
    codes, zero, _, _ = pieces(first)
    second = quantize(first.dequantize(), grid, dtype, scale=first.scale, zero_point=first.zero_point)
    # n steps rounded to the dtype are off by up to n unit roundoffs, none where n is a power of two. From half a step
    # on, two codes are one number: only where a difference of codes has more than the eight bits of bfloat16.
    steps = (codes - zero).abs().reshape(x.shape)
    distinct = (steps * unit(dtype) < 0.5) | (steps == 128)
    beyond_bfloat16 = dtype == torch.bfloat16 and grid.bits == 8 and not (grid.symmetric and grid.signed)
    assert distinct.all() or beyond_bfloat16
    assert torch.all((first.codes == second.codes)[distinct])
    assert torch.equal(first.scale, second.scale)


@every("dtype", SCALE_DTYPES)
@every("granularity", GRANULARITIES)
@every("kind", sorted(KINDS))
def test_constant_and_zero_groups_give_finite_values(kind, granularity, dtype):
    # 1e-38 is below the smallest normal float32 before it is divided by a number of codes.
    for bits, constant in product(range(2, 9), (0.0, 1e-38, -1e-38, 0.7, -0.7, 3000.0, -3000.0)):
        quantized = quantize(torch.full((2, 2 * GROUP), constant), make_grid(kind, bits, granularity), dtype)
        values = quantized.dequantize().double()
        assert torch.isfinite(values).all()
        assert torch.isfinite(quantized.scale).all()
        assert quantized.scale.double().abs().min() >= torch.finfo(dtype).tiny
        if constant == 0 or (constant < 0 and kind == "symmetric unsigned"):
            assert torch.all(values == 0)
        elif abs(constant) > 0.1:
            step = quantized.scale.double().abs().max()
            assert torch.all((values - constant).abs() <= step / 2 + 2**bits * unit(dtype) * step)


@examples
@given(BITS, st.sampled_from(GRANULARITIES), scale_dtypes, matrices())
def test_signed_scale_puts_the_extreme_element_on_the_lowest_code(bits, granularity, dtype, x):
    grid = make_grid("signed scale", bits, granularity)
    quantized = quantize(x, grid, dtype)
    codes, _, scale, values = pieces(quantized)
    groups = x.double().reshape(codes.shape)
    extreme = groups.abs().argmax(-1, keepdim=True)
    # Elements that tie in magnitude with opposite signs cannot both be on it.
    ties = ((groups.abs() == groups.abs().amax(-1, keepdim=True)) & (groups != groups.gather(-1, extreme))).any(-1)
    normal = groups.abs().amax(-1) / 2 ** (bits - 1) >= torch.finfo(dtype).tiny
    chosen = normal & ~ties
    assume(bool(chosen.any()))
    target = groups.gather(-1, extreme)[chosen]
    assert torch.all(codes.gather(-1, extreme)[chosen] == -(2 ** (bits - 1)))
    assert torch.all((values.gather(-1, extreme)[chosen] - target).abs() <= unit(dtype) * target.abs())
    assert torch.all(torch.sign(scale[..., :1][chosen]) == -torch.sign(target))


@every("bits", range(2, 9))
def test_signed_scale_keeps_both_signs_of_extreme_exactly(bits):
    x = torch.tensor([[0.75, -0.5, 0.25, 0.0], [-0.75, 0.5, 0.25, 0.0]])
    quantized = quantize(x, make_grid("signed scale", bits), torch.float32)
    assert quantized.codes[:, 0].tolist() == [-(2 ** (bits - 1))] * 2
    assert quantized.dequantize()[:, 0].tolist() == [0.75, -0.75]
    assert quantized.scale.sign().tolist() == [[-1.0], [1.0]]


@examples
@given(st.sampled_from(["narrow", "asymmetric narrow"]), BITS, st.sampled_from(GRANULARITIES), scale_dtypes, matrices())
def test_narrow_never_emits_the_lowest_code(kind, bits, granularity, dtype, x):
    quantized = quantize(x, make_grid(kind, bits, granularity), dtype)
    assert quantized.codes.int().min() > -(2 ** (bits - 1))


@every("bits", range(2, 9))
def test_every_grid_has_the_scale_of_its_definition(bits):
    x = torch.tensor([[-0.8, 0.3, 0.5, 0.1]], dtype=torch.float64)
    half, levels = 2 ** (bits - 1), 2**bits - 1
    expected = {
        "asymmetric": (1.3 / levels, round(0.8 / 1.3 * levels) - half),
        "asymmetric unsigned": (1.3 / levels, round(0.8 / 1.3 * levels)),
        "asymmetric narrow": (1.3 / (levels - 1), round(0.8 / 1.3 * (levels - 1)) - half + 1),
        "symmetric": (0.8 / (half - 0.5), None),
        "symmetric unsigned": (0.5 / levels, None),
        "narrow": (0.8 / (half - 1), None),
        "signed scale": (0.8 / half, None),
    }
    for kind, (scale, zero_point) in expected.items():
        quantized = quantize(x, make_grid(kind, bits))
        assert quantized.scale.item() == pytest.approx(scale, rel=1e-14), kind
        assert (None if quantized.zero_point is None else quantized.zero_point.item()) == zero_point, kind


@examples
@given(grids, scale_dtypes, matrices())
def test_zero_point_is_none_exactly_when_symmetric(grid, dtype, x):
    assert (quantize(x, grid, dtype).zero_point is None) == grid.symmetric


@examples
@given(grids, scale_dtypes, matrices())
def test_fitted_scale_is_a_number_of_its_dtype_and_is_the_one_stored(grid, dtype, x):
    scale, _ = fit_matrix(x, grid, dtype)
    assert scale.dtype == torch.float32
    assert torch.equal(scale.to(dtype).float(), scale)
    quantized = quantize(x, grid, dtype)
    assert quantized.scale.dtype == dtype
    assert torch.equal(quantized.scale.float(), scale)
    groups = {"tensor": (1, 1), "group": (len(x), x.shape[1] // GROUP)}.get(grid.granularity, (len(x), 1))
    assert quantized.scale.shape == groups


# In bfloat16, 1 + 0.9/256 rounds down to 1: 100.6 is code 100 of the unrounded scale and code 101 of the stored one.
UNROUNDED = 1 + 0.9 / 256
ROUNDING_MATTERS = torch.tensor([[127 * UNROUNDED, 100.6, -100.6, 0.0]])


def test_codes_come_from_the_rounded_scale():
    grid = make_grid("narrow", 8)
    assert torch.round(ROUNDING_MATTERS / UNROUNDED).tolist() == [[127, 100, -100, 0]]
    quantized = quantize(ROUNDING_MATTERS, grid, torch.bfloat16)
    assert quantized.scale.tolist() == [[1.0]]
    assert quantized.codes.tolist() == [[127, 101, -101, 0]]


def test_a_given_scale_is_rounded_before_codes_are_computed():
    grid = make_grid("narrow", 8)
    quantized = quantize(ROUNDING_MATTERS, grid, torch.bfloat16, scale=torch.tensor([[UNROUNDED]]))
    assert quantized.scale.tolist() == [[1.0]]
    assert quantized.codes.tolist() == [[127, 101, -101, 0]]


@every("dtype", SCALE_DTYPES)
def test_round_scale_keeps_the_sign_and_stays_between_smallest_normal_and_largest(dtype):
    limits = torch.finfo(dtype)
    scales = torch.tensor([0.0, 1e-300, -1e-300, 1e300, -1e300, 0.1, -0.1], dtype=torch.float64)
    rounded = round_scale(scales, dtype)
    tenth = torch.tensor(0.1, dtype=torch.float64).to(dtype).item()
    assert rounded.tolist() == [limits.tiny, limits.tiny, -limits.tiny, limits.max, -limits.max, tenth, -tenth]


def shrink_error(x: torch.Tensor, grid: Grid, dtype: torch.dtype) -> torch.Tensor:
    """Sum of squared errors per group, in float64."""
    scale, zero = fit(x, grid, dtype)
    scale, zero = scale.unsqueeze(-1), zero.unsqueeze(-1)
    values = decode(encode(x, scale, zero, grid), scale, zero, dtype)
    return (values.double() - x.double()).square().sum(-1)


@examples
@given(grids, scale_dtypes, matrices())
def test_range_search_never_has_a_larger_error_than_min_max(grid, dtype, x):
    groups = grouped(x, grid)
    searched = shrink_error(groups, grid.with_range("mse"), dtype)
    # The search sums in float32: 40 terms, each rounded.
    assert torch.all(searched <= shrink_error(groups, grid, dtype) * (1 + 1e-5) + 1e-38)


@every("kind", sorted(KINDS))
def test_range_search_finds_the_best_of_its_forty_ranges(kind):
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64) ** 3
    x = x.abs() if kind == "symmetric unsigned" else x
    grid = make_grid(kind, 3)
    lo, hi = x.amin(-1), x.amax(-1)
    candidates = []
    for step in range(40):
        # Clipping the data to the shrunken range makes min-max find exactly that range.
        shrunk = x.clamp((lo * (1 - step / 50)).unsqueeze(-1), (hi * (1 - step / 50)).unsqueeze(-1))
        scale, zero = fit(shrunk, grid, torch.float64)
        zero = torch.zeros_like(zero) if grid.symmetric else zero
        codes = (torch.round(x / scale[:, None]) + zero[:, None]).clamp(grid.qmin, grid.qmax)
        error = ((codes - zero[:, None]) * scale[:, None] - x).square()
        candidates.append(error.sum(-1))
    best = torch.stack(candidates).amin(0)
    found = shrink_error(x, grid.with_range("mse"), torch.float64)
    assert torch.allclose(found, best, rtol=1e-12)
    assert (found < candidates[0]).sum() >= 4


@every("kind", ["asymmetric", "symmetric", "narrow", "signed scale"])
def test_weighted_range_search_favours_the_weighted_member(kind):
    x = torch.cat([torch.tensor([1.0]), torch.linspace(-0.3, 0.3, 15)])
    grid = make_grid(kind, 2, range_choice="mse")

    def errors(weight: torch.Tensor | None) -> torch.Tensor:
        scale, zero = fit(x, grid, torch.float32, weight)
        return (decode(encode(x, scale, zero, grid), scale, zero, torch.float32) - x).abs()

    even = errors(None)
    for member in (0, 3):
        weight = torch.ones(16)
        weight[member] = 1e4
        favoured = errors(weight)
        assert favoured[member] <= even[member]
        assert (favoured.square() * weight).sum() <= (even.square() * weight).sum()
    rest = torch.ones(16)
    rest[0] = 1e-4
    assert errors(rest)[1:].square().sum() < even[1:].square().sum()
    heavy = torch.ones(16)
    heavy[0] = 1e6
    assert errors(heavy)[0] < errors(rest)[0]


def test_weights_belong_to_the_columns_of_each_group():
    x = torch.randn(3, 4 * GROUP, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    weight = torch.rand(4 * GROUP, generator=torch.Generator().manual_seed(6), dtype=torch.float64) ** 4 + 1e-6
    grid = make_grid("asymmetric", 2, "group", range_choice="mse")
    scale, zero = fit_matrix(x, grid, torch.float64, weight)
    assert scale.shape == zero.shape == (3, 4)
    for group in range(4):
        columns = slice(group * GROUP, (group + 1) * GROUP)
        one_scale, one_zero = fit(x[:, columns], grid, torch.float64, weight[columns])
        assert torch.equal(scale[:, group], one_scale)
        assert torch.equal(zero[:, group], one_zero)
    assert not torch.equal(scale, fit_matrix(x, grid, torch.float64)[0])


def test_zero_weights_leave_the_min_max_range():
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(2))
    grid = make_grid("symmetric", 3)
    scale, _ = fit(x, grid.with_range("mse"), torch.float32, torch.zeros(16))
    assert torch.equal(scale, fit(x, grid, torch.float32)[0])


SIZES_THAT_WORK = {
    64: [16, 32, 64, -1],
    96: [16, 24, 32, 48, 96, -1],
    240: [24, 30, 40, 48, 60, 80, 120, 240, -1],
    352: [16, 22, 32, 44, 88, 176, 352, -1],
    576: [36, 48, 64, 72, 96, 144, 192, 288, -1],
    24 * 1031: [24, -1],
    8 * 1031: [8, -1],
    1031: [-1],
}


@every("columns", SIZES_THAT_WORK)
def test_group_sizes_that_do_not_divide_are_refused_with_sizes_that_work(columns):
    grid = Grid(granularity="group", group_size=7)
    with pytest.raises(InputError, match=rf"group size 7 does not divide {columns}") as refused:
        quantize(torch.ones(2, columns), grid)
    said = str(refused.value).split("work: ")[1].removesuffix(" (-1 is one scale per output channel)")
    assert ("8 (scales take 2 bits per weight)" in said) is (columns == 8 * 1031)
    named = [int(word.partition(" ")[0]) for word in said.split(", ")]
    assert named == SIZES_THAT_WORK[columns]
    for size in named[:-1]:
        assert quantize(torch.ones(2, columns), replace(grid, group_size=size)).scale.shape == (2, columns // size)


@every(
    ("widths", "size"),
    [
        ([128], 128),
        ([4096, 11008], 128),
        ([576, 1536], 64),
        ([240], -1),
        ([288, 768], 32),
        ([64, 96], 32),
        ([60, 100], -1),
        ([16], -1),
        ([15], -1),
        ([27, 4096], -1),
        ([2 * 1031], -1),
    ],
)
def test_the_usual_group_is_one_that_kernels_know(widths, size):
    assert usual_group(widths) == size
    known = [s for s in (128, 64, 32) if all(w % s == 0 for w in widths)]
    assert size == max(known, default=-1)


@every("bits", [-1, 0, 1, 9, 16])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(InputError, match=rf"bits {bits}; allowed: 2 to 8"):
        Grid(bits=bits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": "row"}, "granularity 'row'; allowed: tensor, channel, group, token"),
        ({"range_choice": "max"}, "range choice 'max'; allowed: minmax, mse"),
        ({"granularity": "group"}, "group size None"),
        ({"granularity": "channel", "group_size": 32}, "only there"),
        ({"granularity": "tensor", "group_size": 32}, "only there"),
        ({"granularity": "group", "group_size": 0}, "group size 0; allowed: 1 or more"),
        ({"granularity": "group", "group_size": -1}, "group size -1; allowed: 1 or more"),
        ({"signed_scale": True, "symmetric": False}, "signed scale needs"),
        ({"signed_scale": True, "signed": False}, "signed scale needs"),
        ({"signed_scale": True, "narrow": True}, "signed scale needs"),
    ],
)
def test_impossible_combinations_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Grid(**options)


@examples
@given(grids, scale_dtypes, matrices())
def test_rows_of_a_quantized_matrix_are_the_rows_of_its_values(grid, dtype, x):
    quantized = quantize(x, grid, dtype)
    for part in (slice(0, 1), slice(1, None), slice(None)):
        if len(x[part]):
            piece = quantized.rows(part)
            assert piece.grid == grid
            assert torch.equal(piece.codes, quantized.codes[part])
            assert torch.equal(piece.dequantize(), quantized.dequantize()[part])


@examples
@given(grids, scale_dtypes, matrices(), st.sampled_from([*SCALE_DTYPES, torch.float64]))
def test_dequantize_rounds_to_the_scale_dtype_and_then_casts(grid, dtype, x, wanted):
    quantized = quantize(x, grid, dtype)
    codes, zero, scale, _ = pieces(quantized)
    # 9 bits of code times 24 of scale are exact in float64, so this rounds once.
    once = ((codes - zero) * scale).to(dtype).reshape(x.shape)
    assert quantized.dequantize().dtype == dtype
    assert torch.equal(quantized.dequantize(), once)
    assert quantized.dequantize(wanted).dtype == wanted
    assert torch.equal(quantized.dequantize(wanted), once.to(wanted))


@examples
@given(grids, scale_dtypes, matrices(), st.sampled_from([torch.float32, torch.float64]))
def test_decode_equals_dequantize_bit_for_bit(grid, dtype, x, work):
    x = x.to(work)
    groups = grouped(x, grid)
    scale, zero = (t.unsqueeze(-1) for t in fit_matrix(x, grid, dtype))
    decoded = decode(encode(groups, scale, zero, grid), scale, zero, dtype).reshape(x.shape)
    assert decoded.dtype == work
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(decoded.to(dtype).view(integers), quantize(x, grid, dtype).dequantize().view(integers))
    # Nothing was lost by going back to the scale's dtype: decode had already rounded.
    assert torch.equal(decoded.to(dtype).to(work), decoded)


@every("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_fake_quantize_keeps_the_dtype_and_equals_quantize(dtype):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    grid = make_grid("asymmetric", 4, "group")
    fake = fake_quantize(x, grid)
    assert fake.dtype == dtype
    assert torch.equal(fake, quantize(x, grid, dtype).dequantize())
    # 16-bit data is worked on in float32: the same codes as its float32 copy.
    if dtype != torch.float64:
        assert torch.equal(quantize(x, grid, dtype).codes, quantize(x.float(), grid, dtype).codes)


def test_per_tensor_shares_one_scale_and_token_has_one_per_row():
    x = torch.tensor([[1.0, -0.4, 0.25, 0.0], [7.0, -4.0, 2.0, 0.0]])
    one = quantize(x, make_grid("narrow", 4, "tensor"))
    assert one.scale.shape == (1, 1)
    assert one.codes.tolist() == [[1, 0, 0, 0], [7, -4, 2, 0]]
    each = quantize(x, make_grid("narrow", 4, "token"))
    assert each.codes.tolist() == [[7, -3, 2, 0], [7, -4, 2, 0]]
