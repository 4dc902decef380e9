"""GPTQ as functions of tensors: a weight and the Hessian of its input in, codes out (see `compress.passes.gptq`).

Shapes: N outputs, K inputs, G groups. A notebook needs one call:

    H = X.T @ X / len(X)                                    # of the inputs X [tokens, K] of a layer
    solved = gptq(layer.weight.data, H, grid=Grid(bits=4, granularity="group", group_size=128))
    solved.weight.dequantize(), solved.loss_N.sum()         # values [N, K]; tr(E H E^T), E = W - Q

Several weights with one Hessian share what is computed of it: `ordered` once, `solve_ordered` for each.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.solvers.outliers import grouped_costs, places_at, price_by_trial, sampled_rows
from compress.solvers.polish import GridRule, Polish
from compress.solvers.survivors import settled
from compress.solvers.sweep import Factor, damped, factorize, sweep
from compress.weights.formats.sparse import sparse
from compress.weights.grid import Grid, fit_matrix, to_quantized
from compress.weights.terms import Summand, Weight

ActOrder = Literal["none", "static", "group"]
DAMP = 0.01
# However many tokens: just enough damping to divide by the diagonal of H.
POLISH_DAMP = 1e-6
# Rows that are swept to see how many weights a price makes exact.
TRIAL_ROWS = 64


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


@dataclass(frozen=True)
class Solved:
    """weight: codes, scales and zero points, and the outliers beside them where there are any. loss_N: tr(E H E^T) of
    each row, H damped as the last step has it. damp: what the sweep's factor needed."""

    weight: Summand | Weight
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
) -> Solved:
    """Quantize a weight for the least tr(E H E^T). Pure: no rank, no device, no state.

    H is permuted, damped (`damp` times its mean diagonal, more where that is not enough) and factorized here. refit,
    sweeps: rounds of `polish` after the sweep. scale_dtype: that of the stored scales (the weight's own, if not given).
    kept: bool, which weights are not pruned; the others become exactly 0, whatever they were, and the ones that are
    kept make up for it as they do for rounding, or in so many steps before (`solvers.survivors`). outliers: the share
    of weights that keep values of their own.
    """
    work = weight_NK.to(hessian_KK.dtype)
    seen = ordered(hessian_KK, damp, act_order, grid.group_size)
    dtype = weight_NK.dtype if scale_dtype is None else scale_dtype
    price_N = None
    if outliers:
        price_N = work.new_full((len(work),), price_by_sweep(work, seen, grid, dtype, outliers))
    how = {"grid": grid, "scale_dtype": dtype, "refit": refit, "sweeps": sweeps, "steps": steps}
    return solve_ordered(work, seen, **how, kept_NK=kept_NK, price_N=price_N)  # type: ignore[arg-type]


def ordered(hessian_KK: Tensor, damp: float, act_order: ActOrder, group_size: int | None) -> Ordered:
    """What GPTQ needs of a Hessian. Raises CompressError where no damping makes it positive definite."""
    diagonal_K = hessian_KK.diagonal()
    order_K = column_order(diagonal_K, act_order, group_size)
    in_order = hessian_KK[order_K][:, order_K]
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


