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

from compress.calibration.hessian import Hessian, HessianResult, Precision, precision
from compress.calibration.stats import ChannelMean, StatisticFactory
from compress.model.edits.folds import spread_scales
from compress.passes.options.quantize import FoldThenRound
from compress.passes.protocol.sites import FoldSite, Reader, Scaling, Site
from compress.passes.protocol.solve import solve_rows
from compress.passes.protocol.stages import Rewrite
from compress.solvers.loss import quadratic
from compress.solvers.outliers import set_apart
from compress.system.comm import Comm
from compress.weights.decision import Decision
from compress.weights.formats.sparse import Sparse
from compress.weights.grid import Quantized, fake_quantize, fit_matrix, quantize
from compress.weights.terms import Summand, Weight, added, summands

POWERS = tuple(a / 20 for a in range(20))
# Scales below this are set to it, relative to their geometric mean (the authors' code).
SMALLEST = 1e-4


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
        return Rewrite({"hessian": self._hessian(), "mean": mean}, self.scaling)

    def scaling(self, site: FoldSite) -> Scaling:
        """By how much to divide each channel of the producer."""
        mean_C = site.merged(lambda reader: reader.stats["mean"].double(), "mean")
        size_C = site.merged(lambda reader: reader.weight.double().abs().mean(0), "mean")
        candidates = {"none": torch.ones_like(mean_C)}
        candidates |= {f"{a:g}": balanced(mean_C**a) for a in POWERS[1:]}
        candidates |= {f"{a:g} with weights": balanced(mean_C**a / size_C ** (1 - a)) for a in POWERS}
        losses = torch.stack(
            [
                sum((self._loss(site.comm, r, s_C) for r in site.readers.values()), torch.zeros(()))
                for s_C in candidates.values()
            ]
        )
        losses = site.comm.all_reduce(losses)
        best = int(losses.argmin())
        share = float(losses[best] / losses[0].clamp(min=torch.finfo(losses.dtype).tiny))
        return Scaling(list(candidates.values())[best], {"power": list(candidates)[best], "loss": share})

    def _loss(self, comm: Comm, reader: Reader, s_C: Tensor) -> Tensor:
        """tr(E H E^T) over this rank's share of a layer's rows, float64."""
        hessian_KK = reader.stats["hessian"].hessian
        weight_NK = reader.weight.to(hessian_KK.dtype)
        s_K = spread_scales(s_C, reader.channel_of_K).to(hessian_KK.dtype)
        rows = comm.rows_of(len(weight_NK))
        if rows.start == rows.stop:
            return torch.zeros((), dtype=torch.float64, device=s_C.device)
        given = weight_NK if self.per_tensor else weight_NK[rows]
        values = fake_quantize(given * s_K, self.weight_grid().with_range("minmax"), reader.scale_dtype)
        error = (values / s_K - given)[rows if self.per_tensor else slice(None)]
        return ((error @ hessian_KK) * error).sum().double()

    def needs(self) -> Mapping[str, StatisticFactory]:
        return {**super().needs(), "hessian": self._hessian()}

    def apply(self, site: Site) -> dict[str, Decision]:
        statistics: HessianResult = site.stats["hessian"]
        hessian = statistics.hessian
        inputs = self.input_codes(site)
        decisions = {}
        for name, stored in site.weights.items():
            weight = rest = stored.to(hessian.dtype)
            exact: tuple[Sparse, ...] = ()
            if self.outliers:
                how = (self.weight_grid(), site.scale_dtypes[name], self.outliers, hessian.diagonal())
                rest, found = set_apart(weight, *how)
                exact = (found,)
            round_part = partial(self._round, hessian, site.scale_dtypes[name])
            if self.per_tensor:
                quantized: Summand | Weight = round_part(rest)
            else:
                quantized = added(*summands(solve_rows(site.comm, {"weight_NK": rest}, round_part)), *exact)
            nearest = quantize(weight, self.weight_grid().with_range("minmax"), site.scale_dtypes[name])
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

    def _round(self, hessian_KK: Tensor, scale_dtype: torch.dtype, weight_NK: Tensor) -> Quantized:
        """Each row over its whole range or the clipped one, whichever errs less."""
        grid = self.weight_grid()
        whole = quantize(weight_NK, grid.with_range("minmax"), scale_dtype)
        if not self.clip or len(weight_NK) == 0:
            return Quantized(whole.codes, whole.scale, whole.zero_point, grid)
        scale, zero_point = fit_matrix(weight_NK, grid, scale_dtype, hessian_KK.diagonal())
        clipped = quantize(weight_NK, grid, scale_dtype, scale, zero_point)
        loss_N = []
        for found in (whole, clipped):
            error = found.dequantize(weight_NK.dtype) - weight_NK
            loss_N.append(((error @ hessian_KK) * error).sum(1))
        better = loss_N[1] < loss_N[0]
        if self.per_tensor:
            better = (loss_N[1].sum() < loss_N[0].sum()).expand(len(weight_NK))
        pick = better.unsqueeze(1)
        chosen = pick[: len(whole.scale)]
        zero = None
        if whole.zero_point is not None and clipped.zero_point is not None:
            zero = torch.where(chosen, clipped.zero_point, whole.zero_point)
        return Quantized(
            torch.where(pick, clipped.codes, whole.codes), torch.where(chosen, clipped.scale, whole.scale), zero, grid
        )


def balanced(s_C: Tensor) -> Tensor:
    """s with its largest and smallest value around 1; channels without a finite, positive scale get 1."""
    usable = torch.isfinite(s_C) & (s_C > 0)
    if not usable.any():
        return torch.ones_like(s_C)
    live = s_C[usable]
    s_C = (s_C / (live.amax() * live.amin()).sqrt()).clamp(min=SMALLEST)
    return torch.where(usable, s_C, torch.ones_like(s_C))
