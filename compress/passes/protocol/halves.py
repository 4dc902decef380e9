"""With very few tokens a layer gets only what they bear out: solved by each half of them, judged on the other.

The loss on the tokens that codes were fitted to says nothing here: it falls with everything that is fitted, noise
included. Half the tokens serve a solution worse than all of them, so what passes is safe.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from compress.calibration.hessian import HessianResult
from compress.passes.protocol.sites import Site
from compress.solvers.loss import quadratic
from compress.system.comm import Comm
from compress.weights.terms import Summand, Weight

# Rows of a layer by which its solutions are judged: what one row gains resembles what the others do.
JUDGED_ROWS = 128
S = TypeVar("S", bound=str)


def borne_out(
    site: Site,
    halves: Sequence[HessianResult],
    solve: Callable[[Site, HessianResult], Iterable[tuple[S, Mapping[str, Summand | Weight]]]],
) -> dict[str, S]:
    """For every layer the boldest solution that, found by either half of the tokens, is better on the other.

    `solve(site, statistics)` gives (solution, codes of all layers), the most careful solution first.
    """
    part = site.rows({n: slice(None, None, -(-len(w) // JUDGED_ROWS)) for n, w in site.weights.items()})
    losses: dict[str, dict[S, list[float]]] = {n: {} for n in site.weights}
    for fitted, judge in zip(halves, reversed(halves), strict=True):
        for solution, solved in solve(part, fitted):
            for name, weight in solved.items():
                loss = loss_on(site.comm, part.wanted(name).to(judge.hessian.dtype), weight, judge)
                losses[name].setdefault(solution, []).append(loss)
    return {name: boldest(found) for name, found in losses.items()}


def loss_on(comm: Comm, weight_NK: Tensor, weight: Summand | Weight, judge: HessianResult) -> float:
    """Mean over tokens of |X_ref W^T - X Q^T|^2, less the part of it that does not depend on Q."""
    error = weight_NK - weight.dequantize(weight_NK.dtype)
    loss = quadratic(comm, error, judge.hessian)
    if judge.drift is None:
        return loss
    mine = comm.rows_of(len(error))
    return loss + 2 * float(comm.all_reduce(((weight_NK[mine] @ judge.drift) * error[mine]).sum()))


def boldest(losses: Mapping[S, Sequence[float]]) -> S:
    """Of solutions, the careful ones first, the last that has a lower loss on every half than the one it replaces."""
    chosen, *bolder = losses
    for other in bolder:
        if all(new < old for new, old in zip(losses[other], losses[chosen], strict=True)):
            chosen = other
    return chosen
