"""A histogram that merges exactly: over micro-batches and ranks, in any order, it is that of one pass bit for bit.

The bins of a row are B per sign, over magnitudes [0, 2^e): bin j holds j <= |x| / w < j + 1 with w = 2^e / B. Zero is
not negative. e is the smallest whole number with every |x| < 2^e, so that more than half of the B bins of the larger
side are in use. Data that needs a larger e adds neighbouring bins in pairs, which is exact because every edge of the
wide bins is an edge of the narrow ones: floor(floor(|x| / w) / 2) = floor(|x| / 2w). Ranks agree on the largest e,
widen, and add. Counts are int64 (an activation of 10^4 channels passes 2^31 values within 10^6 tokens).

Memory: 16 B bytes a row, 32 KiB at 2048 bins; per channel of a layer of 4096 inputs that is 128 MiB.
Shapes: R rows (1 per tensor, K per channel), M tokens, K channels, B bins per sign; the axis of 2 is (negative, rest).
"""

import torch
from torch import Tensor

from compress.base.collectives import Comm

BINS = 2048
MIN_BINS, MAX_BINS = 512, 2**16
# Bins are never narrower than 2^-127: no scale is below 2^-126, the smallest normal float32, and 1 / w stays finite.
LEAST_WIDTH = -127
MERGED_PER_OCTAVE = 16
CHUNK = 2**22  # values indexed at a time: the indices take 8 bytes each


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, from its bits: a library's pow may be off in the last place."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


class MagnitudeHistogram:
    """Counts of values by sign and magnitude: counts [R, 2, B] int64, exponent [R] int64."""

    def __init__(self, rows: int, device: torch.device, bins: int = BINS) -> None:
        self.bins = bins
        self.octaves = bins.bit_length() - 1
        self.counts = torch.zeros(rows, 2, bins, dtype=torch.int64, device=device)
        self.exponent = torch.full((rows,), LEAST_WIDTH + self.octaves, dtype=torch.int64, device=device)

    @property
    def width(self) -> Tensor:
        """Width of a bin [R], float64."""
        return power_of_two(self.exponent - self.octaves)

    def update(self, x_MK: Tensor, absmax_R: Tensor) -> None:
        """Count finite values, all of them into one row or each channel into its own. absmax: their largest |x|."""
        # For magnitudes the biased exponent of float32 less 126 is the e of 2^(e-1) <= |x| < 2^e.
        self.grow((absmax_R.float().view(torch.int32) >> 23).to(torch.int64) - 126)
        rows, channels = len(self.counts), x_MK.shape[1]
        per_width = power_of_two(self.octaves - self.exponent).float()  # exact, and so is the product below
        first = torch.arange(rows, device=x_MK.device) * (2 * self.bins)
        flat = self.counts.view(-1)
        for part in x_MK.split(max(1, CHUNK // max(channels, 1))):
            x = part.float()
            index = (x.abs() * per_width).to(torch.int64)
            index += torch.where(x < 0, 0, self.bins) + first
            if rows == 1:  # few counters for many values: bincount is made for it
                flat += torch.bincount(index.view(-1), minlength=len(flat))
            else:
                flat.scatter_add_(0, index.view(-1), torch.ones_like(index).view(-1))

    def grow(self, exponent_R: Tensor) -> None:
        """Widen the range of the rows whose exponent is below the given one."""
        missing = (exponent_R - self.exponent).clamp(min=0)
        rows = missing.nonzero().squeeze(1)
        if not len(rows):
            return
        self.counts[rows] = widen(self.counts[rows], missing[rows])
        self.exponent += missing

    def sync(self, comm: Comm) -> None:
        """Add the other ranks' counts."""
        self.grow(comm.all_reduce(self.exponent.clone(), "max"))
        comm.all_reduce(self.counts)


def widen(counts_R2B: Tensor, octaves_R: Tensor) -> Tensor:
    """[R, 2, B] the same values counted in bins that are 2^octaves as wide."""
    bins = counts_R2B.shape[-1]
    shift = octaves_R.clamp(max=bins.bit_length() - 1)  # with this shift every value is in bin 0
    target = torch.arange(bins, device=counts_R2B.device) >> shift[:, None]
    return torch.zeros_like(counts_R2B).scatter_add_(2, target[:, None].expand(-1, 2, -1), counts_R2B)


def pool(counts_R2B: Tensor, width_R: Tensor) -> tuple[Tensor, float]:
    """(counts [2, B], width) of the values of all rows together, in the bins of the row whose bins are widest."""
    exponent = torch.frexp(width_R).exponent
    return widen(counts_R2B, (exponent.max() - exponent).to(torch.int64)).sum(0), float(width_R.max())


def merged_edge(index: int) -> int:
    """The lower edge of bin `index` of a merged histogram, in widths of the bins that were merged.

    The first 16 bins keep their width; then every octave of magnitudes has 16 bins, each twice as wide as those before:
    a histogram of 2048 bins becomes one of 128 that tells magnitudes apart to a sixteenth wherever they lie.
    """
    octave, place = divmod(index, MERGED_PER_OCTAVE)
    return index if octave == 0 else (MERGED_PER_OCTAVE + place) << (octave - 1)


def merge_bins(counts_2B: Tensor) -> tuple[list[int], list[int]]:
    """(negative, rest): exact counts in merged bins from zero outwards, without the empty ones at the end."""
    bins = counts_2B.shape[-1]
    octaves = (bins // MERGED_PER_OCTAVE).bit_length()
    edges = torch.tensor([merged_edge(i) for i in range(octaves * MERGED_PER_OCTAVE + 1)], device=counts_2B.device)
    below = torch.nn.functional.pad(counts_2B.cumsum(-1), (1, 0))
    negative, rest = (side[: int(used_bins(side))].tolist() for side in below[:, edges].diff(dim=-1))
    return negative, rest


def used_bins(counts_B: Tensor) -> Tensor:
    """Number of bins up to the last that holds something, over the last dimension."""
    upto = torch.arange(1, counts_B.shape[-1] + 1, device=counts_B.device)
    return (upto * (counts_B > 0)).amax(-1)


def in_order(counts_R2B: Tensor) -> Tensor:
    """[R, 2B]: the bins by value, the most negative first; zero is the lower edge of bin B."""
    return torch.cat([counts_R2B[:, 0].flip(-1), counts_R2B[:, 1]], -1)


def fold_sides(counts_R2B: Tensor, signed: bool) -> Tensor:
    """[R, B] for a symmetric range: of |x|, or (unsigned) of max(x, 0)."""
    if signed:
        return counts_R2B.sum(1)
    positive = counts_R2B[:, 1].clone()
    positive[:, 0] += counts_R2B[:, 0].sum(-1)
    return positive
