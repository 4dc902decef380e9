"""RTN: round every weight to the nearest point of its grid; the baseline of every other pass.

Needs no calibration data, unless the range of inputs or outputs is to be fixed beforehand (activations=static,
outputs=static).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from compress.passes.quantize import QuantizeWeights
from compress.passes.sites import Site
from compress.weights.decision import Decision
from compress.weights.grid import Grid, quantize, working_dtype
from compress.weights.rounding import ActivationCodes


@dataclass(frozen=True, kw_only=True)
class RTN(QuantizeWeights):
    """Round to nearest."""

    name: ClassVar[str] = "rtn"
    keeps_zeros: ClassVar[bool] = True

    def apply(self, site: Site) -> dict[str, Decision]:
        return round_to_nearest(site, self.weight_grid(), self.input_codes(site))


def round_to_nearest(site: Site, grid: Grid, inputs: Mapping[str, ActivationCodes]) -> dict[str, Decision]:
    """Every layer of a site by itself, each weight to the nearest point of the grid. inputs: how those are rounded."""
    decisions = {}
    for name, weight in site.weights.items():
        quantized = quantize(weight, grid, site.scale_dtypes[name])
        exact = weight.to(working_dtype(weight))
        error = (quantized.dequantize(exact.dtype) - exact).norm() / exact.norm().clamp(min=1e-30)
        decisions[name] = Decision(quantized, {"weight_error": float(error)}, inputs.get(name))
    return decisions
