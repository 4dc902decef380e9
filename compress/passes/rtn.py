"""RTN: round every weight to the nearest point of its grid; the baseline of every other pass.

Needs no calibration data, unless the range of inputs or outputs is to be fixed beforehand (activations=static,
outputs=static).
"""

from dataclasses import dataclass
from typing import ClassVar

from compress.passes.base import Site
from compress.passes.quantize import QuantizeWeights
from compress.weights.decision import Decision
from compress.weights.grid import quantize, working_dtype


@dataclass(frozen=True, kw_only=True)
class RTN(QuantizeWeights):
    """Round to nearest."""

    name: ClassVar[str] = "rtn"

    def apply(self, site: Site) -> dict[str, Decision]:
        return round_to_nearest(site, self)


def round_to_nearest(site: Site, options: QuantizeWeights) -> dict[str, Decision]:
    """Every layer of a site by itself, each weight to the nearest point of its grid."""
    decisions = {}
    inputs = options.input_codes(site)
    for name, weight in site.weights.items():
        quantized = quantize(weight, options.weight_grid(), site.scale_dtypes[name])
        exact = weight.to(working_dtype(weight))
        error = (quantized.dequantize(exact.dtype) - exact).norm() / exact.norm().clamp(min=1e-30)
        decisions[name] = Decision(quantized, {"weight_error": float(error)}, inputs.get(name))
    return decisions
