"""The options of ranges that calibration fixes: of activations, and of key-value caches."""

from dataclasses import dataclass

from compress.base.errors import InputError, one_of
from compress.passes.protocol.base import Pass
from compress.solvers.statistics.calibrators import OPTIONS as CALIBRATORS
from compress.solvers.statistics.calibrators import calibrator
from compress.solvers.statistics.input_statistics import StatisticFactory
from compress.weights.grid import Grid

PERCENTILE = 99.99


@dataclass(frozen=True, kw_only=True)
class FixedRanges(Pass):
    """A pass that may fix ranges by calibration (`compress.solvers.statistics.calibrators`)."""

    calibrator: str = "minmax"
    """minmax, moving-average, percentile, mse, kl: how static ranges are found."""

    percentile: float = PERCENTILE
    """above 50, up to 100: percent of values inside the range, for calibrator=percentile."""

    histograms: bool = False
    """Keep a histogram of the calibrated values, for `compress inspect OUT --calibration`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("calibrator", self.calibrator, CALIBRATORS)
        if self.calibrator != "percentile" and self.percentile != PERCENTILE:
            raise InputError(f"percentile is of the calibrator 'percentile', not of {self.calibrator!r}; leave it out")

    def fixed_range(self, grid: Grid) -> StatisticFactory:
        """The statistic that finds a fixed range of values on a grid."""
        options = {"percentile": self.percentile} if self.calibrator == "percentile" else {}
        return calibrator(self.calibrator, grid, keep_histogram=self.histograms, **options)
