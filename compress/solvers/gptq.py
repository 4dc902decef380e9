"""GPTQ as functions of tensors: a weight and the Hessian of its input in, codes out (Frantar et al., arXiv 2210.17323).

Shapes: N outputs, K inputs, G groups. W [N, K] is the weight, H [K, K] the mean of x x^T over the layer's inputs x.

    minimise over codes and scales      tr(E H E^T),     E = W - Q

    sweep       columns are rounded one by one, each making up for the errors before it     `sweep.sweep` (algorithm 1)
    refit       for fixed codes the loss is quadratic in each scale                         `refit_scales`
    descent     each code moves to the grid point nearest its own optimum                   `polish.Polish`

A notebook needs one call:

    H = X.T @ X / len(X)                                    # of the inputs X [tokens, K] of a layer
    solved = gptq(layer.weight.data, H, grid=Grid(bits=4, granularity="group", group_size=128))
    solved.weight.dequantize(), solved.loss_N.sum()         # values [N, K]; tr(E H E^T)

Several weights with one Hessian share what is computed of it: `ordered` once, `solve_ordered` for each. `passes.gptq`
says where this departs from the paper.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.kernels.cpu.column_sweep import DecidedColumns, Rounding, takes
from compress.solvers.column_sweep import DAMP, ActOrder, Ordered, damped, ordered, sweep
from compress.solvers.outliers import (
    costs,
    exact_places,
    grouped_costs,
    places_at,
    price_by_trial,
    sampled_rows,
)
from compress.solvers.polish import Polish, SettledRule, members
from compress.solvers.targets import settled
from compress.weights.formats.sparse import sparse
from compress.weights.grid import Grid, decode, encode, fit, fit_matrix, stored_scale, to_quantized
from compress.weights.matrix import Matrix, Weight

# However many tokens: just enough damping to divide by the diagonal of H.
POLISH_DAMP = 1e-6
# Rows that are swept to see how many weights a price makes exact.
TRIAL_ROWS = 64


@dataclass(frozen=True)
class Method:
    """Settings for all weights: a grid, and the steps after the sweep. refit, sweeps: rounds of scale refit and of
    coordinate descent. steps: at most so many of conjugate gradients, in which weights that are kept make up for those
    that are pruned before they are rounded. polish_damp: of H in all three."""

    grid: Grid
    refit: int = 0
    sweeps: int = 0
    steps: int = 0
    polish_damp: float = POLISH_DAMP


@dataclass(frozen=True)
class Solved:
    """weight: codes, scales and zero points, and the outliers beside them where there are any. loss_N: tr(E H E^T) of
    each row, H damped as the last step has it. damp: what the sweep's factor needed."""

    weight: Matrix
    loss_N: Tensor
    damp: float


def gptq(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    *,
    grid: Grid,
    damp: float = DAMP,
    act_order: ActOrder = "none",
    refit: int = 0,
    sweeps: int = 0,
    scale_dtype: torch.dtype | None = None,
    kept_NK: Tensor | None = None,
    steps: int = 0,
    outliers: float = 0.0,
    polish_damp: float = POLISH_DAMP,
) -> Solved:
    """Quantize a weight for the least tr(E H E^T). Pure: no rank, no device, no state.

    H is permuted, damped (`damp` times its mean diagonal, more where that is not enough) and factorized here. refit,
    sweeps: rounds of each once the sweep is over. scale_dtype: that of the stored scales (the weight's own, if not
    given). kept: bool, which weights are not pruned; the others become exactly 0, whatever they were, and the ones that
    are kept make up for it as they do for rounding, or in so many steps before (`targets.settled`). outliers: the share
    of weights that keep values of their own. polish_damp: of H once the sweep is over, as a share of its mean diagonal;
    K / T more where T tokens are few. Raises CompressError where H is not finite.
    """
    work = weight_NK.to(hessian_KK.dtype)
    grid = grid.reaching(float(work.abs().max()))
    seen = ordered(hessian_KK, damp, act_order, grid.group_size)
    dtype = weight_NK.dtype if scale_dtype is None else scale_dtype
    price_N = None
    if outliers:
        price_N = work.new_full((len(work),), price_by_sweep(work, seen, grid, dtype, outliers))
    how = Method(grid, refit, sweeps, steps, polish_damp)
    return solve_ordered(work, seen, how, scale_dtype=dtype, kept_NK=kept_NK, price_N=price_N)


