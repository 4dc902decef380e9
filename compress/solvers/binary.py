"""Binary weights as functions of tensors: codes of -1 and 1, and once more in salient columns (XNOR-Net, arXiv
1603.05279; BiLLM, arXiv 2402.04291).

Shapes: N outputs, K inputs, C of them salient, G groups. H [K, K] is the mean of x x^T over the layer's inputs x. With
R = W - Q_1, what the first term leaves, the best second term in the columns C is, equation by equation,

    |(R - Q_2) X|^2  =  tr((T - Q_2) H_CC (T - Q_2)^T) + const,      T = R H_:C H_CC^-1

the problem of the first term on fewer columns. `passes.binary` says where this departs from the papers.
"""

from dataclasses import replace

import torch
from torch import Tensor

from compress.solvers.column_sweep import DAMP, damped, ordered
from compress.solvers.gptq import POLISH_DAMP, Method, Solved, solve_ordered
from compress.weights.formats.columns import Columns
from compress.weights.formats.sparse import column_dtype
from compress.weights.formats.ternary import BinaryCodes
from compress.weights.grid import Grid, Quantized
from compress.weights.matrix import Matrix, Weight
from compress.weights.number_formats import Granularity, StoredNumbers


def binary(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    *,
    group_size: int | None = 128,
    salient: int = 0,
    damp: float = DAMP,
    refit: int = 0,
    sweeps: int = 0,
    polish_damp: float = POLISH_DAMP,
    scale_dtype: torch.dtype | None = None,
) -> Matrix:
    """Signs of a weight for the least tr(E H E^T), and second terms. Pure: no rank, no device, no state.

    group_size: inputs that share a scale; None: all of them. salient: columns of every group that have a second term.
    The others are as in `gptq.gptq`. Raises CompressError where H is not finite.
    """
    grid, dtype = signs(group_size), weight_NK.dtype if scale_dtype is None else scale_dtype
    work = weight_NK.to(hessian_KK.dtype)
    how = Method(grid, refit, sweeps, polish_damp=polish_damp)
    first = solve_ordered(work, ordered(hessian_KK, damp, "none", group_size), how, scale_dtype=dtype)
    assert isinstance(first.weight, Quantized)
    if not salient:
        return first.weight
    column_C = salient_columns(work, inverse_diagonal(hessian_KK, first.damp), grid, salient)
    target_NC = left_to(work - first.weight.dequantize(work.dtype), hessian_KK, column_C, first.damp)
    how = replace(how, grid=signs(salient if group_size else None))
    second = solve_second(target_NC, hessian_KK, column_C, first.damp, how, dtype).weight
    return with_second(first.weight, second, column_C)


def signs(group_size: int | None, scales: StoredNumbers = "stored") -> Grid:
    """The grid of signs, with a scale for so many columns, or for all of a row."""
    per: Granularity = "group" if group_size else "channel"
    return Grid(bits=1, type="sign", granularity=per, group_size=group_size, scales=scales)


def inverse_diagonal(hessian_KK: Tensor, damp: float) -> Tensor:
    """[K] the diagonal of the inverse of H, damped."""
    return torch.linalg.inv(damped(hessian_KK, damp)).diagonal()


def salient_columns(weight_NK: Tensor, inverse_K: Tensor, grid: Grid, count: int) -> Tensor:
    """[G * count] the columns of the largest saliency (BiLLM, equation 3), so many of every group of the grid."""
    return chosen(saliency(weight_NK, inverse_K), grid.group_length(len(inverse_K)), count)


def saliency(weight_NK: Tensor, inverse_K: Tensor) -> Tensor:
    """[K] what a column counts: the sum over rows of (w_j / [H^-1]_jj)^2. inverse: the diagonal of H^-1."""
    return (weight_NK / inverse_K).square().sum(0)


def chosen(scores_K: Tensor, length: int, count: int) -> Tensor:
    """[G * count] the columns of the largest scores, so many of every group, rising."""
    best = scores_K.view(-1, length).topk(count, dim=1).indices.sort(1).values
    return (best + torch.arange(0, len(scores_K), length, device=best.device).unsqueeze(1)).reshape(-1)


def left_to(rest_NK: Tensor, hessian_KK: Tensor, column_C: Tensor, damp: float) -> Tensor:
    """[N, C] what these columns should hold to make up for all of the rest: R H_:C H_CC^-1, H damped."""
    stiff_KK = damped(hessian_KK, damp)
    return torch.linalg.solve(stiff_KK[column_C][:, column_C], (rest_NK @ stiff_KK[:, column_C]).t()).t()


def solve_second(
    target_NC: Tensor, hessian_KK: Tensor, column_C: Tensor, damp: float, how: Method, scale_dtype: torch.dtype
) -> Solved:
    """Codes of what some columns should hold, by GPTQ on these columns alone."""
    inside_CC = hessian_KK[column_C][:, column_C]
    return solve_ordered(target_NC, ordered(inside_CC, damp, "none", how.grid.group_size), how, scale_dtype=scale_dtype)


def with_second(first: Quantized, second: Matrix, column_C: Tensor) -> Weight:
    """The sum of both terms, the second in its columns."""
    assert isinstance(second, Quantized)
    columns = first.codes.shape[1]
    return Weight(
        (first, Columns(column_C.to(column_dtype(columns)), BinaryCodes(grid=second.grid).term(second), columns))
    )
