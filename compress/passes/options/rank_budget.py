"""The options of what adds a matrix of low rank to a layer: its rank, how its factors are stored, and who gets more.

Shapes: N outputs, K inputs. A rank of a layer is N + K numbers; the layer as it is has N K, of 16 bits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from glob import escape
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from compress.base.errors import InputError, check_least, one_of
from compress.passes.options.layer_pairs import check_names, layer_pairs
from compress.passes.protocol.base import Pass, but
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Finding, Settled, Survey
from compress.solvers.allocation import RankCurve, allocate
from compress.solvers.low_rank import spectrum
from compress.solvers.statistics.hessian import Hessian, HessianResult, Precision, precision
from compress.weights.formats.lowrank import WHOLE_BITS, check_bits

FactorBits = Literal[16, 8]
Allocation = Literal["uniform", "layer-loss"]


@dataclass(frozen=True, kw_only=True)
class RankBudget(Pass):
    """A pass that gives layers a matrix of low rank."""

    # A layer's least rank, and whether one that would take more as a low rank than as it is stays as it is.
    least: ClassVar[int] = 0
    or_whole: ClassVar[bool] = False
    by_rows: ClassVar[bool] = False

    rank: int | None = None
    """1 or more: rank of every layer, or with `allocate` what all of them have to share; none: what `share`
    says."""

    allocate: Allocation = "uniform"
    """Allocation of ranks: the same part for all layers, or each rank to the layer whose output loss it lowers most for
    its size, found in a walk over the original model. The latter counts all layers' losses alike: at 70 % of the room
    it took the KL of three small models from 0.35 to 0.06, 0.09 to 0.05 and 0.66 to 0.92; compare both."""

    factor_bits: FactorBits = 16
    """Storage of factors: numbers in the model's dtype, or int8 codes with one scale per rank."""

    ranks: tuple[tuple[str, int], ...] = ()
    """[layer, rank] pairs: ranks of single layers by their full names, in place of what the other options say."""

    statistics: Precision = "float32"
    """The dtype in which H is summed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None:
            check_least(self, self.least, "rank")
        one_of("allocate", self.allocate, get_args(Allocation))
        check_bits("factor_bits", self.factor_bits)
        object.__setattr__(self, "ranks", layer_pairs("ranks", self.ranks, _as_rank, "rank", 8))
        if self.ranks and self.allocate != "uniform":
            raise InputError(f"ranks are given, and allocate={self.allocate} would find others; give one of them")
        precision(self.statistics)

    def uniform_rank(self, shape: tuple[int, int]) -> int:
        """The rank of a layer that has the same part as the others."""
        return self.rank or 0

    def budget(self, shapes: Mapping[str, tuple[int, int]]) -> float:
        """The bits that the factors of all these layers may take together."""
        return sum(self.uniform_rank(shape) * self.cost(shape) for shape in shapes.values())

    def rank_of(self, layer: str, shape: tuple[int, int]) -> int:
        """The rank of a layer, as far as it has so many."""
        found = dict(self.ranks).get(layer)
        return min(self.uniform_rank(shape) if found is None else found, *shape)

    def cost(self, shape: tuple[int, int]) -> int:
        """Bits of a rank of a layer."""
        return sum(shape) * self.factor_bits

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        super().check(shapes)
        check_names("ranks", self.ranks, shapes)
        for name, shape in shapes.items():
            given = dict(self.ranks).get(name, self.rank or 0)
            if given > min(shape):
                raise InputError(
                    f"rank {given} of {name}, which is {shape[0]} x {shape[1]}; allowed: up to {min(shape)}, or leave "
                    "the layer to another pass (`but`)"
                )

    @property
    def survey(self) -> tuple[Survey, ...]:
        """The stage that finds out how much each rank is worth; none where all layers have the same part."""
        if self.allocate == "uniform":
            return ()
        return (Survey({"hessian": partial(Hessian, dtype=self.summed_in)}, self.look, self.settle),)

    @property
    def summed_in(self) -> torch.dtype:
        """The dtype of the statistics."""
        return precision(self.statistics)

    def look(self, site: Site) -> dict[str, Tensor]:
        """{layer: the fall of its loss by each rank, as a part of the squares of its output}. Each rank of the run
        finds its share of the layers."""
        statistics: HessianResult = site.stats["hessian"]
        hessian = statistics.shrunk().hessian.double()
        owners, curves = site.comm.assign(dict.fromkeys(site.weights, 1.0)), {}
        for name, weight in site.weights.items():
            values = weight.new_zeros(min(weight.shape), dtype=torch.float64)
            if site.comm.rank == owners[name]:
                energy = ((weight.double() @ hessian) * weight).sum().clamp(min=torch.finfo(torch.float64).tiny)
                values = spectrum(self.to_approximate(site, name), hessian).values / energy
            curves[name] = site.comm.all_reduce(values).cpu()
        return curves

    def to_approximate(self, site: Site, name: str) -> Tensor:
        """[N, K] the target of a layer's low rank, as far as it is known beforehand."""
        return site.weights[name]

    def settle(self, findings: Mapping[str, Finding]) -> Settled:
        """The pass with a rank for each layer, and the layers that it leaves as they are."""
        shapes = {name: finding.shape for name, finding in findings.items()}
        curves = {
            name: RankCurve(
                findings[name].parts[0], self.cost(shape), *([math.prod(shape) * WHOLE_BITS] if self.or_whole else [])
            )
            for name, shape in shapes.items()
        }
        ranks_of = allocate(curves, self.budget(shapes), self.least)
        whole = {name: "its share of the budget holds it as it is" for name in ranks_of if ranks_of[name] is None}
        ranks = tuple((name, rank) for name, rank in ranks_of.items() if rank is not None)
        settled = replace(self, ranks=ranks, allocate="uniform")
        return Settled(but(settled, *map(escape, whole)) if whole else settled, whole)


def _as_rank(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 and not isinstance(value, bool) else None
