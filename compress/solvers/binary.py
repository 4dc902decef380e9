"""Binary weights as functions of tensors: codes of -1 and 1, and once more in salient columns (XNOR-Net, arXiv
1603.05279; BiLLM, arXiv 2402.04291).

Shapes: N outputs, K inputs, C of them salient, G groups. H [K, K] is the mean of x x^T over the layer's inputs x. With
R = W - Q_1, what the first term leaves, the best second term in the columns C is, equation by equation,

    |(R - Q_2) X|^2  =  tr((T - Q_2) H_CC (T - Q_2)^T) + const,      T = R H_:C H_CC^-1

the problem of the first term on fewer columns. `passes.binary` says where this departs from the papers.
"""

import torch
from torch import Tensor

from compress.solvers.gptq import solve_on_grid
from compress.solvers.hessian_with_drift import DAMP, POLISH_DAMP, Problem, add_damping
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
    problem = Problem.of(hessian_KK, damp, group_size=group_size, polish_damp=polish_damp)
    first = solve_on_grid(work, problem, grid, dtype, refit=refit, sweeps=sweeps).weight
    assert isinstance(first, Quantized)
    if not salient:
        return first
    column_C = salient_columns(work, inverse_diagonal(problem), grid, salient)
    rest_NK = work - first.dequantize(work.dtype)
    second = signs(salient if group_size else None)
    inside, target_NC = second_problem(problem, rest_NK, column_C, second)
    solved = solve_on_grid(target_NC, inside, second, dtype, refit=refit, sweeps=sweeps)
    return with_second(first, solved.weight, column_C)


def signs(group_size: int | None, scales: StoredNumbers = "stored") -> Grid:
    """The grid of signs, with a scale for so many columns, or for all of a row."""
    per: Granularity = "group" if group_size else "channel"
    return Grid(bits=1, type="sign", granularity=per, group_size=group_size, scales=scales)


def inverse_diagonal(problem: Problem) -> Tensor:
    """[K] the diagonal of the inverse of H, damped."""
    return torch.linalg.inv(add_damping(problem.hessian, problem.damp)).diagonal()


def salient_columns(weight_NK: Tensor, inverse_K: Tensor, grid: Grid, count: int) -> Tensor:
    """[G * count] the columns of the largest saliency (BiLLM, equation 3), so many of every group of the grid."""
    return choose_columns(saliency(weight_NK, inverse_K), grid.group_length(len(inverse_K)), count)


def saliency(weight_NK: Tensor, inverse_K: Tensor) -> Tensor:
    """[K] the saliency of each column: the sum over rows of (w_j / [H^-1]_jj)^2. inverse: the diagonal of H^-1."""
    return (weight_NK / inverse_K).square().sum(0)


def choose_columns(scores_K: Tensor, length: int, count: int) -> Tensor:
    """[G * count] the columns of the largest scores, so many of every group, rising."""
    best = scores_K.view(-1, length).topk(count, dim=1).indices.sort(1).values
    return (best + torch.arange(0, len(scores_K), length, device=best.device).unsqueeze(1)).reshape(-1)


def second_problem(problem: Problem, rest_NK: Tensor, column_C: Tensor, grid: Grid) -> tuple[Problem, Tensor]:
    """(The problem in some columns alone; its target [N, C], by which these make up for all of the rest:
    R H_:C H_CC^-1, H damped)."""
    stiff_KK = add_damping(problem.hessian, problem.damp)
    target_NC = torch.linalg.solve(stiff_KK[column_C][:, column_C], (rest_NK @ stiff_KK[:, column_C]).t()).t()
    inside_CC = problem.hessian[column_C][:, column_C]
    return Problem.of(inside_CC, problem.damp, "none", grid.group_size, problem.polish_damp), target_NC


def with_second(first: Quantized, second: Matrix, column_C: Tensor) -> Weight:
    """The sum of both terms, the second in its columns."""
    assert isinstance(second, Quantized)
    columns = first.codes.shape[1]
    return Weight(
        (first, Columns(column_C.to(column_dtype(columns)), BinaryCodes(grid=second.grid).term(second), columns))
    )
