"""A recipe from sensitivities and one budget, solved exactly (`solvers.allocation.choose`).

    KL of a model ~ f(sum over units of the KL of the candidate chosen for each, alone: its Fisher-weighted loss)

f interpolates the points (sum, measured KL) of the uniform models linearly on logarithmic axes and is
proportional outside them. This assumes that cross terms between layers equal those of a uniform model of the same sum.
In these models no layer compensates for the errors of earlier ones, so that a recipe that is run comes out better.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from compress.base.byte_sizes import parse_bytes
from compress.base.errors import InputError
from compress.checkpoint.files import write_whole
from compress.checkpoint.ownership import MARK
from compress.checkpoint.sensitivity import Sensitivity
from compress.model.patterns import patterns_of
from compress.passes.protocol.base import Pass
from compress.passes.protocol.recipe import options_of, parse_recipe, pass_class
from compress.solvers.allocation import UnitOption, choose

FORM = "3.5bpw (bits per weight of the compressed layers), or 2.1GB, 800MiB, 5714544 (bytes of the weight files)"
TINY = 1e-30


@dataclass(frozen=True)
class Budget:
    """The size limit of a checkpoint: bits per weight of the compressed layers, or bytes of the weight files."""

    bits_per_weight: float | None = None
    bytes: int | None = None

    def of_units(self, found: Sensitivity) -> float:
        """Bytes that all units together may take."""
        if self.bits_per_weight is not None:
            return self.bits_per_weight * found.weights / 8
        assert self.bytes is not None
        return self.bytes - found.other_bytes

    def __str__(self) -> str:
        return f"{self.bits_per_weight:g} bits per weight" if self.bytes is None else f"{self.bytes:,} bytes"


@dataclass(frozen=True)
class Allocation:
    """A candidate for each unit.

    chosen: {unit: candidate}. recipe: as a recipe file holds it. bytes: of all units. total_bytes: of the weight files.
    bits_per_weight: over the units.
    """

    chosen: dict[str, str]
    recipe: dict[str, Any]
    predicted_kl: float
    bytes: int
    total_bytes: int
    bits_per_weight: float

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The recipe as `quantize` takes it."""
        return parse_recipe(self.recipe, "the recipe")


def parse_budget(words: str) -> Budget:
    """Parses a budget like 3.5bpw or 2.1GB; a whole number alone is bytes. Raises InputError."""
    bits = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*bpw\s*", words, re.IGNORECASE)
    if bits is not None and float(bits[1]):
        return Budget(bits_per_weight=float(bits[1]))
    return Budget(bytes=parse_bytes(words, "size", FORM))


def allocate(found: Sensitivity, budget: Budget | None = None, *, max_kl: float | None = None) -> Allocation:
    """Choose a candidate for every unit: the least sum of scores within the budget, or, with `max_kl`, the fewest bytes
    at which the predicted KL is at most `max_kl` (nats per token).

    Raises InputError for a budget or KL that cannot be reached; the message names the closest that can.
    """
    if (budget is None) == (max_kl is None):
        raise InputError("give a budget or max_kl, one of them")
    if max_kl is not None and not 0 < max_kl < math.inf:
        raise InputError(f"max_kl {max_kl}; allowed: above 0, nats per token (0.02 is close to the original)")
    names = {unit.name: list(unit.tried) for unit in found.units}
    scores = {unit.name: [tried.fisher for tried in unit.tried.values()] for unit in found.units}
    files = budget is None or budget.bytes is not None  # sizes are of weight files, and so include their headers
    sizes = {
        unit.name: [tried.bytes + files * tried.header_bytes for tried in unit.tried.values()] for unit in found.units
    }
    predict = prediction(found)
    if max_kl is None:
        assert budget is not None
        taken = _within(scores, sizes, budget, found)
    else:
        taken = _below(scores, sizes, predict, max_kl)
    chosen = {name: names[name][i] for name, i in taken.items()}
    tried = [unit.tried[chosen[unit.name]] for unit in found.units]
    total = sum(each.bytes for each in tried)
    score = math.fsum(scores[name][i] for name, i in taken.items())
    return Allocation(
        chosen,
        recipe_of(found, chosen),
        predict(score),
        total,
        total + sum(each.header_bytes for each in tried) + found.other_bytes,
        8 * total / found.weights,
    )


