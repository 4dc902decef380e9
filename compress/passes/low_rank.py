"""Low rank: each weight as the product of two thin matrices (SVD-LLM, arXiv 2403.07378).

Shapes: N outputs, K inputs, r ranks. X_q [T, K] is the layer's input behind the compressed prefix, X the same input in
the original model; H = X_q^T X_q, a mean over tokens.

    minimise over L [N, r], R [r, K]     |X W^T - X_q (L R)^T|^2  =  tr((W* - L R) H (W* - L R)^T) + const

The optimum is exact: the truncated singular value decomposition of W* H^(1/2), taken back through H^(1/2). A rank below
N K / (N + K) takes less room than the weight.

Paper -> code: whitening and truncation -> `whitened.spectrum`, which projects W* on the eigenvectors of W* H W*^T and
so has no inverse; the ratio -> 1 - `share`; the closed-form update of what remains -> there is nothing left to update
where the truncation is exact.

Departs from the paper:
- H is not damped for the truncation. Where it is singular, of all optima the one closest to W* is taken.
- `drift` and `shrink` are those of gptq: W* = W + a W D makes up for what the layers before did to the input, as far as
  the tokens carry that; H is shrunk towards its diagonal by what in it is noise.
- The right factor is fitted to the left one as stored: rounded to the model's dtype or (`factor_bits`) to codes.
- `allocate` shares one budget out between layers. Their spectra are taken from the original model beforehand, and each
  rank goes to where it takes most for its size off the layer's loss, as a part of what the layer returns (squares over
  squares: bare squares starve layers of small outputs, and lose). A layer that would take more so than as it is stays
  as it is (`solvers.allocation`).
- `outliers` are added in turns with the low rank: W* - S is approximated, then the weights whose errors cost most,
  e^2 H_jj, are made exact; the best of all turns is kept. They come on top of `share`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from compress.base.errors import InputError, check_least
from compress.passes.options.quantize import beside_outliers
from compress.passes.options.rank_budget import RankBudget
from compress.passes.protocol.base import Aspect
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Decide, Stage
from compress.solvers.hessian_with_drift import DAMP, check_reliance, drift_correction, quadratic
from compress.solvers.low_rank import approximate, with_outliers
from compress.solvers.outliers import check_share
from compress.solvers.statistics.hessian import Hessian, HessianResult
from compress.solvers.statistics.input_statistics import StatisticFactory
from compress.weights.decision import Decision
from compress.weights.formats.lowrank import WHOLE_BITS, LowRankFactors
from compress.weights.matrix import Weight
from compress.weights.scheme import Scheme
from compress.weights.terms import Tensors


@dataclass(frozen=True, kw_only=True)
class LowRank(RankBudget):
    """A low rank in place of a weight."""

    name: ClassVar[str] = "low-rank"
    writes: ClassVar[Aspect] = "quantized weight"
    least: ClassVar[int] = 1
    or_whole: ClassVar[bool] = True

    share: float = 0.5
    """above 0, up to 1: what factors may take of the room that the layers take in 16 bits; has no say with `rank`."""

    outliers: float = 0.0
    """0 to 0.25: share of weights that are made exact beside the low rank, on top of `share`."""

    iterations: int = 4
    """1 or more: how often outliers are chosen, and the low rank fitted again to the rest; without any, it is exact."""

    drift: float = 1.0
    """0 to 1: how much of the change of a layer's input is made up for, of what `shrink` leaves; 0 is the paper."""

    shrink: bool = True
    """Rely on statistics only as far as the calibration tokens carry."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1:
            raise InputError(f"share {self.share}; allowed: above 0, at most 1")
        check_share(self.outliers)
        check_least(self, 1, "iterations")
        check_reliance(DAMP, self.drift, self.statistics)

    def uniform_rank(self, shape: tuple[int, int]) -> int:
        rows, columns = shape
        return self.rank or int(self.share * rows * columns * WHOLE_BITS / self.cost(shape))

    def budget(self, shapes: Mapping[str, tuple[int, int]]) -> float:
        if self.rank:
            return super().budget(shapes)
        return self.share * WHOLE_BITS * sum(rows * columns for rows, columns in shapes.values())

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        super().check(shapes)
        for name, shape in shapes.items():
            if dict(self.ranks).get(name) == 0:
                raise InputError(f"rank 0 of {name} leaves nothing of it; allowed: 1 to {min(shape)}")
            if self.rank_of(name, shape) < 1:
                least = self.cost(shape) / (WHOLE_BITS * shape[0] * shape[1])
                raise InputError(
                    f"share {self.share} leaves no rank for {name}, which is {shape[0]} x {shape[1]}; allowed: from "
                    f"{least:.3g} up, or leave the layer to another pass (`but`)"
                )

    def stored(self, layer: str, shape: tuple[int, int], table: bool = False) -> Scheme | None:
        low = LowRankFactors(rank=self.rank_of(layer, shape), bits=self.factor_bits)
        return beside_outliers(Scheme(terms=(low,)), self.outliers, shape)

    def needs(self) -> Mapping[str, StatisticFactory]:
        return {"hessian": partial(Hessian, dtype=self.summed_in, reference=self.drift > 0)}

    @property
    def stages(self) -> tuple[Stage, ...]:
        return *self.survey, Decide(self.needs(), self.apply, reference=self.drift > 0)

    def apply(self, site: Site) -> dict[str, Decision]:
        statistics: HessianResult = site.stats["hessian"]
        if self.shrink:
            statistics = statistics.shrunk()
        statistics = statistics.double()
        hessian = statistics.hessian
        correction = drift_correction(statistics, DAMP + statistics.noise * self.shrink) if self.drift else None
        decisions = {}
        for name, stored in site.weights.items():
            target, share = stored.double(), 0.0
            if correction is not None:
                target, share = correction.target(site.comm, target, hessian, self.drift, self.shrink)
            weight, loss = self._best(site, name, target, hessian)
            figures = {
                "loss": loss / (quadratic(site.comm, target, hessian) or 1.0),
                "rank": self.rank_of(name, (len(stored), stored.shape[1])),
                "tokens": statistics.tokens,
                "shrinkage": statistics.shrinkage if self.shrink else 0.0,
                "drift": share,
            }
            decisions[name] = Decision(weight, figures)
        return decisions

    def _best(self, site: Site, name: str, target_NK: Tensor, hessian_KK: Tensor) -> tuple[Weight, float]:
        """The best turn of a layer, and its loss."""
        rows, columns = target_NK.shape
        rank, dtype = self.rank_of(name, (rows, columns)), site.scale_dtypes[name]
        owner = site.comm.assign({each: float(min(w.shape)) for each, w in site.weights.items()})[name]

        def low(rest_NK: Tensor) -> Tensors:
            return approximate(site.comm, owner, rest_NK, hessian_KK, rank, dtype, self.factor_bits)

        def loss(error_NK: Tensor) -> float:
            return quadratic(site.comm, error_NK, hessian_KK)

        return with_outliers(target_NK, hessian_KK.diagonal(), low, loss, dtype, self.outliers, self.iterations)
