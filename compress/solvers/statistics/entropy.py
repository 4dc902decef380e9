"""The range of least information loss: TensorRT's entropy calibration.

Migacz, "8-bit inference with TensorRT", GTC 2017. For every number i of bins that a range may keep:

    P = the first i bins, with everything beyond added to the last of them
    Q = the first i bins as they are, merged into L levels and spread again: a level's mass goes in equal parts to
        those of its bins that hold something
    loss = KL(P || Q), both made to sum to 1

L is the number of codes for the side: 2^(b-1) for |x|, 2^b for data that is never negative. i runs from L to the bins
in use; where these are fewer than L there is no choice. Level of bin k: floor(k L / i).

Where the definition leaves room:
- Zeros. Where P and Q are both zero a bin adds nothing. Where only Q is, KL is infinite and the candidate is out: the
  last bin it keeps is empty while values lie beyond it. Nothing is smoothed. The bins in use always remain.
- Ties. Of candidates within 1e-9 nat of the least the widest wins (NVIDIA's ModelOpt: the last argmin).
- The bin at zero. The talk says nothing; ModelOpt gives it the count of its neighbour, so that a spike at zero (ReLU,
  padding, a GELU's flat end), which every grid holds exactly, does not decide. "neighbour", the default, does so too;
  "keep" is the talk's method to the letter. Signed, it is the bin of zero and the smallest positive values.
- The threshold is the outer edge of the last bin kept (the talk: its centre), at most the observed extreme.
- Asymmetric (the talk has none): both ends of the observed range shrink together. Of i bins, floor(i below / n) lie
  below zero, where n = below + above are the bins in use; values beyond either end are added to the first and the last
  bin of P; Q has L = 2^b levels over the i bins. A long tail at one end therefore shrinks the other with it.

Computed from prefix sums, O(bins x L) for all candidates: with H the counts, M the mass and N the filled bins of a
level, o the values beyond, T = sum P and W = sum Q,

    KL = (sum P log P - sum_levels M log(M/N) - o_first log(M/N)_first - o_last log(M/N)_last) / T - log T + log W

Shapes: R rows, A bins along the axis that is searched, p a (row, candidate) pair, L levels.
"""

from typing import Literal

import torch
from torch import Tensor

from compress.solvers.statistics.clipping import BUDGET, TIE, observed_bins, widest_of_least
from compress.solvers.statistics.histogram import fold_sides, in_order
from compress.weights.grid import Grid

ZeroBin = Literal["neighbour", "keep"]


def kl_bins(counts_R2B: Tensor, grid: Grid, zero_bin: ZeroBin = "neighbour") -> Tensor:
    """[R, 2] bins kept below and above zero by the range of least divergence."""
    all_R2 = observed_bins(counts_R2B, grid)
    if grid.symmetric:
        counts_RA, zero, levels = fold_sides(counts_R2B, grid.signed), 0, 2 ** (grid.bits - int(grid.signed))
        below, above = torch.zeros_like(all_R2[:, 1]), all_R2[:, 1]
    else:
        counts_RA, zero, levels = in_order(counts_R2B), counts_R2B.shape[-1], 2**grid.bits
        below, above = all_R2.unbind(-1)
    if zero_bin == "neighbour":
        counts_RA = counts_RA.clone()
        counts_RA[:, zero] = counts_RA[:, zero + 1]
    total = below + above
    kept = least_divergence(counts_RA, zero, below, total, levels)
    kept_below = below * kept // total.clamp(min=1)
    kept_above = kept - kept_below
    return torch.stack([kept_above if grid.symmetric and grid.signed else kept_below, kept_above], -1)


def least_divergence(counts_RA: Tensor, zero: int, below_R: Tensor, total_R: Tensor, levels: int) -> Tensor:
    """[R] the number of bins around bin `zero` that lose least; at most `total`, `below` of which lie before it."""
    longest = int(total_R.max())
    candidates = longest - levels + 1
    if candidates < 1:
        return total_R
    rows, device = len(counts_RA), counts_RA.device
    sums, losses = _Prefix(counts_RA), []
    for pair in torch.arange(rows * candidates, device=device).split(max(1, BUDGET // (levels + 1))):
        row, length = pair // candidates, longest - pair % candidates  # the widest first
        start = zero - below_R[row] * length // total_R[row].clamp(min=1)
        # A row with fewer bins in use has fewer candidates; the others are computed on some window, then left out.
        inside = length <= total_R[row]
        length, start = length.where(inside, levels), start.where(inside, 0)
        losses.append(sums.divergence(row, start, length, levels).masked_fill(~inside, float("inf")))
    losses_RC = torch.cat(losses).view(rows, candidates)
    lengths = torch.arange(longest, levels - 1, -1, device=device).expand(rows, -1)
    return widest_of_least(losses_RC, lengths, TIE).where(losses_RC.isfinite().any(-1), total_R)


class _Prefix:
    """Sums over the bins before each edge, of which the divergence of any window is made."""

    def __init__(self, counts_RA: Tensor) -> None:
        self.counts = counts_RA
        mass = counts_RA.double()
        self.mass = _before(counts_RA)
        self.filled = _before((counts_RA > 0).to(torch.int64))
        self.mass_log_mass = _before(torch.xlogy(mass, mass))

    def divergence(self, row: Tensor, start: Tensor, length: Tensor, levels: int) -> Tensor:
        """[p] KL(P || Q) in nats of windows of counts[row], infinite where Q is zero and P is not."""
        end = start + length
        level = torch.arange(levels + 1, device=row.device)
        edge = start[:, None] + (level * length[:, None] + levels - 1) // levels  # the first bin of every level
        mass_pL = self.mass[row[:, None], edge].diff(dim=-1).double()
        filled_pL = self.filled[row[:, None], edge].diff(dim=-1)
        mean_pL = mass_pL / filled_pL.clamp(min=1)
        total = self.mass[row, -1].double()
        first, last = self.counts[row, start].double(), self.counts[row, end - 1].double()
        before = self.mass[row, start].double()
        after = total - self.mass[row, end].double()
        own = self.mass_log_mass[row, end] - self.mass_log_mass[row, start]
        for count, outside in ((first, before), (last, after)):
            own += torch.xlogy(count + outside, count + outside) - torch.xlogy(count, count)
        cross = torch.xlogy(mass_pL, mean_pL).sum(-1)
        cross += torch.xlogy(before, mean_pL[:, 0]) + torch.xlogy(after, mean_pL[:, -1])
        window = total - before - after
        missed = ((before > 0) & (first == 0)) | ((after > 0) & (last == 0)) | (window == 0)
        return ((own - cross) / total - total.log() + window.log()).masked_fill(missed, float("inf"))


def _before(values_RA: Tensor) -> Tensor:
    """[R, A + 1] the sum of the values before each edge."""
    return torch.nn.functional.pad(values_RA.cumsum(-1), (1, 0))