def solve_ordered(
    weight_NK: Tensor,
    seen: Ordered,
    how: Method,
    *,
    scale_dtype: torch.dtype,
    scale_NG: Tensor | None = None,
    zero_NG: Tensor | None = None,
    kept_NK: Tensor | None = None,
    price_N: Tensor | None = None,
) -> Solved:
    """`gptq` of rows of a weight, [N, K] in its own column order and the Hessian's dtype.

    scale, zero: fixed beforehand, for rows that share them with others. price: of an exact weight in each row
    (`solvers.outliers`).
    """
    exact_NK = None if price_N is None else torch.zeros_like(weight_NK, dtype=torch.bool)
    if scale_NG is None and (seen.fixed or how.grid.granularity == "tensor"):
        survivors = weight_NK if kept_NK is None else weight_NK * kept_NK
        if price_N is not None:
            exact_NK = places_at(survivors, how.grid, scale_dtype, seen.costs, price_N)
            survivors = survivors.masked_fill(exact_NK, 0.0)
        scale_NG, zero_NG = fit_matrix(survivors, how.grid, scale_dtype, seen.diagonal_K)
    kept_KN, exact_KN = (None if m is None else m[:, seen.order_K].t().contiguous() for m in (kept_NK, exact_NK))
    ranges = None if scale_NG is None or zero_NG is None else (scale_NG, zero_NG)
    known = Known.of(seen, how.grid, scale_dtype, kept_KN, price_N)
    polishes = bool(how.refit or how.sweeps or kept_KN is not None)  # a bare sweep, of which trials run many, does not
    polished_KK = damped(seen.hessian_KK, how.polish_damp) if polishes else None
    weight = weight_NK[:, seen.order_K]

    task = GPTQTask(weight, seen, known, how, polished_KK, ranges, exact_KN)
    found = task.rounded(weight)
    if how.steps and kept_KN is not None and polished_KK is not None:
        # Codes are too far apart to make up later for zeros that lie behind them; what has moved may need wider ranges.
        moved = settled(weight, weight * kept_KN.t(), polished_KK, kept_KN.t(), how.steps)
        found = found.or_better(task.rounded(moved))
    return found.stored(seen)


def price_by_sweep(weight_NK: Tensor, seen: Ordered, grid: Grid, scale_dtype: torch.dtype, share: float) -> float:
    """The price of an exact weight for such a share of them, as `outliers.price_by_trial` finds it."""
    some = weight_NK[sampled_rows(*weight_NK.shape).to(weight_NK.device)]
    trial = some[:TRIAL_ROWS]

    def swept(price: float) -> Matrix:
        price_N = trial.new_full(trial.shape[:1], price)
        return solve_ordered(trial, seen, Method(grid), scale_dtype=scale_dtype, price_N=price_N).weight

    return price_by_trial(share, grouped_costs(some, grid, scale_dtype, seen.costs), swept)


