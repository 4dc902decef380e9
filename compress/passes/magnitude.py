"""Magnitude: the smallest weights become zero (Han et al., arXiv 1506.02626); the baseline of every mask.

Shapes: N outputs, K inputs.

    score_ij = |W_ij|

Needs no calibration data. Zero are the lowest scores of N:M inputs in a row, of an output, or (`per`) of a layer.

Departs from the paper:
- it trains the network again and prunes the rest in rounds; here the mask is taken once, and the survivors stay.
"""

from dataclasses import dataclass
from typing import ClassVar

from compress.passes.prune import Prune, size_of
from compress.passes.sites import Site
from compress.passes.solve import weight_error
from compress.weights.decision import Decision


@dataclass(frozen=True, kw_only=True)
class Magnitude(Prune):
    """The largest weights stay."""

    name: ClassVar[str] = "magnitude"

    def apply(self, site: Site) -> dict[str, Decision]:
        decisions = {}
        for name, weight in site.weights.items():
            found = self.by_score(site, name, size_of(weight))
            decisions[name] = found.decision({"weight_error": weight_error(weight, found)})
        return decisions
