"""Wanda: the weights whose products are small become zero (arXiv 2306.11695).

Shapes: N outputs, K inputs, T tokens. X [T, K] is the layer's input behind the pruned prefix.

    score_ij = |W_ij| |X_j|_2

Survivors stay as they are: |W_ij|^2 |X_j|^2 is what the output loses with one weight, the others left alone. What
sparsegpt pays for (X^T X and its factor), this does not need: one number per input.

Paper -> code: S -> `scores`; the comparison group, each output -> `per`; N:M -> `pattern`.

Departs from the paper:
- inputs that are never active have scores of 0 there, and ties; here such weights rank behind all others and among
  themselves by size, which a layer that no token reached (an expert) needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from compress.calibration.stats import ChannelNorm, StatisticFactory
from compress.passes.prune import Prune, size_of
from compress.passes.sites import Site
from compress.passes.solve import weight_error
from compress.weights.decision import Decision

# Of the largest norm: as good as never active, and above zero.
LEAST_NORM = 1e-12


@dataclass(frozen=True, kw_only=True)
class Wanda(Prune):
    """The weights of the largest products stay."""

    name: ClassVar[str] = "wanda"

    def needs(self) -> Mapping[str, StatisticFactory]:
        return {**super().needs(), "norm": ChannelNorm}

    def apply(self, site: Site) -> dict[str, Decision]:
        decisions = {}
        for name, weight in site.weights.items():
            found = self.by_score(site, name, scores(weight, site.stats["norm"]))
            decisions[name] = found.decision({"weight_error": weight_error(weight, found)})
        return decisions


def scores(weight_NK: Tensor, norm_K: Tensor) -> Tensor:
    """[N, K] |W_ij| |X_j|, but for the scale of X, which decides nothing."""
    most = norm_K.max()
    relative = (norm_K / most).clamp(min=LEAST_NORM) if most > 0 else norm_K.new_ones(norm_K.shape)
    size = size_of(weight_NK)
    return size * relative.to(size.dtype)
