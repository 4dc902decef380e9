"""Magnitude: the smallest weights become zero (Han et al., arXiv 1506.02626); the baseline of every mask.

Shapes: N outputs, K inputs.

    score_ij = |W_ij|

Needs no calibration data, but for `permute`. Zero are the lowest scores of N:M inputs in a row, of an output, or
(`per`) of a layer.

Departs from the paper:
- it trains the network again and prunes the rest in rounds; here the mask is taken once, and the survivors stay.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from compress.passes.options.prune import Ranked
from compress.passes.protocol.sites import Site
from compress.solvers.scores import magnitude


@dataclass(frozen=True, kw_only=True)
class Magnitude(Ranked):
    """The largest weights stay."""

    name: ClassVar[str] = "magnitude"

    def score(self, site: Site, name: str) -> Tensor:
        return magnitude(site.weights[name])

    def worth(self, site: Site, name: str) -> Tensor:
        return self.score(site, name)
