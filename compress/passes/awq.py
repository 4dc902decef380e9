"""AWQ: scale up the input channels that matter before weights are rounded (arXiv 2306.00978).

Shapes: N outputs, K inputs of the consumers, C channels of the producer, G groups. H = X^T X / tokens.

    minimise over s    sum over consumers of tr(E H E^T),    E = Q(W diag(s)) diag(s)^-1 - W                (eq. 4, 5)
    s = mean|X|^a   or   mean|X|^a / mean|W|^(1 - a),        a = 0, 1/20, ..., 19/20,     or s = 1

diag(s)^-1 goes into what makes X (`model.edits.folds`), so the function of the model does not change; then weights are
rounded to nearest, row by row over the whole range or the clipped one, whichever has the smaller error.

Departs from the paper:
- the loss is exact from the Hessian, where the paper runs the block for each candidate;
- s = 1 is always a candidate, so a fold never makes the layers it serves worse;
- folds are whatever leaves the function unchanged (`model.structure.discovery`): v -> o under grouped queries, too,
  with one scale for the query heads that share a key-value head.
Departs from the authors' code:
- ranges include 0; nothing depends on the number of outputs; biases of the producer are divided, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.model.edits.folds import spread_scales
from compress.passes.options.quantize import FoldThenRound
from compress.passes.protocol.sites import FoldSite, Reader, Scaling, Site
from compress.passes.protocol.solve import solve_rows
from compress.passes.protocol.stages import Rewrite
from compress.solvers.awq import best, candidates, round_rows, scaled_loss
from compress.solvers.hessian_with_drift import quadratic
from compress.solvers.outliers import set_apart
from compress.solvers.statistics.hessian import Hessian, HessianResult, Precision, precision
from compress.solvers.statistics.input_statistics import ChannelMean, StatisticFactory
from compress.weights.decision import Decision
from compress.weights.formats.sparse import Sparse
from compress.weights.grid import quantize
from compress.weights.matrix import Matrix, added


@dataclass(frozen=True, kw_only=True)
class AWQ(FoldThenRound):
    """AWQ, then rounding to nearest."""

    name: ClassVar[str] = "awq"
    keeps_zeros: ClassVar[bool] = True

    clip: bool = True
    """Try for each row the range of least error, too, and keep what serves its outputs better."""

    statistics: Precision = "float32"
    """The dtype in which the Hessian and the means are summed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        precision(self.statistics)

    def _hessian(self) -> StatisticFactory:
        return partial(Hessian, dtype=precision(self.statistics))

    @property
    def rewrite_stage(self) -> Rewrite:
        mean = partial(ChannelMean, dtype=precision(self.statistics))
        return Rewrite.by_scales({"hessian": self._hessian(), "mean": mean}, self.scaling)

    def scaling(self, site: FoldSite) -> Scaling:
        """By how much to divide each channel of the producer."""
        mean_C = site.merged(lambda reader: reader.stats["mean"].double(), "mean")
        size_C = site.merged(lambda reader: reader.weight.double().abs().mean(0), "mean")
        tried = candidates(mean_C, size_C)
        losses = torch.stack(
            [
                sum((self._loss(site.comm, r, s_C) for r in site.readers.values()), torch.zeros(()))
                for s_C in tried.values()
            ]
        )
        scale_C, power, share = best(tried, site.comm.all_reduce(losses))
        return Scaling(scale_C, {"power": power, "loss": share})

    def _loss(self, comm: Comm, reader: Reader, s_C: Tensor) -> Tensor:
        """tr(E H E^T) over this rank's share of a layer's rows, float64."""
        hessian_KK = reader.stats["hessian"].hessian
        s_K = spread_scales(s_C, reader.channel_of_K).to(hessian_KK.dtype)
        rows = comm.rows_of(len(reader.weight))
        if rows.start == rows.stop:
            return torch.zeros((), dtype=torch.float64, device=s_C.device)
        grid = self.weight_grid().plain
        loss = scaled_loss(reader.weight.to(hessian_KK.dtype), s_K, hessian_KK, grid, reader.scale_dtype, rows)
        return loss.sum().double()

    def needs(self) -> Mapping[str, StatisticFactory]:
        return {**super().needs(), "hessian": self._hessian()}

    def apply(self, site: Site) -> dict[str, Decision]:
        statistics: HessianResult = site.stats["hessian"]
        hessian = statistics.hessian
        inputs = self.input_codes(site)
        decisions = {}
        for name, stored in site.weights.items():
            weight = rest = stored.to(hessian.dtype)
            grid, scale_dtype = site.reached(self.weight_grid()), site.scale_dtypes[name]
            exact: tuple[Sparse, ...] = ()
            if self.outliers:
                rest, found = set_apart(weight, grid, scale_dtype, self.outliers, hessian.diagonal())
                exact = (found,)
            round_part = partial(round_rows, hessian_KK=hessian, grid=grid, scale_dtype=scale_dtype, clip=self.clip)
            if self.per_tensor:
                quantized: Matrix = round_part(rest)
            else:
                quantized = added(*solve_rows(site.comm, {"weight_NK": rest}, round_part).terms, *exact)
            nearest = quantize(weight, grid.plain, scale_dtype)
            energy = quadratic(site.comm, weight, hessian) or 1.0
            error, plain = (q.dequantize(hessian.dtype) - weight for q in (quantized, nearest))
            figures = {
                "loss": quadratic(site.comm, error, hessian) / energy,
                "rtn_loss": quadratic(site.comm, plain, hessian) / energy,
                "damp": 0.0,
                "tokens": statistics.tokens,
            }
            decisions[name] = Decision(quantized, figures, inputs.get(name))
        return decisions
