"""Calibrators: statistics whose result is the range of an activation, for scales that are fixed before a model runs.

    minmax            the observed extremes
    moving-average    of each micro-batch's extremes: v += momentum (v_batch - v), from the first micro-batch's
    percentile        the range that holds so many percent of the values          (compress.clipping)
    mse               the range of least squared error on the grid                (compress.clipping)
    kl                the range of least information loss, TensorRT's entropy     (compress.entropy)

Which to take: minmax and percentile for language models, whose outliers carry the result (the entropy search clips
them); kl and mse for convolutions and vision.

Batches and ranks make no difference, bit for bit. The extremes and the histograms do not depend on an order. The
moving average does: it keeps the extremes of every micro-batch and takes the j-th update of rank r of W for micro-batch
j W + r, as `quantize` deals them out. It must therefore be updated once per micro-batch, with no rows where no token
reached the layer.

Values that are not finite are not counted; `result` then raises CompressError. That is after `sync`, where every rank
learns of it, so that all of them raise and none is left waiting in a collective.

Shapes: R rows, 1 per tensor or K per channel; M tokens, K channels, T micro-batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from compress.clipping import PERCENT, bounds, mse_bins, percentile_bins
from compress.comm import Comm
from compress.entropy import ZeroBin, kl_bins
from compress.errors import CompressError, InputError, one_of
from compress.grid import Grid, scale_of_range
from compress.histogram import BINS, MAX_BINS, MIN_BINS, Histogram
from compress.stats import Statistic, StatisticFactory

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "minmax": {},
    "moving-average": {"momentum": 0.1},
    "percentile": {"percentile": 99.99, "bins": BINS, "keep_histogram": False},
    "mse": {"bins": BINS, "keep_histogram": False},
    "kl": {"bins": BINS, "zero_bin": "neighbour", "keep_histogram": False},
}


@dataclass(frozen=True)
class Range:
    """What a calibrator found, float32 [1] (per tensor) or [K] (per channel); all 0 where no token was seen.

    lo <= 0 <= hi; lo = -hi for a symmetric grid, lo = 0 for an unsigned symmetric one. lowest, highest: the observed
    extremes. clipped: share of the values beyond lo or hi, counted in whole bins (a value on a bound that is an inner
    edge counts as beyond); None where nothing counted them. counts [R, 2, B] and width [R]: the histogram, if kept
    (compress.histogram tells its layout).
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


class MinMaxCalibrator:
    """The observed extremes, and what every calibrator shares: counting tokens and noticing non-finite values."""

    method = "minmax"

    def __init__(self, channels: int, device: torch.device, grid: Grid) -> None:
        self.grid = grid
        self.rows = 1 if grid.granularity == "tensor" else channels
        # Infinities are what no value gives: an infinite value is refused.
        self.lowest = torch.full((self.rows,), float("inf"), device=device)
        self.highest = torch.full((self.rows,), float("-inf"), device=device)
        self.damaged = torch.zeros((), dtype=torch.int64, device=device)
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, x_MK: Tensor, reference_MK: Tensor | None) -> None:
        lowest, highest = torch.full_like(self.lowest, float("inf")), torch.full_like(self.highest, float("-inf"))
        if x_MK.numel():
            low_K, high_K = (extreme.float() for extreme in torch.aminmax(x_MK, dim=0))
            if not bool((low_K.isfinite() & high_K.isfinite()).all()):
                self.damaged += 1
                return
            if self.rows == 1:
                low_K, high_K = low_K.amin(0, keepdim=True), high_K.amax(0, keepdim=True)
            lowest, highest = low_K, high_K
        self.tokens += len(x_MK)
        self.lowest = torch.minimum(self.lowest, lowest)
        self.highest = torch.maximum(self.highest, highest)
        self.count(x_MK, lowest, highest)

    def count(self, x_MK: Tensor, lowest_R: Tensor, highest_R: Tensor) -> None:
        """Take in a micro-batch of finite values with its extremes (inf, -inf where it has no token)."""

    def sync(self, comm: Comm) -> None:
        comm.all_reduce(self.lowest, "min")
        comm.all_reduce(self.highest, "max")
        comm.all_reduce(self.damaged)
        comm.all_reduce(self.tokens)

    def result(self) -> Range:
        if int(self.damaged):
            raise CompressError(
                f"{int(self.damaged)} micro-batches of calibration hold non-finite values; the model overflows in this "
                "dtype or its weights are damaged"
            )
        unseen = self.lowest > self.highest
        lowest, highest = self.lowest.masked_fill(unseen, 0.0), self.highest.masked_fill(unseen, 0.0)
        return self.choose(lowest, highest)

    def choose(self, lowest_R: Tensor, highest_R: Tensor) -> Range:
        """The finished range, from the observed extremes and what was counted."""
        everything = bounds(*_no_limit(lowest_R), lowest_R, highest_R, self.grid)
        cut = self.grid.symmetric and not self.grid.signed and bool((lowest_R < 0).any())
        return self.made(everything, lowest_R, highest_R, None if cut else torch.zeros_like(lowest_R))

    def made(self, found: tuple[Tensor, Tensor], lowest: Tensor, highest: Tensor, clipped: Tensor | None) -> Range:
        lo, hi = (bound.float() + 0.0 for bound in found)  # + 0: never -0
        return Range(lo, hi, lowest, highest, clipped, self.method, int(self.tokens))


