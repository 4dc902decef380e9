"""Weights of which a few keep values of their own, beside codes on a grid or in tiles; and a pass that decides so."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.passes.options.quantize import QuantizeWeights
from compress.passes.protocol.sites import Site
from compress.weights.decision import Decision
from compress.weights.formats.sparse import sparse
from compress.weights.formats.tiles import Tiled, Tiles, fit_tiles
from compress.weights.grid import encode_unsigned, quantize
from compress.weights.matrix import Weight


def tiled(weight_NK: Tensor, format_: Tiles, dtype: torch.dtype) -> Tiled:
    """Weights as SpQR rounds them: every group by its extremes, scales and zero points by those of their tile."""
    codes, scales, zeros, ranges = [], [], [], []
    for part in weight_NK.float().split(format_.group_size, 1):
        found = fit_tiles(part.amin(1), part.amax(1), format_, dtype)
        codes.append(encode_unsigned(part, found.scale.unsqueeze(1), found.zero.unsqueeze(1), format_.bits))
        scales.append(found.scale_codes)
        zeros.append(found.zero_codes)
        ranges.append(found.ranges.to(dtype))
    held = [torch.cat(codes, 1), torch.stack(scales, 1), torch.stack(zeros, 1)]
    return Tiled(*(each.to(torch.uint8) for each in held), torch.stack(ranges, 1), format_)


@dataclass(frozen=True, kw_only=True)
class Outliers(QuantizeWeights):
    """The largest weights exactly, the others rounded to nearest."""

    name: ClassVar[str] = "outliers"

    share: float = 0.01
    tiles: bool = False

    def apply(self, site: Site) -> dict[str, Decision]:
        return {name: self.decide(weight_NK, site.scale_dtypes[name]) for name, weight_NK in site.weights.items()}

    def decide(self, weight_NK: Tensor, dtype: torch.dtype) -> Decision:
        limit = weight_NK.abs().float().quantile(1 - self.share)
        chosen_NK = weight_NK.abs() > limit
        rest_NK = weight_NK.masked_fill(chosen_NK, 0)
        codes = tiled(rest_NK, Tiles(), dtype) if self.tiles else quantize(rest_NK, self.weight_grid(), dtype)
        return Decision(Weight((codes, sparse(weight_NK.to(dtype), chosen_NK))))
