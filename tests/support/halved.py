"""A pass that prunes to 2:4, for tests of how that is stored and run."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pruning import Largest
from torch import Tensor

from compress.passes.protocol.sites import Site
from compress.weights.decision import Decision


def largest_two(weight_NK: Tensor, most: int = 2) -> Tensor:
    """bool [N, K]: of every four consecutive weights the largest two."""
    quads = weight_NK.abs().view(len(weight_NK), -1, 4)
    return torch.zeros_like(quads, dtype=torch.bool).scatter(-1, quads.topk(most, -1).indices, True).flatten(1)


@dataclass(frozen=True, kw_only=True)
class TwoOfFour(Largest):
    """Keeps the largest two of every four weights along the inputs."""

    name: ClassVar[str] = "two-of-four"

    def apply(self, site: Site) -> dict[str, Decision]:
        kept = {name: largest_two(weight) for name, weight in site.weights.items()}
        return {
            name: Decision(self.stands_for(weight * kept[name], site.scale_dtypes[name]), kept=kept[name])
            for name, weight in site.weights.items()
        }
