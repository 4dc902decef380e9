"""Chooses how many bins of a histogram a range keeps: by percentile, or by the least squared error.

Every choice is a number of bins kept on each side of zero, [R, 2] = (below, above); `bounds` makes values of them. A
bound is the outer edge of the last bin kept, or the observed extreme where that is nearer to zero: keeping every bin
is the observed range exactly.

    symmetric, signed       [-t, t] from the histogram of |x|
    symmetric, unsigned     [0, t] from that of max(x, 0): what is negative becomes 0 whatever t is
    asymmetric              [lo, hi], lo <= 0 <= hi

Percentile p keeps the fewest bins such that at most (100 - p)% of all values lie outside; asymmetric, at most half of
that on each side. Counted in whole numbers, so that it does not depend on rounding.

Least squared error: sum over bins of count (v - Q(v))^2, where Q is the grid's own rounding and clipping at the
candidate's scale. A bin stands for two values v, half its count each, at its centre -+ w / sqrt(12): they have the mean
and the variance of values spread evenly over it, where its centre alone would make steps of 1 or 3 bins look worse than
they are. Values beyond an observed extreme are moved to it, and the bin of zero stands for zero.

Candidates are the observed range shrunk by 2^(-k/16), k = 0 .. 127, to whole bins. Asymmetric: both ends shrink
together, then the upper and the lower end are searched in turn, twice. A candidate whose step would be narrower than a
bin is left out (the histogram cannot tell its rounding errors), the observed range never is. Of candidates within a
part in 10^9 of the least error the widest wins, so that the order of a sum decides nothing.

Shapes: R rows, B bins per sign, C candidates, A = 2B bins by value.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from compress.solvers.statistics.histogram import fold_sides, in_order, used_bins
from compress.weights.grid import Grid, decode, encode, scale_of_range

PERCENT = 10**6  # percentiles are told apart to a millionth of a percent
SHRINK_STEPS, STEPS_PER_OCTAVE, SHRINK_UNIT = 128, 16, 2**20
TIE = 1e-9
BUDGET = 2**17  # numbers in a temporary tensor of a search: 1 MiB of float64, which stays in a cache

Turn = Literal["both", "above", "below"]
TURNS: tuple[Turn, ...] = ("both", "above", "below", "above", "below")


def bounds(
    below: Tensor, above: Tensor, width: Tensor, lowest: Tensor, highest: Tensor, grid: Grid
) -> tuple[Tensor, Tensor]:
    """(lo, hi) float64 of a range that keeps so many bins; lowest and highest are the observed extremes."""
    lo, hi = lowest.double().clamp(max=0), highest.double().clamp(min=0)
    if not grid.symmetric:
        return torch.maximum(lo, -below * width), torch.minimum(hi, above * width)
    if not grid.signed:
        hi = torch.minimum(hi, above * width)
        return torch.zeros_like(hi), hi
    hi = torch.minimum(torch.maximum(-lo, hi), above * width)
    return -hi, hi


def observed_bins(counts_R2B: Tensor, grid: Grid) -> Tensor:
    """[R, 2] bins that keep everything (for an unsigned symmetric range, everything that is not negative)."""
    if not grid.symmetric:
        return used_bins(counts_R2B)
    above = used_bins(fold_sides(counts_R2B, grid.signed))
    return torch.stack([above if grid.signed else torch.zeros_like(above), above], -1)


def bins_with_tail(counts_RB: Tensor, allowed_R: Tensor) -> Tensor:
    """[R] the fewest bins from zero with at most `allowed` values in the bins after them."""
    beyond = counts_RB.sum(-1, keepdim=True) - counts_RB.cumsum(-1) + counts_RB
    return (beyond > allowed_R[:, None]).sum(-1)


def percentile_bins(counts_R2B: Tensor, grid: Grid, percentile: float) -> Tensor:
    """[R, 2] bins kept so that `percentile` percent of the values lie inside."""
    outside = round((100 - percentile) * PERCENT)
    total = counts_R2B.sum((1, 2))
    if not grid.symmetric:
        allowed = total * outside // (2 * 100 * PERCENT)
        return torch.stack([bins_with_tail(counts_R2B[:, side], allowed) for side in (0, 1)], -1)
    above = bins_with_tail(fold_sides(counts_R2B, grid.signed), total * outside // (100 * PERCENT))
    return torch.stack([above if grid.signed else torch.zeros_like(above), above], -1)


def shrunk(bins_R: Tensor) -> Tensor:
    """[R, C] candidates for so many bins, the widest first: bins * 2^(-k/16), rounded up in whole numbers."""
    factors = [int(SHRINK_UNIT * 2 ** (-k / STEPS_PER_OCTAVE)) for k in range(SHRINK_STEPS)]
    table = torch.tensor(factors, device=bins_R.device)
    return (bins_R[:, None] * table + SHRINK_UNIT - 1) // SHRINK_UNIT


def bin_values(lowest_R: Tensor, highest_R: Tensor, width_R: Tensor, bins: int) -> Tensor:
    """[R, A, 2] the values that stand for each bin, float64."""
    centres = torch.arange(-bins, bins, device=width_R.device, dtype=torch.float64) + 0.5
    places = centres[:, None] + torch.tensor([-1, 1], device=width_R.device) / math.sqrt(12)
    places[bins] = 0
    lo, hi = lowest_R.double().clamp(max=0), highest_R.double().clamp(min=0)
    return (places * width_R[:, None, None]).clamp(lo[:, None, None], hi[:, None, None])


def squared_errors(
    counts_RA: Tensor, values_RA2: Tensor, lo_RC: Tensor, hi_RC: Tensor, wanted_RC: Tensor, grid: Grid
) -> Tensor:
    """[R, C] sum over bins of count (v - Q(v))^2, float64; infinite for the candidates that are not wanted."""
    weights = (counts_RA.double() / 2)[:, :, None].expand(-1, -1, 2).flatten(1)
    flat = values_RA2.flatten(1)
    errors = torch.full_like(lo_RC, float("inf"))
    scale_RC, zero_RC = scale_of_range(lo_RC, hi_RC, grid, torch.float32)
    for pair in wanted_RC.nonzero().split(max(1, BUDGET // max(1, flat.shape[1]))):
        row, candidate = pair.unbind(-1)
        scale, zero, values = scale_RC[row, candidate, None], zero_RC[row, candidate, None], flat[row]
        off = decode(encode(values, scale, zero, grid), scale, zero, torch.float64).sub_(values)
        errors[row, candidate] = off.square_().mul_(weights[row]).sum(-1)
    return errors


def widest_of_least(losses_RC: Tensor, choices_RC: Tensor, margin: Tensor | float) -> Tensor:
    """[R] of the choices (the widest first) whose loss is within `margin` of the least, the first."""
    fits = losses_RC <= losses_RC.amin(-1, keepdim=True) + margin
    return choices_RC.gather(1, fits.to(torch.int8).argmax(-1, keepdim=True)).squeeze(1)


def mse_bins(counts_R2B: Tensor, width_R: Tensor, lowest_R: Tensor, highest_R: Tensor, grid: Grid) -> Tensor:
    """[R, 2] bins kept by the candidate range of least squared error under `grid`."""
    all_R2 = observed_bins(counts_R2B, grid)
    bins = counts_R2B.shape[-1]
    counts_RA = in_order(counts_R2B)
    values_RA2 = bin_values(lowest_R, highest_R, width_R, bins)
    filled = (counts_RA > 0).any(0)  # bins filled in some row: the others add nothing
    counts_RA, values_RA2 = counts_RA[:, filled], values_RA2[:, filled]
    least_R = all_R2.sum(-1).clamp(max=2**grid.bits)  # a step is a bin or more
    ends = {"below": shrunk(all_R2[:, 0]), "above": shrunk(all_R2[:, 1])}
    extents = {end: choices[:, 0] for end, choices in ends.items()}
    for turn in TURNS if not grid.symmetric else TURNS[:1]:
        tried = {e: c if turn in ("both", e) else extents[e][:, None].expand_as(c) for e, c in ends.items()}
        lo, hi = bounds(tried["below"], tried["above"], width_R[:, None], lowest_R[:, None], highest_R[:, None], grid)
        wanted = tried["below"] + tried["above"] >= least_R[:, None]
        errors = squared_errors(counts_RA, values_RA2, lo, hi, wanted, grid)
        margin = TIE * errors.amin(-1, keepdim=True)
        extents = {e: widest_of_least(errors, choices, margin) for e, choices in tried.items()}
    return torch.stack([extents["below"], extents["above"]], -1)
