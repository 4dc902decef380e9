"""RTN: round every weight to the nearest point of its grid; the baseline of every other pass.

Needs no calibration data, unless the range of inputs or outputs is to be fixed beforehand (activations=static,
outputs=static).
"""

from dataclasses import dataclass
from typing import ClassVar

from compress.passes.options.quantize import QuantizeWeights
from compress.passes.protocol.round_to_nearest import round_to_nearest
from compress.passes.protocol.sites import Site
from compress.weights.decision import Decision


@dataclass(frozen=True, kw_only=True)
class RTN(QuantizeWeights):
    """Round to nearest."""

    name: ClassVar[str] = "rtn"
    keeps_zeros: ClassVar[bool] = True
    in_blocks: ClassVar[bool] = True

    def apply(self, site: Site) -> dict[str, Decision]:
        return round_to_nearest(site, site.reached(self.weight_grid()), self.input_codes(site), self.outliers)
