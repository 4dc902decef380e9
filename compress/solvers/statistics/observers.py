"""Observers: statistics whose result is a range, the same on any number of ranks bit for bit.

The extremes and the histograms do not depend on an order. The moving average does: it keeps the extremes of every
micro-batch and takes the j-th update of rank r of W for micro-batch j W + r, as `quantize` deals them out. It must
therefore be updated once per micro-batch, with no rows where no token reached the layer.

Values that are not finite are not counted; `result` then raises CompressError. That is after `sync`, where every rank
learns of it, so that all of them raise and none is left waiting in a collective.

Shapes: R rows, 1 per tensor or K per channel; M tokens, K channels, B bins per sign.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.base.errors import CompressError
from compress.solvers.statistics.clipping import bounds, mse_bins, percentile_bins
from compress.solvers.statistics.entropy import kl_bins
from compress.solvers.statistics.histogram import MagnitudeHistogram
from compress.weights.grid import Grid


@dataclass(frozen=True)
class Range:
    """The range that an observer chose, float32 [1] (per tensor) or [K] (per channel); all 0 where no token was seen.

    lo <= 0 <= hi; lo = -hi for a symmetric grid, lo = 0 for an unsigned symmetric one. lowest, highest: the observed
    extremes. clipped: share of the values beyond lo or hi, counted in whole bins (a value on a bound that is an inner
    edge counts as beyond; of a moving average, whose bounds lie inside bins, only the bins wholly beyond: at least so
    many); None where nothing counted them. counts [R, 2, B] and width [R]: the histogram, if kept
    (compress.solvers.statistics.histogram tells its layout).
    """

    lo: Tensor
    hi: Tensor
    lowest: Tensor
    highest: Tensor
    clipped: Tensor | None
    method: str
    tokens: int
    counts: Tensor | None = None
    width: Tensor | None = None


class MinMaxObserver:
    """The observed extremes. Base class of the observers: counts tokens and notices non-finite values."""

    method = "minmax"
    reads_elements = True  # of a convolution's input, each once; not the patches, which overlap and hold the padding

    def __init__(self, channels: int, device: torch.device, grid: Grid, *, keep_histogram: bool = False) -> None:
        self.grid, self.keep = grid, keep_histogram
        self.rows = 1 if grid.granularity == "tensor" else channels
        # Infinities mark rows without a value: an infinite value is refused.
        self.lowest = torch.full((self.rows,), float("inf"), device=device)
        self.highest = torch.full((self.rows,), float("-inf"), device=device)
        self.histogram = MagnitudeHistogram(self.rows, device) if keep_histogram else None
        self.damaged = torch.zeros((), dtype=torch.int64, device=device)
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, x_MK: Tensor, reference_MK: Tensor | None) -> None:
        lowest, highest = torch.full_like(self.lowest, float("inf")), torch.full_like(self.highest, float("-inf"))
        if x_MK.numel():
            # + 0: -0 is 0. Which of the two a minimum returns depends on the order.
            low_K, high_K = (extreme.float() + 0.0 for extreme in torch.aminmax(x_MK, dim=0))
            if not bool((low_K.isfinite() & high_K.isfinite()).all()):
                self.damaged += 1
                return
            if self.rows == 1:
                low_K, high_K = low_K.amin(0, keepdim=True), high_K.amax(0, keepdim=True)
            lowest, highest = low_K, high_K
        self.tokens += len(x_MK)
        self.lowest = torch.minimum(self.lowest, lowest)
        self.highest = torch.maximum(self.highest, highest)
        if self.histogram is not None and x_MK.numel():
            self.histogram.update(x_MK, torch.maximum(lowest.abs(), highest.abs()))
        self.count(lowest, highest)

    def count(self, lowest_R: Tensor, highest_R: Tensor) -> None:
        """Take in the extremes of a micro-batch of finite values (inf, -inf where it has no token)."""

    def sync(self, comm: Comm) -> None:
        comm.all_reduce(self.lowest, "min")
        comm.all_reduce(self.highest, "max")
        comm.all_reduce(self.damaged)
        comm.all_reduce(self.tokens)
        if self.histogram is not None:
            self.histogram.sync(comm)

    def result(self) -> Range:
        if int(self.damaged):
            raise CompressError(
                f"calibration holds non-finite values (micro-batches with them: {int(self.damaged)}); the model "
                "overflows in this dtype or its weights are damaged"
            )
        unseen = self.lowest > self.highest
        lowest, highest = self.lowest.masked_fill(unseen, 0.0), self.highest.masked_fill(unseen, 0.0)
        found = self.choose(lowest, highest)
        if self.histogram is None or not self.keep:
            return found
        return replace(found, counts=self.histogram.counts, width=self.histogram.width)

    def choose(self, lowest_R: Tensor, highest_R: Tensor) -> Range:
        """The finished range, from the observed extremes and the counts."""
        everything = bounds(*_no_limit(lowest_R), lowest_R, highest_R, self.grid)
        cut = self.grid.symmetric and not self.grid.signed and bool((lowest_R < 0).any())
        return self.made(everything, lowest_R, highest_R, None if cut else torch.zeros_like(lowest_R))

    def made(self, found: tuple[Tensor, Tensor], lowest: Tensor, highest: Tensor, clipped: Tensor | None) -> Range:
        lo, hi = (bound.float() + 0.0 for bound in found)  # + 0: never -0
        if clipped is None and self.histogram is not None:
            clipped = share_beyond(self.histogram.counts, bins_reached(lo, hi, self.histogram.width))
        return Range(lo, hi, lowest, highest, clipped, self.method, int(self.tokens))


class MovingAverageObserver(MinMaxObserver):
    """The moving average of the micro-batches' extremes. Keeps 8 R bytes per micro-batch."""

    method = "moving-average"

    def __init__(
        self, channels: int, device: torch.device, grid: Grid, *, momentum: float, keep_histogram: bool = False
    ) -> None:
        super().__init__(channels, device, grid, keep_histogram=keep_histogram)
        self.momentum = momentum
        self.extremes: list[Tensor] = []

    def count(self, lowest_R: Tensor, highest_R: Tensor) -> None:
        self.extremes.append(torch.stack([lowest_R, highest_R]))

    def sync(self, comm: Comm) -> None:
        super().sync(comm)
        longest = int(comm.all_reduce(torch.tensor(len(self.extremes), device=self.lowest.device), "max"))
        # Every rank fills its places in the order of all micro-batches. A maximum with -inf changes no value; the
        # places that nobody fills (ranks differ by one micro-batch) stay at -inf, which is no token.
        places = torch.full((longest * comm.world, 2, self.rows), float("-inf"), device=self.lowest.device)
        for j, extremes in enumerate(self.extremes):
            places[j * comm.world + comm.rank] = extremes
        self.extremes = list(comm.all_reduce(places, "max"))

    def choose(self, lowest_R: Tensor, highest_R: Tensor) -> Range:
        average: Tensor | None = None
        for extremes in self.extremes:
            if bool(extremes.isfinite().all()):
                value = extremes.double()
                average = value if average is None else average + self.momentum * (value - average)
        if average is None:
            average = torch.stack([lowest_R, highest_R]).double()
        lo, hi = average
        return self.made(bounds(*_no_limit(lo), lo, hi, self.grid), lowest_R, highest_R, None)


