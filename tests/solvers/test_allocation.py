"""One option for each unit under a budget, against all combinations."""

import itertools
import math
import random

import pytest

from compress.solvers.allocation import UnitOption, choose


def everything(units: dict[str, list[UnitOption]], budget: float) -> float:
    """The least loss of all combinations within the budget."""
    sums = (
        (math.fsum(o.cost for o in combination), math.fsum(o.loss for o in combination))
        for combination in itertools.product(*units.values())
    )
    return min((loss for cost, loss in sums if cost <= budget), default=math.inf)


def test_no_combination_of_six_layers_and_four_candidates_loses_less():
    generator = random.Random(3)
    for trial in range(6):
        scale = 10.0 ** generator.randint(-9, 3)  # losses of any unit
        units = {
            f"layer {i}": [
                UnitOption(cost=generator.randint(1, 10**6), loss=scale * generator.random() ** 3) for _ in range(4)
            ]
            for i in range(6)
        }
        if trial == 0:  # some that are worse in both, and some that are alike
            units["layer 0"] = [
                UnitOption(10, 1.0 * scale),
                UnitOption(20, 2.0 * scale),
                UnitOption(10, 1.0 * scale),
                UnitOption(5, 3 * scale),
            ]
        cheapest = sum(min(o.cost for o in options) for options in units.values())
        dearest = sum(max(o.cost for o in options) for options in units.values())
        for budget in (cheapest, cheapest + (dearest - cheapest) * generator.random(), dearest):
            chosen = choose(units, budget)
            assert chosen is not None
            taken = [units[name][i] for name, i in chosen.items()]
            assert sum(o.cost for o in taken) <= budget
            assert math.fsum(o.loss for o in taken) == pytest.approx(everything(units, budget), rel=1e-9)
        assert choose(units, cheapest - 1) is None
