"""The column sweep: quantize (or prune) a weight column by column, feeding each column's error into the next ones.

Shapes: N outputs, K inputs, B columns of one block. E = W - Q is the error of the columns already decided.

With the input Hessian H = U D U^T (U unit upper triangular, D diagonal), the loss of Q is a sum over columns,

    tr(E H E^T) = sum_j D_j |t_j - q_j|^2        t_j = w_j + sum_{i<j} e_i U_ij

so rounding each target t_j to its nearest code is greedily optimal and the loss comes for free. This is the LDLQ form
(QuIP, arXiv 2307.13304, section 3) of GPTQ (arXiv 2210.17323, algorithm 1) and decides the same codes: one Cholesky
factorisation of the flipped H replaces the factorisation, inversion and second factorisation of the paper.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.base.errors import CompressError
from compress.base.threads import one_thread
from compress.kernels.cpu.column_sweep import SweptBlock

BLOCK = 128
# Numbers in columns that are decided one after another, from which several threads are worth it.
WORTH_THREADS = 2**18
DAMP = 0.01
DAMP_GROWTH, DAMP_LIMIT = 10.0, 1e3
ActOrder = Literal["none", "static", "group"]


@dataclass(frozen=True)
class Factor:
    """H + damp * mean(diag H) * I = U D U^T: unit upper [K, K], diagonal [K], and the damping that was needed."""

    upper: Tensor
    diagonal: Tensor
    damp: float


def damped(hessian_KK: Tensor, damp: float) -> Tensor:
    """H with `damp` times the mean of its live diagonal added; dead columns (zero diagonal) get that mean itself."""
    result = hessian_KK.clone()
    result.diagonal().add_(_added(hessian_KK.diagonal(), damp))
    return result


def _added(diagonal: Tensor, damp: float) -> Tensor:
    live = diagonal > 0
    mean = diagonal[live].mean() if bool(live.any()) else diagonal.new_ones(())
    return torch.where(live, damp * mean, mean * (1 + damp))


def factorize(hessian_KK: Tensor, damp: float) -> Factor:
    """Factor H in the sweep's column order, raising the damping tenfold until it is positive definite.

    Raises CompressError where it is not even with 1000 times the mean diagonal (the statistics are not finite).
    """
    level = damp
    while level <= DAMP_LIMIT:
        # Few matrices of [K, K] at a time: one may take a gigabyte.
        flipped = hessian_KK.flip(0, 1)
        flipped.diagonal().add_(_added(hessian_KK.diagonal(), level).flip(0))
        lower, failed = torch.linalg.cholesky_ex(flipped)
        del flipped
        if not int(failed) and bool(torch.isfinite(lower.diagonal()).all()):
            upper = lower.flip(0, 1)
            del lower
            root = upper.diagonal().clone()
            return Factor(upper.div_(root), root * root, level)
        level = max(level * DAMP_GROWTH, 1e-4)
    raise CompressError(
        f"the Hessian has no Cholesky factor even with damping {DAMP_LIMIT}; "
        "check the calibration data for non-finite activations"
    )


@dataclass(frozen=True)
class Ordered:
    """A Hessian as a sweep visits it: its columns [K] in that order, itself [K, K] and its damped factor in the order,
    its diagonal [K] in the layer's own. fixed: scales are fitted before the sweep, not as it comes to a group."""

    order_K: Tensor
    hessian_KK: Tensor
    factor: Factor
    diagonal_K: Tensor
    fixed: bool

    def back(self, columns_in_order: Tensor) -> Tensor:
        """[..., K] in the order of the sweep -> in the layer's own."""
        found = torch.empty_like(columns_in_order)
        found[..., self.order_K] = columns_in_order
        return found

    @property
    def costs(self) -> Tensor:
        """[K] what an error of each column costs in a sweep, in the layer's own order."""
        return self.back(self.factor.diagonal)


def ordered(hessian_KK: Tensor, damp: float, act_order: ActOrder, group_size: int | None) -> Ordered:
    """The Hessian in the order in which a sweep visits its columns, and its factor. group_size: inputs that share a
    scale, for act_order "group". Raises CompressError where no damping makes it positive definite."""
    diagonal_K = hessian_KK.diagonal()
    order_K = column_order(diagonal_K, act_order, group_size)
    in_order = hessian_KK if act_order == "none" else hessian_KK[order_K][:, order_K]
    return Ordered(order_K, in_order, factorize(in_order, damp), diagonal_K, act_order == "static")