class HistogramObserver(MinMaxObserver):
    """A range chosen from the histogram of all values."""

    def __init__(
        self,
        channels: int,
        device: torch.device,
        grid: Grid,
        *,
        method: str,
        bins: int,
        keep_histogram: bool,
        **how: Any,
    ) -> None:
        super().__init__(channels, device, grid, keep_histogram=keep_histogram)
        self.method, self.how = method, how
        self.histogram = MagnitudeHistogram(self.rows, device, bins)

    def choose(self, lowest_R: Tensor, highest_R: Tensor) -> Range:
        assert self.histogram is not None
        counts, width = self.histogram.counts, self.histogram.width
        if self.method == "percentile":
            bins = percentile_bins(counts, self.grid, **self.how)
        elif self.method == "mse":
            bins = mse_bins(counts, width, lowest_R, highest_R, self.grid)
        else:
            bins = kl_bins(counts, self.grid, **self.how)
        below, above = bins.unbind(-1)
        share = share_beyond(counts, bins)
        return self.made(bounds(below, above, width, lowest_R, highest_R, self.grid), lowest_R, highest_R, share)


def share_beyond(counts_R2B: Tensor, kept_R2: Tensor) -> Tensor:
    """[R] the share of the values that lie outside the bins kept on each side of zero, float32."""
    outside = torch.arange(counts_R2B.shape[-1], device=kept_R2.device) >= kept_R2[:, :, None]
    return (counts_R2B * outside).sum((1, 2)) / counts_R2B.sum((1, 2)).clamp(min=1)


def bins_reached(lo_R: Tensor, hi_R: Tensor, width_R: Tensor) -> Tensor:
    """[R, 2] = (below, above): the bins that a range touches. Values outside of these bins lie beyond the range for
    certain. A bound of 0 touches the bin of zero, which holds no negative value."""
    below = torch.where(lo_R < 0, (-lo_R.double() / width_R).floor() + 1, 0.0)
    return torch.stack([below, (hi_R.double() / width_R).floor() + 1], -1)


def _no_limit(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(below, above, width) that keep everything."""
    unlimited = torch.full_like(like, float("inf"), dtype=torch.float64)
    return unlimited, unlimited, torch.ones_like(unlimited)
