"""Ranks shared out between layers under one budget, by what each rank takes off the layer's loss.

Layer l with rank r costs r c_l and has the loss t_l(r) = sum of its spectrum beyond r (`passes.whitened`); left as it
is it costs w_l and has none.

    minimise  sum_l t_l(r_l)    over ranks r_l,    sum_l of the costs <= budget

What a rank takes off falls with r, so the loss is convex in the cost and one price per unit decides all layers: ranks
are taken by what they take off per unit of cost, the largest first, until the budget is spent (Lagrange; exact but for
what is left of the budget, which is less than the step that no longer fits). Leaving a layer as it is makes a corner
that is not convex; it is one step, from the rank at which it is worth more than the next rank is (the convex hull).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Curve:
    """values [R]: what each rank takes off the loss, falling. cost: of a rank. whole: of the layer as it is, infinite
    where that is no choice."""

    values: Tensor
    cost: float
    whole: float = math.inf

    @property
    def most(self) -> int:
        """The largest rank that costs less than the layer as it is."""
        cheaper = len(self.values) if math.isinf(self.whole) else math.ceil(self.whole / self.cost) - 1
        return max(0, min(len(self.values), cheaper))


@dataclass(frozen=True)
class Step:
    """One more of a layer: the rank that it has then (None: it is left as it is), what that costs, and what it takes
    off per unit of cost."""

    layer: str
    rank: int | None
    cost: float
    worth: float


def allocate(curves: Mapping[str, Curve], budget: float, least: int = 1) -> dict[str, int | None]:
    """{layer: its rank, None where it is left as it is}, each at least `least`, where the budget allows for that."""
    ranks: dict[str, int | None] = {name: min(least, curve.most) for name, curve in curves.items()}
    left = budget - sum(curves[name].cost * (rank or 0) for name, rank in ranks.items())
    for find in (hull, singly):
        steps = [s for name, curve in curves.items() for s in find(name, curve, ranks[name])]
        stopped: set[str] = set()
        for step in sorted(steps, key=lambda s: -s.worth):  # stable: of equals the first layer's, and its lower rank
            if step.layer in stopped or step.cost > left:
                stopped.add(step.layer)
                continue
            ranks[step.layer], left = step.rank, left - step.cost
    return ranks


def hull(layer: str, curve: Curve, rank: int | None) -> Iterator[Step]:
    """The steps from a rank on, each worth at most as much as the one before it; the last leaves the layer as it is."""
    if rank is None:
        return
    values = curve.values.tolist()
    tail = sum(values[rank:])
    while rank < curve.most and values[rank] / curve.cost > tail / (curve.whole - rank * curve.cost):
        yield Step(layer, rank + 1, curve.cost, values[rank] / curve.cost)
        tail -= values[rank]
        rank += 1
    rest = curve.whole - rank * curve.cost
    yield Step(layer, None, rest, max(tail, 0.0) / rest)


def singly(layer: str, curve: Curve, rank: int | None) -> Iterator[Step]:
    """The ranks from one on, for what no larger step could use of the budget."""
    if rank is not None:
        for i, value in enumerate(curve.values.tolist()[rank : curve.most], rank):
            yield Step(layer, i + 1, curve.cost, value / curve.cost)
