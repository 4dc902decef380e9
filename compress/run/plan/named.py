"""Patterns of a run that match no layer: refused, or remarked on where what they name stays as it is anyway."""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from compress.errors import InputError
from compress.model.layers import Layer, token_tables
from compress.model.left_alone import left_alone
from compress.model.patterns import FORMS, matches
from compress.passes.protocol.base import Pass
from compress.run.plan.matching import Ignored


def remarks_on_patterns(
    model: nn.Module, passes: Sequence[Pass], layers: Sequence[Layer], ignored: Ignored, convolutions: bool
) -> list[str]:
    """Notes about patterns of `ignore` and `but` that only name what no pass would treat. Raises InputError for a
    pattern that names nothing, and for one of `only` that names nothing that its pass could treat."""
    known = [*(layer.name for layer in layers), *ignored.reasons]
    example = next(iter(known), "")
    others = {**{name: type(m).__name__ for name, m in parts_of(model)}, **left_alone(model, (), convolutions)}
    notes = []
    for pattern in ignored.patterns:
        if pattern not in ignored.matched:
            name = _other(f"ignore pattern {pattern!r}", pattern, others, example)
            notes.append(f"ignore {pattern!r} changes nothing: no pass treats {name} ({others[name]})")
    for p in passes:
        tables = [table.name for table in token_tables(model)] if p.treats == "embeddings" else None
        names, shown = (known, example) if tables is None else (tables, tables[0])
        for each in p.where:
            for pattern in each.patterns:
                if any(matches(name, pattern) for name in names):
                    continue
                spared = others if each.kind == "but" and tables is None else {}
                name = _other(f"pattern {pattern!r} of `{each.kind}` (pass {p.name!r})", pattern, spared, shown)
                notes.append(f"{p.name}: but {pattern!r} changes nothing: it does not treat {name} ({others[name]})")
    return notes


def _other(what: str, pattern: str, others: Mapping[str, str], example: str) -> str:
    """The first of some names that a pattern matches. Raises InputError where it matches none."""
    found = next((name for name in others if matches(name, pattern)), None)
    if found is None:
        raise InputError(f"{what} matches no layer; a layer is called {example!r}; {FORMS}")
    return found


def parts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(Name, module) of all modules that hold parameters, and no other modules."""
    for name, module in model.named_modules():
        if module._parameters and next(module.children(), None) is None:
            yield name, module
