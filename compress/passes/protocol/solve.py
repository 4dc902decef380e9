"""Output rows of a weight are independent in most methods: layers are stacked, and every rank solves its share."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.passes.protocol.sites import Site
from compress.weights.formats.sparse import Sparse, sparse
from compress.weights.grid import Quantized
from compress.weights.matrix import Matrix, Term, Weight, added, tensors_changed

# What is solved: the arguments of a solver that have a row for each output, by their names there.
Rows = Mapping[str, Tensor]
# What comes of it: a weight whose terms' tensors have a row for each output, too, or are sparse rows.
Solve = Callable[..., Matrix]


def solve_rows(comm: Comm, rows: Rows, solve: Solve, together: int = 1, most: int | None = None) -> Matrix:
    """Solve a weight whose output rows are independent: each rank its share, then all of them gathered.

    `solve(**rows)` returns the rows that it is given. together: so many rows in a row are not independent of each
    other (tiles), and stay on one rank. most: weights that are solved at a time, where memory is short (None: all).
    """
    count = len(next(iter(rows.values())))
    if most is not None:
        largest = max(tensor.numel() for tensor in rows.values())
        solve = partial(_in_runs, solve, together * max(1, most * count // largest // together))
    if not comm.active or count < comm.world * together:  # a share without rows has no shape to solve
        return solve(**rows)
    tiles = -(-count // together)
    shares = [_times(comm.rows_of(tiles, rank), together, count) for rank in range(comm.world)]
    mine = shares[comm.rank]
    part = solve(**{key: tensor[mine] for key, tensor in rows.items()})
    lengths = [share.stop - share.start for share in shares]
    return added(*(_gather(comm, term, lengths) for term in part.terms))


def _in_runs(solve: Solve, length: int, **rows: Tensor) -> Matrix:
    """Rows solved so many at a time."""
    runs = zip(*(tensor.split(length) for tensor in rows.values()), strict=True)
    solved = [solve(**dict(zip(rows, run, strict=True))) for run in runs]
    return solved[0] if len(solved) == 1 else added(*Weight.stacked(solved).terms)


def _times(part: slice, factor: int, most: int) -> slice:
    return slice(min(part.start * factor, most), min(part.stop * factor, most))


def _gather(comm: Comm, term: Term, lengths: list[int]) -> Term:
    """The rows of all ranks' terms below each other, of which each has so many."""
    if isinstance(term, Sparse):
        chosen = replace(term, value=torch.ones_like(term.value)).dequantize().bool()
        values, places = (comm.gather_rows(t, lengths) for t in (term.dequantize(), chosen))
        return sparse(values, places)
    return tensors_changed(term, lambda rows: comm.gather_rows(rows, lengths))


def solve_stacked(
    site: Site, layers: Mapping[str, Rows], solve: Solve, together: int = 1, most: int | None = None
) -> dict[str, Matrix]:
    """Solve the layers of a site, which share their statistics, as one tall weight for each dtype of scales.

    `layers` has the same arguments of `solve` for each of them; `solve(scale_dtype=, **rows)`, `together` and `most`
    are as in `solve_rows`. With one scale in all, a layer's rows have to be given theirs.
    """
    solved: dict[str, Matrix] = {}
    for names in stacks(site, together):
        rows = {key: torch.cat([layers[n][key] for n in names]) for key in layers[names[0]]}
        whole = solve_rows(site.comm, rows, partial(solve, scale_dtype=site.scale_dtypes[names[0]]), together, most)
        first = 0
        for name in names:
            last = first + len(next(iter(layers[name].values())))
            solved[name] = added(*(_one_scale(term) for term in whole.rows(slice(first, last)).terms))
            first = last
    return solved


def _one_scale(rows: Term) -> Term:
    """The rows of a layer that has one scale in all with that scale once; others as they are."""
    if not isinstance(rows, Quantized) or rows.grid.granularity != "tensor":
        return rows
    zero_point = None if rows.zero_point is None else rows.zero_point[:1]
    return replace(rows, scale=rows.scale[:1], zero_point=zero_point)


def stacks(site: Site, together: int = 1) -> list[list[str]]:
    """The site's layers, those that store their scales in one dtype together; by itself one in which the rows of
    another layer would come into its last `together` rows."""
    found: dict[tuple[torch.dtype, str], list[str]] = {}
    for name, weight in site.weights.items():
        alone = name if len(weight) % together else ""
        found.setdefault((site.scale_dtypes[name], alone), []).append(name)
    return list(found.values())
