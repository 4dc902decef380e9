"""SpQR as functions of tensors: a weight and the Hessian of its input in, codes in tiles and outliers out (Dettmers et
al. 2023, arXiv 2306.03078, algorithm 1).

Shapes: N outputs, K inputs, G groups. `passes.spqr` has the format, and says where this departs from the paper.
"""

import torch
from torch import Tensor

from compress.solvers.column_sweep import Solved
from compress.solvers.gptq import TRIAL_ROWS
from compress.solvers.hessian_with_drift import DAMP, POLISH_DAMP, ActOrder, Problem
from compress.solvers.outliers import price_by_trial, sampled_rows
from compress.solvers.tile_rule import TileRule, tile_costs
from compress.weights.formats.tiles import Tiled, Tiles, fit_tiles
from compress.weights.grid import encode_unsigned
from compress.weights.matrix import Matrix


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

    outliers: the share of weights that keep values of their own; threshold: they are chosen as the paper does, by its
    tau. search: try the neighbours of a group's nearest scale and zero point. The others are as in `gptq.gptq`. Raises
    CompressError where H is not finite.
    """
    work = weight_NK.to(hessian_KK.dtype)
    problem = Problem.of(hessian_KK, damp, act_order, format_.group_size, polish_damp)
    dtype = weight_NK.dtype if scale_dtype is None else scale_dtype
    price = None
    if threshold:
        price = price_by_variance(work, problem, threshold)
    elif outliers:
        price = price_in_tiles(work, problem, format_, dtype, outliers, search)
    price_N = None if price is None else work.new_full((len(work),), price)
    return TileRule.of(work, problem, format_, dtype, price_N, threshold > 0, search).solve(
        work, problem, refit, sweeps
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
    weight_NK: Tensor, problem: Problem, format_: Tiles, scale_dtype: torch.dtype, share: float, search: bool = True
) -> float:
    """The price of an exact weight for such a share of them: `gptq.outlier_prices`, in tiles."""
    rows, columns = weight_NK.shape
    some = weight_NK[sampled_rows(rows, columns, format_.tile_rows).to(weight_NK.device)]
    groups = some.view(len(some), -1, format_.group_size)
    costs = tile_costs(groups, format_.bits, problem.costs.view(groups.shape[1:]))
    trial = some[:TRIAL_ROWS]

    def swept(price: float) -> Matrix:
        price_N = trial.new_full(trial.shape[:1], price)
        rule = TileRule.of(trial, problem, format_, scale_dtype, price_N, search=search)
        return rule.solve(trial, problem, 0, 0).weight

    return price_by_trial(share, costs, swept)


def price_by_variance(weight_NK: Tensor, problem: Problem, threshold: float) -> float:
    """The price of an exact weight as the paper has it: tau times the variance of a weight, in units of the loss."""
    return threshold * float((weight_NK.var(0) * problem.costs).mean())
