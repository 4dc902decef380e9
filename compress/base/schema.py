"""Checks JSON values against Python types: one check for everything that is read from a checkpoint.

    fits(value, Index, path)     # raises CheckpointError: "PATH: weight_map.x is 5; it must be a word"

Allowed types: int, float, str, bool, None, Any, `X | Y`, Literal, list, tuple, dict, TypedDict (other keys than those
that it names are allowed) and dataclasses (the keys are their fields, as `asdict` writes them). `built` converts a
value that fits back to the dataclass.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import repeat
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints, is_typeddict

from compress.base.errors import CheckpointError

LARGEST = 2**63  # whole numbers are below it: no count and no size needs more
SHOWN = 40  # characters of a value in a message
ABSENT = object()
NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    NoneType: "null",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}


class Misfit(NamedTuple):
    """A value of the wrong type, the keys that lead to it, and what it must be."""

    keys: tuple[str, ...]
    value: Any
    must: str

    def __str__(self) -> str:
        if self.value is ABSENT:
            return f"{''.join(self.keys).lstrip('.')} is missing; it must be {self.must}"
        shown = NAMES[type(self.value)] if isinstance(self.value, list | dict) else repr(self.value)
        shown = shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."
        return f"{''.join(self.keys).lstrip('.') or 'its content'} is {shown}; it must be {self.must}"


def fits(value: Any, kind: Any, where: object, *keys: str) -> None:
    """Raises CheckpointError, which names `where` and the key, for a JSON value with a part of the wrong type. keys:
    those that lead to the value."""
    wrong = next(misfits(value, kind, tuple(f".{key}" for key in keys)), None)
    if wrong is not None:
        raise CheckpointError(f"{where}: {wrong}")


def misfits(value: Any, kind: Any, keys: tuple[str, ...] = ()) -> Iterator[Misfit]:
    """Every part of a JSON value that is not of its type. keys: those that lead to `value`."""
    if kind is Any and value is not ABSENT:
        return
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        # Where no type of the union fits, report the misfit inside a container of the right kind, if there is one.
        wrong = [next(misfits(value, each, keys), None) for each in get_args(kind)]
        if None not in wrong:
            deeper = (each for each in wrong if each is not None and len(each.keys) > len(keys))
            yield next(deeper, Misfit(keys, value, name_of(kind)))
        return
    if not _holds(value, kind):
        yield Misfit(keys, value, name_of(kind))
        return
    closed: bool = is_dataclass(kind)
    if closed:
        unknown = (key for key in value if key not in _keys(kind)[0])
        yield from (Misfit((*keys, f".{key}"), value[key], "left out: it is not known") for key in unknown)
    for key, inside, expected in _parts(value, kind):
        yield from misfits(inside, expected, (*keys, key))


def built(value: Any, kind: Any) -> Any:
    """Converts a JSON value that fits a type to that type: dataclasses from mappings, tuples from lists."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return built(value, next(each for each in inner if next(misfits(value, each), None) is None))
    if is_dataclass(kind):
        made: Any = kind
        known = _keys(made)[0]
        return made(**{key: built(each, known[key]) for key, each in value.items()})
    if origin in (list, tuple):
        return origin(built(each, of) for _, each, of in _parts(value, kind))
    return {key: built(each, inner[1]) for key, each in value.items()} if origin is dict else value


def name_of(kind: Any) -> str:
    """The words for a type in a message."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(name_of, get_args(kind))))
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if origin is tuple and get_args(kind)[-1] is not ...:
        return f"a list of {len(get_args(kind))}"
    return "there" if kind is Any else NAMES.get(origin or kind, NAMES[dict])


def _holds(value: Any, kind: Any) -> bool:
    """True for a value of a type; the values inside are not looked at."""
    origin = get_origin(kind)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in get_args(kind))
    if kind in (NoneType, bool, str):
        return isinstance(value, kind)
    if kind in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST
        return whole or (kind is float and isinstance(value, float))
    if origin is tuple and get_args(kind)[-1] is not ...:
        return isinstance(value, list) and len(value) == len(get_args(kind))
    return isinstance(value, list if origin in (list, tuple) else dict)


def _parts(value: Any, kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """(key, value, type) of every value inside. A missing required key has the value ABSENT, which fits no type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (list, tuple):
        expected = inner if origin is tuple and inner[-1] is not ... else repeat(inner[0])
        yield from ((f"[{i}]", each, of) for i, (each, of) in enumerate(zip(value, expected, strict=False)))
    elif origin is dict:
        yield from ((f".{key}", each, inner[1]) for key, each in value.items())
    elif is_typeddict(kind) or is_dataclass(kind):
        known, required = _keys(kind)
        yield from ((f".{key}", value.get(key, ABSENT), known[key]) for key in known if key in value or key in required)


@cache
def _keys(kind: Any) -> tuple[Mapping[str, Any], frozenset[str]]:
    """({key: type} of a mapping, the required keys)."""
    if is_typeddict(kind):
        return get_type_hints(kind), frozenset(kind.__required_keys__)
    hints = get_type_hints(kind)
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    return {f.name: hints[f.name] for f in fields(kind)}, frozenset(required)
