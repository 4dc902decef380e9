"""Gains after a sweep: rounds of a refit of scales and of coordinate descent on codes.

Shapes: N outputs, K inputs, G groups, g columns of a group. W [N, K] is the weight, Q its codes' values, E = W - Q.
Both lower tr(E H E^T), row by row, and never raise it. A refit moves one scale at a time to the minimum of the parabola
that the loss is in it, where the codes stay (`gptq.refit_scales`, `tile_rule.refit_tiles`); descent moves one code.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from compress.base.threads import one_thread
from compress.kernels.cpu.column_sweep import ColumnBlock, DecidedColumns, SweptBlock, descend_columns, sweep_columns
from compress.solvers.column_sweep import BLOCK, ColumnRule, is_small


class SettledRule(ColumnRule):
    """A rule whose columns, once each is decided, may be decided again."""

    settled: bool

    @abstractmethod
    def at(self, column: int) -> tuple[Tensor, ...]:
        """The tensors that `decide` writes for a column."""

    @abstractmethod
    def held(self) -> DecidedColumns | None:
        """Arguments for the compiled loops to decide as `decide` does; None where they cannot."""

    def run(self, block: SweptBlock, begin: int, end: int) -> None:
        compiled = self.held()
        if compiled is None:
            super().run(block, begin, end)
        else:
            sweep_columns(block, compiled, begin, end)

    def descend(self, block: ColumnBlock) -> None:
        """Each column of a block moves to the grid point nearest its own optimum, one after another.

        Values are rounded to the scale's dtype, so the nearest code may have a farther value: it does not move then.
        """
        compiled = self.held()
        if compiled is None:
            with one_thread(is_small(block.target)):
                self._each_column(block)
        else:
            descend_columns(block, compiled)

    def _each_column(self, block: ColumnBlock) -> None:
        columns, target = len(block.target), block.target
        for j in range(columns):
            wanted = block.value[j] + target[j] / block.diagonal[j]
            before = [held.clone() for held in self.at(block.first + j)]
            value = self.decide(block.first + j, wanted)
            closer = (value - wanted).abs() < (block.value[j] - wanted).abs()
            for held, old in zip(self.at(block.first + j), before, strict=True):
                held.copy_(torch.where(closer, held, old))
            value = torch.where(closer, value, block.value[j])
            block.change[j] = value - block.value[j]
            block.value[j] = value
            if j + 1 < columns:
                target[j + 1 :].addr_(block.matrix[j, j + 1 :], block.change[j], alpha=-1)


class Grouped(Protocol):
    """A rule whose groups all have their scales [G, N]."""

    @property
    def group_of(self) -> list[int]: ...

    @property
    def scale(self) -> Tensor: ...


def members(rule: Grouped) -> Sequence[Tensor | slice]:
    """The columns of each group, in sweep order: [g] of them, or from where to where."""
    group_of, groups = torch.tensor(rule.group_of, device=rule.scale.device), len(rule.scale)
    columns = torch.argsort(group_of, stable=True)
    if not bool((columns.diff() == 1).all()):
        return columns.view(groups, -1).unbind()
    size = len(columns) // groups
    return [slice(group * size, (group + 1) * size) for group in range(groups)]


R = TypeVar("R", bound=SettledRule)


class Polish(Generic[R]):
    """Refit and coordinate descent on what a finished sweep decided, in sweep order. Updates the rule's tensors.

    weight, values [N, K] as a sweep has them; kept as [K, N], outputs side by side, as the rule's tensors are.
    gradient [K, N]: (E H)^T, kept up to date by whatever changes values.
    """

    def __init__(self, weight_NK: Tensor, values_NK: Tensor, rule: R, hessian: Tensor) -> None:
        self.weight, self.values = (x.t().contiguous() for x in (weight_NK, values_NK))
        self.rule, self.hessian = rule, hessian
        self.gradient = hessian.t() @ (self.weight - self.values)
        rule.settled = True

    def loss(self) -> Tensor:
        return (self.gradient * (self.weight - self.values)).sum(0)

    def move(self, columns: Tensor | slice, change: Tensor) -> None:
        """Change the values of some columns by [g, N]."""
        self.values[columns] += change
        self.gradient.addmm_(self.hessian[columns].t(), change, alpha=-1)

    def rounds(self, refit: Callable[[], None], refits: int, sweeps: int) -> Tensor:
        """So many rounds of a refit and of descent, in turns; returns the loss."""
        last = max(refits, sweeps) - 1
        for step in range(last + 1):
            if step < refits:
                refit()
            if step == last < sweeps:
                return self.descend_last()
            if step < sweeps:
                self.descend()
        return self.loss()

    def descend(self) -> None:
        """One cyclic pass of coordinate descent: each code moves to the grid point nearest its own optimum, a weight
        that is no code to the optimum itself."""
        for part in self.blocks():
            self.move(part, self.descended(part))

    def descend_last(self) -> Tensor:
        """`descend` after which nothing else moves, so that columns need their gradient no longer than until they have
        been moved. Returns the loss."""
        loss = self.loss()
        for part in self.blocks():
            change = self.descended(part)
            loss -= (change * (2 * self.gradient[part] - self.hessian[part, part] @ change)).sum(0)
            self.values[part] += change
            self.gradient[part.stop :].addmm_(self.hessian[part, part.stop :].t(), change, alpha=-1)
        return loss

    def blocks(self) -> list[slice]:
        """Columns that descend together."""
        columns = len(self.weight)
        return [slice(first, min(first + BLOCK, columns)) for first in range(0, columns, BLOCK)]

    def descended(self, part: slice) -> Tensor:
        """[B, N] what the values of a block's columns change by in descent."""
        own = self.hessian[part, part].contiguous()
        gradient, values = self.gradient[part].clone(), self.values[part].clone()
        change = torch.empty_like(values)
        self.rule.descend(ColumnBlock(part.start, gradient, values, change, own, own.diagonal().contiguous()))
        return change
