"""Shares of zeros for single layers, out of one budget: functions of what was found out about them.

t_l(s) is what layer l loses of its output at the share s, in squares. Pruned alone by the budget's share s*,
it costs the model KL_l; a loss is worth w_l = KL_l / t_l(s*) (`allocation.worths`).

    minimise  sum_l w_l t_l(s_l)    over shares s_l,    sum_l n_l s_l = the budget's zeros,    n_l the layer's weights

t is found at `LEVELS`, taken to be log-linear between them (below the first a power of s), and cut into steps of equal
numbers of weights. Its lower convex hull makes each step worth at most the one before; one price per weight then
decides all layers (`allocation`), and what is left of the budget goes to the layer that would have had the next step.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from compress.solvers.allocation import RankCurve, allocate
from compress.weights.masks import pruned_before, share_of

LEVELS = tuple(eighth / 8 for eighth in range(1, 8))
# Steps between nothing and all of a layer.
STEPS = 256


def by_losses(
    losses: Mapping[str, Tensor], sizes: Mapping[str, int], sparsity: float, worth: Mapping[str, float]
) -> dict[str, float]:
    """{layer: its share of zeros}. losses [L]: at each of `LEVELS`, as parts of what there is to lose; worth: of all
    of that. Together the layers lose exactly what the share prunes of all of them."""
    curves = {n: RankCurve(convex(steps(loss)) * worth[n], sizes[n] / STEPS) for n, loss in losses.items()}
    everything = sum(sizes.values())
    left = everything - pruned_before(everything, sparsity)
    least = int(left >= sum(curve.cost for curve in curves.values()))  # of no layer nothing, where that can be
    allocated = allocate(curves, left, least)
    kept = {name: (allocated[name] or 0) * size // STEPS for name, size in sizes.items()}
    left -= sum(kept.values())
    for name in sorted(kept, key=lambda n: -_next(curves[n], allocated[n] or 0)):
        more = min(left, sizes[name] - kept[name])
        kept[name], left = kept[name] + more, left - more
    return {name: share_of(size - kept[name], size) for name, size in sizes.items()}


def by_rows(shares: Mapping[str, float], shapes: Mapping[str, tuple[int, int]], sparsity: float) -> dict[str, float]:
    """The shares as whole numbers of weights in each row, rounded up where most was lost by rounding down and as far as
    the budget goes: the zeros of all layers together are fewer than the share by less than one in each row of one."""
    wanted = {name: share * shapes[name][1] for name, share in shares.items()}
    counts = {name: min(int(want), shapes[name][1]) for name, want in wanted.items()}
    left = pruned_before(sum(rows * columns for rows, columns in shapes.values()), sparsity)
    left -= sum(count * shapes[name][0] for name, count in counts.items())
    for name in sorted(counts, key=lambda n: counts[n] - wanted[n]):
        rows, columns = shapes[name]
        if rows <= left and counts[name] < columns:
            counts[name], left = counts[name] + 1, left - rows
    return {name: share_of(count, shapes[name][1]) for name, count in counts.items()}


def _next(curve: RankCurve, step: int) -> float:
    """The loss that one more step saves per weight; -inf after the last."""
    return float(curve.values[step]) / curve.cost if step < len(curve.values) else -math.inf


def steps(losses_L: Tensor) -> Tensor:
    """[STEPS] the fall of a layer's loss as each `STEPS`-th of its weights is kept, in the order of keeping them."""
    tiny = torch.finfo(torch.float64).tiny
    known = losses_L.double().clamp(min=tiny).cummax(0).values.log().tolist()
    known.append(max(known[-1], 0.0))  # of everything: 1
    first, power = LEVELS[0], max(1.0, (known[1] - known[0]) / math.log(LEVELS[1] / LEVELS[0]))

    def loss(share: float) -> float:
        if share <= first:
            return math.exp(known[0]) * (share / first) ** power
        place = share / first - 1
        below = min(int(place), len(known) - 2)
        return math.exp(known[below] + (place - below) * (known[below + 1] - known[below]))

    at = torch.tensor([loss(1 - step / STEPS) for step in range(STEPS + 1)], dtype=torch.float64)
    return at[:-1] - at[1:]


def convex(values: Tensor) -> Tensor:
    """The worth of steps on the lower convex hull of their losses: those that rise are averaged until none does."""
    groups: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, count = value, 1
        while groups and groups[-1][0] < mean:
            before, length = groups.pop()
            mean, count = (before * length + mean * count) / (length + count), length + count
        groups.append((mean, count))
    return torch.tensor([mean for mean, count in groups for _ in range(count)], dtype=torch.float64)
