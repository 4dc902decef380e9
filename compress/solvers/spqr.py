"""SpQR as functions of tensors: a weight and the Hessian of its input in, codes in tiles and outliers out (Dettmers et
al. 2023, arXiv 2306.03078, algorithm 1).

Shapes: N outputs, K inputs, G groups. `passes.spqr` has the format, and says where this departs from the paper.
"""

from functools import partial

import torch
from torch import Tensor

from compress.solvers.column_sweep import DAMP, ActOrder, Ordered, damped, ordered, sweep
from compress.solvers.gptq import POLISH_DAMP, TRIAL_ROWS, Solved
from compress.solvers.outliers import price_by_trial, sampled_rows
from compress.solvers.polish import Polish
from compress.solvers.tile_rule import TileRule, refit_tiles, tile_costs
from compress.weights.formats.sparse import sparse
from compress.weights.formats.tiles import RANGES, Tiled, Tiles, fit_tiles
from compress.weights.grid import encode_unsigned
from compress.weights.matrix import Matrix, added


def spqr(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    *,
    format_: Tiles,
    damp: float = DAMP,
    act_order: ActOrder = "none",
    outliers: float = 0.0,
    threshold: float = 0.0,
    search: bool = True,
    refit: int = 0,
    sweeps: int = 0,
    polish_damp: float = POLISH_DAMP,
    scale_dtype: torch.dtype | None = None,
) -> Solved:
    """Quantize a weight to tiles for the least tr(E H E^T). Pure: no rank, no device, no state.

    H is permuted, damped (`damp` times its mean diagonal, more where that is not enough) and factorized here. outliers:
    the share of weights that keep values of their own; threshold: they are chosen as the paper does, by its tau.
    search: try the neighbours of a group's nearest scale and zero point. refit, sweeps: rounds of each once the sweep
    is over. polish_damp: damping of H in those; K / T more where T tokens are few. scale_dtype: that of the stored
    ranges (the weight's own, if not given). Raises CompressError where H is not finite.
    """
    work = weight_NK.to(hessian_KK.dtype)
    seen = ordered(hessian_KK, damp, act_order, format_.group_size)
    dtype = weight_NK.dtype if scale_dtype is None else scale_dtype
    price = None
    if threshold:
        price = price_by_variance(work, seen, threshold)
    elif outliers:
        price = price_in_tiles(work, seen, format_, dtype, outliers, search)
    price_N = None if price is None else work.new_full((len(work),), price)
    solve = partial(solve_tiles, work, seen, format_=format_, scale_dtype=dtype, price_N=price_N)
    return solve(leave_one_out=threshold > 0, search=search, refit=refit, sweeps=sweeps, polish_damp=polish_damp)


def solve_tiles(
    weight_NK: Tensor,
    seen: Ordered,
    *,
    format_: Tiles,
    scale_dtype: torch.dtype,
    price_N: Tensor | None = None,
    leave_one_out: bool = False,
    search: bool = True,
    refit: int = 0,
    sweeps: int = 0,
    polish_damp: float = POLISH_DAMP,
) -> Solved:
    """Tiles, and outliers where they have a price, for the least tr(E H E^T): as `gptq.solve_ordered`."""
    rule = tile_rule(weight_NK, seen, format_, scale_dtype, price_N, leave_one_out, search)
    weight = weight_NK[:, seen.order_K]
    values, loss = sweep(weight, seen.factor, rule)
    if refit or sweeps:
        state = Polish(weight, values, rule, damped(seen.hessian_KK, polish_damp))
        loss = state.rounds(partial(refit_tiles, state, rule), refit, sweeps)
    small = (rule.codes, rule.scale_codes, rule.zero_codes)
    codes, scale, zero = (t.to(torch.uint8).t().contiguous() for t in small)
    ranges = rule.ranges.transpose(0, 1).to(scale_dtype).contiguous()
    tiled = Tiled(seen.back(codes), scale, zero, ranges, format_)
    if price_N is None:
        return Solved(tiled, loss, seen.factor.damp)
    outliers = sparse(seen.back(rule.extra.t()), seen.back(rule.exact.t()))
    return Solved(added(tiled, outliers), loss, seen.factor.damp)


def tile_rule(
    weight_NK: Tensor,
    seen: Ordered,
    format_: Tiles,
    scale_dtype: torch.dtype,
    price_N: Tensor | None,
    leave_one_out: bool,
    search: bool,
) -> TileRule:
    """The rule that decides a weight's columns, before the first is decided."""
    rows, columns = weight_NK.shape
    groups, device = columns // format_.group_size, weight_NK.device
    scale_codes, zero_codes, scale, zero = (weight_NK.new_zeros(groups, rows) for _ in range(4))
    return TileRule(
        format=format_,
        dtype=scale_dtype,
        group=format_.group_size,
        group_of=(seen.order_K // format_.group_size).tolist(),
        cost_K=seen.factor.diagonal,
        price=price_N,
        leave_one_out=leave_one_out,
        search=search,
        codes=weight_NK.new_zeros(columns, rows),
        extra=torch.zeros(columns, rows, dtype=scale_dtype, device=device),
        exact=torch.zeros(columns, rows, dtype=torch.bool, device=device),
        scale_codes=scale_codes,
        zero_codes=zero_codes,
        scale=scale,
        zero=zero,
        ranges=weight_NK.new_zeros(groups, rows, RANGES),
    )


def round_to_tiles(weight_NK: Tensor, format_: Tiles, scale_dtype: torch.dtype) -> Tiled:
    """Every weight to the nearest code of its group's whole range; no outliers."""
    codes, small = [], []
    for x in weight_NK.split(format_.group_size, 1):
        fitted = fit_tiles(x.amin(1), x.amax(1), format_, scale_dtype)
        codes.append(encode_unsigned(x, fitted.scale.unsqueeze(1), fitted.zero.unsqueeze(1), format_.bits))
        small.append((fitted.scale_codes, fitted.zero_codes, fitted.ranges))
    scale, zero, ranges = (torch.stack(each, 1) for each in zip(*small, strict=True))
    rounded = torch.cat(codes, 1).to(torch.uint8)
    return Tiled(rounded, scale.to(torch.uint8), zero.to(torch.uint8), ranges.to(scale_dtype), format_)


def price_in_tiles(
    weight_NK: Tensor, seen: Ordered, format_: Tiles, scale_dtype: torch.dtype, share: float, search: bool = True
) -> float:
    """The price of an exact weight for such a share of them: `gptq.price_by_sweep`, in tiles."""
    rows, columns = weight_NK.shape
    some = weight_NK[sampled_rows(rows, columns, format_.tile_rows).to(weight_NK.device)]
    groups = some.view(len(some), -1, format_.group_size)
    found = tile_costs(groups, format_.bits, seen.costs.view(groups.shape[1:]))
    trial = some[:TRIAL_ROWS]

    def swept(price: float) -> Matrix:
        price_N = trial.new_full(trial.shape[:1], price)
        return solve_tiles(trial, seen, format_=format_, scale_dtype=scale_dtype, price_N=price_N, search=search).weight

    return price_by_trial(share, found, swept)


def price_by_variance(weight_NK: Tensor, seen: Ordered, threshold: float) -> float:
    """The price of an exact weight as the paper has it: tau times the variance of a weight, in units of the loss."""
    return threshold * float((weight_NK.var(0) * seen.costs).mean())
