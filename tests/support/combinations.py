"""Few cases that cover many: what `pytest.mark.parametrize` takes instead of a full product, or what replaces it."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import combinations, product
from typing import Any


def every(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test on all values in turn, as one case: `pytest.mark.parametrize` for cheap repetitions of one idea.

    A failure names its values. Fixtures are made once for all of them.
    """
    several = [names] if isinstance(names, str) else list(names)
    rows = [(value,) if isinstance(names, str) else tuple(value) for value in values]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def on_all(**fixtures: Any) -> None:
            for row in rows:
                chosen = dict(zip(several, row, strict=True))
                try:
                    test(**fixtures, **chosen)
                except BaseException as error:
                    error.add_note("where " + ", ".join(f"{name} = {value!r}" for name, value in chosen.items()))
                    raise

        signature = inspect.signature(test)
        fixtures = [p for name, p in signature.parameters.items() if name not in several]
        on_all.__signature__ = signature.replace(parameters=fixtures)
        del on_all.__wrapped__  # whose parameters pytest would look for
        return on_all

    return decorate


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
