"""The options by which layers share one budget of zeros: who loses more of its weights, and who less.

    owl          a block keeps the more, the more outliers its products |W_ij| |X_j| have (Yin et al., arXiv 2310.05175)
    layer-loss   the loss of every layer at several shares of zeros, weighed by what it does to the model's predictions,
                 and the least sum of them under the budget

Both look at the original model beforehand. `sparsity_shares` has the definitions.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from compress.base.errors import InputError, one_of
from compress.passes.options.global_ranking import told
from compress.passes.options.prune import Per, Prune
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Finding, Settled, Survey
from compress.solvers.allocation import worths
from compress.solvers.hessian_with_drift import quadratic
from compress.solvers.scores import products
from compress.solvers.sparsity_shares import LEVELS, by_losses, by_outliers, by_rows, widest
from compress.solvers.statistics.hessian import Hessian, HessianResult
from compress.solvers.statistics.input_statistics import ChannelNorm
from compress.weights.ranking import ScoreHistogram, added, histogram

Sharing = Literal["uniform", "owl", "layer-loss"]
# What OWL's authors take for most models.
OUTLIER = 5.0
DEVIATION = 0.08


@dataclass(frozen=True)
class LossCurve:
    """losses [L]: of a layer's output, in squares, at each of `LEVELS`; asked: at the share of the budget; energy: what
    there is to lose."""

    losses: Tensor
    asked: float
    energy: float


@dataclass(frozen=True, kw_only=True)
class SparsityBudget(Prune):
    """A pass that prunes, and may prune some layers more than others."""

    allocate: Sharing = "uniform"
    """Allocation of zeros: the same share of all layers, less of blocks with more outliers (owl), or of each layer what
    adds least to the losses of all, a layer's loss weighed by the KL of the model with that layer alone pruned
    (layer-loss); found in a walk over the original model, with layer-loss beside forwards of it on 4096 tokens, half
    as many as it has layers. At 60 % zeros wanda's KL (uniform, owl, layer-loss) is 2.56, 2.20, 2.04 and 0.24, 0.29,
    0.16 in two small models."""

    outlier: float = OUTLIER
    """1 or more: what makes an outlier of a product |W_ij| |X_j|, in means of its block (M of owl; 5 to 7 there)."""

    deviation: float = DEVIATION
    """above 0: half of how far the shares of zeros of blocks may lie apart (lambda of owl)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("allocate", self.allocate, get_args(Sharing))
        if not self.outlier >= 1:
            raise InputError(f"outlier {self.outlier}; allowed: 1 or more means (5 is usual)")
        if self.allocate != "owl" and (self.outlier, self.deviation) != (OUTLIER, DEVIATION):
            raise InputError(f"outlier and deviation are of allocate=owl, not {self.allocate}; leave them out")
        if self.allocate == "uniform":
            return
        if self.of_each is not None:
            raise InputError(
                f"allocate={self.allocate} gives layers other shares, and pattern {self.pattern} all the same; leave "
                "one out"
            )
        if self.sparsities or self.per not in get_args(Per):
            other = "sparsities" if self.sparsities else f"per={self.per}"
            raise InputError(f"{other} and allocate={self.allocate} both say how many zeros a layer has; give one")
        if self.allocate == "owl" and not 0 < self.deviation <= widest(self.zeros):
            raise InputError(
                f"deviation {self.deviation} around sparsity {self.zeros}; allowed: above 0, at most "
                f"{widest(self.zeros):.4g}, which keeps every share between 0 and 1"
            )

    def trial(self, site: Site, statistics: HessianResult) -> Callable[[str, float], Tensor]:
        """A function of a layer's name and a share of zeros: [N, K] float64, its weight as this pass prunes it."""
        raise NotImplementedError

    @property
    def survey(self) -> tuple[Survey, ...]:
        if self.allocate == "owl":
            return (Survey({"norm": ChannelNorm}, look_at_products, self.settle_by_outliers),)
        if self.allocate == "layer-loss":
            return (Survey({"hessian": _exact_hessian}, self.look_at_losses, self.settle_by_losses, self.pruned_alone),)
        return super().survey

    def look_at_losses(self, site: Site) -> dict[str, LossCurve]:
        """{layer: its loss at several shares of zeros}."""
        statistics: HessianResult = site.stats["hessian"]
        pruned, hessian, curves = self.trial(site, statistics), statistics.shrunk().hessian, {}
        for name, weight in site.weights.items():
            whole = weight.double()
            errors = (whole - pruned(name, share) for share in (*LEVELS, self.zeros))
            *losses, asked = (quadratic(site.comm, error, hessian) for error in errors)
            energy = quadratic(site.comm, whole, hessian)
            curves[name] = LossCurve(torch.tensor(losses, dtype=torch.float64), asked, energy)
        return curves

    def pruned_alone(self, site: Site) -> dict[str, Tensor]:
        """{layer: its weight [N, K], pruned by the share of the budget}."""
        pruned = self.trial(site, site.stats["hessian"])
        return {name: pruned(name, self.zeros) for name in site.weights}

    def settle_by_outliers(self, findings: Mapping[str, Finding]) -> Settled:
        """The pass with a share of zeros for each layer, that of its block."""
        blocks: dict[str, dict[str, ScoreHistogram]] = {}
        several = len({finding.block for finding in findings.values()}) > 1
        for name, finding in findings.items():
            blocks.setdefault(finding.block if several else name, {})[name] = added(finding.parts)
        of_block = {block: added(list(layers.values())) for block, layers in blocks.items()}
        shares = by_outliers(of_block, self.zeros, self.outlier, self.deviation)
        own = {name: shares[block] for block, layers in blocks.items() for name in layers}
        alone = ("the model runs as one block: owl takes every layer for one",) if not several else ()
        return self._settle(own, findings, alone)

    def settle_by_losses(self, findings: Mapping[str, Finding]) -> Settled:
        """The pass with a share of zeros for each layer, of the least sum of losses as they are worth."""
        curves, asked, sizes = {}, {}, {}
        for name, finding in findings.items():
            energy = sum(part.energy for part in finding.parts) or 1.0
            curves[name] = sum(part.losses for part in finding.parts) / energy
            asked[name] = sum(part.asked for part in finding.parts) / energy
            sizes[name] = math.prod(finding.shape)
        worth = worths({name: finding.damage for name, finding in findings.items()}, asked)
        return self._settle(by_losses(curves, sizes, self.zeros, worth), findings)

    def _settle(
        self, shares: Mapping[str, float], findings: Mapping[str, Finding], notes: tuple[str, ...] = ()
    ) -> Settled:
        if self.per == "row":
            shares = by_rows(shares, {name: finding.shape for name, finding in findings.items()}, self.zeros)
        alike = {"allocate": "uniform", "outlier": OUTLIER, "deviation": DEVIATION}
        settled = replace(self, **alike, sparsities=tuple(shares.items()))  # type: ignore[arg-type]
        return Settled(settled, notes=(*notes, *told(self.name, shares)))


def look_at_products(site: Site) -> dict[str, ScoreHistogram]:
    """{layer: the histogram of its |W_ij| |X_j|}, of which each rank counts its rows."""
    comm, norm_K = site.comm, site.stats["norm"]
    return {
        name: histogram(products(weight[comm.rows_of(len(weight))], norm_K), comm)
        for name, weight in site.weights.items()
    }


def _exact_hessian(channels: int, device: torch.device) -> Hessian:
    return Hessian(channels, device, dtype=torch.float64)
