"""Output rows of a weight are independent in most methods: layers are stacked, and every rank solves its share."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from compress.comm import Comm
from compress.passes.sites import Site
from compress.weights.grid import Grid, Quantized

# What is solved: the arguments of a solver that have a row for each output, by their names there.
Rows = Mapping[str, Tensor]


def quadratic(comm: Comm, error_NK: Tensor, hessian_KK: Tensor) -> float:
    """tr(E H E^T), each rank computing its share of the rows."""
    mine = error_NK[comm.rows_of(len(error_NK))]
    return float(comm.all_reduce(((mine @ hessian_KK) * mine).sum()))


def solve_rows(comm: Comm, rows: Rows, grid: Grid, solve: Callable[..., Quantized]) -> Quantized:
    """Solve a weight whose output rows are independent: each rank its share, then all of them gathered.

    `solve(**rows)` returns the rows that it is given, with one scale row for each.
    """
    count = len(next(iter(rows.values())))
    if not comm.active or count < comm.world:  # a share without rows has no shape to solve
        return solve(**rows)
    mine = comm.rows_of(count)
    part = solve(**{key: tensor[mine] for key, tensor in rows.items()})
    zero_point = None if part.zero_point is None else comm.gather_rows(part.zero_point, count)
    # As bytes: collectives know no float8.
    codes = comm.gather_rows(part.codes.view(torch.uint8), count).view(part.codes.dtype)
    return Quantized(codes, comm.gather_rows(part.scale, count), zero_point, grid)


def solve_stacked(
    site: Site, layers: Mapping[str, Rows], grid: Grid, solve: Callable[..., Quantized]
) -> dict[str, Quantized]:
    """Solve the layers of a site, which share their statistics, as one tall weight for each dtype of scales.

    `layers` has the same arguments of `solve` for each of them; `solve(scale_dtype=, **rows)` is as in `solve_rows`.
    With one scale in all, a layer's rows have to be given theirs.
    """
    solved: dict[str, Quantized] = {}
    for names in stacks(site):
        rows = {key: torch.cat([layers[n][key] for n in names]) for key in layers[names[0]]}
        whole = solve_rows(site.comm, rows, grid, partial(solve, scale_dtype=site.scale_dtypes[names[0]]))
        first = 0
        for name in names:
            last = first + len(next(iter(layers[name].values())))
            solved[name] = whole.rows(slice(first, last))
            if grid.granularity == "tensor":
                solved[name] = _one_scale(solved[name])
            first = last
    return solved


def _one_scale(rows: Quantized) -> Quantized:
    """The rows of a layer, which all have the same scale, with that scale once."""
    zero_point = None if rows.zero_point is None else rows.zero_point[:1]
    return Quantized(rows.codes, rows.scale[:1], zero_point, rows.grid)


def stacks(site: Site) -> list[list[str]]:
    """The site's layers, those that store their scales in one dtype together."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name in site.weights:
        by_dtype.setdefault(site.scale_dtypes[name], []).append(name)
    return list(by_dtype.values())
