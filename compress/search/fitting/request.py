"""The request to `fit`: a model, a target and texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compress.checkpoint.portable_names import shown
from compress.checkpoint.read.source import find_source
from compress.jobs.forecast.forecast import Forecast, plan
from compress.passes.protocol.base import Pass
from compress.search.fitting.target import FitTarget


@dataclass(frozen=True)
class FitTexts:
    """The data of `fit`. calibration: as `quantize` takes it, with `how`. rows: held-out token ids [windows, length],
    of `source`. windows: (number, tokens) of the calibration data."""

    calibration: str | Tensor
    how: dict[str, Any]
    rows: Tensor
    source: str
    windows: tuple[int, int]


@dataclass(frozen=True)
class FitAsked:
    """The request to `fit`. shared: `device` and `trust_remote_code`."""

    model: str
    target: FitTarget
    texts: FitTexts
    ignore: Sequence[str]
    batch_size: int
    shared: dict[str, Any]

    def planned(self, passes: Pass | Sequence[Pass], samples: int | None = None, length: int | None = None) -> Forecast:
        """The forecast of a run of these passes on the model. samples, length: as in `plan`."""
        return plan(
            self.model,
            passes,
            ignore=self.ignore,
            samples=samples,
            length=length,
            trust_remote_code=self.shared["trust_remote_code"],
        )

    @property
    def name(self) -> str:
        """The model's, as a person calls it."""
        return shown(find_source(self.model, self.shared["trust_remote_code"]).name)