def column_order(diagonal_K: Tensor, act_order: ActOrder, group_size: int | None) -> Tensor:
    """The permutation [K] in which columns are visited; dead columns come last (of their group, for `group`)."""
    columns = len(diagonal_K)
    if act_order == "none":
        return torch.arange(columns, device=diagonal_K.device)
    if act_order == "static" or group_size is None:
        return torch.argsort(diagonal_K, descending=True, stable=True)
    groups = diagonal_K.view(-1, group_size)
    inside = torch.argsort(groups, dim=1, descending=True, stable=True)
    outside = torch.argsort(groups.amax(1), descending=True, stable=True)
    starts = torch.arange(0, columns, group_size, device=diagonal_K.device).unsqueeze(1)
    return (inside + starts)[outside].reshape(-1)


def is_small(columns: Tensor) -> bool:
    """True for columns whose steps take a CPU less time than several threads take to meet."""
    return columns.device.type == "cpu" and columns.numel() < WORTH_THREADS


class ColumnRule(ABC):
    """Decides columns. `group` columns share what `begin` prepares (0: `begin` is never called), and `span` columns,
    which are several groups, what `open` does before (0: `open` is never called)."""

    group: int
    span: int = 0

    def open(self, column: int, updated_SN: Tensor) -> None:
        """Columns [column, column + span), as `begin` has those of a group."""
        raise NotImplementedError

    @abstractmethod
    def begin(self, column: int, updated_gN: Tensor) -> None:
        """Columns [column, column + group) as GPTQ would hold them now: the weights plus all feedback so far."""

    @abstractmethod
    def decide(self, column: int, target_N: Tensor) -> Tensor:
        """The value [N] that stands for this column from now on."""

    def run(self, block: SweptBlock, begin: int, end: int) -> None:
        """Decide columns [begin, end) of a block, whose targets have the feedback of all columns before `begin`."""
        with one_thread(is_small(block.target[begin:end])):
            for j in range(begin, end):
                target = block.target[j]
                value = self.decide(block.first + j, target)
                block.loss.add_(block.diagonal[j] * (target - value) ** 2)
                block.value[j] = value
                block.change[j] = block.weight[j] - value
                if j + 1 < end:
                    block.target[j + 1 : end].addr_(block.matrix[j, j + 1 : end], block.change[j])


def sweep(weight_NK: Tensor, factor: Factor, rule: ColumnRule) -> tuple[Tensor, Tensor]:
    """Run `rule` over the columns. Returns (values [N, K], loss [N]), loss being tr(E H E^T) split by output row."""
    rows, columns = weight_NK.shape
    upper, group = factor.upper, rule.group
    inside = 0 < group < columns
    block = rule.span or (group * max(1, BLOCK // group) if inside else BLOCK)
    # Outputs side by side: every column is contiguous.
    weight_KN = weight_NK.t().contiguous()
    value_KN, error_KN = torch.empty_like(weight_KN), torch.empty_like(weight_KN)
    loss = weight_NK.new_zeros(rows)
    if group >= columns:
        rule.begin(0, weight_KN)
    for first in range(0, columns, block):
        last = min(first + block, columns)
        feedback = upper[first:last, first:last].contiguous()
        weight_BN, value_BN, error_BN = (x[first:last] for x in (weight_KN, value_KN, error_KN))
        target_BN = weight_BN.clone()
        if first:
            target_BN.addmm_(upper[:first, first:last].t(), error_KN[:first])
        diagonal = factor.diagonal[first:last].contiguous()
        here = SweptBlock(first, target_BN, value_BN, error_BN, feedback, diagonal, weight_BN, loss)
        if rule.span:
            rule.open(first, updated(here, 0, last - first))
        step = group if inside else last - first
        for j in range(0, last - first, step):
            end = min(j + step, last - first)
            if inside:
                rule.begin(first + j, updated(here, j, end))
            rule.run(here, j, end)
            if end < last - first:
                target_BN[end:].addmm_(feedback[j:end, end:].t(), error_BN[j:end])
    return value_KN.t(), loss


def updated(block: SweptBlock, begin: int, end: int) -> Tensor:
    """Columns [begin, end) of a block as GPTQ holds them: w + x with x U = t - w, of which only their own corner of U
    matters."""
    change, corner = (block.target - block.weight)[begin:end], block.matrix[begin:end, begin:end]
    return block.weight[begin:end] + torch.linalg.solve_triangular(corner.t(), change, upper=False, unitriangular=True)
