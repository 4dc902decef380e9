"""SmoothQuant: move outliers of the inputs into the weights, before both are rounded (arXiv 2211.10438).

Shapes: N outputs, K inputs of the consumers, C channels of the producer (K = C, or K > C where query heads share one
key-value head), M sampled tokens.

    Y = (X diag(s)^-1) (diag(s) W^T)       s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)                         (eq. 4)

diag(s)^-1 goes into what makes X (`model.edits.folds`), so the function of the model does not change; then weights and
inputs are rounded to nearest. Paper -> code: alpha -> `alpha`; a smoothed layer -> a fold
(`compress.model.structure.discovery`).

Departs from the paper:
- alpha is searched for each fold, on the error of the outputs of rounded inputs and weights; 1 (no scaling) is always
  among the candidates. `alpha` fixes it.
- every fold that leaves the function unchanged is used: v -> o and up -> down, too, where outliers of gated models are.
Departs from the authors' code:
- statistics and scales are float32; channels that are never active keep s = 1.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.model.edits.folds import spread_scales
from compress.passes.options.quantize import FoldThenRound
from compress.passes.protocol.round_to_nearest import round_to_nearest
from compress.passes.protocol.sites import FoldSite, Reader, Scaling, Site
from compress.passes.protocol.stages import Rewrite
from compress.solvers.smoothquant import best, candidates, input_codes, scaled_loss, smoothing
from compress.solvers.statistics.input_statistics import MinMax, TokenSample
from compress.weights.decision import Decision
from compress.weights.number_formats import SCHEMES

# Tokens of each micro-batch on which they are compared.
SAMPLED = 32

ROUNDING = [name for name, numbers in SCHEMES.items() if numbers.rounds_inputs and numbers.per != "block"]


@dataclass(frozen=True, kw_only=True)
class SmoothQuant(FoldThenRound):
    """SmoothQuant, then rounding to nearest."""

    name: ClassVar[str] = "smoothquant"
    keeps_zeros: ClassVar[bool] = True

    scheme: str = "w8a8"
    alpha: float = -1.0
    """0 to 1, or -1: how much of the input's range moves into the weights; -1 searches it for each fold."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha != -1 and not 0 <= self.alpha <= 1:
            raise InputError(f"alpha {self.alpha}; allowed: 0 to 1, or -1 to search it")
        if self.input_grid() is None:
            raise InputError(
                f"smoothquant is for rounded inputs; {self.scheme} has none: give one of {', '.join(ROUNDING)}, or use "
                "awq"
            )

    @property
    def rewrite_stage(self) -> Rewrite:
        return Rewrite.by_scales({"extremes": MinMax, "sample": partial(TokenSample, per_batch=SAMPLED)}, self.scaling)

    def scaling(self, site: FoldSite) -> Scaling:
        """By how much to divide each channel of the producer."""
        largest_C = site.merged(lambda reader: torch.maximum(*map(torch.abs, reader.stats["extremes"])), "max")
        heaviest_C = site.merged(lambda reader: reader.weight.float().abs().amax(0), "max")
        if self.alpha != -1:
            return Scaling(smoothing(largest_C, heaviest_C, self.alpha), {"alpha": self.alpha})
        tried = candidates(largest_C, heaviest_C)
        losses = torch.stack(
            [sum((self._loss(r, s_C) for r in site.readers.values()), torch.zeros(())) for s_C in tried]
        )
        scale_C, alpha, share = best(tried, site.comm.all_reduce(losses))
        return Scaling(scale_C, {"alpha": alpha, "loss": share})

    def _loss(self, reader: Reader, s_C: Tensor) -> Tensor:
        """Squared error of a layer's outputs when input and weight are rounded behind a scaling; this rank's tokens.
        A fixed range is the whole one, of all ranks, whatever a calibrator makes of it."""
        x_MK, grid = reader.stats["sample"].float(), self.input_grid()
        assert grid is not None
        if len(x_MK) == 0:
            return torch.zeros((), dtype=torch.float64, device=s_C.device)
        s_K = spread_scales(s_C, reader.channel_of_K)
        inputs = input_codes(reader.stats["extremes"], s_K, grid, reader.scale_dtype)
        return scaled_loss(x_MK, reader.weight.float(), s_K, inputs, self.weight_grid())

    def apply(self, site: Site) -> dict[str, Decision]:
        return round_to_nearest(site, site.reached(self.weight_grid()), self.input_codes(site), self.outliers)
