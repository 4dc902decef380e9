"""Outliers: which weights of a layer are worth a value of their own, beside codes on a grid for the rest.

Shapes: N outputs, K inputs, g inputs of one group. d_j is what an error of input j costs (D of the sweep's factor, the
diagonal of H, or 1), p the price of a value.

    minimise, in each group,    sum over exact places of p  +  sum over the others of d_j (w_j - q_j)^2

A weight is worth its value for one of two reasons: it stretches the range of its group, so that all others have wider
steps, or its own error costs more than the price. The first are among the largest of the group: for each count k of a
short list, the k largest are left out of the range; then whatever costs more than p is exact, too; the k of least cost
wins. SpQR (arXiv 2306.03078) asks the same of one weight at a time (`passes.spqr`).

The price is one for a layer. That of a wanted share of exact weights is found by bisection on some of the rows.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.kernels.layouts.words import some_rows
from compress.weights.formats.sparse import Sparse, sparse
from compress.weights.grid import Grid, Quantized, decode, encode, fit, grouped, quantize, working_dtype
from compress.weights.matrix import Matrix, Weight

# Weights on which a price is found.
SAMPLED = 2**16
# Halvings of the logarithm of a price, and the least one, as a part of the largest cost.
HALVINGS, LOWEST_PRICE = 24, 1e-12
# With more than a quarter exact, a wider grid has fewer bytes.
LARGEST_SHARE = 0.25


def check_share(outliers: float) -> None:
    """Refuse a share of exact weights that cannot be. Raises InputError."""
    if not 0 <= outliers <= LARGEST_SHARE:
        raise InputError(
            f"outliers {outliers}; allowed: 0 (none) to {LARGEST_SHARE}, the share of weights that stay exact"
        )


def counts_of(length: int) -> list[int]:
    """Counts to try of a group's largest weights outside of its range: 0 up to an eighth of the group, at least 2."""
    most, counts = max(2, length // 8), [0, 1]
    while counts[-1] < most:
        counts += [counts[-1] * 3 // 2, counts[-1] * 2] if counts[-1] > 2 else [counts[-1] + 1]
    return sorted({count for count in counts if count <= most})


def costs(x: Tensor, grid: Grid, scale_dtype: torch.dtype, cost: Tensor) -> Tensor:
    """[C, ..., g] the costs of errors of groups x [..., g] where the c-th count of largest weights is outside of the
    range; infinite for those. cost: d_j, of shape that broadcasts to x."""
    plain = grid.plain

    def without(outside: Tensor) -> Tensor:
        scale, zero = (t.unsqueeze(-1) for t in fit(x.masked_fill(outside, 0.0), plain, scale_dtype))
        return (decode(encode(x, scale, zero, plain), scale, zero, scale_dtype) - x).square() * cost

    return by_count(x if grid.symmetric else x - x.mean(-1, keepdim=True), without)


def by_count(size: Tensor, without: Callable[[Tensor], Tensor]) -> Tensor:
    """[C, ..., g] the costs of errors where the c-th count of the largest |size| [..., g] is outside of the range, of
    which `without` is told (bool [..., g]); infinite for those."""
    rank = size.abs().argsort(dim=-1, descending=True, stable=True).argsort(dim=-1, stable=True)
    masks = [rank < count for count in counts_of(size.shape[-1])]
    return torch.stack([without(outside).masked_fill(outside, math.inf) for outside in masks])


def exact_places(costs_C: Tensor, price: Tensor | float) -> Tensor:
    """Bool [..., g]: which weights are exact at a price, [..., 1] or a number; costs_C: as `costs` gives it."""
    best = torch.minimum(costs_C, torch.as_tensor(price, dtype=costs_C.dtype, device=costs_C.device)).sum(-1).argmin(0)
    chosen = costs_C.gather(0, best[None, ..., None].expand(1, *costs_C.shape[1:]))[0]
    return chosen > price


def price_of(share: float, costs_C: Tensor) -> float:
    """The price at which just so large a share of the weights is exact."""
    finite = costs_C[torch.isfinite(costs_C)]
    high, low = float(finite.max()), float(finite.max()) * LOWEST_PRICE
    if high <= 0:
        return math.inf
    for _ in range(HALVINGS):
        middle = math.sqrt(high * low)
        if float(exact_places(costs_C, middle).double().mean()) > share:
            low = middle
        else:
            high = middle
    return high


def price_by_trial(share: float, costs_C: Tensor, swept: Callable[[float], Matrix]) -> float:
    """The price at which a sweep makes so large a share of a weight exact.

    Found without a sweep first. What is fed back makes later weights larger and dearer, so that a sweep makes more of
    them exact: by how much is seen on a few rows, that `swept` solves at a price, and so much less is asked for.
    """
    price = price_of(share, costs_C)
    taken = share_of_outliers(swept(price))
    return price_of(share * share / taken, costs_C) if taken else price


def sampled_rows(rows: int, columns: int, together: int = 1) -> Tensor:
    """Indices of rows, evenly over a weight, on which its price is found; always `together` in a row."""
    tiles = -(-rows // together)
    wanted = min(tiles, max(1, SAMPLED // (columns * together)))
    first = torch.arange(wanted) * tiles // wanted * together
    found = (first.unsqueeze(1) + torch.arange(together)).flatten()
    return found[found < rows]


def dearest(error_NK: Tensor, diagonal_K: Tensor, share: float) -> Tensor:
    """Bool [N, K]: so large a share of all weights, those whose errors cost most, e^2 H_jj; of equals the first. For
    errors that have no grid."""
    cost = (error_NK.square() * diagonal_K).flatten()
    chosen = torch.zeros_like(cost, dtype=torch.bool)
    chosen[cost.argsort(descending=True, stable=True)[: int(share * len(cost))]] = True
    return chosen.view_as(error_NK)


def share_of_outliers(weight: Matrix) -> float:
    """The part of a weight's values that sparse rows have."""
    found = [term for term in weight.terms if isinstance(term, Sparse)]
    return sum(len(term.value) / (term.shape[0] * term.inputs) for term in found)


def has_outliers(weight: Matrix) -> bool:
    """True for a weight that has a place for exact values, be it empty."""
    return any(isinstance(term, Sparse) for term in weight.terms)


def set_apart(
    weight_NK: Tensor, grid: Grid, scale_dtype: torch.dtype, share: float, cost_K: Tensor | None = None
) -> tuple[Tensor, Sparse]:
    """(the weight with zeros at its outliers, the outliers as `scale_dtype` has them). Of the grid's codes the rest is
    to have 0 is exact, so that a sum of both is exact there."""
    work = weight_NK.to(working_dtype(weight_NK))
    cost = torch.ones_like(work[0]) if cost_K is None else cost_K.to(work)
    some = sampled_rows(*work.shape).to(work.device)
    places = places_at(
        work, grid, scale_dtype, cost, price_of(share, grouped_costs(work[some], grid, scale_dtype, cost))
    )
    return work.masked_fill(places, 0.0), sparse(work.to(scale_dtype), places)


def grouped_costs(weight_NK: Tensor, grid: Grid, scale_dtype: torch.dtype, cost_K: Tensor) -> Tensor:
    """[C, N, G, g]: `costs` of all groups of a weight."""
    groups = grouped(weight_NK, grid)
    return costs(groups, grid, scale_dtype, cost_K.view(groups.shape[1:]))


def places_at(weight_NK: Tensor, grid: Grid, scale_dtype: torch.dtype, cost_K: Tensor, price: Tensor | float) -> Tensor:
    """Bool [N, K]: which weights are exact at a price, a number or one for each row [N]; some rows at a time."""
    rows, columns = weight_NK.shape
    prices = torch.as_tensor(price, dtype=weight_NK.dtype, device=weight_NK.device).expand(rows)
    parts = []
    for part in some_rows(rows, columns):
        found = grouped_costs(weight_NK[part], grid, scale_dtype, cost_K)
        parts.append(exact_places(found, prices[part].view(-1, 1, 1)).view(-1, columns))
    return torch.cat(parts)


def nearest(
    weight_NK: Tensor, grid: Grid, scale_dtype: torch.dtype, outliers: float = 0.0, cost_K: Tensor | None = None
) -> Quantized | Weight:
    """A weight rounded to nearest, beside a share of outliers. cost: of an error in each input."""
    if not outliers:
        return quantize(weight_NK, grid, scale_dtype)
    rest, exact = set_apart(weight_NK, grid, scale_dtype, outliers, cost_K)
    return Weight((quantize(rest, grid, scale_dtype), exact))