def solve_ordered(
    weight_NK: Tensor,
    seen: Ordered,
    *,
    grid: Grid,
    scale_dtype: torch.dtype,
    scale_NG: Tensor | None = None,
    zero_NG: Tensor | None = None,
    kept_NK: Tensor | None = None,
    price_N: Tensor | None = None,
    steps: int = 0,
    refit: int = 0,
    sweeps: int = 0,
    polish_damp: float = POLISH_DAMP,
) -> Solved:
    """`gptq` of rows of a weight, [N, K] in its own column order and the Hessian's dtype.

    scale, zero: fixed beforehand, for rows that share them with others. price: of an exact weight in each row
    (`solvers.outliers`). polish_damp: of H in refit and descent.
    """
    exact_NK = None if price_N is None else torch.zeros_like(weight_NK, dtype=torch.bool)
    if scale_NG is None and (seen.fixed or grid.granularity == "tensor"):
        survivors = weight_NK if kept_NK is None else weight_NK * kept_NK
        if price_N is not None:
            exact_NK = places_at(survivors, grid, scale_dtype, seen.costs, price_N)
            survivors = survivors.masked_fill(exact_NK, 0.0)
        scale_NG, zero_NG = fit_matrix(survivors, grid, scale_dtype, seen.diagonal_K)
    kept_KN, exact_KN = (None if m is None else m[:, seen.order_K].t().contiguous() for m in (kept_NK, exact_NK))
    weight = weight_NK[:, seen.order_K]
    polishes = bool(refit or sweeps or kept_KN is not None)  # a bare sweep, of which trials run many, needs no other H
    polished_KK = damped(seen.hessian_KK, polish_damp) if polishes else seen.hessian_KK

    def rounded(target_NK: Tensor) -> tuple[GridRule, Tensor, Tensor]:
        rule = grid_rule(weight_NK, seen, grid, scale_dtype, scale_NG, zero_NG, kept_KN)
        rule.price, rule.exact = price_N, None if exact_KN is None else exact_KN.clone()
        values, loss = sweep(target_NK, seen.factor, rule)
        if polishes:
            state = Polish(weight, values, rule, polished_KK)
            loss = state.rounds(state.refit_scales, refit, sweeps)
            values = state.values.t()
        return rule, values, loss

    rule, values, loss = rounded(weight)
    if steps and kept_KN is not None:
        # Codes are too far apart to make up later for zeros that lie behind them; what has moved may need wider ranges.
        moved, others, less = rounded(settled(weight, weight * kept_KN.t(), polished_KK, kept_KN.t(), steps))
        better_N = less < loss
        rule = rule.mixed(moved, better_N)
        values = torch.where(better_N.unsqueeze(1), others, values)
        loss = torch.where(better_N, less, loss)
    scale, zero = (t.t().contiguous() for t in (rule.scale, rule.zero_point))
    quantized = to_quantized(seen.back(rule.codes.t()), scale, zero, grid, scale_dtype)
    if rule.exact is None:
        return Solved(quantized, loss, seen.factor.damp)
    outliers = sparse(seen.back(values).to(scale_dtype), seen.back(rule.exact.t()))
    return Solved(Weight((quantized, outliers)), loss, seen.factor.damp)


def price_by_sweep(weight_NK: Tensor, seen: Ordered, grid: Grid, scale_dtype: torch.dtype, share: float) -> float:
    """The price of an exact weight for such a share of them, as `outliers.price_by_trial` finds it."""
    some = weight_NK[sampled_rows(*weight_NK.shape).to(weight_NK.device)]
    trial = some[:TRIAL_ROWS]

    def swept(price: float) -> Summand | Weight:
        price_N = trial.new_full(trial.shape[:1], price)
        return solve_ordered(trial, seen, grid=grid, scale_dtype=scale_dtype, price_N=price_N).weight

    return price_by_trial(share, grouped_costs(some, grid, scale_dtype, seen.costs), swept)


def grid_rule(
    weight_NK: Tensor,
    seen: Ordered,
    grid: Grid,
    scale_dtype: torch.dtype,
    scale_NG: Tensor | None,
    zero_NG: Tensor | None,
    kept_KN: Tensor | None,
) -> GridRule:
    """How the columns of a weight are rounded, before the first of them is."""
    rows, columns = weight_NK.shape
    length = columns if grid.granularity == "tensor" else grid.group_length(columns)
    group_of = (seen.order_K // length).tolist()
    groups = columns // length
    if scale_NG is None or zero_NG is None:
        scale_GN, zero_GN = weight_NK.new_ones(groups, rows), weight_NK.new_zeros(groups, rows)
    else:
        scale_GN, zero_GN = (t.expand(rows, groups).t().contiguous() for t in (scale_NG, zero_NG))
    return GridRule(
        grid,
        scale_dtype,
        length if scale_NG is None else 0,
        group_of,
        seen.hessian_KK.diagonal(),
        seen.factor.diagonal,
        weight_NK.new_empty(columns, rows),
        scale_GN,
        zero_GN,
        kept_KN,
    )
