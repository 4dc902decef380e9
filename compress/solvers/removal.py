"""Removal of groups of inputs that a layer can do without, and its compensation: least squares on second moments.

Shapes: N outputs, K inputs, G groups of s inputs each (columns_Gs), R the inputs that go, S those that stay. Inputs in
no group always stay. `passes.whole_model.structure` has the equations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from compress.solvers.hessian_with_drift import factorize
from compress.solvers.statistics.hessian import Hessian


@dataclass(frozen=True)
class CutConsumer:
    """A layer that reads removed channels: its target weight [N, K] and second moments of its input [K, K], both
    float64, the inputs of each group, and the damping."""

    weight: Tensor
    hessian: Tensor
    columns_Gs: Tensor
    damp: float

    @property
    def staying(self) -> Tensor:
        """The inputs that are in no group."""
        free_K = torch.ones(len(self.hessian), dtype=torch.bool, device=self.hessian.device)
        free_K[self.columns_Gs.flatten()] = False
        return free_K.nonzero().flatten()

    def inputs(self, groups: Tensor) -> Tensor:
        """The inputs of some groups and those in none, in order."""
        inside = self.columns_Gs[groups.to(self.columns_Gs.device)].flatten()
        return torch.cat([inside, self.staying]).sort().values


def regular(hessian_KK: Tensor, damp: float) -> tuple[Tensor, Tensor]:
    """(H + damp * mean(diag H) * I, its Cholesky factor), the damping raised tenfold until there is one. An input that
    is never active costs the damping alone, and goes first. Raises CompressError where H is not finite."""
    mean = hessian_KK.diagonal().mean()
    mean = mean if mean > 0 else torch.ones_like(mean)

    def regularized(level: float) -> Tensor:
        result = hessian_KK.clone()
        result.diagonal().add_(level * mean)
        return result

    lower, level = factorize(regularized, damp)
    return regularized(level), lower


class Costs(Protocol):
    """Costs to a layer of removing groups, given the groups removed before."""

    def scores(self) -> Tensor:
        """[G] the cost of each group that is left; of one that has gone, anything."""
        ...

    def remove(self, groups: Tensor) -> None:
        """These groups go."""
        ...


class LeastSquares:
    """tr(W_R ([H^-1]_RR)^-1 W_R^T): the cost of removal where the others make up for it. W and H^-1 are those of the
    others, by block elimination."""

    def __init__(self, consumer: CutConsumer) -> None:
        self.columns_Gs = consumer.columns_Gs
        self.weight = consumer.weight.clone()
        self.inverse = torch.cholesky_inverse(regular(consumer.hessian, consumer.damp)[1])

    def scores(self) -> Tensor:
        columns = self.columns_Gs
        if columns.shape[1] == 1:
            single = columns[:, 0]
            return self.weight[:, single].square().sum(0) / self.inverse.diagonal()[single].clamp(min=_TINY)
        blocks_Gss = self.inverse[columns[:, :, None], columns[:, None, :]]
        weight_GsN = self.weight.t()[columns]
        eye = torch.eye(columns.shape[1], dtype=blocks_Gss.dtype, device=blocks_Gss.device)
        gone = blocks_Gss.diagonal(dim1=1, dim2=2).amax(1) <= _TINY  # such a block has no inverse, and is not asked for
        blocks_Gss = torch.where(gone[:, None, None], eye, blocks_Gss)
        return (weight_GsN * torch.linalg.solve(blocks_Gss, weight_GsN)).sum((1, 2))

    def remove(self, groups: Tensor) -> None:
        gone = self.columns_Gs[groups].flatten()
        rows_RK = self.inverse[gone]
        solved_RK = torch.linalg.solve(rows_RK[:, gone], rows_RK)
        self.weight -= self.weight[:, gone] @ solved_RK
        self.inverse -= rows_RK.t() @ solved_RK
        self.weight[:, gone] = 0
        self.inverse[gone] = 0
        self.inverse[:, gone] = 0


_TINY = 1e-300  # of float64, in which all of this is computed


class Zeroing:
    """tr(W_R H_RR W_R^T): the cost where the others stay as they are."""

    def __init__(self, consumer: CutConsumer) -> None:
        self.weight, self.hessian, self.columns_Gs = consumer.weight, consumer.hessian, consumer.columns_Gs
        self.lost_NK = torch.zeros_like(self.weight)  # W_R H: what the outputs lack already, seen by each input

    def scores(self) -> Tensor:
        columns = self.columns_Gs
        weight_GsN = self.weight.t()[columns]
        blocks_Gss = self.hessian[columns[:, :, None], columns[:, None, :]]
        own = (weight_GsN * (blocks_Gss @ weight_GsN)).sum((1, 2))
        return own + 2 * (weight_GsN * self.lost_NK.t()[columns]).sum((1, 2))

    def remove(self, groups: Tensor) -> None:
        gone = self.columns_Gs[groups].flatten()
        self.lost_NK += self.weight[:, gone] @ self.hessian[gone]


def greedy(costs: Sequence[Costs], groups: int, count: int, rounds: int) -> Tensor:
    """The groups that stay, in order, where `count` of them go: in so many rounds those that cost least by then, over
    all layers that read them."""
    left = torch.ones(groups, dtype=torch.bool)
    each = max(1, -(-count // rounds))
    while (to_go := count - int((~left).sum())) > 0:
        scores = torch.stack([c.scores() for c in costs]).sum(0).cpu().masked_fill(~left, float("inf"))
        chosen = scores.argsort(stable=True)[: min(each, to_go)].sort().values
        for c in costs:
            c.remove(chosen)
        left[chosen] = False
    return left.nonzero().flatten()


def best(scores_G: Tensor, count: int) -> Tensor:
    """The groups that stay, in order, where the `count` of the lowest scores go."""
    return scores_G.cpu().argsort(stable=True)[count:].sort().values


def compensate(consumer: CutConsumer, staying_S: Tensor) -> Tensor:
    """[N, S] W H_{:,S} H_SS^-1 of the damped H: the best weights for the inputs that are left."""
    hessian, _ = regular(consumer.hessian, consumer.damp)
    inside_SS = hessian[staying_S][:, staying_S]
    right_SN = hessian[staying_S] @ consumer.weight.t()
    return torch.cholesky_solve(right_SN, torch.linalg.cholesky(inside_SS)).t()


def relative_loss(consumer: CutConsumer, staying_S: Tensor, weight_NS: Tensor) -> float:
    """|X W^T - X_S Q^T|^2 / |X W^T|^2, W being the target."""
    error = consumer.weight.clone()
    error[:, staying_S] -= weight_NS
    energy = ((consumer.weight @ consumer.hessian) * consumer.weight).sum()
    return float(((error @ consumer.hessian) * error).sum() / energy.clamp(min=_TINY))


class AffineHessian(Hessian):
    """`Hessian` of an input with one more channel, the last, that is always one, for the layer's bias."""

    def __init__(
        self, channels: int, device: torch.device, *, dtype: torch.dtype = torch.float32, reference: bool = False
    ) -> None:
        super().__init__(channels + 1, device, dtype=dtype, reference=reference)

    def update(self, x_MK: Tensor, reference_MK: Tensor | None) -> None:
        super().update(_with_one(x_MK), None if reference_MK is None else _with_one(reference_MK))


def _with_one(x_MK: Tensor) -> Tensor:
    return torch.cat([x_MK, x_MK.new_ones(len(x_MK), 1)], dim=1)
