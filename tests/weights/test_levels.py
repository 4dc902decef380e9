"""Grids of levels against transcriptions that share no code with them: every code, every border between two levels, and
what compressed-tensors makes of the same files."""

import math
import struct
from bisect import bisect_left
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from compress.base.errors import CheckpointError, InputError
from compress.inference.layers.linear import QuantLinear
from compress.weights.compressed_tensors import group_entry
from compress.weights.formats.levels import LEVEL_FORMATS, MXFP4, NVFP4
from compress.weights.grid import Grid, encode, fit, quantize
from compress.weights.levels import E2M1, E2M3, E3M2, IQ4_NL, NF4, Levels
from compress.weights.scale_numbers import FLOAT8, e8m0_codes, global_scale_for, of_e8m0, power_above, round_scale
from compress.weights.scheme import Scheme, scheme_on

DTYPES = (torch.float32, torch.float64)


def float_value(code: int, exponent_bits: int, mantissa_bits: int) -> Fraction:
    """The value of a small float without infinities, from its bits (OCP Microscaling formats 1.0, section 5.3)."""
    sign, rest = divmod(code, 2 ** (exponent_bits + mantissa_bits))
    exponent, mantissa = divmod(rest, 2**mantissa_bits)
    bias = 2 ** (exponent_bits - 1) - 1
    significand = Fraction(mantissa, 2**mantissa_bits) + (exponent > 0)
    return (-1) ** sign * significand * Fraction(2) ** (max(exponent, 1) - bias)


def nearest_even(x: Fraction, levels: list[tuple[Fraction, int]]) -> set[Fraction]:
    """The level nearest to x; of two, the one of the even code. levels: (value, code)."""
    least = min(abs(value - x) for value, _ in levels)
    tied = [(value, code) for value, code in levels if abs(value - x) == least]
    return {value for value, code in tied if code % 2 == 0 or len({v for v, _ in tied}) == 1}


