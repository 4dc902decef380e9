"""GPTQ as functions of tensors: a weight and the Hessian of its input in, codes out (Frantar et al., arXiv 2210.17323).

Shapes: N outputs, K inputs, G groups. W [N, K] is the weight, H [K, K] the mean of x x^T over the layer's inputs x.

    minimise over codes and scales      tr(E H E^T),     E = W - Q

    sweep       columns are rounded one by one, each making up for the errors before it     `column_sweep.sweep`
    refit       for fixed codes the loss is quadratic in each scale                         `GridRule.refit`
    descent     each code moves to the grid point nearest its own optimum                   `column_sweep.Polish`

A notebook needs one call:

    H = X.T @ X / len(X)                                    # of the inputs X [tokens, K] of a layer
    solved = gptq(layer.weight.data, H, grid=Grid(bits=4, granularity="group", group_size=128))
    solved.weight.dequantize(), solved.loss_N.sum()         # values [N, K]; tr(E H E^T)

Several weights with one Hessian share what is computed of it: `Problem.of` once, `solve_on_grid` for each.
`passes.gptq` says where this departs from the paper.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from compress.kernels.columns import DecidedColumns, Rounding, SweptBlock
from compress.kernels.operators.columns import LARGEST_GROUP, on_gpu, sweep_columns, takes
from compress.solvers.column_sweep import CodeRule, Polish, Solved, group_members
from compress.solvers.hessian_with_drift import DAMP, POLISH_DAMP, ActOrder, Problem
from compress.solvers.outliers import costs, exact_places, grouped_costs, places_at, price_by_trial, sampled_rows
from compress.solvers.output_feedback import OutputCurvature
from compress.solvers.sparsegpt import fit_survivors
from compress.weights.formats.sparse import sparse
from compress.weights.grid import (
    Grid,
    decode,
    encode,
    fit,
    fit_matrix,
    range_search,
    shares_of,
    stored_scale,
    to_quantized,
)
from compress.weights.matrix import Matrix, Weight

# Rows that are swept to see how many weights a price makes exact.
TRIAL_ROWS = 64


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
    outputs_NS: Tensor | None = None,
) -> Solved:
    """Quantize a weight for the least tr(E H E^T), or tr(H_O E H E^T). Pure: no rank, no device, no state.

    H is permuted, damped (`damp` times its mean diagonal, more where that is not enough) and factorized here. refit,
    sweeps: rounds of each once the sweep is over. scale_dtype: that of the stored scales (the weight's own, if not
    given). kept: bool, which weights are not pruned; the others become exactly 0, whatever they were, and those that
    are kept make up for it as they do for rounding, or in so many steps before (`sparsegpt.fit_survivors`). outliers:
    the share of weights that keep values of their own. polish_damp: of H once the sweep is over, as a share of its mean
    diagonal; K / T more where T tokens are few. outputs: H_O in runs of S outputs (`solvers.output_feedback`), S = N
    for all of it; not with `kept`. Raises CompressError where H is not finite.
    """
    work = weight_NK.to(hessian_KK.dtype)
    if grid.global_scales:
        grid = grid.reaching(float(work.abs().max()))
    problem = Problem.of(hessian_KK, damp, act_order, grid.group_size, polish_damp)
    dtype = weight_NK.dtype if scale_dtype is None else scale_dtype
    price_N = outlier_prices(work, problem, grid, dtype, outliers)
    solve = partial(solve_on_grid, work, problem, grid, dtype, kept_NK=kept_NK, price_N=price_N)
    return solve(refit=refit, sweeps=sweeps, steps=steps, outputs_NS=outputs_NS)


def solve_on_grid(
    weight_NK: Tensor,
    problem: Problem,
    grid: Grid,
    scale_dtype: torch.dtype,
    *,
    refit: int = 0,
    sweeps: int = 0,
    steps: int = 0,
    scale_NG: Tensor | None = None,
    zero_NG: Tensor | None = None,
    kept_NK: Tensor | None = None,
    price_N: Tensor | None = None,
    outputs_NS: Tensor | None = None,
) -> Solved:
    """`gptq` of rows of a weight, [N, K] in its own column order and the Hessian's dtype.

    scale, zero: fixed beforehand, for rows that share them with others. price: of an exact weight in each row
    (`solvers.outliers`).
    """
    ranges = None if scale_NG is None or zero_NG is None else (scale_NG, zero_NG)
    rule = GridRule.of(weight_NK, problem, grid, scale_dtype, ranges, kept_NK, price_N)
    assert outputs_NS is None or kept_NK is None, "outputs that are decided together have no mask"
    rule.outputs = OutputCurvature.of(outputs_NS)
    weight, mask = weight_NK[:, problem.order], None if rule.kept is None else rule.kept.t()
    other = deepcopy(rule) if steps and mask is not None else None
    # With a mask, both ways are judged by the H of the steps after a sweep, be there any or not.
    values, loss = rule.solve_columns(weight, problem, refit, sweeps, None if mask is None else weight)
    if other is not None and mask is not None:
        # Codes are too far apart to make up later for zeros that lie behind them; what has moved may need wider ranges.
        moved = fit_survivors(weight, weight * mask, problem.polish_hessian(), mask, steps)
        other_values, other_loss = other.solve_columns(weight, problem, refit, sweeps, moved)
        better_N = other_loss < loss
        rule.take(other, better_N)
        values = torch.where(better_N.unsqueeze(1), other_values, values)
        loss = torch.where(better_N, other_loss, loss)
    return Solved(rule.to_weight(problem, values), loss, problem.damp)


def outlier_prices(
    weight_NK: Tensor, problem: Problem, grid: Grid, scale_dtype: torch.dtype, share: float
) -> Tensor | None:
    """[N] the price of an exact weight for such a share of them, as `outliers.price_by_trial` finds it; None for 0."""
    if not share:
        return None
    some = weight_NK[sampled_rows(*weight_NK.shape).to(weight_NK.device)]
    trial = some[:TRIAL_ROWS]

    def swept(price: float) -> Matrix:
        price_N = trial.new_full(trial.shape[:1], price)
        return solve_on_grid(trial, problem, grid, scale_dtype, price_N=price_N).weight

    price = price_by_trial(share, grouped_costs(some, grid, scale_dtype, problem.costs), swept)
    return weight_NK.new_full(weight_NK.shape[:1], price)


@dataclass
class GridRule(CodeRule):
    """Round each target to the grid; scales are fitted when a group begins, or given (group: 0). All in sweep order.

    group_of [K]: the group of each column. importance [K]: the diagonal of H, by which ranges are fitted; cost [K]: of
    an error in the sweep. codes [K, N], scale and zero_point [G, N]. kept [K, N]: weights that are not kept have the
    code of 0, and no say in a range (every range holds 0, which is exact in it). exact [K, N]: the weights that have a
    value of their own, beside the code of 0, and price [N] of one (`solvers.outliers`); they are chosen as the sweep
    goes. None: all are kept, none is exact.
    """

    grid: Grid
    scale_dtype: torch.dtype
    group: int
    group_of: list[int]
    importance: Tensor
    cost: Tensor
    codes: Tensor
    scale: Tensor
    zero_point: Tensor
    kept: Tensor | None = None
    exact: Tensor | None = None
    price: Tensor | None = None
    swept: bool = False

    @classmethod
    def of(
        cls,
        weight_NK: Tensor,
        problem: Problem,
        grid: Grid,
        scale_dtype: torch.dtype,
        ranges: tuple[Tensor, Tensor] | None,
        kept_NK: Tensor | None,
        price_N: Tensor | None,
    ) -> "GridRule":
        """The rule before the first column of a weight, which is in its own order. ranges: scales and zero points that
        are fixed beforehand, [N, G] or [N, 1]."""
        rows, columns = weight_NK.shape
        exact_NK = None if price_N is None else torch.zeros_like(weight_NK, dtype=torch.bool)
        if ranges is None and (problem.fixed or grid.granularity == "tensor"):
            survivors = weight_NK if kept_NK is None else weight_NK * kept_NK
            if price_N is not None:
                exact_NK = places_at(survivors, grid, scale_dtype, problem.costs, price_N)
                survivors = survivors.masked_fill(exact_NK, 0.0)
            ranges = fit_matrix(survivors, grid, scale_dtype, problem.hessian.diagonal())
        length = columns if grid.granularity == "tensor" else grid.group_length(columns)
        groups, codes = columns // length, weight_NK.new_empty(columns, rows)
        if ranges is None:
            scale, zero = weight_NK.new_ones(groups, rows), weight_NK.new_zeros(groups, rows)
        else:
            scale, zero = (t.expand(rows, groups).t().contiguous() for t in ranges)
        kept, exact = (None if m is None else m[:, problem.order].t().contiguous() for m in (kept_NK, exact_NK))
        group, group_of = 0 if ranges else length, (problem.order // length).tolist()
        numbers = problem.in_order.diagonal(), problem.diagonal, codes, scale, zero
        return cls(grid, scale_dtype, group, group_of, *numbers, kept, exact, price_N)

    def begin(self, column: int, updated_gN: Tensor) -> None:
        part, group = slice(column, column + len(updated_gN)), self.group_of[column]
        if self.kept is not None:
            updated_gN = updated_gN * self.kept[part]
        if self.exact is not None and self.price is not None:
            costs_NG = costs(updated_gN.t(), self.grid, self.scale_dtype, self.cost[part])
            self.exact[part] = exact = exact_places(costs_NG, self.price.unsqueeze(1)).t()
            updated_gN = updated_gN.masked_fill(exact, 0.0)
        fitted = fit(updated_gN.t(), self.grid, self.scale_dtype, self.importance[part])
        self.scale[group], self.zero_point[group] = fitted

    def run_groups(self, block: SweptBlock) -> bool:
        held, grid = self.compiled(), self.grid
        if held is None or not on_gpu(self.codes) or self.group > LARGEST_GROUP or grid.type != "int":
            return False
        if self.exact is not None or self.outputs is not None or (grid.ternary and grid.searches):
            return False
        search = range_search(grid, self.scale_dtype, self.shares, self.group)
        sweep_columns(block, held, 0, len(block.target), search)
        return True

    @cached_property
    def shares(self) -> Tensor:
        """[K] importance, of mean 1 in each group of columns."""
        return shares_of(self.importance.view(-1, self.group)).flatten()

    def decide(self, column: int, target_N: Tensor) -> Tensor:
        group = self.group_of[column]
        scale, zero_point = self.scale[group], self.zero_point[group]
        codes = encode(target_N, scale, zero_point, self.grid)
        if self.kept is not None:
            codes = torch.where(self.kept[column], codes, zero_point)
        values = decode(codes, scale, zero_point, self.scale_dtype)
        if self.exact is not None:
            if self.price is not None and not self.swept:
                dear = self.cost[column] * (target_N - values).square() > self.price
                self.exact[column] |= dear if self.kept is None else dear & self.kept[column]
            exact = self.exact[column]
            codes = torch.where(exact, zero_point, codes)
            values = torch.where(exact, target_N.to(self.scale_dtype).to(target_N.dtype), values)
        self.codes[column] = codes
        return values

    def codes_at(self, column: int) -> tuple[Tensor, ...]:
        return (self.codes[column],)

    def chosen_at(self, column: int) -> tuple[Tensor, ...]:
        return () if self.exact is None else (self.exact[column],)

    def decisions(self) -> DecidedColumns | None:
        levels = self.grid.levels
        known = self.grid.type == "int" or levels is not None
        if not known or not takes(self.codes, self.scale_dtype):
            return None
        table = None if levels is None else levels.table(self.codes.device)
        rounding = Rounding(self.grid.qmin, self.grid.qmax, self.scale_dtype, table=table)
        price = None if self.swept or self.exact is None else self.price
        decided = (self.codes, self.scale, self.zero_point, self.groups)
        return DecidedColumns(*decided, rounding, self.kept, self.exact, price, self.cost)

    def refit(self, polish: Polish) -> None:
        """For fixed codes the loss is quadratic in each scale: set it to its minimum, group after group."""
        for group, columns in enumerate(group_members(self.group_of, self.scale)):
            steps = self.codes[columns] - self.zero_point[group]
            own, old = polish.hessian[columns][:, columns], self.scale[group]
            moved = old + polish.scale_steps(columns, own, steps)
            valid = torch.isfinite(moved) & (moved * old > 0)
            new = torch.where(valid, stored_scale(moved, self.grid, self.scale_dtype), old)
            change = decode(steps, new, torch.zeros_like(new), self.scale_dtype) - polish.values[columns]
            if self.exact is not None:
                change = change.masked_fill(self.exact[columns], 0.0)
            # Rounding the scale may lose what the step gained: keep the old one there.
            self.scale[group] = torch.where(polish.move_if_lower(columns, own, change), new, old)

    def take(self, other: "GridRule", rows_N: Tensor) -> None:
        """Take some rows from another rule for the same weight."""
        for mine, others in ((getattr(self, n), getattr(other, n)) for n in ("codes", "scale", "zero_point", "exact")):
            if mine is not None:
                mine.copy_(torch.where(rows_N, others, mine))

    def to_weight(self, problem: Problem, values_NK: Tensor) -> Matrix:
        scale, zero = (t.t().contiguous() for t in (self.scale, self.zero_point))
        quantized = to_quantized(problem.restore(self.codes.t()), scale, zero, self.grid, self.scale_dtype)
        if self.exact is None:
            return quantized
        places = problem.restore(self.exact.t())
        return Weight((quantized, sparse(problem.restore(values_NK).to(self.scale_dtype), places)))
