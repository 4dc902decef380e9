"""What a sweep decides on a grid, and what can still be gained once it is over: scale refit and coordinate descent.

Shapes: N outputs, K inputs, G groups, g columns of a group. W [N, K] is the weight, Q its codes' values, E = W - Q.
Both lower tr(E H E^T), row by row, and never raise it: `refit_scales` moves one scale at a time to the minimum of the
parabola that the loss is in it, `descend` one code.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from compress.passes.outliers import costs, exact_places
from compress.passes.sweep import BLOCK
from compress.weights.grid import Grid, decode, encode, fit, round_scale


@dataclass
class GridRule:
    """Round each target to the grid; scales are fitted when a group begins, or given.

    kept [K, N], in sweep order as the codes are: weights that are not kept have the code of 0, and no say in a range
    (every range holds 0, which is exact in it). price [N]: what a weight of its own is worth (`passes.outliers`), where
    an error of column j costs cost_K[j]; exact [K, N]: the weights that have one, beside the code of 0. They are chosen
    as the sweep goes, until the rule is `settled`.
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
        """What `decide` writes for a column."""
        return (self.codes[column],)

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


class Settled(Protocol):
    """A rule that has decided every column once."""

    settled: bool

    def decide(self, column: int, target_N: Tensor) -> Tensor:
        """As in the sweep."""
        ...

    def at(self, column: int) -> tuple[Tensor, ...]:
        """What `decide` writes for a column."""
        ...


class Grouped(Protocol):
    """A rule whose groups all have their scales [G, N]."""

    @property
    def group_of(self) -> list[int]: ...

    @property
    def scale(self) -> Tensor: ...


def members(rule: Grouped) -> Tensor:
    """[G, g] the columns of each group, in sweep order."""
    group_of = torch.tensor(rule.group_of, device=rule.scale.device)
    return torch.argsort(group_of, stable=True).view(len(rule.scale), -1)


R = TypeVar("R", bound=Settled)


class Polish(Generic[R]):
    """Refit and coordinate descent on what a finished sweep decided, in sweep order. Updates the rule's tensors."""

    def __init__(self, weight: Tensor, values: Tensor, rule: R, hessian: Tensor) -> None:
        self.weight, self.values, self.rule, self.hessian = weight, values, rule, hessian
        rule.settled = True

    def loss(self) -> Tensor:
        error = self.weight - self.values
        return ((error @ self.hessian) * error).sum(1)

    def rounds(self, refit: Callable[[], None], refits: int, sweeps: int) -> Tensor:
        """So many rounds of a refit and of descent, in turns; returns the loss."""
        for step in range(max(refits, sweeps)):
            if step < refits:
                refit()
            if step < sweeps:
                self.descend()
        return self.loss()

    def refit_scales(self: "Polish[GridRule]") -> None:
        """For fixed codes the loss is quadratic in each scale: set it to its minimum, group after group."""
        rule = self.rule
        gradient = (self.weight - self.values) @ self.hessian
        for group, columns in enumerate(members(rule)):
            steps = (rule.codes[columns] - rule.zero_point[group]).t()
            curvature = ((steps @ self.hessian[columns][:, columns]) * steps).sum(1)
            slope = (gradient[:, columns] * steps).sum(1)
            old = rule.scale[group]
            moved = old + slope / curvature.clamp(min=torch.finfo(curvature.dtype).tiny)
            valid = (curvature > 0) & torch.isfinite(moved) & (moved * old > 0)
            new = torch.where(valid, round_scale(moved, rule.scale_dtype), old)
            values = decode(steps, new.unsqueeze(1), torch.zeros_like(new).unsqueeze(1), rule.scale_dtype)
            change = values - self.values[:, columns]
            if rule.exact is not None:
                change = change.masked_fill(rule.exact[columns].t(), 0.0)
            # Rounding the scale may lose what the step gained: keep the old one there.
            gain = 2 * (gradient[:, columns] * change).sum(1)
            gain = gain - ((change @ self.hessian[columns][:, columns]) * change).sum(1)
            change = torch.where((gain > 0).unsqueeze(1), change, torch.zeros_like(change))
            rule.scale[group] = torch.where(gain > 0, new, old)
            self.values[:, columns] += change
            gradient -= change @ self.hessian[columns]

    def descend(self) -> None:
        """One cyclic pass of coordinate descent: each code moves to the grid point nearest its own optimum, a weight
        that is no code to the optimum itself.

        Values are rounded to the scale's dtype, so the nearest code may have a farther value: it does not move then.
        """
        rule, columns = self.rule, self.weight.shape[1]
        gradient = (self.weight - self.values) @ self.hessian
        for first in range(0, columns, BLOCK):
            last = min(first + BLOCK, columns)
            block = self.hessian[first:last, first:last].contiguous()
            gradient_BN = gradient[:, first:last].t().contiguous()
            values_BN = self.values[:, first:last].t().contiguous()
            change_BN = torch.empty_like(values_BN)
            for j in range(last - first):
                target = values_BN[j] + gradient_BN[j] / block[j, j]
                before = [held.clone() for held in rule.at(first + j)]
                value = rule.decide(first + j, target)
                closer = (value - target).abs() < (values_BN[j] - target).abs()
                for held, old in zip(rule.at(first + j), before, strict=True):
                    held.copy_(torch.where(closer, held, old))
                value = torch.where(closer, value, values_BN[j])
                change_BN[j] = value - values_BN[j]
                values_BN[j] = value
                gradient_BN.addr_(block[j], change_BN[j], alpha=-1)
            self.values[:, first:last] = values_BN.t()
            gradient -= change_BN.t() @ self.hessian[first:last]
