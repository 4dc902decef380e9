"""Taylor: the weights that the loss depends on least become zero (Molchanov et al., arXiv 1906.10771).

Shapes: N outputs, K inputs. g = dL / dW is the gradient of the loss of one micro-batch, in the original model.

    L - L(w = 0)  ~  g w            to first order
    score_ij = sum over micro-batches of (g_ij W_ij)^2

The loss is the task's: the cross entropy of next tokens for a model that generates text, or what a model returns for
the labels of its batches. Unlike the others, which look at a layer's output, this looks through the whole model.

Paper -> code: I^(1)_m, equation 8 -> `solvers.scores.taylor`; the groups there, of neurons, are single weights here.

What it costs: a forward with what goes into each block kept, and a backward in which each block runs once more, with a
graph; one block at a time is in memory. Sums are float64: 8 bytes a weight, over the number of ranks. A score depends
on what shares a micro-batch (`batch_size`), as squares of sums do. On a GPU gradients have the model's dtype:
float16 loses small ones, and `dtype` float32 or bfloat16 does not.

Departs from the paper:
- the mask is taken once, from the original model; the paper prunes a little at a time while it trains.
- the loss of a micro-batch is a mean over its tokens, and scores are sums over micro-batches, not moving averages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
from torch import Tensor

from compress.base.collectives import RowShard
from compress.base.errors import InputError
from compress.passes.options.prune import Ranked
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Gradients, Settled, Stage
from compress.solvers.scores import taylor


@dataclass(frozen=True, kw_only=True)
class Taylor(Ranked):
    """The weights that the loss depends on most stay."""

    name: ClassVar[str] = "taylor"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.permute:
            raise InputError("permute moves weights whose gradients taylor has seen in their places; leave it out")

    @property
    def stages(self) -> tuple[Stage, ...]:
        return Gradients(taylor, self.settle_by_gradients), self.decide_stage

    def settle_by_gradients(self, sums: Mapping[str, RowShard]) -> Settled:
        """The pass with its scores."""
        return Settled(Scored(**{f.name: getattr(self, f.name) for f in fields(self)}, sums=sums))


@dataclass(frozen=True, kw_only=True)
class Scored(Taylor):
    """Taylor with its scores, of which this rank has some rows."""

    sums: Mapping[str, RowShard] = field(default_factory=dict, compare=False, repr=False)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (self.decide_stage,)

    def wants(self, layer: str) -> bool:
        return layer in self.sums and super().wants(layer)

    def score(self, site: Site, name: str) -> Tensor:
        found = self.sums[name].gathered(site.weights[name].device)
        assert found.dtype == torch.float64
        return found
