"""Scales of super-blocks: fitted group by group, then coded in steps that the groups of a super-block share.

Shapes: B super-blocks, G groups of each, g weights of a group. c is the cost of an error, of each weight.

    1. each group alone      sum c (x - s (q - z) + m)^2      least over s, m and q: q by rounding, (s, m) by least
                                                              squares, for some first guesses of s
    2. steps                 d, dmin: of the largest scale and minimum, rounded to float16
    3. codes of s and m      the best of the neighbours of s / d and m / dmin, q by rounding
    4. d and dmin again      least squares for these q and codes; rounded, kept where the error falls

z is the code whose value is 0, and m is 0, of a type without minima. With minima z is 0; m is never negative, so that
0 lies in the range of every group. Of iq4_xs q is a level, and z is 0.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels.division import divide
from compress.solvers.candidates import Candidate, least_cost
from compress.weights.formats.k_quants import KQuant

# First guesses of a group's scale: its range over so many steps more than there are, as a share of them.
SHRINKS = tuple(-0.08 + 0.06 * i for i in range(9))
# Codes that are tried for a scale and a minimum, beside the nearest.
NEIGHBOURS = (-1, 0, 1)
# Times that codes and scales are fitted in turn.
ROUNDS = 2


class KSteps(NamedTuple):
    """d and dmin of super-blocks, [B, 1] or [B], float16 numbers in the working dtype; dmin is 0 without minima."""

    d: Tensor
    dmin: Tensor


class Coded(NamedTuple):
    """Codes of scales and minima [..., G], whole numbers in the working dtype; without minima, scales have signs."""

    scales: Tensor
    minima: Tensor


class Affine(NamedTuple):
    """Values = scale (code - zero) of groups [...], as the compiled loops have them."""

    scale: Tensor
    zero: Tensor


def as_float16(x: Tensor) -> Tensor:
    """x as float16 holds it, in its own dtype; magnitudes are at most the largest number."""
    most = torch.finfo(torch.float16).max
    return x.clamp(-most, most).to(torch.float16).to(x.dtype)


def affine(coded: Coded, steps: KSteps, format_: KQuant) -> Affine:
    """Scale and zero of groups [..., G] from codes and the steps of their super-blocks [..., 1]."""
    scale = steps.d * coded.scales
    if not format_.layout.has_minima:
        return Affine(scale, torch.full_like(scale, format_.zero))
    minimum = steps.dmin * coded.minima
    return Affine(scale, torch.where(scale == 0, torch.zeros_like(scale), minimum / scale))


def values_of(x: Tensor, at: Affine, format_: KQuant) -> tuple[Tensor, Tensor]:
    """(Codes, values) nearest to x [..., g] in groups of such scales [...]."""
    scale, zero = at.scale.unsqueeze(-1), at.zero.unsqueeze(-1)
    codes = format_.encode(x, scale, zero)
    return codes, (codes - zero) * scale


def fit_groups(x: Tensor, cost: Tensor, format_: KQuant) -> tuple[Tensor, Tensor]:
    """(Scales, minima) [...] of groups x [..., g] alone, not coded yet. cost: broadcasts against x."""
    zero = format_.zero

    def tried() -> Iterator[Candidate]:
        for scale, minimum in _guesses(x, format_):
            for _ in range(ROUNDS):
                at = Affine(scale, torch.where(scale == 0, torch.zeros_like(scale), minimum / scale + zero))
                codes, values = values_of(x, at, format_)
                yield (cost * (x - values).square()).sum(-1), (scale, minimum)
                scale, minimum = least_squares(x, cost, codes - zero, format_.layout.has_minima)

    none = x.new_full(x.shape[:-1], torch.inf)
    _, (scale, minimum) = least_cost((none, (torch.zeros_like(none), torch.zeros_like(none))), tried())
    return scale, minimum


def _guesses(x: Tensor, format_: KQuant) -> Iterator[tuple[Tensor, Tensor]]:
    """First guesses of (scale, minimum) of groups x [..., g]."""
    least, most = format_.range
    if format_.layout.has_minima:
        low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
        for shrink in SHRINKS:
            scale = divide(high - low, most * (1 + shrink))
            yield scale, -low * (1 - max(shrink, 0) / 2)
        return
    low, high = x.amin(-1), x.amax(-1)
    extreme = torch.where(high > -low, high, low)
    for shrink in SHRINKS:
        yield divide(extreme, least * (1 + shrink)), torch.zeros_like(low)
        yield divide(extreme, most * (1 + shrink)), torch.zeros_like(low)


def least_squares(x: Tensor, cost: Tensor, steps: Tensor, has_minima: bool) -> tuple[Tensor, Tensor]:
    """(s, m) [...] of least cost (x - s steps + m)^2, for groups [..., g]; m at least 0, or 0 without minima."""
    xs, ss = (cost * x * steps).sum(-1), (cost * steps * steps).sum(-1)
    alone = torch.where(ss > 0, xs / ss, torch.zeros_like(ss))
    if not has_minima:
        return alone, torch.zeros_like(alone)
    ones = cost.expand_as(x).sum(-1)
    x1, s1 = (cost * x).sum(-1), (cost * steps).sum(-1)
    determinant = ss * ones - s1 * s1
    scale = (xs * ones - x1 * s1) / determinant
    minimum = (xs * s1 - x1 * ss) / determinant
    good = (determinant > 0) & (minimum >= 0) & (scale > 0) & torch.isfinite(scale) & torch.isfinite(minimum)
    return torch.where(good, scale, alone.clamp(min=0)), torch.where(good, minimum, torch.zeros_like(minimum))


def first_steps(scale: Tensor, minimum: Tensor, format_: KQuant) -> KSteps:
    """The steps [B, 1] that the largest scales and minima [B, G] of super-blocks just fill."""
    least, most = format_.scale_range
    if format_.layout.has_minima:
        return KSteps(*(as_float16(divide(x.amax(-1, keepdim=True), most)) for x in (scale, minimum)))
    low, high = scale.amin(-1, keepdim=True), scale.amax(-1, keepdim=True)
    d = as_float16(divide(torch.where(high > -low, high, low), least))
    return KSteps(d, torch.zeros_like(d))


def coded_groups(
    x: Tensor, cost: Tensor, scale: Tensor, minimum: Tensor, steps: KSteps, format_: KQuant
) -> tuple[Coded, Tensor]:
    """(Codes, errors) [..., G] of scales and minima [..., G] in steps [..., 1], the neighbours of least error."""

    def tried(codes: Coded) -> Candidate:
        _, values = values_of(x, affine(codes, steps, format_), format_)
        return (cost * (x - values).square()).sum(-1), codes

    none = x.new_full(scale.shape, torch.inf), (torch.zeros_like(scale), torch.zeros_like(scale))
    near = neighbours(nearest_codes(scale, minimum, steps, format_), format_)
    error, chosen = least_cost(none, map(tried, near))
    return Coded(*chosen), error


def nearest_codes(scale: Tensor, minimum: Tensor, steps: KSteps, format_: KQuant) -> Coded:
    least, most = format_.scale_range
    codes = (
        torch.where(step == 0, torch.zeros_like(x), torch.round(x / step)).clamp(least, most)
        for x, step in ((scale, steps.d), (minimum, steps.dmin))
    )
    return of_one_line(*codes)


def neighbours(near: Coded, format_: KQuant) -> Iterator[Coded]:
    """These codes first, then others near them."""
    least, most = format_.scale_range
    moves: Sequence[tuple[int, int]] = [(i, 0) for i in NEIGHBOURS]
    if format_.layout.has_minima:
        moves = list(product(NEIGHBOURS, NEIGHBOURS))
    for i, j in sorted(moves, key=lambda move: abs(move[0]) + abs(move[1])):
        yield of_one_line((near.scales + i).clamp(least, most), (near.minima + j).clamp(0, most))


def of_one_line(scales: Tensor, minima: Tensor) -> Coded:
    """Codes, of which a minimum is 0 where its scale is: all codes of weights stand for 0 there."""
    return Coded(scales, torch.where(scales == 0, torch.zeros_like(minima), minima))


class Fit(NamedTuple):
    """Super-blocks fitted: steps [B, 1], codes of scales and minima [B, G], and the error of each [B]."""

    steps: KSteps
    coded: Coded
    error: Tensor


def fit_blocks(x: Tensor, cost: Tensor, format_: KQuant) -> Fit:
    """Steps and codes of super-blocks x [B, G, g] for the least cost (x - value)^2. cost: [G, g] or [B, G, g]."""
    scale, minimum = fit_groups(x, cost, format_)
    steps = first_steps(scale, minimum, format_)
    best: Candidate | None = None
    for _ in range(ROUNDS):
        coded, error = coded_groups(x, cost, scale, minimum, steps, format_)
        tried = error.sum(-1, keepdim=True), (*steps, *coded)
        best = tried if best is None else least_cost(best, [tried])
        d, dmin, *codes = best[1]
        fit = Fit(KSteps(d, dmin), Coded(*codes), best[0].squeeze(-1))
        steps = refit_steps(x, cost, fit, format_)
    return fit


def refit_steps(x: Tensor, cost: Tensor, fit: Fit, format_: KQuant) -> KSteps:
    """The steps [B, 1] of least error for the codes that a fit has."""
    codes, _ = values_of(x, affine(fit.coded, fit.steps, format_), format_)
    slope = fit.coded.scales.unsqueeze(-1) * (codes - format_.zero)
    if not format_.layout.has_minima:
        alone = least_squares(x.flatten(1), cost.expand_as(x).flatten(1), slope.flatten(1), False)
        return KSteps(*(as_float16(step).unsqueeze(-1) for step in alone))
    d, dmin = (t.unsqueeze(-1) for t in two_steps(x, cost, slope, fit.coded.minima.unsqueeze(-1).expand_as(x)))
    good = (d > 0) & (dmin >= 0) & torch.isfinite(d) & torch.isfinite(dmin)
    return KSteps(*(as_float16(torch.where(good, a, b)) for a, b in zip((d, dmin), fit.steps, strict=True)))


def two_steps(x: Tensor, cost: Tensor, slope: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """(a, b) [B] of least cost (x - a slope + b offset)^2 over super-blocks [B, ...]."""
    xs, xo, ss, so, oo = (
        (cost * one * other).flatten(1).sum(1)
        for one, other in ((x, slope), (x, offset), (slope, slope), (slope, offset), (offset, offset))
    )
    determinant = ss * oo - so * so
    plain = xs / ss
    a = torch.where(determinant > 0, (xs * oo - xo * so) / determinant, plain)
    b = torch.where(determinant > 0, (xs * so - xo * ss) / determinant, torch.zeros_like(a))
    return a, b
