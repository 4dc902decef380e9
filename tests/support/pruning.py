"""A pass that prunes, for tests of what holds for all of them."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.passes.protocol.base import Aspect, Pass
from compress.passes.protocol.sites import Site
from compress.weights.decision import Decision
from compress.weights.formats.dense import dense
from compress.weights.matrix import Term


def largest(weight: Tensor, share: float) -> Tensor:
    """Which weights are among the largest of their row, bool [N, K]."""
    count = round(weight.shape[1] * share)
    return torch.zeros_like(weight, dtype=torch.bool).scatter(1, weight.abs().topk(count, dim=1).indices, True)


@dataclass(frozen=True, kw_only=True)
class Largest(Pass):
    """Keeps the largest weights of each row."""

    name: ClassVar[str] = "largest"
    writes: ClassVar[Aspect] = "mask"

    share: float = 0.5

    def apply(self, site: Site) -> dict[str, Decision]:
        decisions = {}
        for name, weight in site.weights.items():
            kept = largest(weight, self.share)
            decisions[name] = Decision(self.stands_for(weight * kept, site.scale_dtypes[name]), kept=kept)
        return decisions

    def stands_for(self, weight: Tensor, dtype: torch.dtype) -> Term:
        """What is decided in place of a weight."""
        return dense(weight.to(dtype))
