"""RTN: round every weight to the nearest point of its grid; the baseline of every other pass.

Needs no calibration data, unless the range of inputs or outputs is to be fixed beforehand (activations=static,
outputs=static).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from compress.passes.options.quantize import QuantizeWeights
from compress.passes.protocol.sites import Site
from compress.solvers.loss import weight_error
from compress.solvers.outliers import nearest
from compress.weights.decision import Decision
from compress.weights.grid import Grid
from compress.weights.rounding import ActivationCodes


@dataclass(frozen=True, kw_only=True)
class RTN(QuantizeWeights):
    """Round to nearest."""

    name: ClassVar[str] = "rtn"
    keeps_zeros: ClassVar[bool] = True
    in_blocks: ClassVar[bool] = True

    def apply(self, site: Site) -> dict[str, Decision]:
        return round_to_nearest(site, self.weight_grid(), self.input_codes(site), self.outliers)


def round_to_nearest(
    site: Site, grid: Grid, inputs: Mapping[str, ActivationCodes], outliers: float = 0.0
) -> dict[str, Decision]:
    """Every layer of a site by itself, each weight to the nearest point of the grid. inputs: how those are rounded.
    outliers: the share of weights that stay exact."""
    decisions = {}
    for name, weight in site.weights.items():
        rounded = nearest(weight, grid, site.scale_dtypes[name], outliers)
        decisions[name] = Decision(rounded, {"weight_error": weight_error(weight, rounded)}, inputs.get(name))
    return decisions
