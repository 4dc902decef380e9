"""Penalties that draw weights to zero: l1 (the lasso), and a length per group (group lasso).

    l1 sum |w|  +  group_lasso sum_g sqrt(n_g) ||w_g||        n_g: the weights of a group (Yuan & Lin 2006, equation 2)

Rows and columns of layers as groups: Wen et al. 2016 (arXiv 1608.03665). Penalties have no gradient at zero; they are
minimized by a proximal step after the optimizer's, of the rate r that it has then (Parikh & Boyd 2014, sections 6.5.2
and 6.5.4):

    w <- sign(w) max(|w| - r l1, 0)         w_g <- w_g max(1 - r group_lasso sqrt(n_g) / ||w_g||, 0)

one after the other, which is the step of their sum (Simon et al. 2013, the sparse group lasso). Weights get to exactly
zero by it, and may leave it.

Departs from theory: r is not divided by Adam's moments, which would shrink each weight by another amount; as AdamW's
decay, penalties have no part in these moments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from compress.base.collectives import Comm
from compress.model.layers import Layer
from compress.train.inputs.fsdp_shards import copies
from compress.train.rounding.sparsity_options import Groups


@dataclass(frozen=True)
class Penalized:
    """A weight as it is trained, which may be a shard. dim: each index along it is a group."""

    parameter: Tensor
    dim: int

    @property
    def local(self) -> Tensor:
        """This rank's part of the weight."""
        weight = self.parameter.detach()
        return weight.to_local() if isinstance(weight, DTensor) else weight

    @property
    def scattered(self) -> bool:
        """True where other ranks hold parts of the same groups."""
        placements = self.parameter.placements if isinstance(self.parameter, DTensor) else ()
        return any(isinstance(each, Shard) and each.dim != self.dim for each in placements)


def penalized_weights(layers: Sequence[Layer], groups: Groups) -> list[Penalized]:
    """The weights of layers, a shared one once."""
    found = {id(each.parameter): each for each in layers}
    return [Penalized(each.parameter, int(each.transposed != (groups == "inputs"))) for each in found.values()]


@dataclass(frozen=True)
class Penalties:
    """Shrinks weights after each step of the optimizer."""

    weights: Sequence[Penalized]
    l1: float
    group_lasso: float
    comm: Comm

    @torch.no_grad()
    def __call__(self, rate: float) -> None:
        """The proximal step. A collective."""
        for each in self.weights:
            if self.l1:
                soften(each.local, rate * self.l1)
            if self.group_lasso:
                self._shorten(each, rate * self.group_lasso)

    def _shorten(self, each: Penalized, by: float) -> None:
        weight, groups = each.local, each.parameter.shape[each.dim]
        others = [dim for dim in range(weight.ndim) if dim != each.dim]
        squares = weight.double().square().sum(others, keepdim=True)
        if each.scattered:
            squares = self.comm.all_reduce(squares.contiguous()) / copies(each.parameter)
        size = each.parameter.numel() // groups
        length = squares.sqrt()
        factor = torch.where(length > 0, 1 - by * size**0.5 / length, 0.0).clamp(min=0)
        weight.mul_(factor.to(weight.dtype))


def soften(weight: Tensor, by: float) -> None:
    """Move every value toward zero by so much, in place; zero where it is no further away."""
    weight.copy_(weight.sign() * (weight.abs() - by).clamp(min=0))
