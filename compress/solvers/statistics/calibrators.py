"""Calibrators: which range of an activation the codes cover, for scales that are fixed before a model runs.

    minmax            the observed extremes
    moving-average    of each micro-batch's extremes: v += momentum (v_batch - v), from the first micro-batch's
    percentile        the range that holds so many percent of the values          (compress.solvers.statistics.clipping)
    mse               the range of least squared error on the grid                (compress.solvers.statistics.clipping)
    kl                the range of least information loss, TensorRT's entropy     (compress.solvers.statistics.entropy)

Which to take: minmax and percentile for language models, whose outliers carry the result (the entropy search clips
them); kl and mse for convolutions and vision. With `keep_histogram` the range comes with the histogram of all values,
for a report; it is the same range.

    make = calibrator("percentile", Grid(bits=8, granularity="tensor"), percentile=99.9)
    statistic = make(channels, device)         # update, sync and result, as any statistic (`input_statistics`)
    scale, zero_point = scale_and_zero_point(statistic.result(), grid)
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from compress.base.errors import InputError, one_of
from compress.solvers.statistics.clipping import PERCENT
from compress.solvers.statistics.entropy import ZeroBin
from compress.solvers.statistics.histogram import BINS, MAX_BINS, MIN_BINS
from compress.solvers.statistics.input_statistics import StatisticFactory
from compress.solvers.statistics.observers import HistogramObserver, MinMaxObserver, MovingAverageObserver, Range
from compress.weights.grid import Grid, scale_of_range

__all__ = ["OPTIONS", "Range", "calibrator", "scale_and_zero_point"]

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "minmax": {"keep_histogram": False},
    "moving-average": {"momentum": 0.1, "keep_histogram": False},
    "percentile": {"percentile": 99.99, "bins": BINS, "keep_histogram": False},
    "mse": {"bins": BINS, "keep_histogram": False},
    "kl": {"bins": BINS, "zero_bin": "neighbour", "keep_histogram": False},
}


def calibrator(name: str, grid: Grid, **options: Any) -> StatisticFactory:
    """A factory of calibrators: `calibrator("percentile", grid, percentile=99.9)(channels, device)`.

    grid: of the activation; its granularity is tensor or channel. Options and their defaults are in OPTIONS.

    Raises InputError for an unknown name or option, a value out of range, and a grid that no fixed range fits.
    """
    one_of("calibrator", name, OPTIONS)
    _check_grid(name, grid)
    known = OPTIONS[name]
    for key in options:
        one_of(f"option of {name}", key, sorted(known))
    chosen = {**known, **options}
    for key, value in chosen.items():
        _check_option(name, key, value)
    if name == "minmax":
        return partial(MinMaxObserver, grid=grid, **chosen)
    if name == "moving-average":
        return partial(MovingAverageObserver, grid=grid, **chosen)
    return partial(HistogramObserver, grid=grid, method=name, **chosen)


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
