"""What a sweep decides on a grid, and what can still be gained once it is over: scale refit and coordinate descent.

Shapes: N outputs, K inputs, G groups, g columns of a group. W [N, K] is the weight, Q its codes' values, E = W - Q.
Both lower tr(E H E^T), row by row, and never raise it: `refit_scales` moves one scale at a time to the minimum of the
parabola that the loss is in it, `descend` one code.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from compress.kernels.cpu.columns import Block, Held, Rounding, SweptBlock, descend_columns, sweep_columns, takes
from compress.solvers.outliers import costs, exact_places
from compress.solvers.sweep import BLOCK, ColumnRule
from compress.weights.grid import Grid, decode, encode, fit, round_scale


class Settled(ColumnRule):
    """A rule whose columns, once each is decided, may be decided again."""

    settled: bool

    @abstractmethod
    def at(self, column: int) -> tuple[Tensor, ...]:
        """What `decide` writes for a column."""

    @abstractmethod
    def held(self) -> Held | None:
        """What the compiled loops need to decide as `decide` does; None where they cannot."""

    def run(self, block: SweptBlock, begin: int, end: int) -> None:
        compiled = self.held()
        if compiled is None:
            super().run(block, begin, end)
        else:
            sweep_columns(block, compiled, begin, end)

    def descend(self, block: Block) -> None:
        """Each column of a block moves to the grid point nearest its own optimum, one after another.

        Values are rounded to the scale's dtype, so the nearest code may have a farther value: it does not move then.
        """
        compiled = self.held()
        if compiled is None:
            self._one_by_one(block)
        else:
            descend_columns(block, compiled)

    def _one_by_one(self, block: Block) -> None:
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


@dataclass
class GridRule(Settled):
    """Round each target to the grid; scales are fitted when a group begins, or given.

    kept [K, N], in sweep order as the codes are: weights that are not kept have the code of 0, and no say in a range
    (every range holds 0, which is exact in it). price [N]: what a weight of its own is worth (`solvers.outliers`),
    where an error of column j costs cost_K[j]; exact [K, N]: the weights that have one, beside the code of 0. They are
    chosen as the sweep goes, until the rule is `settled`.
    """

    grid: Grid
    scale_dtype: torch.dtype
    group: int
    group_of: list[int]
    importance_K: Tensor
    cost_K: Tensor
    codes: Tensor
    scale: Tensor
    zero_point: Tensor
    kept: Tensor | None = None
    price: Tensor | None = None
    exact: Tensor | None = None
    settled: bool = False

    def begin(self, column: int, updated_gN: Tensor) -> None:
        importance = self.importance_K[column : column + len(updated_gN)]
        if self.kept is not None:
            updated_gN = updated_gN * self.kept[column : column + len(updated_gN)]
        if self.price is not None and self.exact is not None:
            cost = self.cost_K[column : column + len(updated_gN)]
            found = costs(updated_gN.t(), self.grid, self.scale_dtype, cost)
            self.exact[column : column + len(updated_gN)] = exact = exact_places(found, self.price.unsqueeze(1)).t()
            updated_gN = updated_gN.masked_fill(exact, 0.0)
        scale, zero_point = fit(updated_gN.t(), self.grid, self.scale_dtype, importance)
        self.scale[self.group_of[column]] = scale
        self.zero_point[self.group_of[column]] = zero_point

    def decide(self, column: int, target_N: Tensor) -> Tensor:
        group = self.group_of[column]
        scale, zero_point = self.scale[group], self.zero_point[group]
        codes = encode(target_N, scale, zero_point, self.grid)
        if self.kept is not None:
            codes = torch.where(self.kept[column], codes, zero_point)
        values = decode(codes, scale, zero_point, self.scale_dtype)
        if self.exact is not None:
            exact = self._exact(column, target_N - values)
            codes = torch.where(exact, zero_point, codes)
            values = torch.where(exact, target_N.to(self.scale_dtype).to(target_N.dtype), values)
        self.codes[column] = codes
        return values

    def at(self, column: int) -> tuple[Tensor, ...]:
        return (self.codes[column],)

    def held(self) -> Held | None:
        if self.grid.type != "int" or not takes(self.codes, self.scale_dtype):
            return None
        rounding = Rounding(self.grid.qmin, self.grid.qmax, self.scale_dtype)
        price = None if self.settled or self.exact is None else self.price
        decided = (self.codes, self.scale, self.zero_point, self.group_of)
        return Held(*decided, rounding, self.kept, self.exact, price, self.cost_K)

    def mixed(self, other: "GridRule", from_other_N: Tensor) -> "GridRule":
        """What this rule has decided, but for some outputs, of which the other has."""
        held = ("codes", "scale", "zero_point", "exact")
        pairs = {name: (getattr(other, name), getattr(self, name)) for name in held if getattr(self, name) is not None}
        taken: dict[str, Any] = {name: torch.where(from_other_N, *pair) for name, pair in pairs.items()}
        return replace(self, **taken)

    def _exact(self, column: int, error_N: Tensor) -> Tensor:
        """Which weights of a column are exact; while the sweep goes, also those whose error costs more than that."""
        assert self.exact is not None
        if not self.settled and self.price is not None:
            dear = self.cost_K[column] * error_N.square() > self.price
            self.exact[column] |= dear if self.kept is None else dear & self.kept[column]
        return self.exact[column]


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


R = TypeVar("R", bound=Settled)


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

    def refit_scales(self: "Polish[GridRule]") -> None:
        """For fixed codes the loss is quadratic in each scale: set it to its minimum, group after group."""
        rule = self.rule
        for group, columns in enumerate(members(rule)):
            steps = rule.codes[columns] - rule.zero_point[group]
            own = self.hessian[columns][:, columns]
            gradient = self.gradient[columns]
            curvature = ((own @ steps) * steps).sum(0)
            slope = (gradient * steps).sum(0)
            old = rule.scale[group]
            moved = old + slope / curvature.clamp(min=torch.finfo(curvature.dtype).tiny)
            valid = (curvature > 0) & torch.isfinite(moved) & (moved * old > 0)
            new = torch.where(valid, round_scale(moved, rule.scale_dtype), old)
            change = decode(steps, new, torch.zeros_like(new), rule.scale_dtype) - self.values[columns]
            if rule.exact is not None:
                change = change.masked_fill(rule.exact[columns], 0.0)
            # Rounding the scale may lose what the step gained: keep the old one there.
            gain = (change * (2 * gradient - own @ change)).sum(0)
            change = torch.where(gain > 0, change, torch.zeros_like(change))
            rule.scale[group] = torch.where(gain > 0, new, old)
            self.move(columns, change)

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
        self.rule.descend(Block(part.start, gradient, values, change, own, own.diagonal().contiguous()))
        return change