@pytest.mark.parametrize(("levels", "bits"), [(E2M1, (2, 1)), (E2M3, (2, 3)), (E3M2, (3, 2))])
def test_levels_of_floats_are_those_of_their_bits(levels: Levels, bits):
    values = [float_value(code, *bits) for code in range(2 ** (1 + sum(bits)))]
    assert list(levels.values) == [float(value) for value in values]
    assert struct.pack("<d", levels.values[len(values) // 2]) == struct.pack("<d", -0.0)
    held = torch.arange(len(values), dtype=torch.uint8)
    assert levels.of(held).tolist() == [float(value) for value in values]
    positive = torch.tensor([code for code in held.tolist() if code != len(values) // 2], dtype=torch.uint8)
    assert torch.equal(levels.codes(levels.of(positive)), positive)
    assert levels.codes(torch.tensor([-0.0])).tolist() == [0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("levels", "bits"), [(E2M1, (2, 1)), (E2M3, (2, 3)), (E3M2, (3, 2))])
def test_floats_round_to_nearest_and_ties_to_the_even_code(levels, bits, dtype):
    pairs = [(float_value(code, *bits), code) for code in range(2 ** (1 + sum(bits)))]
    rising = sorted({value for value, _ in pairs})
    middles = torch.tensor([float((a + b) / 2) for a, b in pairwise(rising)], dtype=dtype)
    infinity = torch.full_like(middles, torch.inf)
    x = torch.cat([middles, torch.nextafter(middles, infinity), torch.nextafter(middles, -infinity)])
    found = levels.nearest(x)
    for given, rounded in zip(x.tolist(), found.tolist(), strict=True):
        assert {Fraction(rounded)} == nearest_even(Fraction(given), pairs), given
    top = levels.largest
    outside = torch.tensor([top, top * 2, torch.inf, -top * 1.01, -torch.inf], dtype=dtype)
    assert levels.nearest(outside).tolist() == [top, top, top, -top, -top]


def test_nf4_takes_the_lower_of_two_levels():
    middles = [(a + b) / 2 for a, b in pairwise(NF4.values)]
    x = torch.tensor(middles, dtype=torch.float64)
    assert NF4.nearest(x).tolist() == [*torch.tensor(NF4.values[:-1]).double().tolist()]
    above = torch.nextafter(x, torch.full_like(x, torch.inf))
    assert [bisect_left(NF4.values, value) for value in NF4.nearest(above).tolist()] == list(range(1, 16))


def test_iq4_nl_has_its_published_levels_and_a_scale_that_puts_the_largest_weight_at_the_lowest():
    """The levels of llama.cpp, as its Python package has them, and scales of either sign."""
    gguf = pytest.importorskip("gguf")
    assert list(IQ4_NL.values) == list(gguf.quants.IQ4_NL.kvalues)
    grid = LEVEL_FORMATS["iq4_nl"].on
    for largest in (3.0, -3.0):
        x = torch.linspace(-1, 1, 32).float().unsqueeze(0)
        x[0, 7] = largest
        found = quantize(x, grid, torch.float32)
        assert found.codes[0, 7] == 0
        assert math.copysign(1, float(found.scale)) == -math.copysign(1, largest)
        assert float(found.scale) == float(torch.tensor(-largest / 127).half())


def test_powers_of_two_are_bytes_of_their_exponents():
    held = torch.arange(255, dtype=torch.uint8)
    powers = of_e8m0(held)
    assert powers.tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert of_e8m0(torch.tensor([255], dtype=torch.uint8)).isnan().all()
    normal = slice(1, 252)
    assert torch.equal(e8m0_codes(powers[normal]), held[normal])
    assert torch.equal(round_scale(powers[normal][:240], torch.float16, "e8m0"), powers[normal][:240])
    assert round_scale(torch.tensor([1.49, 1.5, 1.51, 0.75, 0.74]), torch.float32, "e8m0").tolist() == [
        *(1.0, 2.0, 2.0, 1.0, 0.5)
    ]
    assert power_above(torch.tensor([1.0, 0.99, 1.01, 0.0])).tolist()[:3] == [2.0, 1.0, 2.0]


@pytest.mark.parametrize("divisor", [1.0, 96.0, 1000.5])
def test_float8_scales_are_all_that_float8_has_above_zero(divisor):
    known = torch.arange(1, 127, dtype=torch.uint8).view(FLOAT8).float() / divisor
    assert torch.equal(round_scale(known, torch.bfloat16, "e4m3", divisor), known)
    middle = (known[1:] + known[:-1]) / 2
    above = round_scale(middle * 1.001, torch.bfloat16, "e4m3", divisor)
    assert torch.equal(above, known[1:])
    assert round_scale(torch.tensor([1e-9, 1e9]), torch.bfloat16, "e4m3", divisor).tolist() == [
        *(float(known[0]), float(known[-1]))
    ]


@pytest.mark.parametrize("largest", [1e-6, 0.0371, 1.0, 448.0, 3e4])
def test_a_global_scale_leaves_room_for_twice_the_largest_scale(largest):
    found = global_scale_for(largest)
    assert math.frexp(found)[0] == 0.5
    assert 448 / 4 < largest * found <= 448 / 2
    assert global_scale_for(0.0) == global_scale_for(float("nan")) == 1.0


GROUPED = [kind.on for kind in LEVEL_FORMATS.values()]
WITH_ZERO = [grid for grid in GROUPED if grid.levels is None or grid.levels.has_zero]
EXTREME = [1e-30, 3e-8, 1e30]


def matrix(size: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    held = torch.randn(24, 128, generator=draw) * torch.randn(24, 1, generator=draw).exp()
    held[3] = 0
    return (held * size).to(dtype)


@pytest.mark.parametrize("grid", GROUPED, ids=lambda g: f"{g.type}{g.bits}-{g.scales}")
def test_every_weight_gets_the_nearest_level_and_searching_loses_nothing(grid):
    weight = matrix()
    found = quantize(weight, grid)
    table = torch.tensor(grid.levels.values) if grid.levels is not None else None
    if table is None:
        table = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
        table = table[~table.isnan()]
    scale = found.scale.float().repeat_interleave(grid.group_size, 1)
    least = (scale.unsqueeze(-1) * table - weight.float().unsqueeze(-1)).abs().amin(-1)
    # Products of NF4 and IQ4_NL are rounded to the dtype of the model.
    spare = 0.0 if grid.type == "float" else 2.0**-8
    values = found.dequantize().float()
    assert ((values - weight.float()).abs() <= least + spare * values.abs()).all()
    searched = quantize(weight, grid.with_range("mse"))
    errors = [(one.dequantize().float() - weight.float()).square().sum() for one in (found, searched)]
    assert errors[1] <= errors[0]


@pytest.mark.parametrize("size", EXTREME)
@pytest.mark.parametrize("grid", WITH_ZERO, ids=lambda g: f"{g.type}{g.bits}-{g.scales}")
def test_values_stay_finite_whatever_the_size_of_weights(grid, size):
    weight = matrix(size)
    found = quantize(weight, grid.with_range("mse")).dequantize().double()
    assert found.isfinite().all()
    assert (found - weight.double()).norm() < 0.2 * weight.double().norm()
    assert not found[3].any()


def test_a_range_of_powers_of_two_is_that_of_compressed_tensors():
    grid = MXFP4.on
    amax = torch.tensor([1.0, 1.74, 1.75, 1.99, 2.0, 3.5, 6.0, 6.99, 7.0, 0.4375])
    x = torch.zeros(len(amax), 32)
    x[:, 5] = amax
    scale, _ = fit(x, grid, torch.bfloat16)
    assert (amax / scale < 7).all()
    assert (amax / scale >= 3.5).all()


@pytest.mark.parametrize("name", [name for name, kind in LEVEL_FORMATS.items() if kind.layout is not None])
def test_compressed_tensors_decompresses_exactly_our_values(name):
    ct = pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    kind = LEVEL_FORMATS[name]
    format_ = kind(grid=kind.on)
    entry = group_entry(scheme_on(kind.on))
    theirs = QuantizationScheme.model_validate({**entry, "targets": ["Linear"]})
    compressor = BaseCompressor.get_value_from_registry(kind.layout)
    assert compressor.can_compress(torch.nn.Linear, theirs), ct.__version__
    weight = matrix()
    term = format_.term(quantize(weight, kind.on))
    found = compressor.decompress(term.parts(), theirs)["weight"]
    assert torch.equal(found.float(), term.dequantize())
    # Their own scales are ours, where none is a global one.
    if kind is not NVFP4:
        groups = weight.reshape(len(weight), -1, kind.on.group_size)
        scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), theirs.weights)
        live = groups.abs().amax(-1) > 0
        assert torch.equal(term.scale[live], scales.float()[live])


def test_a_global_scale_of_others_is_kept_bit_for_bit():
    """What compressed-tensors writes: 448 * 6 / amax, no power of two."""
    weight = matrix()
    divisor = float((448 * 6 / weight.abs().max()).float())
    format_ = NVFP4(grid=NVFP4.on)
    term = format_.term(quantize(weight, replace(NVFP4.on, global_scale=divisor)))
    parts = term.parts()
    local = parts["weight_scale"].float()
    assert parts["weight_global_scale"].tolist() == [divisor]
    wanted = (weight.float().reshape(24, -1, 16).abs().amax(-1) / 6 * divisor).to(FLOAT8).float()
    assert torch.equal(local[local > 2**-9], wanted[local > 2**-9])
    again = format_.read(parts, *term.shape)
    assert again.grid.global_scale == divisor
    assert torch.equal(again.dequantize(), term.dequantize())
    assert all(torch.equal(again.parts()[key].view(torch.uint8), part.view(torch.uint8)) for key, part in parts.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_read_whole_numbers_and_files_get_their_exponents_back(dtype):
    """Exponents that the dtype of the layer has not, and a code of -0."""
    format_ = MXFP4(grid=MXFP4.on)
    parts = format_.term(quantize(matrix(), MXFP4.on)).parts()
    parts["weight_scale"][5] = torch.tensor([0, 254, 1, 90], dtype=torch.uint8)
    parts["weight_packed"][6, 0] = 8
    layer = QuantLinear.from_parts(parts, Scheme(terms=(format_,)), (24, 128)).to(dtype)
    saved = layer.state_dict()
    assert torch.equal(saved["weight_scale"], parts["weight_scale"])
    parts["weight_packed"][6, 0] = 0
    assert torch.equal(saved["weight_packed"], parts["weight_packed"])
    live = [row for row in range(24) if row != 5]
    assert torch.equal(layer.dequantize()[live], format_.values(parts)[live].to(dtype))


def test_global_scales_stay_float32_in_a_layer_of_another_dtype():
    divisors = {"weight_global_scale": 1000.3, "input_global_scale": 77.7}
    format_ = NVFP4(grid=NVFP4.on)
    term = format_.term(quantize(matrix(), replace(NVFP4.on, global_scale=divisors["weight_global_scale"])))
    scheme = Scheme(terms=(format_,), inputs=NVFP4.on)
    parts = {**term.parts(), "input_global_scale": torch.tensor([divisors["input_global_scale"]])}
    layer = QuantLinear.from_parts(parts, scheme, term.shape).to(torch.bfloat16)
    assert {name: layer.state_dict()[name].tolist() for name in divisors} == {
        name: torch.tensor([value]).tolist() for name, value in divisors.items()
    }
    x = torch.randn(5, term.shape[1], generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    grid = replace(NVFP4.on, global_scale=float(parts["input_global_scale"]))
    rounded = quantize(x, grid, torch.float32).dequantize(torch.bfloat16)
    assert torch.equal(layer(x), torch.nn.functional.linear(rounded, term.dequantize().to(torch.bfloat16)))
    for name in divisors:
        for wrong in (0.0, -1.0, torch.nan, torch.inf):
            with pytest.raises(CheckpointError, match=f"{name} holds values that are not finite numbers above 0"):
                scheme.check({**parts, name: torch.tensor([wrong])}, *term.shape)


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4, "scales": "e8m0"},
        {"bits": 4, "type": "normal", "scales": "e4m3"},
        {"bits": 5, "type": "float"},
        {"bits": 4, "type": "float", "symmetric": False},
        {"bits": 8, "type": "normal"},
    ],
)
def test_other_combinations_do_not_exist(options):
    with pytest.raises(InputError):
        Grid(**options)


def test_codes_in_a_sweep_are_levels():
    """What the solvers see: levels in the dtype of the weight, which scales multiply."""
    x = torch.tensor([0.3, -5.1, 2.5, 100.0])
    grid = Grid(bits=4, type="float", granularity="group", group_size=4, scales="e8m0")
    assert encode(x, torch.ones(4), torch.zeros(4), grid).tolist() == [0.5, -6.0, 2.0, 6.0]


@pytest.mark.parametrize("choice", ["minmax", "mse"])
@pytest.mark.parametrize("name", LEVEL_FORMATS)
def test_a_group_of_zeros_stands_for_zeros(name: str, choice: str) -> None:
    """IQ4_NL has no level 0, so its scale has to be."""
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0], x[1, :64] = 0, 0
    for dtype in (torch.bfloat16, torch.float16):
        values = quantize(x, LEVEL_FORMATS[name].on.with_range(choice), dtype).dequantize()
        assert values.isfinite().all()
        assert not values[x == 0].any()
        assert not quantize(torch.zeros(4, 128), LEVEL_FORMATS[name].on, dtype).dequantize().any()
