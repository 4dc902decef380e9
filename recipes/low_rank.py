"""A format and a method of one's own, in one file: W = Q + L R, codes and a low-rank matrix beside them.

    PYTHONPATH=recipes compress quantize demo --method low_rank:LowRankAndCodes --set rank=8 --output out
    PYTHONPATH=recipes compress evaluate out --plugin low_rank

L R is the best approximation of W of its rank (Eckart and Young 1936). Q is the rest, rounded to nearest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress import Decision, QuantizeWeights, Site
from compress.weights.formats.registry import FORMATS
from compress.weights.matrix import Weight
from compress.weights.terms import FLOATS, Format, Part


@dataclass(frozen=True, kw_only=True)
class Factors(Format):
    """left [N, rank] times right [rank, K]."""

    kind: ClassVar[str] = "svd"
    rank: int

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {"left": Part((rows, self.rank), FLOATS, by_row=True), "right": Part((self.rank, columns), FLOATS)}

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["left"] @ parts["right"]

    def product(self, x: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        return x @ parts["right"].t() @ parts["left"].t()


FORMATS[Factors.kind] = Factors


@dataclass(frozen=True, kw_only=True)
class LowRankAndCodes(QuantizeWeights):
    """Codes beside a matrix of a low rank."""

    name: ClassVar[str] = "svd"
    rank: int = 8

    def apply(self, site: Site) -> dict[str, Decision]:
        codes = self.input_codes(site)  # how a scheme like w4a8 rounds inputs
        return {n: Decision(self.split(w, site.scale_dtypes[n]), inputs=codes.get(n)) for n, w in site.weights.items()}

    def split(self, weight_NK: Tensor, dtype: torch.dtype) -> Weight:
        u, s, v_transposed = torch.linalg.svd(weight_NK.float(), full_matrices=False)
        parts = {"left": (u * s)[:, : self.rank].to(dtype), "right": v_transposed[: self.rank].to(dtype)}
        product = Factors(rank=len(parts["right"])).read(parts, *weight_NK.shape)
        rest_NK = weight_NK - product.dequantize(weight_NK.dtype)
        return Weight((self.weight_grid().quantize(rest_NK, dtype), product))
