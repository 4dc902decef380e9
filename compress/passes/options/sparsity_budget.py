"""The options by which layers share one budget of zeros: who loses more of its weights, and who less.

layer-loss   the loss of every layer at several shares of zeros, weighed by what it does to the model's predictions,
             and the least sum of them under the budget; it looks at the original model beforehand
                 (`sparsity_shares`)
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from compress.base.errors import InputError, one_of
from compress.passes.options.prune import Prune
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Finding, Settled, Survey
from compress.solvers.allocation import worths
from compress.solvers.hessian_with_drift import quadratic
from compress.solvers.sparsity_shares import LEVELS, by_losses, by_rows
from compress.solvers.statistics.hessian import Hessian, HessianResult

Sharing = Literal["uniform", "layer-loss"]


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
    """Allocation of zeros: the same share of all layers, or of each layer what adds least to the losses of all, a
    layer's loss weighed by the KL of the model with that layer alone pruned (layer-loss); found in a walk over the
    original model, beside forwards of it on 4096 tokens, half as many as it has layers. At 60 % zeros wanda's KL
    (uniform, layer-loss) is 2.56, 2.04 and 0.24, 0.16 in two small models."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("allocate", self.allocate, get_args(Sharing))
        if self.allocate == "uniform":
            return
        if self.of_each is not None:
            raise InputError(
                f"allocate={self.allocate} gives layers other shares, and pattern {self.pattern} all the same; leave "
                "one out"
            )
        if self.sparsities:
            raise InputError(f"sparsities and allocate={self.allocate} both say how many zeros a layer has; give one")

    def trial(self, site: Site, statistics: HessianResult) -> Callable[[str, float], Tensor]:
        """A function of a layer's name and a share of zeros: [N, K] float64, its weight as this pass prunes it."""
        raise NotImplementedError

    @property
    def survey(self) -> tuple[Survey, ...]:
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

    def settle_by_losses(self, findings: Mapping[str, Finding]) -> Settled:
        """The pass with a share of zeros for each layer, of the least sum of losses as they are worth."""
        curves, asked, sizes = {}, {}, {}
        for name, finding in findings.items():
            energy = sum(part.energy for part in finding.parts) or 1.0
            curves[name] = sum(part.losses for part in finding.parts) / energy
            asked[name] = sum(part.asked for part in finding.parts) / energy
            sizes[name] = math.prod(finding.shape)
        worth = worths({name: finding.damage for name, finding in findings.items()}, asked)
        shares = by_losses(curves, sizes, self.zeros, worth)
        if self.per == "row":
            shares = by_rows(shares, {name: finding.shape for name, finding in findings.items()}, self.zeros)
        settled = replace(self, allocate="uniform", sparsities=tuple(shares.items()))
        return Settled(settled, notes=_told(self.name, shares))


def _told(method: str, shares: Mapping[str, float]) -> tuple[str, ...]:
    """Sentences of the report about shares of zeros that differ between layers."""
    least, most = min(shares, key=lambda n: shares[n]), max(shares, key=lambda n: shares[n])
    lines = [f"{method} makes {shares[least]:.1%} ({least}) to {shares[most]:.1%} ({most}) of a layer zero"]
    nothing = [name for name, share in shares.items() if share == 1]
    if nothing:
        others = f" and {len(nothing) - 1} more" if len(nothing) > 1 else ""
        lines.append(f"{method} leaves nothing of {nothing[0]}{others}: all of its weights become zero")
    return tuple(lines)


def _exact_hessian(channels: int, device: torch.device) -> Hessian:
    return Hessian(channels, device, dtype=torch.float64)