@dataclass(frozen=True)
class Known:
    """Facts about columns before the first is rounded, in sweep order. group_of [K]: the group of each. importance [K]:
    the diagonal of H, by which ranges are fitted; cost [K]: what an error costs in the sweep. kept [K, N]: weights
    that are not kept have the code of 0, and no say in a range (every range holds 0, which is exact in it). price [N]:
    of an exact weight (`solvers.outliers`)."""

    grid: Grid
    scale_dtype: torch.dtype
    group_of: list[int]
    importance_K: Tensor
    cost_K: Tensor
    kept: Tensor | None = None
    price: Tensor | None = None

    @classmethod
    def of(
        cls, seen: Ordered, grid: Grid, scale_dtype: torch.dtype, kept_KN: Tensor | None, price_N: Tensor | None
    ) -> "Known":
        """The facts that a Hessian in its order gives about columns."""
        columns = len(seen.order_K)
        length = columns if grid.granularity == "tensor" else grid.group_length(columns)
        group_of = (seen.order_K // length).tolist()
        diagonals = seen.hessian_KK.diagonal(), seen.factor.diagonal
        return cls(grid, scale_dtype, group_of, *diagonals, kept_KN, price_N)


@dataclass(frozen=True)
class GPTQTask:
    """A weight [N, K] in sweep order and all that rounding it takes. ranges: scales and zero points that are fixed
    beforehand, [N, G] or [N, 1]. exact [K, N]: the exact weights that are chosen beforehand; None: there are to be
    none. polished_KK: H as refit and descent have it; None where there are neither."""

    weight: Tensor
    seen: Ordered
    known: Known
    how: Method
    polished_KK: Tensor | None
    ranges: tuple[Tensor, Tensor] | None
    exact: Tensor | None

    def rounded(self, target_NK: Tensor) -> "Rounded":
        """The weight by a sweep that aims at a target [N, K], refit and descent. May be asked of several targets."""
        rule = self.rule()
        values, loss = sweep(target_NK, self.seen.factor, rule)
        if self.polished_KK is not None:
            state = Polish(self.weight, values, rule, self.polished_KK)
            loss = state.rounds(partial(refit_scales, state), self.how.refit, self.how.sweeps)
            values = state.values.t()
        return Rounded(rule, values, loss)

    def rule(self) -> "GridRule":
        """The rule by which the columns are rounded, before the first of them is."""
        rows, columns = self.weight.shape
        groups = max(self.known.group_of) + 1
        if self.ranges is None:
            scale, zero = self.weight.new_ones(groups, rows), self.weight.new_zeros(groups, rows)
        else:
            scale, zero = (t.expand(rows, groups).t().contiguous() for t in self.ranges)
        codes, exact = self.weight.new_empty(columns, rows), None if self.exact is None else self.exact.clone()
        return GridRule(self.known, columns // groups if self.ranges is None else 0, codes, scale, zero, exact)


@dataclass(frozen=True)
class Rounded:
    """A rule with its decisions, their values [N, K] and the loss [N], in sweep order."""

    rule: "GridRule"
    values: Tensor
    loss: Tensor

    def or_better(self, other: "Rounded") -> "Rounded":
        """The better of two results, row by row; this one where both lose the same."""
        better_N = other.loss < self.loss
        values = torch.where(better_N.unsqueeze(1), other.values, self.values)
        return Rounded(self.rule.mixed(other.rule, better_N), values, torch.where(better_N, other.loss, self.loss))

    def stored(self, seen: Ordered) -> Solved:
        """The weight as it is stored, in the layer's own column order."""
        rule, dtype = self.rule, self.rule.known.scale_dtype
        scale, zero = (t.t().contiguous() for t in (rule.scale, rule.zero_point))
        quantized = to_quantized(seen.back(rule.codes.t()), scale, zero, rule.known.grid, dtype)
        if rule.exact is None:
            return Solved(quantized, self.loss, seen.factor.damp)
        outliers = sparse(seen.back(self.values).to(dtype), seen.back(rule.exact.t()))
        return Solved(Weight((quantized, outliers)), self.loss, seen.factor.damp)


@dataclass
class GridRule(SettledRule):
    """Round each target to the grid; scales are fitted when a group begins, or given (group: 0).

    codes [K, N], scale and zero_point [G, N], in sweep order. exact [K, N]: the weights that have a value of their own,
    beside the code of 0; None: there are none. They are chosen as the sweep goes, until the rule is `settled`.
    """

    known: Known
    group: int
    codes: Tensor
    scale: Tensor
    zero_point: Tensor
    exact: Tensor | None = None
    settled: bool = False

    @property
    def group_of(self) -> list[int]:
        return self.known.group_of

    def begin(self, column: int, updated_gN: Tensor) -> None:
        importance = self.known.importance_K[column : column + len(updated_gN)]
        if self.known.kept is not None:
            updated_gN = updated_gN * self.known.kept[column : column + len(updated_gN)]
        if self.known.price is not None and self.exact is not None:
            cost = self.known.cost_K[column : column + len(updated_gN)]
            found = costs(updated_gN.t(), self.known.grid, self.known.scale_dtype, cost)
            self.exact[column : column + len(updated_gN)] = exact = exact_places(
                found, self.known.price.unsqueeze(1)
            ).t()
            updated_gN = updated_gN.masked_fill(exact, 0.0)
        scale, zero_point = fit(updated_gN.t(), self.known.grid, self.known.scale_dtype, importance)
        self.scale[self.known.group_of[column]] = scale
        self.zero_point[self.known.group_of[column]] = zero_point

    def decide(self, column: int, target_N: Tensor) -> Tensor:
        group = self.known.group_of[column]
        scale, zero_point = self.scale[group], self.zero_point[group]
        codes = encode(target_N, scale, zero_point, self.known.grid)
        if self.known.kept is not None:
            codes = torch.where(self.known.kept[column], codes, zero_point)
        values = decode(codes, scale, zero_point, self.known.scale_dtype)
        if self.exact is not None:
            exact = self._exact(column, target_N - values)
            codes = torch.where(exact, zero_point, codes)
            values = torch.where(exact, target_N.to(self.known.scale_dtype).to(target_N.dtype), values)
        self.codes[column] = codes
        return values

    def at(self, column: int) -> tuple[Tensor, ...]:
        return (self.codes[column],)

    def held(self) -> DecidedColumns | None:
        if self.known.grid.type != "int" or not takes(self.codes, self.known.scale_dtype):
            return None
        rounding = Rounding(self.known.grid.qmin, self.known.grid.qmax, self.known.scale_dtype)
        price = None if self.settled or self.exact is None else self.known.price
        decided = (self.codes, self.scale, self.zero_point, self.known.group_of)
        return DecidedColumns(*decided, rounding, self.known.kept, self.exact, price, self.known.cost_K)

    def mixed(self, other: "GridRule", from_other_N: Tensor) -> "GridRule":
        """This rule, with the rows in `from_other_N` taken from `other`."""
        held = ("codes", "scale", "zero_point", "exact")
        pairs = {name: (getattr(other, name), getattr(self, name)) for name in held if getattr(self, name) is not None}
        taken: dict[str, Any] = {name: torch.where(from_other_N, *pair) for name, pair in pairs.items()}
        return replace(self, **taken)

    def _exact(self, column: int, error_N: Tensor) -> Tensor:
        """[N] the exact weights of a column; during the sweep, also those whose error costs more than `known.price`."""
        assert self.exact is not None
        if not self.settled and self.known.price is not None:
            dear = self.known.cost_K[column] * error_N.square() > self.known.price
            self.exact[column] |= dear if self.known.kept is None else dear & self.known.kept[column]
        return self.exact[column]


def refit_scales(state: "Polish[GridRule]") -> None:
    """For fixed codes the loss is quadratic in each scale: set it to its minimum, group after group."""
    rule = state.rule
    for group, columns in enumerate(members(rule)):
        steps = rule.codes[columns] - rule.zero_point[group]
        own = state.hessian[columns][:, columns]
        gradient = state.gradient[columns]
        curvature = ((own @ steps) * steps).sum(0)
        slope = (gradient * steps).sum(0)
        old = rule.scale[group]
        moved = old + slope / curvature.clamp(min=torch.finfo(curvature.dtype).tiny)
        valid = (curvature > 0) & torch.isfinite(moved) & (moved * old > 0)
        new = torch.where(valid, stored_scale(moved, rule.known.grid, rule.known.scale_dtype), old)
        change = decode(steps, new, torch.zeros_like(new), rule.known.scale_dtype) - state.values[columns]
        if rule.exact is not None:
            change = change.masked_fill(rule.exact[columns], 0.0)
        # Rounding the scale may lose what the step gained: keep the old one there.
        gain = (change * (2 * gradient - own @ change)).sum(0)
        change = torch.where(gain > 0, change, torch.zeros_like(change))
        rule.scale[group] = torch.where(gain > 0, new, old)
        state.move(columns, change)
