"""Allocation of one budget to layers, by what it takes off their losses: ranks, or one of several options each.

Ranks (and steps of sparsity, `solvers.sparsity_shares`). Layer l with rank r costs r c_l and has the loss t_l(r) = sum
of its spectrum beyond r (`solvers.low_rank`); left as it is it costs w_l and has none.

    minimise  sum_l t_l(r_l)    over ranks r_l,    sum_l of the costs <= budget

What a rank takes off falls with r, so the loss is convex in the cost and one price per unit decides all layers: ranks
are taken by what they take off per unit of cost, the largest first, until the budget is spent (Lagrange; exact but for
what is left of the budget, which is less than the step that no longer fits). Leaving a layer as it is makes a corner
that is not convex; it is one step, from the rank at which it is worth more than the next rank is (the convex hull).

Options, of which no curve can be asked to be convex: number formats, say. Unit u has options o of cost c_uo and loss
t_uo, and x_uo is 1 for the one that it gets. A 0-1 program, the multiple-choice knapsack, solved by branch and bound
(HiGHS in scipy):

    minimise  sum t_uo x_uo,    sum c_uo x_uo <= budget,    sum_o x_uo = 1 for each u
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from compress.base.native_output import drop_native_output

# What the sum of losses is brought to: branch and bound ends 1e-6 from the optimum, whatever the unit is.
SCALE = 1e4
SECONDS = 60.0
# Of a sum of costs, as a part of it.
ROUNDING = 1e-12


@dataclass(frozen=True)
class RankCurve:
    """values [R]: the fall of the loss by each rank, falling. cost: of a rank. whole: of the layer as it is, infinite
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


def allocate(curves: Mapping[str, RankCurve], budget: float, least: int = 1) -> dict[str, int | None]:
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


def worths(damages: Mapping[str, float], losses: Mapping[str, float]) -> dict[str, float]:
    """{layer: the damage to the model of a unit of its loss}: its damage over its loss, both of the same change; where
    there is no loss, the mean of the others. All alike where no layer does any damage."""
    found = {name: damages[name] / loss for name, loss in losses.items() if loss > 0}
    if not any(found.values()):
        return dict.fromkeys(losses, 1.0)
    mean = sum(found.values()) / len(found)
    return {name: found.get(name, mean) for name in losses}


def hull(layer: str, curve: RankCurve, rank: int | None) -> Iterator[Step]:
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


def singly(layer: str, curve: RankCurve, rank: int | None) -> Iterator[Step]:
    """The ranks from one on, for what no larger step could use of the budget."""
    if rank is not None:
        for i, value in enumerate(curve.values.tolist()[rank : curve.most], rank):
            yield Step(layer, i + 1, curve.cost, value / curve.cost)


@dataclass(frozen=True)
class UnitOption:
    """An option of a unit: its cost and its loss, 0 or more."""

    cost: float
    loss: float


def choose(units: Mapping[str, Sequence[UnitOption]], budget: float) -> dict[str, int] | None:
    """{unit: which of its options it gets}: the least sum of losses whose costs are within the budget; None where even
    the cheapest are not. Of options that cost the same and lose the same the first."""
    if sum(min(o.cost for o in options) for options in units.values()) > budget:
        return None
    kept = {name: _undominated(options) for name, options in units.items()}
    limit = budget
    while True:
        found = _solved({name: [units[name][i] for i in kept[name]] for name in units}, limit)
        chosen = {name: kept[name][i] for name, i in found.items()}
        over = math.fsum(units[name][i].cost for name, i in chosen.items()) - budget
        if over <= ROUNDING * abs(budget):
            return chosen
        limit -= over  # the solver allows for more


def _undominated(options: Sequence[UnitOption]) -> list[int]:
    """Those that nothing beats in both cost and loss, by their cost."""
    kept: list[int] = []
    for i in sorted(range(len(options)), key=lambda i: (options[i].cost, options[i].loss, i)):
        if not kept or options[i].loss < options[kept[-1]].loss:
            kept.append(i)
    return kept


def _solved(units: Mapping[str, Sequence[UnitOption]], budget: float) -> dict[str, int]:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    owners = [u for u, options in enumerate(units.values()) for _ in options]
    everything = [option for options in units.values() for option in options]
    costs, losses = np.array([o.cost for o in everything]), np.array([o.loss for o in everything])
    one_each = coo_array((np.ones(len(owners)), (owners, range(len(owners)))), (len(units), len(owners)))
    whole = sum(max(o.loss for o in options) for options in units.values()) or 1.0
    with drop_native_output():
        solution = milp(
            losses * (SCALE / whole),
            integrality=np.ones(len(owners)),
            bounds=Bounds(0, 1),
            constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(costs[None] / budget, ub=1.0)],
            options={"mip_rel_gap": 0.0, "time_limit": SECONDS},
        )
    if solution.x is None:  # rounding of the budget's row, where it is just that of the cheapest
        return {name: min(range(len(o)), key=lambda i: o[i].cost) for name, o in units.items()}
    chosen, first = {}, 0
    for name, options in units.items():
        chosen[name] = int(solution.x[first : first + len(options)].argmax())
        first += len(options)
    return chosen
