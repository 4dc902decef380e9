"""Integers only: each step is what its formula says, and a layer is the float computation up to one step."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from compress.base.errors import InputError
from compress.inference.layers.integer import (
    fixed_point,
    integer_layer,
    multiply_high,
    requantize,
    shift_right,
    zero_of,
)
from compress.model.convolution import geometry_of, output_sizes
from compress.weights.grid import Grid, Quantized, encode, quantize
from compress.weights.rounding import ActivationCodes

INT32 = torch.iinfo(torch.int32)
int32s = st.integers(INT32.min, INT32.max)


def number(value):
    return torch.tensor([value], dtype=torch.int32)


def round_away(value: Fraction) -> int:
    whole = int(abs(value) + Fraction(1, 2))
    return whole if value >= 0 else -whole


def round_up(value: Fraction) -> int:
    return int((value + Fraction(1, 2)).__floor__())


def grid_codes(x, symmetric):
    """The static int8 grid that covers x."""
    grid = Grid(bits=8, symmetric=symmetric, granularity="tensor")
    found = quantize(x.reshape(1, -1), grid, torch.float32)
    return ActivationCodes(grid, found.scale, found.zero_point)


def codes_of(x, inputs):
    zero = torch.tensor(float(zero_of(inputs)), dtype=torch.float64)
    return encode(x.double(), inputs.scale.double().reshape(()), zero, inputs.grid).to(torch.int8)


def values_of(codes, inputs):
    return (codes.double() - zero_of(inputs)) * inputs.scale.double().reshape(())


@given(int32s, st.integers(0, 31))
def test_a_right_shift_rounds_halves_away_from_zero(value, shift):
    assert int(shift_right(number(value), number(shift))) == round_away(Fraction(value, 2**shift))


@given(int32s, st.integers(2**30, 2**31 - 1), st.sampled_from([1, -1]))
def test_the_high_product_is_the_rounded_quotient(acc, mantissa, sign):
    expected = round_up(Fraction(acc * sign * mantissa, 2**31))
    assert int(multiply_high(number(acc), number(sign * mantissa))) == min(max(expected, INT32.min), INT32.max)


@given(st.floats(2.0**-30, 2.0**29), st.sampled_from([1, -1]))
def test_fixed_point_has_31_bits(factor, sign):
    found = fixed_point(torch.tensor([sign * factor], dtype=torch.float64))
    assert found.mantissa.dtype == found.shift.dtype == torch.int32
    assert 2**30 <= abs(int(found.mantissa)) < 2**31
    assert float(found.value()) == pytest.approx(sign * factor, rel=2.0**-31)


def test_fixed_point_carries_and_refuses():
    almost_one = torch.tensor([1 - 2.0**-40], dtype=torch.float64)
    assert float(fixed_point(almost_one).value()) == 1.0
    for bad in (0.0, 2.0**-40, 2.0**40, float("nan"), float("inf")):
        with pytest.raises(InputError, match="check the ranges"):
            fixed_point(torch.tensor([0.5, bad]))


@given(int32s, st.floats(2.0**-29, 2.0**12), st.integers(-128, 127), st.sampled_from([1, -1]))
def test_requantizing_is_one_step_at_most_from_exact_arithmetic(acc, size, zero, sign):
    factor = fixed_point(torch.tensor([sign * size], dtype=torch.float64))
    exact = round_away(Fraction(float(factor.value())) * acc) + zero
    found = int(requantize(number(acc), factor, zero, -128, 127))
    assert abs(found - min(max(exact, -128), 127)) <= 1


def layers():
    return st.sampled_from(
        [
            lambda: nn.Linear(40, 6),
            lambda: nn.Linear(300, 5, bias=False),
            lambda: nn.Conv1d(6, 8, 3, stride=2, padding=1),
            lambda: nn.Conv1d(4, 4, 5, padding="same", groups=4, bias=False),
            lambda: nn.Conv2d(3, 8, 3, padding=1),
            lambda: nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8),
            lambda: nn.Conv2d(6, 4, (3, 2), stride=(1, 2), padding=(2, 0), dilation=(2, 1), groups=2),
            lambda: nn.Conv2d(4, 10, 1, bias=False),
        ]
    )


def run(make, seed, grid, symmetric, spread, batch=2):
    """A random layer: (its integer form, the codes that it makes, what the float64 computation on the same inputs,
    weights and bias makes in steps of the output grid, the codes of the input)."""
    torch.manual_seed(seed)
    module = make()
    shape = {nn.Linear: (7,), nn.Conv1d: (11,), nn.Conv2d: (7, 6)}[type(module)]
    width = module.in_features if isinstance(module, nn.Linear) else module.in_channels
    x = torch.randn(batch, *shape, width) if isinstance(module, nn.Linear) else torch.randn(batch, width, *shape)
    x = x * spread + spread
    inputs = grid_codes(x, symmetric[0])
    weight = quantize(module.weight.data.flatten(1), grid, torch.float32)
    codes = codes_of(x, inputs)
    exact = module.double()
    exact.weight.data = weight.dequantize(torch.float64).reshape(exact.weight.shape)
    with torch.no_grad():
        y = exact(values_of(codes, inputs))
    outputs = grid_codes(y.float() * 0.9, symmetric[1])  # some codes saturate
    layer = integer_layer(module, weight, inputs, outputs)
    return layer, layer(codes), y / outputs.scale.double().reshape(()) + zero_of(outputs), codes


@settings(max_examples=150, deadline=None)
@given(
    layers(),
    st.integers(0, 10**6),
    st.sampled_from(["symmetric", "signed-scale", "narrow", "tensor", "w4"]),
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from([0.01, 1.0, 30.0]),
)
def test_an_integer_layer_is_the_float_computation_up_to_one_step(make, seed, kind, symmetric, spread):
    grid = {
        "symmetric": Grid(bits=8),
        "signed-scale": Grid(bits=8, signed_scale=True),
        "narrow": Grid(bits=8, narrow=True),
        "tensor": Grid(bits=8, granularity="tensor"),
        "w4": Grid(bits=4),
    }[kind]
    layer, found, exact, codes = run(make, seed, grid, symmetric, spread)
    assert found.dtype == torch.int8
    assert layer.bias.dtype == layer.accumulate(codes).dtype == torch.int32
    assert found.shape == exact.shape
    expected = exact.round().clamp(-128, 127)
    assert float((found - expected).abs().max()) <= 1
    # The bound of each output: the bias rounded, the upper bits kept, the last rounding.
    m, shift = layer.factor.value().abs(), layer.factor.shift.double()
    assert float(m.max()) <= 1
    bound = 0.5 + m / 2 + torch.where(shift > 0, 2.0 ** -(shift + 1), 0.0)
    error = (found - exact.clamp(-128, 127)).abs()
    rows = error if layer.geometry is None else error.movedim(1, -1)
    assert bool((rows <= bound + 1e-6).all())


def test_the_accumulator_is_exact():
    layer, _, _, codes = run(lambda: nn.Conv2d(8, 8, 3, padding=1, groups=2), 0, Grid(bits=8), (False, False), 1.0)
    x = codes.double() - layer.input_zero
    weight = layer.weight.double().reshape(8, 4, 3, 3)
    exact = nn.functional.conv2d(x, weight, layer.bias.double(), padding=1, groups=2)
    assert torch.equal(layer.accumulate(codes).double(), exact.movedim(1, -1).reshape(-1, 8))


def test_relu_is_a_limit_of_the_codes():
    torch.manual_seed(0)
    module, x = nn.Conv1d(4, 6, 3), torch.randn(2, 4, 20)
    inputs = grid_codes(x, False)
    weight = quantize(module.weight.data.flatten(1), Grid(bits=8), torch.float32)
    outputs = grid_codes(module(x).detach(), False)
    plain = integer_layer(module, weight, inputs, outputs)(codes_of(x, inputs))
    cut = integer_layer(module, weight, inputs, outputs, relu=True)(codes_of(x, inputs))
    assert torch.equal(cut, plain.clamp(min=zero_of(outputs)))
    assert (plain < zero_of(outputs)).any()


def test_a_single_sample_has_no_batch():
    layer, found, _, codes = run(lambda: nn.Conv2d(3, 4, 3), 0, Grid(bits=8), (False, True), 1.0)
    assert torch.equal(layer(codes[0]), found[0])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("padding", [0, 2, "same"])
def test_output_sizes_are_those_of_torch(padding):
    module = nn.Conv2d(1, 1, (3, 4), dilation=(2, 1), padding=padding)
    assert output_sizes((9, 8), geometry_of(module)) == module(torch.zeros(1, 1, 9, 8)).shape[2:]


def test_what_integers_cannot_compute_is_refused():
    module = nn.Linear(8, 2)
    good = quantize(module.weight.data, Grid(bits=8), torch.float32)
    fixed = grid_codes(torch.randn(10), False)
    dynamic = ActivationCodes(Grid(bits=8, granularity="token"))
    with pytest.raises(InputError, match="activations=static"):
        integer_layer(module, good, dynamic, fixed)
    for grid in (Grid(bits=8, symmetric=False), Grid(bits=8, granularity="group", group_size=4)):
        with pytest.raises(InputError, match="one scale per output channel"):
            integer_layer(module, quantize(module.weight.data, grid, torch.float32), fixed, fixed)
    conv = nn.Conv1d(2, 2, 3, padding=1, padding_mode="reflect")
    weight = quantize(conv.weight.data.flatten(1), Grid(bits=8), torch.float32)
    with pytest.raises(InputError, match="padding mode 'reflect'"):
        integer_layer(conv, weight, fixed, fixed)
    many = Quantized(torch.full((1, 200_000), -128, dtype=torch.int8), torch.ones(1, 1), None, Grid(bits=8))
    with pytest.raises(InputError, match="beyond int32"):
        integer_layer(nn.Linear(200_000, 1), many, fixed, fixed)