class MovingAverageCalibrator(MinMaxCalibrator):
    """The moving average of the micro-batches' extremes. Keeps 8 R bytes per micro-batch."""

    method = "moving-average"

    def __init__(self, channels: int, device: torch.device, grid: Grid, *, momentum: float) -> None:
        super().__init__(channels, device, grid)
        self.momentum = momentum
        self.extremes: list[Tensor] = []

    def count(self, x_MK: Tensor, lowest_R: Tensor, highest_R: Tensor) -> None:
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


class HistogramCalibrator(MinMaxCalibrator):
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
        super().__init__(channels, device, grid)
        self.method, self.keep, self.how = method, keep_histogram, how
        self.histogram = Histogram(self.rows, device, bins)

    def count(self, x_MK: Tensor, lowest_R: Tensor, highest_R: Tensor) -> None:
        if x_MK.numel():
            self.histogram.update(x_MK, torch.maximum(lowest_R.abs(), highest_R.abs()))

    def sync(self, comm: Comm) -> None:
        super().sync(comm)
        self.histogram.sync(comm)

    def choose(self, lowest_R: Tensor, highest_R: Tensor) -> Range:
        counts, width = self.histogram.counts, self.histogram.width
        if self.method == "percentile":
            kept = percentile_bins(counts, self.grid, **self.how)
        elif self.method == "mse":
            kept = mse_bins(counts, width, lowest_R, highest_R, self.grid)
        else:
            kept = kl_bins(counts, self.grid, **self.how)
        below, above = kept.unbind(-1)
        outside = torch.arange(self.histogram.bins, device=kept.device) >= kept[:, :, None]
        share = (counts * outside).sum((1, 2)) / counts.sum((1, 2)).clamp(min=1)
        found = self.made(bounds(below, above, width, lowest_R, highest_R, self.grid), lowest_R, highest_R, share)
        if not self.keep:
            return found
        return Range(**{**vars(found), "counts": counts, "width": width})


def _no_limit(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(below, above, width) that keep everything."""
    unlimited = torch.full_like(like, float("inf"), dtype=torch.float64)
    return unlimited, unlimited, torch.ones_like(unlimited)


def calibrator(name: str, grid: Grid, **options: Any) -> StatisticFactory:
    """A factory of calibrators: `calibrator("percentile", grid, percentile=99.9)(channels, device)`.

    grid: of the activation; its granularity is tensor or channel. Options and their defaults are in OPTIONS.

    Raises InputError for an unknown name or option, a value out of range, and a grid that no fixed range fits.
    """
    one_of("calibrator", name, OPTIONS)
    _check_grid(name, grid)
    known = OPTIONS[name]
    for key in options:
        if not known:
            raise InputError(f"option {key!r} of {name}, which has none; leave it out")
        one_of(f"option of {name}", key, known)
    chosen = {**known, **options}
    for key, value in chosen.items():
        _check_option(name, key, value)
    if name == "minmax":
        return partial(_make, MinMaxCalibrator, grid, chosen)
    if name == "moving-average":
        return partial(_make, MovingAverageCalibrator, grid, chosen)
    return partial(_make, HistogramCalibrator, grid, {"method": name, **chosen})


def _make(
    kind: type[MinMaxCalibrator], grid: Grid, options: Mapping[str, Any], channels: int, device: torch.device
) -> Statistic:
    return kind(channels, device, grid, **options)


def _check_grid(name: str, grid: Grid) -> None:
    if grid.granularity not in ("tensor", "channel"):
        raise InputError(
            f"granularity {grid.granularity!r} of a calibrated range; allowed: tensor, channel (the ranges of tokens "
            "and groups are measured while the model runs)"
        )
    if grid.signed_scale:
        raise InputError("a signed scale for a calibrated range; the sign is of one element, and a range has none")
    if grid.floating and name == "kl":
        raise InputError("calibrator 'kl' compares with evenly spaced codes, which floats are not; use mse or minmax")
    if grid.range_choice != "minmax":
        raise InputError(
            f"range choice {grid.range_choice!r} beside a calibrator, which chooses the range; leave it at 'minmax'"
        )


def _check_option(name: str, key: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    allowed = {
        "momentum": (number and 0 < value <= 1, "a number above 0, up to 1"),
        "percentile": (number and 50 < value <= 100, f"a number above 50, up to 100 (told apart to {1 / PERCENT:g})"),
        "bins": (
            type(value) is int and MIN_BINS <= value <= MAX_BINS and value.bit_count() == 1,
            f"powers of two from {MIN_BINS} to {MAX_BINS}",
        ),
        "zero_bin": (value in get_args(ZeroBin), " or ".join(map(repr, get_args(ZeroBin)))),
        "keep_histogram": (isinstance(value, bool), "True or False"),
    }
    fits, what = allowed[key]
    if not fits:
        raise InputError(f"option {key} of {name} is {value!r}; allowed: {what}")


def scale_and_zero_point(found: Range, grid: Grid, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(scale, zero_point) of a range, [1] or [K] float32: the scale rounded to `scale_dtype`, zero points whole.

    They broadcast along the last dimension of tokens [M, K] in `grid.encode` and `grid.decode`.
    """
    # In float64: hi - lo of the largest float32 numbers is none of them.
    scale, zero_point = scale_of_range(found.lo.double(), found.hi.double(), grid, scale_dtype)
    return scale.float(), zero_point.float()
