"""The recipes that `fit` chooses among: a scheme for each layer and one for the embedding, by predicted KL.

    KL of a recipe ~ f(sum over units of their Fisher-weighted losses) + KL of the embedding's scheme alone

f goes through the uniform models (`search.budget.prediction`). What a layer makes up for of the errors before it is not
in it: `fit` corrects predictions by the KL that it measures of the first recipes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compress.base.errors import InputError
from compress.checkpoint.sensitivity import Sensitivity, Unit
from compress.passes.embeddings import Embeddings
from compress.passes.protocol.base import Pass
from compress.passes.train import Train
from compress.search.budget import Allocation, Budget, allocate
from compress.search.candidate import Candidate

STEPS = 12  # of the predicted front


@dataclass(frozen=True)
class TableOption:
    """A scheme of the token embedding, and of the output head with it. passes: none for the embedding as it is. saved:
    bytes of the weight files that it saves. kl: of the model with it alone, in nats per token."""

    name: str
    passes: tuple[Embeddings, ...]
    saved: int
    kl: float


AS_IT_IS = TableOption("as it is", (), 0, 0.0)


@dataclass(frozen=True)
class FitChoice:
    """A recipe. bytes: of all weight files. predicted_kl: nats per token, without correction. recovery: training behind
    the passes of layers, which changes no size."""

    allocation: Allocation
    table: TableOption
    bytes: int
    predicted_kl: float
    recovery: tuple[Train, ...] = ()

    @property
    def passes(self) -> tuple[Pass, ...]:
        """As `quantize` takes them."""
        return (*self.allocation.passes, *self.recovery, *self.table.passes)


def within_budget(found: Sensitivity, tables: Sequence[TableOption], budget: Budget) -> FitChoice | None:
    """The recipe of least predicted KL within a budget; None where none fits. Bits per weight are of the layers, which
    the embedding is none of: it stays as it is for them."""
    usable = tables if budget.bytes is not None else tables[:1]
    made = [_made(found, table, budget=budget) for table in usable]
    return min((each for each in made if each is not None), key=lambda each: each.predicted_kl, default=None)


def below_kl(found: Sensitivity, tables: Sequence[TableOption], kl: float) -> FitChoice | None:
    """The recipe of the fewest bytes with at most this predicted KL; None where none has so little."""
    made = [_made(found, table, max_kl=kl - table.kl) for table in tables if table.kl < kl]
    return min((each for each in made if each is not None), key=lambda each: each.bytes, default=None)


def best(found: Sensitivity, tables: Sequence[TableOption]) -> FitChoice:
    """The recipe of most bytes."""
    most = found.other_bytes + sum(
        max(each.bytes + each.header_bytes for each in unit.tried.values()) for unit in found.units
    )
    made = within_budget(found, tables[:1], Budget(bytes=most))
    assert made is not None
    return made


def predicted_front(found: Sensitivity, tables: Sequence[TableOption]) -> list[FitChoice]:
    """Recipes from the fewest bytes to the most, each the best of its budget."""
    ends = [
        [pick(each.bytes + each.header_bytes for each in unit.tried.values()) for unit in found.units]
        for pick in (min, max)
    ]
    least, most = (sum(end) + found.other_bytes for end in ends)
    least -= max(table.saved for table in tables)
    steps = [math.ceil(least * (most / least) ** (i / (STEPS - 1))) for i in range(STEPS)]
    made = [within_budget(found, tables, Budget(bytes=size)) for size in steps]
    return list({each.bytes: each for each in made if each is not None}.values())


def uniform_beside(found: Sensitivity, chosen: FitChoice) -> tuple[str, FitChoice] | None:
    """The one scheme for all layers that is nearest to a recipe in bytes, and its name, with the embedding as there;
    None where that is the recipe."""
    choices = []
    for name in found.candidates:
        if all(name in unit.tried for unit in found.units):
            units = [replace(unit, tried={name: unit.tried[name]}) for unit in found.units]
            size = sum(unit.tried[name].bytes + unit.tried[name].header_bytes for unit in units)
            budget = Budget(bytes=size + found.other_bytes - chosen.table.saved)
            one = _made(replace(found, units=units), chosen.table, budget=budget)
            choices.append((f"uniform-{name}", one))
    known = [(name, one) for name, one in choices if one is not None]
    nearest = min(known, key=lambda each: abs(each[1].bytes - chosen.bytes), default=None)
    same = nearest is None or nearest[1].allocation.chosen == chosen.allocation.chosen
    return None if same else nearest


def _made(
    found: Sensitivity, table: TableOption, budget: Budget | None = None, max_kl: float | None = None
) -> FitChoice | None:
    smaller = replace(found, other_bytes=found.other_bytes - table.saved)
    try:
        made = allocate(smaller, budget, max_kl=max_kl)
    except InputError:  # out of reach
        return None
    return FitChoice(made, table, made.total_bytes, made.predicted_kl + table.kl)


def as_run(
    words: Mapping[str, Sequence[Mapping[str, Any]]], schemes: Sequence[Candidate], names: Mapping[str, Iterable[str]]
) -> dict[str, list[Any]]:
    """Candidates in words, with some options of the schemes as they are run. names: {pass: these options}."""
    run = {p.name: p for scheme in schemes for p in scheme.passes}

    def options(step: str) -> dict[str, Any]:
        return {name: getattr(run[step], name) for name in names[step]}

    return {
        candidate: [{name: {**given, **options(name)} for name, given in step.items()} for step in steps]
        for candidate, steps in words.items()
    }


def with_sizes(found: Sensitivity, candidate: str, sizes: Mapping[str, int]) -> Sensitivity:
    """The same with other sizes of a candidate. sizes: {layer: bytes of its tensors}."""

    def sized(unit: Unit) -> Unit:
        if candidate not in unit.tried:
            return unit
        size = sum(sizes[layer] for layer in unit.layers)
        return replace(unit, tried={**unit.tried, candidate: replace(unit.tried[candidate], bytes=size)})

    return replace(found, units=[sized(unit) for unit in found.units])
