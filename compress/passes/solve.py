"""Output rows of a weight are independent in most methods: every rank solves its share."""

from collections.abc import Callable

import torch
from torch import Tensor

from compress.comm import Comm
from compress.weights.grid import Grid, Quantized


def quadratic(comm: Comm, error_NK: Tensor, hessian_KK: Tensor) -> float:
    """tr(E H E^T), each rank computing its share of the rows."""
    mine = error_NK[comm.rows_of(len(error_NK))]
    return float(comm.all_reduce(((mine @ hessian_KK) * mine).sum()))


def solve_rows(comm: Comm, weight_NK: Tensor, grid: Grid, solve: Callable[[Tensor, slice], Quantized]) -> Quantized:
    """Solve a weight whose output rows are independent: each rank its share, then all of them gathered.

    `solve(rows of the weight, which rows)` returns those rows, with one scale row for each.
    """
    if not comm.active or len(weight_NK) < comm.world:  # a share without rows has no shape to solve
        return solve(weight_NK, slice(0, len(weight_NK)))
    mine = comm.rows_of(len(weight_NK))
    part = solve(weight_NK[mine], mine)
    zero_point = None if part.zero_point is None else comm.gather_rows(part.zero_point, len(weight_NK))
    # As bytes: collectives know no float8.
    codes = comm.gather_rows(part.codes.view(torch.uint8), len(weight_NK)).view(part.codes.dtype)
    return Quantized(codes, comm.gather_rows(part.scale, len(weight_NK)), zero_point, grid)
