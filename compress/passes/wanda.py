"""Wanda: the weights whose products are small become zero (arXiv 2306.11695).

Shapes: N outputs, K inputs, T tokens. X [T, K] is the layer's input behind the pruned prefix.

    score_ij = |W_ij| |X_j|_2

Survivors stay as they are: |W_ij|^2 |X_j|^2 is what the output loses with one weight, the others left alone. What
sparsegpt pays for (X^T X and its factor), this does not need: one number per input.

Paper -> code: S -> `solvers.scores.wanda`; the comparison group, each output -> `per`; N:M -> `pattern`.
Channel permutation (Pool and Yu 2021) -> `permute`.

Departs from the paper:
- inputs that are never active have scores of 0 there, and ties; here such weights rank behind all others and among
  themselves by size, which a layer that no token reached (an expert) needs.
- with `allocate` the original model says how many zeros each layer has; which they are, the prefix does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.passes.options.prune import Ranked
from compress.passes.options.sparsity_budget import SparsityBudget
from compress.passes.protocol.sites import Site
from compress.solvers.scores import wanda
from compress.solvers.statistics.hessian import HessianResult
from compress.solvers.statistics.input_statistics import ChannelNorm, StatisticFactory
from compress.weights.masks import Choice
from compress.weights.survivors import survivors


@dataclass(frozen=True, kw_only=True)
class Wanda(SparsityBudget, Ranked):
    """The weights of the largest products stay."""

    name: ClassVar[str] = "wanda"

    def needs(self) -> Mapping[str, StatisticFactory]:
        return {**super().needs(), "norm": ChannelNorm}

    def score(self, site: Site, name: str) -> Tensor:
        return wanda(site.weights[name], site.stats["norm"])

    def trial(self, site: Site, statistics: HessianResult) -> Callable[[str, float], Tensor]:
        norm_K = statistics.hessian.diagonal().clamp(min=0).sqrt()

        def prune(name: str, share: float) -> Tensor:
            weight = site.weights[name].double()
            choice = Choice(None, share, together=self.per == "layer")
            return survivors(weight, choice.kept(wanda(weight, norm_K), None), torch.float64).values

        return prune
