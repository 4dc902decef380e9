"""Rounding with a gradient: the grid's own values, and the gradient that LSQ and LSQ+ state."""

import pytest
import torch
from combinations import every

from compress.train.rounding.straight_through import (
    gradient_scale,
    rescale,
    round_by_range,
    round_with_gradient,
    whole_zero_point,
)
from compress.weights.grid import Grid, decode, encode, fit, quantize, stored_scale
from compress.weights.rounding import ActivationCodes

GRIDS = [
    Grid(bits=2, granularity="group", group_size=8, signed_scale=True),
    Grid(bits=3, granularity="group", group_size=8),
    Grid(bits=4, granularity="group", group_size=8, symmetric=False),
    Grid(bits=2, granularity="group", group_size=8, narrow=True),
    Grid(bits=8, granularity="channel", type="float"),
    Grid(bits=1, granularity="group", group_size=8, type="sign"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(grid: Grid, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [5, 3, 8] of which some is out of range, scale and zero point [5, 3, 1], in float64."""
    x = torch.randn(5, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    scale, zero = fit(x, grid, torch.float64)
    return x, 0.5 * scale.unsqueeze(-1), zero.unsqueeze(-1)


@every(["grid", "dtype"], [(grid, dtype) for grid in GRIDS for dtype in DTYPES])
def test_values_are_those_of_the_grid(grid, dtype):
    x, scale, zero = (t.float() for t in numbers(grid))
    scale = stored_scale(scale, grid, dtype)
    expected = decode(encode(x, scale, zero, grid), scale, zero, dtype)
    assert torch.equal(round_with_gradient(x.requires_grad_(), scale, zero, grid, dtype), expected)
    with torch.no_grad():
        assert torch.equal(round_with_gradient(x, scale, zero, grid, dtype), expected)


@every("grid", GRIDS)
def test_the_gradient_is_that_of_the_paper_number_by_number(grid):
    x, scale, zero = (t.requires_grad_() for t in numbers(grid))
    y = round_with_gradient(x, scale, zero, grid, torch.float64)
    slope = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(y, (x, scale, zero), slope)
    x, scale, zero = (t.detach() for t in (x, scale, zero))
    of_x, of_scale, of_zero = (torch.zeros_like(t) for t in (x, scale, zero))
    low, high = grid.qmin, grid.qmax
    some_outside = False
    for i, j, k in torch.cartesian_prod(*map(torch.arange, x.shape)).tolist():
        s, z, g = float(scale[i, j]), float(zero[i, j]), float(slope[i, j, k])
        v = float(x[i, j, k]) / s
        q = float(encode(x[i, j, k], scale[i, j, 0], zero[i, j, 0], grid))
        if grid.signs:
            of_x[i, j, k] = g * (abs(v) <= 1)
            of_scale[i, j] += g * q
        elif low - 0.5 <= v + z <= high + 0.5:
            of_x[i, j, k] = g
            of_scale[i, j] += g * (q - z - v)  # LSQ, equation 3: round(v) - v
        else:
            some_outside = True
            of_scale[i, j] += g * (q - z)  # -Q_N or Q_P
            of_zero[i, j] += g * -s
    assert some_outside or grid.signs
    for mine, theirs in zip(found, (of_x, of_scale, of_zero), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@every("grid", [grid for grid in GRIDS if not grid.signs])
def test_the_gradient_is_that_of_the_function_whose_rounding_errors_are_constants(grid):
    x, scale, zero = (t.requires_grad_() for t in numbers(grid))
    with torch.no_grad():
        place = x / scale + zero
        codes = encode(x, scale, zero, grid)
        inside = (place - codes).abs() <= (0.5 if not grid.floating else torch.where(place.abs() > 448.5, 0, 16))
        error = codes - place

    def smooth(x, scale, zero):
        return (torch.where(inside, x / scale + zero + error, codes) - zero) * scale

    assert torch.autograd.gradcheck(smooth, (x, scale, zero), eps=1e-8, atol=1e-3)
    slope = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mine = torch.autograd.grad(round_with_gradient(x, scale, zero, grid, torch.float64), (x, scale, zero), slope)
    theirs = torch.autograd.grad(smooth(x, scale, zero), (x, scale, zero), slope)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_number_on_the_last_code_still_moves():
    grid = Grid(bits=2, granularity="channel")
    x = torch.tensor([[-2.0, 1.0, 1.4, -2.6]], requires_grad=True)
    round_with_gradient(x, torch.ones(1, 1), torch.zeros(1, 1), grid, torch.float32).sum().backward()
    assert x.grad.tolist() == [[1.0, 1.0, 1.0, 0.0]]


@every("grid", GRIDS)
def test_codes_that_an_anchor_chooses_stay_and_the_gradient_of_their_scale_is_exact(grid):
    x, anchor, zero = numbers(grid)
    scale = (1.3 * anchor).requires_grad_()
    expected = decode(encode(x, anchor, zero, grid), scale, zero, torch.float64)
    x.requires_grad_()
    y = rescale(x, anchor, scale, zero, grid, torch.float64)
    assert torch.equal(y, expected)
    assert torch.autograd.gradcheck(lambda s: rescale(x.detach(), anchor, s, zero, grid, torch.float64), (scale,))
    (mine,) = torch.autograd.grad(y.sum(), x)
    (plain,) = torch.autograd.grad(round_with_gradient(x, anchor, zero, grid, torch.float64).sum(), x)
    torch.testing.assert_close(mine, 1.3 * plain)
    with torch.no_grad():
        assert torch.equal(rescale(x, anchor, scale, zero, grid, torch.float64), expected)


@every("grid", [Grid(bits=4, granularity="token"), Grid(bits=8, granularity="token", type="float")])
def test_the_gradient_of_a_range_reaches_the_number_that_spans_it(grid):
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    y = round_by_range(x, grid)
    with torch.no_grad():
        expected = quantize(x, grid, torch.float32).dequantize(torch.float64)
        steps = x / fit(x, grid, torch.float32)[0].unsqueeze(-1)
        error = expected / fit(x, grid, torch.float32)[0].unsqueeze(-1) - steps
    assert torch.equal(y, expected)
    slope = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    largest = x.abs().amax(1, keepdim=True)
    smooth = x + error * largest / (7.5 if grid.bits == 4 else 448)
    mine, theirs = (torch.autograd.grad(each, x, slope)[0] for each in (y, smooth))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


GROUPED_INPUTS = [
    Grid(bits=4, granularity="group", group_size=4, type="float", scales="e8m0"),
    Grid(bits=4, granularity="group", group_size=4, type="float", scales="e4m3", global_scale=500.0),
    Grid(bits=8, granularity="block", block=(1, 4), type="float"),
]


@every("grid", GROUPED_INPUTS)
def test_every_group_of_a_token_has_a_range_of_its_own(grid):
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(2)) * torch.logspace(-2, 2, 8)
    x.requires_grad_()
    y = round_by_range(x, grid)
    assert torch.equal(y, ActivationCodes(grid).fake_quantize(x))
    (slope,) = torch.autograd.grad(y[0, 0, 0], x)
    assert slope.count_nonzero() == slope[0, 0, :4].count_nonzero() > 0


def test_a_learned_zero_point_is_whole_and_has_the_gradient_of_the_identity():
    grid = Grid(bits=4, symmetric=False)
    z = torch.tensor([-9.4, -0.5, 0.6, 7.7], requires_grad=True)
    found = whole_zero_point(z, grid)
    found.sum().backward()
    assert found.tolist() == [-8, 0, 1, 7]
    assert z.grad.tolist() == [1, 1, 1, 1]


def test_the_scale_of_a_gradient_is_that_of_the_paper():
    assert gradient_scale(64, Grid(bits=4)) == pytest.approx(1 / (64 * 7) ** 0.5)
    assert gradient_scale(64, Grid(bits=1, type="sign")) == 1 / 8
