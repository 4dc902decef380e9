"""Rounding with a gradient: for the numbers that are rounded, for the scale and for the zero point of their grid.

    y = (q - z) s        q = clip(round(x / s) + z, qmin, qmax)

The values are those of `weights.grid`, to the bit: training sees the stored values. The gradient takes rounding for the
identity (straight-through, Bengio et al. 2013), and is LSQ's (Esser et al. 2020, arXiv 1902.08153, equations 2, 3 and
5) and LSQ+'s (Bhalgat et al. 2020, arXiv 2004.09576, equations 5 to 7), with v = x / s + z:

                                    dy/dx      dy/ds             dy/dz
    qmin - 1/2 <= v <= qmax + 1/2   1          round(v) - v      0
    beyond                          0          q - z             -s

LSQ+ learns the offset -z s of a range; here z is learned, in codes.

Departs from the papers: numbers up to half a step beyond the last code count as inside and are rounded like any other
number. In LSQ not even the last code itself is inside, so that half the numbers of a solution in 2 bits, which lie on
codes, would not move. Nothing is multiplied by 1 / sqrt(N qmax), the gradient scale of its section 2.2, in here: it
is `gradient_scale`, for those who optimize with SGD. Adam divides by the size of a gradient.
"""

from typing import Any

import torch
from torch import Tensor

from compress.weights.grid import Grid, decode, encode, fit, grouped, straight_through, ungrouped

HALF_STEP = 0.5


def gradient_scale(members: int, grid: Grid) -> float:
    """1 / sqrt(N qmax): LSQ's factor for the gradient of a scale shared by N = `members` numbers."""
    return float((members * max(grid.qmax, 1)) ** -0.5)


def round_with_gradient(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, scale_dtype: torch.dtype) -> Tensor:
    """Values of x [..., g] on a grid, in its dtype, with gradients for x, scale and zero_point.

    scale, zero_point: [..., 1], in the dtype of x; the scale as it is stored (`stored_scale`), the zero point a whole
    number within the codes. scale_dtype: the dtype in which scales are stored, to which values are rounded.
    """
    if not torch.is_grad_enabled():
        return decode(encode(x, scale, zero_point, grid), scale, zero_point, scale_dtype)
    return _Rounded.apply(x, scale, zero_point, grid, scale_dtype)


def round_by_range(x: Tensor, grid: Grid) -> Tensor:
    """Values of x [..., K] on a grid, in its dtype. A range is fitted to each row, or to each group or block of a row,
    and has a gradient:

        dy_i/dx_j = [i = j] + (round(v_i) - v_i) ds/dx_j        ds/dx_j: not 0 for the numbers that span the range

    so that training also learns not to stretch it: a loss grows with the errors of all that share a scale.
    """
    rows = x.reshape(-1, x.shape[-1])
    groups = grouped(rows, grid)
    scale, zero = (each.unsqueeze(-1) for each in fit(groups, grid, torch.float32))
    values = round_with_gradient(groups.to(scale.dtype), scale, zero, grid, torch.float32)
    return ungrouped(values, rows.shape, grid).reshape(x.shape).to(x.dtype)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, scale_dtype: torch.dtype) -> Tensor:
        codes = encode(x, scale, zero_point, grid)
        ctx.save_for_backward(x, scale, zero_point, codes)
        ctx.grid = grid
        return decode(codes, scale, zero_point, scale_dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero_point, codes = ctx.saved_tensors
        grid: Grid = ctx.grid
        steps = x / scale
        inside = _inside(steps, zero_point, grid)
        # y = s sign(x): there is nothing between two signs.
        of_scale = codes if grid.signs else codes - zero_point - torch.where(inside, steps, 0.0)
        of_x = of_s = of_z = None
        if ctx.needs_input_grad[0]:
            of_x = gradient * inside
        if ctx.needs_input_grad[1]:
            of_s = (gradient * of_scale).sum_to_size(scale.shape)
        if ctx.needs_input_grad[2]:
            still = inside | grid.signs  # codes without a zero
            of_z = (gradient * torch.where(still, torch.zeros_like(scale), -scale)).sum_to_size(zero_point.shape)
        return of_x, of_s, of_z, None, None


def rescale(
    x: Tensor, anchor: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, scale_dtype: torch.dtype
) -> Tensor:
    """Values of x [..., g] whose codes are chosen by one scale, the anchor, and multiplied by another.

        y = (q - z) s        q = clip(round(x / a) + z, qmin, qmax)        dy/dx = s / a (0 beyond)    dy/ds = q - z

    Codes do not change when the scale does, and the gradient of a scale is exact. Shapes as in `round_with_gradient`,
    without a gradient for anchor and zero_point.
    """
    if not torch.is_grad_enabled():
        return decode(encode(x, anchor, zero_point, grid), scale, zero_point, scale_dtype)
    return _Rescaled.apply(x, anchor, scale, zero_point, grid, scale_dtype)


class _Rescaled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        grid: Grid,
        scale_dtype: torch.dtype,
    ) -> Tensor:
        codes = encode(x, anchor, zero_point, grid)
        ctx.save_for_backward(x, anchor, scale, zero_point, codes)
        ctx.grid = grid
        return decode(codes, scale, zero_point, scale_dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, anchor, scale, zero_point, codes = ctx.saved_tensors
        of_x = of_s = None
        if ctx.needs_input_grad[0]:
            # A group of zeros may have the scale 0, and nothing inside.
            of_x = gradient * torch.where(_inside(x / anchor, zero_point, ctx.grid), scale / anchor, 0)
        if ctx.needs_input_grad[2]:
            of_s = (gradient * (codes - zero_point)).sum_to_size(scale.shape)
        return of_x, None, of_s, None, None, None


def _inside(steps: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
    """True for numbers, in steps of the grid, that lie within the codes or up to half a step beyond."""
    if grid.signs:
        return steps.abs() <= 1
    if grid.levels is not None:
        return (steps >= grid.levels.least) & (steps <= grid.levels.largest)
    place = steps + zero_point
    return (place >= grid.qmin - HALF_STEP) & (place <= grid.qmax + HALF_STEP)


def whole_zero_point(x: Tensor, grid: Grid) -> Tensor:
    """A learned zero point as the whole number that is stored, with the gradient of x."""
    return straight_through(x, torch.round(x.detach()).clamp(grid.qmin, grid.qmax))
