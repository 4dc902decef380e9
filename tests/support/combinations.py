"""Few cases that cover many: what `pytest.mark.parametrize` takes instead of a full product."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any


def each(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every value of every axis at least once: as many cases as the longest axis has values."""
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(max(map(len, axes)))]


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every pair of values of any two axes at least once: the next case is one that has most of the missing pairs."""
    cases = list(product(*(range(len(axis)) for axis in axes)))
    missing = {pair for case in cases for pair in _pairs_of(case)}
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(missing.intersection(_pairs_of(case))))
        missing.difference_update(_pairs_of(best))
        chosen.append(best)
    return [tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in sorted(chosen)]


def _pairs_of(case: Sequence[int]) -> Iterable[tuple[tuple[int, int], ...]]:
    return combinations(enumerate(case), 2)
