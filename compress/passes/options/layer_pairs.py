"""Options that give single layers a number each, by their full names."""

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from compress.base.errors import InputError

N = TypeVar("N", int, float)


def layer_pairs(
    option: str, given: Any, number: Callable[[Any], N | None], called: str, like: N
) -> tuple[tuple[str, N], ...]:
    """Pairs of a layer and its number, as tuples. number: reads it, None where it is none that is allowed. Raises
    InputError for anything else, and for a layer that is named twice."""
    pairs = []
    for each in given if isinstance(given, tuple | list) else [given]:
        match each:
            case [str(layer), value] if (read := number(value)) is not None:
                pairs.append((layer, read))
            case _:
                raise InputError(
                    f"{option} {each!r}; allowed: [layer, {called}] pairs, like [model.layers.0.mlp.up_proj, {like}]"
                )
    if len(dict(pairs)) < len(pairs):
        raise InputError(f"{option} name a layer twice; give each once")
    return tuple(pairs)


def check_names(option: str, pairs: Collection[tuple[str, Any]], layers: Collection[str]) -> None:
    """Refuse pairs of layers that a pass does not treat. Raises InputError."""
    if strange := next((name for name, _ in pairs if name not in layers), None):
        raise InputError(f"{option} of {strange!r}, which is no layer of this pass; a layer is called {min(layers)!r}")