def _within(
    scores: Mapping[str, Sequence[float]], sizes: Mapping[str, Sequence[int]], budget: Budget, found: Sensitivity
) -> dict[str, int]:
    """{unit: index of its option} with the least sum of scores within a budget. Raises InputError where none fits."""
    units = {name: [UnitOption(b, s) for b, s in zip(sizes[name], scores[name], strict=True)] for name in scores}
    taken = choose(units, budget.of_units(found))
    if taken is None:
        least = sum(min(each) for each in sizes.values())
        need = f"{8 * least / found.weights:.4g}bpw" if budget.bytes is None else f"{least + found.other_bytes}B"
        raise InputError(f"budget {budget}; the smallest candidates take {need}: give that or more, or fewer bits")
    return taken


def _below(
    scores: Mapping[str, Sequence[float]],
    sizes: Mapping[str, Sequence[int]],
    predict: Callable[[float], float],
    max_kl: float,
) -> dict[str, int]:
    """{unit: index of its option} with the fewest bytes at a predicted KL of at most `max_kl`. Raises InputError."""
    best = sum(min(each) for each in scores.values())
    if predict(best) > max_kl:
        raise InputError(
            f"max_kl {max_kl:g}; the best candidates are predicted to have {predict(best):.3g}: give that or more, or "
            "candidates of more bits"
        )
    low, high = best, sum(max(each) for each in scores.values())
    if predict(high) > max_kl:
        for _ in range(200):  # bisect until no float64 lies between
            middle = (low + high) / 2
            low, high = (middle, high) if predict(middle) <= max_kl else (low, middle)
        high = low
    units = {name: [UnitOption(s, b) for b, s in zip(sizes[name], scores[name], strict=True)] for name in scores}
    taken = choose(units, high)
    assert taken is not None
    return taken


def prediction(found: Sensitivity) -> Callable[[float], float]:
    """The function f, from a sum of scores to a KL; the sum itself where no candidate suits every unit."""
    points = []
    for name, kl in found.uniform_kl.items():
        if all(name in unit.tried for unit in found.units):
            total = math.fsum(unit.tried[name].fisher for unit in found.units)
            points.append((math.log(max(total, TINY)), math.log(max(kl, TINY))))
    if not points:
        return lambda score: score
    points.sort()
    highest = -math.inf  # f must not fall: then a bound on the KL is a bound on the sum of scores
    rising = []
    for x, y in points:
        highest = max(highest, y)
        rising.append((x, highest))

    def predict(score: float) -> float:
        x = math.log(max(score, TINY))
        (first, bottom), (last, top) = rising[0], rising[-1]
        if x <= first:
            return math.exp(bottom + x - first)
        if x >= last:
            return math.exp(top + x - last)
        right = next(i for i, (at, _) in enumerate(rising) if at > x)
        (a, below), (b, above) = rising[right - 1 : right + 1]
        return math.exp(below + (above - below) * (x - a) / (b - a))

    return predict


def recipe_of(found: Sensitivity, chosen: Mapping[str, str]) -> dict[str, Any]:
    """An ordinary recipe: the passes of every chosen candidate, each with `only` for the layers of its units."""
    layers: dict[str, list[str]] = {}
    for unit in found.units:
        layers.setdefault(chosen[unit.name], []).extend(unit.layers)
    everything = [layer for unit in found.units for layer in unit.layers] + list(found.left_out)
    steps = []
    for name, passes in found.candidates.items():
        if name in layers:
            only = patterns_of(layers[name], everything)
            steps += [{**_short(step), "only": only} for step in passes]
    return {"passes": steps}


def _short(step: Mapping[str, Any]) -> dict[str, Any]:
    """A step without the options that have their default values (but with its scheme)."""
    ((name, options),) = step.items()
    known = options_of(pass_class(name))
    kept = {key: value for key, value in options.items() if key == "scheme" or value != known[key].default}
    return {name: kept}


def write_recipe(path: str | Path, allocation: Allocation, about: str) -> None:
    """Write a recipe that `compress quantize --recipe` runs. about: lines of comment for its beginning. Raises
    InputError where it cannot be written."""
    parse_recipe(allocation.recipe, "the recipe")
    lines = "".join(f"# {line}\n" for line in [*about.splitlines(), MARK])
    try:
        text = yaml.safe_dump(allocation.recipe, sort_keys=False, default_flow_style=None, width=110)
        write_whole(Path(path), lines + text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
