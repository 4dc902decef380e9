"""Binary weights as functions of tensors: codes of -1 and 1 (XNOR-Net, arXiv 1603.05279; BiLLM, arXiv 2402.04291).

Shapes: N outputs, K inputs. H [K, K] is the mean of x x^T over the layer's inputs x. `passes.binary` says where this
departs from the papers.
"""

import torch
from torch import Tensor

from compress.solvers.gptq import solve_on_grid
from compress.solvers.hessian_with_drift import DAMP, POLISH_DAMP, Problem
from compress.weights.grid import Grid
from compress.weights.matrix import Matrix
from compress.weights.number_formats import Granularity, StoredNumbers


def binary(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    *,
    group_size: int | None = 128,
    damp: float = DAMP,
    refit: int = 0,
    sweeps: int = 0,
    polish_damp: float = POLISH_DAMP,
    scale_dtype: torch.dtype | None = None,
) -> Matrix:
    """Signs of a weight for the least tr(E H E^T). Pure: no rank, no device, no state.

    group_size: inputs that share a scale; None: all of them. The others are as in `gptq.gptq`. Raises CompressError
    where H is not finite.
    """
    grid, dtype = signs(group_size), weight_NK.dtype if scale_dtype is None else scale_dtype
    problem = Problem.of(hessian_KK, damp, group_size=group_size, polish_damp=polish_damp)
    return solve_on_grid(weight_NK.to(hessian_KK.dtype), problem, grid, dtype, refit=refit, sweeps=sweeps).weight


def signs(group_size: int | None, scales: StoredNumbers = "stored") -> Grid:
    """The grid of signs, with a scale for so many columns, or for all of a row."""
    per: Granularity = "group" if group_size else "channel"
    return Grid(bits=1, type="sign", granularity=per, group_size=group_size, scales=scales)
